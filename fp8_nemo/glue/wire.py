"""Which weight gets which format, and what it is called on the wire.

Pure and free of torch: the trainer, the engine's ledger and the estimate all ask this module, so
that no two of them can disagree about a name, a type or a shape.

Names are those of the Hugging Face checkpoint. transformers holds the experts of a layer in two
slabs (`experts.gate_up_proj`, `experts.down_proj`); the checkpoint and the wire hold them one by
one. FP8 is decided by exact module name: as a substring, `mlp.gate` would take `mlp.gate_proj`
with it (verl #7918).

Shapes: O out features, I in features, P = ceil(O/128), Q = ceil(I/128), E experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import FORMATS, Precision

BLOCK = FORMATS["fp8"].block
SCALE_SUFFIX = "_scale_inv"
"""Of FP8's block scales."""


SHOWN_PROBLEMS = 8  # a model of 18,000 expert weights may lose them all


class RefitError(RuntimeError):
    """Report a refit that did not land whole; `problems` names every tensor that failed."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        more = len(self.problems) - SHOWN_PROBLEMS
        shown = self.problems[:SHOWN_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
        super().__init__("refit failed: " + "; ".join(shown))

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:
        return RefitError, (self.problems,)  # through Ray, by its names and not its text


# A projection is the name of a module in its layer; it means the same in every family.
_QKV, _GATE_UP, _DOWN = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("down_proj",)
FAMILIES = {"llama": (), "qwen2": _QKV, "qwen3": (), "qwen3_moe": ()}
"""By `model_type` of a Hugging Face checkpoint: the projections that have a bias."""
_FUSED = {
    **dict.fromkeys(_QKV, ("qkv_proj", _QKV)),
    **dict.fromkeys(_GATE_UP, ("gate_up_proj", _GATE_UP)),
}
"""Projection to vLLM's module that holds its out-features, and all that are held there in order."""
_SLABS = {"mlp.experts.gate_up_proj": _GATE_UP, "mlp.experts.down_proj": _DOWN}
"""Slab of experts in transformers to the projections that are stacked in it."""
EXPERT_SLABS = dict.fromkeys(_GATE_UP, "w13_weight") | dict.fromkeys(_DOWN, "w2_weight")
"""Projection of experts to vLLM's slab, in which those of its `fused_module` are stacked."""
_CUT_ALONG_IN = {"o_proj", "down_proj"}
"""Projections of which a tensor-parallel rank holds some in-features; of others, some out."""
_NEVER_FP8 = {"mlp.gate", "mlp.shared_expert_gate"}
"""Modules that stay in BF16: routers."""
_NOISY = {"input_layernorm", "post_attention_layernorm"}
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


class WireSpec(NamedTuple):
    """State type and shape that a tensor must have on arrival: `WireSpec("float32", (2, 8))`."""

    dtype: str
    shape: tuple[int, ...]


@lru_cache(maxsize=2**16)
def _in_layer(name: str) -> tuple[int, str] | None:
    """Return a name's layer and its rest; cached, as every refit asks for the same 18,000."""
    found = _IN_LAYER.fullmatch(name)
    return (int(found[1]), found[2]) if found else None


def is_quantized_weight(
    name: str, shape: tuple[int, ...], precision: Precision, num_layers: int
) -> bool:
    """Return whether the engine holds this weight quantized, in FP8 or another such format.

    Args:
        name: Hugging Face name; a single weight (`...q_proj.weight`) or a slab of experts.
        shape: `(O, I)`, or `(E, O, I)` for a slab.
        precision: the recipe's precision.
        num_layers: layers of the model, for `precision.last_layers_bf16`.
    """
    return _in_quantized_layer(name, precision, num_layers) and is_linear(name, shape)


def takes_noise(name: str, precision: Precision, num_layers: int) -> bool:
    """Return whether a weight is of a norm in front of linears that the engine holds quantized.

    These are the norms of a layer that QeRL's noise is in (arXiv 2510.11696, figure 6): not those
    of Q and K, and not the model's last one, behind which is `lm_head`.

    Args:
        name: Hugging Face name.
        precision: the recipe's precision.
        num_layers: layers of the model, for `precision.last_layers_bf16`.
    """
    module = name.removesuffix(".weight").rpartition(".")[2]
    return module in _NOISY and _in_quantized_layer(name, precision, num_layers)


