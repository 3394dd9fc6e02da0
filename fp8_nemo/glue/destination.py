"""Compare, fill, poison and read an engine's tensors, into which refits land.

An engine under tensor or expert parallelism holds a part of what is sent; a `Part` says which.
Thousands of tensors are poisoned and looked at in a few launches, and digested in one: names are
looked up one by one only after something failed.
"""

# pyright: reportPrivateImportUsage=false
# torch._foreach_* is documented and public, its underscore notwithstanding.
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fp8_nemo.glue.digest import Placed, digests_of, placed
from fp8_nemo.glue.manifest import KV_SUFFIXES
from fp8_nemo.glue.quantize import FP8
from fp8_nemo.glue.wire import RefitError, WireSpec, is_linear, weight_of
from fp8_nemo.recipe.options.precision import FORMATS

FP8_NAN = FORMATS["fp8"].nan
ARE_FINE: dict[str, Callable[[Tensor], Tensor]] = {
    "scale": lambda x: torch.isfinite(x) & (x > 0),
    "fp8": lambda x: (x & 0x7F) != FP8_NAN,
    "plain": torch.isfinite,
}
"""By kind of tensor: which values loading may leave in it."""
SAMPLED = 2**22
"""Values that `Sample` reads: a change of 0.2% of the bytes is known to 1% of it."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By bytes of a value: what holds the same bits, and NaN equal to itself."""


class Part(NamedTuple):
    """State what an engine holds of a wire tensor: `Part(view, (slice(0, 512), slice(None)))`."""

    tensor: Tensor
    """The engine's own memory."""
    of_wire: tuple[slice, ...] = ()
    """Which part of the wire's tensor it holds; all of it if empty."""


