"""Estimate the seconds of a GRPO step by phase, before a GPU is asked for.

A phase is operations over the rates that kernels reach, and no layer takes less than its launches
take the host. Rates are fitted on 8B's layers on an H200, and tested on what else was measured
(benchmarks/results/estimate-training-h200.json). An H100 multiplies as fast, and reads slower.
Answers are taken as half of the longest on average, and end one after the other. Left out:
exchange between nodes, data and rewards.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

from fp8_nemo.glue.wire import EXPERT_SLABS
from fp8_nemo.plan.memory import moved_bytes, swapped_bytes
from fp8_nemo.plan.model import Counts, adapters, census, count
from fp8_nemo.plan.speed import (
    FITTED,
    GPU_SPEED,
    decode_of_engine,
    engine_step_seconds,
    refit_seconds,
)
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.settled import Settled

PROMPT = 256
"""Assumed tokens of a prompt."""
SLICES = 12
"""Parts of a rollout, in each of which as many answers are under way as in its middle."""


class Lengths(NamedTuple):
    """Hold the mean tokens of a step's prompts and answers: `Lengths(256, 1920)`."""

    prompt: float
    answer: float

    @property
    def sequence(self) -> float:
        """Return the tokens of both."""
        return self.prompt + self.answer


class Reached(NamedTuple):
    """State what part of a format's peak a pass reaches: `Reached(forward=0.6, backward=0.55)`."""

    forward: float
    backward: float


