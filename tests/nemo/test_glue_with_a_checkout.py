"""Our subclasses against NeMo RL's own classes: what we override is there, as expected.

With NEMO_RL_ROOT alone the source is read; what imports `nemo_rl` and vLLM needs their environment
(docs/install.md). Both supported versions are meant to pass.
"""

import ast
import importlib.util
import json
import os
import socket
import struct
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp8_nemo.glue.manifest import MANIFEST, SENTINEL
from fp8_nemo.launch.engine_checks import EngineError, stop_if_it_cannot_sleep_or_wake

ROOT = os.environ.get("NEMO_RL_ROOT")
pytestmark = pytest.mark.skipif(not ROOT, reason="NEMO_RL_ROOT: no checkout of NeMo RL")
imports = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="NeMo RL's packages are not installed here (docs/install.md)",
)
BACKEND = "nemo_rl/models/generation/vllm/vllm_backend.py"
WORKER = "nemo_rl/models/policy/workers/megatron_policy_worker.py"
MICROBATCHES = "nemo_rl/models/megatron/data.py"
POLICY = "nemo_rl/models/policy/lm_policy.py"
OURS = Path(__file__).parents[2] / "fp8_nemo" / "nemo"
HOST_ALONE = {"_weight_update_errors_are_fatal"}
"""Overridden for main; v0.7.0 swallows the error and returns False, which our receiver raises."""


def methods(file, name):
    """Arguments of each method of a class, in their order, and whether more keywords are taken."""
    tree = ast.parse(Path(file).read_text())
    [found] = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name]
    each = {}
    for node in found.body:
        if isinstance(node, ast.FunctionDef):
            names = [a.arg for a in node.args.posonlyargs + node.args.args]
            each[node.name] = names, [a.arg for a in node.args.kwonlyargs], node.args
    return each


PAIRS = [
    (OURS / "receiver.py", "Receiver", BACKEND, "VllmInternalWorkerExtension"),
    (OURS / "policy_worker.py", "Fp8PolicyWorkerImpl", WORKER, "MegatronPolicyWorkerImpl"),
    (OURS / "policy.py", "WatchedPolicy", POLICY, "Policy"),
]


@pytest.mark.parametrize(("ours", "our_name", "theirs", "their_name"), PAIRS)
def test_every_method_that_we_override_is_there_and_takes_what_ours_takes(
    ours, our_name, theirs, their_name
):
    stock = methods(Path(ROOT) / theirs, their_name)
    overridden = 0
    for name, (names, keywords, arguments) in methods(ours, our_name).items():
        own = name.startswith("fp8_nemo_") or name in ("__init__", "take_row")
        if own or (name.startswith("_") and name not in stock and our_name == "WatchedPolicy"):
            assert name == "__init__" or name not in stock
            continue
        if name not in stock:
            assert name in HOST_ALONE, f"{their_name} has no {name}"
            continue
        overridden += 1
        their_names, their_keywords, _ = stock[name]
        assert names == their_names[: len(names)], name
        assert set(keywords) <= {*their_keywords, *their_names}, name
        passes_on = arguments.vararg is not None or arguments.kwarg is not None
        rest = {*their_names, *their_keywords} - {*names, *keywords}
        assert passes_on or not rest, f"{name} does not pass on {rest}"
    assert overridden >= 3


def test_what_our_worker_reads_of_nemo_rls_is_there():
    seams = {
        WORKER: (
            "_iter_params_with_optional_kv_scales(",
            "self.model.eval()",
            "self.refit_conversion_tasks",
            "self.megatron_bridge.export_hf_weights(",
        ),
        MICROBATCHES: ('"input_lengths"',),
        BACKEND: ("self._load_weights", "self.state_dict_info", "self.model_runner.model"),
    }
    for file, names in seams.items():
        text = (Path(ROOT) / file).read_text()
        assert [name for name in names if name not in text] == []


