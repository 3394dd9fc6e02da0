"""Our subclasses against NeMo RL's own classes: what we override is there, as expected.

With NEMO_RL_ROOT alone the source is read; what imports `nemo_rl` and vLLM needs their environment
(docs/nemo.md). Both supported versions are meant to pass.
"""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = os.environ.get("NEMO_RL_ROOT")
pytestmark = pytest.mark.skipif(not ROOT, reason="NEMO_RL_ROOT: no checkout of NeMo RL")
imports = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None,
    reason="NeMo RL's packages are not installed here (docs/nemo.md)",
)
BACKEND = "nemo_rl/models/generation/vllm/vllm_backend.py"
WORKER = "nemo_rl/models/policy/workers/megatron_policy_worker.py"
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
    text = (Path(ROOT) / WORKER).read_text()
    for seam in ("_iter_params_with_optional_kv_scales(", "self.model.eval()", "input_lengths"):
        assert seam in text or seam == "input_lengths"
    backend = (Path(ROOT) / BACKEND).read_text()
    for seam in ("self._load_weights", "self.state_dict_info", "self.model_runner.model"):
        assert seam in backend


@pytest.fixture
def nemo_path(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


@imports
def test_the_policy_worker_is_nemo_rls_with_our_methods(nemo_path, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

    from fp8_nemo.nemo.policy import STOCK_WORKER, WORKER
    from fp8_nemo.nemo.policy_worker import Fp8PolicyWorker, Fp8PolicyWorkerImpl

    assert issubclass(Fp8PolicyWorkerImpl, MegatronPolicyWorkerImpl)
    assert f"{Fp8PolicyWorkerImpl.__module__}.Fp8PolicyWorker" == WORKER
    assert hasattr(Fp8PolicyWorker, "remote")
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY

    assert STOCK_WORKER in ACTOR_ENVIRONMENT_REGISTRY


@imports
def test_a_refused_stream_goes_on_to_its_known_end_and_is_raised_after_it(nemo_path, monkeypatch):
    import torch

    from fp8_nemo.nemo.policy_worker import Fp8PolicyWorkerImpl
    from fp8_nemo.refit import MANIFEST, RefitError

    monkeypatch.setattr(
        torch, "zeros", lambda shape, dtype, device: torch.empty(shape, dtype=dtype)
    )
    worker = Fp8PolicyWorkerImpl.__new__(Fp8PolicyWorkerImpl)
    sizes = {"a": (2,), "b": (3,), MANIFEST: (7,)}
    worker.fp8_nemo_wire = {n: (torch.Size(s), torch.uint8) for n, s in sizes.items()}

    def stream():
        yield "a", torch.ones(2, dtype=torch.uint8)
        raise RefitError(["a: holds NaN or Inf in the trainer"])

    sent = list(worker.fp8_nemo_to_the_end(stream()))
    assert [(name, tuple(tensor.shape)) for name, tensor in sent] == list(sizes.items())
    with pytest.raises(RefitError, match="a: holds NaN"):
        worker.fp8_nemo_raise_refused()
    assert list(worker.fp8_nemo_to_the_end(iter([]))) == []
    worker.fp8_nemo_raise_refused()


def in_a_process(tmp_path, code, **environment):
    """Run code as a vLLM process would, a copy of this package and its metadata on the path."""
    from fp8_nemo.frozen_code import freeze_code

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
print(extension.__module__, hasattr(extension, "fp8_nemo_report"), extension.__mro__[1].__module__)
from vllm.v1.worker.gpu_worker import Worker
clash = [a for a in dir(extension) if not a.startswith("__") and hasattr(Worker, a)]
print("clash", clash)
"""


@imports
def test_vllm_loads_our_plugin_by_its_entry_point_and_takes_our_receiver(tmp_path):
    from fp8_nemo.nemo import settings
    from fp8_nemo.schema import Recipe

    done = in_a_process(tmp_path, SEEN_BY_VLLM, **settings.to_environment(Recipe()))
    assert done.returncode == 0, done.stderr[-3000:]
    *_, taken, clash = done.stdout.strip().splitlines()
    assert taken == "fp8_nemo.nemo.receiver True nemo_rl.models.generation.vllm.vllm_backend"
    assert clash == "clash []", "vLLM refuses an extension whose names its worker has"


@imports
def test_without_a_recipe_in_the_environment_vllm_takes_nemo_rls_own(tmp_path):
    done = in_a_process(tmp_path, SEEN_BY_VLLM)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().splitlines()[-2].split()[1] == "False"


@imports
def test_vllms_own_loader_stops_at_our_sentinel():
    import torch
    from torch import nn
    from vllm.model_executor.models.utils import AutoWeightsLoader

    from fp8_nemo.refit import SENTINEL

    model = nn.Module()
    model.model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="fp8_nemo"):
        AutoWeightsLoader(model).load_weights([(SENTINEL, torch.zeros(1, dtype=torch.uint8))])
