"""Estimate how long a decode step and a refit take, before a GPU is asked for.

Bytes over bandwidth and operations over arithmetic rate, plus what neither explains, which
benchmarks/speed/fit_estimate.py fits on half of what an H200 measured, and tests on the other half
and on an H100: `FITTED`. The host has a pace of its own, which few layers cannot beat: `HOST`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from fp8_nemo.plan.memory import kv_cache_tokens, memory_per_gpu
from fp8_nemo.plan.model import Counts, census, count
from fp8_nemo.recipe.options.model import Model, Shape
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.settled import Settled


@dataclass(frozen=True)
class Speed:
    """Hold the rates of one GPU: `Speed(4.8e12, 989e12, 1979e12, 4.8e12, 4.8e12)`."""

    weights: float
    """Bytes a second of its own memory, at which weights are read."""
    bf16: float
    """FLOP/s of dense products on the tensor cores."""
    fp8: float
    cache: float
    """Bytes a second at which attention reads a BF16 cache."""
    fp8_cache: float
    four_bits: tuple[float, float] | None = None
    """Bytes a second at which Marlin reads weights of four bits, and FLOP/s at which it then
    multiplies; None: as others are read and multiplied, at once."""

    @staticmethod
    def of(bandwidth: float, bf16: float, fp8: float) -> Speed:
        """Return the rates of a datasheet: its memory is read at one rate, whatever is in it."""
        return Speed(bandwidth, bf16, fp8, bandwidth, bandwidth)

    def reached(self) -> Speed:
        """Return the rates that real kernels reach."""
        products = self.bf16 * PRODUCTS_REACHED, self.fp8 * PRODUCTS_REACHED
        fp8_cache = min(self.fp8_cache * FP8_CACHE_REACHED, FP8_CACHE_MOST)
        weights, cache = self.weights * WEIGHTS_REACHED, self.cache * CACHE_REACHED
        four_bits = weights / MARLIN_READS, products[0] / MARLIN_MULTIPLIES
        return Speed(weights, *products, cache, fp8_cache, four_bits)


GPU_SPEED = {
    "h100": Speed.of(3.35e12, 989e12, 1979e12),
    "h200": Speed.of(4.8e12, 989e12, 1979e12),
    "b200": Speed.of(8.0e12, 2250e12, 4500e12),
}
"""NVIDIA's datasheets of the SXM parts (H100, H200; HGX B200 by eight): the rates printed there are
with sparsity, these are half of them."""
WEIGHTS_REACHED = 0.88
"""A large copy on an H200: 4.20 of 4.8 TB/s (benchmarks/results/quantize-h200.json)."""
CACHE_REACHED, FP8_CACHE_REACHED, FP8_CACHE_MOST = 0.94, 0.82, 3.0e12
"""vLLM's FlashAttention 3, by what 64 sequences of 4k tokens take more than of 1k: BF16 reads 3.15
of 3.35 TB/s on an H100 and 4.51 of 4.8 on an H200; FP8 2.74 and 3.0, where the kernel and no longer
the memory is the limit (decode-*-h100.json, rollout-8b-h200.json)."""
XQA_CACHE = {"h200": 4.2e12}
"""Bytes a second at which XQA reads an FP8 cache (`glue.decode`): six decode steps of 8B come out
within 8%, at 4 to 256 sequences of 1k to 32k tokens (decode-8b-xqa-h200.json). On an H100 it was
not timed; FlashAttention 3's rate stands in, as its attention took longer at every point."""
PRODUCTS_REACHED = 0.8
"""Assumed. Products of training reached 0.76 in BF16 and 0.54 in FP8, at 8,192 tokens on an H200
(benchmarks/results/bench-train-8b-h200.json); those of a rollout were not measured."""


MARLIN_READS, MARLIN_MULTIPLIES = 1.305, 1.845
"""Times as long as at the rates reached that Marlin reads weights of four bits, and then multiplies
with them, one after the other: 8B on an H100, 8 to 256 sequences, within 4.3% (estimate-h200.json).
Its products reach 0.43 of the GPU's peak."""


class Fitted(NamedTuple):
    """Hold what neither bytes nor operations explain: `Fitted(1.27e-3, 13.2e-6, 0.54e-3, 0.32)`."""

    decode: float
    """Seconds of a decode step."""
    sequence: float
    """Seconds of a decode step for each of its sequences."""
    quantize: float
    """Seconds of a decode step with FP8 linears, whose inputs are quantized."""
    refit: float | None = None
    """Seconds of a refit's transfer; None where none was measured."""

    def of_step(self, precision: Precision, batch: float) -> float:
        """Seconds of one decode step of so many sequences."""
        quantize = self.quantize if precision.rollout.block else 0.0
        return self.decode + self.sequence * batch + quantize


