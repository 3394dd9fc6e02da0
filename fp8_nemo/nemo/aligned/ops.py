"""The trainer's RoPE, SiLU, quantizer and norm, in an engine's shapes; Triton on a GPU, else torch.

What is equal: the places where values are rounded. On a GPU the order of operations and the fused
multiply-adds too, as `kernels` says. T tokens are of any sequences, each with its position; A query
heads, K key heads, D head dimension, F width of the MLP, I in features, `Q = I / 128`, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8_nemo.glue.quantize import quantize_groups
from fp8_nemo.glue.wire import BLOCK

NORM_WARPS = {512: 1, 768: 1, 1024: 1, 2048: 1, 4096: 4, 8192: 4}
"""Hidden sizes of which TransformerEngine has a kernel of its own, and how many warps share a row
(rmsnorm_fwd_cuda_kernel.cu). It takes it for rows that are a multiple of 4."""


def cos_sin_table(inv_freq: Tensor, longest: int) -> Tensor:
    """Return cosines and sines `[longest, D]` in FP32, of Megatron's angles.

    The angles are its products (rotary_pos_embedding.py). CUDA's `cosf` and `sinf` are the two
    halves of the `sincosf` that TransformerEngine calls: the same instructions for sm_90.

    Args:
        inv_freq: FP32 `[D / 2]`, on the device where the trainer makes it.
        longest: positions.
    """
    places = torch.arange(longest, dtype=torch.float32, device=inv_freq.device)
    angles = places[:, None] * inv_freq[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rope(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin: Tensor, head: int
) -> tuple[Tensor, Tensor]:
    """Rotate Q and K by cosines and sines in FP32, rounding once.

    Args:
        positions: `[T]`.
        query: BF16 `[T, A * D]`, rows of any stride.
        key: BF16 `[T, K * D]`.
        cos_sin: `cos_sin_table`'s.
        head: D.
    """
    if query.is_cuda:
        from fp8_nemo.nemo.aligned import kernels

        return kernels.rope(positions, query, key, cos_sin, head)
    cos, sin = (each[:, None] for each in cos_sin[positions].chunk(2, dim=-1))
    return _rotated(query, cos, sin, head), _rotated(key, cos, sin, head)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, head: int) -> Tensor:
    a, b = x.unflatten(-1, (-1, head)).float().chunk(2, dim=-1)
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    return turned.to(x.dtype).flatten(-2)


def silu(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up` of BF16 `[T, 2F]`, rounded once."""
    if gate_up.is_cuda:
        from fp8_nemo.nemo.aligned import kernels

        return kernels.silu(gate_up)
    return silu_once(gate_up)


def silu_once(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up` of `[T, 2F]`, rounded once: what a compiler fuses."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (nn.functional.silu(gate) * up).bfloat16()


def norm(
    x_TH: Tensor, stream_TH: Tensor | None, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add to the residual stream, rounding once, and return the RMS norm of that, rounded once.

    Args:
        x_TH: BF16 `[T, H]`, contiguous.
        stream_TH: what it is added to; None if `x_TH` opens the stream.
        weight_H: BF16.
        eps: added to the mean square.

    Returns:
        The norm, and the stream: `x_TH` itself if it opens it.
    """
    if x_TH.is_cuda:
        from fp8_nemo.nemo.aligned import kernels

        return kernels.norm(x_TH, stream_TH, weight_H, eps)
    added = x_TH if stream_TH is None else x_TH + stream_TH
    held = added.float()
    inverse = torch.rsqrt(held.square().mean(-1, keepdim=True) + eps)
    return (weight_H.float() * (held * inverse)).to(x_TH.dtype), added


def quantize(x_TI: Tensor, by_column: bool, padded: bool) -> tuple[Tensor, Tensor]:
    """Quantize in 1x128 groups by the contract's formula, TransformerEngine's.

    Args:
        x_TI: BF16 `[T, I]`, I a multiple of 128.
        by_column: a column of scales lies together, as DeepGEMM reads them; else a row.
        padded: such a column has 4 scales or a multiple, as TMA asks.

    Returns:
        E4M3 `[T, I]`, and FP32 inverse scales `[T, Q]` that lie as asked.
    """
    scales = empty_scales(x_TI, by_column, padded)
    if x_TI.is_cuda:
        from fp8_nemo.nemo.aligned import kernels

        return kernels.quantize(x_TI, scales), scales
    codes, found = quantize_groups(x_TI)
    return codes, scales.copy_(found)


def empty_scales(x_TI: Tensor, by_column: bool, padded: bool) -> Tensor:
    """Return memory for `quantize`'s scales, as vLLM's `per_token_group_quant_fp8` makes it."""
    T, I = x_TI.shape
    column = -(-T // 4) * 4 if padded else T
    strides = (1, column) if by_column else (I // BLOCK, 1)
    return torch.empty_strided((T, I // BLOCK), strides, device=x_TI.device)
