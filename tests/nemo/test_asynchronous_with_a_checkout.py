"""Ring 2: NeMo RL's asynchronous loop takes what the driver gives; a failed refit ends it."""

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8_nemo.glue.wire import RefitError
from fp8_nemo.launch import session
from fp8_nemo.nemo_config import checkout
from fp8_nemo.nemo_config.overrides import path_overrides
from fp8_nemo.nemo_config.versions import V0_7_0_DEFECTS
from fp8_nemo.plan.plan import plan_recipe
from fp8_nemo.recipe.compose import compose

ROOT = os.environ.get("NEMO_RL_ROOT")
pytestmark = pytest.mark.skipif(
    not ROOT or importlib.util.find_spec("ray") is None or sys.version_info < (3, 12),
    reason="NeMo RL's packages are not installed here (docs/install.md)",
)
LINE = (
    *("model=small-llama", "backend=nemo", "data=running-sum", "cluster.gpus_per_node=2"),
    *("cluster.rollout_gpus=1", "grpo.max_sample_age=1"),
)


@pytest.fixture
def grpo(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    if checkout.read_host(Path(ROOT or "")).defects == V0_7_0_DEFECTS:
        pytest.skip("v0.7.0 takes one pass of the data, and is refused")
    from nemo_rl.algorithms import grpo

    return grpo


def parts_of(**given):
    empty = dict.fromkeys(session.Session._fields)
    return session.Session(**empty | {"checkpointer": SimpleNamespace()} | given)


@pytest.mark.parametrize("correction", ["tis", "seq-mis"])
@pytest.mark.parametrize("precision", ["bf16", "fp8-linear", "fp8-e2e"])
def test_nemo_rls_parser_takes_the_loop_its_engine_and_its_correction(
    precision, correction, grpo, tmp_path
):
    host = checkout.read_host(Path(ROOT or ""))
    [recipe] = compose([*LINE, f"precision={precision}", f"correction={correction}"])
    plan = plan_recipe(recipe, host)
    keys = plan.nemo.overrides | path_overrides(plan.recipe, tmp_path, Path(host.root))
    config = grpo.MasterConfig(**checkout.config_of(Path(host.root), plan.nemo.base_config, keys))
    loop = config.grpo.async_grpo
    assert (loop.enabled, loop.max_trajectory_age_steps) == (True, 1)
    assert (loop.in_flight_weight_updates, loop.max_generation_failures) == (False, 0)
    assert config.loss_fn.use_importance_sampling_correction is True
    assert grpo.should_use_async_rollouts(config.policy["generation"])


def test_a_session_is_the_loops_arguments_in_order_and_its_data_never_end(grpo, monkeypatch):
    taken = {}
    stock = inspect.signature(grpo.async_grpo_train)

    def loop(*arguments, **named):
        taken.update(stock.bind(*arguments, **named).arguments)

    monkeypatch.setattr(grpo, "async_grpo_train", loop)
    names = ("policy", "generation", "validation_loader", "tokenizer", "loss_fn", "config")
    given = {name: name for name in (*names, "environments", "validation_environments", "state")}
    session.run_grpo(parts_of(loader=["only batch"], **given), "ours", 1)
    batches = iter(taken.pop("dataloader"))
    assert [next(batches) for _ in range(3)] == ["only batch"] * 3
    assert taken.pop("checkpointer") is not None
    assert taken == {
        "policy": "policy", "policy_generation": "generation", "val_dataloader":
        "validation_loader", "tokenizer": "tokenizer", "loss_fn": "loss_fn", "task_to_env":
        "environments", "val_task_to_env": "validation_environments", "logger": "ours",
        "grpo_save_state": "state", "master_config": "config", "max_trajectory_age_steps": 1,
    }  # fmt: skip


def refits(grpo, monkeypatch, lands):
    """NeMo RL's own refit over NCCL, whose engines say whether it landed; who was asked why."""
    monkeypatch.setattr(grpo.ray, "get", lambda found: found)
    generation = SimpleNamespace(update_weights_from_collective=lambda: [lands], alive=True)
    policy = SimpleNamespace(broadcast_weights_for_collective=lambda **_: [])

    def problems(asked):
        assert asked is generation and generation.alive, "engines are asked before they are gone"
        return ["k_proj.weight: never arrived"]

    monkeypatch.setattr(session, "refit_problems", problems)
    return policy, generation


def swallows(grpo, policy, generation):
    """Refit first as `async_grpo_train` does: print what failed, and return."""
    try:
        grpo.refit_policy_generation(policy, generation, False)
    except Exception as error:
        print(error)


def shuts_down(grpo, policy, generation):
    """Refit after an update as `async_grpo_train` does: shut the engines down, whatever happens."""
    try:
        grpo.refit_policy_generation(policy, generation, False)
    finally:
        generation.alive = False


@pytest.mark.parametrize("loop", [swallows, shuts_down])
@pytest.mark.parametrize("lands", [True, False])
def test_a_refit_that_fails_ends_the_run_and_names_its_tensors(loop, lands, grpo, monkeypatch):
    policy, generation = refits(grpo, monkeypatch, lands)
    stock = grpo.refit_policy_generation
    monkeypatch.setattr(
        grpo,
        "async_grpo_train",
        lambda policy, generation, *_, **__: loop(grpo, policy, generation),
    )
    parts = parts_of(policy=policy, generation=generation, loader=[])
    if lands:
        session.run_grpo(parts, None, 1)
    else:
        with pytest.raises(RefitError) as caught:
            session.run_grpo(parts, None, 1)
        assert caught.value.problems == ["k_proj.weight: never arrived"]
    assert grpo.refit_policy_generation is stock


def test_the_loop_looks_its_refit_up_where_ours_is_put(grpo):
    """A refit that it took by another name would go unproven."""
    assert "refit_policy_generation" in grpo.async_grpo_train.__code__.co_names
    assert "refit_policy_generation" not in grpo.async_grpo_train.__code__.co_varnames


def test_an_asynchronous_run_goes_as_far_as_asking_ray_for_a_gpu(grpo, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([ROOT or "", *sys.path]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = [sys.executable, "-m", "fp8_nemo.recipes.grpo", *LINE, "model=tiny-llama"]
    command.remove("model=small-llama")
    command += ["precision=fp8-linear", "correction=tis", "cluster.interpreter=system"]
    command += ["glue=stock", f"outputs={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    said = done.stderr.strip().splitlines()
    assert done.returncode == 1 and any("ResourceInsufficientError" in line for line in said), said
    [run] = tmp_path.glob("tiny-llama/*/*")
    assert "Training dataset loaded" in (run / "log" / "attempt-1.log").read_text()