FITTED = {
    ("llama31-8b", 32): Fitted(1.267e-3, 13.16e-6, 0.544e-3, refit=0.324),
    ("qwen3-30b-a3b", 48): Fitted(2.493e-3, 18.56e-6, 0.407e-3),
}
"""By model and layers, of one H200 (benchmarks/results/estimate-h200.json): decode steps of 8B come
out within 5%, of an H100 too, and of 30B-A3B within 5%; a refit's transfer within 13%. No other
model was measured."""


class Host(NamedTuple):
    """State what the host does for one decode step: `Host(0.3e-3, 46e-6)`."""

    step: float
    """Seconds."""
    sequence: float
    """Seconds for each sequence: it is scheduled, and its token is taken."""


HOST = Host(0.3e-3, 46e-6)
"""One thread of a 16-core Xeon, engine and worker in one process as in NeMo RL: 3.1 ms for 64
sequences (8 layers of 8B in FP8, real-steps-8b8-stock-h100.json), 6.5 for 128 (the same model, all
of it Python), 12.0 for 256, beside the device's work (decode-kv-h100.json)."""


MOST_ALIKE = {False: ("llama31-8b", 32), True: ("qwen3-30b-a3b", 48)}
"""Whose costs stand for those of a model that was not measured; by whether it has experts."""
EXCHANGE = 20e-6
"""Assumed seconds of one all-reduce of a decode step's activations over NVLink. With it a step of
30B-A3B's BF16 engine over two H100s comes out 1 and 4% short (rollout-30b-two-h100.json)."""
UNSPLIT = 9.8e-9
"""Seconds that FlashAttention 3 needs for a key of one layer if it never splits a sequence's keys,
as with `precision.align=exact`: one block of threads reads those of a KV head, however idle the GPU
is (decode-exact-h200.json, one sequence of 8k tokens). Assumed alike on an H100."""
UNTUNED = 1.5
"""Times as long as with tuned tiles that FP8 experts take on an H100 with vLLM's default, which an
engine of several GPUs has; from 128 rows (1.36 to 1.63, experts-h100.json)."""


@dataclass(frozen=True)
class DecodeWork:
    """Count what a decode step of the whole batch reads and multiplies, over all engine GPUs."""

    weight_bytes: float
    kv_bytes: float
    fp8_flops: float
    """Products with FP8 weights."""
    bf16_flops: float
    """Products with the others: `lm_head`, routers, all of them in BF16."""
    attention_flops: float
    four_bit_bytes: float = 0.0
    """Weights in four bits, which are in none of the numbers above."""
    four_bit_flops: float = 0.0

    def seconds(self, speed: Speed, fp8_attention: bool, unsplit: float = 0.0) -> float:
        """Return the time of weights plus cache, for each the larger of reading and multiplying.

        Args:
            speed: of the GPU.
            fp8_attention: whether attention multiplies in FP8.
            unsplit: least seconds of attention.
        """
        read, bf16_flops, marlin = self.weight_bytes, self.bf16_flops, 0.0
        if speed.four_bits:
            reads, multiplies = speed.four_bits
            marlin = self.four_bit_bytes / reads + self.four_bit_flops / multiplies
        else:
            read, bf16_flops = read + self.four_bit_bytes, bf16_flops + self.four_bit_flops
        linear = self.fp8_flops / speed.fp8 + bf16_flops / speed.bf16
        attention = self.attention_flops / (speed.fp8 if fp8_attention else speed.bf16)
        cache = speed.fp8_cache if fp8_attention else speed.cache
        attention = max(self.kv_bytes / cache, attention, unsplit)
        return max(read / speed.weights, linear) + attention + marlin


def decode_work(
    shape: Shape, precision: Precision, batch: float, context: float, slower: float = 1.0
) -> DecodeWork:
    """Count the bytes and operations of one step, which decodes one token of every sequence.

    It reads every weight once, except for the embedding (a row per token) and the experts. Of
    these it reads the ones that the batch is expected to use: `E * (1 - (1 - k/E)^batch)` if routes
    are even.

    Args:
        shape: of the model.
        precision: with `rollout_linear` and `rollout_kv`.
        batch: sequences.
        context: tokens of each in the cache, on average.
        slower: times as long as their bytes that quantized experts take.
    """
    read = flops = fp8_flops = four_bit_bytes = four_bit_flops = 0.0
    even = shape.experts_per_token / shape.experts if shape.experts else 0.0
    for part, fp8, matrix, elements in census(shape, precision):
        if part == "embedding" and not shape.tied:
            continue
        each = (precision.rollout if fp8 else precision.plain).bytes_per_weight
        is_expert = part == "experts"
        each *= slower if is_expert and fp8 else 1
        used = elements * each * (1 - (1 - even) ** batch if is_expert else 1)
        operations = 2 * elements * batch * (even if is_expert else 1) if matrix else 0
        if fp8 and precision.rollout.group:
            four_bit_bytes, four_bit_flops = four_bit_bytes + used, four_bit_flops + operations
            continue
        read, flops = read + used, flops + operations
        fp8_flops += operations * fp8
    heads = shape.layers * shape.heads * shape.head_dim
    cached = batch * context
    return DecodeWork(
        weight_bytes=read,
        kv_bytes=cached * count(shape, precision).kv_bytes_per_token,
        fp8_flops=fp8_flops,
        bf16_flops=flops - fp8_flops,
        attention_flops=4 * heads * cached,
        four_bit_bytes=four_bit_bytes,
        four_bit_flops=four_bit_flops,
    )


