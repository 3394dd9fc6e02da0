"""One forward of Llama, Qwen3 and Qwen3-MoE whose every operation is taken from a table.

A table maps an operation's name to a function, and a dialect is a table: `TRAINER` rounds as
Megatron with TransformerEngine does, `ENGINE` as vLLM. Here they are written in torch, which is
where a CPU runs and what a kernel that fails is replaced by; `gpu_dialects` holds the kernels
themselves. Both tables agree on what an operation takes and returns, so that any mixture runs.

Shapes: N sequences of S tokens, T = N * S; H hidden, A heads, K KV heads, D head size, F width of
the MLP; E experts, k of them a token, R = T * k rows sorted by expert; V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import silu

from fp8_nemo.glue.quantize import (
    FP8,
    FP8_MAX,
    Fp8Groups,
    dequantize_groups,
    quantize_blocks,
    quantize_groups,
)
from fp8_nemo.glue.wire import BLOCK

Ops = Mapping[str, Callable[..., Any]]
Watch = Callable[[str, str, int, tuple, Any], None]
"""Is told operation, place, layer, arguments and result of every call."""


class Weight(NamedTuple):
    """A linear's weight, or a slab of experts: what a BF16 and what an FP8 product reads."""

    bf16_OI: Tensor
    fp8_OI: Tensor | None
    scale_inv_PQ: Tensor | None


@dataclass(frozen=True)
class Shape:
    """What the forward asks of a checkpoint's `config.json`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    ffn: int
    """Of an expert in a model that has them."""
    qk_norm: bool
    experts: int
    experts_per_token: int
    eps: float
    theta: float

    @classmethod
    def read(cls, folder: Path) -> Shape:
        """Read the folder's `config.json`; `rope_parameters` is transformers 5's `rope_theta`."""
        config = json.loads((folder / "config.json").read_text())
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"{folder}: rope_type {rope['rope_type']}; only default is written")
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"], hidden=config["hidden_size"], heads=heads,
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            ffn=config.get("moe_intermediate_size") or config["intermediate_size"],
            qk_norm=config["model_type"].startswith("qwen3"),
            experts=config.get("num_experts") or config.get("num_local_experts") or 0,
            experts_per_token=config.get("num_experts_per_tok") or 0,
            eps=config["rms_norm_eps"], theta=rope.get("rope_theta") or config["rope_theta"],
        )  # fmt: skip


class Layer(NamedTuple):
    """One layer's weights; of a dense layer `router` is None, and `w13`, `w2` are matrices."""

    norm: Tensor
    qkv: Weight
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Weight
    norm_2: Tensor
    router: Tensor | None
    w13: Weight
    w2: Weight


class Model(NamedTuple):
    """A checkpoint on one device."""

    shape: Shape
    embedding: Tensor
    layers: list[Layer]
    norm: Tensor
    head: Tensor


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read every tensor of a folder's safetensors files, in BF16."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name).bfloat16() for name in opened.keys()}  # noqa: SIM118
    return found


