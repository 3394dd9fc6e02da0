"""FlashAttention 3 for TransformerEngine from vLLM's build: a `flash_attn_3` of the forward alone.

TransformerEngine takes FlashAttention 3 if a distribution `flash-attn-3` is installed
(attention/dot_product_attention/backends.py:134). vLLM 0.25.1 brings the kernels under another
name; this lends them, to a logprob pass only: there is no backward. So the trainer attends by the
engine's kernel, without pages.
"""

from __future__ import annotations

import sys
from pathlib import Path

ENVIRONMENT = {"NVTE_FLASH_ATTN": "1", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
"""What Megatron sets for `attention_backend=flash` (language_module.py:133)."""
LOOKS = "transformer_engine.pytorch.attention.dot_product_attention.backends"
INTERFACE = """
def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None,
    causal=False, window_size=(-1, -1), num_splits=1, deterministic=False,
):
    from vllm.vllm_flash_attn import flash_attn_varlen_func as vllms

    return vllms(
        q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=cu_seqlens_k,
        softmax_scale=softmax_scale, causal=causal, window_size=list(window_size),
        num_splits=num_splits, fa_version=3,
    )


def _none(*_, **__):
    raise NotImplementedError("flash_for_te lends flash_attn_varlen_func alone")


flash_attn_func = flash_attn_with_kvcache = _flash_attn_forward = _flash_attn_backward = _none
"""


def lend(folder: Path) -> None:
    """Make `flash_attn_3` of a folder importable.

    Raises:
        RuntimeError: TransformerEngine looked already; Megatron's first import makes it look.
    """
    if LOOKS in sys.modules:
        raise RuntimeError(f"{LOOKS} is imported: lend before it, or it refuses FlashAttention 3")
    package, about = folder / "flash_attn_3", folder / "flash_attn_3-3.0.0.dist-info"
    for each in (package, about):
        each.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "flash_attn_interface.py").write_text(INTERFACE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-3\nVersion: 3.0.0\n")
    sys.path.insert(0, str(folder))
