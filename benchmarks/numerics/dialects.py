"""What trainer and engine compute, operation by operation, in torch: the tables of the budget.

`TRAINER` rounds where Megatron with TransformerEngine rounds, `ENGINES` where vLLM does. A CPU runs
them; on a GPU they stand for a kernel that fails. They have the places where values are rounded,
not the libraries' order of sums: "another order" is here the last 128 columns or 128 keys first.

Shapes are `table_forward`'s. A norm takes what is to be added, the stream, its weight, eps, and
whether a linear reads its result; it returns result and new stream, all `[T, H]`, or `[T * A, D]`
without anything to add for the norms of Q and K.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from benchmarks.numerics.table_forward import Shape, Weight, by_expert
from fp8_nemo.glue.quantize import FP8, FP8_MAX, Fp8Groups, dequantize_groups, quantize_groups
from fp8_nemo.glue.wire import BLOCK
from fp8_nemo.nemo.aligned.ops import silu_once

Table = dict[str, Callable[..., Any]]
Operand = Tensor | Fp8Groups


# Norm and residual


def norm(delta: Tensor | None, stream: Tensor, weight: Tensor, eps: float,
         to_linear: bool) -> tuple:  # fmt: skip
    """Add in BF16 and normalize that, rounding once: TransformerEngine, and vLLM's eager kernel."""
    stream = stream if delta is None else stream + delta
    x = stream.float()
    return (x * _rsqrt(x, eps) * weight.float()).bfloat16(), stream


def norm_unrounded(delta: Tensor | None, stream: Tensor, weight: Tensor, eps: float,
                   to_linear: bool) -> tuple:  # fmt: skip
    """Normalize the FP32 sum, which is stored in BF16: vLLM's norm as Inductor compiles it."""
    x = stream.float() if delta is None else stream.float() + delta.float()
    return (x * _rsqrt(x, eps) * weight.float()).bfloat16(), x.bfloat16()


def norm_fused(delta: Tensor | None, stream: Tensor, weight: Tensor, eps: float,
               to_linear: bool) -> tuple:  # fmt: skip
    """Normalize the FP32 sum, rounding before and after the weight: vLLM's norm with quantizer.

    What no linear reads (Q, K, the router's input, the last norm) stays with Inductor.
    """
    if not to_linear:
        return norm_unrounded(delta, stream, weight, eps, to_linear)
    x = stream.float() if delta is None else stream.float() + delta.float()
    return (x * _rsqrt(x, eps)).bfloat16() * weight, x.bfloat16()


