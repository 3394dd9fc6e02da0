"""The FP8 contract: E4M3 with FP32 scales, 128x128 blocks for weights, 1x128 groups otherwise.

What it guarantees
    `scale = 448 / amax` and `scale_inv = 1 / scale`, each one correctly rounded FP32 division, then
    `fp8 = cast(clamp(w * scale, -448, 448))`, round to nearest even. This is TransformerEngine's
    rule (`common/recipe/recipe_common.cuh`), so a trainer in FP8 and an engine that is fed from
    here hold the same bytes. Equality of FP8 is equality of bytes.

What it takes care of
    A weight is rounded to BF16 first, also when its master is FP32: xtuner #2044 saw a mismatch 25
    times larger when the two sides quantized different numbers. `amax` is taken in FP32 over the
    block's real elements; padding is zero and so never changes it. A block of zeros has
    `scale_inv = 1`. Where `448 / amax` overflows, the scale is the input type's largest finite
    value. Power-of-two scales are rounded before quantizing, never after (0.335 against 0.026
    relative error).

What it refuses
    Weights that are not finite. With a `nonfinite` slot the verdict stays on the device, to be read
    once per refit; without one it is read, and raised, at once.

On a CUDA device the exact formula runs as a Triton kernel (`kernels.py`), one pass and one launch
for a weight, a slab, a list or activations; on a CPU as torch operations, which are its reference.

NVFP4 is a format of weights alone, by ModelOpt's rule (`quantize_nvfp4`). It has torch operations
on every device.

Shapes: O out features, I in features, P = ceil(O/128), Q = ceil(I/128), G = I/16, T tokens, E
experts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8_nemo.glue.wire import BLOCK
from fp8_nemo.recipe.options.precision import FORMATS, Precision

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
E4M3_TINY = 2.0**-9
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of four bits by their code; the fourth bit is the sign."""
E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway between them."""
E2M1_MAX = 6.0
GROUP = FORMATS["nvfp4"].group


class Fp8Weight(NamedTuple):
    """Hold an FP8 weight: bytes `[..., O, I]` and FP32 block scales `[..., P, Q]`."""

    fp8_OI: Tensor
    scale_inv_PQ: Tensor


class Nvfp4Weight(NamedTuple):
    """Hold a four-bit weight: bytes `[..., O, I/2]`, E4M3 scales `[..., O, I/16]`, one in FP32."""

    packed_OI: Tensor
    scale_OG: Tensor
    scale_2: Tensor
    """`[..., 1]`, of the whole weight."""


class Fp8Groups(NamedTuple):
    """Hold FP8 activations or gradients: bytes `[..., T, I]`, FP32 group scales `[..., T, Q]`."""

    fp8_TI: Tensor
    scale_inv_TQ: Tensor


def quantize_blocks(
    weight_OI: Tensor, *, pow2: bool = False, nonfinite: Tensor | None = None
) -> Fp8Weight:
    """Quantize a weight `[O, I]`, or a slab of experts `[E, O, I]`, in 128x128 blocks.

    Args:
        weight_OI: BF16 or FP32; FP32 is rounded to BF16 first.
        pow2: scales that are powers of two (UE8M0).
        nonfinite: boolean slot, set without a host read if the weight is not finite, and else left
            as it is.

    Raises:
        ValueError: the weight holds NaN or Inf and no slot was given; on a GPU also, it is not
            contiguous, or does not start at a multiple of 16 bytes.
    """
    slot = nonfinite
    if slot is None:
        slot = torch.zeros((), dtype=torch.bool, device=weight_OI.device)
    if weight_OI.is_cuda:
        from fp8_nemo.glue import kernels

        quantized = Fp8Weight(*kernels.quantize(_bf16(weight_OI), pow2, slot))
    else:
        quantized = _quantize_in_torch(weight_OI, pow2, slot)
    if nonfinite is None and slot.item():
        raise ValueError("weight holds NaN or Inf: refused, FP8 would hide it")
    return quantized


def quantize_list(
    weights: Sequence[Tensor],
    *,
    pow2: bool = False,
    nonfinite_N: Tensor,
    together: Sequence[Hashable] = (),
) -> list[Fp8Weight]:
    """Quantize N weights or slabs as `quantize_blocks` does, on a CUDA device in one launch.

    Args:
        weights: all on one device; each as `quantize_blocks` takes it.
        pow2: scales that are powers of two.
        nonfinite_N: boolean slots, one a weight.
        together: of formats with a scale of the whole weight alone, which FP8 is not.

    Raises:
        ValueError: a weight on a GPU is not contiguous, or does not start at a multiple of 16
            bytes.
    """
    if weights and weights[0].is_cuda:
        from fp8_nemo.glue import kernels

        found = kernels.quantize_list([_bf16(each) for each in weights], pow2, nonfinite_N)
        return [Fp8Weight(*each) for each in found]
    return [
        quantize_blocks(weight, pow2=pow2, nonfinite=slot)
        for weight, slot in zip(weights, nonfinite_N, strict=True)
    ]


def quantize_nvfp4(
    weight_OI: Tensor, nonfinite: Tensor, amax_11: Tensor | None = None
) -> Nvfp4Weight:
    """Quantize a weight `[O, I]`, or a stack of them `[N, O, I]`, to four bits, as ModelOpt does.

    `scale_2 = amax / 2688` for the whole weight; of each 16 in a row `scale = E4M3(amax_16 / (6
    scale_2))`, between the smallest E4M3 number and 448; each weight over both, in FP32, goes to
    the nearest E2M1 number, to even between two. A group of zeros has a scale of 1; so has, where
    ModelOpt makes NaN, a weight of zeros a `scale_2`.

    Args:
        weight_OI: BF16 or FP32; FP32 is rounded to BF16 first. I is a multiple of 16.
        nonfinite: boolean slot, set if the weight is not finite, and else left as it is.
        amax_11: FP32 `[..., 1, 1]`, of all weights that share a `scale_2`; by default its own.
    """
    group_OGN = _bf16(weight_OI).float().unflatten(-1, (-1, GROUP))
    amax_OG = group_OGN.abs().amax(-1)
    own_11 = amax_OG.amax((-2, -1), keepdim=True)
    nonfinite.logical_or_(~torch.isfinite(own_11).all())
    amax_11 = own_11 if amax_11 is None else amax_11
    whole_11 = amax_11 / torch.full_like(amax_11, E2M1_MAX * FP8_MAX)
    whole_11 = torch.where(amax_11 == 0, 1.0, whole_11)
    scale_OG = amax_OG / (E2M1_MAX * whole_11)
    scale_OG = torch.where(scale_OG == 0, 1.0, scale_OG).clamp(E4M3_TINY, FP8_MAX).to(FP8)
    scaled_OI = (group_OGN / (scale_OG.float() * whole_11)[..., None]).flatten(-2)
    codes_OI = _e2m1(scaled_OI)
    packed_OI = (codes_OI[..., 1::2] << 4) | codes_OI[..., ::2]
    return Nvfp4Weight(packed_OI, scale_OG, whole_11.flatten(-2))


def quantize_nvfp4_list(
    weights: Sequence[Tensor],
    *,
    pow2: bool = False,
    nonfinite_N: Tensor,
    together: Sequence[Hashable] = (),
) -> list[Nvfp4Weight]:
    """Quantize N weights or stacks as `quantize_nvfp4` does.

    Args:
        weights: all on one device; each as `quantize_nvfp4` takes it.
        pow2: of FP8's scales alone.
        nonfinite_N: boolean slots, one a weight.
        together: a name a weight; those of one name share the largest `scale_2` of theirs, as
            ModelOpt's export of Megatron's fused weights has it. By default none do.
    """
    names = together or range(len(weights))
    amax: dict[Hashable, Tensor] = {}
    for name, weight in zip(names, weights, strict=True):
        own_11 = _bf16(weight).abs().amax((-2, -1), keepdim=True).float()
        amax[name] = torch.maximum(amax.get(name, own_11), own_11)
    each = zip(weights, nonfinite_N, names, strict=True)
    return [quantize_nvfp4(weight, slot, amax[name]) for weight, slot, name in each]


def e2m1_values(packed_OI: Tensor, scale_OG: Tensor) -> Tensor:
    """Return four-bit weights times their groups' scales in FP32, which BF16 holds exactly.

    Args:
        packed_OI: two weights a byte, the even column in the low half, `[..., O, I/2]`.
        scale_OG: E4M3 `[..., O, I/16]`.
    """
    codes = torch.stack([packed_OI & 0xF, packed_OI >> 4], dim=-1).flatten(-2).long()
    magnitudes = torch.tensor(E2M1, device=packed_OI.device)
    value_OI = torch.where(codes < 8, 1.0, -1.0) * magnitudes[codes & 7]
    return value_OI * scale_OG.float().repeat_interleave(GROUP, -1)


def dequantize_nvfp4(weight: Nvfp4Weight) -> Tensor:
    """Return the FP32 values `[..., O, I]` that bytes and scales represent."""
    return e2m1_values(*weight[:2]) * weight.scale_2[..., None]


def _e2m1(value: Tensor) -> Tensor:
    """Return the codes of the nearest E2M1 numbers, UINT8; ties go to the even code."""
    size, bounds = value.abs(), torch.tensor(E2M1_BOUNDS, device=value.device)
    codes = torch.bucketize(size, bounds, out_int32=True)
    codes += torch.isin(size, bounds[1::2]).int()  # between an odd code and the even one above
    return codes.to(torch.uint8) | ((value < 0).to(torch.uint8) << 3)


QUANTIZERS = {"fp8": quantize_list, "nvfp4": quantize_nvfp4_list}
"""What quantizes a list of weights, by a name of FORMATS (`recipe/options/precision.py`)."""


def plain_dtype(precision: Precision) -> torch.dtype:
    """Return torch's type of everything that a precision does not quantize."""
    return getattr(torch, precision.plain.dtype)


