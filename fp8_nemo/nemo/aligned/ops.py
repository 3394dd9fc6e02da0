"""The trainer's RoPE, SiLU and quantizer in the shapes of an engine: torch here, Triton on a GPU.

What is equal: the places where values are rounded. On a GPU the order of operations and the fused
multiply-adds too, as `kernels` says. T tokens are of any sequences, each with its position; A query
heads, K key heads, D head dimension, F width of the MLP, I in features, `Q = I / 128`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8_nemo.glue.quantize import quantize_groups
from fp8_nemo.glue.wire import BLOCK


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