def load(folder: Path, device: str, fp8: bool) -> Model:
    """Read a checkpoint; with `fp8` its linears are also quantized, by the contract's formula."""
    shape, tensors = Shape.read(folder), read_tensors(folder)

    def weight(names: list[str]) -> Weight:
        joined = torch.cat([tensors[f"{name}.weight"] for name in names]).to(device)
        return Weight(joined, *(quantize_blocks(joined) if fp8 else (None, None)))

    def slab(prefix: str, names: list[str]) -> Weight:
        each = [weight([f"{prefix}.{n}.{name}" for name in names]) for n in range(shape.experts)]
        matrices, *quantized = zip(*each, strict=True)
        return Weight(torch.stack(matrices),
                      *(torch.stack(part) if fp8 else None for part in quantized))  # fmt: skip

    def plain(name: str) -> Tensor | None:
        return tensors[name].to(device) if name in tensors else None

    def layer(n: int) -> Layer:
        at, mlp = f"model.layers.{n}", f"model.layers.{n}.mlp"
        pairs = (["gate_proj", "up_proj"], ["down_proj"])
        w13, w2 = (
            slab(f"{mlp}.experts", names) if shape.experts
            else weight([f"{mlp}.{name}" for name in names])
            for names in pairs
        )  # fmt: skip
        return Layer(
            norm=tensors[f"{at}.input_layernorm.weight"].to(device),
            qkv=weight([f"{at}.self_attn.{x}_proj" for x in "qkv"]),
            q_norm=plain(f"{at}.self_attn.q_norm.weight"),
            k_norm=plain(f"{at}.self_attn.k_norm.weight"),
            o=weight([f"{at}.self_attn.o_proj"]),
            norm_2=tensors[f"{at}.post_attention_layernorm.weight"].to(device),
            router=plain(f"{mlp}.gate.weight"), w13=w13, w2=w2,
        )  # fmt: skip

    embedding = tensors["model.embed_tokens.weight"].to(device)
    head = plain("lm_head.weight")
    layers = [layer(n) for n in range(shape.layers)]
    norm = tensors["model.norm.weight"].to(device)
    return Model(shape, embedding, layers, norm, embedding if head is None else head)


class Pass(NamedTuple):
    """What one forward gives."""

    logits_TV: Tensor
    """FP32, as whoever made them hands them to the softmax."""
    residual_LTH: list[Tensor]
    """The stream that each norm read, BF16: two a layer, and the last."""


@torch.no_grad()
def forward(model: Model, ops: Ops, tokens_NS: Tensor, watch: Watch | None = None) -> Pass:
    """Run the model on sequences of equal length, every operation from the table.

    Args:
        model: of any family that `load` reads.
        ops: by the names of `TRAINER`.
        tokens_NS: the sequences.
        watch: told of every call, to compare it with another dialect's on the same arguments.
    """
    shape, (_, S) = model.shape, tokens_NS.shape
    residuals: list[Tensor] = []

    def call(op: str, place: str, layer: int, *arguments: Any) -> Any:
        found = ops[op](*arguments)
        if watch is not None:
            watch(op, place, layer, arguments, found)
        return found

    def normed(place: str, n: int, delta: Tensor | None, stream: Tensor, weight: Tensor) -> tuple:
        y_TH, stream = call("norm", place, n, delta, stream, weight, shape.eps)
        residuals.append(stream)
        return y_TH, stream

    def linear(place: str, n: int, x: Any, weight: Weight) -> Tensor:
        operand = call("quantize", place, n, x) if isinstance(x, Tensor) else x
        return call("gemm", place, n, operand, weight)

    def head_norm(place: str, n: int, x_TAD: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x_TAD
        flat = x_TAD.reshape(-1, shape.head_dim)
        return call("norm", place, n, None, flat, weight, shape.eps)[0].view(x_TAD.shape)

    def attend(n: int, layer: Layer, x_TH: Tensor) -> Tensor:
        qkv = linear("qkv", n, x_TH, layer.qkv).unflatten(-1, (-1, shape.head_dim))
        q, k, v = (each.contiguous() for each in
                   qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1))  # fmt: skip
        q, k = head_norm("q", n, q, layer.q_norm), head_norm("k", n, k, layer.k_norm)
        q, k = call("rope", "q, k", n, q, k, S, shape.theta)
        context = call("attention", "attention", n, q, k, v, S).flatten(-2)
        return linear("o", n, context, layer.o)

    def mlp(n: int, layer: Layer, x_TH: Tensor) -> Tensor:
        if layer.router is None:
            y = call("silu", "dense", n, linear("gate_up", n, x_TH, layer.w13))
            return linear("down", n, y, layer.w2)
        probs_Tk, ids_Tk = call("router", "gate", n, x_TH, layer.router, shape.experts_per_token)
        return call("sum", "experts", n, *experts(n, layer, x_TH, probs_Tk, ids_Tk))

    def experts(n: int, layer: Layer, x_TH: Tensor, probs_Tk: Tensor, ids_Tk: Tensor) -> tuple:
        by_expert = ids_Tk.flatten().argsort(stable=True)  # slots, the rows of every product below
        counts = ids_Tk.flatten().bincount(minlength=shape.experts).tolist()
        token_R, prob_R = by_expert // shape.experts_per_token, probs_Tk.flatten()[by_expert]
        operand = call("quantize", "expert in", n, x_TH)
        rows = take(operand, token_R)
        h = call("expert gemm", "w13", n, rows, layer.w13, counts, None)
        inside_R, outside_R = call("weigh", "experts", n, prob_R)
        y = call("expert silu", "experts", n, h, inside_R, layer.w2.fp8_OI is not None)
        if isinstance(y, Tensor):
            y = call("quantize", "expert down", n, y)
        rows = call("expert gemm", "w2", n, y, layer.w2, counts, outside_R)
        slots = torch.empty_like(rows)
        slots[by_expert] = rows
        return slots.unflatten(0, ids_Tk.shape), ids_Tk

    delta, stream = None, model.embedding[tokens_NS.flatten()]
    for n, layer in enumerate(model.layers):
        x_TH, stream = normed("attention", n, delta, stream, layer.norm)
        delta = attend(n, layer, x_TH)
        x_TH, stream = normed("mlp", n, delta, stream, layer.norm_2)
        delta = mlp(n, layer, x_TH)
    x_TH, _ = normed("final", shape.layers, delta, stream, model.norm)
    logits = call("lm_head", "lm_head", shape.layers, x_TH, model.head)
    return Pass(logits, residuals)


