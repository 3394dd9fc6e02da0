"""What `precision.align=exact` adds to the engine of `engine.py`: norm, and attention in one piece.

Importing it registers them, as `engine` does. The norm is the trainer's, with the sum of the
residual stream before it. FlashAttention 3 may split the keys of a sequence over several blocks and
join their sums, by rules that depend on the batch (seam splits-keys). Here it never does, in
metadata made ahead and in the call itself.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backends import flash_attn

from fp8_nemo.glue.wire import RefitError
from fp8_nemo.nemo.aligned import engine, ops

FLASH = "vllm_flash_attn_version"


def _norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    return ops.norm(x_TH, None, weight_H, eps)[0]


def _add_norm(
    x_TH: Tensor, stream_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return ops.norm(x_TH, stream_TH, weight_H, eps)


def _like_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    return x_TH.new_empty(x_TH.shape)


def _like_add_norm(
    x_TH: Tensor, stream_TH: Tensor, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return x_TH.new_empty(x_TH.shape), x_TH.new_empty(x_TH.shape)


for name, run, like in (("norm", _norm, _like_norm), ("add_norm", _add_norm, _like_add_norm)):
    direct_register_custom_op(
        f"aligned_{name}", run, fake_impl=like, dispatch_key="CompositeExplicitAutograd"
    )


@RMSNorm.register_oot
class AlignedNorm(engine.Always, RMSNorm):
    """Add to the residual stream in BF16, and norm by TransformerEngine's order of sums."""

    def forward_cuda(self, x: Tensor, residual: Tensor | None = None):
        """Return the norm of `[T, H]`, and the new residual stream if one is given."""
        weight, eps = self.weight.data, self.variance_epsilon
        if residual is None:
            return torch.ops.vllm.aligned_norm(x, weight, eps)
        return torch.ops.vllm.aligned_add_norm(x, residual, weight, eps)


def check(model: nn.Module) -> None:
    """Look for operations of vLLM's own that a model has kept.

    So with frequencies that are scaled otherwise than Llama 3's, or another attention backend.

    Raises:
        RefitError: there are some; it names each kind once.
    """
    kept = {
        type(each).__name__
        for each in model.modules()
        if isinstance(each, (RotaryEmbeddingBase, SiluAndMul, RMSNorm))
        and not isinstance(each, engine.Always)
    }
    kept |= {
        type(each.impl).__name__
        for each in model.modules()
        if isinstance(each, Attention) and getattr(each.impl, FLASH, None) != 3
    }
    if kept:
        raise RefitError(
            [
                f"precision.align=exact: vLLM kept {n}; set precision.align=cheap"
                for n in sorted(kept)
            ]
        )


def unsplit(call: Callable[..., Any]) -> Callable[..., Any]:
    """Make a call of FlashAttention's that never splits keys."""

    @wraps(call)
    def never(*arguments: Any, **options: Any) -> Any:
        return call(*arguments, **options | {"num_splits": 1})

    return never


for name in ("flash_attn_varlen_func", "get_scheduler_metadata"):
    setattr(flash_attn, name, unsplit(getattr(flash_attn, name)))