def _in_quantized_layer(name: str, precision: Precision, num_layers: int) -> bool:
    found = _in_layer(name)
    if not precision.rollout.is_quantized or not found:
        return False
    return precision.first_layers_bf16 <= found[0] < num_layers - precision.last_layers_bf16


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a weight is of a layer's linear or expert, which formats may quantize.

    Args:
        name: Hugging Face name of a weight or of a slab.
        shape: its shape, `(E, O, I)` for a slab.
    """
    found = _in_layer(name)
    if not found:
        return False
    rest = found[1]
    if rest in _SLABS:
        return len(shape) == 3
    module, _, kind = rest.rpartition(".")
    return kind == "weight" and len(shape) == 2 and module not in _NEVER_FP8


def slab_projections(name: str) -> tuple[str, ...]:
    """Return the projections stacked in a slab of experts; empty for a single weight's name."""
    found = _in_layer(name)
    return _SLABS.get(found[1], ()) if found else ()


def fused_module(projection: str) -> tuple[str, tuple[str, ...]]:
    """Return vLLM's module that holds a projection, and all projections in it, in order.

    It is `("qkv_proj", ("q_proj", "k_proj", "v_proj"))` for any of the three. A projection that
    vLLM does not fuse is returned as its own module.
    """
    return _FUSED.get(projection, (projection, (projection,)))


@lru_cache(maxsize=2**16)
def fused_with(name: str) -> tuple[str, ...]:
    """Return the weights that vLLM fuses with one, itself among them, in order; of a dense layer.

    They share a format's scale of the whole weight, as vLLM's kernel has one for a module. The
    experts' are not shared: vLLM's layout of them is not written.
    """
    module, _, kind = name.rpartition(".")
    projection = module.rpartition(".")[2]
    if ".experts." in name:
        return (name,)
    stem = module.removesuffix(projection)
    return tuple(f"{stem}{each}.{kind}" for each in fused_module(projection)[1])


def is_cut_along_in(projection: str) -> bool:
    """Return whether tensor parallelism splits a projection's in-features, not its out."""
    return projection in _CUT_ALONG_IN


def wire_names(name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return a weight's checkpoint names: its own, or for a slab one per expert and projection.

    The order is that of the slab's rows: expert by expert, gate before up.

    Args:
        name: Hugging Face name of a weight or of a slab.
        shape: its shape, `(E, O, I)` for a slab.
    """
    projections = slab_projections(name)
    if not projections:
        return (name,)
    stem = name.rpartition(".")[0]
    return tuple(
        f"{stem}.{expert}.{projection}.weight"
        for expert in range(shape[0])
        for projection in projections
    )


def scale_name(name: str) -> str:
    """Return the name of an FP8 weight's block scales, as vLLM's loader takes it."""
    return name + SCALE_SUFFIX


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the block scales' shape, `(..., P, Q)` for a weight `(..., O, I)`."""
    return (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))


