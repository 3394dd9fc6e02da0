"""Count what a recipe's weights, cache and training state weigh, before a GPU is asked for.

`count` is exact, from the model's numbers. `memory_per_gpu` adds up what trainer and engine hold in
each phase of a NeMo RL step on one GPU: exact for weights, gradients and optimizer, by formula for
activations, and with a fixed allowance for what no formula knows. One run corrected the trainer's
part: less the allowance it is within 0.1 GiB of what NeMo RL printed after training, before the
refit and while the engine sampled (8B, FP8 on both sides, two H200s; docs/research/speed.md). The
rest has not been compared with a measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fp8_nemo.glue.wire import SCALE_SUFFIX, is_fp8_weight, named_shapes, wire_specs
from fp8_nemo.recipe.options import DTYPE_BYTES, Precision, Recipe, Shape
from fp8_nemo.recipe.settled import Settled

GIB = 2**30
GPU_GIB = {"h100": 79.6, "h200": 140.4, "b200": 179.1}
"""Memory of one GPU as nvidia-smi reports it: 81559, 143771, 183359 MiB."""
ALLOWANCE_GIB = 6.0
"""CUDA and NCCL of two processes, a sleeping engine's graphs, fragmentation."""
HEADROOM = 0.1


@dataclass(frozen=True)
class Counts:
    """Count one model in one precision; bytes are of the whole model, not per GPU."""

    parameters: int
    fp8_weights: int
    """Weights that the engine holds in FP8, experts counted one by one."""
    bf16_weights: int
    refit_bytes: int
    """What one refit sends, scales included."""
    refit_bytes_bf16: int
    """What the same refit sends in BF16."""
    kv_bytes_per_token: int


def count(shape: Shape, precision: Precision) -> Counts:
    """Count parameters, weights and bytes from `model.shape` and the precision."""
    shapes = named_shapes(shape)
    specs = wire_specs(shapes, precision, shape.layers)
    scales = [name for name in specs if name.endswith(SCALE_SUFFIX)]
    parameters = sum(math.prod(each) for each in shapes.values())
    return Counts(
        parameters=parameters,
        fp8_weights=len(scales),
        bf16_weights=len(shapes) - len(scales),
        refit_bytes=sum(DTYPE_BYTES[each.dtype] * math.prod(each.shape) for each in specs.values()),
        refit_bytes_bf16=2 * parameters,
        kv_bytes_per_token=_kv_bytes_per_token(shape, precision),
    )


def _kv_bytes_per_token(shape: Shape, precision: Precision) -> int:
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * precision.cache.bytes


