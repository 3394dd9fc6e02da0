"""The engine's operations by the kernels that it launches, on one Hopper GPU.

They are vLLM 0.25.1's in eager mode; where vLLM runs plain torch, so does this. Operations and
shapes are `dialects.EAGER`'s.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.numerics import dialects
from benchmarks.numerics.dialects import Operand, Table, fp8_scale
from benchmarks.numerics.table_forward import Shape, Weight, take
from benchmarks.numerics.te_kernels import cu_seqlens, linear_head
from fp8_nemo.glue.quantize import FP8, FP8_MAX, Fp8Groups
from fp8_nemo.nemo.aligned import ops as aligned_ops

PAGE = 16  # tokens of vLLM's KV cache


@cache
def vllm() -> Any:
    """Import what of vLLM is called, once; its extension registers `torch.ops._C`."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    from vllm.utils import deep_gemm

    return argparse.Namespace(ops=ops, fp8=fp8_utils, deep_gemm=deep_gemm)


def vllm_norm(delta: Tensor | None, stream: Tensor, weight: Tensor, eps: float,
              to_linear: bool) -> tuple:  # fmt: skip
    """Run `rms_norm` or, in place, `fused_add_rms_norm` (vllm_c)."""
    ops = vllm().ops
    if delta is None:
        out = torch.empty_like(stream)
        ops.rms_norm(out, stream.contiguous(), weight, eps)
        return out, stream
    delta, stream = delta.clone(), stream.clone()
    ops.fused_add_rms_norm(delta, stream, weight, eps)
    return delta, stream


