"""Refits from NeMo RL's policy worker to its vLLM worker, ours in both, broadcast by gloo on a CPU.

    python refit_by_broadcast.py RANK PORT ENGINES_PORT

Rank 0 sends what a bridge would export; rank 1 loads it into a real vLLM model
(`vllm_on_a_cpu.py`). NeMo RL's packing is its own. It asks CUDA for streams and memory; the host's
stand in, so packets do not overlap. The third refit holds a NaN. Prints one JSON object.
"""

# pyright: reportMissingImports=false
import dataclasses
import json
import os
import pickle
import sys
import tempfile
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed
import vllm.platforms
from vllm_on_a_cpu import Hopper, config_of, small, vllm_model, worker_of

GPU_BYTES = 64 * 2**20
"""NeMo RL packs a fiftieth of a GPU's memory at a time."""
REFITS = (1, 2, 3)
SPOILT = "model.layers.1.self_attn.o_proj.weight"


class HostTorch:
    """Torch as NeMo RL's `packed_tensor` sees it, without a GPU."""

    cuda = SimpleNamespace(
        Stream=lambda: SimpleNamespace(synchronize=lambda: None),
        stream=lambda stream: nullcontext(),
        current_device=lambda: "cpu",
        get_device_properties=lambda device: SimpleNamespace(total_memory=GPU_BYTES),
    )

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, size, dtype, device):
        return torch.empty(size, dtype=dtype)


class Group:
    """A stateless process group of NeMo RL's, over gloo: `broadcast` alone."""

    def __init__(self, rank, port):
        self.store = torch.distributed.TCPStore("127.0.0.1", port, 2, rank == 0)
        self.gloo = torch.distributed.ProcessGroupGloo(self.store, rank, 2, timedelta(seconds=120))
        self.packets = []

    def broadcast(self, tensor, src):
        self.packets.append(tensor.numel())
        self.gloo.broadcast(tensor, src).wait()


def exported(shape, number):
    """The policy's weights by a checkpoint's names, as a bridge exports them."""
    from fp8_nemo.glue.wire import named_shapes

    draw = torch.Generator().manual_seed(number)
    named = {n: torch.randn(s, generator=draw).bfloat16() for n, s in named_shapes(shape).items()}
    if number == REFITS[-1]:
        named[SPOILT][5, 7] = float("nan")
    return named.items()


def send(group, recipe):
    """Run the handshake and the refits as NeMo RL's driver asks a policy worker to."""
    from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

    from fp8_nemo.glue.wire import kv_scale_names
    from fp8_nemo.nemo.policy_worker import Fp8PolicyWorkerImpl

    ones, shape = torch.ones, recipe.model.shape
    torch.ones = lambda size, device=None: ones(size)
    MegatronPolicyWorkerImpl._calculate_refit_param_info = lambda worker: None
    worker = Fp8PolicyWorkerImpl.__new__(Fp8PolicyWorkerImpl)
    worker.model_update_group, worker.model, worker.draft_model = group, None, None
    worker.refit_conversion_tasks, worker.cfg = None, {}
    for number in (0, *REFITS):
        worker.megatron_bridge = SimpleNamespace(
            export_hf_weights=lambda *_, of=number, **__: iter(exported(shape, of))
        )
        if number == 0:
            group.store.set("handshake", pickle.dumps(worker.prepare_refit_info()))
            continue
        scales = {n: number * 0.01 + i / 300 for layer in range(shape.layers)
                  for i, n in enumerate(kv_scale_names(layer))}  # fmt: skip
        yield lambda scales=scales: worker.broadcast_weights_for_collective(kv_scales=scales)


def receive(group, recipe, settings, port):
    """Take the handshake and the refits as NeMo RL's driver asks a vLLM worker to."""
    from nemo_rl.models.generation.vllm.vllm_backend import VllmInternalWorkerExtension as stock

    with tempfile.TemporaryDirectory() as folder:
        config_of(recipe.model.shape).save_pretrained(folder)
        model, config = vllm_model(folder, recipe, 0, 1, port, False)
    worker = worker_of(stock, settings, model, config)
    worker.model_update_group = group
    worker.prepare_refit_info(pickle.loads(group.store.get("handshake")))
    for _ in REFITS:
        yield lambda: worker.update_weights_from_collective() and worker.fp8_nemo_report()


def main():
    rank, port, engines_port = map(int, sys.argv[1:])
    vllm.platforms._current_platform = Hopper()
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    from nemo_rl.utils import packed_tensor

    from fp8_nemo.glue.wire import RefitError
    from fp8_nemo.nemo.worker_settings import WorkerSettings
    from fp8_nemo.recipe.compose import compose

    packed_tensor.torch = HostTorch()
    [recipe] = compose(["model=llama31-8b", "backend=nemo", "precision=fp8-kv-attn"])
    shape = small(recipe.model.shape)
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, shape=shape))
    settings = WorkerSettings.of(recipe, loss_corrects=True)
    os.environ |= settings.to_environment()
    group = Group(rank, port)
    found = []
    sides = send(group, recipe), receive(group, recipe, settings, engines_port)
    for refit in sides[rank]:
        try:
            found.append(refit() or {})
        except RefitError as error:
            found.append(str(error))
    for each in found:
        if isinstance(each, dict):
            each.pop("sent_digests", None)  # digests, in bytes
    print(json.dumps({"packets": group.packets, "refits": found}))


if __name__ == "__main__":
    os.environ |= {"VLLM_USE_DEEP_GEMM": "1", "VLLM_USE_DEEP_GEMM_E8M0": "0"}
    main()
