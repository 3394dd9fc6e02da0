"""What a recipe's weights, cache and training state weigh, before a GPU is asked for.

`estimate` counts bytes exactly, from the model's numbers. `memory_per_gpu` adds up what trainer and
engine hold in each phase of a NeMo RL step on one GPU: exact for weights, gradients and optimizer,
by formula for activations, and with a fixed allowance for what no formula knows. The
trainer's part was corrected after one run, and less the allowance is within 0.1 GiB of what NeMo RL
printed there after training, before the refit and while the engine sampled: 8B, FP8 on both sides,
two H200s (docs/speed.md). The rest has not been held against a measurement yet.

`decode_seconds` and `refit_seconds` are bytes over bandwidth and operations over arithmetic rate,
plus one fixed cost per model, which benchmarks/fit_estimate.py fits on half of what was measured
and tests on the other half: `FITTED`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from fp8_nemo.glue.wire import BLOCK, SCALE_SUFFIX, is_fp8_weight, named_shapes, wire_specs
from fp8_nemo.recipe.options import Precision, Recipe, Shape

DTYPE_BYTES = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}
GIB = 2**30
GPU_GIB = {"h100": 79.6, "h200": 140.4, "b200": 179.1}
"""Memory of one GPU as nvidia-smi reports it: 81559, 143771, 183359 MiB."""


@dataclass(frozen=True)
class Speed:
    """Rates of one GPU: `Speed(4.8e12, 989e12, 1979e12)`."""

    bandwidth: float
    """Bytes a second, of its own memory."""
    bf16: float
    """FLOP/s of dense products on the tensor cores."""
    fp8: float
    fp8_cache: float = math.inf
    """Bytes a second of an FP8 cache that attention reads, where that is less than `bandwidth`."""

    def reached(self) -> Speed:
        """What real kernels get of it."""
        products = self.bf16 * PRODUCTS_REACHED, self.fp8 * PRODUCTS_REACHED
        memory, cache = self.bandwidth * MEMORY_REACHED, self.bandwidth * FP8_CACHE_REACHED
        return Speed(memory, *products, cache)


GPU_SPEED = {
    "h100": Speed(3.35e12, 989e12, 1979e12),
    "h200": Speed(4.8e12, 989e12, 1979e12),
    "b200": Speed(8.0e12, 2250e12, 4500e12),
}
"""NVIDIA's datasheets of the SXM parts (H100, H200; HGX B200 by eight): the rates printed there are
with sparsity, these are half of them."""
MEMORY_REACHED = 0.88
"""A large copy on an H200: 4.20 of 4.8 TB/s (benchmarks/results/quantize-h200.json)."""
FP8_CACHE_REACHED = 0.62
"""vLLM's attention on an H200: what 64 sequences of 4k tokens take more than of 1k, 4.3 ms for 12.9
GB (benchmarks/results/rollout-8b-h200.json). A BF16 cache is read as fast as a copy."""
PRODUCTS_REACHED = 0.8
"""Assumed. Products of training reached 0.76 in BF16 and 0.54 in FP8, at 8,192 tokens on an H200
(benchmarks/results/bench-train-8b-h200.json); those of a rollout were not measured."""


class Fitted(NamedTuple):
    """What neither bytes nor operations explain: `Fitted(2e-3, 0.32)`."""

    decode: float
    """Seconds of a decode step."""
    refit: float | None = None
    """Seconds of a refit's transfer; None where none was measured."""


FITTED = {
    ("llama31-8b", 32): Fitted(decode=1.97e-3, refit=0.324),
    ("qwen3-30b-a3b", 48): Fitted(decode=3.92e-3),
}
"""By model and layers, on one H200 (benchmarks/results/estimate-h200.json): decode steps of up to
64 sequences come out within 10%, of 256 they take 7 to 33% longer, since each costs the host
something; a refit's transfer within 13%. No other model was measured."""
CACHE_BLOCK = 16
"""Tokens of one block of vLLM's KV cache."""
ALLOWANCE_GIB = 6.0
"""CUDA and NCCL of two processes, a sleeping engine's graphs, fragmentation."""
HEADROOM = 0.1


@dataclass(frozen=True)
class Counts:
    """Counts for one model and precision; bytes are of the whole model, not per GPU."""

    parameters: int
    fp8_weights: int
    """Weights that the engine holds in FP8, experts counted one by one."""
    bf16_weights: int
    refit_bytes: int
    """What one refit sends, scales included."""
    refit_bytes_bf16: int
    """What the same refit sends in BF16."""
    kv_bytes_per_token: int


def estimate(shape: Shape, precision: Precision) -> Counts:
    """Counts from `model.shape` and the precision."""
    shapes = named_shapes(shape)
    specs = wire_specs(shapes, precision, shape.layers)
    scales = [name for name in specs if name.endswith(SCALE_SUFFIX)]
    parameters = sum(math.prod(each) for each in shapes.values())
    kv_bytes = DTYPE_BYTES["float8_e4m3fn" if precision.rollout_kv == "fp8" else "bfloat16"]
    return Counts(
        parameters=parameters,
        fp8_weights=len(scales),
        bf16_weights=len(shapes) - len(scales),
        refit_bytes=sum(DTYPE_BYTES[each.dtype] * math.prod(each.shape) for each in specs.values()),
        refit_bytes_bf16=2 * parameters,
        kv_bytes_per_token=2 * shape.layers * shape.kv_heads * shape.head_dim * kv_bytes,
    )


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


def memory_per_gpu(recipe: Recipe, gpus: int, tokens: int) -> MemoryByPhase:
    """What each phase of a step needs on one GPU, colocated as NeMo RL does it.

    Training: BF16 weights and gradients, the distributed optimizer's FP32 master and two moments
    (with the precision-aware optimizer the master is BF16 and 16 bits of remainder), FP8 copies of
    the linear weights in both directions; and the larger of what a backward pass needs, activations
    of one micro-batch, logits in BF16 and FP32 with their gradient, and of what an update does,
    without that optimizer the gradients in FP32 (distrib_optimizer.py:2782). Refit: the trainer's
    and the engine's weights. Rollout: the engine's weights and KV cache. Of the trainer only what
    NeMo RL moves waits in host memory: weights and moments. In FP8 the masters, their last
    gradients and the FP8 copies stay, 36.4 GiB of 8B on two GPUs, where a run had 36.5
    (docs/speed.md); and the moments, if the optimizer is kept.

    Args:
        recipe: with `model.parallel`, `model.memory`, `precision` and `cluster.gpu`.
        gpus: of the whole run.
        tokens: of one micro-batch.
    """
    parallel, memory = recipe.model.parallel, recipe.model.memory
    dense, expert, quantized = _parameters(recipe)
    stages, ranks = parallel.pipeline, parallel.tensor * parallel.pipeline
    held_dense, held_expert = dense / ranks, expert / (parallel.expert * stages)
    held = held_dense + held_expert
    spread_dense = max(1, gpus // ranks)
    spread_expert = max(1, gpus // (parallel.expert * stages))
    held_spread = held_dense / spread_dense + held_expert / spread_expert
    fp8 = recipe.precision.train_linear == "fp8"
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
        "moments": moved * held_spread if keeps_optimizer(recipe) else 0.0,
    }
    refit = {"trainer": 2 * held, "engine": engine, **kept, "allowance": allowance}
    rollout = {"engine": engine, "KV cache": max(0.0, cache), **kept, "allowance": allowance}
    phases = {"train": train, "refit": refit, "rollout": rollout}
    return MemoryByPhase(phases, GPU_GIB[recipe.cluster.gpu])


def keeps_optimizer(recipe: Recipe) -> bool:
    """Whether Adam's state stays on the GPU, by `+nemo.policy.offload_optimizer_for_refit=false`.

    Else NeMo RL moves it to the host before every refit and back before training: the moments, and
    the masters where they are of the precision-aware optimizer.
    """
    policy = recipe.nemo.get("policy")
    return isinstance(policy, dict) and not policy.get("offload_optimizer_for_refit", True)


def kv_cache_tokens(recipe: Recipe, memory: MemoryByPhase) -> int:
    """Tokens that the KV cache of one engine holds, over its `rollout_tensor` GPUs."""
    per_token = estimate(recipe.model.shape, recipe.precision).kv_bytes_per_token
    shards = min(recipe.model.parallel.rollout_tensor, recipe.model.shape.kv_heads)
    return int(memory.phases["rollout"]["KV cache"] * shards / per_token)


@dataclass(frozen=True)
class DecodeWork:
    """What one decode step of the whole batch reads and multiplies, over all GPUs of the engine."""

    weight_bytes: float
    kv_bytes: float
    fp8_flops: float
    """Products with FP8 weights."""
    bf16_flops: float
    """Products with the others: `lm_head`, routers, all of them in BF16."""
    attention_flops: float

    def seconds(self, speed: Speed, fp8_attention: bool) -> float:
        """The larger of reading and multiplying, for weights and for the cache, one after other."""
        linear = self.fp8_flops / speed.fp8 + self.bf16_flops / speed.bf16
        attention = self.attention_flops / (speed.fp8 if fp8_attention else speed.bf16)
        cache = min(speed.bandwidth, speed.fp8_cache) if fp8_attention else speed.bandwidth
        return max(self.weight_bytes / speed.bandwidth, linear) + max(
            self.kv_bytes / cache, attention
        )


def decode_work(shape: Shape, precision: Precision, batch: int, context: float) -> DecodeWork:
    """Bytes and operations of one step that decodes one token of every sequence.

    Every weight is read once, but the embedding (a row per token), and of the experts those that
    the batch is expected to touch: `E * (1 - (1 - k/E)^batch)` if routes are even.

    Args:
        shape: of the model.
        precision: with `rollout_linear` and `rollout_kv`.
        batch: sequences.
        context: tokens of each in the cache, on average.
    """
    read = flops = fp8_flops = 0.0
    even = shape.experts_per_token / shape.experts if shape.experts else 0.0
    for name, size in named_shapes(shape).items():
        if name == "model.embed_tokens.weight" and not shape.tied:
            continue
        count, expert = math.prod(size), ".experts." in name
        fp8 = is_fp8_weight(name, size, precision, shape.layers)
        each = 1 + 4 / BLOCK**2 if fp8 else 2
        read += count * each * (1 - (1 - even) ** batch if expert else 1)
        operations = 2 * count * batch * (even if expert else 1) if len(size) > 1 else 0
        flops, fp8_flops = flops + operations, fp8_flops + operations * fp8
    heads = shape.layers * shape.heads * shape.head_dim
    cached = batch * context
    return DecodeWork(
        weight_bytes=read,
        kv_bytes=cached * estimate(shape, precision).kv_bytes_per_token,
        fp8_flops=fp8_flops,
        bf16_flops=flops - fp8_flops,
        attention_flops=4 * heads * cached,
    )


def decode_seconds(
    shape: Shape, precision: Precision, batch: int, context: float, gpu: str, fixed: float
) -> float:
    """Seconds of one decode step on one GPU, at the rates that kernels reach.

    Args:
        shape: of the model.
        precision: with `rollout_linear` and `rollout_kv`.
        batch: sequences.
        context: tokens of each in the cache, on average.
        gpu: a key of `GPU_SPEED`.
        fixed: seconds of a step that neither bytes nor operations explain; fitted per model.
    """
    work = decode_work(shape, precision, batch, context)
    return work.seconds(GPU_SPEED[gpu].reached(), precision.rollout_kv == "fp8") + fixed


class Decode(NamedTuple):
    """What one engine decodes: `Decode(160, 9800.0)`."""

    running: int
    """Sequences that its KV cache holds at once."""
    tokens_per_second: float


def decode_of_engine(
    recipe: Recipe, memory: MemoryByPhase, sequences: int, context: int
) -> Decode | None:
    """An engine's speed while all its sequences are under way; None where nothing was measured.

    Args:
        recipe: its engines on one GPU each, as what was fitted.
        memory: `memory_per_gpu` of it.
        sequences: of one engine.
        context: tokens of each, on average.
    """
    model, gpu = recipe.model, recipe.cluster.gpu
    fitted = FITTED.get((model.name, model.shape.layers))
    if fitted is None or model.parallel.rollout_tensor > 1:
        return None
    running = max(1, min(sequences, kv_cache_tokens(recipe, memory) // context))
    step = decode_seconds(model.shape, recipe.precision, running, context, gpu, fitted.decode)
    return Decode(running, running / step)


def decode_floor(shape: Shape, precision: Precision, batch: int, context: float, gpu: str) -> float:
    """Seconds that no step can be faster than: the roofline, by the datasheet."""
    work = decode_work(shape, precision, batch, context)
    return work.seconds(GPU_SPEED[gpu], precision.rollout_kv == "fp8")


def refit_seconds(shape: Shape, precision: Precision, gpu: str, fixed: float) -> float:
    """Seconds of a refit between two processes of one GPU.

    The trainer reads its BF16 weights and writes the wire's tensors, the engine reads those and
    writes its own: all of it memory traffic of the one GPU.

    Args:
        shape: of the model.
        precision: of the wire.
        gpu: a key of `GPU_SPEED`.
        fixed: seconds that bytes do not explain; fitted per model.
    """
    counts = estimate(shape, precision)
    moved = counts.refit_bytes_bf16 + 3 * counts.refit_bytes
    return moved / GPU_SPEED[gpu].reached().bandwidth + fixed


def kv_capacity(shape: Shape, precision: Precision, kv_bytes: float) -> int:
    """Tokens that a KV cache of so many bytes holds, in whole blocks."""
    block = CACHE_BLOCK * estimate(shape, precision).kv_bytes_per_token
    return int(kv_bytes // block) * CACHE_BLOCK


def engine_kv_bytes(
    shape: Shape, precision: Precision, gpu: str, share: float, reserve: float
) -> float:
    """Bytes that an engine on one GPU leaves to its KV cache.

    Args:
        shape: of the model.
        precision: of the engine's weights.
        gpu: a key of `GPU_GIB`.
        share: of the GPU that the engine takes (`gpu_memory_utilization`).
        reserve: bytes of activations, graphs and libraries; fitted per model.
    """
    weights = estimate(shape, replace(precision, rollout_kv="bf16")).refit_bytes
    return GPU_GIB[gpu] * GIB * share - weights - reserve


def _parameters(recipe: Recipe) -> tuple[int, int, int]:
    """Parameters outside experts, in experts, and how many of them are linear weights of blocks."""
    shape = recipe.model.shape
    all_fp8 = Precision(rollout_linear="fp8")
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
    share = quantized / (dense + expert) if recipe.precision.rollout_linear == "fp8" else 0.0
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
