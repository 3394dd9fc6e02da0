"""`ops` as Triton kernels, one launch each, with the trainer's instructions for Hopper.

RoPE: TransformerEngine's kernel of 2.12.0 for sm_90 multiplies the rotated half by the sine, rounds
that, and adds the product with the cosine in one FFMA (`cuobjdump -sass` of its library; the source
is in fused_rope.cu). SiLU: the expression that Inductor makes of Megatron's `bias_swiglu`,
`x * sigmoid(x) * up` in FP32. The quantizer is the one of the glue, whose bytes and scales are
TransformerEngine's, with scales that lie as DeepGEMM reads them.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false
# Triton comes with a CUDA build of torch, and only there is this module imported.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_nemo.glue.kernels import BLOCK, FP8_MAX, _scales

ROWS_AT_ONCE = 8  # of the quantizer; decode has few
COLUMNS_AT_ONCE = 1024  # of SiLU


def rope(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin: Tensor, head: int
) -> tuple[Tensor, Tensor]:
    """Take and give what `ops.rope` does; D is a power of two."""
    turned = query.new_empty(query.shape), key.new_empty(key.shape)
    T, heads = len(positions), (query.shape[1] // head, key.shape[1] // head)
    if T:
        _rope[(T, sum(heads))](
            positions, query, key, *turned, cos_sin, query.stride(0), key.stride(0), *heads,
            HALF=head // 2, num_warps=1,
        )  # fmt: skip
    return turned


def silu(gate_up: Tensor) -> Tensor:
    """Take and give what `ops.silu` does."""
    T, F = gate_up.shape[0], gate_up.shape[1] // 2
    result = gate_up.new_empty(T, F)
    if T:
        grid = (T, triton.cdiv(F, COLUMNS_AT_ONCE))
        _silu[grid](gate_up, result, F, gate_up.stride(0), COLUMNS=COLUMNS_AT_ONCE)
    return result


def quantize(x_TI: Tensor, scales: Tensor) -> Tensor:
    """Return E4M3 `[T, I]` and fill `scales` `[T, Q]`, of any strides."""
    codes = torch.empty(x_TI.shape, dtype=torch.float8_e4m3fn, device=x_TI.device)
    quantize_into(x_TI, codes, scales)
    return codes


def quantize_into(x_TI: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Fill `codes` `[T, I]` and `scales`; codes that are not E4M3 hold what is to be rounded."""
    T, I = x_TI.shape
    if T:
        _quantize[(triton.cdiv(T, ROWS_AT_ONCE), I // 128)](
            x_TI, codes, scales, T, I, x_TI.stride(0), *scales.stride(),
            torch.finfo(x_TI.dtype).max, ROWS=ROWS_AT_ONCE,
        )  # fmt: skip


@triton.jit
def _rope(
    positions, query, key, turned_query, turned_key, cos_sin, query_row, key_row, A, K,
    HALF: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, HALF)
    angles = cos_sin + tl.load(positions + token) * (2 * HALF) + at
    cos, sin = tl.load(angles), tl.load(angles + HALF)
    if head < A:
        source = query + token * query_row + head * (2 * HALF) + at
        _rotate(source, turned_query + (token * A + head) * (2 * HALF) + at, cos, sin, HALF)
    else:
        head -= A
        source = key + token * key_row + head * (2 * HALF) + at
        _rotate(source, turned_key + (token * K + head) * (2 * HALF) + at, cos, sin, HALF)


@triton.jit
def _rotate(source, turned, cos, sin, HALF: tl.constexpr):
    a, b = tl.load(source).to(tl.float32), tl.load(source + HALF).to(tl.float32)
    kind = turned.dtype.element_ty
    tl.store(turned, tl.fma(a, cos, -b * sin).to(kind))
    tl.store(turned + HALF, tl.fma(b, cos, a * sin).to(kind))


@triton.jit
def _silu(gate_up, result, F, row_stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    source = gate_up + row * row_stride + at
    gate = tl.load(source, mask=at < F, other=0.0).to(tl.float32)
    up = tl.load(source + F, mask=at < F, other=0.0).to(tl.float32)
    found = gate * tl.sigmoid(gate) * up
    tl.store(result + row * F + at, found.to(result.dtype.element_ty), mask=at < F)


@triton.jit
def _quantize(
    x, codes, scales, T, I, row_stride, scale_row, scale_column, largest, ROWS: tl.constexpr
):
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    held = tl.load(x + rows * row_stride + columns, mask=rows < T, other=0.0).to(tl.float32)
    bits = held.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(bits, 1, keep_dims=True).to(tl.float32, bitcast=True)
    scale, inverse = _scales(amax, largest, False)
    scaled = held * scale
    clamped = tl.minimum(tl.maximum(scaled, -FP8_MAX), FP8_MAX)
    clamped = tl.where(scaled == scaled, clamped, scaled)
    tl.store(codes + rows * I + columns, clamped.to(codes.dtype.element_ty), mask=rows < T)
    place = scales + rows * scale_row + tl.program_id(1).to(tl.int64) * scale_column
    tl.store(place, inverse, mask=rows < T)
