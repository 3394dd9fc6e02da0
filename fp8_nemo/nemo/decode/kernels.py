"""`attention.prepare` as one Triton kernel, which a CUDA graph holds with all it reads."""

# pyright: reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false
# Triton comes with a CUDA build of torch, and only there is this module imported.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

AT_ONCE = 1024


def prepare(
    codes_TAD: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, lengths_T: Tensor,
    K: int, factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Take and give what `attention.prepare` does."""
    assert codes_TAD.is_contiguous()
    device, T = codes_TAD.device, len(lengths_T)
    query_TAD = torch.empty(codes_TAD.shape, dtype=torch.bfloat16, device=device)
    scale = torch.empty(1, dtype=torch.float32, device=device)
    at_least = torch.empty(T, dtype=torch.int32, device=device)
    counters = torch.empty(T * K, dtype=torch.int32, device=device)
    _prepare[(triton.cdiv(codes_TAD.numel(), AT_ONCE),)](
        codes_TAD, query_TAD, q_scale, k_scale, v_scale, scale, lengths_T, at_least, counters,
        codes_TAD.numel(), T, T * K, factor, AT_ONCE=AT_ONCE,
    )  # fmt: skip
    return query_TAD, scale, at_least, counters


@triton.jit
def _prepare(
    codes, query, q_scale, k_scale, v_scale, scale, lengths, at_least, counters,
    ELEMENTS, T, COUNTERS, factor, AT_ONCE: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    held = tl.load(codes + at, mask=at < ELEMENTS, other=0.0)
    tl.store(query + at, held.to(query.dtype.element_ty), mask=at < ELEMENTS)
    length = tl.load(lengths + at, mask=at < T, other=1)
    tl.store(at_least + at, tl.maximum(length, 1), mask=at < T)
    tl.store(counters + at, tl.zeros([AT_ONCE], tl.int32), mask=at < COUNTERS)
    if tl.program_id(0) == 0:
        of_qk = tl.load(q_scale) * tl.load(k_scale)
        tl.store(scale, of_qk / tl.load(v_scale) * factor)