@pytest.fixture
def nemo_path(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


@imports
def test_the_policy_worker_is_nemo_rls_with_our_methods(nemo_path, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

    from fp8_nemo.nemo.policy_worker import Fp8PolicyWorker, Fp8PolicyWorkerImpl
    from fp8_nemo.nemo.worker_settings import OUR_WORKERS, WORKER

    assert issubclass(Fp8PolicyWorkerImpl, MegatronPolicyWorkerImpl)
    assert f"{Fp8PolicyWorkerImpl.__module__}.Fp8PolicyWorker" == WORKER
    assert hasattr(Fp8PolicyWorker, "remote")
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY

    assert {*OUR_WORKERS} <= {*ACTOR_ENVIRONMENT_REGISTRY}


@imports
def test_a_save_is_nemo_rls_and_gives_back_the_memory_it_was_staged_in(nemo_path, monkeypatch):
    from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

    from fp8_nemo.nemo import host_memory, policy_worker

    done = []
    monkeypatch.setattr(
        MegatronPolicyWorkerImpl, "save_checkpoint", lambda self, *a, **k: done.append((a, k))
    )

    def release():
        host_memory.release_staging()  # this torch has what it calls
        done.append("released")

    monkeypatch.setattr(policy_worker, "release_staging", release)
    worker = policy_worker.Fp8PolicyWorkerImpl.__new__(policy_worker.Fp8PolicyWorkerImpl)
    worker.save_checkpoint("weights", optimizer_path="optimizer")
    assert done == [(("weights",), {"optimizer_path": "optimizer"}), "released"]


@imports
def test_a_refused_stream_goes_on_to_its_known_end_and_is_raised_after_it(nemo_path, monkeypatch):
    import torch

    from fp8_nemo.glue.manifest import MANIFEST
    from fp8_nemo.glue.wire import RefitError
    from fp8_nemo.nemo.policy_worker import Fp8PolicyWorkerImpl

    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda shape, device="cpu": ones(shape))
    worker = Fp8PolicyWorkerImpl.__new__(Fp8PolicyWorkerImpl)
    sizes = {"a": (2,), "b": (3,), MANIFEST: (7,)}
    worker.fp8_nemo_wire = {n: (torch.Size(s), torch.uint8) for n, s in sizes.items()}

    def stream():
        yield "a", torch.tensor([3, 3], dtype=torch.uint8)
        raise RefitError(["a: holds NaN or Inf in the trainer"])

    sent = list(worker.fp8_nemo_to_the_end(stream(), worker.fp8_nemo_wire))
    assert [(name, tuple(tensor.shape)) for name, tensor in sent] == list(sizes.items())
    assert sent[1][1].tolist() == [1, 1, 1] and sent[1][1].dtype == torch.uint8
    with pytest.raises(RefitError, match="a: holds NaN"):
        worker.fp8_nemo_raise_refused()
    worker.fp8_nemo_raise_refused()  # told once: a refit by stock's iterator may follow


@imports
@pytest.mark.parametrize(
    ("glue", "left_alone"),
    [
        ([], True),
        (["glue.quantize=stock", "glue.transfer=bf16", "glue.verify=off"], False),  # it observes
    ],
)
def test_collections_leave_alone_what_set_up_made_where_the_refit_is_ours(
    glue, left_alone, nemo_path, monkeypatch
):
    import gc

    from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

    from fp8_nemo.nemo.policy_worker import Fp8PolicyWorkerImpl
    from fp8_nemo.nemo.worker_settings import WorkerSettings
    from fp8_nemo.recipe.compose import compose

    [recipe] = compose(["backend=nemo", "model=tiny-llama", "precision=fp8-kv-attn", *glue])
    for name, value in WorkerSettings.of(recipe, loss_corrects=True).to_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(MegatronPolicyWorkerImpl, "prepare_refit_info", lambda worker: {"a": 1})
    made_by_set_up = [{} for _ in range(1000)]
    try:
        before = gc.get_freeze_count()
        assert Fp8PolicyWorkerImpl.__new__(Fp8PolicyWorkerImpl).prepare_refit_info() == {"a": 1}
        grown = gc.get_freeze_count() - before
        assert (grown >= len(made_by_set_up)) is left_alone
    finally:
        gc.unfreeze()


@imports
def test_a_worker_tells_its_peak_and_the_retries_since_it_was_last_asked(nemo_path, monkeypatch):
    import torch

    from fp8_nemo.nemo.policy_worker import Fp8PolicyWorkerImpl

    counted = {"allocated_bytes.all.peak": 3 * 2**29, "num_alloc_retries": 2}
    reset = []
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: counted)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: reset.append(True))
    worker = Fp8PolicyWorkerImpl.__new__(Fp8PolicyWorkerImpl)
    assert worker.fp8_nemo_take_memory() == (1.5, 2)
    counted["num_alloc_retries"] = 5  # PyTorch counts on
    assert worker.fp8_nemo_take_memory() == (1.5, 3) and len(reset) == 2


