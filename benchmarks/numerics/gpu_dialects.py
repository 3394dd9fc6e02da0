"""The operations of `dialects` by the kernels that the two stacks launch, on one Hopper GPU.

The trainer's are TransformerEngine 2.12's as Megatron-LM 14346b6 calls them in its logprob pass
(`torch.no_grad`, THD packed), the engine's vLLM 0.25.1's in eager mode. Where a stack runs plain
torch, so does this. What is not here stays `dialects`' torch: the places where values are rounded
are right there, the order of sums is not.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from benchmarks.numerics import dialects
from benchmarks.numerics.dialects import (
    Model,
    Ops,
    Shape,
    Weight,
    difference,
    fp8_scale,
    split_experts,
    take,
)
from fp8_nemo.glue.quantize import FP8, FP8_MAX, Fp8Groups

Table = dict[str, Callable[..., Any]]
PAGE = 16  # tokens of vLLM's KV cache


def tables(shape: Shape, options: argparse.Namespace) -> tuple[Table, Table, dict[str, Table]]:
    """Return the kernels of the trainer, of the engine, and of what the engine alone may do.

    Only an eager engine has kernels of its own for norm, SiLU and their quantizer: a compiled one's
    are Inductor's, and its roundings `dialects` has.
    """
    trainer: Table = {
        "norm": te_norm, "rope": te_rope, "silu": megatron_silu,
        "expert silu": megatron_expert_silu, "quantize": te_quantize, "gemm": te_gemm,
        "attention": te_attention, "router": te_router, "expert gemm": te_expert_gemm,
        "lm_head": linear_head,
    }  # fmt: skip
    engine: Table = {
        "norm": vllm_norm, "rope": vllm_rope, "silu": vllm_silu,
        "expert silu": vllm_expert_silu, "quantize": vllm_quantize, "gemm": vllm_gemm,
        "attention": fa3_prefill, "router": vllm_router,
        "expert gemm": partial(vllm_expert_gemm, shape), "sum": vllm_sum,
        "lm_head": partial(by_position, options.tokens, linear_head),
    }  # fmt: skip
    if options.engine != "eager":
        engine = {n: op for n, op in engine.items() if n not in ("norm", "silu")}
    if options.precision == "bf16":
        engine.pop("quantize")
    if options.precision != "fp8-e2e":
        trainer.pop("quantize")
    rows: Table = {"gemm": partial(by_position, options.tokens, vllm_gemm)}
    extras: dict[str, Table] = {
        "decode attention": {"attention": fa3_decode}, "decode rows": rows,
        "decode": {"attention": fa3_decode} | rows, "fp8 kv": {"attention": fa3_fp8},
    }  # fmt: skip
    return trainer, engine, extras


def working(add: Callable[..., Any], model: Model, tokens_NS: Tensor,
            references: tuple[Ops, Ops, dict[str, Ops]],
            kernels: tuple[Table, Table, dict[str, Table]], in_torch: str) -> tuple:  # fmt: skip
    """Return the tables with every kernel that ran on real arguments; torch stands for the others.

    Each kernel is compared with torch on arguments of two forwards in torch, the trainer's and the
    engine's: `relative` of 0.01 is rounding, and 1 another operation than was thought.

    Args:
        add: keeps a part of the budget and returns it.
        model: whose forwards give the arguments.
        tokens_NS: what they read.
        references: the tables in torch; the last by name, of what the engine alone may do.
        kernels: as `tables` gives them.
        in_torch: operations, with commas, that torch does.
    """
    calls: dict[str, dict[str, tuple]] = {}

    def watched(side: str) -> Callable[..., None]:
        def watch(op: str, place: str, layer: int, arguments: tuple, found: Any) -> None:
            if layer in (0, model.shape.layers):
                calls.setdefault(op, {}).setdefault(f"{place}, {side}'s arguments", arguments)

        return watch

    def runs(name: str, op: str, kernel: Callable[..., Any], reference: Callable[..., Any]) -> bool:
        def measure() -> dict[str, Any]:
            found = {}
            for place, arguments in calls[op].items():
                made = kernel(*arguments)
                torch.cuda.synchronize()
                found[place] = difference(made, reference(*arguments))
            worst = max(each["relative"] for each in found.values())
            return {"kernel": True, "relative": worst, "places": found}

        return op not in in_torch.split(",") and add("kernels", name, measure).get("kernel", False)

    *sides, extras = references
    for side, table in zip(("trainer", "engine"), sides, strict=True):
        dialects.forward(model, table, tokens_NS, watched(side))
    found = []
    for side, table, own in zip(("trainer", "engine"), sides, kernels[:2], strict=True):
        found.append(dict(table) | {
            op: kernel for op, kernel in own.items()
            if op in table and runs(f"{side}: {op}", op, kernel, table[op])
        })  # fmt: skip
    alone = {
        name: {op: kernel for op, kernel in own.items()
               if runs(f"{name}: {op}", op, kernel, extras.get(name, sides[1])[op])}
        for name, own in kernels[2].items()
    }  # fmt: skip
    return *found, {name: own for name, own in alone.items() if own}


# TransformerEngine and Megatron


@cache
def te() -> Any:
    """Import what of TransformerEngine is called, once."""
    import transformer_engine.pytorch as te_pytorch
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.cpp_extensions import general_gemm
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import (
        Float8BlockQuantizer,
        Float8BlockwiseQTensor,
    )

    e4m3 = tex.DType.kFloat8E4M3
    quantizers = [
        Float8BlockQuantizer(e4m3, rowwise=True, columnwise=False, force_pow_2_scales=False,
                             amax_epsilon=0.0, block_scaling_dim=dim)
        for dim in (1, 2)
    ]  # fmt: skip
    return argparse.Namespace(
        pytorch=te_pytorch, tex=tex, gemm=general_gemm, Tensor=Float8BlockwiseQTensor,
        e4m3=e4m3, groups=quantizers[0], blocks=quantizers[1],
    )  # fmt: skip


def te_norm(delta: Tensor | None, stream: Tensor, weight: Tensor, eps: float) -> tuple:
    """Add in BF16 (fused_bias_dropout.py:11), then `apply_normalization` (module/_common.py:33)."""
    stream = stream if delta is None else stream + delta
    lib = te()
    made = lib.tex.rmsnorm_fwd(stream, weight, eps, None, None, lib.tex.DType.kBFloat16, 0, False)
    return made[0], stream


def te_rope(q: Tensor, k: Tensor, S: int, theta: float) -> tuple[Tensor, Tensor]:
    """Rotate by the fused THD kernel (rope_utils.py, attention/rope.py:112)."""
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    angle = dialects.angles(S, q.shape[-1], theta, q.device)
    freqs = torch.cat([angle, angle], dim=-1)[:, None, None, :]
    starts = cu_seqlens(q.shape[0] // S, S, q.device)
    turn = partial(apply_rotary_pos_emb, freqs=freqs, tensor_format="thd", fused=True,
                   cu_seqlens=starts)  # fmt: skip
    return turn(q), turn(k)


def megatron_silu(h: Tensor) -> Tensor:
    """Run Megatron's compiled SwiGLU (fusions/fused_bias_swiglu.py:209)."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    return bias_swiglu_impl(h, None)


