"""Compute linears of transformers' models, and the products under them, in every format.

Every product takes operands as the real kernels do and multiplies them in FP32: BF16 values for
`bf16`; FP8 bytes times their scales for `fp8`. Results are rounded to BF16. On a GPU FP8 bytes go
into a kernel of `kernels.py`: it sums in another order, and rounds elsewhere in BF16.

Training in FP8 quantizes both operands of all three products along the axis that each reduces
(TransformerEngine's Float8BlockScaling): `y = x w^T` and `dx = dy w` share the weight's blocks; `dw
= dy^T x` groups both sides along tokens.

Shapes: T tokens, O out, I in features, E experts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8_nemo.glue.quantize import (
    Fp8Groups,
    Fp8Weight,
    dequantize_blocks,
    dequantize_groups,
    e2m1_values,
    quantize_blocks,
    quantize_groups,
)
from fp8_nemo.glue.wire import HELD, suffixes


def linear_plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply BF16 operands, with FP32 products and sums and a BF16 result.

    On a CPU without BF16 instructions torch's own BF16 product is many times slower than FP32.
    """
    if x.is_cuda:
        return nn.functional.linear(x, weight, bias)
    bias = None if bias is None else bias.float()
    return nn.functional.linear(x.float(), weight.float(), bias).to(x.dtype)


Operand = Tensor | tuple[Tensor, Tensor]
"""Of a product in FP8: its FP32 values on a CPU, its bytes and scales on a GPU."""


def linear_fp8(x: Tensor, weight: Operand, pow2: bool) -> Tensor:
    """Quantize `x` 1x128, take the weight as held; FP32 products, BF16 result."""
    return scaled_mm(last_input.grouped(x, pow2), weight, x.dtype)


def scaled_mm(left: Operand, right: Operand, dtype: torch.dtype) -> Tensor:
    """Return `left right^T`: exact products of what the bytes stand for, summed in FP32.

    Args:
        left: `[..., T, K]`; with a slab `[E, T, K]` or `[1, T, K]`.
        right: `[O, K]`, or a slab `[E, O, K]`.
        dtype: of the result `[..., T, O]`.
    """
    if isinstance(left, Tensor):
        assert isinstance(right, Tensor)
        return (left @ right.mT).to(dtype)
    assert not isinstance(right, Tensor)
    from fp8_nemo.local.modules import kernels

    if right[0].ndim == 3:
        return kernels.product(left, right, dtype)
    rows = left[0].flatten(0, -2)[None], left[1].flatten(0, -2)[None]
    found = kernels.product(rows, (right[0][None], right[1][None]), dtype)
    return found[0].unflatten(0, left[0].shape[:-1])


def operand(held: Fp8Weight | Fp8Groups) -> Operand:
    """Return what `scaled_mm` takes of bytes and scales."""
    if held[0].is_cuda:
        return held
    return dequantize_blocks(held) if isinstance(held, Fp8Weight) else dequantize_groups(held)


def transposed(right: Operand) -> Operand:
    """Transpose `[O, K]` to `[K, O]`."""
    return right.T if isinstance(right, Tensor) else (right[0].T, right[1].T)


class LastInput:
    """Keep the input quantized last: Q, K and V of a layer take the same one; so do gate and up.

    Its operand lives as long as the input does, or until another one comes.
    """

    def __init__(self) -> None:
        self.held: tuple[weakref.ref[Tensor], int, bool, Operand] | None = None

    def grouped(self, x: Tensor, pow2: bool) -> Operand:
        """Return x in groups, as an operand that must not be changed by the taker."""
        if self.held is not None:
            last, version, kind, value = self.held
            if last() is x and (version, kind) == (x._version, pow2):
                return value
        value = operand(quantize_groups(x, pow2=pow2))
        self.held = weakref.ref(x, self._forget), x._version, pow2, value
        return value

    def _forget(self, last: weakref.ref[Tensor]) -> None:
        if self.held is not None and self.held[0] is last:
            self.held = None


last_input = LastInput()
"""Shared by all linears and experts of the process."""


class Fp8Product(torch.autograd.Function):
    """Compute `linear` with both operands of all three products in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, pow2: bool) -> Tensor:
        """Compute `y = x w^T`; x `[..., I]`, weight `[O, I]` in BF16."""
        fp8_weight = _quantize_unchecked(weight, pow2)
        ctx.save_for_backward(x, *fp8_weight)
        ctx.pow2 = pow2
        return linear_fp8(x, operand(fp8_weight), pow2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Compute `dx = dy w` and `dw = dy^T x`."""
        x, *fp8_weight = ctx.saved_tensors
        dy_TO, x_TI = grads[0].flatten(0, -2), x.flatten(0, -2)
        dy, dy_T, x_T = (
            operand(quantize_groups(each, pow2=ctx.pow2)) for each in (dy_TO, dy_TO.T, x_TI.T)
        )
        dx_TI = scaled_mm(dy, transposed(operand(Fp8Weight(*fp8_weight))), x.dtype)
        return dx_TI.view_as(x), scaled_mm(dy_T, x_T, x.dtype), None


