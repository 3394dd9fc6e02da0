"""The FP8 contract as Triton kernels: quantizing, ranges and digests.

What they guarantee
    Every byte, scale and value equals the torch reference of `quantize.py`. Of weights one program
    takes one 128x128 block: it is read once, held in registers while its maximum is found, and
    written once, so a weight of N elements moves 3N bytes, where NeMo RL's
    `cast_tensor_to_fp8_blockwise` (main 7ea279a) moves about 49N. Nothing is read on the host.

What they take care of
    A maximum is taken over the bits of absolute values: integers order them as floats do, and NaN
    above all, where a float maximum would drop it. Divisions are `div_rn`: Triton's `/` is not
    correctly rounded. Triton launches on the current device, which in a worker of several GPUs need
    not be the tensor's: every launch says where.

Shapes: O out features, I in features, P = ceil(O/128), Q = ceil(I/128), E experts, N weights,
R rows (tokens), H heads, D head dimension, T tokens.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportCallIssue=false, reportArgumentType=false
# Triton comes with a CUDA build of torch, and only there is this module imported.
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_nemo.glue import digest
from fp8_nemo.glue.digest import ALIGNED, Placed, runs_of

BLOCK = tl.constexpr(128)
FP8_MAX = tl.constexpr(448.0)
BF16_MAX = tl.constexpr(3.3895313892515355e38)
WARPS = 4  # within 3 points of the fastest of 4, 8, 16 (benchmarks/results/quantize-h200.json)
COLUMNS = tl.constexpr(8)  # of the table of weights: three addresses, first block, O, I, P, Q
ROWS_AT_ONCE = 16
GROUPS_AT_ONCE = 32  # rows of activations that one program takes, one group of 128 of each
HEADS_AT_ONCE = tl.constexpr(1024)  # values of a row that one turn reads
RUN, TILE_ROWS, TILE_WORDS = map(tl.constexpr, (digest.RUN, digest.TILE_ROWS, digest.TILE_WORDS))


def quantize(weight_OI: Tensor, pow2: bool, nonfinite: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize one weight, or a slab of experts, in one launch that a CUDA graph can hold.

    Takes and gives what `quantize.quantize_blocks` does: BF16 `[..., O, I]`, contiguous, to FP8
    bytes and FP32 scales `[..., P, Q]`; `nonfinite` is set for NaN or Inf, and else left as it is.
    """
    O, I, P, Q = _sizes(weight_OI)
    fp8_OI, scale_inv_PQ = _results(weight_OI)
    if blocks := scale_inv_PQ.numel():
        with torch.cuda.device(weight_OI.device):
            _quantize_one[(blocks,)](
                weight_OI, fp8_OI, scale_inv_PQ, nonfinite, O, I, P, Q,
                POW2=pow2, EVEN=_is_even(O, I), num_warps=WARPS,
            )  # fmt: skip
    return fp8_OI, scale_inv_PQ


