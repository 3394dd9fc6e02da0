"""Find what a refit fills in one vLLM worker's model, where that lies, and which part is held here.

vLLM fuses projections (`qkv_proj`, `gate_up_proj`), stacks experts (`w13_weight`, `w2_weight`) and
cuts both over tensor- and expert-parallel ranks. This follows vLLM 0.25's own layout (linear.py,
routed_experts.py, vocab_parallel_embedding.py). If a worker's parameters lie otherwise, the ledger
refuses the refit and names them.

Shapes: O out features, I in features, E experts; scales are of blocks of 128.
"""

# pyright: reportMissingImports=false
# vLLM stands on the path of a run, not of a type check.
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8_nemo.glue.destination import Destination, Part
from fp8_nemo.glue.manifest import KV_SUFFIXES, is_sent_again
from fp8_nemo.glue.wire import (
    BLOCK,
    EXPERT_SLABS,
    WireSpec,
    fused_module,
    is_cut_along_in,
    is_quantized_weight,
    kv_scale_names,
    named_shapes,
    scale_name,
    wire_specs,
)
from fp8_nemo.nemo.marlin.layout import arriving, modules, repacked
from fp8_nemo.nemo.worker_settings import WorkerSettings
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision

OWN_SCALES = (*KV_SUFFIXES, ".prob_scale")
"""Parameters of vLLM's attention, which it reads into buffers of its own."""
EXPERTS = (".mlp.experts.routed_experts", ".mlp.experts")
"""What vLLM 0.25 and 0.20 call the module that holds a layer's experts."""


class Rank(NamedTuple):
    """State one worker's place: `Rank(0, 2, {0: {0: 0, 1: 1}})`."""

    tensor_rank: int = 0
    tensor_size: int = 1
    experts: Mapping[int, Mapping[int, int]] | None = None
    """Layer to the experts that are here, global number to local; None if all are, in parts."""

    def holds(self, name: str) -> bool:
        """Return whether this worker holds a part of a wire tensor; an expert may be elsewhere."""
        found = _expert(name)
        return found is None or self.experts is None or found[1] in self.experts[found[0]]


class _Place(NamedTuple):
    parameter: str
    engine: tuple[int | slice, ...]
    wire: tuple[slice, ...]


class Proven(NamedTuple):
    """Hold what a refit was proven to have filled, and the digest of each tensor there."""

    destination: Destination
    digests: Mapping[str, int]


