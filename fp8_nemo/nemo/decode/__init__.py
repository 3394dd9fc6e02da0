"""Attention of decode steps over an FP8 cache, by another kernel than vLLM's choice."""

# pyright: reportMissingImports=false
from __future__ import annotations


def register() -> None:
    """Let FlashAttention 3 hand decode steps to XQA, in this process of vLLM's; once a process.

    Nothing is imported until it is asked for. Where vLLM has no FlashAttention, nothing changes.
    """
    from vllm.v1.attention.backends import flash_attn

    from fp8_nemo.nemo.decode.attention import by_xqa

    call = getattr(flash_attn, "flash_attn_varlen_func", None)
    if call is not None and not hasattr(call, "by_xqa"):
        flash_attn.flash_attn_varlen_func = by_xqa(call)