def quantize_list(
    weights: Sequence[Tensor], pow2: bool, nonfinite_N: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Quantize N weights or slabs in one launch.

    The table of their addresses travels from pinned memory without a wait; a CUDA graph would
    hold the addresses of its capture. `nonfinite_N` are boolean slots, one a weight.
    """
    results = [_results(weight) for weight in weights]
    rows, blocks = [], 0
    for weight, (fp8, scale_inv) in zip(weights, results, strict=True):
        addresses = (weight.data_ptr(), fp8.data_ptr(), scale_inv.data_ptr())
        rows.append((*addresses, blocks, *_sizes(weight)))
        blocks += scale_inv.numel()
    if blocks:
        with torch.cuda.device(weights[0].device):
            _quantize_listed[(blocks,)](
                _sent(rows, weights[0].device), nonfinite_N, len(rows), POW2=pow2,
                EVEN=all(_is_even(*row[4:6]) for row in rows), num_warps=WARPS,
            )  # fmt: skip
    return results


def quantize_groups(x_TI: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    """Quantize activations or gradients 1x128 along the last axis, in one launch.

    Takes BF16 or FP32 `[T, I]` of any strides; gives FP8 bytes and FP32 group scales `[T, Q]`.
    """
    T, I = x_TI.shape
    fp8_TI = torch.empty(T, I, dtype=torch.float8_e4m3fn, device=x_TI.device)
    scale_inv_TQ = torch.empty(T, triton.cdiv(I, 128), device=x_TI.device)
    if fp8_TI.numel():
        with torch.cuda.device(x_TI.device):
            _quantize_groups[(triton.cdiv(T, GROUPS_AT_ONCE), triton.cdiv(I, 128))](
                x_TI, fp8_TI, scale_inv_TQ, T, I, *x_TI.stride(), torch.finfo(x_TI.dtype).max,
                ROWS=GROUPS_AT_ONCE, POW2=pow2, num_warps=WARPS,
            )  # fmt: skip
    return fp8_TI, scale_inv_TQ


def amax_rows(qkv_RHD: Sequence[Tensor], keep_R: Tensor, amax_3: Tensor) -> None:
    """Raise running maxima to the absolute values of the kept rows; one launch for Q, K and V.

    Args:
        qkv_RHD: Q, K and V, BF16 `[R, H, D]` on a CUDA device; any strides whose last is 1.
        keep_R: booleans, false at padding.
        amax_3: FP32 on the device, at least 0, contiguous, raised in place; NaN stays NaN.
    """
    R = len(keep_R)
    sizes = [s for x in qkv_RHD for s in (x.shape[1] * x.shape[2], x.shape[2], *x.stride()[:2])]
    with torch.cuda.device(amax_3.device):
        _amax_rows[(triton.cdiv(R, ROWS_AT_ONCE), 3)](
            *qkv_RHD, *sizes, keep_R, amax_3.view(torch.int32), R,
            ROWS=ROWS_AT_ONCE, num_warps=WARPS,
        )  # fmt: skip


def digests(parts: Sequence[Placed]) -> Callable[[], Tensor]:
    """Return a function that digests all parts, which stay where they are.

    It takes one launch, or two if some parts are not aligned, and one copy: the table of the parts'
    addresses travels together with the zeros to which they are added up.
    """
    device = parts[0].tensor.device
    addresses = [part.tensor.data_ptr() for part in parts]
    known = runs_of(tuple([
        (x.shape, x.stride(), x.itemsize, address % ALIGNED, first, pitch)
        for address, (x, first, pitch) in zip(addresses, parts, strict=True)
    ]))  # fmt: skip
    starts = [addresses[n] // ALIGNED * ALIGNED for n in known.parts]
    starts_R = torch.tensor(starts, dtype=torch.int64)
    numbers = known.numbers.scatter_add(0, known.at, starts_R).pin_memory()

    def launched() -> Tensor:
        """Return the digests `[N]`, which the device may still be computing."""
        there = numbers.to(device, non_blocking=True, copy=True)
        sums_N = there[len(there) - len(parts) :]
        with torch.cuda.device(device):
            for is_even, first, runs, tiles in known.launches:
                _digest[(tiles,)](there[first:], sums_N, runs, EVEN=is_even, num_warps=WARPS)
        return sums_N

    return launched


def _sent(rows: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """Send a table from pinned memory without a wait."""
    return torch.tensor(rows, dtype=torch.int64).pin_memory().to(device, non_blocking=True)


def _sizes(weight_OI: Tensor) -> tuple[int, int, int, int]:
    O, I = weight_OI.shape[-2:]
    return O, I, -(-O // 128), -(-I // 128)  # triton.cdiv takes 2 us on the host


def _results(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    if weight_OI.dtype != torch.bfloat16 or not weight_OI.is_contiguous():
        raise ValueError(f"weight is {weight_OI.dtype}, contiguous {weight_OI.is_contiguous()}")
    if weight_OI.data_ptr() % ALIGNED:
        raise ValueError(f"weight starts at {weight_OI.data_ptr():#x}, not at {ALIGNED} bytes")
    _, _, P, Q = _sizes(weight_OI)
    fp8_OI = torch.empty_like(weight_OI, dtype=torch.float8_e4m3fn)
    return fp8_OI, weight_OI.new_empty((*weight_OI.shape[:-2], P, Q), dtype=torch.float32)


def _is_even(O: int, I: int) -> bool:
    return O % 128 == 0 and I % 128 == 0


@triton.jit
def _quantize_one(
    weight, fp8, scale_inv, nonfinite, O, I, P, Q, POW2: tl.constexpr, EVEN: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64)
    _quantize_block(weight, fp8, scale_inv, nonfinite, block, O, I, P, Q, POW2, EVEN)


@triton.jit
def _quantize_listed(table, nonfinite, N, POW2: tl.constexpr, EVEN: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    weight = _last_below(table + 3, COLUMNS, block, N)
    row = table + weight * COLUMNS
    source = tl.load(row).to(tl.pointer_type(tl.bfloat16))
    fp8 = tl.load(row + 1).to(tl.pointer_type(tl.float8e4nv))
    scale_inv = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    I = tl.load(row + 5)
    if EVEN:
        I = tl.multiple_of(I, 128)
    _quantize_block(
        tl.multiple_of(source, 16),
        tl.multiple_of(fp8, 16),
        scale_inv,
        nonfinite + weight,
        block - tl.load(row + 3),
        tl.load(row + 4),
        I,
        tl.load(row + 6),
        tl.load(row + 7),
        POW2,
        EVEN,
    )


@triton.jit
def _quantize_block(
    weight, fp8, scale_inv, nonfinite, block, O, I, P, Q,
    POW2: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    expert, inner = block // (P * Q), block % (P * Q)
    rows = (inner // Q) * BLOCK + tl.arange(0, BLOCK)[:, None]
    columns = (inner % Q) * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = (expert * O + rows) * I + columns
    if EVEN:
        value = tl.load(weight + at)
    else:
        inside = (rows < O) & (columns < I)
        value = tl.load(weight + at, mask=inside, other=0.0)
    bits = value.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    amax = (tl.max(tl.max(bits, 1), 0) << 16).to(tl.float32, bitcast=True)
    scale, inverse = _scales(amax, BF16_MAX, POW2)
    scaled = value.to(tl.float32) * scale
    scaled = tl.minimum(tl.maximum(scaled, -FP8_MAX), FP8_MAX).to(tl.float8e4nv)
    if EVEN:
        tl.store(fp8 + at, scaled)
    else:
        tl.store(fp8 + at, scaled, mask=inside)
    tl.store(scale_inv + block, inverse)
    tl.store(nonfinite, True, mask=(amax != amax) | (amax == float("inf")))


@triton.jit
def _quantize_groups(
    x, fp8, scale_inv, T, I, row_stride, column_stride, largest,
    ROWS: tl.constexpr, POW2: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = (tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (rows < T) & (columns < I)
    held = tl.load(x + rows * row_stride + columns * column_stride, mask=inside, other=0.0)
    held = held.to(tl.float32)
    bits = held.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    amax = tl.max(bits, 1, keep_dims=True).to(tl.float32, bitcast=True)
    scale, inverse = _scales(amax, largest, POW2)
    scaled = held * scale
    clamped = tl.minimum(tl.maximum(scaled, -FP8_MAX), FP8_MAX)
    clamped = tl.where(scaled == scaled, clamped, scaled)  # a minimum drops NaN, which is to stay
    tl.store(fp8 + rows * I + columns, clamped.to(tl.float8e4nv), mask=inside)
    tl.store(scale_inv + rows * tl.num_programs(1) + tl.program_id(1), inverse, mask=rows < T)


@triton.jit
def _scales(amax, largest, POW2: tl.constexpr):
    """Return the scales of maxima and their inverses, as `quantize.exact_scales` does."""
    scale = tl.div_rn(FP8_MAX, amax)
    scale = tl.where(scale == float("inf"), largest, scale)
    if POW2:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(amax == 0.0, 1.0, scale)
    return scale, tl.div_rn(1.0, scale)


@triton.jit
def _amax_rows(
    q, k, v,
    q_values, q_D, q_row, q_head, k_values, k_D, k_row, k_head, v_values, v_D, v_row, v_head,
    keep, amax, R, ROWS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    if which == 0:
        _amax_of_rows(q, q_values, q_D, q_row, q_head, keep, amax, R, ROWS)
    elif which == 1:
        _amax_of_rows(k, k_values, k_D, k_row, k_head, keep, amax + 1, R, ROWS)
    else:
        _amax_of_rows(v, v_values, v_D, v_row, v_head, keep, amax + 2, R, ROWS)


@triton.jit
def _amax_of_rows(x, values, D, row_stride, head_stride, keep, amax, R, ROWS: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    kept = tl.load(keep + rows, mask=rows < R, other=0) != 0
    largest = tl.zeros((ROWS, HEADS_AT_ONCE), tl.int32)
    for start in range(0, values, HEADS_AT_ONCE):
        at = start + tl.arange(0, HEADS_AT_ONCE)
        offset = rows[:, None] * row_stride + (at // D * head_stride + at % D)[None, :]
        value = tl.load(x + offset, mask=kept[:, None] & (at < values)[None, :], other=0.0)
        bits = value.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
        largest = tl.maximum(largest, bits)
    tl.atomic_max(amax, tl.max(tl.max(largest, 1), 0) << 16)


@triton.jit
def _digest(table, sums, N, EVEN: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    run = table + _last_below(table + 1, RUN, tile, N) * RUN
    R, length, row_stride = tl.load(run + 2), tl.load(run + 3), tl.load(run + 4)
    tile -= tl.load(run + 1)
    across = tl.cdiv(tl.cdiv(length, 4), TILE_WORDS)
    rows = (tile // across) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    columns = (tile % across) * TILE_WORDS + tl.arange(0, TILE_WORDS)[None, :]
    if EVEN:
        source = tl.multiple_of(tl.load(run).to(tl.pointer_type(tl.int32)), 16)
        at = rows * tl.multiple_of(row_stride // 4, 4) + columns
        inside = (rows < R) & (columns < tl.multiple_of(length // 4, 4))
        word = tl.load(source + at, mask=inside, other=0)
    else:
        inside = (rows < R) & (columns * 4 < length)
        source = tl.load(run).to(tl.pointer_type(tl.uint8))
        value_stride, itemsize = tl.load(run + 5), tl.load(run + 6)
        word = tl.zeros((TILE_ROWS, TILE_WORDS), tl.int32)
        for byte in tl.static_range(4):
            n = columns * 4 + byte
            at = rows * row_stride + n // itemsize * value_stride + n % itemsize
            held = tl.load(source + at, mask=inside & (n < length), other=0)
            word |= held.to(tl.int32) << (8 * byte)
    index = (tl.load(run + 8) + rows * tl.load(run + 7)).to(tl.int32) + columns.to(tl.int32)
    found = _mixed_sum(word, index, inside)
    tl.atomic_add(sums + tl.load(run + 9), found, sem="relaxed")


@triton.jit
def _mixed_sum(word, index, inside):
    return tl.sum(tl.where(inside, _mixed(word, index), 0).to(tl.int64))


@triton.jit
def _mixed(word, index):
    """Mix INT32 words as `digest._mixed` does."""
    x = word.to(tl.uint32, bitcast=True) ^ (index.to(tl.uint32) * 0x9E3779B1)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return (x ^ (x >> 16)).to(tl.int32, bitcast=True)


@triton.jit
def _last_below(firsts, STRIDE: tl.constexpr, wanted, N):
    """Find the last of N ascending numbers that is at or below one, by halving."""
    found, end = 0, N
    while end - found > 1:
        middle = (found + end) // 2
        below = tl.load(firsts + middle * STRIDE) <= wanted
        found = tl.where(below, middle, found)
        end = tl.where(below, end, middle)
    return found
