"""One forward of Llama, Qwen3 and Qwen3-MoE whose every operation is taken from a table.

A table maps an operation's name to a function. All tables agree on what an operation takes and
returns, so that any mixture runs. `dialects` has the tables in torch, `gpu_dialects` the kernels.

Shapes: N sequences of S tokens, T = N * S; H hidden, A heads, K KV heads, D head size, F width of
the MLP; E experts, k of them a token, R = T * k rows sorted by expert; V vocabulary; O and I out
and in features of a linear, in blocks of 128 P and Q.
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

from fp8_nemo.glue.quantize import FP8, Fp8Groups, quantize_blocks

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
        """Read the folder's `config.json`; `rope_parameters` is transformers 5's `rope_theta`.

        Raises:
            ValueError: the checkpoint scales its frequencies, which `dialects.angles` does not.
        """
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
    """Read every tensor of a folder's safetensors files into BF16, shapes as in the files."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name).bfloat16() for name in opened.keys()}  # noqa: SIM118
    return found


def load(folder: Path, device: str, fp8: bool) -> Model:
    """Read a checkpoint onto a device; with `fp8` quantize its linears too, in 128x128 blocks.

    Q, K and V are one matrix `[(A + 2K)D, H]`, gate and up one `[2F, H]`, experts slabs `[E, ...]`.
    """
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
        ops: by the names of `dialects.TRAINER`.
        tokens_NS: the sequences `[N, S]`, each from position 0.
        watch: told of every call, to compare it with another dialect's on the same arguments.
    """
    shape, (_, S) = model.shape, tokens_NS.shape
    residuals: list[Tensor] = []

    def call(op: str, place: str, layer: int, *arguments: Any) -> Any:
        found = ops[op](*arguments)
        if watch is not None:
            watch(op, place, layer, arguments, found)
        return found

    def normed(place: str, n: int, delta: Tensor | None, stream: Tensor, weight: Tensor,
               to_linear: bool) -> tuple:  # fmt: skip
        y_TH, stream = call("norm", place, n, delta, stream, weight, shape.eps, to_linear)
        residuals.append(stream)
        return y_TH, stream

    def linear(place: str, n: int, x: Any, weight: Weight) -> Tensor:
        operand = call("quantize", place, n, x) if isinstance(x, Tensor) else x
        return call("gemm", place, n, operand, weight)

    def head_norm(place: str, n: int, x_TAD: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x_TAD
        flat = x_TAD.reshape(-1, shape.head_dim)
        return call("norm", place, n, None, flat, weight, shape.eps, False)[0].view(x_TAD.shape)

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
        x_TH, stream = normed("attention", n, delta, stream, layer.norm, True)
        delta = attend(n, layer, x_TH)
        x_TH, stream = normed("mlp", n, delta, stream, layer.norm_2, not shape.experts)
        delta = mlp(n, layer, x_TH)
    x_TH, _ = normed("final", shape.layers, delta, stream, model.norm, False)
    logits = call("lm_head", "lm_head", shape.layers, x_TH, model.head)
    return Pass(logits, residuals)


def take(operand: Tensor | Fp8Groups, rows_R: Any) -> Any:
    """Return rows of an operand `[R, I]`, by numbers or a slice; bytes are moved as bytes."""
    if isinstance(operand, Tensor):
        return operand[rows_R].contiguous()
    codes = operand.fp8_TI.view(torch.uint8)[rows_R].contiguous()
    return Fp8Groups(codes.view(FP8), operand.scale_inv_TQ[rows_R].contiguous())


def by_expert(operand: Any, slab: Weight, counts: list[int]) -> Iterator[tuple[Any, Weight]]:
    """Yield rows `[count, I]` and matrix `[O, I]` of each expert that has rows.

    Args:
        operand: `[R, I]`, sorted by expert, in BF16 or in FP8 groups.
        slab: `[E, O, I]`.
        counts: rows of each of the E experts.
    """
    first = 0
    for expert, count in enumerate(counts):
        if count:
            parts = (None if part is None else part[expert] for part in slab)
            yield take(operand, slice(first, first + count)), Weight(*parts)
        first += count
