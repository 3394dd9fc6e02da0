"""What a recipe's weights and cache weigh, before a GPU is asked for.

Exact counts of bytes from the model's numbers; speeds are measured (benchmarks/), not estimated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fp8_nemo.schema import Precision, Shape
from fp8_nemo.weights import SCALE_SUFFIX, named_shapes, wire_specs

DTYPE_BYTES = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Estimate:
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


def estimate(shape: Shape, precision: Precision) -> Estimate:
    """Counts from `model.shape` and the precision."""
    shapes = named_shapes(shape)
    specs = wire_specs(shapes, precision, shape.layers)
    scales = [name for name in specs if name.endswith(SCALE_SUFFIX)]
    parameters = sum(math.prod(each) for each in shapes.values())
    kv_bytes = DTYPE_BYTES["float8_e4m3fn" if precision.rollout_kv == "fp8" else "bfloat16"]
    return Estimate(
        parameters=parameters,
        fp8_weights=len(scales),
        bf16_weights=len(shapes) - len(scales),
        refit_bytes=sum(DTYPE_BYTES[each.dtype] * math.prod(each.shape) for each in specs.values()),
        refit_bytes_bf16=2 * parameters,
        kv_bytes_per_token=2 * shape.layers * shape.kv_heads * shape.head_dim * kv_bytes,
    )
