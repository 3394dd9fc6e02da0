"""Attention of decode steps over an FP8 cache by FlashInfer's XQA, on Hopper GPUs.

vLLM attends over an FP8 cache by FlashAttention 3, whose tile of a decode step has 64 rows where a
KV head has 4 or 8 queries. XQA turns the product round, and reads the same cache up to 1.6 times as
fast on an H200 (decode-attention-h200.json). vLLM has XQA too, with scales that are numbers of the
host, which a CUDA graph keeps; here the kernel reads them where a refit writes them.

Cache, Q's codes and scales stay vLLM's, so nothing else of the engine or of a refit changes. Steps
with prompts in them, and what XQA does not know, stay FlashAttention 3's. T sequences, A query
heads, K KV heads, D head dimension.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from fp8_nemo.recipe.options.precision import XQA_GROUP, XQA_HEADS

HOPPER = (9, 0)
PAGES = (16, 32, 64, 128)
"""Tokens of a page that XQA is written for (flashinfer/xqa.py)."""
SPREAD = 3
"""Multiprocessors that XQA is told of for each there is: by itself it leaves some idle where few
long sequences are decoded (decode-attention-h200.json)."""
WITHOUT = {"softcap": 0, "alibi_slopes": None, "s_aux": None, "mask_mod": None, "q_v": None,
           "return_softmax_lse": False}  # fmt: skip
"""Arguments of FlashAttention's that XQA has no counterpart for, and their value where not used."""


def by_xqa(flash: Callable[..., Any]) -> Callable[..., Any]:
    """Return FlashAttention's function, of which XQA does what it can.

    Args:
        flash: vLLM's `flash_attn_varlen_func`, which its backend calls with names alone.
    """

    @wraps(flash)
    def attend(*given: Any, **options: Any) -> Any:
        """Attend as FlashAttention's function does."""
        if given or not is_decode(**options) or not _is_there(options["q"], options["k"]):
            return flash(*given, **options)
        decode(*(options[name] for name in ("q", "k", "v", "out", "seqused_k", "block_table")),
               *(options[f"{name}_descale"][0, :1] for name in "qkv"),
               factor=options["softmax_scale"])  # fmt: skip
        return options["out"]

    attend.by_xqa = True  # type: ignore[attr-defined]
    return attend


def is_decode(
    *, q: Tensor, k: Tensor, max_seqlen_q: int, out: Tensor | None = None,
    block_table: Tensor | None = None,
    window_size: Any = None, q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, **options: Any,
) -> bool:  # fmt: skip
    """Return whether a call of FlashAttention's is one that XQA can do.

    Each sequence has one token, the cache is paged and in FP8, and each scale is a layer's.
    """
    scales = (q_descale, k_descale, v_descale)
    return (
        max_seqlen_q == 1
        and out is not None
        and out.dtype == torch.bfloat16
        and k.dtype == q.dtype == torch.float8_e4m3fn
        and block_table is not None
        and len(block_table) == len(q)
        and k.shape[1] in PAGES
        and k.shape[3] in XQA_HEADS
        and q.shape[1] <= XQA_GROUP * k.shape[2]
        and tuple(window_size or (-1, -1)) == (-1, -1)
        and all(scale is not None and _is_one(scale) for scale in scales)
        and all(options.get(name, unused) == unused for name, unused in WITHOUT.items())
    )


def decode(
    codes_TAD: Tensor, keys: Tensor, values: Tensor, out_TAD: Tensor, lengths_T: Tensor,
    table: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, factor: float,
) -> None:  # fmt: skip
    """Attend from one token of each sequence over its pages, into `out_TAD`.

    Nothing outlives the call, so a captured graph owns what it needs, and a sleeping engine's
    memory holds nothing of it.

    Args:
        codes_TAD: Q, E4M3.
        keys: E4M3 `[pages, page, K, D]`, of any strides but the last.
        values: the same.
        out_TAD: BF16.
        lengths_T: INT32: of each sequence, with its new token; 0 for rows that fill up a graph,
            whose result means nothing.
        table: INT32 `[T, pages of the longest sequence]`.
        q_scale: FP32 `[1]`, on the device, read at each call.
        k_scale: the same.
        v_scale: the same.
        factor: on the logits, `D ** -0.5` as a rule.
    """
    from flashinfer.xqa import xqa

    T, A, D = codes_TAD.shape
    page, K = keys.shape[1:3]
    told = SPREAD * torch.cuda.get_device_properties(codes_TAD.device).multi_processor_count
    ready = prepare(codes_TAD, q_scale, k_scale, v_scale, lengths_T, K, factor * D**0.5)
    query_TAD, scale, lengths_T, counters = ready
    parts = T * K + told  # XQA cuts sequences into no more
    space = torch.empty((parts + 2) * A // K * (2 * D + 8), dtype=torch.uint8, device=keys.device)
    xqa(
        query_TAD.unsqueeze(1), keys, values, table, lengths_T.unsqueeze(1), out_TAD.unsqueeze(1),
        space, counters, K, page, q_scale=scale, kv_scale=v_scale, sm_count=told,
        enable_pdl=False,  # it reads lengths and scales before it waits for the kernel before it
    )  # fmt: skip


def prepare(
    codes_TAD: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, lengths_T: Tensor,
    K: int, factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what XQA takes: Q's codes in BF16, the scale of QK, lengths of 1 at least, counters.

    XQA casts Q to E4M3 by no scale, so that codes come back as they were. It multiplies QK by V's
    scale too, which is taken out here. The counters, `[T * K]`, are 0.
    """
    if codes_TAD.is_cuda:
        from fp8_nemo.nemo.decode import kernels

        return kernels.prepare(codes_TAD, q_scale, k_scale, v_scale, lengths_T, K, factor)
    return (
        codes_TAD.bfloat16(),
        q_scale * k_scale / v_scale * factor,
        lengths_T.clamp(min=1),
        torch.zeros(len(lengths_T) * K, dtype=torch.int32),
    )


def _is_one(scale_TK: Tensor) -> bool:
    pairs = zip(scale_TK.shape, scale_TK.stride(), strict=True)
    return all(size == 1 or step == 0 for size, step in pairs)


def _is_there(q_TAD: Tensor, keys: Tensor) -> bool:
    page, K, D = keys.shape[1:]
    return q_TAD.is_cuda and _compiled(q_TAD.device, page, D, q_TAD.shape[1] // K)


@cache
def _compiled(device: torch.device, page: int, D: int, group: int) -> bool:
    """Compile XQA once, while the engine warms up; say whether there is one, and why not."""
    if torch.cuda.get_device_capability(device) != HOPPER:
        return False
    kind = (torch.bfloat16, torch.float8_e4m3fn, page, D, group, False, torch.bfloat16, 1)
    try:
        from flashinfer.xqa import get_xqa_module

        get_xqa_module(*kind)
    except Exception as error:  # of a compiler, or of its absence; the run goes on without
        print(f"fp8_nemo: no XQA, decode steps attend by FlashAttention 3: {error}", flush=True)
        return False
    print("fp8_nemo: decode steps over the FP8 cache attend by XQA", flush=True)
    return True