class ParameterCache:
    """Keep the dictionaries in which a model's modules hold their parameters, found by one walk.

    A walk of a large model takes milliseconds, and a refit asks twice. The cached dictionaries show
    a parameter whose storage or object changed. They would miss a changed module or parameter name:
    then `are_all` is false, and the model must be walked again.
    """

    def __init__(self, model: Any) -> None:
        named = [*model.named_modules()]
        self.modules = [
            (m._modules, key, each) for _, m in named for key, each in m._modules.items()
        ]
        self.held = [
            (f"{at}.{key}" if at else key, m._parameters, key)
            for at, m in named
            for key in m._parameters
        ]
        tables = [table for _, m in named for table in (m._modules, m._parameters)]
        self.names = [(table, tuple(table)) for table in tables]

    def are_all(self) -> bool:
        """Return whether the model still has these modules, and parameters of these names."""
        alike = all(of.get(key) is each for of, key, each in self.modules)
        return alike and all(tuple(table) == names for table, names in self.names)

    def memory(self) -> list[tuple | None]:
        """Return each parameter's `memory_of`; None where a module lost the parameter."""
        with torch._C.DisableTorchFunctionSubclass():  # vLLM's own kinds of parameter are slow
            found = [of.get(key) for _, of, key in self.held]
            return [each if each is None else memory_of(each) for each in found]

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters by name, a tied one by its first, as `named_parameters` does."""
        found: dict[int, tuple[str, Tensor]] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for name, of, key in self.held:
                parameter = of.get(key)
                if parameter is not None:
                    found.setdefault(id(parameter), (name, parameter.data))
        return dict(found.values())


def memory_of(tensor: Tensor) -> tuple:
    """Return address, type, shape and strides: equal if two tensors read the same memory alike."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def engine_parts(
    parameters: Mapping[str, Tensor], shape: Shape, precision: Precision, rank: Rank
) -> dict[str, Part]:
    """Return a worker's weights and block scales by wire name, without KV scales.

    A tensor that the engine lacks is left out. A parameter that no wire tensor fills is returned
    under its own name. The ledger reports both.

    Args:
        parameters: of vLLM's model.
        shape: of the recipe's model.
        precision: of the recipe.
        rank: this worker's.
    """
    parts: dict[str, Part] = {}
    used: set[str] = set()
    named = named_shapes(shape)
    for name, size in named.items():
        place = _place(name, named, parameters, shape, rank) if rank.holds(name) else None
        if place is None or place.parameter not in parameters:
            continue
        used.add(place.parameter)
        parts[name] = Part(parameters[place.parameter][place.engine], place.wire)
        if is_quantized_weight(name, size, precision, shape.layers):
            scales = place.parameter + "_scale_inv"
            if scales in parameters:
                used.add(scales)
                engine = tuple(x if isinstance(x, int) else _blocks(x) for x in place.engine)
                wire = tuple(map(_blocks, place.wire))
                parts[scale_name(name)] = Part(parameters[scales][engine], wire)
    unused = {n: Part(p) for n, p in parameters.items() if n not in used}
    return parts | {
        name: part
        for name, part in unused.items()
        if not name.endswith(OWN_SCALES) and not _is_alias(name, parameters)
    }


def _is_alias(name: str, parameters: Mapping[str, Tensor]) -> bool:
    """Return whether `weight_scale` is the `weight_scale_inv` again (seam scale-alias)."""
    other = parameters.get(f"{name}_inv")
    return other is not None and other.data_ptr() == parameters[name].data_ptr()


def layers_with_experts(names: Mapping[str, object]) -> Iterator[tuple[int, str]]:
    """Yield the layer and full name of each module that holds experts."""
    for name in names:
        for suffix in EXPERTS:
            if name.endswith(suffix) and f"{name}.routed_experts" not in names:
                yield int(name.removesuffix(suffix).rpartition(".")[2]), name


def _place(
    name: str,
    named: Mapping[str, tuple[int, ...]],
    parameters: Mapping[str, Tensor],
    shape: Shape,
    rank: Rank,
) -> _Place | None:
    """Return where one of the `named_shapes` lies; whole unless a rule here cuts it."""
    size = named[name]
    module, _, kind = name.rpartition(".")
    stem, _, projection = module.rpartition(".")
    if found := _expert(name):
        return _expert_place(found, size, parameters, rank)
    if projection in ("embed_tokens", "lm_head"):
        return _vocabulary_place(name, size, parameters, rank)
    fused, together = fused_module(projection)
    if len(together) > 1:
        held = {
            each: _rows(each, named[f"{stem}.{each}.{kind}"][0], shape, rank) for each in together
        }
        above = together[: together.index(projection)]
        start = sum(_length(held[each]) for each in above)
        rows = held[projection]
        here = slice(start, start + _length(rows))
        return _Place(f"{stem}.{fused}.{kind}", (here,), (rows, *_whole(size[1:])))
    if is_cut_along_in(projection) and kind == "weight":
        return _Place(name, (slice(None),), (slice(0, size[0]), _share(size[1], rank)))
    return _Place(name, (slice(None),), _whole(size))