def vllm_rope(q: Tensor, k: Tensor, S: int, theta: float) -> tuple[Tensor, Tensor]:
    """Run `rotary_embedding` with a table in BF16 (rotary_embedding/base.py:61, 221)."""
    angle = dialects.angles(S, q.shape[-1], theta, q.device)
    table = torch.cat([angle.cos(), angle.sin()], dim=-1).bfloat16()
    places = torch.arange(S, device=q.device).repeat(q.shape[0] // S)
    flat_q, flat_k = q.flatten(-2).clone(), k.flatten(-2).clone()
    vllm().ops.rotary_embedding(places, flat_q, flat_k, q.shape[-1], table, True)
    return flat_q.view(q.shape), flat_k.view(k.shape)


def vllm_silu(h: Tensor) -> Tensor:
    """Run `silu_and_mul` (activation.py)."""
    out = h.new_empty(h.shape[0], h.shape[1] // 2)
    vllm()  # registers the operation
    torch.ops._C.silu_and_mul(out, h.contiguous())
    return out


def vllm_expert_silu(h: Tensor, prob_R: Tensor | None, fp8: bool) -> Operand:
    """Run `silu_and_mul`, in FP8 with the quantizer (fused_moe/experts/triton_moe.py:430)."""
    if prob_R is not None:  # the engine has no such kernel
        return dialects.expert_silu_vllm(h, prob_R, fp8)
    if not fp8:
        return vllm_silu(h)
    made = vllm().ops.silu_and_mul_per_block_quant(h.contiguous(), group_size=128, quant_dtype=FP8)
    return Fp8Groups(*made)


def vllm_quantize(x_TI: Tensor) -> Fp8Groups:
    """Run `per_token_group_fp8_quant` (fp8_utils.py:566)."""
    x_TI = x_TI.contiguous()
    return Fp8Groups(*vllm().fp8.per_token_group_quant_fp8(x_TI, 128, use_ue8m0=False))


def vllm_gemm(operand: Operand, weight: Weight) -> Tensor:
    """Multiply by DeepGEMM (kernels/linear/scaled_mm/deep_gemm.py), in BF16 by torch's linear."""
    if isinstance(operand, Tensor):
        return linear(operand, weight.bf16_OI)
    out = torch.empty(operand.fp8_TI.shape[0], weight.bf16_OI.shape[0],
                      dtype=torch.bfloat16, device=weight.bf16_OI.device)  # fmt: skip
    lib = vllm().deep_gemm
    scales = lib.get_col_major_tma_aligned_tensor(operand.scale_inv_TQ.contiguous())
    lib.fp8_gemm_nt((operand.fp8_TI.contiguous(), scales), (weight.fp8_OI, weight.scale_inv_PQ),
                    out, is_deep_gemm_e8m0_used=False)  # fmt: skip
    return out


@cache
def fa3() -> Callable[..., Tensor]:
    """Import vLLM's FlashAttention, once."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func


def _pages(k: Tensor, v: Tensor, S: int) -> dict[str, Any]:
    N, blocks = k.shape[0] // S, S // PAGE
    table = torch.arange(N * blocks, dtype=torch.int32, device=k.device).view(N, blocks)
    k, v = (x.contiguous().view(-1, PAGE, *x.shape[1:]) for x in (k, v))
    return {"k": k, "v": v, "block_table": table, "causal": True, "fa_version": 3}


def fa3_prefill(q: Tensor, k: Tensor, v: Tensor, S: int, **descales: Any) -> Tensor:
    """Attend by FlashAttention 3 to pages of a cache (v1/attention/backends/flash_attn.py:930)."""
    N = q.shape[0] // S
    return fa3()(
        q=q.contiguous(), out=torch.empty(q.shape, dtype=torch.bfloat16, device=q.device),
        cu_seqlens_q=cu_seqlens(N, S, q.device), max_seqlen_q=S,
        seqused_k=torch.full((N,), S, dtype=torch.int32, device=q.device), max_seqlen_k=S,
        softmax_scale=q.shape[-1] ** -0.5, **_pages(k, v, S), **descales,
    )  # fmt: skip


def fa3_decode(q: Tensor, k: Tensor, v: Tensor, S: int) -> Tensor:
    """Attend as decode does, one query of every sequence at a time, keys split as FA3 likes."""
    N, pages, out = q.shape[0] // S, _pages(k, v, S), torch.empty_like(q)
    starts = cu_seqlens(N, 1, q.device)
    for place in range(S):
        out[place::S] = fa3()(
            q=q[place::S].contiguous(), cu_seqlens_q=starts, max_seqlen_q=1,
            seqused_k=torch.full((N,), place + 1, dtype=torch.int32, device=q.device),
            max_seqlen_k=place + 1, softmax_scale=q.shape[-1] ** -0.5, **pages,
        )  # fmt: skip
    return out


def fa3_fp8(q: Tensor, k: Tensor, v: Tensor, S: int) -> Tensor:
    """Attend by FA3 in FP8: Q, K, V with one scale each, P by the kernel."""
    scales = [fp8_scale(x) for x in (q, k, v)]
    codes = [(x.float() / s).clamp(-FP8_MAX, FP8_MAX).to(FP8)
             for x, s in zip((q, k, v), scales, strict=True)]  # fmt: skip
    shape = (q.shape[0] // S, k.shape[1])
    names = ("q_descale", "k_descale", "v_descale")
    given = {n: s.expand(shape).contiguous() for n, s in zip(names, scales, strict=True)}
    q, k, v = codes
    return fa3_prefill(q, k, v, S, **given)


def vllm_router(x_TH: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Make BF16 logits (ReplicatedLinear), then `topk_softmax` renormalized (fused_topk)."""
    from vllm.model_executor.layers.fused_moe.router.fused_topk_router import fused_topk

    probs, ids, _ = fused_topk(x_TH, linear(x_TH, weight), k, renormalize=True)
    return probs, ids.long()


def vllm_expert_gemm(shape: Shape, operand: Any, weight: Weight, counts: list[int],
                     prob_R: Tensor | None) -> Tensor:  # fmt: skip
    """Run the Triton product of one expert a row (fused_moe.py:735), its tiles as vLLM picks them.

    Rows are sorted already; vLLM gathers them itself, which no row's sum sees.
    """
    from vllm.model_executor.layers.fused_moe import fused_moe
    from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
    from vllm.triton_utils import tl

    fp8 = isinstance(operand, Fp8Groups)
    rows, scales = operand if fp8 else (operand, None)
    matrix = weight.fp8_OI if fp8 else weight.bf16_OI
    assert matrix is not None
    R, O = rows.shape[0], matrix.shape[1]
    width = shape.ffn
    E, H, block = matrix.shape[0], shape.hidden, [128, 128] if fp8 else None
    name = "fp8_w8a8" if fp8 else None
    config = fused_moe.try_get_optimal_moe_config(
        (E, 2 * width, H), (E, H, width), shape.experts_per_token, name,
        R // shape.experts_per_token, block_shape=block,
    )  # fmt: skip
    expert_R = torch.arange(E, device=rows.device).repeat_interleave(
        torch.tensor(counts, device=rows.device))[:, None].int()  # fmt: skip
    order, ids, padded = moe_align_block_size(expert_R, config["BLOCK_SIZE_M"], E)
    out = torch.empty(R, 1, O, dtype=torch.bfloat16, device=rows.device)
    fused_moe.invoke_fused_moe_triton_kernel(
        rows.contiguous(), matrix, out, scales, weight.scale_inv_PQ if fp8 else None,
        None if prob_R is None else prob_R[:, None].contiguous(), order, ids, padded,
        prob_R is not None, 1, config, compute_type=tl.bfloat16, use_fp8_w8a8=fp8,
        use_int8_w8a8=False, use_int8_w8a16=False, use_int4_w4a16=False, per_channel_quant=False,
        block_shape=block,
    )  # fmt: skip
    return out[:, 0]


def vllm_sum(rows_TkH: Tensor, ids_Tk: Tensor) -> Tensor:
    """Run `moe_sum`, which adds up to four rows in BF16."""
    out = torch.empty_like(rows_TkH[:, 0])
    vllm().ops.moe_sum(rows_TkH.contiguous(), out)
    return out


def by_position(S: int, op: Callable[..., Tensor], operand: Any, weight: Any) -> Tensor:
    """Run a product as decode does: the N rows of each position at a time."""
    made = [op(take(operand, slice(place, None, S)), weight) for place in range(S)]
    return torch.stack(made, 1).flatten(0, 1)


def prefill(shape: Shape) -> Table:
    """Return the engine's kernels as they run on all positions at once."""
    return {
        "norm": vllm_norm, "rope": vllm_rope, "silu": vllm_silu, "expert silu": vllm_expert_silu,
        "quantize": vllm_quantize, "gemm": vllm_gemm, "attention": fa3_prefill,
        "router": vllm_router, "expert gemm": partial(vllm_expert_gemm, shape), "sum": vllm_sum,
        "lm_head": linear_head,
    }  # fmt: skip


def alone(S: int) -> dict[str, Table]:
    """Return what decode does otherwise than prefill, and an FP8 cache, for sequences of S."""
    attention = {"attention": fa3_decode}
    rows = {"gemm": partial(by_position, S, vllm_gemm),
            "lm_head": partial(by_position, S, linear_head)}  # fmt: skip
    return {"decode attention": attention, "decode rows": rows, "decode": attention | rows,
            "fp8 kv": {"attention": fa3_fp8}}  # fmt: skip


def aligned_rope(q: Tensor, k: Tensor, S: int, theta: float) -> tuple[Tensor, Tensor]:
    """Rotate by the kernel of `fp8_nemo.nemo.aligned`."""
    D, positions = q.shape[-1], torch.arange(S, device=q.device).repeat(q.shape[0] // S)
    exponents = torch.arange(0, D, 2, dtype=torch.float32, device=q.device) / D
    table = aligned_ops.cos_sin_table(1.0 / theta**exponents, S)
    turned = aligned_ops.rope(positions, q.flatten(-2), k.flatten(-2), table, D)
    return turned[0].view(q.shape), turned[1].view(k.shape)


def aligned_quantize(x_TI: Tensor) -> Fp8Groups:
    """Quantize by the kernel of `fp8_nemo.nemo.aligned`, scales as DeepGEMM reads them."""
    codes, scales = aligned_ops.quantize(x_TI.contiguous(), True, True)
    return Fp8Groups(codes, scales.contiguous())


def aligned(precision: str) -> Table:
    """Return what an aligned engine launches in the trainer's place, to compare the two."""
    table: Table = {"rope": aligned_rope, "silu": aligned_ops.silu}
    return table if precision == "bf16" else table | {"quantize": aligned_quantize}
