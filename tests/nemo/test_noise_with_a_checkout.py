"""QeRL's noise inside NeMo RL: driver and worker, over weights that Megatron-Bridge exports.

Set NEMO_RL_ROOT to a checkout, in an environment that holds NeMo RL's packages (docs/install.md).
The driver's policy and the worker are NeMo RL's classes and ours. Left out are Ray between them
and the transport: calls arrive here, and the stream goes into an engine that is a dictionary.
"""

# pyright: reportMissingImports=false
import gc
import importlib.util
import os
from types import SimpleNamespace

import pytest
import torch

from fp8_nemo.glue.destination import Destination
from fp8_nemo.glue.ledger import Ledger
from fp8_nemo.glue.refit import with_noise
from fp8_nemo.glue.wire import named_shapes, takes_noise, wire_specs
from fp8_nemo.nemo.step_metrics import OPENED
from fp8_nemo.nemo.worker_settings import WorkerSettings
from fp8_nemo.recipe.options.correction import Correction
from fp8_nemo.recipe.options.precision import Glue, Precision
from fp8_nemo.recipe.options.training import Grpo, Noise
from tests.nemo.test_lora_with_a_checkout import (
    SHAPES,
    adapted,
    exported,
    megatron_model,
    one_process,  # noqa: F401  a fixture of the whole module
)

pytestmark = pytest.mark.skipif(
    not os.environ.get("NEMO_RL_ROOT") or importlib.util.find_spec("megatron") is None,
    reason="NEMO_RL_ROOT: no checkout of NeMo RL, or not its packages",
)
NOISE = Noise("aqn", sigma_start=0.1, sigma_end=0.05, stages=3, steps=6)
GRPO = Grpo(steps=7, validate_every=3)
SIGMAS = {0: 0, 1: 0, 2: 0.1, 3: 0, 4: 0.05, 5: 0.05, 6: 0, 7: 0}
"""By steps trained: a validation reads the refits after 3, 6 and 7."""


def settings_of(family, **other):
    return WorkerSettings(
        Precision(rollout_linear="fp8"), SHAPES[family], Glue(**other), Correction(),
        loss_corrects=True, seed=42, noise=NOISE, grpo=GRPO,
    )  # fmt: skip


class Run:
    """A policy of the driver and its worker, which refits an engine; `trained` steps are done."""

    def __init__(self, monkeypatch, family, bridge, model, glue, weights_path=None):
        from nemo_rl.models.policy import lm_policy
        from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

        from fp8_nemo.nemo.policy import WatchedPolicy
        from fp8_nemo.nemo.policy_worker import Fp8PolicyWorkerImpl

        def send(worker, kv_scales=None, **_):
            self.take(worker._iter_params_with_optional_kv_scales(kv_scales))

        def call(method, **arguments):
            return [getattr(worker, method)(**arguments)]

        settings = settings_of(family, **glue)
        for name, value in settings.to_environment().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(lm_policy, "ray", SimpleNamespace(get=list))
        for each in ("stream_weights_via_ipc_zmq", "broadcast_weights_for_collective"):
            monkeypatch.setattr(MegatronPolicyWorkerImpl, each, send)
        calculate = "_calculate_refit_param_info"
        monkeypatch.setattr(MegatronPolicyWorkerImpl, calculate, lambda worker: None)
        monkeypatch.setattr(lm_policy.Policy, "__init__", lambda policy, **_: None)
        monkeypatch.setattr(lm_policy.Policy, "__del__", lambda policy: None, raising=False)
        self.family, self.bridge, self.model = family, bridge, model
        worker = Fp8PolicyWorkerImpl.__new__(Fp8PolicyWorkerImpl)
        worker.model, worker.draft_model, worker.cfg = model[0], None, {}
        worker.megatron_bridge = bridge
        worker.refit_conversion_tasks = bridge.get_conversion_tasks(model)
        self.policy = WatchedPolicy(settings, weights_path=weights_path)
        self.policy.worker_group = SimpleNamespace(
            run_all_workers_single_data=call, shutdown=lambda **_: True
        )
        worker.prepare_refit_info()
        gc.unfreeze()  # other tests count what is frozen
        self.specs = wire_specs(
            named_shapes(SHAPES[family]), settings.wire_precision, SHAPES[family].layers
        )
        self.engine = {
            n: torch.zeros(s.shape).to(getattr(torch, s.dtype)) for n, s in self.specs.items()
        }
        self.refits = 0

    def take(self, stream):
        self.refits += 1
        ledger = Ledger(self.specs, Destination(self.engine, self.specs), number=self.refits)
        for name, tensor in stream:
            if ledger.receive(name, tensor):
                self.engine[name].copy_(tensor)
        self.proof = ledger.close()

    def norms(self):
        held = exported(self.bridge, self.model)
        return {n: x for n, x in held.items() if takes_noise(n, Precision(rollout_linear="fp8"), 2)}