class Destination:
    """Hold where refits land: an engine's tensors, and how they are poisoned and read.

    Args:
        engine: the engine's tensors by wire name, whole or in part.
        whole_specs: type and shape of each tensor that a refit fills of them, whole.
        staged: wire names that arrive in a staging buffer, and which the engine holds repacked
            under other names, or in another form.

    Raises:
        RefitError: the engine's tensors are not those that a refit of this precision fills.
    """

    def __init__(
        self,
        engine: Mapping[str, Tensor | Part],
        whole_specs: Mapping[str, WireSpec],
        staged: Collection[str] = (),
    ) -> None:
        self.parts = {name: x if isinstance(x, Part) else Part(x) for name, x in engine.items()}
        self.whole_specs, self.staged = whole_specs, staged
        self.part_specs = {name: spec_of(part.tensor) for name, part in self.parts.items()}
        """Type and shape of the part of each tensor that this engine holds."""
        self._compare()
        self.addresses = {name: part.tensor.data_ptr() for name, part in self.parts.items()}
        # The last rank of a vocabulary may hold padding alone, of which nothing is looked at.
        filled = [name for name, spec in self.part_specs.items() if 0 not in spec.shape]
        self.kv_scales = [name for name in filled if name.endswith(KV_SUFFIXES)]
        self.digested = [name for name in filled if not name.endswith(KV_SUFFIXES)]

    @cached_property
    def digests(self) -> Callable[[], Tensor]:
        """Return the object that digests all of `digested` in one launch.

        Raises:
            RefitError: a part ends within a word of the wire's.
        """
        return digests_of([self.placed(name, self.parts[name].tensor) for name in self.digested])

    @cached_property
    def sample(self) -> Sample:
        """Return the values of the linears, and of their scales, by which changes are counted."""
        linears = {n for n in self.whole_specs if is_linear(n, self.whole_specs[n].shape)}
        names = [n for n in self.digested if weight_of(n) in linears]
        return Sample([self.parts[name].tensor for name in names])

    @cached_property
    def watched(self) -> dict[str, tuple[str, list[Tensor]]]:
        """Return the kind of each tensor that is not empty, and views of what is poisoned of it."""
        names = [*self.digested, *self.kv_scales]
        return {name: _watched(name, self.parts[name].tensor) for name in names}

    def kv_bits(self) -> Tensor:
        """Return the 32 bits of each of `kv_scales`, as INT64."""
        scales = [self.parts[name].tensor for name in self.kv_scales]
        return torch.cat(scales).view(torch.int32).long()

    def placed(self, name: str, part: Tensor) -> Placed:
        """Place a tensor where the engine's part of that name stands in the whole.

        Raises:
            RefitError: the part begins or ends within a word of four bytes of the whole.
        """
        try:
            return placed(part, self.whole_specs[name].shape, self.parts[name].of_wire)
        except ValueError as error:
            raise RefitError([f"{name}: {error}"]) from error

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors of the wire to their places, a rank's part of each; many in a launch.

        Parts that are cut from columns take a launch each.

        Args:
            tensors: whole, in the type that the engine holds, by names of `parts`.
        """
        pairs = [(self.parts[name], tensor) for name, tensor in tensors]
        copies = [(part.tensor, x[part.of_wire] if part.of_wire else x) for part, x in pairs]
        by_way: dict[tuple[int, bool], list[tuple[Tensor, Tensor]]] = {}
        for to, tensor in copies:  # a launch takes many of one size whose values lie alike
            lie_alike = to.is_contiguous() and tensor.is_contiguous()
            by_way.setdefault((to.itemsize, lie_alike), []).append((to, tensor))
        for (size, _), some in by_way.items():
            bits = INTEGERS[size]
            torch._foreach_copy_([x.view(bits) for x, _ in some], [x.view(bits) for _, x in some])

    def poison(self, names: Iterable[str]) -> None:
        """Write NaN, which no trainer sends, into block scales and both ends of the rest.

        Packed four-bit numbers have no NaN: their scales stand for them.
        """
        by_dtype: dict[torch.dtype, list[Tensor]] = {}  # of one dtype, all go in a few launches
        for _, views in self._of(names).values():
            by_dtype.setdefault(views[0].dtype, []).extend(views)
        for dtype, some in by_dtype.items():
            if dtype == torch.uint8:
                nan_1 = torch.full((1,), FP8_NAN, dtype=dtype, device=some[0].device)
                torch._foreach_copy_(some, [nan_1] * len(some))
            else:
                torch._foreach_mul_(some, torch.nan)

    def poisoned(self, names: Iterable[str]) -> list[str]:
        """Return the names in which loading left the poison, or put an unusable scale.

        KV scales are compared by value instead.
        """
        by_kind: dict[str, dict[str, list[Tensor]]] = {}
        for name, (kind, views) in self._of(names).items():
            by_kind.setdefault(kind, {})[name] = views
        by_kind.pop("kv_scale", None)
        return [name for kind, some in by_kind.items() for name in _not_all(some, ARE_FINE[kind])]

    def _of(self, names: Iterable[str]) -> dict[str, tuple[str, list[Tensor]]]:
        return {name: self.watched[name] for name in names if name in self.watched}

    def _compare(self) -> None:
        problems = [
            f"{name}: the engine has no such tensor"
            for name in self.whole_specs.keys() - self.parts.keys()
        ]
        problems += [
            f"{name}: the engine holds it, a refit does not fill it"
            for name in self.parts.keys() - self.whole_specs.keys()
        ]
        for name, part in self.parts.items():
            spec, found = self.whole_specs.get(name), self.part_specs[name]
            if spec and found != (wanted := _spec_of_part(spec, part.of_wire)):
                problems.append(
                    f"{name}: the engine holds {found.dtype} {list(found.shape)}, a refit sends "
                    f"{wanted.dtype} {list(wanted.shape)}"
                )
        if problems:
            raise RefitError(sorted(problems))


class Sample:
    """Read the same values of some tensors, as often as is asked, and count the bytes that changed.

    Values are taken at equal distances through all tensors one after another, all of them if there
    are no more than `SAMPLED`. A tensor whose values do not lie side by side is left out.

    Args:
        tensors: all on one device, in memory that stays theirs.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        flat = [x.view(INTEGERS[x.itemsize]).view(-1) for x in tensors if x.is_contiguous()]
        step = -(-sum(map(len, flat)) // SAMPLED) | 1  # odd: else it would meet few columns
        self.by_size: dict[int, list[Tensor]] = {}
        before = 0
        for values in flat:
            taken = values[-before % step :: step]
            self.by_size.setdefault(values.itemsize, []).append(taken)
            before += len(values)
        self.bytes = sum(x.nbytes for some in self.by_size.values() for x in some)

    def read(self) -> list[Tensor]:
        """Return the sampled bytes as they are now, in a copy on their device."""
        return [torch.cat(some).view(torch.uint8) for some in self.by_size.values()]

    def changed(self, before: Sequence[Tensor]) -> Tensor:
        """Return how many bytes differ from an earlier `read`, INT64 `[1]` on their device."""
        counts = [(was != now).sum() for was, now in zip(before, self.read(), strict=True)]
        return torch.stack(counts).sum(0, keepdim=True)


def spec_of(tensor: Tensor) -> WireSpec:
    """Return type and shape of a tensor as the wire names them."""
    return WireSpec(wire_dtype(tensor.dtype), tuple(tensor.shape))


@cache
def wire_dtype(dtype: torch.dtype) -> str:
    """Return a type as the wire names it: `float8_e4m3fn`."""
    return str(dtype).removeprefix("torch.")


def _spec_of_part(spec: WireSpec, of_wire: tuple[slice, ...]) -> WireSpec:
    if not of_wire:
        return spec
    sides = zip(of_wire, spec.shape, strict=True)
    return WireSpec(spec.dtype, tuple(len(range(*part.indices(side))) for part, side in sides))


def _watched(name: str, tensor: Tensor) -> tuple[str, list[Tensor]]:
    """Return a tensor's kind and views of what is poisoned: FP32 scales whole, else both ends."""
    if tensor.dtype == FP8:
        return "fp8", _ends(tensor.view(torch.uint8))
    if weight_of(name) != name:
        return "scale", [tensor.flatten() if tensor.is_contiguous() else tensor]
    if not tensor.is_floating_point():
        return "plain", _ends(tensor.view(torch.uint8))
    return "kv_scale" if name.endswith(KV_SUFFIXES) else "plain", _ends(tensor)


def _ends(tensor: Tensor) -> list[Tensor]:
    """Return views of the first and the last element.

    Two of one element each: over a view of both, which is not dense, torch's operations for lists
    launch a kernel for each tensor.
    """
    at = tensor.storage_offset()
    last = sum((side - 1) * step for side, step in zip(tensor.shape, tensor.stride(), strict=True))
    return [tensor.as_strided((1,), (1,), at + offset) for offset in dict.fromkeys((0, last))]


def _not_all(
    watched: Mapping[str, Sequence[Tensor]], are_fine: Callable[[Tensor], Tensor]
) -> list[str]:
    """Return the names of tensors that hold a bad value; look one by one only if one does."""
    views = [
        view if view.ndim == 1 else view.flatten() for each in watched.values() for view in each
    ]
    fine = are_fine(torch.cat(views))
    if fine.all():
        return []
    verdicts = torch.stack([each.all() for each in fine.split([view.numel() for view in views])])
    names = [name for name, each in watched.items() for _ in each]
    bad = [name for name, passed in zip(names, verdicts.tolist(), strict=True) if not passed]
    return [*dict.fromkeys(bad)]
