"""Linears and experts of transformers' models, in the formats of a precision.

Every product takes operands as the real kernels do and multiplies them in FP32: BF16 values for
`bf16`; FP8 bytes times their scales for `fp8`. Results are rounded to BF16. What a layer does
between its products is transformers' business, in BF16, on both sides. On a GPU FP8 bytes go into
kernels of `kernels.py` and norms into torch's: they sum in another order, and round elsewhere in
BF16.

Training in FP8 quantizes both operands of all three products along the axis that each reduces
(TransformerEngine's Float8BlockScaling): `y = x w^T` and `dx = dy w` share the weight's blocks; `dw
= dy^T x` groups both sides along tokens.

Shapes: T tokens, O out, I in features, E experts, F expert features, A experts of a token, N = T A
rows of all experts.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fp8_nemo.glue.quantize import (
    FP8,
    Fp8Groups,
    Fp8Weight,
    dequantize_blocks,
    dequantize_groups,
    quantize_blocks,
    quantize_groups,
)
from fp8_nemo.glue.wire import is_fp8_weight, scale_shape
from fp8_nemo.local.modules.attention import prepare_attention
from fp8_nemo.recipe.options import Precision


def linear_bf16(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """BF16 operands, FP32 products and sums, BF16 result.

    On a CPU without BF16 instructions torch's own BF16 product is many times slower than FP32.
    """
    if x.is_cuda:
        return nn.functional.linear(x, weight, bias)
    bias = None if bias is None else bias.float()
    return nn.functional.linear(x.float(), weight.float(), bias).to(x.dtype)


Operand = Tensor | tuple[Tensor, Tensor]
"""Of a product in FP8: its FP32 values on a CPU, its bytes and scales on a GPU."""


def linear_fp8(x: Tensor, weight: Fp8Weight, pow2: bool) -> Tensor:
    """`x` quantized 1x128 on the fly, the weight as held; FP32 products, BF16 result."""
    return scaled_mm(_last.grouped(x, pow2), operand(weight), x.dtype)


def scaled_mm(left: Operand, right: Operand, dtype: torch.dtype) -> Tensor:
    """`left right^T`: exact products of what the bytes stand for, summed in FP32.

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
    """What `scaled_mm` takes of bytes and scales."""
    if held[0].is_cuda:
        return held
    return dequantize_blocks(held) if isinstance(held, Fp8Weight) else dequantize_groups(held)


def transposed(right: Operand) -> Operand:
    """`[O, K]` as `[K, O]`."""
    return right.T if isinstance(right, Tensor) else (right[0].T, right[1].T)


class LastInput:
    """The input quantized last: Q, K and V of a layer take the same one, and so do gate and up.

    Its operand lives as long as the input does, or until another one comes.
    """

    def __init__(self) -> None:
        self.held: tuple[weakref.ref[Tensor], int, bool, Operand] | None = None

    def grouped(self, x: Tensor, pow2: bool) -> Operand:
        """The operand that x is in groups, which must not be changed by the taker."""
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


_last = LastInput()


class Fp8Product(torch.autograd.Function):
    """`linear` with both operands of all three products in FP8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, pow2: bool) -> Tensor:
        """`y = x w^T`; x `[..., I]`, weight `[O, I]` in BF16."""
        fp8_weight = _quantize_unchecked(weight, pow2)
        ctx.save_for_backward(x, *fp8_weight)
        ctx.pow2 = pow2
        return linear_fp8(x, fp8_weight, pow2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """`dx = dy w` and `dw = dy^T x`."""
        x, *fp8_weight = ctx.saved_tensors
        dy_TO, x_TI = grads[0].flatten(0, -2), x.flatten(0, -2)
        dy, dy_T, x_T = (
            operand(quantize_groups(each, pow2=ctx.pow2)) for each in (dy_TO, dy_TO.T, x_TI.T)
        )
        dx_TI = scaled_mm(dy, transposed(operand(Fp8Weight(*fp8_weight))), x.dtype)
        return dx_TI.view_as(x), scaled_mm(dy_T, x_T, x.dtype), None


class Bf16Linear(nn.Linear):
    """A linear whose weight stays BF16."""

    def forward(self, input: Tensor) -> Tensor:
        """`[..., I]` to `[..., O]`."""
        return linear_bf16(input, self.weight, self.bias)


class Fp8TrainLinear(nn.Linear):
    """A linear with a BF16 weight that is quantized in every product."""

    pow2 = False

    def forward(self, input: Tensor) -> Tensor:
        """`[..., I]` to `[..., O]`."""
        return _with_bias(Fp8Product.apply(input, self.weight, self.pow2), self.bias)


class Fp8Held(nn.Module):
    """A module that holds real FP8 bytes and block scales, filled by refits alone."""

    values: dict[tuple[str, int | None], Operand] | None = None
    """Their operands, kept inside `values_once` alone."""

    def value(self, name: str, index: int | None = None) -> Operand:
        """The operand `[O, I]` that a weight is, or one expert of a slab."""
        if self.values is not None and (name, index) in self.values:
            return self.values[name, index]
        held = Fp8Weight(getattr(self, name), getattr(self, f"{name}_scale_inv"))
        if index is not None:
            held = Fp8Weight(held.fp8_OI[index], held.scale_inv_PQ[index])
        value_OI = operand(held)
        if self.values is not None:
            self.values[name, index] = value_OI
        return value_OI


@contextmanager
def without_host_reads() -> Iterator[None]:
    """Inside, experts do not ask the device who chose them: a CUDA graph could not hold that."""
    Experts.take_all = True
    try:
        yield
    finally:
        Experts.take_all = False


@contextmanager
def values_once(model: nn.Module) -> Iterator[None]:
    """Inside, FP8 weights become operands once, not at every token; no refit comes in here."""
    modules = [module for module in model.modules() if isinstance(module, Fp8Held)]
    for module in modules:
        module.values = {}
    try:
        yield
    finally:
        for module in modules:
            module.values = None


class Fp8RolloutLinear(Fp8Held):
    """A linear in FP8."""

    def __init__(self, linear: nn.Linear, pow2: bool) -> None:
        super().__init__()
        self.pow2, self.bias = pow2, linear.bias
        self.weight = nn.Buffer(torch.zeros_like(linear.weight, dtype=FP8))
        self.weight_scale_inv = nn.Buffer(_nan_scales(linear.weight))

    def forward(self, input: Tensor) -> Tensor:
        """`[..., I]` to `[..., O]`."""
        found = scaled_mm(_last.grouped(input, self.pow2), self.value("weight"), input.dtype)
        return _with_bias(found, self.bias)


class Experts(nn.Module):
    """A layer's experts in two slabs, `gate_up_proj` `[E, 2F, I]` and `down_proj` `[E, I, F]`."""

    take_all = False
    """Whether every expert takes every token, inside `without_host_reads` alone."""

    def __init__(self, experts: Any, pow2: bool) -> None:
        super().__init__()
        self.act_fn, self.pow2 = experts.act_fn, pow2

    def slab(self, name: str) -> Any:
        """All experts' matrices, as `product` takes them."""
        raise NotImplementedError

    def matrices(self, name: str) -> Sequence[Any]:
        """The same, expert by expert."""
        raise NotImplementedError

    def product(self, x: Tensor, matrix: Any) -> Tensor:
        """`x` times a matrix `[O, I]` or a slab `[E, O, I]`, in the format of the subclass."""
        raise NotImplementedError

    def forward(self, hidden_TI: Tensor, index_TA: Tensor, share_TA: Tensor) -> Tensor:
        """Sum of the chosen experts by their shares, in ascending order, so that it repeats."""
        # Largest first: there a stack's gradients begin to add up, which made models' digests know.
        given_T1A, index_TA = index_TA[:, None], index_TA.sort(-1, descending=True).values
        share_TA = share_TA[:, None].where(index_TA[..., None] == given_T1A, 0.0).sum(-1)
        output_TAI = (self._of_all if Experts.take_all else self._of_chosen)(hidden_TI, index_TA)
        output_TAI = (output_TAI * share_TA[..., None]).to(hidden_TI.dtype)
        mixed_TI = torch.zeros_like(hidden_TI)
        for output_TI in reversed(output_TAI.unbind(1)):
            mixed_TI = mixed_TI + output_TI
        return mixed_TI

    def _of_all(self, hidden_TI: Tensor, index_TA: Tensor) -> Tensor:
        """Every expert takes every token, and `[T, A, I]` of that is used."""
        gate, up = self.product(hidden_TI[None], self.slab("gate_up_proj")).chunk(2, dim=-1)
        output_ETI = self.product(self.act_fn(gate) * up, self.slab("down_proj"))
        return output_ETI[index_TA, torch.arange(len(index_TA), device=index_TA.device)[:, None]]

    def _of_chosen(self, hidden_TI: Tensor, index_TA: Tensor) -> Tensor:
        """Every expert takes the tokens that chose it; one read on the host."""
        A, matrices = index_TA.shape[1], self.matrices("gate_up_proj")
        order_N = index_TA.flatten().argsort(stable=True)  # by expert, then by token
        back_N = order_N.argsort()
        expert_E = torch.arange(len(matrices), device=index_TA.device)
        counts = (index_TA[..., None] == expert_E).sum((0, 1)).tolist()  # the one host read

        def products(x_NI: Tensor, matrices: Sequence[Any]) -> Tensor:
            parts = zip(x_NI.split(counts), matrices, strict=True)
            return torch.cat([self.product(x, matrix) for x, matrix in parts if len(x)])

        hidden_NI = torch.stack([hidden_TI] * A, dim=1).flatten(0, 1)
        gate, up = products(permuted(hidden_NI, order_N, back_N), matrices).chunk(2, dim=-1)
        output_NI = products(self.act_fn(gate) * up, self.matrices("down_proj"))
        return permuted(output_NI, back_N, order_N).unflatten(0, (-1, A))


