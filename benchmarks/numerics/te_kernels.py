"""The trainer's operations by the kernels that it launches, on one Hopper GPU.

They are TransformerEngine 2.12's as Megatron-LM 14346b6 calls them in a logprob pass
(`torch.no_grad`, THD packed); where Megatron runs plain torch, so does this. Operations and shapes
are `dialects.TRAINER`'s.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from benchmarks.numerics import dialects
from benchmarks.numerics.dialects import Operand, Table
from benchmarks.numerics.table_forward import Weight, by_expert
from fp8_nemo.glue.quantize import FP8, Fp8Groups


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


def te_norm(delta: Tensor | None, stream: Tensor, weight: Tensor, eps: float,
            to_linear: bool) -> tuple:  # fmt: skip
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


def te_gemm(operand: Operand, weight: Weight) -> Tensor:
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
    return dialects.chosen(te().gemm(weight, x_TH, out_dtype=torch.float32)[0], k)


def te_expert_gemm(operand: Operand, slab: Weight, counts: list[int],
                   prob_R: Tensor | None) -> Tensor:  # fmt: skip
    """Multiply `[R, I]` expert by expert, as the grouped product does on its streams."""
    product = torch.cat([te_gemm(*each) for each in by_expert(operand, slab, counts)])
    return product if prob_R is None else (product.float() * prob_R[:, None]).bfloat16()


def linear_head(x_TH: Tensor, weight_VH: Tensor) -> Tensor:
    """Multiply by torch's linear, as both stacks do, and widen (Float16Module; sampler.py:96)."""
    return linear(x_TH, weight_VH).float()


def cu_seqlens(N: int, S: int, device: Any) -> Tensor:
    """Return where each sequence begins, and the end."""
    return torch.arange(0, (N + 1) * S, S, dtype=torch.int32, device=device)


TRAINER: Table = {
    "norm": te_norm, "rope": te_rope, "silu": megatron_silu, "expert silu": megatron_expert_silu,
    "quantize": te_quantize, "gemm": te_gemm, "attention": te_attention, "router": te_router,
    "expert gemm": te_expert_gemm, "lm_head": linear_head,
}  # fmt: skip
"""The sum over experts and log-softmax are plain torch in `dialects` too."""