@imports
def test_a_head_that_a_tied_checkpoint_holds_twice_is_not_sent(nemo_path, monkeypatch):
    import torch
    from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

    from fp8_nemo.glue.destination import Destination
    from fp8_nemo.glue.ledger import Ledger
    from fp8_nemo.glue.wire import named_shapes, wire_specs
    from fp8_nemo.nemo.policy_worker import Fp8PolicyWorkerImpl
    from fp8_nemo.nemo.worker_settings import WorkerSettings
    from fp8_nemo.recipe.compose import compose

    words = ["backend=nemo", "model=tiny-llama", "precision=fp8-linear", "model.shape.tied=true"]
    [recipe] = compose(words)
    for name, value in WorkerSettings.of(recipe, loss_corrects=True).to_environment().items():
        monkeypatch.setenv(name, value)
    shapes = named_shapes(recipe.model.shape)
    exported = {name: torch.ones(shape).bfloat16() for name, shape in shapes.items()}
    exported["lm_head.weight"] = exported["model.embed_tokens.weight"]
    stock = "_iter_params_with_optional_kv_scales"
    monkeypatch.setattr(MegatronPolicyWorkerImpl, stock, lambda *_, **__: iter(exported.items()))
    worker = Fp8PolicyWorkerImpl.__new__(Fp8PolicyWorkerImpl)
    worker.fp8_nemo_wire = {}
    specs = wire_specs(shapes, recipe.precision, recipe.model.shape.layers)
    engine = {
        name: torch.zeros(each.shape).to(getattr(torch, each.dtype)) for name, each in specs.items()
    }
    ledger = Ledger(specs, Destination(engine, specs), verify="names", number=1)
    for name, tensor in worker._iter_params_with_optional_kv_scales():
        if ledger.receive(name, tensor):
            engine[name].copy_(tensor)
    assert ledger.close().verified_weights == 14


@imports
def test_ranks_of_the_trainer_that_sent_different_weights_are_told_by_the_weights(nemo_path):
    from fp8_nemo.glue.wire import RefitError
    from fp8_nemo.nemo.policy import refit_metrics

    def proof(*digests):
        sent = struct.pack(f"{len(digests)}q", *digests)
        counted = {"bytes": 8, "verified_weights": 2, "changed": len(digests), "sampled": 8}
        counted["number"] = 2
        return {**counted, "equal_digests": len(digests), "sent_digests": sent}

    at = "layers.0.self_attn"
    q, o = f"{at}.q_proj.weight", f"{at}.o_proj.weight"
    info = dict.fromkeys((SENTINEL, q, o, "x.k_scale", MANIFEST), ((4,), torch.bfloat16))
    alike = {"refit/bytes": 8, "refit/verified_weights": 2}
    quarter = alike | {"refit/changed_bytes": 0.25}
    words = ["backend=nemo", "model=tiny-llama", "precision=fp8-kv-attn"]
    whole, lora = (settings_of(*words, *more) for more in ([], ["lora=attention"]))
    assert refit_metrics([proof(1, 2), {}, proof(1, 2)], info, whole) == quarter
    by_names = refit_metrics([proof(), proof()], info, whole)
    assert by_names == alike | {"refit/changed_bytes": 0.0}
    assert refit_metrics([{}], info, whole) == {"refit/bytes": 40, "refit/verified_weights": 0}
    with pytest.raises(RefitError) as error:
        refit_metrics([proof(1, 2), proof(1, 2), proof(1, 3)], info, whole)
    assert error.value.problems == [f"{o}: the trainer's ranks sent different bytes"]
    only_qkv = replace(lora, resent=["q_proj", "k_proj", "v_proj"])
    with pytest.raises(RefitError) as error:
        refit_metrics([proof(1), proof(3)], info, only_qkv)  # what has no adapter was not sent
    assert error.value.problems == [f"{q}: the trainer's ranks sent different bytes"]


