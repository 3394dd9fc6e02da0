"""LoRA in a plan: NeMo RL's keys, what is refused, and the bytes and seconds of adapters."""

import pytest

from fp8_nemo.plan.describe import describe, precisions
from fp8_nemo.plan.memory import checkpoint_gib, host_gib, memory_per_gpu, trained_parameters
from fp8_nemo.plan.plan import PlanError, plan_from_json
from fp8_nemo.plan.step_time import step_seconds
from fp8_nemo.recipe.compose import ComposeError
from tests.nemo_config.test_plans import FILES, GIVEN, MAIN, host, overrides, plan

LLAMA = ("model=llama31-8b", "precision=fp8-linear", *GIVEN)
LORA = (*LLAMA, "lora=all-linear")
MOE = ("model=qwen3-30b-a3b", "precision=bf16", *GIVEN)
PEFT = "policy.megatron_cfg.peft"
LAYER = (4096 + 6144) + (4096 + 4096) + (4096 + 2 * 14336) + (14336 + 4096)
"""Columns of A and rows of B of 8B's four linears."""
TRAINED = 32 * 32 * LAYER
WEIGHTS = 8_030_261_248


@pytest.mark.parametrize("version", FILES)
def test_every_key_that_nemo_rl_reads_is_written_and_none_without_lora(version):
    there = host(version)
    written = overrides(*LORA, host=there)
    assert {key: value for key, value in written.items() if key.startswith(PEFT)} == {
        f"{PEFT}.enabled": True,
        f"{PEFT}.target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
        f"{PEFT}.exclude_modules": [],
        f"{PEFT}.dim": 32,
        f"{PEFT}.alpha": 32,
        f"{PEFT}.dropout": 0.0,
        f"{PEFT}.dropout_position": "pre",
        f"{PEFT}.lora_A_init_method": "xavier",
        f"{PEFT}.lora_B_init_method": "zero",
        f"{PEFT}.a2a_experimental": False,
        f"{PEFT}.lora_dtype": None,
    }
    base = there.bases["examples/configs/grpo_math_8B_megatron.yaml"]
    assert {key for key in base if key.startswith(f"{PEFT}.")} <= set(written)
    plain = overrides(*LLAMA, "grpo.learning_rate=1e-5", host=there)
    assert not [key for key in plain if key.startswith(PEFT)]
    other = [key for key in written if not key.startswith(PEFT) and written[key] != plain[key]]
    assert other == []


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["precision=fp8-e2e"], "lora=all-linear: trains in BF16, and precision.train_linear=fp8:"),
        (["lora.rank=12", "model.parallel.tensor=8"], "lora.rank=12: must be a multiple of model"),
        (["lora.target_modules=[q_proj]"], "lora.target_modules=q_proj: must be some of linear_qk"),
        (["lora.target_modules=[]"], "lora.target_modules=[]: must be some of linear_qkv"),
        (["lora.rank=null"], "lora.rank=null: adapters have a rank; give a number, or choose lora"),
        (["lora.alpha=null"], "lora.alpha=null: scales the adapters"),
        ([f"+nemo.{PEFT}.dim=8"], f"nemo.{PEFT}.dim=8: is written by lora.rank; set that"),
        ([f"+nemo.{PEFT}.dropout=0.1"], f"nemo.{PEFT}.dropout=0.1: must be 0.0: it would change"),
    ],
)
def test_what_cannot_be_is_one_line(words, line):
    with pytest.raises((ComposeError, PlanError)) as refused:
        plan(*LORA, *words)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


def test_a_run_without_lora_keeps_its_name_and_an_older_plan_is_read():
    cell = ("model=tiny-llama", "precision=bf16", "correction=none", "backend=local")
    before = plan(*cell)
    assert before.hash6 == plan(*cell, "lora=none").hash6 == "ee4ab0"
    content = before.to_json()
    del content["recipe"]["lora"]
    assert plan_from_json(content) == before
    names = {plan(*LORA, *more).hash6 for more in ([], ["lora.rank=64"], ["lora.alpha=64"])}
    assert len(names | {plan(*LLAMA).hash6, plan(*LLAMA, "lora=attention").hash6}) == 5


def test_memory_has_gradients_and_optimizer_of_adapters_alone_and_frozen_weights_stay():
    settled, plain = plan(*LORA).settled, plan(*LLAMA).settled
    here, there = memory_per_gpu(settled).phases, memory_per_gpu(plain).phases
    assert trained_parameters(settled) == TRAINED
    assert here["train"]["weights"] == 2 * (WEIGHTS + TRAINED)
    assert here["train"]["gradients"] == 2 * TRAINED
    assert here["train"]["optimizer"] == 10 * TRAINED / 8
    assert here["rollout"]["frozen weights"] == 2 * WEIGHTS
    assert here["refit"]["merging"] == 12 * 14336 * 4096
    assert there["rollout"]["frozen weights"] == there["refit"]["merging"] == 0
    assert here["rollout"]["engine"] == there["rollout"]["engine"]
    assert checkpoint_gib(settled) == 14 * TRAINED / 2**30
    engine = here["rollout"]["engine"]
    stock = (1 + 4 / 3) * 2 * TRAINED  # copies weights, then copies the copy
    reference = 2 * 4 / 3 * 2 * (WEIGHTS + TRAINED)
    each = stock + reference + 10 * TRAINED / 8 + 4 / 3 * engine
    converted = 4 / 3 * 2 * WEIGHTS  # stays, and is more than a checkpoint
    assert host_gib(settled) == pytest.approx((8 * each + converted) / 2**30)