PLAIN = "bf16"
"""Whose row every format of 16 bits takes: tensor cores multiply FP16 as fast."""
LINEARS = {"bf16": Reached(0.584, 0.541), "fp8": Reached(0.405, 0.338)}
"""Of the datasheet's FLOP/s in that format, norms and casts included."""
ATTENTION = Reached(0.841, 0.872)
"""Of BF16's, in every precision: FP8 training leaves attention in BF16."""
FLASH_2 = 1.0, 1.6
"""Factors on the time of that, forth and back, with `precision.align=exact`. In layers of 8B on an
H100 its kernels took 1.33 to 1.50 times as long together (bench-train-8b-exact-h100.json)."""
UNFILLED = 0.08
"""Assumed part of a full sequence that packing leaves empty in each micro-batch."""
LAUNCH = {
    ("dense", "bf16"): Reached(2.0e-3, 2.9e-3),
    ("dense", "fp8"): Reached(2.4e-3, 3.6e-3),
    ("tensor", "bf16"): Reached(3.0e-3, 2.9e-3),
    ("tensor", "fp8"): Reached(5.1e-3, 3.6e-3),
    ("experts", "bf16"): Reached(9e-3, 42e-3),
    ("experts", "fp8"): Reached(11e-3, 14e-3),
    ("grouped", "bf16"): Reached(5e-3, 6e-3),
    ("frozen", "bf16"): Reached(5e-3, 6e-3),
}
"""Least seconds of a layer's pass: what the host needs to launch it, beside `LAUNCH_EXPERT`. Not
fitted: read off by hand (bench-train-8b-tp2-h200.json; of experts, train-worker-30b*-h200.json and,
in FP8, real-steps-30b6-h200.json); of `dense` in BF16, assumed. That tensor parallel adds to
experts what it adds to `dense` is assumed too."""
LAUNCH_EXPERT = {
    ("experts", "bf16"): Reached(0.14e-3, 0.10e-3),
    ("experts", "fp8"): Reached(0.085e-3, 0.28e-3),
    ("grouped", "bf16"): Reached(0.045e-3, 0.23e-3),
    ("frozen", "bf16"): Reached(0.045e-3, 0.05e-3),
}
"""What each expert that a GPU holds adds to it; `grouped`: by CUTLASS (`settled.GROUPED`).

cuBLAS is read off one machine: a layer of 32 of Qwen3-30B-A3B's experts took it 14 ms forward and
44 backward, of all 128 31 and 50. On that machine CUTLASS took 10 and 24 ms with 32, 26 and 19 with
128. Its constants are read off five later files, of four leases. There 16 and 32 experts took about
6 ms forward and 9 to 13 backward with replayed routes (train-worker-30b16e-h200.json,
train-worker-30b32-again-h200.json), 128 took 9 to 12 and 29 to 42 (real-steps-30b6-grouped-h200
.json, real-steps-30b6-linear-h200.json, real-steps-30b16-8k-h200.json). `frozen`: experts get no
gradients, as LoRA trains attention. All 128 took 11 to 13 ms backward (the last of these files);
forward they are taken as `grouped`."""
LAUNCH_DISPATCH = Reached(4.5e-3, 0.0)
"""What expert parallel adds to `grouped` and `frozen`: tokens go to other GPUs' experts and back.
Three runs on two H200s took this longer forward than `frozen` says, and no longer backward
(real-steps-30b-lora-2-h200.json, real-steps-30b-lora-short-2-h200.json); more GPUs are assumed
alike. cuBLAS needs no such constant: with it four H100s trained as long as planned
(real-steps-30b16-4-h100.json)."""
LAUNCH_RING = Reached(4.9e-3, 1.5e-3)
"""What context parallel adds to it: K and V go around a ring of GPUs. Read off two H200s with all
of 8B in FP8, sequences of 7,600 tokens over both: less `dense` and `PAUSE`, logprobs and training
leave this (real-steps-8b-8k-2-h200.json). In BF16, beside tensor parallel and of experts it is
assumed; of 8 layers in BF16 on two H100s logprobs and training come out 5 and 8% too short
(real-steps-8b8-context-h100.json)."""
PAUSE = 0.053 / 32
"""Seconds that NeMo RL's host adds to each micro-batch of training for each layer, with the GPU
idle: with 8B's 32, 33 of two answers took 1.7 s less than 64 of one (real-steps-8b-2-h200.json). By
layers, training of 8 of them comes out 1% too long (real-steps-8b8-stock-h100.json)."""
LOGIT_BYTES = Reached(58, 11)
"""Memory traffic of one logit in the loss, beside the product that makes it."""
CHUNKED_BYTES = 60
"""More of it in a backward pass that goes by chunks: softmax again, and chosen tokens one-hot."""
ADAPTER_OUT, ADAPTER_IN = Reached(12, 8), Reached(2, 10)
"""Memory traffic in bytes of a value of an adapter's output and input, as Megatron-Bridge computes
it beside its linear: product, scaling and sum apart. Assumed: none was measured, nor what the host
needs to launch them. The products themselves take less, for a rank of some hundreds."""
MERGE_BYTES = 36
"""Memory traffic of one weight that a refit adds its adapter to, in FP32; assumed."""
NVLINK = 360e9
"""Assumed bytes a second between two GPUs of a node: 0.8 of a direction's 450e9."""
PINNED = 50e9
"""Bytes a second of page-locked copies between host and GPU (49 and 51e9 of Adam's moments,
move-optimizer-h100.json)."""
PAGEABLE, PAGEABLE_ALONE = Reached(2.7e9, 11e9), 0.65
"""The same of a whole node as NeMo RL moves the optimizer, to the host and back, and the share of
it that one GPU reaches. To the host, two H200s had 2.9 and 2.4e9, four H100s 3.0e9
(step-check-h200.json, real-steps-8b-stock-2k-2-h200.json, real-steps-8b-4-h100.json), one H100 0.65
of these (16 s both ways, real-steps-8b8-stock-h100.json). More GPUs were not timed."""
DOUBLED, DOUBLED_QUANTIZED = 1.04, 1.2
"""Factor on the rollout for each doubling of an engine's GPUs in NeMo RL, by Ray executor V2, and
the same where its weights are quantized. With two H100s an engine in BF16 took 1.05 and 1.10 times
what a plan without it says (8B and experts: real-steps-8b-4-h100.json,
real-steps-30b16-4-h100.json), with one GPU 1.01 to 1.05 (8B, docs/speed.md). FP8 sampled once:
30B-A3B on two H200s, 19.5 s by vLLM and 1.8 around it, as in BF16's rollouts
(nemo-30b-lora-short-2-h200.json). More than two GPUs were not timed, nor four bits: assumed alike.
By vLLM's own processes two GPUs need no factor in BF16 (speed.EXCHANGE). Under V1, which FP8 has
with stock glue and v0.7.0, BF16 took twice what this says (14.8 and 16.7 ms a decode step,
nemo-30b16-4-h100.json)."""
REFIT_REST = 0.17
"""Seconds of a refit that neither bytes nor weights explain. With it a plan says 1.01 s of 8B in
FP8 and 1.15 in BF16, which took 1.01 to 1.17 and 1.11 to 1.25 on two H200s. It says 0.65 of 16 of
its layers (they took 0.68), 0.47 of 8 (0.37 to 0.51), 0.31 of Llama 3.2 1B (0.29) and 0.17 of tiny
models (0.13). With four GPUs at once 8B took 26 to 54% longer than it says; why is not known."""
REFIT_PARAMETERS = 8.03e9
"""8B's, by which the transfer's fitted seconds go."""
REFIT_EXPERT = {"copied": 0.14e-3, "loaded": 0.30e-3}
"""Seconds that each weight of an expert adds to a refit, for its launches and its name; copied by
our receiver, or by vLLM's loader. Taken from two runs. Of 2,304 such weights the rest explains 0.62
s of a copied refit in FP8, 0.70 in BF16; they took 0.95 and 1.02
(real-steps-30b6-linear-h200.json). Of 1,152 it explains 0.43, and by the loader they took 0.77
(real-steps-30b3-h100.json)."""
REFIT_KEPT = 25e-6
"""Seconds for each weight that a refit leaves as it is and compares with what was proven: 18,675 of
them are most of the 0.5 s of a transfer of 30B-A3B's with LoRA (nemo-30b-lora-short-2-h200.json).
"""
REFIT_APART = 0.208
"""Seconds of a refit to other GPUs that its bytes do not explain: both hosts' launches, of 8B's
tensors, with names alone compared (the row `ledger` of benchmarks/results/glue-8b-nccl-h200.json).
"""