def _rsqrt(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


# Quantizers and products


def no_quantize(x_TI: Tensor) -> Tensor:
    """Leave the operand in BF16."""
    return x_TI


def quantize_vllm(x_TI: Tensor) -> Fp8Groups:
    """Quantize by vLLM's formula: `scale_inv = amax / 448`, then `x / scale_inv`."""
    groups = x_TI.float().unflatten(-1, (-1, BLOCK))
    scale_inv = groups.abs().amax(-1).clamp(min=1e-10) / torch.tensor(FP8_MAX, device=x_TI.device)
    codes = (groups / scale_inv[..., None]).clamp(-FP8_MAX, FP8_MAX).flatten(-2)
    return Fp8Groups(codes.to(FP8), scale_inv)


def gemm(operand: Operand, weight: Weight, order: int = 1) -> Tensor:
    """Multiply `[T, I]` by a weight `[O, I]`, 128 columns a term; order -1: the last ones first."""
    return _in_blocks(operand, weight, order).bfloat16()


def expert_gemm(operand: Operand, slab: Weight, counts: list[int], prob_R: Tensor | None,
                order: int = 1) -> Tensor:  # fmt: skip
    """Multiply each expert's rows `[R, I]` by its matrix, and the sums by `prob_R` if given."""
    parts = (_in_blocks(*each, order) for each in by_expert(operand, slab, counts))
    product = torch.cat(list(parts))
    return (product if prob_R is None else product * prob_R[:, None]).bfloat16()


def lm_head(x_TH: Tensor, weight_VH: Tensor, order: int = 1) -> Tensor:
    """Return BF16 logits `[T, V]`, widened to FP32."""
    return gemm(x_TH, Weight(weight_VH, None, None), order).float()


def _in_blocks(operand: Operand, weight: Weight, order: int) -> Tensor:
    """Return the FP32 product; in FP8 each block's sum is scaled before it is added."""
    total: Any = 0.0
    for q in range(-(-weight.bf16_OI.shape[-1] // BLOCK))[::order]:
        at = slice(BLOCK * q, BLOCK * (q + 1))
        if isinstance(operand, Tensor):
            total = total + operand[:, at].float() @ weight.bf16_OI[:, at].float().T
            continue
        assert weight.fp8_OI is not None
        assert weight.scale_inv_PQ is not None
        codes, scales = operand
        rows = weight.scale_inv_PQ[:, q].repeat_interleave(BLOCK)[: weight.fp8_OI.shape[0]]
        product = codes[:, at].float() @ weight.fp8_OI[:, at].float().T
        total = total + product * (scales[:, q, None] * rows)
    return total


# Attention


def angles(S: int, D: int, theta: float, device: Any) -> Tensor:
    """Return RoPE's angles `[S, D / 2]`, FP32."""
    exponents = torch.arange(0, D, 2, dtype=torch.float32, device=device) / D
    return torch.arange(S, dtype=torch.float32, device=device)[:, None] * (1.0 / theta**exponents)


def rope(q: Tensor, k: Tensor, S: int, theta: float,
         table: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate `[T, A, D]` and `[T, K, D]` by cosines and sines of a type, rounding once.

    FP32 is TransformerEngine's fused kernel, BF16 vLLM's table.
    """
    angle = angles(S, q.shape[-1], theta, q.device)
    cos, sin = (
        each.to(table).float().repeat(q.shape[0] // S, 1)[:, None]
        for each in (angle.cos(), angle.sin())
    )

    def rotate(x_TAD: Tensor) -> Tensor:
        a, b = x_TAD.float().chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).bfloat16()

    return rotate(q), rotate(k)


def attention(q: Tensor, k: Tensor, v: Tensor, S: int, tile: int = 64, order: int = 1,
              p_type: torch.dtype = torch.bfloat16) -> Tensor:  # fmt: skip
    """Attend causally, Q `[T, A, D]` to K and V `[T, K, D]`, by tiles with a running maximum.

    FlashAttention 3 has tiles of 128 keys or so, the last first: `tile=128, order=-1`.
    """
    repeats, D = q.shape[1] // k.shape[1], q.shape[-1]
    q, k, v = (x.unflatten(0, (-1, S)).transpose(1, 2).float() for x in (q, k, v))
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * D**-0.5
    scores = scores.masked_fill(torch.ones(S, S, device=q.device).triu(1).bool(), -torch.inf)
    top = torch.full((*scores.shape[:-1], 1), -torch.inf, device=q.device)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for start in range(0, S, tile)[::order]:
        part = scores[..., start : start + tile]
        new = torch.maximum(top, part.amax(-1, keepdim=True))
        safe = new.masked_fill(new == -torch.inf, 0.0)
        keep, p = torch.exp(top - safe), torch.exp(part - safe)
        total = total * keep + p.sum(-1, keepdim=True)
        out = out * keep + p.to(p_type).float() @ v[..., start : start + tile, :]
        top = new
    return (out / total).bfloat16().transpose(1, 2).flatten(0, 1).contiguous()


def attention_fp8(q: Tensor, k: Tensor, v: Tensor, S: int) -> Tensor:
    """Attend as FlashAttention 3 to Q, K and V in E4M3 with one scale each, P in E4M3."""

    def rounded(x: Tensor) -> Tensor:
        scale = fp8_scale(x)
        return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scale

    return attention(rounded(q), rounded(k), rounded(v), S, 128, -1, FP8)


def fp8_scale(x: Tensor) -> Tensor:
    """Return one FP32 scale for a tensor of any shape, with the margin of a recalibration."""
    return x.abs().amax().float() * 1.05 / FP8_MAX


# MLP and experts


def silu_twice(h: Tensor) -> Tensor:
    """Return `bf16(silu(gate)) * up` of `[T, 2F]`: vLLM's eager kernel."""
    gate, up = h.chunk(2, dim=-1)
    return silu(gate.float()).bfloat16() * up


def silu_quantized(h: Tensor) -> Fp8Groups:
    """Quantize the FP32 `silu(gate) * up` of `[T, 2F]`, unrounded: vLLM's fused kernel."""
    gate, up = h.float().chunk(2, dim=-1)
    return quantize_vllm(silu(gate) * up)


def router(x_TH: Tensor, weight_EH: Tensor, k: int,
           logits: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Choose k experts by logits of a type: FP32 is Megatron's, BF16 vLLM's."""
    return chosen((x_TH.float() @ weight_EH.float().T).to(logits).float(), k)


def chosen(logits_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest logits' softmax among themselves, and their experts, `[T, k]` each."""
    top, ids = logits_TE.topk(k, dim=-1)
    return top.softmax(-1), ids


def weigh_inside(prob_R: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Give the routing weights to the activation, before the second product: Megatron."""
    return prob_R, None


def weigh_outside(prob_R: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Give the routing weights to the second product's FP32 sum: vLLM."""
    return None, prob_R


def expert_silu(h: Tensor, prob_R: Tensor | None, fp8: bool) -> Tensor:
    """Return `silu(gate) * up * weight` of `[R, 2F]`, rounded once: Megatron's activation."""
    gate, up = h.float().chunk(2, dim=-1)
    y = silu(gate) * up
    return (y if prob_R is None else y * prob_R[:, None]).bfloat16()


def expert_silu_vllm(h: Tensor, prob_R: Tensor | None, fp8: bool) -> Operand:
    """Return the activation of `[R, 2F]`: with `fp8` quantized unrounded, else as in eager."""
    if not fp8:
        y = silu_twice(h)
        return y if prob_R is None else (y.float() * prob_R[:, None]).bfloat16()
    gate, up = h.float().chunk(2, dim=-1)
    y = silu(gate) * up
    return quantize_vllm(y if prob_R is None else y * prob_R[:, None])


def sum_by_expert(rows_TkH: Tensor, ids_Tk: Tensor) -> Tensor:
    """Add a token's rows in FP32 by the experts' numbers: TransformerEngine's unpermute."""
    order = ids_Tk.argsort(dim=-1)
    rows = rows_TkH.gather(1, order[..., None].expand_as(rows_TkH)).float()
    total = torch.zeros_like(rows[:, 0])
    for each in rows.unbind(1):
        total = total + each
    return total.bfloat16()


def sum_by_rank(rows_TkH: Tensor, ids_Tk: Tensor) -> Tensor:
    """Add a token's rows, the likeliest expert first, in BF16 up to four of them: vLLM."""
    if rows_TkH.shape[1] > 4:
        return rows_TkH.float().sum(1).bfloat16()
    total = torch.zeros_like(rows_TkH[:, 0])
    for each in rows_TkH.unbind(1):
        total = total + each
    return total


# Logprobs


def logprobs_shard(logits_TV: Tensor) -> Tensor:
    """Return log-softmax by maximum and sum of exponentials, as NeMo RL does by TP shard."""
    logits = logits_TV - logits_TV.amax(-1, keepdim=True)
    return logits - logits.exp().sum(-1, keepdim=True).log()


def logprobs_torch(logits_TV: Tensor) -> Tensor:
    """Return torch's log-softmax in FP32: vLLM's sampler."""
    return logits_TV.log_softmax(-1, dtype=torch.float32)


TRAINER: Table = {
    "norm": norm, "rope": rope, "silu": silu_once, "expert silu": expert_silu,
    "weigh": weigh_inside, "quantize": quantize_groups, "gemm": gemm, "attention": attention,
    "router": router, "expert gemm": expert_gemm, "sum": sum_by_expert,
    "lm_head": lm_head, "logprob": logprobs_shard,
}  # fmt: skip
"""In the order in which the budget makes them equal; `logprob` is applied to the logits."""
EAGER: Table = {
    "norm": norm, "rope": partial(rope, table=torch.bfloat16), "silu": silu_twice,
    "expert silu": expert_silu_vllm, "weigh": weigh_outside, "quantize": quantize_vllm,
    "gemm": partial(gemm, order=-1), "attention": partial(attention, tile=128, order=-1),
    "router": partial(router, logits=torch.bfloat16),
    "expert gemm": partial(expert_gemm, order=-1), "sum": sum_by_rank,
    "lm_head": partial(lm_head, order=-1), "logprob": logprobs_torch,
}  # fmt: skip
ENGINES = {
    "eager": EAGER,
    "graphs": EAGER | {"norm": norm_unrounded, "silu": silu_once},
    "fused": EAGER | {"norm": norm_fused, "silu": silu_quantized},
}
"""vLLM's three ways: its kernels, Inductor's, and its norm and SiLU fused with the quantizer."""
EXTRAS: dict[str, Table] = {"fp8 kv": {"attention": attention_fp8}}
"""What the engine alone may do, on top of its table."""
DENSE = ("silu",)
MOE = ("expert silu", "weigh", "router", "expert gemm", "sum")
ALIGNED = ("rope", "silu", "quantize")
"""What an aligned engine takes from the trainer; all else is as in eager, compiled or not."""


def tables(shape: Shape, precision: str, engine: str,
           align: bool = False, flash: bool = False) -> tuple[Table, Table]:  # fmt: skip
    """Return the trainer's and the engine's table, without what the model never calls.

    Args:
        shape: whether there are experts.
        precision: `bf16`, `fp8-linear` (the engine's linears alone) or `fp8-e2e`.
        engine: a key of `ENGINES`; `fused` is FP8's, and `graphs` without a quantizer.
        align: the engine with the operations of `fp8_nemo.nemo.aligned`.
        flash: the trainer attends by FlashAttention 3 too.

    Raises:
        ValueError: there is nothing that aligns such an engine.
    """
    if align and (shape.experts or engine == "fused"):
        raise ValueError("--align: a dense model, --engine eager or graphs; vLLM's experts and its "
                         "fused kernels quantize themselves")  # fmt: skip
    without = DENSE if shape.experts else MOE
    theirs = quantize_groups if align else quantize_vllm
    quantizers = {"bf16": (no_quantize, no_quantize), "fp8-linear": (no_quantize, theirs),
                  "fp8-e2e": (quantize_groups, theirs)}[precision]  # fmt: skip
    way = "graphs" if (engine, precision) == ("fused", "bf16") else engine
    own = EAGER | {op: TRAINER[op] for op in ALIGNED} if align else ENGINES[way]
    trainers = TRAINER | ({"attention": EAGER["attention"]} if flash else {})
    trainer, rollout = (
        {op: call for op, call in (table | {"quantize": quantize}).items() if op not in without}
        for table, quantize in zip((trainers, own), quantizers, strict=True)
    )
    return trainer, rollout


def difference(a: Any, b: Any) -> dict[str, float]:
    """Return how two results of one operation differ: share of equal elements, mean, largest.

    Of quantized operands the bytes and scales are compared, and the values that they stand for; a
    result of several tensors is one with them all.
    """
    if isinstance(a, Fp8Groups) and isinstance(b, Fp8Groups):
        codes = a.fp8_TI.view(torch.uint8) == b.fp8_TI.view(torch.uint8)
        scales = a.scale_inv_TQ == b.scale_inv_TQ
        values = difference(dequantize_groups(a), dequantize_groups(b))
        equal = {"equal": codes, "equal_scales": scales}
        return values | {name: float(each.double().mean()) for name, each in equal.items()}
    a, b = _flat(a), _flat(b)
    apart, size = (a - b).abs(), b.norm().clamp(min=1e-30)
    return {"equal": float((a == b).double().mean()), "mean": float(apart.mean()),
            "max": float(apart.max()), "relative": float((a - b).norm() / size)}  # fmt: skip


def _flat(found: Any) -> Tensor:
    if isinstance(found, Fp8Groups):
        found = dequantize_groups(found)
    if isinstance(found, Tensor):
        return found.double().flatten()
    return torch.cat([_flat(each) for each in found if each is not None])