def take(operand: Tensor | Fp8Groups, rows_R: Any) -> Any:
    """Return rows of an operand, by numbers or a slice; bytes are moved as bytes."""
    if isinstance(operand, Tensor):
        return operand[rows_R].contiguous()
    codes = operand.fp8_TI.view(torch.uint8)[rows_R].contiguous()
    return Fp8Groups(codes.view(FP8), operand.scale_inv_TQ[rows_R].contiguous())


# The operations in torch. What two dialects do alike has one function.


def norm(delta: Tensor | None, stream: Tensor, weight: Tensor, eps: float) -> tuple:
    """Add in BF16 and normalize that, rounding once: TransformerEngine, and vLLM's eager kernel."""
    stream = stream if delta is None else stream + delta
    x = stream.float()
    return (x * _rsqrt(x, eps) * weight.float()).bfloat16(), stream


def norm_unrounded(delta: Tensor | None, stream: Tensor, weight: Tensor, eps: float) -> tuple:
    """Normalize the FP32 sum, which is stored in BF16: vLLM's norm as Inductor compiles it."""
    x = stream.float() if delta is None else stream.float() + delta.float()
    return (x * _rsqrt(x, eps) * weight.float()).bfloat16(), x.bfloat16()


def norm_fused(delta: Tensor | None, stream: Tensor, weight: Tensor, eps: float) -> tuple:
    """Normalize the FP32 sum, rounding before and after the weight: vLLM's norm with quantizer."""
    x = stream.float() if delta is None else stream.float() + delta.float()
    return (x * _rsqrt(x, eps)).bfloat16() * weight, x.bfloat16()


