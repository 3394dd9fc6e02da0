"""Count a model's weights and adapters, and hold its checkpoint and positions against a plan.

`count` is exact, from the numbers of `model.shape`. A `config.json` may say less than the weights:
a bias elsewhere, a layer more. Their headers are read before anything is queued, since a refit
would stop at the first name that is not the plan's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from fp8_nemo.glue.wire import is_adapted, is_quantized_weight, named_shapes, weight_of, wire_specs
from fp8_nemo.recipe.mistake import Mistake
from fp8_nemo.recipe.model_dir import known_config, known_positions, tensor_shapes
from fp8_nemo.recipe.options.model import Model, Shape
from fp8_nemo.recipe.options.precision import DTYPE_BYTES, Precision
from fp8_nemo.recipe.options.training import LORA_MODULES, Lora
from fp8_nemo.recipe.own.model import rope_type
from fp8_nemo.recipe.settled import Settled

HEAD = "lm_head.weight"
UNSTRETCHED = ("default", "llama3")
"""Rotary embeddings with which vLLM refuses more than `max_position_embeddings`."""


@dataclass(frozen=True)
class Counts:
    """Count one model in one precision; bytes are of the whole model, not per GPU."""

    parameters: int
    fp8_weights: int
    """Weights that the engine holds quantized, experts counted one by one."""
    bf16_weights: int
    refit_bytes: int
    """What one refit sends, scales included."""
    refit_bytes_bf16: int
    """What the same refit sends in BF16."""
    kv_bytes_per_token: int

    @property
    def weights(self) -> int:
        """Count the weights in either format."""
        return self.fp8_weights + self.bf16_weights


@lru_cache
def count(shape: Shape, precision: Precision, adapted: tuple[str, ...] = ()) -> Counts:
    """Count parameters, weights and bytes from `model.shape` and the precision.

    Args:
        shape: of the model.
        precision: of what is sent.
        adapted: projections with adapters, if their weights alone are counted.
    """
    named = named_shapes(shape)
    shapes = {n: x for n, x in named.items() if is_adapted(n, adapted)} if adapted else named
    specs = wire_specs(shapes, precision, shape.layers, precision.kv_groups(shape.kv_heads))
    scaled = {weight_of(name) for name in specs if weight_of(name) != name}
    parameters = sum(math.prod(each) for each in shapes.values())
    return Counts(
        parameters=parameters,
        fp8_weights=len(scaled),
        bf16_weights=len(shapes) - len(scaled),
        refit_bytes=sum(DTYPE_BYTES[each.dtype] * math.prod(each.shape) for each in specs.values()),
        refit_bytes_bf16=2 * parameters,
        kv_bytes_per_token=_kv_bytes_per_token(shape, precision),
    )


def _kv_bytes_per_token(shape: Shape, precision: Precision) -> int:
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * DTYPE_BYTES[precision.cache.dtype]


class Group(NamedTuple):
    """Count weights of one kind: `Group("experts", quantized=True, matrix=True, 4.7e9)`."""

    part: str
    """`embedding`, `head`, `experts`, `layers` (the rest of a layer) or `norm`, the last one."""
    quantized: bool
    matrix: bool
    """Whether a product is made with them; norms and biases are vectors."""
    elements: int


@lru_cache
def census(shape: Shape, precision: Precision) -> tuple[Group, ...]:
    """Count a model's weights by kind, each that the engine quantizes apart."""
    found: Counter[tuple[str, bool, bool]] = Counter()
    for name, size in named_shapes(shape).items():
        quantized = is_quantized_weight(name, size, precision, shape.layers)
        found[_part(name), quantized, len(size) > 1] += math.prod(size)
    return tuple(Group(*kind, elements) for kind, elements in found.items())


def _part(name: str) -> str:
    if name.startswith("model.layers."):
        return "experts" if ".experts." in name else "layers"
    ends = {"model.embed_tokens.weight": "embedding", "lm_head.weight": "head"}
    return ends.get(name, "norm")


class Adapter(NamedTuple):
    """Give the widths of one layer's adapter: `Adapter(6144, 4096, 2**24, in_experts=False)`."""

    out: int
    """Rows of `B`: those of all linears that share an `A`."""
    into: int
    """Columns of `A`."""
    largest: int
    """Elements of the largest linear among them."""
    in_experts: bool
    """One for all experts that a GPU trains (seam shares-an-adapter)."""


def adapters(shape: Shape, lora: Lora) -> list[Adapter]:
    """List the adapters that LoRA adds to one layer; none without LoRA."""
    if not lora.is_on:
        return []
    layer = named_shapes(replace(shape, layers=1, experts=min(1, shape.experts)))
    found = []
    for module in lora.target_modules:
        names = tuple(f".{each}.weight" for each in LORA_MODULES[module])
        sizes = {name: size for name, size in layer.items() if name.endswith(names)}
        in_experts = any(".experts." in name for name in sizes)
        _, into = next(iter(sizes.values()))
        rows = [out for out, _ in sizes.values()]
        found.append(Adapter(sum(rows), into, max(rows) * into, in_experts))
    return found


def adapter_parameters(shape: Shape, lora: Lora) -> tuple[int, int]:
    """Count all adapters' parameters outside experts, and those of one GPU's experts."""
    found = adapters(shape, lora)
    each = shape.layers * (lora.rank or 0)
    dense, expert = (
        each * sum(one.out + one.into for one in found if one.in_experts == inside)
        for inside in (False, True)
    )
    return dense, expert


def checkpoint_mistakes(model: Model) -> Iterator[Mistake]:
    """Yield what the weights of a model with `shape_from=config` have otherwise than its shape."""
    if model.shape_from is None:
        return
    key, where = ("model.path", model.path) if model.path else ("model.hf_id", model.hf_id)
    try:
        found = tensor_shapes(model)
    except ValueError as error:
        yield Mistake(key, where, str(error))
        return
    if differences := list(tensor_differences(model.shape, found)):
        more = f"; and {len(differences) - 1} more" if len(differences) > 1 else ""
        kind = f"no {model.shape.family} of its config.json's numbers, as driven here"
        yield Mistake(key, where, f"is {kind}: {differences[0]}{more}")


def tensor_differences(shape: Shape, found: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Yield each tensor that a model of this shape lacks, has too many, or has in another shape.

    Args:
        shape: that the plan counts with.
        found: the checkpoint's tensors. One that ties its embedding may hold the head too.
    """
    wanted = named_shapes(shape)
    for name, size in wanted.items():
        if name not in found:
            yield f"it lacks {name}"
        elif found[name] != size:
            yield f"{name} is {list(found[name])}, not {list(size)}"
    for name in found.keys() - wanted.keys() - ({HEAD} if shape.tied else set()):
        yield f"it holds {name}"


def position_mistakes(settled: Settled) -> Iterator[Mistake]:
    """Yield an answer that has no place in the model's positions, if they are known here.

    NeMo RL makes room for the longest prompt beside it, the local backend for the prompt it has.
    """
    recipe, answer = settled.recipe, settled.response_tokens
    most = known_positions(recipe)
    if most is None:
        return
    if recipe.chosen_backend == "local":
        broken, text = answer >= most, f"leaves a prompt no place in the model's {most} positions"
    else:
        tokens = settled.sequence_tokens
        broken = tokens > most and rope_type(known_config(recipe)) in UNSTRETCHED
        text = f"makes sequences of {tokens} tokens, the model has {most} positions"
    if broken:
        yield Mistake("grpo.max_new_tokens", answer, text, "lower it")