def _rows(projection: str, side: int, shape: Shape, rank: Rank) -> slice:
    """Return the out-features of this rank; with more ranks than K/V heads, ranks share a head."""
    copies = 1
    if projection in ("k_proj", "v_proj"):
        copies = max(1, rank.tensor_size // shape.kv_heads)
    return _share(side, Rank(rank.tensor_rank // copies, rank.tensor_size // copies))


def _vocabulary_place(
    name: str, size: tuple[int, ...], parameters: Mapping[str, Tensor], rank: Rank
) -> _Place | None:
    """Return where a vocabulary's rows lie: padded, then cut, so the last rank may hold padding."""
    if name not in parameters:
        return None
    rows = parameters[name].shape[0]
    start = min(rank.tensor_rank * rows, size[0])
    stop = min(start + rows, size[0])
    return _Place(name, (slice(0, stop - start),), (slice(start, stop), slice(0, size[1])))


def _expert_place(
    expert: tuple[int, int, str],
    size: tuple[int, ...],
    parameters: Mapping[str, Tensor],
    rank: Rank,
) -> _Place | None:
    layer, number, projection = expert
    local = number if rank.experts is None else rank.experts[layer][number]
    cut = rank if rank.experts is None else Rank()
    _, together = fused_module(projection)
    slabs = (f"model.layers.{layer}{suffix}.{EXPERT_SLABS[projection]}" for suffix in EXPERTS)
    parameter = next((name for name in slabs if name in parameters), None)
    if parameter is None:
        return None
    if is_cut_along_in(projection):
        return _Place(parameter, (local,), (slice(0, size[0]), _share(size[1], cut)))
    rows = _share(size[0], cut)
    start = together.index(projection) * _length(rows)
    return _Place(
        parameter, (local, slice(start, start + _length(rows))), (rows, *_whole(size[1:]))
    )


def _expert(name: str) -> tuple[int, int, str] | None:
    """Return layer, expert and projection of an expert's weight or scale; None for any other."""
    stem, found, rest = name.partition(".mlp.experts.")
    if not found:
        return None
    number, projection, *_ = rest.split(".")
    return int(stem.rpartition(".")[2]), int(number), projection


def _whole(size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, side) for side in size)


def _length(part: slice) -> int:
    return part.stop - part.start


def _share(side: int, rank: Rank) -> slice:
    share = side // rank.tensor_size
    return slice(rank.tensor_rank * share, (rank.tensor_rank + 1) * share)


def _blocks(part: slice) -> slice:
    """Return the blocks that a range of rows or columns covers; the range begins with a block."""
    if part.stop is None:
        return part
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))


class EngineMemory:
    """Tell where in the memory of one worker's model each tensor of the wire lies.

    A mixture of experts has 37,000 of them: they are looked up when something has moved.

    Args:
        model: vLLM's.
        settings: of the run; its shape and its precision count.
    """

    def __init__(self, model: Any, settings: WorkerSettings) -> None:
        self.model, self.shape, self.precision = model, settings.shape, settings.precision
        self.cache: ParameterCache | None = None
        self.attentions: list[Any] = []
        self.known_at: list[tuple | None] = []
        self.known: Destination | None = None
        self.proven: Proven | None = None
        """What the refit before was proven to fill; None if it was not."""
        self.specs: dict[tuple, dict[str, WireSpec]] = {}

    @cached_property
    def rank(self) -> Rank:
        """Return this worker's place; one read on the host for each layer with experts."""
        return rank_of(self.model)

    @cached_property
    def repacked(self) -> tuple[dict[str, WireSpec], set[str]]:
        """Return what vLLM repacked for a kernel, by parameter, and the wire names that fill it."""
        plain = self.precision.plain.dtype
        found = modules(self.shape, self.precision)
        specs: dict[str, WireSpec] = {}
        for each in found:
            specs |= {f"{each.path}.{name}": spec for name, spec in repacked(each, plain).items()}
        return specs, {name for each in found for name in arriving(each)}

    def sent_specs(
        self, precision: Precision, adapted: tuple[str, ...] = ()
    ) -> dict[str, WireSpec]:
        """Return what the wire brings in a precision; cached: 37,000 tensors take 0.2 s.

        Args:
            precision: of the wire.
            adapted: projections with adapters, if they alone are sent.
        """
        if (precision, adapted) not in self.specs:
            named = named_shapes(self.shape)
            found = wire_specs(named, precision, self.shape.layers)
            if adapted:
                found = {name: x for name, x in found.items() if is_sent_again(name, adapted)}
            self.specs[precision, adapted] = found
        return self.specs[precision, adapted]

    def destination(self) -> Destination:
        """Return where a refit fills this worker's memory, by wire name, as it is now.

        Raises:
            RefitError: the worker's tensors are not those that the recipe's engine holds.
        """
        cache = self.look_again()
        at = [*cache.memory(), *(memory_of(scale) for _, scale in self._kv_scales())]
        # `known` keeps the storages of what a refit fills: no other tensor gets their addresses.
        if self.known is None or at != self.known_at:
            self.known_at, self.known = at, self.lying(self.rank)
        return self.known

    def lying(self, rank: Rank) -> Destination:
        """Return the destination of a worker of a given rank, without reading its memory."""
        parameters = self.look_again().parameters()
        specs = self.sent_specs(self.precision)
        held = {name: x for name, x in specs.items() if rank.holds(name)}
        repacked, staged = self.repacked
        packed = {n: p for n, p in parameters.items() if n in repacked}
        parts = {n: Part(p if p.ndim else p.view(1)) for n, p in packed.items()}
        others = {n: p for n, p in parameters.items() if n not in packed}
        parts |= engine_parts(others, self.shape, self.precision, rank)
        parts |= {name: Part(scale.view(1)) for name, scale in self._kv_scales()}
        held = {name: x for name, x in held.items() if name not in staged} | repacked
        return Destination(parts, held, staged)

    def check_asleep(self) -> None:
        """Check that every tensor is found in an engine that sleeps, its memory given back.

        Raises:
            RefitError: as `destination`.
        """
        found = self.lying(rank_of(self.model, _as_many))
        for name in found.digested:
            found.placed(name, found.parts[name].tensor)

    def last_seen(self) -> Destination:
        """Return `destination` as the last refit left it, without the 2.4 ms that 8B takes to look.

        If a tensor has moved since then, closing the refit notices and fails it, as it does for a
        tensor that moves during the refit.
        """
        return self.known or self.destination()

    def look_again(self) -> ParameterCache:
        """Return the cached parameters and attentions; walk the model anew if it has changed."""
        if self.cache is None or not self.cache.are_all():
            fp8_kv = self.precision.cache.is_quantized
            self.cache, self.known = ParameterCache(self.model), None
            self.attentions = attentions(self.model, self.shape.layers) if fp8_kv else []
        return self.cache

    def _kv_scales(self) -> Iterator[tuple[str, Tensor]]:
        for layer, attention in enumerate(self.attentions):
            held = (attention._q_scale, attention._k_scale, attention._v_scale)
            yield from zip(kv_scale_names(layer), held, strict=True)


def _mapped(_: Any, numbers: Tensor) -> dict[int, int]:
    return {number: local for number, local in enumerate(numbers.tolist()) if local >= 0}


def _as_many(module: Any, _: Tensor) -> dict[int, int]:
    """Return experts by number from 0: their true numbers may lie in memory that is asleep."""
    return {number: number for number in range(len(module.w13_weight))}


def rank_of(model: Any, experts_of: Callable[[Any, Tensor], dict[int, int]] = _mapped) -> Rank:
    """Return a worker's place among those that share its model."""
    from vllm.distributed import (
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    modules = dict(model.named_modules())
    experts = {
        layer: experts_of(modules[name], found)
        for layer, name in layers_with_experts(modules)
        if (found := _expert_map(modules[name])) is not None
    }
    return Rank(
        get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size(), experts or None
    )


def _expert_map(module: Any) -> Tensor | None:
    """Return the local number of every expert, from vLLM 0.25 or 0.20; None if all are here."""
    return getattr(module, "_expert_map", getattr(module, "expert_map", None))


def attentions(model: Any, layers: int) -> list[Any]:
    """Return vLLM's attention modules, which hold the cache's scales, in layer order."""
    return [model.get_submodule(f"model.layers.{layer}.self_attn.attn") for layer in range(layers)]