def drawn(norms, sigma, trained):
    precision = Precision(rollout_linear="fp8")
    return dict(with_noise(norms.items(), sigma, precision, num_layers=2, seed=42, trained=trained))


@pytest.mark.parametrize(
    ("family", "glue"),
    [
        *(("Llama", {}), ("Qwen2", {}), ("Qwen3", {}), ("Qwen3Moe", {}), ("Llama with LoRA", {})),
        *(("Llama", {"transfer": "bf16"}), ("Llama", {"quantize": "stock"})),
    ],
)
def test_each_refit_is_proven_with_its_own_steps_noise_and_megatrons_weights_stay(
    family, glue, tmp_path, monkeypatch
):
    family, _, adapters = family.partition(" with ")
    bridge, model = megatron_model(family, tmp_path)
    run = Run(monkeypatch, family, bridge, adapted(model) if adapters else model, glue)
    norms, before = run.norms(), [each.clone() for each in model[0].parameters()]
    assert len(norms) == 4
    for run.policy.trained in range(8):
        run.policy.stream_weights_via_ipc_zmq(1)
        assert run.proof.equal_digests == len(run.specs)
        wanted = drawn(norms, SIGMAS[run.policy.trained], run.policy.trained)
        for name, weight in wanted.items():
            assert torch.equal(run.engine[name], weight), (run.policy.trained, name)
            assert torch.equal(weight, norms[name]) == (SIGMAS[run.policy.trained] == 0)
    run.policy.trained = 5
    run.policy.broadcast_weights_for_collective()
    for name, weight in drawn(norms, 0.05, 5).items():
        assert torch.equal(run.engine[name], weight)
    for weight, kept in zip(model[0].parameters(), before, strict=True):
        assert torch.equal(weight, kept)


def test_a_resumed_run_has_its_steps_noise_in_its_first_refit(tmp_path, monkeypatch):
    bridge, model = megatron_model("Llama", tmp_path)
    path = tmp_path / "checkpoints" / "step_4" / "policy" / "weights"
    run = Run(monkeypatch, "Llama", bridge, model, {}, weights_path=str(path))
    run.policy.stream_weights_via_ipc_zmq(1)
    for name, weight in drawn(run.norms(), 0.05, 4).items():
        assert torch.equal(run.engine[name], weight)


def test_nemo_rls_own_worker_is_told_of_no_noise(monkeypatch):
    from nemo_rl.models.policy import lm_policy

    from fp8_nemo.nemo.policy import WatchedPolicy

    monkeypatch.setattr(lm_policy.Policy, "__init__", lambda policy, **_: None)
    monkeypatch.setattr(lm_policy.Policy, "__del__", lambda policy: None, raising=False)
    policy = WatchedPolicy(settings_of("Llama", quantize="stock", transfer="bf16", verify="off"))
    policy.worker_group = None  # it has no method of ours
    policy._note_refit()
    assert policy.take_row() == {OPENED: True}


def test_nemo_rl_saves_a_checkpoint_in_a_folder_of_its_step(tmp_path):
    from nemo_rl.utils.checkpoint import CheckpointManager

    from fp8_nemo.nemo.policy import trained_steps

    weights = tmp_path / "step_30" / "policy" / "weights"
    weights.mkdir(parents=True)
    found, _ = object.__new__(CheckpointManager).get_resume_paths(tmp_path / "step_30")
    assert trained_steps(found) == 30 and trained_steps(None) == 0