def settings_of(*words):
    from fp8_nemo.nemo.worker_settings import WorkerSettings
    from fp8_nemo.recipe.compose import compose

    [recipe] = compose([*words])
    return WorkerSettings.of(recipe, loss_corrects=True)


def in_a_process(tmp_path, code, **environment):
    """Run code as a vLLM process would, a copy of this package and its metadata on the path."""
    from fp8_nemo.runs.frozen_code import freeze_code

    copy = freeze_code(tmp_path)
    path = os.pathsep.join([str(copy), ROOT or "", os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=300,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""} | environment,
    )  # fmt: skip


SEEN_BY_VLLM = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.utils.import_utils import resolve_obj_by_qualname
name = "nemo_rl.models.generation.vllm.vllm_backend.VllmInternalWorkerExtension"
extension = resolve_obj_by_qualname(name)
ours = hasattr(extension, "fp8_nemo_report")
print("TAKEN", extension.__module__, ours, extension.__bases__[-1].__module__)
from vllm.v1.worker.gpu_worker import Worker
clash = [a for a in dir(extension) if not a.startswith("__") and hasattr(Worker, a)]
print("CLASH", clash)
"""


@imports
def test_vllm_loads_our_plugin_by_its_entry_point_and_takes_our_receiver(tmp_path):
    from fp8_nemo.nemo.worker_settings import WorkerSettings
    from fp8_nemo.recipe.options.recipe import Recipe

    settings = WorkerSettings.of(Recipe(), loss_corrects=True)
    done = in_a_process(tmp_path, SEEN_BY_VLLM, **settings.to_environment())
    assert done.returncode == 0, done.stderr[-3000:]
    taken = "TAKEN fp8_nemo.nemo.receiver True nemo_rl.models.generation.vllm.vllm_backend"
    assert taken in done.stdout.splitlines()
    assert "CLASH []" in done.stdout.splitlines(), "vLLM refuses names that its worker has"


@imports
def test_without_a_recipe_in_the_environment_vllm_takes_nemo_rls_own(tmp_path):
    done = in_a_process(tmp_path, SEEN_BY_VLLM)
    assert done.returncode == 0, done.stderr[-3000:]
    taken = [line for line in done.stdout.splitlines() if line.startswith("TAKEN")]
    assert taken[0].split()[1:3] == ["nemo_rl.models.generation.vllm.vllm_backend", "False"]


@imports
def test_vllms_own_loader_stops_at_our_sentinel():
    import torch
    from torch import nn
    from vllm.model_executor.models.utils import AutoWeightsLoader

    from fp8_nemo.glue.manifest import SENTINEL

    model = nn.Module()
    model.model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="fp8_nemo"):
        AutoWeightsLoader(model).load_weights([(SENTINEL, torch.zeros(1, dtype=torch.uint8))])


@imports
def test_the_first_prompts_are_what_nemo_rl_would_calibrate_on(tmp_path, nemo_path):
    from nemo_rl.algorithms.grpo import MasterConfig
    from nemo_rl.algorithms.utils import get_tokenizer
    from nemo_rl.data.collate_fn import rl_collate_fn
    from nemo_rl.data.utils import setup_response_data
    from torchdata.stateful_dataloader import StatefulDataLoader

    from fp8_nemo.launch.session import first_prompts
    from fp8_nemo.nemo_config.checkout import config_of, host_of
    from fp8_nemo.nemo_config.overrides import path_overrides
    from fp8_nemo.plan.cells import compose_plans
    from fp8_nemo.recipe.problems import load_problems, write_problems
    from fp8_nemo.runs import run_dir

    arguments = ["backend=nemo", "cluster.gpus_per_node=1", "cluster.interpreter=system"]
    [plan] = compose_plans([*arguments, "precision=bf16"], host_of)
    write_problems(run_dir.data_dir(tmp_path), load_problems(plan.recipe.data, 1))
    written = plan.nemo.overrides | path_overrides(plan.recipe, tmp_path, Path(ROOT))
    config = MasterConfig(**config_of(Path(ROOT), plan.nemo.base_config, written))
    tokenizer = get_tokenizer(config.policy["tokenizer"])
    dataset, _ = setup_response_data(tokenizer, config.data)
    loader = StatefulDataLoader(dataset, batch_size=4, collate_fn=rl_collate_fn)
    parts = SimpleNamespace(loader=loader, tokenizer=tokenizer, config=config)
    batch = first_prompts(parts, 8)
    assert batch["input_ids"].shape[0] == len(batch["input_lengths"]) == 8
    first = dataset[0]["message_log"][0]["token_ids"]
    length = int(batch["input_lengths"][0])
    assert batch["input_ids"][0, :length].tolist()[: len(first)] == first.tolist()
    assert (batch["input_ids"][0, length:] == tokenizer.pad_token_id).all()


class Workers:
    """What the policy's workers would answer; the driver's half is NeMo RL's class and ours."""

    def __init__(self):
        self.ranges, self.forwards, self.sent = 1.0, 0, []


