"""Compute the experts of transformers' Qwen3-MoE, in every format.

Their products are those of `linears.py`. What a layer does between its products is transformers'
business, in BF16, on both sides.

Shapes: T tokens, O out, I in features, E experts, F expert features, A experts of a token, N = T A
rows of all experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fp8_nemo.local.modules.linears import Fp8Product, Held


@contextmanager
def without_host_reads() -> Iterator[None]:
    """Let experts not ask the device who chose them: a CUDA graph could not hold that."""
    Experts.take_all = True
    try:
        yield
    finally:
        Experts.take_all = False


class Experts(nn.Module):
    """Hold a layer's experts in two slabs, `gate_up_proj` `[E, 2F, I]`, `down_proj` `[E, I, F]`."""

    take_all = False
    """Whether every expert takes every token, inside `without_host_reads` alone."""

    def __init__(self, experts: Any, pow2: bool) -> None:
        super().__init__()
        self.act_fn, self.pow2 = experts.act_fn, pow2

    def slab(self, name: str) -> Any:
        """Return all experts' matrices, as `product` takes them."""
        raise NotImplementedError

    def matrices(self, name: str) -> Sequence[Any]:
        """Return the same, expert by expert."""
        raise NotImplementedError

    def product(self, x: Tensor, matrix: Any) -> Tensor:
        """Multiply `x` by a matrix `[O, I]` or a slab `[E, O, I]`, in the subclass's format."""
        raise NotImplementedError

    def forward(self, hidden_TI: Tensor, index_TA: Tensor, share_TA: Tensor) -> Tensor:
        """Sum the chosen experts by their shares, in ascending order, so that it repeats."""
        # Descending: autograd adds up the stacked gradients in this order, and the digests of the
        # shipped models depend on it.
        given_T1A, index_TA = index_TA[:, None], index_TA.sort(-1, descending=True).values
        share_TA = share_TA[:, None].where(index_TA[..., None] == given_T1A, 0.0).sum(-1)
        products = self._of_all if Experts.take_all else self._of_chosen
        output_TAI = products(hidden_TI, index_TA)
        output_TAI = (output_TAI * share_TA[..., None]).to(hidden_TI.dtype)
        mixed_TI = torch.zeros_like(hidden_TI)
        for output_TI in reversed(output_TAI.unbind(1)):
            mixed_TI = mixed_TI + output_TI
        return mixed_TI

    def _of_all(self, hidden_TI: Tensor, index_TA: Tensor) -> Tensor:
        """Give every expert every token, and use `[T, A, I]` of that."""
        gate, up = self.product(hidden_TI[None], self.slab("gate_up_proj")).chunk(2, dim=-1)
        output_ETI = self.product(self.act_fn(gate) * up, self.slab("down_proj"))
        return output_ETI[index_TA, torch.arange(len(index_TA), device=index_TA.device)[:, None]]

    def _of_chosen(self, hidden_TI: Tensor, index_TA: Tensor) -> Tensor:
        """Give every expert the tokens that chose it; one read on the host."""
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
    """Put rows in another order; torch's own gradient of an index would sort to add up."""

    @staticmethod
    def forward(ctx: Any, x_N: Tensor, order_N: Tensor, back_N: Tensor) -> Tensor:
        """Return `x[order]`."""
        ctx.save_for_backward(back_N)
        return x_N[order_N]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return `grad[back]`."""
        return grads[0][ctx.saved_tensors[0]], None, None


def permuted(x_N: Tensor, order_N: Tensor, back_N: Tensor) -> Tensor:
    """Return `x[order]`, with `back` the order that undoes it."""
    return Permuted.apply(x_N, order_N, back_N)  # pyright: ignore[reportReturnType]


class PlainExperts(Experts):
    """Hold slabs in BF16, as transformers does."""

    def __init__(self, experts: Any, pow2: bool) -> None:
        super().__init__(experts, pow2)
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj

    def slab(self, name: str) -> Tensor:
        """Return `[E, O, I]`."""
        return getattr(self, name)

    def matrices(self, name: str) -> Sequence[Tensor]:
        """Return E times `[O, I]`."""
        return self.slab(name).unbind()

    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Multiply BF16 operands, as `linear_plain` does."""
        return x @ matrix.mT if x.is_cuda else (x.float() @ matrix.float().mT).to(x.dtype)


class Fp8TrainExperts(PlainExperts):
    """Hold slabs in BF16 that are quantized in every product."""

    def product(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Multiply with both operands of all three products in FP8; no slabs."""
        return Fp8Product.apply(x, matrix, self.pow2)  # pyright: ignore[reportReturnType]


class RolloutExperts(Held, Experts):
    """Hold slabs of a quantized format's bytes and scales, filled by refits expert by expert."""

    def __init__(self, experts: Any, pow2: bool, rollout: str) -> None:
        super().__init__(experts, pow2)
        self.rollout = rollout
        for name in ("gate_up_proj", "down_proj"):
            self.hold(name, getattr(experts, name))

    def slab(self, name: str) -> Any:
        """Return `[E, O, I]`."""
        return self.value(name)

    def matrices(self, name: str) -> Sequence[Any]:
        """Return E times `[O, I]`."""
        return [self.value(name, index) for index in range(len(getattr(self, name)))]
