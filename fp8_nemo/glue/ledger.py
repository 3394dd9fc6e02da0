"""The receiver's book of one refit: what must come, what came, what the engine then holds.

What must arrive comes from `weights.wire_specs`, the same function that the sender asks, and is
compared with the engine's own tensors when the ledger opens. Block scales, and one element of every
other tensor, are then poisoned with NaN; at the end the scales must be finite and positive and no
poison left, KV scales must be those that the manifest says, and no storage address may have moved,
since CUDA graphs hold them.

`verify: full` adds a checksum of every tensor on both sides, the sender's taken before the wire,
the receiver's as it arrives and again from the engine's own memory: it sees a scale that is stale
but plausible.

An engine under tensor or expert parallelism holds a part of what is sent; the ledger is told which.
Thousands of tensors are poisoned and looked at in a few launches, and read once: names are looked
up one by one only after something failed. What is the same in every refit, a `Destination` works
out once.
"""

# pyright: reportPrivateImportUsage=false
# torch._foreach_* is documented and public, its underscore notwithstanding.
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8_nemo.glue import wire as weights
from fp8_nemo.glue.manifest import (
    KV_SUFFIXES,
    MANIFEST,
    SENTINEL,
    Manifest,
    checksum,
    read_manifest,
)
from fp8_nemo.glue.quantize import FP8
from fp8_nemo.glue.wire import RefitError, WireSpec
from fp8_nemo.recipe.options import FORMATS

FP8_NAN = FORMATS["fp8"].nan


@dataclass(frozen=True)
class RefitProof:
    """What a refit is known to have done: `RefitProof(1_313_592, 14, 0)`."""

    bytes: int
    """Received over the wire, weights and scales."""
    verified_weights: int
    """FP8 weights whose bytes and scales the engine took from this refit."""
    checksums: int
    """Tensors whose bytes in the engine equal the sender's; 0 unless `verify: full`."""
    sent: Mapping[str, int] = field(default_factory=dict)
    """The sender's checksum of each tensor; empty unless `verify: full`."""


class Part(NamedTuple):
    """What one engine holds of a tensor on the wire: `Part(view, (slice(0, 512), slice(None)))`."""

    tensor: Tensor
    """The engine's own memory."""
    of_wire: tuple[slice, ...] = ()
    """Which part of the wire's tensor it holds; all of it if empty."""