class PlainLinear(nn.Linear):
    """Hold a linear whose weight stays BF16."""

    def forward(self, input: Tensor) -> Tensor:
        """Map `[..., I]` to `[..., O]`."""
        return linear_plain(input, self.weight, self.bias)


class Fp8TrainLinear(nn.Linear):
    """Hold a linear with a BF16 weight that is quantized in every product."""

    pow2 = False

    def forward(self, input: Tensor) -> Tensor:
        """Map `[..., I]` to `[..., O]`."""
        return _with_bias(Fp8Product.apply(input, self.weight, self.pow2), self.bias)


def nvfp4_operand(held: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return what `linear_w4a16` takes: values `[O, I]`, and scales of rows `[O]` or `[1]`.

    Args:
        held: four-bit bytes, scales of 16, and one scale of each whole weight that is stacked here.
    """
    packed_OI, scale_OG, scale_2 = held
    rows = packed_OI.shape[-2] // scale_2.shape[-1]
    whole_O = scale_2.repeat_interleave(rows, -1) if scale_2.shape[-1] > 1 else scale_2
    return e2m1_values(packed_OI, scale_OG), whole_O


def linear_w4a16(x: Tensor, weight: tuple[Tensor, Tensor], _: bool) -> Tensor:
    """Multiply 16-bit activations with four-bit weights: FP32 sums, the whole scale, one rounding.

    Marlin too unpacks to 16 bits, which hold these values exactly; where it rounds was not read.
    """
    value_OI, whole_O = weight
    return ((x.float() @ value_OI.mT) * whole_O[..., None, :]).to(x.dtype)


class Product(NamedTuple):
    """Say how an engine multiplies with weights of a format."""

    operand: Callable[[Sequence[Tensor]], Any]
    """Makes what is multiplied of a weight's bytes and scales (`wire.HELD`)."""
    multiply: Callable[[Tensor, Any, bool], Tensor]
    """Takes activations `[..., T, I]`, the operand of one weight or a slab, and whether the scales
    of activations are powers of two; returns `[..., T, O]` in the type of the activations."""


PRODUCTS = {
    "fp8": Product(lambda held: operand(Fp8Weight(*held)), linear_fp8),
    "nvfp4": Product(nvfp4_operand, linear_w4a16),
}
"""By quantized format, of linears and of experts."""


class Held(nn.Module):
    """Hold real bytes and scales of a format, filled by refits alone."""

    rollout: str
    """The format's name."""
    pow2: bool
    """Whether the scales of activations are powers of two."""
    values: dict[tuple[str, int | None], Any] | None = None
    """Their operands, kept inside `values_once` alone."""

    def hold(self, name: str, weight: Tensor) -> None:
        """Register what a weight, or a slab of experts, becomes: scales are NaN until a refit."""
        for suffix, spec in HELD[self.rollout](*weight.shape[-2:]).items():
            shape = (*weight.shape[:-2], *spec.shape)
            if weight.ndim == 3 and spec.shape == (1,):  # one of each projection in the slab
                shape = len(weight), self.projections(name)
            held = torch.full(shape, torch.nan if suffix else 0.0, device=weight.device)
            self.register_buffer(name + suffix, held.to(getattr(torch, spec.dtype)))

    def projections(self, name: str) -> int:
        """Return how many projections are stacked in a slab."""
        return 2 if name.startswith("gate_up") else 1

    def value(self, name: str, index: int | None = None) -> Any:
        """Return the operand that a weight `[O, I]` is, or one expert of a slab."""
        if self.values is not None and (name, index) in self.values:
            return self.values[name, index]
        held = [getattr(self, name + suffix) for suffix in suffixes(self.rollout)]
        held = held if index is None else [each[index] for each in held]
        value = PRODUCTS[self.rollout].operand(held)
        if self.values is not None:
            self.values[name, index] = value
        return value

    def product(self, x: Tensor, matrix: Any) -> Tensor:
        """Multiply `x` by what `value` returned."""
        return PRODUCTS[self.rollout].multiply(x, matrix, self.pow2)


class RolloutLinear(Held):
    """Hold a linear of the engine in a quantized format."""

    def __init__(self, linear: nn.Linear, pow2: bool, rollout: str) -> None:
        super().__init__()
        self.pow2, self.rollout, self.bias = pow2, rollout, linear.bias
        self.hold("weight", linear.weight)

    def forward(self, input: Tensor) -> Tensor:
        """Map `[..., I]` to `[..., O]`."""
        return _with_bias(self.product(input, self.value("weight")), self.bias)


@contextmanager
def values_once(model: nn.Module) -> Iterator[None]:
    """Make quantized weights operands once, not at every token; no refit comes in here."""
    modules = [module for module in model.modules() if isinstance(module, Held)]
    for module in modules:
        module.values = {}
    try:
        yield
    finally:
        for module in modules:
            module.values = None


def _quantize_unchecked(weight_OI: Tensor, pow2: bool) -> Fp8Weight:
    """Quantize without reading the verdict back: the next refit refuses the weight by name."""
    unread = torch.empty((), dtype=torch.bool, device=weight_OI.device)
    return quantize_blocks(weight_OI, pow2=pow2, nonfinite=unread)


def _with_bias(product: Any, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias
