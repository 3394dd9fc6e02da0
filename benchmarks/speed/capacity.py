"""Bound what an engine can do: the roofline of a decode step, and what a KV cache holds."""

from __future__ import annotations

from dataclasses import replace

from fp8_nemo.plan.memory import GIB, GPU_GIB
from fp8_nemo.plan.model import count
from fp8_nemo.plan.speed import GPU_SPEED, decode_work
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision

CACHE_BLOCK = 16
"""Tokens of one block of vLLM's KV cache."""


def decode_floor(shape: Shape, precision: Precision, batch: int, context: float, gpu: str) -> float:
    """Return the seconds that no step can beat: the roofline, by the datasheet."""
    work = decode_work(shape, precision, batch, context)
    return work.seconds(GPU_SPEED[gpu], precision.rollout_kv == "fp8")


def kv_capacity(shape: Shape, precision: Precision, kv_bytes: float) -> int:
    """Return the tokens that a KV cache of so many bytes holds, in whole blocks."""
    block = CACHE_BLOCK * count(shape, precision).kv_bytes_per_token
    return int(kv_bytes // block) * CACHE_BLOCK


def engine_kv_bytes(
    shape: Shape, precision: Precision, gpu: str, share: float, reserve: float
) -> float:
    """Return the bytes that an engine on one GPU leaves to its KV cache.

    Args:
        shape: of the model.
        precision: of the engine's weights.
        gpu: a key of `GPU_GIB`.
        share: of the GPU that the engine takes (`gpu_memory_utilization`).
        reserve: bytes of activations, graphs and libraries; fitted per model.
    """
    weights = count(shape, replace(precision, rollout_kv="bf16")).refit_bytes
    return GPU_GIB[gpu] * GIB * share - weights - reserve