class Permuted(torch.autograd.Function):
    """Rows in another order. Torch's own gradient of an index would sort to add up what is one."""

    @staticmethod
    def forward(ctx: Any, x_N: Tensor, order_N: Tensor, back_N: Tensor) -> Tensor:
        """`x[order]`."""
        ctx.save_for_backward(back_N)
        return x_N[order_N]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """`grad[back]`."""
        return grads[0][ctx.saved_tensors[0]], None, None


def permuted(x_N: Tensor, order_N: Tensor, back_N: Tensor) -> Tensor:
    """`x[order]`, with `back` the order that undoes it."""
    return Permuted.apply(x_N, order_N, back_N)  # pyright: ignore[reportReturnType]


class Bf16Experts(Experts):
    """Slabs in BF16, as transformers holds them."""

    def __init__(self, experts: Any, pow2: bool) -> None:
        super().__init__(experts, pow2)
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj

    def slab(self, name: str) -> Tensor:
        """`[E, O, I]`."""
        return getattr(self, name)

    def matrices(self, name: str) -> Sequence[Tensor]:
        """E times `[O, I]`."""
        return self.slab(name).unbind()

    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """BF16 operands, multiplied as `linear_bf16` does."""
        return x @ matrix.mT if x.is_cuda else (x.float() @ matrix.float().mT).to(x.dtype)