@pytest.fixture
def watched_policy(nemo_path, monkeypatch):
    import torch
    from nemo_rl.models.policy.lm_policy import Policy

    from fp8_nemo.nemo.policy import WatchedPolicy

    workers = Workers()

    def forward(self, *arguments, **options):
        workers.forwards += 1
        return {"layers": {}}

    def send(self, *arguments, kv_scales=None, **options):
        workers.sent.append(kv_scales)

    def answer(self, method, *arguments):
        assert method == "fp8_nemo_take_ranges"
        return [torch.full((2, 3), workers.ranges).tolist()] * 2

    monkeypatch.setattr(Policy, "__init__", lambda self, **k: setattr(self, "given", k))
    monkeypatch.setattr(Policy, "calibrate_qkv_fp8_scales", forward)
    monkeypatch.setattr(Policy, "get_logprobs", lambda self, *a, **k: "logprobs")
    monkeypatch.setattr(Policy, "run_all_workers_single_data", answer)
    monkeypatch.setattr(Policy, "stream_weights_via_ipc_zmq", send)
    monkeypatch.setattr(Policy, "broadcast_weights_for_collective", send)
    monkeypatch.setattr(
        Policy, "save_checkpoint", lambda self, path: Path(path).mkdir(parents=True)
    )

    def make(**arguments):
        from fp8_nemo.nemo.worker_settings import WorkerSettings
        from fp8_nemo.recipe.options.correction import Correction
        from fp8_nemo.recipe.options.model import Shape
        from fp8_nemo.recipe.options.precision import Glue, Precision

        shape = Shape(layers=2, hidden=256, ffn=256, heads=2, kv_heads=1, head_dim=128, vocab=192)
        precision = Precision(rollout_linear="fp8", rollout_kv="fp8", train_linear="bf16")
        settings = WorkerSettings(precision, shape, Glue(), Correction(), loss_corrects=True)
        return WatchedPolicy(settings, **arguments), workers

    return make


def step(policy):
    """A step of `grpo_train`, as far as scales are concerned."""
    policy.get_logprobs()
    policy.kv_scales.trained()  # as `train` does
    return policy.calibrate_qkv_fp8_scales("batch", include_q=True)["layers"]


K = "model.layers.1.self_attn.k_scale"


@imports
def test_scales_come_from_the_logprob_forward_with_margin_and_history(watched_policy):
    policy, workers = watched_policy()
    assert policy.given["worker_extension_cls_fqn"].endswith("Fp8PolicyWorker")
    first = policy.calibrate_qkv_fp8_scales("prompts", include_q=True)["layers"]
    assert workers.forwards == 1 and first[K] == pytest.approx(2.0 / 448)  # first_margin
    assert policy.calibrate_qkv_fp8_scales("prompts", include_q=True)["layers"] == first
    assert workers.forwards == 1, "NeMo RL's own first calibration costs nothing more"
    seen = []
    for workers.ranges in (8.0, 2.0, 4.0, 1.0):
        seen.append(step(policy)[K] * 448 / 1.05)
    assert seen == pytest.approx([8.0, 8.0, 4.0, 4.0]) and workers.forwards == 1
    row = policy.take_row()
    assert row["recalibrate/max_drift"] == 0 and row["recalibrate/saturated_fraction"] == 0


@imports
def test_a_step_without_a_logprob_forward_takes_nemo_rls_own(watched_policy):
    policy, workers = watched_policy()
    step(policy)
    assert workers.forwards == 0
    policy.kv_scales.trained()
    policy.calibrate_qkv_fp8_scales("batch", include_q=True)
    assert workers.forwards == 1


@imports
def test_every_refit_carries_the_scales_in_force(watched_policy):
    policy, workers = watched_policy()
    scales = step(policy)
    policy.stream_weights_via_ipc_zmq(buffer_size_bytes=1)
    policy.stream_weights_via_ipc_zmq(1, kv_scales={"other": 1.0})
    policy.broadcast_weights_for_collective()
    assert workers.sent == [scales, {"other": 1.0}, scales]


@imports
def test_a_refit_opens_the_step_unless_its_training_is_over(watched_policy):
    from fp8_nemo.nemo.step_metrics import OPENED

    policy, _ = watched_policy()
    for already, opened in (({}, True), ({"train/grad_norm": 1.0}, False)):
        policy.row = dict(already)
        policy.stream_weights_via_ipc_zmq(1)
        assert policy.take_row().get(OPENED, False) == opened


@imports
@pytest.mark.parametrize(
    ("call", "remedy"),
    [("finish_generation", "GPUs of its own"), ("prepare_for_generation", "kv_cache_gib")],
)
def test_an_engine_that_cannot_sleep_or_wake_stops_the_run(call, remedy, capsys, monkeypatch):
    from nemo_rl.models.generation.vllm import vllm_generation

    monkeypatch.setattr(vllm_generation, "ray", SimpleNamespace(get=list))

    def failing(*_, **__):
        raise AssertionError("Memory usage increased after sleeping.")

    class Generation(vllm_generation.VllmGeneration):
        def __init__(self, colocated):
            self.cfg = {"colocated": {"enabled": colocated}, "vllm_cfg": {"async_engine": False}}
            self.worker_group = SimpleNamespace(run_all_workers_single_data=failing)

        def __del__(self):
            """NeMo RL's would shut workers down."""

    assert getattr(Generation(True), call)() is False  # all of it, and the loop drops that
    stop_if_it_cannot_sleep_or_wake(Generation)
    with pytest.raises(EngineError, match=remedy):
        getattr(Generation(True), call)()
    assert "Memory usage increased" in capsys.readouterr().out
    if call == "finish_generation":
        with pytest.raises(EngineError, match="forget its prefixes"):
            getattr(Generation(False), call)()
    woken = Generation(True)
    woken.worker_group.run_all_workers_single_data = lambda *_, **__: []
    assert getattr(woken, call)() is True


@imports
def test_vllm_resets_kv_scales_where_we_put_them_back():
    origin = importlib.util.find_spec("vllm.v1.worker.gpu_model_runner").origin
    woken = Path(origin).read_text().partition("def post_kv_cache_wake_up")[2].partition("def ")[0]
    assert "self.init_fp8_kv_scales()" in woken


@imports
def test_a_resumed_run_starts_with_the_saved_ranges_and_scales(watched_policy, tmp_path):
    policy, workers = watched_policy()
    workers.ranges = 8.0
    step(policy)
    kept = []
    policy.keep_rows = kept.append
    saved = tmp_path / "step_7"
    policy.save_checkpoint(str(saved / "policy" / "weights"))
    assert kept == [saved], "the checkpoint's own folder, above the policy's"
    resumed, workers = watched_policy(weights_path=str(saved / "policy" / "weights"))
    assert resumed.trained == 7
    assert resumed.kv_scales.in_force == policy.kv_scales.in_force
    assert resumed.calibrate_qkv_fp8_scales("prompts")["layers"] == policy.kv_scales.in_force
    assert workers.forwards == 0
    workers.ranges = 2.0
    assert step(resumed)[K] == pytest.approx(8.0 * 1.05 / 448), "its history came along"
    fresh, _ = watched_policy(weights_path=str(tmp_path / "step_8" / "policy" / "weights"))
    assert fresh.kv_scales.in_force == {}


@imports
def test_saturation_is_judged_by_the_scales_that_sampled(watched_policy):
    policy, workers = watched_policy()
    step(policy)
    policy.take_row()
    workers.ranges = 1.2
    step(policy)
    row = policy.take_row()
    assert row["recalibrate/saturated_fraction"] == 1.0
    assert row["recalibrate/max_drift"] == pytest.approx(0.2, abs=1e-5)


