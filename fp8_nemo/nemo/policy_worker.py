"""NeMo RL's Megatron policy worker with our refit stream and our eyes on Q, K, V and routers.

Registered through `Policy(worker_extension_cls_fqn=...)`. One iterator feeds every transport of
NeMo RL's, and its handshake; it is all that is replaced.
"""

# pyright: reportMissingImports=false
# NeMo RL stands on the path of a run, not of a type check.
from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import ray
import torch
from megatron.core.distributed import DistributedDataParallel
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl
from torch import Tensor

from fp8_nemo.correction.routing import RouteCount
from fp8_nemo.glue.manifest import KV_SUFFIXES, sent_again
from fp8_nemo.glue.recalibrate import AmaxObserver
from fp8_nemo.glue.refit import refit_stream, with_noise
from fp8_nemo.glue.wire import RefitError
from fp8_nemo.nemo.aligned.attention import attend_as_the_engine, engine_attention
from fp8_nemo.nemo.aligned.rows import fill_micro_batches
from fp8_nemo.nemo.host_memory import HostState, prepare_buffers, release_staging
from fp8_nemo.nemo.kv_scales import watched
from fp8_nemo.nemo.worker_settings import WorkerSettings


class LossScale:
    """Scale FP16's loss in Megatron: skip an update that overflows, and halve the scale.

    Megatron returns no norm of such an update, which NeMo RL cannot take (seam fp16-skipped-step).
    Experts have an optimizer and a scaler of their own, but the loss is multiplied by the first
    one's scale (seam fp16-scaler-each). So what overflows in one has overflowed in all.

    Args:
        optimizer: Megatron's `ChainedOptimizer`, whose `step` becomes ours.
    """

    def __init__(self, optimizer: Any) -> None:
        self.scalers = [each.grad_scaler for each in optimizer.chained_optimizers]
        self.skipped = 0
        self.megatron_step, optimizer.step = optimizer.step, self.step

    def step(self) -> tuple[bool, float, int]:
        """Run Megatron's `step`; a skipped update has a norm of 0.0, and no zeros to count."""
        before = self.scalers[0].state_dict()
        landed, norm, zeros = self.megatron_step()
        if landed:
            return landed, norm, zeros
        for scaler in self.scalers:  # each has counted its own overflow alone
            scaler.load_state_dict(before)
            scaler.update(found_inf=True)
        self.skipped += 1
        return landed, 0.0, 0

    def take(self) -> tuple[float, int]:
        """Return the scale, and the updates that were skipped since the last call."""
        skipped, self.skipped = self.skipped, 0
        return self.scalers[0].scale.item(), skipped


