"""Compute products and a token's attention of the local engine by Triton kernels.

They sum in another order than their references in `linears.py` and `attention.py`, and read nothing
on the host. Triton launches on the current device, which need not be the tensor's: every launch
says where.

Shapes: E experts, T tokens, O out features, K of a product the axis that it sums, Q = ceil(K/128).
Of attention B sequences, K key heads, G query heads of each, S places in a cache, D head dimension.
"""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportCallIssue=false, reportArgumentType=false
# Triton comes with a CUDA build of torch, and only there is this module imported.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8_nemo.glue.kernels import BLOCK, WARPS

SIDE = 64  # of the square of a product that one program makes


def product(
    left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype
) -> Tensor:
    """Return `left right^T` of FP8 operands: 128 features at a time, each sum times its scales.

    FP16 holds every E4M3 number, and its products are exact in FP32. The tensor cores' own FP8
    products are summed with 14 bits on Hopper (DeepSeek-V3, arXiv 2412.19437, section 3.3.2), which
    is what DeepGEMM works around; a reference has no need to.

    Args:
        left: bytes `[E, T, K]` and scales `[E, T, Q]`, of any strides; of one for all, E is 1.
        right: bytes `[E, O, K]` and scales `[E, O, Q]`, or `[E, P, Q]` of blocks, of any strides.
        dtype: of the result.

    Returns:
        `[E, T, O]`.
    """
    (b, b_scale), (E, O, K) = right, right[0].shape
    a, a_scale = (each.expand(E, -1, -1) for each in left)
    T = a.shape[1]
    result = torch.empty(E, T, O, dtype=dtype, device=a.device)
    if result.numel():
        with torch.cuda.device(a.device):
            _product[(triton.cdiv(T, SIDE), triton.cdiv(O, SIDE), E)](
                a, a_scale, b, b_scale, result, T, O, K,
                *a.stride(), *a_scale.stride(), *b.stride(), *b_scale.stride(),
                PER_SCALE=1 if b_scale.shape[1] == O else 128, SIDE=SIDE, num_warps=WARPS,
            )  # fmt: skip
    return result


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask_BS: Tensor,
    exponent: Tensor,
    v_scale: Tensor,
    tile: int,
    headroom: int,
) -> Tensor:
    """Attend for one new token over a cache, in FlashAttention 3's order, in one launch.

    Places that hold no token are not read. The tiles are those found for FP8; of BF16 nothing is
    claimed but its reference's numbers.

    Args:
        query: E4M3 or BF16 `[B, K, G, 1, D]`, contiguous, D a power of two.
        key: as the query is, `[B, K, 1, S, D]`, any strides whose last is 1.
        value: as `key`; probabilities are rounded to its type.
        mask_BS: false where a place holds no token; any strides.
        exponent: FP32 `[1]`, what a product is multiplied by before it is a power of two.
        v_scale: FP32 `[1]`.
        tile: keys whose probabilities are rounded against one maximum.
        headroom: probabilities are scaled by two to this power before they are rounded.

    Returns:
        FP32 `[B, K, G, 1, D]`.
    """
    B, K, G, _, D = query.shape
    output = torch.empty(query.shape, device=query.device)
    with torch.cuda.device(query.device):
        _attend[(B, K * G)](
            query, key, value, mask_BS, exponent, v_scale, output, G, key.shape[-2],
            *(key.stride(n) for n in (0, 1, 3)), *(value.stride(n) for n in (0, 1, 3)),
            *mask_BS.stride(), headroom, torch.finfo(torch.float32).tiny,
            D=D, TILE=tile, HELD=triton.next_power_of_2(tile), num_warps=WARPS,
        )  # fmt: skip
    return output


@triton.jit
def _product(
    a, a_scale, b, b_scale, result, T, O, K,
    a_expert, a_row, a_column, a_scale_expert, a_scale_row, a_scale_column,
    b_expert, b_row, b_column, b_scale_expert, b_scale_row, b_scale_column,
    PER_SCALE: tl.constexpr, SIDE: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2).to(tl.int64)
    a, a_scale = a + expert * a_expert, a_scale + expert * a_scale_expert
    b, b_scale = b + expert * b_expert, b_scale + expert * b_scale_expert
    rows = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    columns = tl.program_id(1).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for n in range(tl.cdiv(K, BLOCK)):
        places = n * BLOCK + tl.arange(0, BLOCK)
        inside = (rows < T)[:, None] & (places < K)[None, :]
        at = rows[:, None] * a_row + places[None, :] * a_column
        left = tl.load(a + at, mask=inside, other=0.0).to(tl.float16)
        inside = (places < K)[:, None] & (columns < O)[None, :]
        at = places[:, None] * b_column + columns[None, :] * b_row
        right = tl.load(b + at, mask=inside, other=0.0).to(tl.float16)
        at = rows * a_scale_row + n * a_scale_column
        left_scale = tl.load(a_scale + at, mask=rows < T, other=0.0)
        at = columns // PER_SCALE * b_scale_row + n * b_scale_column
        right_scale = tl.load(b_scale + at, mask=columns < O, other=0.0)
        total += tl.dot(left, right) * (left_scale[:, None] * right_scale[None, :])
    at = (expert * T + rows[:, None]) * O + columns[None, :]
    inside = (rows < T)[:, None] & (columns < O)[None, :]
    tl.store(result + at, total.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _attend(
    query, key, value, mask, exponent, v_scale, output, G, S,
    key_row, key_head, key_place, value_row, value_head, value_place, mask_row, mask_place,
    headroom, tiny, D: tl.constexpr, TILE: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    features, inner = tl.arange(0, D), tl.arange(0, HELD)
    at = (row * tl.num_programs(1) + head) * D + features
    asked = tl.load(query + at).to(tl.float32)
    power = tl.load(exponent)
    key += row * key_row + (head // G) * key_head
    value += row * value_row + (head // G) * value_head
    top, total = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    found = tl.zeros((D,), tl.float32)
    tiles = tl.cdiv(S, TILE)
    for n in range(tiles):
        places = (tiles - 1 - n) * TILE + inner
        inside = (inner < TILE) & (places < S)
        seen = tl.load(mask + row * mask_row + places * mask_place, mask=inside, other=0) != 0
        within = places[:, None] * key_place + features[None, :]
        held = tl.load(key + within, mask=seen[:, None], other=0.0).to(tl.float32)
        scores = tl.where(seen, tl.sum(held * asked[None, :], 1), float("-inf"))
        raised = tl.maximum(top, tl.max(scores, 0))
        none = raised == float("-inf")
        origin = tl.where(none, 0.0, raised * power)
        probability = tl.exp2(scores * power - (origin - headroom))
        shrink = tl.where(none, 1.0, tl.exp2((top - raised) * power))
        total = total * shrink + tl.sum(probability, 0)  # of P before it is rounded
        rounded = probability.to(value.dtype.element_ty).to(tl.float32)
        within = places[:, None] * value_place + features[None, :]
        held = tl.load(value + within, mask=seen[:, None], other=0.0).to(tl.float32)
        found = found * shrink + tl.sum(held * rounded[:, None], 0)
        top = raised
    tl.store(output + at, found * (tl.load(v_scale) / tl.maximum(total, tiny)))
