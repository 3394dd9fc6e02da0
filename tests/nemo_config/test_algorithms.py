"""Algorithms and replay as NeMo RL's keys: written where given, refused where they cannot be."""

import pytest

from fp8_nemo.nemo_config.own.loss import native_correction
from fp8_nemo.plan.plan import LATER_GROUPS, PlanError, plan_from_json
from fp8_nemo.recipe.compose import ComposeError, compose
from tests.nemo_config.test_plans import FILES, host, overrides, plan

CELL = ("model=llama31-8b", "precision=fp8-linear")
MOE = ("model=qwen3-30b-a3b",)
"""Whose routes are replayed unless the line says `replay=none`."""
SHAPING = "grpo.reward_shaping"


def given(*arguments, cell=CELL):
    """What a plan writes beyond that of `algorithm=grpo replay=none`."""
    plain, found = overrides(*cell), overrides(*cell, *arguments)
    return {key: value for key, value in found.items() if plain.get(key, ...) != value}


def test_grpo_writes_nothing_so_that_bases_and_old_lines_stay_as_they_are():
    assert given("algorithm=grpo", "replay=none") == {}
    own = overrides(
        *CELL,
        "+nemo.loss_fn.ratio_clip_max=0.28",
        "+nemo.grpo.normalize_rewards=false",
        host=host("main"),
    )
    assert (own["loss_fn.ratio_clip_max"], own["grpo.normalize_rewards"]) == (0.28, False)


def test_dapo_is_clip_higher_dual_clip_dynamic_sampling_and_overlong_shaping():
    # A layout chosen for it may move the optimizer where one for GRPO keeps it.
    same = ("grpo.kl_penalty=0", "grpo.max_new_tokens=16384", "model.memory.optimizer=move")
    assert given("algorithm=dapo", *same) == {
        **given(*same),
        "grpo.use_leave_one_out_baseline": False,
        "grpo.adv_estimator.use_leave_one_out_baseline": False,
        "loss_fn.ratio_clip_min": 0.2,
        "loss_fn.ratio_clip_max": 0.28,
        "loss_fn.ratio_clip_c": 10.0,
        "grpo.use_dynamic_sampling": True,
        "grpo.dynamic_sampling_max_gen_batches": 10,
        "grpo.batch_multiplier": 3.0,
        f"{SHAPING}.enabled": True,
        f"{SHAPING}.overlong_buffer_length": 2048,
        f"{SHAPING}.overlong_buffer_penalty": 1.0,
        f"{SHAPING}.max_response_length": 16384,
        f"{SHAPING}.stop_properly_penalty_coef": None,
        "grpo.reward_scaling.enabled": True,
        "grpo.reward_scaling.target_min": -1.0,
        "policy.generation.vllm_kwargs.compilation_config.cudagraph_capture_sizes": [
            1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512,
        ],
    }  # fmt: skip


def test_the_others_are_the_keys_of_nemo_rls_loss_and_estimator():
    assert given("algorithm=rloo") == {
        "grpo.normalize_rewards": False,
        "grpo.adv_estimator.normalize_rewards": False,
        "grpo.use_leave_one_out_baseline": True,
        "grpo.adv_estimator.use_leave_one_out_baseline": True,
        "loss_fn.disable_ppo_ratio": True,
    }
    assert given("algorithm=reinforce++") == {
        "grpo.adv_estimator.name": "reinforce_plus_plus",
        "grpo.adv_estimator.minus_baseline": True,
    }
    assert given("algorithm=cispo") == {
        "loss_fn.use_cispo": True,
        "loss_fn.ratio_clip_min": 1.0,
        "loss_fn.ratio_clip_max": 5.0,
    }
    assert given("algorithm=gspo") == {
        "loss_fn.sequence_level_importance_ratios": True,
        "loss_fn.token_level_loss": False,
        "loss_fn.truncated_importance_sampling_type": None,
        "loss_fn.truncated_importance_sampling_ratio": None,
    }


def test_with_one_ratio_a_sequence_no_correction_is_left_to_nemo_rls_loss():
    [gspo] = compose(["algorithm=gspo", "correction=tis"])
    [grpo] = compose(["correction=tis"])
    assert native_correction(gspo) is None and native_correction(grpo) is not None
    found = overrides(*CELL, "algorithm=gspo", "correction=tis")
    assert found["loss_fn.truncated_importance_sampling_type"] is None
    notes = plan(*CELL, "algorithm=gspo", "correction=tis").notes
    assert any("tis with one ratio a sequence, it multiplies the advantages" in n for n in notes)


def test_warm_up_and_gradient_clip_are_megatrons():
    assert given("grpo.warmup_steps=20", "grpo.max_grad_norm=0.5") == {
        "policy.megatron_cfg.scheduler.lr_warmup_iters": 20,
        "policy.megatron_cfg.optimizer.clip_grad": 0.5,
    }


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("grpo.warmup_steps=1000",),
            "grpo.warmup_steps=1000: must be below the schedule's 1000 steps",
        ),
        (
            ("algorithm=dapo", "+nemo.loss_fn.ratio_clip_max=0.3"),
            "nemo.loss_fn.ratio_clip_max=0.3: is written by algorithm.ratio_clip_max",
        ),
        (
            ("grpo.max_grad_norm=0.5", "+nemo.policy.megatron_cfg.optimizer.clip_grad=2.0"),
            "is written by grpo.max_grad_norm; set that instead",
        ),
        (
            ("+nemo.loss_fn.sequence_level_importance_ratios=true",),
            "must be false: set algorithm=gspo",
        ),
        (("+nemo.policy.router_replay.enabled=true",), "is written by replay; set that instead"),
    ],
    ids=str,
)
def test_what_a_line_cannot_ask_for_is_one_line(arguments, line):
    with pytest.raises(PlanError) as error:
        plan(*CELL, *arguments, host=host("main"))
    [mistake] = str(error.value).splitlines()
    assert line in mistake


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("algorithm=cispo", "algorithm.ratio_clip_c=3"), "algorithm.use_cispo=true has none"),
        (("algorithm=rloo", "algorithm.ratio_clip_c=3"), "disable_ppo_ratio=true has none"),
        (("algorithm=gspo", "algorithm.token_level_loss=true"), "weighs sequences alike"),
        (("algorithm=cispo", "algorithm.token_level_loss=false"), "weighs tokens alike"),
        (("algorithm=cispo", "algorithm.disable_ppo_ratio=true"), "that this leaves out"),
        (("algorithm.use_kl_in_reward=true",), "is Reinforce++'s"),
        (("algorithm.batch_multiplier=2",), "need dynamic sampling"),
        (("algorithm=dapo", "algorithm.stop_properly_penalty_coef=0.5"), "NeMo RL ignores it"),
        (("algorithm.ratio_clip_c=1",), "must be above 1"),
        (
            ("algorithm=gspo", "correction=mis", "correction.renormalize_denominator=true"),
            "would take rejected tokens out of the sequence's ratio too",
        ),
        (("replay=r3",), "is dense, and has no router"),
    ],
    ids=str,
)
def test_what_excludes_each_other_is_one_line_on_either_backend(arguments, line):
    with pytest.raises(ComposeError) as error:
        compose(list(arguments))
    [mistake] = str(error.value).splitlines()
    assert line in mistake


def test_replay_asks_vllm_for_every_route():
    plain, found = overrides(*MOE, "replay=none"), overrides(*MOE)
    assert {key: value for key, value in found.items() if plain.get(key, ...) != value} == {
        "policy.router_replay.enabled": True,
        "policy.generation.vllm_cfg.enable_prefix_caching": False,
        "policy.generation.vllm_kwargs.enable_chunked_prefill": False,
    }


def test_the_fused_router_is_refused_beside_replay_alone():
    word = "+nemo.policy.megatron_cfg.model_overrides.moe_router_fusion=true"
    plan(*MOE, "replay=none", word, host=host("main"))
    with pytest.raises(PlanError, match=r"moe_router_fusion=true: must be false with replay=r3"):
        plan(*MOE, word, host=host("main"))


@pytest.mark.parametrize("version", FILES)
def test_both_versions_replay_in_the_synchronous_loop(version):
    found = plan(*MOE, "precision=fp8-linear", host=host(version)).nemo.overrides
    assert found["policy.router_replay.enabled"] is True


@pytest.mark.parametrize("version", FILES)
@pytest.mark.parametrize("name", ["dapo", "rloo", "reinforce++", "cispo", "gspo"])
def test_every_key_of_an_algorithm_is_the_bases_own_in_both_versions(version, name):
    there = host(version)
    found = plan(*CELL, f"algorithm={name}", host=there).nemo
    extra = set(given(f"algorithm={name}"))
    assert extra <= set(there.bases[found.base_config]) | {
        "policy.generation.vllm_kwargs.compilation_config.cudagraph_capture_sizes",
        "policy.generation.vllm_kwargs.kv_cache_memory_bytes",
    }


def test_an_earlier_run_keeps_its_name_and_a_plan_of_before_is_read():
    before = plan("model=tiny-llama", "precision=bf16", "correction=none", "backend=local")
    assert before.hash6 == "ee4ab0"
    content = before.to_json()
    for group in LATER_GROUPS:
        del content["recipe"][group]
    for key in ("warmup_steps", "max_grad_norm"):
        del content["recipe"]["grpo"][key]
    assert plan_from_json(content) == before
    named = [
        plan("model=tiny-qwen3-moe", "backend=local", *more).hash6
        for more in ((), ("replay=r3",), ("algorithm=gspo",), ("algorithm.ratio_clip_c=10",))
    ]
    assert len(set(named)) == 4