def _bf16(weight_OI: Tensor) -> Tensor:
    return weight_OI.to(torch.bfloat16).contiguous()


def _quantize_in_torch(weight_OI: Tensor, pow2: bool, nonfinite: Tensor) -> Fp8Weight:
    value_OI = weight_OI.to(torch.bfloat16).float()
    amax_PQ = _blocks(value_OI).abs().amax(dim=(-3, -1))
    nonfinite.logical_or_(~torch.isfinite(amax_PQ).all())
    scale_PQ, scale_inv_PQ = exact_scales(amax_PQ, torch.bfloat16, pow2)
    fp8_OI = _saturating_cast(_scaled(value_OI, scale_PQ))
    return Fp8Weight(fp8_OI.contiguous(), scale_inv_PQ)


def dequantize_blocks(fp8_weight: Fp8Weight) -> Tensor:
    """Return the FP32 values `[..., O, I]` that the bytes and scales represent."""
    return _scaled(fp8_weight.fp8_OI.float(), fp8_weight.scale_inv_PQ)


def quantize_groups(x_TI: Tensor, *, pow2: bool = False) -> Fp8Groups:
    """Quantize activations or gradients `[..., T, I]` in 1x128 groups along the last axis.

    The last axis is the one that the product reduces. NaN and Inf pass through as NaN.
    """
    if x_TI.is_cuda and x_TI.dtype in (torch.bfloat16, torch.float32):
        from fp8_nemo.glue import kernels

        found = kernels.quantize_groups(x_TI.flatten(0, -2), pow2)
        return Fp8Groups(*(each.unflatten(0, x_TI.shape[:-1]) for each in found))
    I = x_TI.shape[-1]
    groups = pad(x_TI.float(), (0, -I % BLOCK)).unflatten(-1, (-1, BLOCK))
    amax_TQ = groups.abs().amax(dim=-1)
    scale_TQ, scale_inv_TQ = exact_scales(amax_TQ, x_TI.dtype, pow2)
    scaled_TI = (groups * scale_TQ[..., None]).flatten(-2)[..., :I]
    return Fp8Groups(_saturating_cast(scaled_TI).contiguous(), scale_inv_TQ)