HELD: dict[str, Callable[[int, int], dict[str, WireSpec]]] = {
    "fp8": lambda O, I: {
        "": WireSpec("float8_e4m3fn", (O, I)),
        SCALE_SUFFIX: WireSpec("float32", scale_shape((O, I))),
    },
    "nvfp4": lambda O, I: {
        "": WireSpec("uint8", (O, I // 2)),
        "_scale": WireSpec("float8_e4m3fn", (O, I // 16)),
        "_scale_2": WireSpec("float32", (1,)),
    },
}
"""What a weight `[O, I]` becomes in a quantized format: its bytes and scales, in the order sent, by
what is added to its name. vLLM's loaders take them so (`quantization/fp8.py`, `modelopt.py`)."""
SCALE_SUFFIXES = tuple(suffix for held in HELD.values() for suffix in held(16, 16) if suffix)


def suffixes(name: str) -> list[str]:
    """Return what is added to a weight's name for each tensor of a format; first nothing."""
    return [*HELD[name](16, 16)]


@lru_cache(maxsize=2**16)
def weight_of(name: str) -> str:
    """Return the weight, or slab, that a scale's name belongs to; any other name as it is."""
    for suffix in SCALE_SUFFIXES:
        weight = name.removesuffix(suffix)
        if weight != name and (weight.endswith(".weight") or slab_projections(weight)):
            return weight
    return name


def is_adapted(name: str, adapted: Collection[str]) -> bool:
    """Return whether a wire name is of a weight, or of its scale, that has an adapter of LoRA's.

    Args:
        name: on the wire.
        adapted: projections with adapters: `("q_proj", "k_proj", "v_proj")`.
    """
    module, _, kind = weight_of(name).rpartition(".")
    return kind == "weight" and module.rpartition(".")[2] in adapted


def kv_scale_names(layer: int, groups: int = 1) -> tuple[str, ...]:
    """Return vLLM's names of a layer's Q, K and V scales (seam scale-names).

    With several groups of heads a scale is named by its group too, as
    `model.layers.0.self_attn.1.k_scale`: first those of Q, then of K, then of V.
    """
    at = f"model.layers.{layer}.self_attn"
    inner = [f".{group}" if groups > 1 else "" for group in range(groups)]
    ends = (".attn", "q_scale"), ("", "k_scale"), ("", "v_scale")
    return tuple(f"{at}{module}{group}.{end}" for module, end in ends for group in inner)


def wire_specs(
    named_shapes: Mapping[str, tuple[int, ...]],
    precision: Precision,
    num_layers: int,
    kv_groups: int = 1,
) -> dict[str, WireSpec]:
    """Return the type and shape of every tensor that a refit sends, in the stream's order.

    Args:
        named_shapes: the trainer's weights in export order, slabs allowed.
        precision: the recipe's precision.
        num_layers: layers of the model.
        kv_groups: scales that a layer's Q, K or V has (`Precision.kv_groups`).
    """
    specs: dict[str, WireSpec] = {}
    for name, shape in named_shapes.items():
        specs.update(_weight_specs(name, shape, precision, num_layers))
    if precision.cache.is_quantized:
        for layer in range(num_layers):
            specs.update(dict.fromkeys(kv_scale_names(layer, kv_groups), WireSpec("float32", (1,))))
    return specs


def _weight_specs(
    name: str, shape: tuple[int, ...], precision: Precision, num_layers: int
) -> Iterator[tuple[str, WireSpec]]:
    projections = slab_projections(name)
    wire_shape = (shape[1] // len(projections), shape[2]) if projections else shape
    held = {"": WireSpec(precision.plain.dtype, wire_shape)}
    if is_quantized_weight(name, shape, precision, num_layers):
        held = HELD[precision.rollout.name](*wire_shape)
    for wire in wire_names(name, shape):
        for suffix, spec in held.items():
            yield wire + suffix, spec


def named_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a checkpoint's weights, from the numbers of a model option.

    Covers the `FAMILIES`.
    """
    query, value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        for projection, size in (
            ("q_proj", (query, shape.hidden)),
            ("k_proj", (value, shape.hidden)),
            ("v_proj", (value, shape.hidden)),
            ("o_proj", (shape.hidden, query)),
        ):
            named[f"{at}.self_attn.{projection}.weight"] = size
            if projection in FAMILIES[shape.family]:
                named[f"{at}.self_attn.{projection}.bias"] = size[:1]
        if shape.qk_norm:
            named[f"{at}.self_attn.q_norm.weight"] = (shape.head_dim,)
            named[f"{at}.self_attn.k_norm.weight"] = (shape.head_dim,)
        named.update(_mlp_shapes(f"{at}.mlp", shape))
        named[f"{at}.input_layernorm.weight"] = (shape.hidden,)
        named[f"{at}.post_attention_layernorm.weight"] = (shape.hidden,)
    named["model.norm.weight"] = (shape.hidden,)
    if not shape.tied:
        named["lm_head.weight"] = (shape.vocab, shape.hidden)
    return named


def _mlp_shapes(at: str, shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    stems = [at] if not shape.experts else [f"{at}.experts.{e}" for e in range(shape.experts)]
    width = shape.expert_ffn if shape.experts else shape.ffn
    if shape.experts:
        yield f"{at}.gate.weight", (shape.experts, shape.hidden)
    for stem in stems:
        yield f"{stem}.gate_proj.weight", (width, shape.hidden)
        yield f"{stem}.up_proj.weight", (width, shape.hidden)
        yield f"{stem}.down_proj.weight", (shape.hidden, width)