@imports
@pytest.mark.parametrize("is_reference", [False, True])
@pytest.mark.parametrize("watches", [(), ("routes",), ("qkv",), ("routes", "qkv")])
def test_a_logprob_pass_of_the_policy_is_watched_as_the_recipe_says(
    watches, is_reference, monkeypatch
):
    from megatron.core import parallel_state

    from fp8_nemo.nemo import policy_worker

    open_now, seen = [], []

    def watching(name):
        @contextmanager
        def watch(*arguments, **options):
            open_now.append(name)
            yield
            open_now.remove(name)

        return watch

    settings = SimpleNamespace(
        replays="routes" in watches, observes="qkv" in watches, shape=SimpleNamespace(layers=2)
    )
    monkeypatch.setattr(policy_worker, "_settings", lambda: settings)
    monkeypatch.setattr(policy_worker, "counted_routes", watching("routes"))
    monkeypatch.setattr(policy_worker, "watched", watching("qkv"))
    monkeypatch.setattr(policy_worker, "RouteCount", lambda device: "count")
    monkeypatch.setattr(policy_worker, "AmaxObserver", lambda *sizes: "observer")
    for name in ("rank", "world_size"):
        monkeypatch.setattr(parallel_state, f"get_context_parallel_{name}", lambda: 1)
    stock = policy_worker.Fp8PolicyWorkerImpl.__mro__[1]
    monkeypatch.setattr(stock, "get_logprobs", lambda self, **_: seen.append([*open_now]))
    worker = object.__new__(policy_worker.Fp8PolicyWorkerImpl)
    worker.model, worker.fp8_nemo_is_reference = None, is_reference
    worker.get_logprobs(data={"input_lengths": [3]})
    assert seen == [[] if is_reference else [*watches]] and not open_now


LIBCUDA = [
    *("cuGetProcAddress_v2", "cuPointerGetAttribute", "cuTensorMapEncodeTiled", "cuMemCreate"),
    *("cuMemMap", "cuMemUnmap", "cuMemRelease", "cuMemSetAccess", "cuMemAddressReserve"),
    *("cuMemAddressFree", "cuMemGetAllocationGranularity", "cuCtxGetCurrent", "cuCtxSetCurrent"),
    *("cuDevicePrimaryCtxRetain", "cuGetErrorString", "cuGetErrorName", "cuDriverGetVersion"),
    *("cuDeviceGet", "cuDeviceGetAttribute"),
]


