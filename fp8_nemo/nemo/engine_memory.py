"""Find what a refit fills in one vLLM worker's model, and where that lies."""

# pyright: reportMissingImports=false
# vLLM stands on the path of a run, not of a type check.
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import cached_property
from typing import Any

from torch import Tensor

from fp8_nemo.glue.destination import Destination, Part
from fp8_nemo.glue.wire import WireSpec, kv_scale_names, named_shapes, wire_specs
from fp8_nemo.nemo.vllm_layout import (
    ParameterCache,
    Rank,
    engine_parts,
    layers_with_experts,
    place_of,
)
from fp8_nemo.nemo.worker_settings import WorkerSettings
from fp8_nemo.recipe.options import Precision


class EngineMemory:
    """One worker's model, and where in its memory each tensor of the wire lies.

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
        self.specs: dict[tuple, dict[str, WireSpec]] = {}

    @cached_property
    def rank(self) -> Rank:
        """This worker's place; one read on the host for each layer with experts."""
        return rank_of(self.model)

    def sent(self, precision: Precision) -> dict[str, WireSpec]:
        """Return what the wire brings in a precision; cached: 37,000 tensors take 0.2 s."""
        key = astuple(precision)
        if key not in self.specs:
            self.specs[key] = wire_specs(named_shapes(self.shape), precision, self.shape.layers)
        return self.specs[key]

    def destination(self) -> Destination:
        """Return where a refit fills this worker's memory, by wire name, as it is now.

        Raises:
            RefitError: the worker's tensors are not those that the recipe's engine holds.
        """
        cache = self.look_again()
        at = [*cache.places(), *(place_of(scale) for _, scale in self._kv_scales())]
        # `known` keeps the storages of what a refit fills: no other tensor gets their addresses.
        if self.known is None or at != self.known_at:
            self.known_at, self.known = at, self.lying(self.rank)
        return self.known

    def lying(self, rank: Rank) -> Destination:
        """Return the destination of a worker of a given rank, without reading its memory."""
        parameters = self.look_again().parameters()
        found = engine_parts(parameters, self.shape, self.precision, rank)
        found |= {name: Part(scale.view(1)) for name, scale in self._kv_scales()}
        specs = self.sent(self.precision)
        return Destination(found, {name: x for name, x in specs.items() if rank.holds(name)})

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
    """Map made-up expert numbers, from 0: the true ones may lie in memory that sleeps."""
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