class StepSeconds(NamedTuple):
    """Hold the seconds of one step: `StepSeconds(36.7, 31.6, 61.8, 0.9, 0.3)`."""

    rollout: float
    logprob: float
    train: float
    refit: float
    optimizer: float
    """Adam's state to the host and back."""

    @property
    def total(self) -> float:
        """Return the sum of all phases, one after the other."""
        return sum(self)


class OverlappedSeconds(StepSeconds):
    """Hold an asynchronous step's seconds: engines sample the next one's answers meanwhile."""

    @property
    def total(self) -> float:
        """Return the longer of rollout and training, then the refit, which waits for both."""
        return max(self.rollout, self.logprob + self.train + self.optimizer) + self.refit


class LayerWork(NamedTuple):
    """Count a token's multiplications in one layer, and at the model's end."""

    quantized: float
    """FLOP of products that FP8 training quantizes, in one layer."""
    other: float
    """FLOP of the layer's other products."""
    end: float
    """FLOP of `lm_head`."""


def usual_lengths(settled: Settled) -> Lengths:
    """Return the lengths that a plan assumes: answers half as long as the longest, on average."""
    return Lengths(PROMPT, max(1.0, _longest(settled, PROMPT) / 2))


def mean_context(settled: Settled, lengths: Lengths) -> float:
    """Return the tokens of a sequence under way, prompt included, by the mean over a rollout."""
    longest, falls = _ends(settled, lengths)
    return lengths.prompt + longest / (falls + 2)


def _ends(settled: Settled, lengths: Lengths) -> tuple[float, float]:
    """Return the longest answer's tokens, and the power `k` by which answers end."""
    longest = max(_longest(settled, lengths.prompt), lengths.answer)
    return longest, longest / lengths.answer - 1


def _longest(settled: Settled, prompt: float) -> float:
    return min(settled.response_tokens, settled.sequence_tokens - prompt)


def step_seconds(settled: Settled, lengths: Lengths | None = None) -> StepSeconds:
    """Estimate a step of a run, by phase.

    Args:
        settled: of the run.
        lengths: of its prompts and answers; by default the usual ones.
    """
    lengths = lengths or usual_lengths(settled)
    recipe = settled.recipe
    passes = 2 if settled.kl_penalty else 1
    phases = OverlappedSeconds if recipe.grpo.is_asynchronous else StepSeconds
    return phases(
        rollout=rollout_seconds(settled, lengths),
        logprob=passes * _passes(settled, lengths, settled.layout.logprob_batch, trains=False),
        train=_passes(settled, lengths, settled.layout.micro_batch, trains=True),
        refit=_refit_phase(settled),
        optimizer=_optimizer_seconds(settled),
    )


def rollout_seconds(settled: Settled, lengths: Lengths) -> float:
    """Estimate the sampling of all of a step's answers, every engine at work.

    Answers end one after the other. At a share `x` of the longest one's tokens, `(1 - x)**k` of
    them go on, with `k` such that their mean is that of `lengths`: half of the longest is a
    straight line, k = 1. While some wait for the cache, one begins when another ends; the last to
    run are taken as begun together. An engine of 8B simulated step by step takes as long within 5%.
    For means below a tenth of the longest this is rough: few answers are the longest.
    """
    longest, falls = _ends(settled, lengths)
    each = settled.sequences_per_batch / settled.engines
    full = decode_of_engine(settled, mean_context(settled, lengths))
    waiting = max(0.0, each - full.running)
    seconds = waiting * lengths.answer / full.tokens_per_second
    for share in ((place + 0.5) / SLICES for place in range(SLICES)):
        running = (each - waiting) * (1 - share) ** falls
        step = engine_step_seconds(settled, running, lengths.prompt + share * longest)
        seconds += longest / SLICES * step
    quantized = settled.recipe.precision.rollout.is_quantized
    doubled = DOUBLED_QUANTIZED if quantized else DOUBLED
    return doubled ** math.log2(settled.layout.rollout_tensor) * seconds


