"""NeMo RL's own rounding of weights, repeated for comparisons with ours.

`cast_tensor_to_fp8_blockwise` of its `vllm/quantization/fp8.py` (main 7ea279a) multiplies by a
rounded reciprocal (two roundings) and pads with the last element's value. Nothing in a run uses
this: with `glue.quantize=stock` NeMo RL's own receiver quantizes.

Shapes: O out features, I in features, P = ceil(O/128), Q = ceil(I/128), E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8_nemo.glue.quantize import FP8, FP8_MAX, Fp8Weight
from fp8_nemo.glue.wire import BLOCK


def stock_quantize_blocks(weight_OI: Tensor, *, pow2: bool = False) -> Fp8Weight:
    """Quantize a weight `[O, I]`, or an even slab of experts `[E, O, I]`, as NeMo RL does.

    Args:
        weight_OI: BF16 or FP32; FP32 is rounded to BF16 first.
        pow2: scales that are powers of two.

    Raises:
        ValueError: the slab is ragged, which NeMo RL does not define.
    """
    O, I = weight_OI.shape[-2:]
    padded_OI = _padded(weight_OI.to(torch.bfloat16).float())
    blocks = padded_OI.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    scale_PQ, scale_inv_PQ = _scales(blocks.abs().amax(dim=(-3, -1)), pow2)
    scaled_OI = (blocks * scale_PQ[..., :, None, :, None]).reshape(padded_OI.shape)
    fp8_OI = scaled_OI[..., :O, :I].clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return Fp8Weight(fp8_OI.contiguous(), scale_inv_PQ)


def stock_quantize_list(
    weights: Sequence[Tensor], *, pow2: bool = False, nonfinite_N: Tensor
) -> list[Fp8Weight]:
    """Take the place of `refit.quantize_list`, so that a refit sends NeMo RL's rounding.

    Args:
        weights: as `stock_quantize_blocks` takes one.
        pow2: scales that are powers of two.
        nonfinite_N: left as it is: what is compared is finite.
    """
    del nonfinite_N
    return [stock_quantize_blocks(weight, pow2=pow2) for weight in weights]


def _scales(amax: Tensor, pow2: bool) -> tuple[Tensor, Tensor]:
    if pow2:
        exponent = torch.ceil(torch.log2(amax / FP8_MAX)).clamp(-127, 127) + 127
        scale = torch.where(exponent == 0, 1.0, torch.exp2(127 - exponent))
    else:
        scale = torch.where(amax == 0, 1.0, FP8_MAX / amax)
    return scale, torch.reciprocal(scale)


def _padded(value_OI: Tensor) -> Tensor:
    O, I = value_OI.shape[-2:]
    margins = (0, -I % BLOCK, 0, -O % BLOCK)
    if not any(margins):
        return value_OI
    if value_OI.ndim != 2:
        raise ValueError(
            f"slab of shape {tuple(value_OI.shape)} is not a multiple of {BLOCK} in both features; "
            "NeMo RL refuses it too"
        )
    return pad(value_OI, margins, value=value_OI[-1, -1].item())
