"""Add up what a recipe's weights, cache and training state weigh, before a GPU is asked for.

`memory_per_gpu` has what trainer and engine hold in each phase of a NeMo RL step on one GPU: exact
for weights, gradients and optimizer (`model.py` counts them), by formula for activations, and with
a fixed allowance for what no formula knows. One run on two H200s corrected the trainer's part; in
four others each phase is within 3% (docs/speed.md). Layouts on more GPUs were not compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from fp8_nemo.plan.model import adapter_parameters, adapters, census, count
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.settled import Settled

GIB = 2**30
GPU_GIB = {"h100": 79.6, "h200": 140.4, "b200": 179.1}
"""Memory of one GPU as nvidia-smi reports it: 81559, 143771, 183359 MiB."""
ALLOWANCE_GIB = 6.0
"""CUDA and NCCL of two processes, a sleeping engine's graphs, fragmentation. A GPU that trains or
samples alone has one process, and the same reserve: its own was not measured."""
HOLES_GIB = 2.1
"""What stays reserved beyond what is allocated after a refit, where state of the trainer stays:
the most of four steps of 16 layers of 8B, 1.2 to 2.1 (device-8b16-h200.json)."""
PACKETS = 2 * 0.02
"""Share of a GPU's memory that the two packets under way take, where a refit goes to other GPUs
(NeMo RL main 7ea279a, packed_tensor.py)."""
PIECES = 4 / 3
"""Host memory over bytes, of many pieces that PyTorch page-locks in powers of two: the mean of
sizes spread evenly between two powers."""
PROCESSES_GIB = 11.0
"""Host memory for each GPU beside what is page-locked, system and Ray included: 22 GiB with two
GPUs and all of 30B-A3B (nemo-30b-lora-again-2-h200.json). More GPUs were not measured."""
HEADROOM = 0.1
WHOLE_LOGIT = 14
"""Bytes of one logit while a loss or a logprob pass works on all of a micro-batch's: in BF16, and
three times in FP32 (NeMo RL main 7ea279a, model_utils.py, DistributedLogprob)."""
CHUNK_LOGIT = 24
"""Bytes of one logit of the chunk under way, beside BF16 ones of all: FP32 three times, and the
chosen tokens as integers of 8 bytes (the same file, ChunkedDistributedLogprob)."""

PLAIN = {"moments": "Adam's moments", "holes": "fragmentation", "allowance": "reserve"}
"""Parts of a phase whose names a user would not know, as they are printed."""
MERGED_BYTES = 12
"""Bytes of one weight while its adapter is added to it: three times in FP32 (peft_bridge.py)."""


@dataclass(frozen=True)
class MemoryByPhase:
    """Hold the bytes on one GPU.

    `MemoryByPhase({"train": {"weights": 8e9, ...}, "refit": {...}}, 79.6)`.
    """

    phases: dict[str, dict[str, float]]
    """Phase of the step -> what lies on the GPU -> bytes."""
    gpu_gib: float

    @property
    def worst(self) -> str:
        """Return the phase that needs most."""
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    def headroom(self, phase: str) -> float:
        """Return the share of the GPU that a phase leaves free; negative if it does not fit."""
        return 1 - self.needed_gib(phase) / self.gpu_gib

    def needed_gib(self, phase: str) -> float:
        """Return the GiB that a phase takes."""
        return sum(self.phases[phase].values()) / GIB

    def text(self, phase: str) -> str:
        """Write a phase's parts: `train in GiB: weights 7.5, gradients 7.5, ...`."""
        sizes = self.phases[phase].items()
        parts = [f"{PLAIN.get(name, name)} {size / GIB:.1f}" for name, size in sizes if size]
        return f"{phase} in GiB: " + ", ".join(parts)


def memory_per_gpu(settled: Settled) -> MemoryByPhase:
    """Add up what each phase of a step needs on one GPU.

    Where GPUs sample alone, the phase `rollout` is on one of those, the others on one that trains.
    """
    engine = _engine_weights(settled)
    gpu = GPU_GIB[settled.recipe.cluster.gpu]
    cache = max(0.0, gpu * GIB * settled.recipe.model.memory.rollout_share - engine)
    if settled.layout.kv_cache_gib is not None:
        cache = settled.layout.kv_cache_gib * GIB
    sampler = {"engine": engine, "KV cache": cache}
    phases = _shared(settled, sampler) if settled.shares_gpus else _apart(settled, sampler)
    return MemoryByPhase(phases, gpu)


def _shared(settled: Settled, sampler: dict[str, float]) -> dict[str, dict[str, float]]:
    """Return the parts in bytes of each phase on a GPU that trains and samples in turn.

    Training: BF16 weights and gradients, the distributed optimizer's FP32 master and two moments
    (with the precision-aware optimizer the master is BF16 and 16 bits of remainder), FP8 copies of
    the linear weights in both directions; and the larger of what a backward pass needs, activations
    and logits of one micro-batch, and of what an update does, in FP8 the gradients in FP32 (seam
    gradients-of-masters). FP16 has whole masters too, and its gradients are FP32 from the start.
    Logprob: weights, and the logits of one micro-batch. Refit: the trainer's and the engine's
    weights. Rollout: the engine's weights and KV cache. Of the trainer only what NeMo RL moves
    waits in host memory: weights and moments. In FP8 the masters,
    their last gradients and the FP8 copies stay, 36.4 GiB of 8B on two GPUs, where a run had 36.5
    (docs/research/speed.md); and the moments, if the optimizer is kept. PyTorch's
    allocator kept 30 GiB more of 8B on two H200s (device-8b-2-h200.json), because Megatron's cached
    position tables anchor large segments, as NeMo RL's policy worker says. Plans clear these caches
    before a refit; since then it keeps `HOLES_GIB`, or what weights and gradients leave if less.

    With LoRA gradients and optimizer are the adapters' alone. The frozen weights lie in no buffer
    of Megatron's, so NeMo RL moves them nowhere: they stay beside the engine (seams moves-buffers,
    frozen-without-buffer).
    """
    layout, own = settled.layout, _held(settled)
    kept, logits = _kept(settled, own), _logits(settled, layout.logprob_batch, 2)
    moved = (2 + _gradient_bytes(settled)) * own.trained
    holes = min(HOLES_GIB * GIB, moved) if any(kept.values()) else 0.0
    kept |= {"holes": holes, "allowance": ALLOWANCE_GIB * GIB}
    logprob = {"weights": 2 * own.held, "logits": logits, **kept}
    engine, merging = sampler["engine"], _merging(settled)
    refit = {"trainer": 2 * own.held, "merging": merging, "engine": engine, **kept}
    frozen = 2 * (own.held - own.trained)
    rollout = {**sampler, "frozen weights": frozen, **kept}
    train = _training(settled, own)
    return {"train": train, "logprob": logprob, "refit": refit, "rollout": rollout}


def _apart(settled: Settled, sampler: dict[str, float]) -> dict[str, dict[str, float]]:
    """Return the parts in bytes of the phases on a GPU that trains, and on one that samples.

    NeMo RL moves nothing to the host here. The logprob pass gives the gradients' memory back, and a
    refit mostly follows an update, with gradients there. The sender holds each packet twice: in
    pieces, and packed.
    """
    recipe, layout, own = settled.recipe, settled.layout, _held(settled)
    counts = count(recipe.model.shape, recipe.precision)
    sent = counts.refit_bytes if recipe.glue.sends_fp8 else counts.refit_bytes_bf16
    received = min(sent, PACKETS * GPU_GIB[recipe.cluster.gpu] * GIB)
    trainer, logits = _trainer(settled, own), _logits(settled, layout.logprob_batch, 2)
    trainer["their gradients"] = _kept(settled, own)["their gradients"]
    logprob = trainer | {"gradients": 0.0, "logits": logits}
    refit = trainer | {"merging": _merging(settled), "packets": 2 * received}
    rollout = {**sampler, "packets": received, "allowance": ALLOWANCE_GIB * GIB}
    train = _training(settled, own)
    return {"train": train, "logprob": logprob, "refit": refit, "rollout": rollout}


def _merging(settled: Settled) -> float:
    """Return the bytes in which a refit adds an adapter to its weight."""
    added = adapters(settled.recipe.model.shape, settled.recipe.lora)
    return MERGED_BYTES * max((each.largest for each in added), default=0)


def _trainer(settled: Settled, own: Held) -> dict[str, float]:
    """Return the parts in bytes of a trainer that has everything on its GPU, between passes."""
    return {
        "weights": 2 * own.held,
        "gradients": _gradient_bytes(settled) * own.trained,
        "optimizer": (12 if settled.recipe.precision.keeps_masters else 10) * own.spread,
        "FP8 copies": own.copies,
        "allowance": ALLOWANCE_GIB * GIB,
    }


def _training(settled: Settled, own: Held) -> dict[str, float]:
    """Return the parts in bytes of a backward pass, or of an update where that needs more."""
    fp8 = settled.recipe.precision.train.is_quantized
    trainer = _trainer(settled, own)
    backward = trainer | {
        "activations": _activations(settled),
        "logits": _logits(settled, settled.layout.micro_batch, 4),
    }
    update = trainer | {"gradients of masters": 4 * own.spread if fp8 else 0.0}
    return max(backward, update, key=lambda parts: sum(parts.values()))


def _kept(settled: Settled, own: Held) -> dict[str, float]:
    """Return the parts in bytes of the trainer's state that stay while the engine works."""
    precision = settled.recipe.precision
    return {
        "masters": 4 * own.spread if precision.keeps_masters else 0.0,
        "their gradients": 4 * own.spread if precision.train.is_quantized else 0.0,
        "FP8 copies": own.copies,
        "moments": _moments(settled) * own.spread if settled.layout.keeps_optimizer else 0.0,
    }


def host_gib(settled: Settled) -> float:
    """Estimate the page-locked host memory in GiB that a run takes on one node.

    A step holds the trained weights and moments of every GPU's trainer, and the engine's weights,
    which vLLM keeps there while it sleeps, in many pieces: PyTorch page-locks a power of two (9 GiB
    took 16.3 on an H100), so a third more is assumed. With stock's worker Megatron copies a buffer
    of weights before it page-locks the copy (seam copies-before-pinning). 30B-A3B on four GPUs of a
    host with 390 GiB left ended in that copy (nemo-30b-4-h200.json).

    With a reference policy its weights lie there too, and in its logprob pass the trained ones
    (seams reference-on-host, swaps-with-reference): PyTorch page-locks such copies. Where GPUs
    sample alone nothing else moves, and no engine sleeps.

    A checkpoint adds what it saves, and a conversion the model, counted even where the model is
    converted: Megatron copies both to page-locked memory before it writes them (seam
    stages-checkpoints). Converting 57 GiB of 30B-A3B took 76 (nemo-30b-lora-2-h200.json), a
    checkpoint of two layers of 8B 0.95 of its formula (staging-h200.json); one of experts, in more
    pieces, may take a third more. Our worker gives that back, in stock's it stays.
    """
    recipe, own = settled.recipe, _held(settled)
    is_ours = recipe.glue.needs_plugin(recipe.precision)
    weights = 2 * own.trained * (1 if is_ours else 1 + PIECES)
    each = weights if settled.kl_penalty or settled.shares_gpus else 0.0
    asleep = 0.0
    if settled.kl_penalty:
        each += 2 * PIECES * 2 * own.held
    if settled.shares_gpus:
        asleep = PIECES * _engine_weights(settled)
        each += moved_bytes(settled) + asleep
    on_node = min(settled.train_gpus, recipe.cluster.gpus_per_node)
    share = on_node / settled.train_gpus
    step, saved = on_node * each / GIB, share * checkpoint_gib(settled)
    dense, expert, _ = _parameters(recipe.model.shape)
    converted = PIECES * share * 2 * (dense + expert) / GIB
    if not is_ours:
        return step + max(saved, converted)
    return max(step + saved, on_node * asleep / GIB + converted)


def node_gib(settled: Settled) -> float:
    """Estimate all the host memory in GiB that a run takes on one node."""
    return host_gib(settled) + PROCESSES_GIB * settled.recipe.cluster.gpus_per_node


def moved_bytes(settled: Settled) -> float:
    """Count the bytes of optimizer state that one GPU moves to the host and back for a refit."""
    spread = _held(settled).spread
    return 0.0 if settled.layout.keeps_optimizer else _moments(settled) * spread


def swapped_bytes(settled: Settled) -> float:
    """Count the bytes that one GPU swaps with the host for a refit, each one way.

    The engine's weights come. The trainer's go, those in its buffers: with LoRA the adapters'.
    """
    return 2 * _held(settled).trained + _engine_weights(settled)


def checkpoint_gib(settled: Settled) -> float:
    """Estimate one checkpoint's GiB: BF16 weights that are trained, FP32 masters, two moments."""
    return (2 + 12) * trained_parameters(settled) / GIB


def trained_parameters(settled: Settled) -> int:
    """Count the parameters that are trained: all, or with LoRA the adapters'."""
    shape, lora = settled.recipe.model.shape, settled.recipe.lora
    dense, expert, _ = _parameters(shape)
    if lora.is_on:
        dense, expert = adapter_parameters(shape, lora)
        expert *= settled.layout.expert
    return dense + expert


def kv_cache_tokens(settled: Settled, memory: MemoryByPhase) -> int:
    """Count the tokens that one engine's KV cache holds, over its `rollout_tensor` GPUs."""
    shape = settled.recipe.model.shape
    per_token = count(shape, settled.recipe.precision).kv_bytes_per_token
    shards = min(settled.layout.rollout_tensor, shape.kv_heads)
    return int(memory.phases["rollout"]["KV cache"] * shards / per_token)


class Held(NamedTuple):
    """Count what one GPU's trainer holds: `Held(8.0e9, 8.0e9, 1.0e9, 1.4e10)`."""

    held: float
    """Parameters on it, adapters included."""
    trained: float
    """Of these, the trained ones: all, or the adapters."""
    spread: float
    """Parameters whose optimizer state it has."""
    copies: float
    """Bytes of an FP8 trainer's copies of its linear weights, in both directions."""


def _held(settled: Settled) -> Held:
    """Count what a GPU trains; a weight's optimizer state is spread over the GPUs that hold it."""
    shape, lora = settled.recipe.model.shape, settled.recipe.lora
    dense, expert, quantized = _parameters(shape)
    held, spread = _shares(settled, dense, expert)
    trained = held
    if lora.is_on:
        in_dense, in_expert = adapter_parameters(shape, lora)
        trained, spread = _shares(settled, in_dense, in_expert * settled.layout.expert)
        held += trained
    share = quantized / (dense + expert) if settled.recipe.precision.train.is_quantized else 0.0
    return Held(held, trained, spread, 2 * held * share)


def _shares(settled: Settled, dense: float, expert: float) -> tuple[float, float]:
    """Return one GPU's share of parameters, and its share of their optimizer state."""
    layout, gpus = settled.layout, settled.train_gpus
    ranks = layout.tensor * layout.pipeline
    held_dense, held_expert = dense / ranks, expert / (layout.expert * layout.pipeline)
    spread_dense = held_dense / max(1, gpus // ranks)
    spread_expert = held_expert / max(1, gpus // (layout.expert * layout.pipeline))
    return held_dense + held_expert, spread_dense + spread_expert


def _moments(settled: Settled) -> int:
    """Return the bytes per parameter that NeMo RL moves; precision-aware Adam includes a master."""
    return 8 if settled.recipe.precision.keeps_masters else 10


def _gradient_bytes(settled: Settled) -> int:
    """Return the bytes of a gradient in Megatron's buffers, which FP16 would lose small ones in."""
    return 4 if settled.recipe.precision.plain.scales_loss else 2


@cache
def _parameters(shape: Shape) -> tuple[int, int, int]:
    """Count parameters outside experts, in experts, and those in linear weights of blocks."""
    groups = census(shape, Precision(rollout_linear="fp8"))  # the same linears in every format
    expert = sum(each.elements for each in groups if each.part == "experts")
    dense = sum(each.elements for each in groups) - expert
    return dense, expert, sum(each.elements for each in groups if each.quantized)


def _engine_weights(settled: Settled) -> float:
    layout, precision = settled.layout, settled.recipe.precision
    dense, expert, quantized = _parameters(settled.recipe.model.shape)
    held = dense / layout.rollout_tensor
    held += expert / max(layout.rollout_tensor, layout.rollout_expert)
    share = quantized / (dense + expert) if precision.rollout.is_quantized else 0.0
    plain = precision.plain.bytes
    return held * (plain - share * (plain - precision.rollout.bytes_per_weight))


def _logits(settled: Settled, sequences: int, kept: int) -> float:
    """Estimate the bytes of one micro-batch's logits on one GPU.

    Args:
        settled: the run.
        sequences: sequences of full length in the micro-batch.
        kept: bytes of one logit that stay allocated while a chunk is computed.
    """
    layout = settled.layout
    words = settled.recipe.model.shape.vocab / layout.tensor
    tokens = settled.sequence_tokens * sequences / layout.context
    if layout.logits_chunk:  # of a rank's own tokens
        return (kept * tokens + CHUNK_LOGIT * min(tokens, layout.logits_chunk)) * words
    return WHOLE_LOGIT * tokens * words


def _activations(settled: Settled) -> float:
    """Estimate the bytes that one micro-batch's backward pass keeps: product inputs, in BF16.

    With `recompute` every layer keeps only its input, and one layer at a time keeps the rest. An
    expert's inputs exist twice, sent and received.
    """
    shape, layout, tokens = settled.recipe.model.shape, settled.layout, settled.micro_batch_tokens
    heads = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim / layout.tensor
    if shape.experts:
        routed = shape.experts_per_token * (3 * shape.hidden + 3 * shape.expert_ffn)
    else:
        routed = 3 * shape.ffn / layout.tensor
    layer = 2 * tokens * (4 * shape.hidden + heads + routed) / layout.context
    kept = 2 * tokens * shape.hidden / layout.context
    layers = shape.layers / layout.pipeline
    return layers * kept + layer if layout.recompute else layers * layer
