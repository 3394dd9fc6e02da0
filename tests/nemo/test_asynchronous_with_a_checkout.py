"""Ring 2: NeMo RL's asynchronous loop takes what the driver gives; a failed refit ends it."""

import asyncio
import importlib.util
import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fp8_nemo.glue.wire import RefitError
from fp8_nemo.launch import session
from fp8_nemo.nemo_config import checkout
from fp8_nemo.nemo_config.keys import ASYNC
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


ROUTED = (*LINE[1:], "model=small-qwen3-moe", "precision=fp8-linear", "replay=r3")
ALIGNED = (*LINE, "precision=fp8-linear", "precision.align=cheap")


def config_for(grpo, line, tmp_path):
    """NeMo RL's configuration of a run, whose vLLM was told of routes as `setup` does."""
    from nemo_rl.models.megatron.router_replay import configure_vllm_for_router_replay

    host = checkout.read_host(Path(ROOT or ""))
    [recipe] = compose([*line, "correction=tis"])
    plan = plan_recipe(recipe, host)
    keys = plan.nemo.overrides | path_overrides(plan.recipe, tmp_path, Path(host.root))
    config = grpo.MasterConfig(**checkout.config_of(Path(host.root), plan.nemo.base_config, keys))
    configure_vllm_for_router_replay(config.policy)
    return config


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


def test_a_refit_ends_the_prefixes_that_older_weights_made(grpo):
    from nemo_rl.algorithms.async_utils import AsyncTrajectoryCollector

    collector = object.__new__(AsyncTrajectoryCollector.__ray_metadata__.modified_class)
    asked = []
    engines = SimpleNamespace(invalidate_kv_cache=lambda: asked.append("prefixes") or True)
    collector.policy_generation, collector._refit_pause_cleared = engines, threading.Event()
    [recipe] = compose([*LINE, "precision=fp8-linear"])
    keys = plan_recipe(recipe, checkout.read_host(Path(ROOT or ""))).nemo.overrides
    given = {key.rpartition(".")[2]: keys[key] for key in keys if key.startswith(f"{ASYNC}.")}
    collector.async_config = grpo.AsyncGRPOConfig(**given)
    collector.resume_after_refit()
    assert asked == ["prefixes"] and collector._refit_pause_cleared.is_set()


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


class Engine:
    """Answers with drawn tokens, and a route for each token but the last, as vLLM outputs them."""

    def __init__(self, layers, experts):
        self.draw, self.layers, self.experts = np.random.default_rng(1), layers, experts
        self.routes = []

    async def generate(self, prompt, sampling_params, request_id):
        from vllm.outputs import CompletionOutput, RequestOutput

        prompt_ids, answer = (
            prompt["prompt_token_ids"],
            self.draw.integers(3, 99, 2 + len(self.routes)),
        )
        size = (len(prompt_ids) + len(answer) - 1, self.layers, 2)
        self.routes.append(self.draw.integers(0, self.experts, size))
        made = CompletionOutput(
            0, "", answer.tolist(), None, None, routed_experts=self.routes[-1], finish_reason="stop"
        )
        yield RequestOutput(request_id, None, prompt_ids, None, [made], finished=True)


def answered(worker, prompt):
    """One prompt's group of one answer, as NeMo RL's collector puts it into the replay buffer."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.experience.rollouts import generate_responses_async

    ids, lengths = torch.tensor([prompt]), torch.tensor([len(prompt)])
    log = [{"role": "user", "content": "", "token_ids": ids[0]}]
    batch = BatchedDataDict({"message_log": [log], "loss_multiplier": torch.ones(1)})
    data = BatchedDataDict({"input_ids": ids, "input_lengths": lengths})
    tokenizer = SimpleNamespace(pad_token_id=0, batch_decode=lambda ids, **_: ["" for _ in ids])
    found, *_ = asyncio.run(generate_responses_async(worker, data, batch, tokenizer, lengths))
    return found


def test_routes_of_the_asynchronous_engine_reach_the_trainer_through_the_replay_buffer(
    grpo, tmp_path
):
    from nemo_rl.algorithms.async_utils.replay_buffer import ReplayBufferImpl
    from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from vllm import SamplingParams

    from fp8_nemo.nemo.generation_worker import Fp8AsyncGenerationWorkerImpl

    config = config_for(grpo, ROUTED, tmp_path)
    assert not config.data_plane["enabled"], "with it the loop refuses the replay"
    worker = object.__new__(Fp8AsyncGenerationWorkerImpl)
    worker.cfg = {**config.policy["generation"], "_pad_token_id": 0, "stop_token_ids": [2]}
    worker.llm, worker.SamplingParams = Engine(layers=3, experts=8), SamplingParams
    worker.routed_experts_dtype = torch.int8
    buffer = ReplayBufferImpl(max_size=2, drop_incomplete_targets_on_restore=False)
    for prompt in ([5, 6, 7], [8, 9, 10, 11, 12]):
        group = {"batch": answered(worker, prompt), "rollout_metrics": {}}
        assert buffer.add(group, weight_version=0, target_weight_version=1) == "success"
    groups = buffer.sample(2, current_weight_version=1, max_age_steps=1)["trajectories"]

    batch = BatchedDataDict.from_batches([group["batch"] for group in groups])
    grpo.add_grpo_token_loss_masks_and_generation_logprobs(batch["message_log"])
    flat, lengths = batched_message_log_to_flat_message(
        batch["message_log"], pad_value_dict={"token_ids": 0}
    )
    data = grpo._build_async_grpo_train_data(flat, lengths, batch, config.policy)
    for row, given, length in zip(data["routed_experts"], worker.llm.routes, lengths, strict=True):
        assert torch.equal(row[: length - 1], torch.from_numpy(given).to(torch.int8))


def test_an_aligned_asynchronous_engine_is_asked_for_what_the_synchronous_one_is(
    grpo, tmp_path, monkeypatch
):
    """Its worker makes vLLM's objects of the keys; our plugin comes by `test_aligned.py`'s way."""
    from vllm.v1.engine.async_llm import AsyncLLM

    from fp8_nemo.nemo.generation_worker import Fp8AsyncGenerationWorkerImpl

    config = config_for(grpo, ALIGNED, tmp_path)
    asked = config.policy["generation"]["vllm_kwargs"]
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda made, **_: made)
    worker = object.__new__(Fp8AsyncGenerationWorkerImpl)
    worker.cfg = config.policy["generation"]
    worker._create_engine({"model": "any", "skip_tokenizer_init": True, **asked})
    made = worker.llm
    assert made.compilation_config.pass_config.fuse_norm_quant is False
    assert made.compilation_config.pass_config.fuse_act_quant is False
    assert made.ir_op_priority.rms_norm == ["vllm_c", "native"]
    assert made.ir_op_priority.fused_add_rms_norm == ["vllm_c", "native"]
