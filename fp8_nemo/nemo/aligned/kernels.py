"""`ops` as Triton kernels, one launch each, with the trainer's instructions for Hopper.

RoPE: TransformerEngine's kernel of 2.12.0 for sm_90 multiplies the rotated half by the sine, rounds
that, and adds the product with the cosine in one FFMA (`cuobjdump -sass` of its library; the source
is in fused_rope.cu). SiLU: the expression that Inductor makes of Megatron's `bias_swiglu`,
`x * sigmoid(x) * up` in FP32. The quantizer is the one of the glue, whose bytes and scales are
TransformerEngine's, with scales that lie as DeepGEMM reads them. The norm adds in the order of its
`rmsnorm_fwd_tuned_kernel`, read likewise: each lane its numbers one by one, lanes by halves, and of
a wide row four warps by Chan's formula.
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
from fp8_nemo.nemo.aligned import ops

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


def norm(
    x_TH: Tensor, stream_TH: Tensor | None, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Take and give what `ops.norm` does; H is one of `ops.NORM_WARPS`."""
    T, H = x_TH.shape
    assert x_TH.is_contiguous() and (stream_TH is None or stream_TH.is_contiguous())
    added = x_TH if stream_TH is None else torch.empty_like(x_TH)
    normed = torch.empty_like(x_TH)
    warps = ops.NORM_WARPS[H]
    if T:
        _norm[(T,)](
            x_TH, x_TH if stream_TH is None else stream_TH, weight_H, added, normed, eps,
            ADDS=stream_TH is not None, WIDTH=H, WARPS=warps, num_warps=warps,
            enable_fp_fusion=False,  # a product and a sum are one instruction where `fma` says so
        )  # fmt: skip
    return normed, added


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
def _norm(
    x, stream, weight, added, normed, eps,
    ADDS: tl.constexpr, WIDTH: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * WIDTH
    lanes = tl.arange(0, 32 * WARPS)
    EACH: tl.constexpr = WIDTH // (32 * WARPS)
    total = tl.zeros((32 * WARPS,), tl.float32)
    for place in tl.static_range(EACH):
        at = (place // 8 * 32 * WARPS + lanes) * 8 + place % 8
        held = tl.load(x + row + at)
        if ADDS:
            held = (held.to(tl.float32) + tl.load(stream + row + at).to(tl.float32)).to(held.dtype)
            tl.store(added + row + at, held)
        total += held.to(tl.float32)
    mean = _by_halves(total, WARPS) * (1.0 / (32 * EACH))
    means = tl.reshape(tl.broadcast_to(mean[:, None], (WARPS, 32)), (32 * WARPS,))
    squares = tl.zeros((32 * WARPS,), tl.float32)
    for place in tl.static_range(EACH):
        at = (place // 8 * 32 * WARPS + lanes) * 8 + place % 8
        away = tl.load(added + row + at).to(tl.float32) - means
        squares = tl.fma(away, away, squares)
    square = _by_halves(squares, WARPS)
    if WARPS == 4:
        mean, square = _joined(tl.reshape(mean, (2, 2)), tl.reshape(square, (2, 2)), 32.0 * EACH)
        mean, square = _joined(tl.reshape(mean, (2, 1)), tl.reshape(square, (2, 1)), 64.0 * EACH)
    mean, square = tl.sum(mean, 0), tl.sum(square, 0)  # of one number
    inverse = tl.rsqrt(tl.fma(mean, mean, square * (1.0 / WIDTH)) + eps)
    for place in tl.static_range(EACH):
        at = (place // 8 * 32 * WARPS + lanes) * 8 + place % 8
        scaled = tl.load(added + row + at).to(tl.float32) * inverse
        found = tl.load(weight + at).to(tl.float32) * scaled
        tl.store(normed + row + at, found.to(normed.dtype.element_ty))


@triton.jit
def _by_halves(numbers, WARPS: tl.constexpr):
    """Add 32 lanes of each warp in five rounds, neighbours first."""
    halved = tl.sum(tl.reshape(numbers, (16 * WARPS, 2)), 1)
    halved = tl.sum(tl.reshape(halved, (8 * WARPS, 2)), 1)
    halved = tl.sum(tl.reshape(halved, (4 * WARPS, 2)), 1)
    halved = tl.sum(tl.reshape(halved, (2 * WARPS, 2)), 1)
    return tl.sum(tl.reshape(halved, (WARPS, 2)), 1)


@triton.jit
def _joined(means, squares, count):
    """Join the statistics `[2, N]` of as many numbers each, the first half with the second."""
    first, second = tl.split(tl.trans(means))
    away = first - second
    square = tl.fma(away * away * (count * count), 0.5 / count, tl.sum(squares, 0))
    return tl.fma(first, count, second * count) * (0.5 / count), square


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