def dequantize_groups(fp8_groups: Fp8Groups) -> Tensor:
    """Return the FP32 values `[..., T, I]` that the bytes and scales represent."""
    fp8_TI, scale_inv_TQ = fp8_groups
    I = fp8_TI.shape[-1]
    groups = pad(fp8_TI.float(), (0, -I % BLOCK)).unflatten(-1, (-1, BLOCK))
    return (groups * scale_inv_TQ[..., None]).flatten(-2)[..., :I]


def quantize_tensor(x: Tensor, scale_inv: Tensor) -> Tensor:
    """Quantize a tensor with one given scale, as for Q, K and V: `cast(clamp(x / scale_inv))`.

    Args:
        x: any shape.
        scale_inv: FP32 scalar; values beyond `448 * scale_inv` saturate.
    """
    return _saturating_cast(x.float() / scale_inv)


def exact_scales(amax: Tensor, dtype: torch.dtype, pow2: bool) -> tuple[Tensor, Tensor]:
    """Return `(scale, scale_inv)` of FP32 maxima, of any shape, by the FP8 contract.

    It divides tensor by tensor, which rounds once. `448.0 / tensor` would compute a reciprocal and
    a product, and so round twice.

    Args:
        amax: FP32 maxima of absolute values.
        dtype: type of the quantized values; bounds the scale where `448 / amax` overflows.
        pow2: round `scale_inv` up to a power of two, by clearing the mantissa of `scale`.
    """
    scale = torch.full_like(amax, FP8_MAX) / amax
    scale = torch.where(torch.isinf(scale), torch.finfo(dtype).max, scale)
    if pow2:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    scale = torch.where(amax == 0, torch.ones_like(amax), scale)
    return scale, torch.ones_like(scale) / scale


def _blocks(x_OI: Tensor) -> Tensor:
    """Return `[..., O, I]`, filled up with zeros, as `[..., P, 128, Q, 128]`."""
    O, I = x_OI.shape[-2:]
    padded_OI = pad(x_OI, (0, -I % BLOCK, 0, -O % BLOCK))
    return padded_OI.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))


def _scaled(x_OI: Tensor, scale_PQ: Tensor) -> Tensor:
    """Return `[..., O, I]`, each block times its scale."""
    O, I = x_OI.shape[-2:]
    blocks = _blocks(x_OI) * scale_PQ[..., :, None, :, None]
    return blocks.flatten(-2).flatten(-3, -2)[..., :O, :I].contiguous()


def _saturating_cast(scaled: Tensor) -> Tensor:
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8)