@cache
def layer_work(shape: Shape) -> LayerWork:
    """Count a token's forward FLOP; of the experts only those that it is routed to count."""
    share = shape.experts_per_token / shape.experts if shape.experts else 1.0
    blocks = {True: 0.0, False: 0.0}
    for part, quantized, matrix, elements in census(shape, Precision(rollout_linear="fp8")):
        if matrix and part in ("layers", "experts"):
            taken = share if part == "experts" else 1.0
            blocks[quantized] += 2 * elements * taken / shape.layers
    return LayerWork(blocks[True], blocks[False], 2.0 * shape.vocab * shape.hidden)


def attention_work(shape: Shape, lengths: Lengths) -> float:
    """Count the FLOP of one token's causal attention in one layer, forward."""
    return 2 * shape.heads * shape.head_dim * lengths.sequence


def _passes(settled: Settled, lengths: Lengths, sequences: int, *, trains: bool) -> float:
    """Estimate the seconds in which a GPU takes all its sequences, packed, through the model."""
    tokens = settled.sequences_per_step * lengths.sequence / settled.data_parallel
    room = settled.sequence_tokens * (sequences - UNFILLED)
    micro_batches = math.ceil(tokens / room)
    each = tokens / micro_batches
    seconds = _pass_seconds(settled, lengths, each, 0)
    if trains:
        layers = settled.recipe.model.shape.layers / settled.layout.pipeline
        seconds += _pass_seconds(settled, lengths, each, 1) + PAUSE * layers
    if trains and settled.layout.recompute:
        seconds += stack_seconds(settled, lengths, each, 0)
    return micro_batches * seconds


def _pass_seconds(settled: Settled, lengths: Lengths, tokens: float, way: int) -> float:
    """Estimate one micro-batch's seconds, forward (0) or backward (1), logits and loss included."""
    shape, layout = settled.recipe.model.shape, settled.layout
    speed = GPU_SPEED[settled.recipe.cluster.gpu]
    shared = layout.tensor * layout.context
    product = _products(settled, way) * layer_work(shape).end / (LINEARS["bf16"][way] * speed.bf16)
    traffic = LOGIT_BYTES[way] + (CHUNKED_BYTES if way and layout.logits_chunk else 0)
    logits = traffic * shape.vocab / speed.reached().weights
    end = tokens / shared * (product + logits)
    return stack_seconds(settled, lengths, tokens, way) + end


def stack_seconds(settled: Settled, lengths: Lengths, tokens: float, way: int) -> float:
    """Estimate one micro-batch's seconds in all layers of a GPU, forward (0) or backward (1)."""
    recipe, layout = settled.recipe, settled.layout
    shape, bf16 = recipe.model.shape, GPU_SPEED[recipe.cluster.gpu].bf16
    fp8 = GPU_SPEED[recipe.cluster.gpu].fp8
    train = recipe.precision.train
    name, peak = (train.name, fp8) if train.is_quantized else (PLAIN, bf16)
    work, ways = layer_work(shape), (1, 2.5)
    linear = work.quantized / (LINEARS[name][way] * peak) + work.other / (
        LINEARS["bf16"][way] * bf16
    )
    attention = ways[way] * attention_work(shape, lengths) / (ATTENTION[way] * bf16)
    if recipe.precision.is_exact:
        attention *= FLASH_2[way]
    each_token = _products(settled, way) * linear + attention + _adapter_seconds(settled, way)
    device = tokens / (layout.tensor * layout.context) * each_token
    exchanged = (_exchange(settled, tokens) + _dispatched(settled, tokens)) / NVLINK
    slower = max(device, _launches(settled, name, way))
    return shape.layers / layout.pipeline * (slower + exchanged)