class Fp8PolicyWorkerImpl(MegatronPolicyWorkerImpl):
    """Define what a worker does differently; `Fp8PolicyWorker` is the Ray actor of it."""

    fp8_nemo_wire: dict[str, tuple[torch.Size, torch.dtype]] | None = None
    """Names, shapes and types of the stream, from NeMo RL's handshake; None before it."""
    fp8_nemo_refused: RefitError | None = None
    fp8_nemo_refits = 0
    """Since the handshake; the engine's receiver counts them too."""
    fp8_nemo_trained = 0
    """Steps that the weights have been trained, as the driver last said."""
    fp8_nemo_observer: AmaxObserver | None = None
    fp8_nemo_routes: RouteCount | None = None
    fp8_nemo_is_reference = False
    fp8_nemo_host_state: HostState | None = None
    fp8_nemo_loss_scale: LossScale | None = None
    fp8_nemo_retries = 0
    """Of the allocator, as it counts them, at the last call of `fp8_nemo_take_memory`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Set up NeMo RL's worker; in FP16 a loss scale, in `exact` the engine's roundings."""
        if _settings().precision.is_exact:
            engine_attention()  # refused before the model is built
        super().__init__(*arguments, **options)
        release_staging()  # of a model that was converted
        if _settings().precision.plain.scales_loss:
            self.model.ddp_config.check_for_nan_in_grad = False  # seam fp16-overflow
            self.fp8_nemo_loss_scale = LossScale(self.optimizer)
        if _settings().precision.is_exact:
            attend_as_the_engine(self.model)
            fill_micro_batches(self.cfg["sequence_packing"])

    def prepare_refit_info(self) -> dict[str, Any]:
        """Return the handshake: names, shapes and types of the stream, before KV scales exist.

        It ends the set-up, whose objects live as long as the worker, so it freezes them, as vLLM's
        own workers do. NeMo RL asks Python for a full collection before and after each refit and
        before each logprob pass. Walking these objects took 1.45 s of 2.4 in stock's refit of 8B's
        shape (benchmarks/results/glue-8b-h200.json).
        """
        self.fp8_nemo_wire, self.fp8_nemo_refits = None, 0
        wire: dict[str, Any] = super().prepare_refit_info()
        self.fp8_nemo_wire = wire
        if _settings().glue.has_receiver:
            gc.collect()
            gc.freeze()
        return wire

    def prepare_for_training(self, *arguments: Any, **options: Any) -> None:
        """Bring gradients and optimizer back, into memory of their own.

        NeMo RL empties the allocator's cache after that. Gradients that had been given a part of
        the logprob pass's memory would leave the rest to Adam's moments, which stay: then neither
        part could go back to the device for the rollout.
        """
        torch.cuda.empty_cache()
        super().prepare_for_training(*arguments, **options)

    def move_model(
        self, model: Any, device: str, move_params: bool = True, move_grads: bool = True
    ) -> Any:
        """Move Megatron's buffers as NeMo RL does, weights to memory of ours (`host_memory.py`)."""
        if device == "cpu" and move_params and isinstance(model, DistributedDataParallel):
            prepare_buffers([*model.buffers, *model.expert_parallel_buffers])
        return super().move_model(model, device, move_params, move_grads)

    def move_optimizer(self, device: str) -> None:
        """Move Adam's state as NeMo RL does, through page-locked memory (`host_memory.py`)."""
        self.fp8_nemo_host_state = self.fp8_nemo_host_state or HostState()
        states = [state for _, state in self.optimizer.state.items()]
        if device == "cpu":
            self.fp8_nemo_host_state.to_host(states)
        else:
            self.fp8_nemo_host_state.to_device(states, device)

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        """Save as NeMo RL does, and give the host's memory back (`host_memory.py`)."""
        super().save_checkpoint(*arguments, **options)
        release_staging()

    def stream_weights_via_ipc_zmq(self, *arguments: Any, **options: Any) -> None:
        """Send the weights to the engine on this GPU.

        Raises:
            RefitError: a weight or a KV scale was refused; so the engine refused the refit too.
        """
        super().stream_weights_via_ipc_zmq(*arguments, **options)
        self.fp8_nemo_raise_refused()

    def broadcast_weights_for_collective(self, *arguments: Any, **options: Any) -> None:
        """Send the weights to engines on other GPUs.

        Raises:
            RefitError: as `stream_weights_via_ipc_zmq`.
        """
        super().broadcast_weights_for_collective(*arguments, **options)
        self.fp8_nemo_raise_refused()

    def _iter_params_with_optional_kv_scales(
        self, kv_scales: dict[str, float] | None = None, **options: Any
    ) -> Iterator[tuple[str, Tensor]]:
        settings = _settings()
        if not settings.glue.has_receiver:
            yield from super()._iter_params_with_optional_kv_scales(kv_scales, **options)
            return
        is_handshake = self.fp8_nemo_wire is None
        self.fp8_nemo_refits += not is_handshake
        adapted = settings.adapted(self.fp8_nemo_refits)
        wire = self.fp8_nemo_wire or {}
        if adapted:
            wire, exported = sent_again(wire, adapted), self.fp8_nemo_merged()
        else:
            exported = super()._iter_params_with_optional_kv_scales(None, **options)
        left_out = KV_SUFFIXES
        if settings.shape.tied:
            left_out += ("lm_head.weight",)  # some checkpoints hold it twice
        trained = self.fp8_nemo_trained
        named_weights = with_noise(
            ((name, x) for name, x in exported if not name.endswith(left_out)),
            settings.noise.sigma(trained, settings.grpo),
            settings.precision,
            num_layers=settings.shape.layers,
            seed=settings.seed,
            trained=trained,
        )
        stream = refit_stream(
            named_weights,
            settings.wire_precision,
            kv_scales,
            num_layers=settings.shape.layers,
            metadata_only=is_handshake,
            verify=settings.glue.verify,
            number=self.fp8_nemo_refits,
        )
        yield from self.fp8_nemo_to_the_end(stream, wire)

    def fp8_nemo_merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that have adapters, merged with them; Bridge exports no others.

        Raises:
            RefitError: this Bridge names no weight as one with an adapter.
        """
        tasks = [t for t in self.refit_conversion_tasks if "to_wrap.weight" in t.global_param_name]
        if not tasks:
            raise RefitError(["Megatron-Bridge names no weight with an adapter; glue.verify=names"])
        yield from self.megatron_bridge.export_hf_weights(
            [self.model], show_progress=False, conversion_tasks=tasks
        )

    def fp8_nemo_set_trained(self, trained: int) -> None:
        """Take the steps that the weights have been trained, on which a refit's noise depends."""
        self.fp8_nemo_trained = trained

    def fp8_nemo_to_the_end(
        self,
        stream: Iterator[tuple[str, Tensor]],
        wire: Mapping[str, tuple[torch.Size, torch.dtype]],
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the stream; if it is refused half-way, yield ones for the rest of the wire.

        A sender that stopped would leave the receiver waiting: 120 seconds for an answer, or for
        ever in a broadcast whose sizes it knows. Ones are no readable manifest, so the receiver
        refuses the refit. Zeros would not do: vLLM stops at a KV scale of 0.
        """
        sent: set[str] = set()
        try:
            for name, tensor in stream:
                sent.add(name)
                yield name, tensor
        except RefitError as error:
            self.fp8_nemo_refused = error
            for name, (shape, dtype) in wire.items():
                if name not in sent:
                    yield name, torch.ones(shape, device="cuda").to(dtype)

    def fp8_nemo_raise_refused(self) -> None:
        """Raise the error that stopped the stream, once both sides have reached its end."""
        refused, self.fp8_nemo_refused = self.fp8_nemo_refused, None
        if refused is not None:
            raise refused

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """Use the reference weights as NeMo RL does, without observing Q, K and V."""
        with super().use_reference_model():
            self.fp8_nemo_is_reference = True
            try:
                yield
            finally:
                self.fp8_nemo_is_reference = False

    def get_logprobs(self, *, data: Any, **options: Any) -> Any:
        """Run NeMo RL's `get_logprobs`, and observe Q, K and V if the recipe says so."""
        with ExitStack() as watching:
            if not self.fp8_nemo_is_reference:
                for each in self.fp8_nemo_watches(data["input_lengths"]):
                    watching.enter_context(each)
            return super().get_logprobs(data=data, **options)

    def fp8_nemo_watches(self, lengths_B: Tensor) -> Iterator[AbstractContextManager[None]]:
        """Yield what counts routes and what observes Q, K and V, as far as the recipe says so."""
        settings = _settings()
        if settings.replays:
            self.fp8_nemo_routes = self.fp8_nemo_routes or RouteCount("cuda")
            yield counted_routes(self.fp8_nemo_routes)
        if settings.observes:
            from megatron.core import parallel_state

            if self.fp8_nemo_observer is None:
                self.fp8_nemo_observer = AmaxObserver(settings.shape.layers, 1, "cuda")
            rank = parallel_state.get_context_parallel_rank()
            size = parallel_state.get_context_parallel_world_size()
            yield watched(self.model, self.fp8_nemo_observer, lengths_B, cp_rank=rank, cp_size=size)

    def fp8_nemo_take_loss_scale(self) -> tuple[float, int]:
        """Return the loss scale, and the updates that were skipped since the last call."""
        assert self.fp8_nemo_loss_scale, "asked in FP16 alone"
        return self.fp8_nemo_loss_scale.take()

    def fp8_nemo_take_memory(self) -> tuple[float, int]:
        """Return the most GiB allocated here, and the allocator's retries, since the last call.

        It retries where the GPU is full: it gives what it keeps back to the device, and asks again.
        """
        found = torch.cuda.memory_stats()
        torch.cuda.reset_peak_memory_stats()
        before, self.fp8_nemo_retries = self.fp8_nemo_retries, found["num_alloc_retries"]
        return found["allocated_bytes.all.peak"] / 2**30, self.fp8_nemo_retries - before

    def fp8_nemo_take_routes(self) -> list[int]:
        """Return the routes exchanged, and routes compared, on all ranks since the last call."""
        assert self.fp8_nemo_routes, "asked after a logprob pass of replay=r3 alone"
        counted_2 = self.fp8_nemo_routes.take()
        torch.distributed.all_reduce(counted_2)
        return counted_2.tolist()

    def fp8_nemo_take_ranges(self) -> list[list[float]]:
        """Return the largest absolute values `[L, 3]` of all ranks since the last call.

        They are zeros if nothing was observed. It is the only read of a step on the host.
        """
        assert self.fp8_nemo_observer, "asked only with glue.recalibrate.source=logprob"
        # As integers, which order as the numbers do and put NaN above all; NCCL may drop a NaN.
        bits_L3 = self.fp8_nemo_observer.amax_SL3[0].view(torch.int32)
        torch.distributed.all_reduce(bits_L3, op=torch.distributed.ReduceOp.MAX)
        found = self.fp8_nemo_observer.read()[0].tolist()
        self.fp8_nemo_observer.next_step()
        return found


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class Fp8PolicyWorker(Fp8PolicyWorkerImpl):
    """Run the worker as a Ray actor."""


@contextmanager
def counted_routes(count: RouteCount) -> Iterator[None]:
    """Show `count` what each router of Megatron's would have chosen, while routes are replayed.

    NeMo RL's padding is the route `0, 1, 2, ...`, which leaves out real tokens that go there too.
    """
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    replayed = RouterReplay.get_replay_topk

    def counting(
        replay: Any, scores: Tensor, topk: int,
        num_groups: Any = None, group_topk: Any = None, default_compute_topk: Any = None,
    ) -> Any:  # fmt: skip
        """Run Megatron's replay, and count the routes that the trainer would have chosen."""
        found = replayed(replay, scores, topk, num_groups, group_topk, default_compute_topk)
        if replay.router_replay_action == RouterReplayAction.REPLAY_FORWARD:
            own_NA = default_compute_topk(scores, topk, num_groups, group_topk)[1]
            given_NA = replay.target_topk_idx.to(scores.device)
            padding_A = torch.arange(topk, device=scores.device)
            count.add(own_NA, given_NA, (given_NA != padding_A).any(-1))
        return found

    RouterReplay.get_replay_topk = counting
    try:
        yield
    finally:
        RouterReplay.get_replay_topk = replayed


def _settings() -> WorkerSettings:
    settings = WorkerSettings.from_environment()
    assert settings, "the driver sets them before Ray starts"
    return settings