@lru_cache(2**14)  # many layouts of a plan have the same engine
def decode_seconds(
    shape: Shape,
    precision: Precision,
    batch: float,
    context: float,
    gpu: str,
    fitted: Fitted,
    gpus: int = 1,
    xqa: bool = False,
) -> float:
    """Estimate the device's seconds of one decode step, at rates that kernels reach.

    Args:
        shape: of the model.
        precision: with `rollout_linear` and `rollout_kv`.
        batch: sequences.
        context: tokens of each in the cache, on average.
        gpu: a key of `GPU_SPEED`.
        fitted: what neither bytes nor operations explain, of the model or one like it.
        gpus: of the engine. They share everything evenly but the keys of a head that are not
            split, and exchange activations in every layer.
        xqa: whether XQA attends, else FlashAttention 3.
    """
    is_untuned = gpus > 1 and gpu == "h100" and batch >= 128
    work = decode_work(shape, precision, batch, context, UNTUNED if is_untuned else 1.0)
    unsplit = gpus * shape.layers * context * UNSPLIT if precision.is_exact else 0.0
    speed = GPU_SPEED[gpu].reached()
    if xqa:
        speed = replace(speed, fp8_cache=XQA_CACHE.get(gpu, speed.fp8_cache))
    read = work.seconds(speed, precision.cache.is_quantized, unsplit)
    exchange = 2 * shape.layers * EXCHANGE if gpus > 1 else 0.0
    return (read + fitted.of_step(precision, batch)) / gpus + exchange


class Decode(NamedTuple):
    """State what one engine decodes: `Decode(160, 9800.0)`."""

    running: int
    """Sequences that its KV cache holds at once."""
    tokens_per_second: float


def decode_of_engine(settled: Settled, context: float) -> Decode:
    """Estimate an engine's speed while all its sequences are under way.

    Args:
        settled: of the run.
        context: tokens of each sequence, on average.
    """
    cached = kv_cache_tokens(settled, memory_per_gpu(settled))
    running = int(max(1, min(settled.sequences_per_engine, cached // context)))
    return Decode(running, running / engine_step_seconds(settled, running, context))


def engine_step_seconds(settled: Settled, running: float, context: float) -> float:
    """Estimate one decode step of an engine, by its device or its host, whichever takes longer.

    Args:
        settled: of the run. A model that was not measured gets the fixed cost of one that was.
        running: sequences under way; a mean need not be whole.
        context: tokens of each, on average.
    """
    recipe, gpus = settled.recipe, settled.layout.rollout_tensor
    shape, gpu, fitted = recipe.model.shape, recipe.cluster.gpu, fitted_for(recipe.model)
    xqa = recipe.decodes_by_xqa
    device = decode_seconds(shape, recipe.precision, running, context, gpu, fitted, gpus, xqa)
    return max(device, HOST.step + HOST.sequence * running)


def fitted_for(model: Model) -> Fitted:
    """Return the fitted constants of a model, else those of the most similar one.

    Of a model with fewer or more layers, half of a step's costs go by layers. So 8 layers of 8B
    come out 10% too long in FP8 and 12% too short in BF16 on an H100, and 16 on an H200 6% too
    short, in NeMo RL (real-steps-8b8-*-h100.json, real-steps-8b16-h200.json).
    """
    if found := FITTED.get((model.name, model.shape.layers)):
        return found
    alike = MOST_ALIKE[model.shape.experts > 0]
    share = (1 + model.shape.layers / alike[1]) / 2
    decode, sequence, quantize, _ = FITTED[alike]
    return Fitted(decode * share, sequence * share, quantize * share)


def is_fitted(settled: Settled) -> bool:
    """Return whether an engine like this was measured."""
    model = settled.recipe.model
    return settled.layout.rollout_tensor == 1 and (model.name, model.shape.layers) in FITTED


def refit_seconds(sent: Counts, gpu: str, fixed: float) -> float:
    """Estimate the seconds of a refit between two processes of one GPU, or of two.

    The trainer reads its BF16 weights and writes the wire's tensors. The engine reads those and
    writes its own. All of this is memory traffic.

    Args:
        sent: what is sent, in the precision of the wire.
        gpu: a key of `GPU_SPEED`.
        fixed: seconds that bytes do not explain; fitted per model.
    """
    moved = sent.refit_bytes_bf16 + 3 * sent.refit_bytes
    return moved / GPU_SPEED[gpu].reached().weights + fixed