def megatron_expert_silu(h: Tensor, prob_R: Tensor | None, fp8: bool) -> Tensor:
    """Run Megatron's compiled SwiGLU with routing weights (fused_bias_swiglu.py:239)."""
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

    if prob_R is None:
        return megatron_silu(h)
    return weighted_bias_swiglu_impl(h, None, prob_R[:, None])


def te_quantize(x_TI: Tensor) -> Fp8Groups:
    """Quantize by the quantizer of the recipe Float8BlockScaling with FP32 scales."""
    made = te().groups(x_TI.contiguous())
    T = x_TI.shape[0]
    return Fp8Groups(made._rowwise_data.view(FP8), made._rowwise_scale_inv[:, :T].T.contiguous())


def te_gemm(operand: Tensor | Fp8Groups, weight: Weight) -> Tensor:
    """Multiply by `general_gemm`, as TE's Linear does (module/linear.py)."""
    lib = te()
    if isinstance(operand, Tensor):
        return lib.gemm(weight.bf16_OI, operand.contiguous(), out_dtype=torch.bfloat16)[0]
    rows = operand.fp8_TI.shape[0]
    operand = Fp8Groups(*(pad(part.view(torch.uint8) if part.dtype == FP8 else part,
                              (0, 0, 0, -rows % 16)) for part in operand))  # fmt: skip
    a = _te_tensor(*operand, lib.groups)
    b = _te_tensor(weight.fp8_OI, weight.scale_inv_PQ, lib.blocks)
    made = lib.gemm(b, a, out_dtype=torch.bfloat16, use_split_accumulator=True)[0]
    return made[:rows]


def _te_tensor(codes: Any, scales: Any, quantizer: Any) -> Any:
    """Return TE's tensor of bytes and scales: groups' transposed, each padded to 4."""
    lib = te()
    by_group = quantizer is lib.groups
    scales = scales.T if by_group else scales
    scales = pad(scales, (0, -scales.shape[1] % 4)).contiguous()
    return lib.Tensor(
        shape=codes.shape, dtype=torch.bfloat16, fp8_dtype=lib.e4m3,
        rowwise_data=codes.view(torch.uint8).contiguous(), rowwise_scale_inv=scales,
        columnwise_data=None, columnwise_scale_inv=None, quantizer=quantizer,
        is_2D_scaled=not by_group, requires_grad=False,
    )  # fmt: skip


@cache
def _attention_module(A: int, K: int, D: int) -> Any:
    return te().pytorch.DotProductAttention(
        A, D, num_gqa_groups=K, attention_dropout=0.0, qkv_format="thd",
        attn_mask_type="padding_causal",
    ).eval()  # fmt: skip


def te_attention(q: Tensor, k: Tensor, v: Tensor, S: int) -> Tensor:
    """Attend by TE's own choice of backend: cuDNN here (dot_product_attention/utils.py:1148)."""
    starts = cu_seqlens(q.shape[0] // S, S, q.device)
    module = _attention_module(q.shape[1], k.shape[1], q.shape[-1])
    found = module(q, k, v, qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts,
                   max_seqlen_q=S, max_seqlen_kv=S, attn_mask_type="padding_causal")  # fmt: skip
    return found.view(q.shape)


def te_router(x_TH: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Make FP32 logits of BF16 operands (moe_utils.py, RouterGatingLinearFunction), then top-k."""
    return dialects._chosen(te().gemm(weight, x_TH, out_dtype=torch.float32)[0], k)


def te_expert_gemm(operand: Any, weight: Weight, counts: list[int],
                   prob_R: Tensor | None) -> Tensor:  # fmt: skip
    """Multiply expert by expert, as the grouped product does on its streams; FP8 rows padded."""
    parts = [
        te_gemm(rows, matrix)
        for rows, matrix, count in zip(
            dialects.split_rows(operand, counts), split_experts(weight), counts, strict=True
        ) if count
    ]  # fmt: skip
    product = torch.cat(parts)
    return product if prob_R is None else (product.float() * prob_R[:, None]).bfloat16()


def linear_head(x_TH: Tensor, weight_VH: Tensor) -> Tensor:
    """Multiply by torch's linear, as both stacks do, and widen (Float16Module; sampler.py:96)."""
    return linear(x_TH, weight_VH).float()


def cu_seqlens(N: int, S: int, device: Any) -> Tensor:
    """Return where each sequence begins, and the end."""
    return torch.arange(0, (N + 1) * S, S, dtype=torch.int32, device=device)


# vLLM


@cache
def vllm() -> Any:
    """Import what of vLLM is called, once; its extension registers `torch.ops._C`."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    from vllm.utils import deep_gemm

    return argparse.Namespace(ops=ops, fp8=fp8_utils, deep_gemm=deep_gemm)


def vllm_norm(delta: Tensor | None, stream: Tensor, weight: Tensor, eps: float) -> tuple:
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


def vllm_expert_silu(h: Tensor, prob_R: Tensor | None, fp8: bool) -> Tensor | Fp8Groups:
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


def vllm_gemm(operand: Tensor | Fp8Groups, weight: Weight) -> Tensor:
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


def by_position(S: int, op: Callable[..., Tensor], operand: Any, weight: Any) -> Tensor:
    """Run a product as decode does: the N rows of each position at a time."""
    made = [op(take(operand, slice(place, None, S)), weight) for place in range(S)]
    return torch.stack(made, 1).flatten(0, 1)


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