class Destination:
    """Where refits land: an engine's tensors, and what of each is poisoned and looked at.

    Args:
        engine: the engine's tensors by wire name, whole or in part.
        held: what a refit fills of them, whole.

    Raises:
        RefitError: the engine's tensors are not those that a refit of this precision fills.
    """

    def __init__(self, engine: Mapping[str, Tensor | Part], held: Mapping[str, WireSpec]) -> None:
        self.parts = {name: x if isinstance(x, Part) else Part(x) for name, x in engine.items()}
        self.held = held
        self._compare()
        self.addresses = {name: part.tensor.data_ptr() for name, part in self.parts.items()}
        self.scales: dict[str, Tensor] = {}
        """Block scales, whole."""
        self.bytes: dict[str, Tensor] = {}
        """The first byte of FP8 weights."""
        self.others: dict[str, Tensor] = {}
        """The first element of the rest."""
        for name, part in self.parts.items():
            tensor = part.tensor
            if not tensor.numel():  # the last rank of a vocabulary may hold padding alone
                continue
            if name.endswith(weights.SCALE_SUFFIX):
                # As a view, once: 224 of 8B's take a host 0.2 ms, and flattening a row is free.
                self.scales[name] = tensor.flatten() if tensor.is_contiguous() else tensor
            elif tensor.dtype == FP8:
                self.bytes[name] = tensor.view(torch.uint8).as_strided((1,), (1,))
            else:
                self.others[name] = tensor.as_strided((1,), (1,))

    def poison(self) -> None:
        """NaN, which no trainer sends, into all of a block scale and one element of the rest."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}  # of one dtype, all go in a few launches
        for tensor in (*self.scales.values(), *self.others.values()):
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for some in by_dtype.values():
            torch._foreach_mul_(some, torch.nan)
        if first := [*self.bytes.values()]:
            nan_1 = torch.full((1,), FP8_NAN, dtype=torch.uint8, device=first[0].device)
            torch._foreach_copy_(first, [nan_1] * len(first))

    def poisoned(self) -> list[str]:
        """Names in which loading has left the poison, or put a scale that is none, but KV scales'.

        Those are compared by value.
        """
        found: list[str] = []
        if self.scales:
            all_N = torch.cat([scale.flatten() for scale in self.scales.values()])
            if not (torch.isfinite(all_N) & (all_N > 0)).all():
                fine = {n: (torch.isfinite(x) & (x > 0)).all() for n, x in self.scales.items()}
                found += [name for name, passed in on_host(fine).items() if not passed]
        if self.bytes:
            nan = (FP8_NAN, FP8_NAN | 0x80)
            found += [n for n, first in on_host(self.bytes).items() if first in nan]
        others = {n: x for n, x in self.others.items() if not n.endswith(KV_SUFFIXES)}
        return found + [n for n, first in on_host(others).items() if not math.isfinite(first)]

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
            spec, found = self.held.get(name), spec_of(part.tensor)
            if spec and found != (wanted := _spec_of_part(spec, part.of_wire)):
                problems.append(
                    f"{name}: the engine holds {found.dtype} {list(found.shape)}, a refit sends "
                    f"{wanted.dtype} {list(wanted.shape)}"
                )
        if problems:
            raise RefitError(sorted(problems))


class Ledger:
    """One refit, from the receiver's side; opening it poisons the destination.

    Example: `engine` maps wire names to tensors, `stream` is what `refit_stream` sent::

        ledger = Ledger(specs, Destination(engine, specs))
        for name, tensor in stream:
            if ledger.receive(name, tensor):
                engine[name].copy_(tensor)
        proof = ledger.close()

    Args:
        expected: what the wire brings, `weights.wire_specs`.
        destination: the engine's; what it holds whole need not be what is sent: a sender in BF16
            feeds an engine that quantizes for itself. Without one, only the wire is proven.
        checksums: refuse a manifest without them (`verify: full`).
    """

    def __init__(
        self,
        expected: Mapping[str, WireSpec],
        destination: Destination | None = None,
        *,
        checksums: bool = False,
    ) -> None:
        self.expected, self.destination, self.checksums = expected, destination, checksums
        self.received: dict[str, int] = {}
        self.arrived_sums: dict[str, Tensor] = {}
        self.part_sums: dict[str, Tensor] = {}
        self.problems: list[str] = []
        self.manifest_bytes: Tensor | None = None
        self.sentinel = False
        if destination is not None:
            destination.poison()

    @cached_property
    def manifest(self) -> Manifest | None:
        """Read when the stream has ended: reading waits until all that was sent is loaded.

        NCCL's receiver loads on streams of its own, and its host goes ahead of them.
        """
        if self.manifest_bytes is None:
            return None
        if self.manifest_bytes.is_cuda:
            torch.cuda.synchronize(self.manifest_bytes.device)
        return read_manifest(self.manifest_bytes)

    def receive(self, name: str, tensor: Tensor) -> bool:
        """Book one arrival; true if it is a tensor that the engine must now load.

        What is wrong is kept for `close`, so that one failed refit names everything that failed.
        """
        if name == SENTINEL:
            self.sentinel = True
        elif name == MANIFEST:
            self.manifest_bytes = tensor.clone()  # of a buffer that is used again
        elif problem := self._arrival_problem(name, tensor):
            self.problems.append(f"{name}: {problem}")
        else:
            self.received[name] = tensor.nbytes
            if self.checksums:
                self.arrived_sums[name] = checksum(tensor)
                if self.destination and self.destination.held.get(name) == self.expected[name]:
                    self.loading(name, tensor, self.arrived_sums[name])
            return True
        return False

    def loading(self, name: str, tensor: Tensor, whole: Tensor | None = None) -> None:
        """Note, for `verify: full`, what the engine is about to load under a name.

        `receive` calls it, with the checksum that it has; whoever quantizes what arrived calls it
        again with the result.
        """
        part = self.destination.parts.get(name) if self.checksums and self.destination else None
        if part is not None:
            if part.of_wire:
                self.part_sums[name] = checksum(tensor[part.of_wire])
            else:
                self.part_sums[name] = checksum(tensor) if whole is None else whole

    def close(self, look: Callable[[], Destination] | None = None) -> RefitProof:
        """Settle the book.

        Args:
            look: gives the engine's own tensors as they are now, where loading may have put others
                in their place; by default those of the opening are looked at.

        Raises:
            RefitError: with the name of everything that was dropped, sent twice, unknown, of
                another type or shape, not loaded, or not what the sender had.
        """
        opened = self.destination
        problems = self.wire_problems()
        if opened and not problems:
            problems = [*self._engine_problems(opened, look() if look else opened)]
        if problems:
            raise RefitError(problems)
        held = opened.held if opened else self.expected
        return RefitProof(
            bytes=sum(self.received.values()),
            verified_weights=sum(weights.scale_name(name) in held for name in self.received),
            checksums=len(self.part_sums),
            sent=self._sent_sums() if self.checksums else {},
        )

    def _arrival_problem(self, name: str, tensor: Tensor) -> str:
        spec = self.expected.get(name)
        if spec is None:
            return "unknown name"
        if name in self.received:
            return "sent twice"
        if (dtype := _dtype(tensor.dtype)) != spec.dtype:
            return f"wrong dtype {dtype}, expected {spec.dtype}"
        if tensor.shape != spec.shape:
            return f"wrong shape {list(tensor.shape)}, expected {list(spec.shape)}"
        return ""

    def wire_problems(self) -> list[str]:
        """What is known to be wrong with what came, before the engine is looked at."""
        return [*self.problems, *self._missing()]

    def _missing(self) -> Iterator[str]:
        named = {problem.split(":")[0] for problem in self.problems}
        for name in self.expected:
            if name not in self.received and name not in named:
                yield f"{name}: never arrived"
        if not self.sentinel:
            yield f"{SENTINEL}: never arrived, so this stream is not ours"
        if self.manifest is None:
            yield f"{MANIFEST}: never arrived whole, so the stream was cut short"
        elif self.checksums and len(self.manifest.sums) != len(self.expected):
            yield f"{MANIFEST}: lacks checksums, which verify=full needs"
        elif set(self.manifest.names) != set(self.expected):
            yield f"{MANIFEST}: lists other tensors than this engine expects"
        elif self.checksums:
            yield from self._altered(self.arrived_sums, "arrived with other bytes than were sent")

    def _sent_sums(self) -> dict[str, int]:
        assert self.manifest is not None
        return dict(zip(self.manifest.names, self.manifest.sums, strict=True))

    def _altered(self, sums: Mapping[str, Tensor], what: str) -> Iterator[str]:
        sent = self._sent_sums()
        for name, value in on_host(sums).items():
            if value != sent[name]:
                yield f"{name}: {what} (checksum)"

    def _engine_problems(self, opened: Destination, now: Destination) -> Iterator[str]:
        for name in sorted(now.poisoned()):
            yield f"{name}: arrived, and was not loaded: the engine still holds its poison"
        assert self.manifest is not None
        sent = self.manifest.kv_scales
        for name, scale in on_host({name: now.parts[name].tensor for name in sent}).items():
            if scale != sent[name]:
                yield f"{name}: the engine holds {scale}, sent {sent[name]}"
        for name, address in opened.addresses.items():
            if now.parts[name].tensor.data_ptr() != address:
                yield f"{name}: its storage moved, CUDA graphs would read the old one"
        sums = {name: checksum(now.parts[name].tensor) for name in self.part_sums}
        loaded_sums = on_host(self.part_sums)
        for name, value in on_host(sums).items():
            if value != loaded_sums[name]:
                yield f"{name}: the engine's bytes are not the sender's (checksum)"


def on_host(numbers: Mapping[str, Tensor]) -> dict[str, Any]:
    """One number each, in one read for all; of one type, or of types that promote without loss."""
    if not numbers:
        return {}
    flat = [number.flatten() for number in numbers.values()]
    return dict(zip(numbers, torch.cat(flat).tolist(), strict=True))


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
