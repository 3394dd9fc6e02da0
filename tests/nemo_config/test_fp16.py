"""FP16 in a plan: NeMo RL's keys, what does not go with it, and its FP32 gradients and masters."""

import json

import pytest

from fp8_nemo.nemo.worker_settings import VARIABLE, WorkerSettings
from fp8_nemo.nemo_config.own.fp16 import REDUCED
from fp8_nemo.plan.memory import memory_per_gpu
from fp8_nemo.plan.plan import PlanError
from fp8_nemo.recipe.compose import ComposeError
from fp8_nemo.recipe.settled import GROWTH_INTERVAL
from tests.nemo_config.test_plans import FILES, GIVEN, MEGATRON, VLLM, host, overrides, plan

LLAMA = ("model=llama31-8b", *GIVEN)
FP16 = (*LLAMA, "precision=fp16")


@pytest.mark.parametrize("version", FILES)
def test_trainer_optimizer_and_engine_are_told_and_bf16_plans_are_as_before(version):
    there, at = host(version), f"{MEGATRON}.optimizer"
    wanted = {
        "policy.precision": "float16",
        f"{VLLM}.precision": "float16",
        f"{VLLM}.kv_cache_dtype": "auto",
        f"{at}.bf16": False,
        f"{at}.fp16": True,
        f"{at}.use_precision_aware_optimizer": False,
        f"{at}.initial_loss_scale": 2.0**32,
        f"{at}.loss_scale_window": GROWTH_INTERVAL,
        f"{at}.hysteresis": 1,
        f"{MEGATRON}.fp8_cfg.enabled": False,
        REDUCED: True,
    }
    given = "precision.loss_scale=4294967296"
    assert wanted.items() <= overrides(*FP16, given, host=there).items()
    plain = overrides(*LLAMA, "precision=bf16", host=there)
    assert not {"policy.precision", f"{at}.fp16", f"{at}.hysteresis", REDUCED} & plain.keys()
    assert there.bases
    base = there.bases["examples/configs/grpo_math_8B_megatron.yaml"]
    assert base[f"{MEGATRON}.pipeline_dtype"] == "${policy.precision}"  # follows by itself


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["precision.rollout_linear=fp8"], "precision.rollout_linear=fp8: must be fp16"),
        (["precision.rollout_kv=fp8"], "precision.rollout_kv=fp8: needs precision.rollout_linear"),
        (["precision.train_linear=fp8"], "precision.train_linear=fp8: needs precision.rollout_li"),
        (["+nemo.policy.precision=bfloat16"], "nemo.policy.precision=bfloat16: is written by pre"),
        ([f"+nemo.{MEGATRON}.optimizer.initial_loss_scale=8"], f"nemo.{MEGATRON}.optimizer.initi"),
    ],
)
def test_what_does_not_go_with_fp16_is_one_line(words, line):
    with pytest.raises((ComposeError, PlanError)) as error:
        plan(*FP16, *words)
    assert str(error.value).splitlines()[0].startswith(line)


def test_a_loss_that_goes_without_the_loss_scale_is_no_matter_in_bf16():
    given = f"+nemo.{MEGATRON}.moe_router_load_balancing_type=aux_loss"
    assert plan("model=qwen3-30b-a3b", *GIVEN, "precision=bf16", given, host=host("main"))


def test_fp16_trains_with_fp32_gradients_and_whole_masters_of_which_masters_stay():
    bf16, fp16 = (
        memory_per_gpu(plan(*LLAMA, f"precision={each}", "model.memory.optimizer=keep").settled)
        for each in ("bf16", "fp16")
    )
    trained = bf16.phases["train"]["weights"] / 2
    spread = bf16.phases["train"]["optimizer"] / 10
    train, kept = fp16.phases["train"], fp16.phases["rollout"]
    assert train["gradients"] == 4 * trained == 2 * bf16.phases["train"]["gradients"]
    assert (train["optimizer"], train.get("gradients of masters", 0)) == (12 * spread, 0)
    assert (kept["masters"], kept["moments"], kept["their gradients"]) == (
        4 * spread,
        8 * spread,
        0,
    )


def test_the_policys_worker_is_ours_in_fp16_with_stocks_glue_too():
    for precision, ours in (("bf16", False), ("fp16", True)):
        recipe = plan(*LLAMA, f"precision={precision}", "glue=stock").recipe
        settings = WorkerSettings.of(recipe, loss_corrects=True)
        assert settings.needs_plugin is ours is bool(settings.to_environment())
        assert settings.wire_precision == settings.precision
    assert json.loads(settings.to_environment()[VARIABLE])["precision"]["train_linear"] == "fp16"
