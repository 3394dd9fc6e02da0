"""The trainer's attention by the engine's kernel: FlashAttention 3 of vLLM's build, forward.

vLLM brings no backward. FlashAttention 2, which PyTorch brings, goes back from the output and the
log-sum-exp that FlashAttention 3 gave: the gradient of the same function, by another order of sums.

Sequences are packed, each padded at its end: with a causal mask no real token sees padding, so the
padded lengths are the lengths (seam padded-lengths). T tokens, A query heads, K key heads, D head
dimension.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

KERNELS = Path("vllm", "vllm_flash_attn")
ALIAS = "fp8_nemo_engine_attention"


class EngineAttention(torch.autograd.Function):
    """Attend causally within packed sequences, by the kernel that serves."""

    @staticmethod
    def forward(
        ctx: Any, q_TAD: Tensor, k_TKD: Tensor, v_TKD: Tensor, starts: Tensor, longest: int
    ) -> Tensor:
        """Return `[T, A, D]` in BF16.

        Args:
            ctx: PyTorch's.
            q_TAD: BF16.
            k_TKD: BF16.
            v_TKD: BF16.
            starts: INT32 `[sequences + 1]`: where each begins, and the end of the last.
            longest: tokens of the longest sequence.
        """
        out_TAD, sums_AT = engine_attention()(
            q_TAD, k_TKD, v_TKD, longest, starts, longest, cu_seqlens_k=starts, causal=True,
            return_softmax_lse=True, num_splits=1, fa_version=3,
        )  # fmt: skip
        ctx.save_for_backward(q_TAD, k_TKD, v_TKD, out_TAD, sums_AT, starts)
        ctx.longest = longest
        return out_TAD

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient_TAD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Return the gradients of Q, K and V."""
        q_TAD, k_TKD, v_TKD, out_TAD, sums_AT, starts = ctx.saved_tensors
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q_TAD.device)
        dq_TAD, dk_TKD, dv_TKD = torch.ops.aten._flash_attention_backward(
            gradient_TAD.contiguous(), q_TAD, k_TKD, v_TKD, out_TAD, sums_AT, starts, starts,
            ctx.longest, ctx.longest, 0.0, True, no_dropout, torch.empty(0, device=q_TAD.device),
            scale=q_TAD.shape[-1] ** -0.5,
        )  # fmt: skip
        return dq_TAD, dk_TKD, dv_TKD, None, None


def kernels_of(prefix: Path) -> Path | None:
    """Return the folder of vLLM's kernels: of this environment, else of one beside `prefix`.

    NeMo RL's containers give each kind of worker an environment of its own, all in one folder.
    """
    own = find_spec("vllm")
    if own and own.origin:
        return Path(own.origin).parent / KERNELS.name
    beside = Path("lib", "python*", "site-packages", KERNELS)
    return next(iter(sorted(prefix.parent.glob(str("*" / beside)))), None)


@cache
def engine_attention() -> Callable[..., Any]:
    """Return vLLM's `flash_attn_varlen_func`, without importing vLLM, which changes torch.

    Raises:
        RuntimeError: no vLLM is installed here, nor in an environment beside this one.
    """
    folder = kernels_of(Path(sys.prefix))
    if folder is None:
        raise RuntimeError(
            f"precision.align=exact: no {KERNELS} in this environment or beside {sys.prefix}; "
            "choose precision.align=cheap"
        )
    package = sys.modules[ALIAS] = ModuleType(ALIAS)
    package.__path__ = [str(folder)]
    return import_module(f"{ALIAS}.flash_attn_interface").flash_attn_varlen_func


def attend_as_the_engine(model: nn.Module) -> None:
    """Give every attention of a Megatron model the engine's kernel, with the weights as they are.

    Raises:
        RuntimeError: no attention is TransformerEngine's, or one does more than the engine's.
    """
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    found = [each for each in model.modules() if isinstance(each, TEDotProductAttention)]
    if not found:
        raise RuntimeError("precision.align=exact: no TEDotProductAttention in the model")
    for each in found:
        config = each.config
        for key in ("attention_dropout", "window_size", "softmax_scale", "qk_clip"):
            if held := getattr(config, key, None):
                raise RuntimeError(f"precision.align=exact: the engine has no {key}={held}")
        each.forward = packed_attention


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, attn_mask_type: Any,
    attention_bias: Any = None, packed_seq_params: Any = None, num_splits: Any = None,
) -> Tensor:  # fmt: skip
    """Take what Megatron gives `TEDotProductAttention` of packed sequences; return `[T, A * D]`."""
    assert packed_seq_params is not None, "a plan refuses sequences that are not packed"
    starts = packed_seq_params.cu_seqlens_q_padded
    longest = packed_seq_params.max_seqlen_q
    return EngineAttention.apply(query, key, value, starts, longest).flatten(1)