def _launches(settled: Settled, name: str, way: int) -> float:
    """Estimate the seconds that the host needs to launch one layer's pass."""
    layout, shape = settled.layout, settled.recipe.model.shape
    kind, host = "dense", 0.0
    if shape.experts:
        kind = "experts"
        if settled.groups_experts:
            kind = "frozen" if _freezes_experts(settled.recipe) else "grouped"
            host = LAUNCH_DISPATCH[way] if layout.expert > 1 else 0.0
        host += LAUNCH_EXPERT[kind, name][way] * shape.experts / layout.expert
    if layout.tensor > 1:
        host += LAUNCH["tensor", name][way] - LAUNCH["dense", name][way]
    if layout.context > 1:
        host += LAUNCH_RING[way]
    return LAUNCH[kind, name][way] + host


def _products(settled: Settled, way: int) -> int:
    """Count the products of one weight: a frozen one needs no gradient of its own."""
    return 2 if way and not settled.recipe.lora.is_on else 1


def _freezes_experts(recipe: Recipe) -> bool:
    """Return whether no gradient is made in experts: adapters are elsewhere."""
    lora = recipe.lora
    return lora.is_on and not any(x.in_experts for x in adapters(recipe.model.shape, lora))


def _adapter_seconds(settled: Settled, way: int) -> float:
    """Estimate what a token's adapters take in one layer, forward (0) or backward (1)."""
    recipe, shape = settled.recipe, settled.recipe.model.shape
    moved = sum(
        (ADAPTER_OUT[way] * each.out + ADAPTER_IN[way] * each.into)
        * (shape.experts_per_token if each.in_experts else 1)
        for each in adapters(shape, recipe.lora)
    )
    return moved / GPU_SPEED[recipe.cluster.gpu].reached().weights


def _exchange(settled: Settled, tokens: float) -> float:
    """Count the bytes that a GPU receives in one layer's pass: TP's sums, and CP's K and V."""
    shape, layout = settled.recipe.model.shape, settled.layout
    summed = 2 * 2 * (layout.tensor - 1) / layout.tensor * 2 * shape.hidden / layout.context
    kept = 2 * 2 * shape.kv_heads * shape.head_dim / layout.tensor
    return tokens * (summed + kept * (layout.context - 1) / layout.context)


def _dispatched(settled: Settled, tokens: float) -> float:
    """Count the bytes that a GPU sends to others' experts in a layer's pass, and gets back."""
    shape, layout = settled.recipe.model.shape, settled.layout
    copies = tokens / (layout.tensor * layout.context) * shape.experts_per_token
    return 2 * 2 * shape.hidden * copies * (layout.expert - 1) / layout.expert


def _refit_phase(settled: Settled) -> float:
    """Estimate the seconds of a refit after the first one."""
    recipe = settled.recipe
    shape, gpu = recipe.model.shape, recipe.cluster.gpu
    wire = recipe.precision if recipe.glue.sends_fp8 else Precision()
    sent = count(shape, wire, recipe.resent)
    is_copied = recipe.glue.quantize == "fused" and recipe.glue.verify == "bytes"
    each = REFIT_EXPERT["copied" if is_copied else "loaded"]
    sent_of_one = EXPERT_SLABS.keys() & set(recipe.resent or EXPERT_SLABS)
    launches = each * len(sent_of_one) * shape.layers * shape.experts
    kept = REFIT_KEPT * (count(shape, wire).weights - sent.weights)
    merged = count(shape, wire, recipe.adapted).parameters if recipe.adapted else 0
    merging = MERGE_BYTES * merged / GPU_SPEED[gpu].reached().weights
    return refit_seconds(sent, gpu, _transfer(settled, sent)) + launches + kept + merging


def _transfer(settled: Settled, sent: Counts) -> float:
    """Estimate a refit's seconds beside the memory traffic of its weights.

    Where trainer and engine share a GPU they change places on it, through page-locked memory;
    stock's worker took no longer. The way back is no part of a refit.
    """
    if not settled.shares_gpus:
        return REFIT_APART + sent.refit_bytes / NVLINK
    launched = (FITTED["llama31-8b", 32].refit or 0.0) * sent.parameters / REFIT_PARAMETERS
    return REFIT_REST + launched + swapped_bytes(settled) / PINNED


def _optimizer_seconds(settled: Settled) -> float:
    """Estimate the seconds in which Adam's state goes to the host and back, once a step."""
    moved, recipe = moved_bytes(settled), settled.recipe
    if recipe.glue.needs_plugin(recipe.precision):
        return 2 * moved / PINNED
    gpus = min(settled.train_gpus, recipe.cluster.gpus_per_node)
    share = min(1.0, PAGEABLE_ALONE * gpus)
    return gpus * moved / share * (1 / PAGEABLE.forward + 1 / PAGEABLE.backward)