def test_tensor_ranks_share_adapters_and_the_experts_of_a_gpu_have_one():
    two = plan(*LORA, "model.parallel.tensor=2", "model.parallel.rollout_tensor=1").settled
    assert memory_per_gpu(two).phases["train"]["gradients"] == TRAINED
    moe = plan(*MOE, "lora=all-linear", "model.parallel.expert=8").settled
    attention = (2048 + 4096 + 2 * 512) + (4096 + 2048)
    experts = (2048 + 2 * 768) + (768 + 2048)
    assert trained_parameters(moe) == 48 * 32 * (attention + 8 * experts)
    assert memory_per_gpu(moe).phases["train"]["gradients"] == 2 * 48 * 32 * (attention + experts)


def test_training_makes_no_gradient_of_frozen_weights_and_adapters_take_their_own_time():
    here, plain = (step_seconds(plan(*each).settled) for each in (LORA, LLAMA))
    assert 0.9 * plain.train < here.train < 0.95 * plain.train  # forward twice, as it recomputes
    assert 1.15 * plain.logprob < here.logprob < 1.25 * plain.logprob
    assert here.rollout == plain.rollout
    assert 0.75 * plain.refit < here.refit < 0.85 * plain.refit  # it moves no frozen weight
    assert here.optimizer < plain.optimizer / 50


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(
    ("words", "resent"),
    [
        ([], ATTENTION),
        (["precision=bf16"], ATTENTION),
        (["precision=fp8-kv-attn"], ATTENTION),
        (["lora.target_modules=[linear_qkv]"], ATTENTION[:3]),
        (["precision=bf16", "glue.transfer=bf16"], ATTENTION),  # it travels as it is held
        (["glue.transfer=bf16"], ()),
        (["glue.quantize=stock", "glue.transfer=bf16"], ()),
        (["glue.verify=names"], ()),
        (["noise=aqn", "noise.steps=500"], ()),
        (["precision=nvfp4-w4a16"], ()),
        (["lora=none"], ()),
        (["model=tiny-llama", "backend=local"], ()),
    ],
)
def test_refits_send_what_adapters_change_where_the_rest_is_proven_again(words, resent):
    assert plan(*LLAMA, "glue=ours", "lora=attention", *words).recipe.resent == resent


def test_refits_of_what_adapters_change_take_less_by_a_plan():
    shares = []
    for model in (LLAMA, (*MOE, "precision=fp8-linear", "replay=none")):
        given = ("glue=ours", "lora=attention")
        cells = (given, (*given, "glue.verify=names"))
        some, whole = (step_seconds(plan(*model, *each).settled).refit for each in cells)
        shares.append(some / whole)
    assert shares == pytest.approx([0.61, 0.17], abs=0.01)  # experts' launches outweigh bytes


def test_the_gains_of_other_precisions_leave_out_those_that_lora_excludes():
    told = dict(precisions(plan(*LORA), MAIN))["precisions"]
    assert "fp8-kv-attn" in told and "e2e" not in told
    assert "fp8-e2e" in precisions(plan(*LLAMA, "cluster.gpu=h200"), MAIN)[0][1]


def test_a_plan_says_how_much_is_trained_and_what_adapters_bring_along():
    found = plan(*LORA)
    rows = dict(describe(found, MAIN))
    assert rows["lora"].startswith(f"{TRAINED:,} parameters are trained, 0.89% of all")
    assert rows["lora"].endswith("a refit sends merged weights, as many bytes as without")
    ours = dict(describe(plan(*LORA, "glue=ours"), MAIN))["lora"]
    assert ours.endswith("refits after the first send 7.0 GB, the weights with adapters, merged")
    assert rows["refit"] == dict(describe(plan(*LLAMA), MAIN))["refit"]
    assert found.settled.learning_rate == 1e-5
    assert not [note for note in found.notes if note.startswith("grpo.learning_rate")]
    slow = plan(*LORA, "grpo.learning_rate=3e-7").notes
    assert any(note.startswith("grpo.learning_rate: 3e-07") for note in slow)
    moe = plan(*MOE, "lora=all-linear").notes
    shared = "lora.target_modules: the experts of a GPU share one adapter"
    assert any(note.startswith(shared) for note in moe)
    assert not [note for note in found.notes if note.startswith(shared)]