class Fp8TrainExperts(Bf16Experts):
    """Slabs in BF16 that are quantized in every product."""

    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Both operands of all three products in FP8; no slabs."""
        return Fp8Product.apply(x, matrix, self.pow2)  # pyright: ignore[reportReturnType]


class Fp8RolloutExperts(Experts, Fp8Held):
    """Slabs of FP8 bytes and block scales, filled by refits expert by expert."""

    def __init__(self, experts: Any, pow2: bool) -> None:
        super().__init__(experts, pow2)
        for name in ("gate_up_proj", "down_proj"):
            slab = getattr(experts, name)
            self.register_buffer(name, torch.zeros_like(slab, dtype=FP8))
            self.register_buffer(f"{name}_scale_inv", _nan_scales(slab))

    def slab(self, name: str) -> Operand:
        """`[E, O, I]`."""
        return self.value(name)

    def matrices(self, name: str) -> Sequence[Operand]:
        """E times `[O, I]`."""
        return [self.value(name, index) for index in range(len(getattr(self, name)))]

    def product(self, x: Tensor, matrix: Operand) -> Tensor:
        """FP8 operands."""
        return scaled_mm(_last.grouped(x, self.pow2), matrix, x.dtype)


def set_train_precision(model: PreTrainedModel, precision: Precision) -> None:
    """Give every linear and expert the format in which the trainer multiplies it."""
    pow2 = precision.scales == "pow2"
    for name, module in list(model.named_modules()):
        fp8 = precision.train.is_quantized and _is_fp8(model, name, precision)
        if _is_experts(name):
            _replace(model, name, (Fp8TrainExperts if fp8 else Bf16Experts)(module, pow2))
        elif isinstance(module, nn.Linear):
            module.__class__ = Fp8TrainLinear if fp8 else Bf16Linear
            setattr(module, "pow2", pow2)  # noqa: B010 (its class has changed)
    prepare_attention(model, fp8_kv=False)
    _fuse_norms(model)


def set_rollout_precision(model: PreTrainedModel, precision: Precision) -> None:
    """Give every linear, expert and cache the format in which the engine holds it, still empty."""
    pow2 = precision.scales == "pow2"
    for name, module in list(model.named_modules()):
        fp8 = _is_fp8(model, name, precision)
        if _is_experts(name):
            _replace(model, name, (Fp8RolloutExperts if fp8 else Bf16Experts)(module, pow2))
        elif isinstance(module, nn.Linear) and fp8:
            _replace(model, name, Fp8RolloutLinear(module, pow2))
        elif isinstance(module, nn.Linear):
            module.__class__ = Bf16Linear
    prepare_attention(model, fp8_kv=precision.cache.is_quantized)
    _fuse_norms(model)


def _fuse_norms(model: PreTrainedModel) -> None:
    """On a GPU, one launch for a norm where transformers takes eight, on both sides."""
    for module in model.modules() if model.device.type == "cuda" else ():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(rms_norm, module)


def rms_norm(norm: Any, hidden: Tensor) -> Tensor:
    """Transformers' RMSNorm by torch's kernel, which rounds to BF16 once, after the weight."""
    weight = norm.weight
    return nn.functional.rms_norm(hidden, weight.shape, weight, norm.variance_epsilon)


def _is_fp8(model: PreTrainedModel, name: str, precision: Precision) -> bool:
    """Whether the engine holds the module's weights in FP8."""
    layers = model.config.num_hidden_layers
    if _is_experts(name):
        return is_fp8_weight(f"{name}.down_proj", (1, 1, 1), precision, layers)
    return is_fp8_weight(f"{name}.weight", (1, 1), precision, layers)


def _is_experts(name: str) -> bool:
    return name.endswith(".mlp.experts")


def _replace(model: PreTrainedModel, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)


def _quantize_unchecked(weight_OI: Tensor, pow2: bool) -> Fp8Weight:
    """Quantize without reading the verdict back: the next refit refuses the weight by name."""
    unread = torch.empty((), dtype=torch.bool, device=weight_OI.device)
    return quantize_blocks(weight_OI, pow2=pow2, nonfinite=unread)


def _nan_scales(weight: Tensor) -> Tensor:
    return torch.full(scale_shape(tuple(weight.shape)), torch.nan, device=weight.device)


def _with_bias(product: Any, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias
