"""What a plan says of engines that are a step ahead of their trainer: `grpo.max_sample_age`."""

import pytest

from fp8_nemo.launch.environments import interpreters
from fp8_nemo.nemo_config.host import MAIN
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.describe import decision, describe
from fp8_nemo.plan.layout import choose
from fp8_nemo.plan.step_time import step_seconds
from fp8_nemo.recipe.compose import ComposeError

APART = ("cluster.rollout_gpus=4", "precision=fp8-linear", "correction=tis")
AGE = "grpo.max_sample_age=1"
LOOP, ENGINE = "grpo.async_grpo", "policy.generation.vllm_cfg.async_engine"
ASKED = "loss_fn.use_importance_sampling_correction"


def plan(*words):
    line = {word.partition("=")[0]: word for word in ("model=llama31-8b", *APART, *words)}
    [found] = compose_plans([*line.values()], lambda recipe: MAIN)
    return found


def written(*words):
    return plan(*words).nemo.overrides


def test_the_loop_and_its_engine_are_chosen_together_and_nothing_is_updated_in_flight():
    ahead, usual = written(AGE), written()
    assert (ahead[f"{LOOP}.enabled"], ahead[ENGINE]) == (True, True)
    assert ahead[f"{LOOP}.max_trajectory_age_steps"] == 1
    assert (usual[f"{LOOP}.enabled"], usual[ENGINE]) == (False, False)
    assert f"{LOOP}.max_trajectory_age_steps" not in usual
    prefixes = f"{LOOP}.recompute_kv_cache_after_weight_updates"
    assert ahead[prefixes] is True and prefixes not in usual
    assert not ahead.get(f"{LOOP}.in_flight_weight_updates")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("algorithm.stop_properly_penalty_coef=0", "algorithm.stop_properly_penalty_coef=0.0: "),
        ("algorithm.reward_target_min=0", "algorithm.reward_target_min=0.0: "),
        ("algorithm.overlong_buffer=0.5", "algorithm.overlong_buffer=0.5: "),
        ("algorithm.use_dynamic_sampling=true", "algorithm.use_dynamic_sampling=true: "),
        ("+nemo.grpo.use_dynamic_sampling=true", "nemo.grpo.use_dynamic_sampling=true: "),
        ("+nemo.grpo.reward_shaping.enabled=true", "nemo.grpo.reward_shaping.enabled=true: "),
        ("+nemo.grpo.reward_scaling.enabled=true", "nemo.grpo.reward_scaling.enabled=true: "),
        (
            f"+nemo.{LOOP}.recompute_kv_cache_after_weight_updates=false",
            f"nemo.{LOOP}.recompute_kv_cache_after_weight_updates=false: must be true",
        ),
    ],
)
def test_what_the_loop_would_silently_leave_out_is_refused(word, said):
    with pytest.raises(ComposeError) as caught:
        plan(AGE, word)
    line = str(caught.value).splitlines()[0]
    assert line.startswith(said) and ("synchronous" in line or "older weights" in line)
    assert word.startswith("+nemo.") or plan(word)  # those want a checkout, to be known


@pytest.mark.parametrize("correction", ["tis", "seq-mis"])
def test_nemo_rl_is_asked_for_a_correction_in_bf16_and_where_ours_multiplies_too(correction):
    words = ("precision=bf16", f"correction={correction}")
    assert written(AGE, *words)[ASKED] is True
    assert written(*words)[ASKED] is (correction == "tis")


def test_a_step_takes_the_longer_of_rollout_and_training_and_then_the_refit():
    ahead, usual = (step_seconds(plan(*words).settled) for words in ((AGE,), ()))
    trains = ahead.logprob + ahead.train + ahead.optimizer
    assert ahead.total == max(ahead.rollout, trains) + ahead.refit < usual.total
    assert choose(plan(AGE).settled, MAIN)[0].seconds.total == ahead.total


def test_the_plan_says_which_gpus_do_what_and_that_no_such_step_was_timed():
    made = plan(AGE)
    assert dict(describe(made, MAIN))["layout"].startswith("8 GPUs, 4 to train, 4 to sample. ")
    told = dict(decision(made, MAIN))
    assert "the longer of rollout and the others, then the refit; no such step" in told["step"]
    assert "cluster.rollout_gpus=0, grpo.max_sample_age=null" in told["shared"]
    assert "refused" not in told["shared"]
    [note] = [each for each in made.notes if each.startswith("cluster.rollout_gpus")]
    assert "the next step's answers while the others train" in note and "synchronous" not in note
    assert "no such step" not in dict(decision(plan(), MAIN))["step"]


def test_an_asynchronous_run_has_a_directory_of_its_own_and_others_keep_theirs():
    assert plan(AGE).run_name != plan().run_name == plan("grpo.max_sample_age=null").run_name


def test_the_environment_of_the_worker_that_runs_is_looked_at(monkeypatch):
    monkeypatch.setenv("NEMO_RL_ROOT", "/nemo")
    assert (
        "VllmAsyncGenerationWorker"
        in interpreters(plan(AGE, "cluster.interpreter=container"))["vLLM"]
    )
    assert (
        "VllmAsyncGenerationWorker"
        not in interpreters(plan("cluster.interpreter=container"))["vLLM"]
    )


def test_the_local_backend_refuses_it():
    words = ["model=tiny-llama", "backend=local", AGE]
    with pytest.raises(ComposeError) as caught:
        compose_plans(words)
    assert str(caught.value).startswith(
        "grpo.max_sample_age=1: backend=local samples and trains by turns; set null"
    )
