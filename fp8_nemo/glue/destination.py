"""An engine's tensors, into which refits land: compared, poisoned and read.

An engine under tensor or expert parallelism holds a part of what is sent; a `Part` says which.
Thousands of tensors are poisoned and looked at in a few launches, and digested in one: names are
looked up one by one only after something failed.
"""

# pyright: reportPrivateImportUsage=false
# torch._foreach_* is documented and public, its underscore notwithstanding.
from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fp8_nemo.glue import wire as weights
from fp8_nemo.glue.digest import Digests, Placed, placed
from fp8_nemo.glue.manifest import KV_SUFFIXES
from fp8_nemo.glue.quantize import FP8
from fp8_nemo.glue.wire import RefitError, WireSpec
from fp8_nemo.recipe.options import FORMATS

FP8_NAN = FORMATS["fp8"].nan


class Part(NamedTuple):
    """What one engine holds of a tensor on the wire: `Part(view, (slice(0, 512), slice(None)))`."""

    tensor: Tensor
    """The engine's own memory."""
    of_wire: tuple[slice, ...] = ()
    """Which part of the wire's tensor it holds; all of it if empty."""


class Destination:
    """Where refits land: an engine's tensors, and how they are poisoned and read.

    Args:
        engine: the engine's tensors by wire name, whole or in part.
        held: what a refit fills of them, whole.

    Raises:
        RefitError: the engine's tensors are not those that a refit of this precision fills.
    """

    def __init__(self, engine: Mapping[str, Tensor | Part], held: Mapping[str, WireSpec]) -> None:
        self.parts = {name: x if isinstance(x, Part) else Part(x) for name, x in engine.items()}
        self.held = held
        self.here = {name: spec_of(part.tensor) for name, part in self.parts.items()}
        """Type and shape of what is here of each."""
        self._compare()
        self.addresses = {name: part.tensor.data_ptr() for name, part in self.parts.items()}
        self.scales: dict[str, Tensor] = {}
        """Block scales, whole."""
        self.bytes: dict[str, Tensor] = {}
        """The first and the last byte of FP8 weights."""
        self.others: dict[str, Tensor] = {}
        """The first and the last element of the rest."""
        for name, part in self.parts.items():
            tensor = part.tensor
            if not tensor.numel():  # the last rank of a vocabulary may hold padding alone
                continue
            if name.endswith(weights.SCALE_SUFFIX):
                # As a view, once: 224 of 8B's take a host 0.2 ms, and flattening a row is free.
                self.scales[name] = tensor.flatten() if tensor.is_contiguous() else tensor
            elif tensor.dtype == FP8:
                self.bytes[name] = _ends(tensor.view(torch.uint8))
            else:
                self.others[name] = _ends(tensor)
        self.kv_scales = [name for name in self.others if name.endswith(KV_SUFFIXES)]
        filled = {**self.scales, **self.bytes, **self.others}
        self.digested = [name for name in filled if name not in self.kv_scales]

    @cached_property
    def digests(self) -> Digests:
        """What reads all of `digested` in one launch."""
        return Digests([self.placed(name, self.parts[name].tensor) for name in self.digested])

    def placed(self, name: str, part: Tensor) -> Placed:
        """A tensor, standing where the engine's part of that name stands in the whole."""
        return placed(part, self.held[name].shape, self.parts[name].of_wire)

    def poison(self, names: Collection[str]) -> None:
        """NaN, which no trainer sends, into all of a block scale and both ends of the rest."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}  # of one dtype, all go in a few launches
        for tensor in (*_of(names, self.scales).values(), *_of(names, self.others).values()):
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for some in by_dtype.values():
            torch._foreach_mul_(some, torch.nan)
        if ends := [*_of(names, self.bytes).values()]:
            nan_2 = torch.full((2,), FP8_NAN, dtype=torch.uint8, device=ends[0].device)
            torch._foreach_copy_(ends, [nan_2[: len(each)] for each in ends])

    def poisoned(self, names: Collection[str]) -> list[str]:
        """Those in which loading left the poison, or put a scale that is none.

        KV scales are compared by value instead.
        """
        others = {n: x for n, x in _of(names, self.others).items() if n not in self.kv_scales}
        return [
            *_not_all(_of(names, self.scales), lambda x: torch.isfinite(x) & (x > 0)),
            *_not_all(_of(names, self.bytes), lambda x: (x & 0x7F) != FP8_NAN),
            *_not_all(others, torch.isfinite),
        ]

    def _compare(self) -> None:
        problems = [
            f"{name}: the engine has no such tensor"
            for name in self.held.keys() - self.parts.keys()
        ]
        problems += [
            f"{name}: the engine holds it, a refit does not fill it"
            for name in self.parts.keys() - self.held.keys()
        ]
        for name, part in self.parts.items():
            spec, found = self.held.get(name), self.here[name]
            if spec and found != (wanted := _spec_of_part(spec, part.of_wire)):
                problems.append(
                    f"{name}: the engine holds {found.dtype} {list(found.shape)}, a refit sends "
                    f"{wanted.dtype} {list(wanted.shape)}"
                )
        if problems:
            raise RefitError(sorted(problems))


def spec_of(tensor: Tensor) -> WireSpec:
    """Type and shape of a tensor as the wire names them."""
    return WireSpec(_dtype(tensor.dtype), tuple(tensor.shape))


@cache
def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _spec_of_part(spec: WireSpec, of_wire: tuple[slice, ...]) -> WireSpec:
    if not of_wire:
        return spec
    sides = zip(of_wire, spec.shape, strict=True)
    return WireSpec(spec.dtype, tuple(len(range(*part.indices(side))) for part, side in sides))


def _of(names: Collection[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensors[name] for name in names if name in tensors}


def _ends(tensor: Tensor) -> Tensor:
    """The first and the last element, as a view."""
    last = sum((side - 1) * step for side, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((2 if last else 1,), (last or 1,))


def _not_all(tensors: Mapping[str, Tensor], are_fine: Callable[[Tensor], Tensor]) -> list[str]:
    """Names of tensors that hold what is not fine; looked up one by one only if there is any."""
    if not tensors:
        return []
    fine = are_fine(torch.cat([each.flatten() for each in tensors.values()]))
    if fine.all():
        return []
    verdicts = torch.stack(
        [x.all() for x in fine.split([each.numel() for each in tensors.values()])]
    )
    return [name for name, passed in zip(tensors, verdicts.tolist(), strict=True) if not passed]