@dataclass(frozen=True)
class MemoryByPhase:
    """Bytes on one GPU: `MemoryByPhase({"train": {"weights": 8e9, ...}, "refit": {...}}, 79.6)`."""

    phases: dict[str, dict[str, float]]
    """Phase of the step -> what lies on the GPU -> bytes."""
    gpu_gib: float

    @property
    def worst(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    def headroom(self, phase: str) -> float:
        """Share of the GPU that a phase leaves free; negative if it does not fit."""
        return 1 - sum(self.phases[phase].values()) / (self.gpu_gib * GIB)

    def text(self, phase: str) -> str:
        """A phase's parts: `train in GiB: weights 7.5, gradients 7.5, ...`."""
        parts = [f"{name} {size / GIB:.1f}" for name, size in self.phases[phase].items() if size]
        return f"{phase} in GiB: " + ", ".join(parts)


def memory_per_gpu(settled: Settled, tokens: int | None = None) -> MemoryByPhase:
    """Add up what each phase of a step needs on one GPU, colocated as NeMo RL does it.

    Training: BF16 weights and gradients, the distributed optimizer's FP32 master and two moments
    (with the precision-aware optimizer the master is BF16 and 16 bits of remainder), FP8 copies of
    the linear weights in both directions; and the larger of what a backward pass needs, activations
    of one micro-batch, logits in BF16 and FP32 with their gradient, and of what an update does,
    without that optimizer the gradients in FP32 (seam gradients-of-masters). Refit: the trainer's
    and the engine's weights. Rollout: the engine's weights and KV cache. Of the trainer only what
    NeMo RL moves waits in host memory: weights and moments. In FP8 the masters, their last
    gradients and the FP8 copies stay, 36.4 GiB of 8B on two GPUs, where a run had 36.5
    (docs/research/speed.md); and the moments, if the optimizer is kept.

    Args:
        settled: of the run.
        tokens: of one micro-batch; the run's own by default.
    """
    recipe, tokens = settled.recipe, settled.micro_batch_tokens if tokens is None else tokens
    parallel, memory = recipe.model.parallel, recipe.model.memory
    dense, expert, quantized = _parameters(recipe)
    stages, ranks = parallel.pipeline, parallel.tensor * parallel.pipeline
    held_dense, held_expert = dense / ranks, expert / (parallel.expert * stages)
    held = held_dense + held_expert
    spread_dense = max(1, settled.gpus // ranks)
    spread_expert = max(1, settled.gpus // (parallel.expert * stages))
    held_spread = held_dense / spread_dense + held_expert / spread_expert
    fp8 = recipe.precision.train.is_quantized
    state, moved = (12, 8) if fp8 else (10, 10)
    fraction = quantized / (dense + expert)
    allowance = ALLOWANCE_GIB * GIB
    trainer = {
        "weights": 2 * held,
        "gradients": 2 * held,
        "optimizer": state * held_spread,
        "FP8 copies": 2 * held * fraction if fp8 else 0.0,
        "allowance": allowance,
    }
    backward = trainer | {
        "activations": _activations(recipe, tokens),
        "logits": 10 * tokens * recipe.model.shape.vocab / (parallel.tensor * parallel.context),
    }
    update = trainer | {"gradients of masters": 4 * held_spread if fp8 else 0.0}
    train = max(backward, update, key=lambda parts: sum(parts.values()))
    engine = _engine_weights(recipe, dense, expert, quantized)
    cache = GPU_GIB[recipe.cluster.gpu] * GIB * memory.rollout_share - engine
    if memory.kv_cache_gib is not None:
        cache = memory.kv_cache_gib * GIB
    kept = {
        "masters": 4 * held_spread if fp8 else 0.0,
        "their gradients": 4 * held_spread if fp8 else 0.0,
        "FP8 copies": trainer["FP8 copies"],
        "moments": moved * held_spread if settled.keeps_optimizer else 0.0,
    }
    refit = {"trainer": 2 * held, "engine": engine, **kept, "allowance": allowance}
    rollout = {"engine": engine, "KV cache": max(0.0, cache), **kept, "allowance": allowance}
    phases = {"train": train, "refit": refit, "rollout": rollout}
    return MemoryByPhase(phases, GPU_GIB[recipe.cluster.gpu])


def kv_cache_tokens(recipe: Recipe, memory: MemoryByPhase) -> int:
    """Count the tokens that one engine's KV cache holds, over its `rollout_tensor` GPUs."""
    per_token = _kv_bytes_per_token(recipe.model.shape, recipe.precision)
    shards = min(recipe.model.parallel.rollout_tensor, recipe.model.shape.kv_heads)
    return int(memory.phases["rollout"]["KV cache"] * shards / per_token)


def _parameters(recipe: Recipe) -> tuple[int, int, int]:
    """Parameters outside experts, in experts, and how many of them are linear weights of blocks."""
    shape = recipe.model.shape
    all_fp8 = Precision(rollout_linear="fp8")  # the same linears in every quantized format
    dense = expert = quantized = 0
    for name, size in named_shapes(shape).items():
        count = math.prod(size)
        dense, expert = (dense, expert + count) if ".experts." in name else (dense + count, expert)
        quantized += count if is_fp8_weight(name, size, all_fp8, shape.layers) else 0
    return dense, expert, quantized


def _engine_weights(recipe: Recipe, dense: int, expert: int, quantized: int) -> float:
    parallel = recipe.model.parallel
    held = dense / parallel.rollout_tensor
    held += expert / max(parallel.rollout_tensor, parallel.rollout_expert)
    share = quantized / (dense + expert) if recipe.precision.rollout.is_quantized else 0.0
    return held * (2 - share)


def _activations(recipe: Recipe, tokens: int) -> float:
    """Bytes that the backward pass of one micro-batch keeps: inputs of every product, in BF16.

    With `recompute` a layer keeps its input alone, and one layer at a time keeps the rest.
    """
    shape, parallel = recipe.model.shape, recipe.model.parallel
    heads = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim / parallel.tensor
    if shape.experts:
        routed = shape.experts_per_token * (shape.hidden + 3 * shape.expert_ffn)
    else:
        routed = 3 * shape.ffn / parallel.tensor
    layer = 2 * tokens * (4 * shape.hidden + heads + routed) / parallel.context
    kept = 2 * tokens * shape.hidden / parallel.context
    layers = shape.layers / parallel.pipeline
    return layers * kept + layer if recipe.model.memory.recompute else layers * layer