def _rsqrt(x: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def no_quantize(x: Tensor) -> Tensor:
    """Leave the operand in BF16."""
    return x


def quantize_vllm(x_TI: Tensor) -> Fp8Groups:
    """Quantize by vLLM's formula: `scale_inv = amax / 448`, then `x / scale_inv`."""
    groups = x_TI.float().unflatten(-1, (-1, BLOCK))
    scale_inv = groups.abs().amax(-1).clamp(min=1e-10) / torch.tensor(FP8_MAX, device=x_TI.device)
    codes = (groups / scale_inv[..., None]).clamp(-FP8_MAX, FP8_MAX).flatten(-2)
    return Fp8Groups(codes.to(FP8), scale_inv)


def gemm(operand: Tensor | Fp8Groups, weight: Weight) -> Tensor:
    """Multiply by a weight, the terms of 128 columns each added in their order."""
    return _in_blocks(operand, weight, range(_blocks(weight))).bfloat16()


def gemm_backwards(operand: Tensor | Fp8Groups, weight: Weight) -> Tensor:
    """Multiply as `gemm`, the last 128 columns first: another library's order, in torch."""
    return _in_blocks(operand, weight, reversed(range(_blocks(weight)))).bfloat16()


def _blocks(weight: Weight) -> int:
    return -(-weight.bf16_OI.shape[-1] // BLOCK)


def _in_blocks(operand: Tensor | Fp8Groups, weight: Weight, order: Any) -> Tensor:
    """Return the FP32 product; in FP8 each block's sum is scaled before it is added."""
    total: Any = 0.0
    for q in order:
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


def angles(S: int, D: int, theta: float, device: Any) -> Tensor:
    """Return RoPE's angles `[S, D / 2]`, FP32."""
    exponents = torch.arange(0, D, 2, dtype=torch.float32, device=device) / D
    return torch.arange(S, dtype=torch.float32, device=device)[:, None] * (1.0 / theta**exponents)


def rope(q: Tensor, k: Tensor, S: int, theta: float) -> tuple[Tensor, Tensor]:
    """Rotate by FP32 cosines and sines, rounding once: TransformerEngine's fused kernel."""
    angle = angles(S, q.shape[-1], theta, q.device)
    return _rotate(q, angle.cos(), angle.sin()), _rotate(k, angle.cos(), angle.sin())


def rope_rounded(q: Tensor, k: Tensor, S: int, theta: float) -> tuple[Tensor, Tensor]:
    """Rotate by a table of BF16 cosines and sines, in FP32: vLLM."""
    angle = angles(S, q.shape[-1], theta, q.device)
    cos, sin = (each.bfloat16().float() for each in (angle.cos(), angle.sin()))
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x_TAD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    count = x_TAD.shape[0] // cos.shape[0]
    cos, sin = (each.repeat(count, 1)[:, None] for each in (cos, sin))
    a, b = x_TAD.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).bfloat16()


def attention(q: Tensor, k: Tensor, v: Tensor, S: int) -> Tensor:
    """Attend causally, tiles of 64 keys from the first."""
    return _tiles(q, k, v, S, 64, forwards=True)


def attention_backwards(q: Tensor, k: Tensor, v: Tensor, S: int) -> Tensor:
    """Attend causally, tiles of 128 keys from the last: FlashAttention 3's order."""
    return _tiles(q, k, v, S, 128, forwards=False)


def attention_fp8(q: Tensor, k: Tensor, v: Tensor, S: int) -> Tensor:
    """Attend to Q, K and V that are in E4M3 with one scale each, and P in E4M3."""

    def rounded(x: Tensor) -> Tensor:
        scale = fp8_scale(x)
        return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scale

    q, k, v = map(rounded, (q, k, v))
    return _tiles(q, k, v, S, 128, forwards=False, p_type=FP8)


def fp8_scale(x: Tensor) -> Tensor:
    """Return one scale for a tensor, FP32, with the margin of a recalibration."""
    return x.abs().amax().float() * 1.05 / FP8_MAX


def _tiles(q: Tensor, k: Tensor, v: Tensor, S: int, tile: int, *, forwards: bool,
           p_type: torch.dtype = torch.bfloat16) -> Tensor:  # fmt: skip
    """Return softmax(Q K') V by tiles with a running maximum, P rounded to a type, `[T, A, D]`."""
    repeats, D = q.shape[1] // k.shape[1], q.shape[-1]
    q, k, v = (x.unflatten(0, (-1, S)).transpose(1, 2).float() for x in (q, k, v))
    k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * D**-0.5
    scores = scores.masked_fill(torch.ones(S, S, device=q.device).triu(1).bool(), -torch.inf)
    top = torch.full((*scores.shape[:-1], 1), -torch.inf, device=q.device)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    starts = range(0, S, tile)
    for start in starts if forwards else reversed(starts):
        part = scores[..., start : start + tile]
        new = torch.maximum(top, part.amax(-1, keepdim=True))
        safe = new.masked_fill(new == -torch.inf, 0.0)
        keep, p = torch.exp(top - safe), torch.exp(part - safe)
        total = total * keep + p.sum(-1, keepdim=True)
        out = out * keep + p.to(p_type).float() @ v[..., start : start + tile, :]
        top = new
    return (out / total).bfloat16().transpose(1, 2).flatten(0, 1).contiguous()


def silu_once(h: Tensor) -> Tensor:
    """Return `silu(gate) * up`, rounded once: what a compiler fuses."""
    gate, up = h.float().chunk(2, dim=-1)
    return (silu(gate) * up).bfloat16()


def silu_twice(h: Tensor) -> Tensor:
    """Return `bf16(silu(gate)) * up`: vLLM's eager kernel."""
    gate, up = h.chunk(2, dim=-1)
    return silu(gate.float()).bfloat16() * up


def silu_quantized(h: Tensor) -> Fp8Groups:
    """Quantize the FP32 product of SiLU and `up`, which BF16 never saw: vLLM's fused kernel."""
    gate, up = h.float().chunk(2, dim=-1)
    return quantize_vllm(silu(gate) * up)


def router(x_TH: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Choose k experts by FP32 logits; their softmax is that of the chosen ones: Megatron."""
    return _chosen(x_TH.float() @ weight.float().T, k)


def router_bf16(x_TH: Tensor, weight: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Choose k experts by logits that the gate's linear rounded to BF16: vLLM."""
    return _chosen((x_TH.float() @ weight.float().T).bfloat16().float(), k)


def _chosen(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    top, ids = logits.topk(k, dim=-1)
    return top.softmax(-1), ids


def weigh_inside(prob_R: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Give the routing weight to the activation, before the second product: Megatron."""
    return prob_R, None


def weigh_outside(prob_R: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Give the routing weight to the second product's FP32 sum: vLLM."""
    return None, prob_R


def expert_silu(h: Tensor, prob_R: Tensor | None, fp8: bool) -> Tensor:
    """Return `silu(gate) * up * weight`, rounded once: Megatron's fused activation."""
    gate, up = h.float().chunk(2, dim=-1)
    y = silu(gate) * up
    return (y if prob_R is None else y * prob_R[:, None]).bfloat16()


def expert_silu_vllm(h: Tensor, prob_R: Tensor | None, fp8: bool) -> Tensor | Fp8Groups:
    """Quantize the FP32 activation, which BF16 never saw; in BF16 it is the eager kernel's."""
    if not fp8:
        y = silu_twice(h)
        return y if prob_R is None else (y.float() * prob_R[:, None]).bfloat16()
    gate, up = h.float().chunk(2, dim=-1)
    y = silu(gate) * up
    return quantize_vllm(y if prob_R is None else y * prob_R[:, None])


def expert_gemm(operand: Tensor | Fp8Groups, weight: Weight, counts: list[int],
                prob_R: Tensor | None) -> Tensor:  # fmt: skip
    """Multiply each expert's rows by its matrix, and the sums by the routing weight if given."""
    return _each_expert(operand, weight, counts, prob_R, backwards=False)


def expert_gemm_backwards(operand: Tensor | Fp8Groups, weight: Weight, counts: list[int],
                          prob_R: Tensor | None) -> Tensor:  # fmt: skip
    """Multiply as `expert_gemm`, the last 128 columns first: another kernel's order, in torch."""
    return _each_expert(operand, weight, counts, prob_R, backwards=True)


def _each_expert(operand: Any, weight: Weight, counts: list[int], prob_R: Tensor | None, *,
                 backwards: bool) -> Tensor:  # fmt: skip
    order = range(-(-weight.bf16_OI.shape[-1] // BLOCK))
    parts = []
    for rows, matrix in zip(split_rows(operand, counts), split_experts(weight), strict=True):
        parts.append(_in_blocks(rows, matrix, reversed(order) if backwards else order))
    product = torch.cat(parts)
    return (product if prob_R is None else product * prob_R[:, None]).bfloat16()


def split_rows(operand: Tensor | Fp8Groups, counts: list[int]) -> Iterator[Any]:
    """Yield each expert's rows."""
    first = 0
    for count in counts:
        yield take(operand, slice(first, first + count))
        first += count


def split_experts(slab: Weight) -> Iterator[Weight]:
    """Yield each expert's matrix."""
    for n in range(slab.bf16_OI.shape[0]):
        matrix, *quantized = slab
        yield Weight(matrix[n], *(None if part is None else part[n] for part in quantized))


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


def lm_head(x_TH: Tensor, weight_VH: Tensor) -> Tensor:
    """Return BF16 logits, widened to FP32."""
    return (x_TH.float() @ weight_VH.float().T).bfloat16().float()


def lm_head_backwards(x_TH: Tensor, weight_VH: Tensor) -> Tensor:
    """Return BF16 logits of sums in another library's order, widened to FP32."""
    return gemm_backwards(x_TH, Weight(weight_VH, None, None)).float()


def logprobs_shard(logits: Tensor) -> Tensor:
    """Return log-softmax by maximum and sum of exponentials, as NeMo RL does by TP shard."""
    logits = logits - logits.amax(-1, keepdim=True)
    return logits - logits.exp().sum(-1, keepdim=True).log()


def logprobs_torch(logits: Tensor) -> Tensor:
    """Return torch's log-softmax in FP32: vLLM's sampler."""
    return logits.log_softmax(-1, dtype=torch.float32)


TRAINER: dict[str, Callable[..., Any]] = {
    "norm": norm, "rope": rope, "silu": silu_once, "expert silu": expert_silu,
    "weigh": weigh_inside, "quantize": quantize_groups, "gemm": gemm, "attention": attention,
    "router": router, "expert gemm": expert_gemm, "sum": sum_by_expert,
    "lm_head": lm_head, "logprob": logprobs_shard,
}  # fmt: skip
"""In the order in which the budget makes them equal; `logprob` is applied to the logits."""
EAGER: dict[str, Callable[..., Any]] = {
    "norm": norm, "rope": rope_rounded, "silu": silu_twice, "expert silu": expert_silu_vllm,
    "weigh": weigh_outside, "quantize": quantize_vllm, "gemm": gemm_backwards,
    "attention": attention_backwards, "router": router_bf16,
    "expert gemm": expert_gemm_backwards, "sum": sum_by_rank,
    "lm_head": lm_head_backwards, "logprob": logprobs_torch,
}  # fmt: skip
ENGINES = {
    "eager": EAGER,
    "graphs": EAGER | {"norm": norm_unrounded, "silu": silu_once},
    "fused": EAGER | {"norm": norm_fused, "silu": silu_quantized},
}
"""vLLM's three ways: its kernels, Inductor's, and its norm and SiLU fused with the quantizer."""
EXTRAS: dict[str, dict[str, Callable[..., Any]]] = {"fp8 kv": {"attention": attention_fp8}}
"""What one side alone may do, on top of `ENGINE`."""
DENSE = ("silu",)
MOE = ("expert silu", "weigh", "router", "expert gemm", "sum")


def tables(shape: Shape, precision: str, engine: str) -> tuple[dict, dict]:
    """Return the trainer's and the engine's table, without what the model never calls.

    Args:
        shape: whether there are experts.
        precision: `bf16`, `fp8-linear` (the engine's linears alone) or `fp8-e2e`.
        engine: a key of `ENGINES`; `fused` is FP8's, and `graphs` without a quantizer.
    """
    without = DENSE if shape.experts else MOE
    quantizers = {"bf16": (no_quantize, no_quantize), "fp8-linear": (no_quantize, quantize_vllm),
                  "fp8-e2e": (quantize_groups, quantize_vllm)}[precision]  # fmt: skip
    way = "graphs" if (engine, precision) == ("fused", "bf16") else engine
    found = (TRAINER | {"quantize": quantizers[0]}, ENGINES[way] | {"quantize": quantizers[1]})
    trainer, rollout = ({n: op for n, op in each.items() if n not in without} for each in found)
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