@pytest.fixture(scope="module")
def libcuda(tmp_path_factory):
    """A driver without a device: vLLM's library links to one, and nothing here calls it."""
    folder = tmp_path_factory.mktemp("libcuda")
    functions = "".join(f"int {name}(void) {{ return 1; }}\n" for name in LIBCUDA)
    (folder / "stub.c").write_text(f"int cuInit(void) {{ return 100; }}\n{functions}")
    call = ["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "stub.c"]
    if subprocess.run(call, capture_output=True).returncode:
        pytest.skip("needs a C compiler, for a driver without a device")
    return folder


def free_port():
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def on_a_cpu(libcuda):
    """The environment of a process in which vLLM believes in a GPU."""
    return os.environ | {
        "LD_LIBRARY_PATH": str(libcuda), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(OURS.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip


@imports
@pytest.mark.parametrize(
    ("cell", "size", "experts"),
    [
        ("tiny-llama fp8-kv-attn", 1, ""), ("tiny-llama bf16", 1, ""),
        ("tiny-qwen3-moe fp8-kv-attn", 1, ""), ("tiny-llama fp8-kv-attn", 2, ""),
        ("tiny-qwen3-moe fp8-linear", 2, "experts"),
        ("qwen25-7b fp8-kv-attn", 1, ""), ("qwen25-1_5b fp8-linear", 2, ""),
        ("llama32-1b fp8-kv-attn", 2, ""), ("qwen3-4b fp8-kv-attn", 1, ""),
        ("qwen3-14b bf16", 1, ""),
    ],
)  # fmt: skip
def test_every_glue_lands_in_a_real_vllm_model_and_what_is_lost_is_named(
    cell, size, experts, libcuda, tmp_path
):
    if "_weight_update_lifecycle" not in (Path(ROOT) / BACKEND).read_text():
        pytest.skip("drives a refit by main's own lifecycle; v0.7.0, of vLLM 0.20, has none")
    port, environment = free_port(), on_a_cpu(libcuda)
    script = str(Path(__file__).parent / "vllm_on_a_cpu.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, script, *cell.split(), str(rank), str(size), str(port), experts],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(size)
    ]  # fmt: skip
    for rank in ranks:
        out, error = rank.communicate(timeout=400)
        assert rank.returncode == 0, error[-3000:]
        found = json.loads(out.strip().splitlines()[-1])
        assert len(found["landed"]) == 8
        if "bf16" not in cell:
            assert all(count > 0 for count in found["landed"].values())
        for key, (equal, loaded) in found["again"].items():
            quantize, _, verify = key.split()
            is_copied = verify == "bytes" and (quantize == "fused" or "bf16" in cell)
            assert (equal > 0, loaded == 0) == (verify == "bytes", is_copied), key
        [(whole, *proven), (some, *again)] = found["adapted"]
        assert some < whole and again == proven and again[1] > 0
        assert len(found["refused"]) == 2 + ("kv" in cell) + ("qwen25" in cell)
        for name, message in found["refused"].items():
            assert f"{name}: never arrived" in message


@imports
def test_refits_land_by_a_real_broadcast_and_a_refused_one_ends_on_both_sides(libcuda):
    """The collective path, packed by NeMo RL's own code; left out are CUDA's streams and NCCL."""
    if "_weight_update_lifecycle" not in (Path(ROOT) / BACKEND).read_text():
        pytest.skip("drives a refit by main's own lifecycle; v0.7.0, of vLLM 0.20, has none")
    script, ports = Path(__file__).parent / "refit_by_broadcast.py", [free_port(), free_port()]
    sides = [
        subprocess.Popen(
            [sys.executable, script, str(rank), *map(str, ports)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=on_a_cpu(libcuda),
        )
        for rank in (0, 1)
    ]  # fmt: skip
    found = []
    for side in sides:
        out, error = side.communicate(timeout=400)
        assert side.returncode == 0, error[-3000:]
        found.append(json.loads(out.strip().splitlines()[-1]))
    sent, received = found
    assert sent["packets"] == received["packets"] and len(sent["packets"]) > 2 * 3
    *landed, refused = received["refits"]
    assert [each["verified_weights"] for each in landed] == [14, 14]
    wire = sum(received["packets"]) / 3
    assert all(0 < wire - each["bytes"] < 0.02 * wire for each in landed)  # sentinel and manifest
    assert landed[1]["changed"] > 0.9 * landed[1]["sampled"]
    assert sent["refits"][:2] == [{}, {}]
    assert "model.layers.1.self_attn.o_proj.weight: holds NaN" in sent["refits"][2]
    assert MANIFEST in refused


@imports
@pytest.mark.parametrize(
    ("name", "precision", "methods"),
    [
        ("tiny-llama", "precision=fp8-linear", ["Fp8LinearMethod"]),
        ("tiny-llama", "precision=fp8-kv-attn", ["Fp8LinearMethod"]),
        ("tiny-llama", "precision=nvfp4-w4a16", ["ModelOptNvFp4W4A16LinearMethod"]),
        ("tiny-qwen3-moe", "precision=fp8-kv-attn", ["Fp8LinearMethod", "UnquantizedLinearMethod"]),
    ],
)
def test_vllms_own_loader_takes_a_quantized_checkpoint_as_it_is(
    name, precision, methods, libcuda, tmp_path
):
    from fp8_nemo.recipes import quantize_checkpoint

    from fp8_nemo.recipe.model_dir import SHIPPED

    texts = tmp_path / "texts"
    texts.write_text("12+30=")
    calibrate = ["--calibrate", str(texts)] if "kv" in precision else []
    folder = tmp_path / "fp8"
    line = [str(SHIPPED / name), str(folder), precision, *calibrate]
    assert quantize_checkpoint.main(line) == 0
    script = Path(__file__).parent / "vllm_loads_a_checkpoint.py"
    done = subprocess.run(
        [sys.executable, script, folder, name, precision.partition("=")[2], str(free_port())],
        capture_output=True, text=True, timeout=400, env=on_a_cpu(libcuda),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    written = json.loads((folder / "quantization.json").read_text())["shards"]
    count = sum(len(each["tensors"]) for each in written.values())
    assert found == {"same": count, "other": [], "methods": methods}
