"""Check one refit on the receiver's side: what must arrive, what did, what the engine then holds.

`wire.wire_specs` says what must arrive; the sender asks the same function. When the stream has
ended, its number must be the receiver's own count, KV scales must equal those in the manifest, and
no storage address may have changed, because CUDA graphs hold the addresses.

`verify: bytes` compares the digest of every tensor in the engine's own memory with the sender's
(`digest.py`). One launch digests all of them, and the host reads the digests together with the
manifest. A tensor that the engine holds in part, or in another form than it arrived in, is digested
twice: whole on arrival, and in the part or form that the engine then loads. So each tensor of the
engine has a digest to compare with, but KV scales, which are compared by value, and what an engine
quantizes by itself.

`verify: names` poisons before the refit: it writes NaN into block scales, and into the first and
the last element of every other tensor. At the end scales must be finite and positive, and no poison
may be left. It does not notice a stale but plausible value. `bytes` poisons only what an engine
quantizes for itself.

Either way the proof of a later refit says how much of the engine it changed: a sample of the
linears' bytes is copied before the refit and compared at its end (`destination.Sample`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fp8_nemo.glue.destination import Destination, wire_dtype
from fp8_nemo.glue.digest import Placed, digests_of, placed
from fp8_nemo.glue.manifest import (
    KV_SUFFIXES,
    MANIFEST,
    SENTINEL,
    Manifest,
    hash_of,
    read_manifest,
    scale_of,
)
from fp8_nemo.glue.wire import RefitError, WireSpec, weight_of

CHANGED = "changed bytes"
CUT_SHORT = f"{MANIFEST}: never arrived whole, so the stream was cut short"


@dataclass(frozen=True)
class RefitProof:
    """State what a refit is known to have done: `RefitProof(1_313_592, 14, 0)`."""

    bytes: int
    """Received over the wire, weights and scales."""
    verified_weights: int
    """Quantized weights that arrived, or were kept, and are in the engine: with `bytes` by their
    bytes, with `names` or where the engine quantizes by itself as no poison is left."""
    equal_digests: int
    """Tensors whose bytes in the engine equal what was sent; 0 unless `verify: bytes`."""
    sent_digests: bytes = b""
    """The sender's digests, eight bytes each, in the order of the stream, without KV scales."""
    changed: int = 0
    """Of the `sampled` bytes, those that differ from what the engine held before."""
    sampled: int = 0
    """Bytes of the linears that were compared, their scales' among them."""
    number: int = 0
    """Of the refit, from 1 on; 0 if nobody counts."""


class Ledger:
    """Check one refit on the receiver's side: what must arrive, what did, what the engine holds.

    Example: `engine` maps wire names to tensors, `stream` is what `refit_stream` sent::

        ledger = Ledger(specs, Destination(engine, specs))
        for name, tensor in stream:
            if ledger.receive(name, tensor):
                engine[name].copy_(tensor)
        proof = ledger.close()

    Where the engine holds parts of tensors, or other forms of them, its loader calls `arrived`, and
    `loading` too unless `engine_quantizes`. To make a ledger writes poison into the engine.

    Args:
        expected: what the wire brings, from `wire.wire_specs`.
        destination: the engine's tensors. Their form may differ from what is sent: an engine that
            quantizes for itself receives BF16.
        verify: `bytes` compares digests, `names` looks for poison alone (see the module).
        number: of this refit, as the receiver counts from 1. With 0, not counted, at both ends an
            earlier refit that is sent again passes.
        kept: digests of what this refit does not send, from the proof of an earlier one. The engine
            must still hold these bytes when this refit ends. With `kept` each tensor that is sent
            must have the type that the engine holds, whole or in part.
        engine_quantizes: whether the engine makes its quantized weights by itself; then only poison
            is looked for in them.
    """

    def __init__(
        self,
        expected: Mapping[str, WireSpec],
        destination: Destination,
        *,
        verify: str = "bytes",
        number: int = 0,
        kept: Mapping[str, int] | None = None,
        engine_quantizes: bool = False,
    ) -> None:
        self.expected, self.destination, self.number = expected, destination, number
        self.kept = kept or {}
        self.digests: dict[str, int] = {}
        """Of all that the engine holds; known once `close` has found no fault."""
        self.is_digested = verify != "names"
        self.received: dict[str, int] = {}
        self.problems: list[str] = []
        self.manifest_bytes: Tensor | None = None
        self.manifest: Manifest | None = None
        """Known once `close` has read it."""
        self.sentinel = False
        self.arrived_digests, self.loaded_digests = _Digests(), _Digests()
        parts, wholes = destination.part_specs, destination.whole_specs
        unequal = {name for name in parts.keys() - self.kept if expected.get(name) != parts[name]}
        made_here = {name for name in unequal if expected.get(name) != wholes[name]}
        self.transformed = unequal | {*destination.staged}
        """Names that the engine holds in part, or in another form than they arrive in."""
        self.poisoned: Collection[str] = made_here if self.is_digested else parts.keys()
        self.undigested = made_here if engine_quantizes else set[str]()
        """Names in which only poison is looked for."""
        self.before = destination.sample.read() if number != 1 else []
        """Sampled bytes of the engine's linears, from before the refit; none of refit 1."""
        destination.poison(self.poisoned)

    def receive(self, name: str, tensor: Tensor) -> bool:
        """Record one arrival and return whether the engine must now load the tensor.

        A problem is kept until `close`, so that one failed refit names everything that failed.
        """
        if name == SENTINEL:
            self.sentinel = True
        elif name == MANIFEST:
            self.manifest_bytes = tensor.clone()  # its buffer will be used again
        elif problem := self._arrival_problem(name, tensor):
            self.problems.append(f"{name}: {problem}")
        else:
            self.received[name] = tensor.nbytes
            return True
        return False

    def arrived(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Digest the arrived tensors that the engine holds in part or in another form.

        Args:
            tensors: those for which `receive` was true; called before their memory is reused. A
                receiver with a staging buffer calls it with what lies there, before it repacks.
        """
        some = self._transformed(tensors)
        self.arrived_digests.book([name for name, _ in some], [placed(x, x.shape) for _, x in some])
        wholes = self.destination.whole_specs
        self.loading([(name, x) for name, x in some if wholes.get(name) == self.expected[name]])

    def loading(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Digest this engine's part of each tensor that it is about to load.

        `arrived` calls it. A receiver that quantizes or repacks what arrived calls it with the
        result.
        """
        some, to = self._transformed(tensors), self.destination
        parts = [to.placed(n, x[to.parts[n].of_wire or ...]) for n, x in some]
        self.loaded_digests.book([name for name, _ in some], parts)

    def close(self, look: Callable[[], Destination] | None = None) -> RefitProof:
        """Check the whole refit with one read on the host, and return its proof.

        Args:
            look: returns the engine's tensors as they are now, for an engine whose loading may
                replace them; by default the tensors of the start are checked.

        Raises:
            RefitError: with the name of everything that was dropped, sent twice, unknown, of
                another type or shape, not loaded, or not what the sender had.
        """
        if problems := self._known_problems():
            raise RefitError(problems)
        opened = self.destination
        now = look() if look else opened
        asked = self._ask(now)
        # The device digests the engine meanwhile.
        moved = [*_moved(opened, now)]
        named = {*opened.whole_specs, *opened.staged}
        scaled = {weight for name in named if (weight := weight_of(name)) != name}
        verified = len(scaled.intersection([*self.received, *self.kept]))
        found = self._read(asked)
        if problems := self._wire_problems(found):
            raise RefitError(problems)
        wanted = self._wanted(found)
        if problems := [*moved, *self._engine_problems(found, wanted, now)]:
            raise RefitError(problems)
        assert self.manifest is not None  # `_wire_problems` has refused a stream without one
        sent, self.digests = self.manifest.digests, found.in_engine
        return RefitProof(
            bytes=sum(self.received.values()),
            verified_weights=verified,
            equal_digests=len(wanted.keys() & found.in_engine.keys()),
            sent_digests=struct.pack(f"{len(sent)}q", *sent),
            changed=sum(found.changed.values()),
            sampled=opened.sample.bytes if self.before else 0,
            number=self.number,
        )

    def wire_problems(self) -> list[str]:
        """Return the problems of what arrived, without looking at the engine."""
        return self._known_problems() or self._wire_problems(self._read(self._ask(None)))

    def _arrival_problem(self, name: str, tensor: Tensor) -> str:
        spec = self.expected.get(name)
        if spec is None:
            return "unknown name"
        if name in self.received:
            return "sent twice"
        if (dtype := wire_dtype(tensor.dtype)) != spec.dtype:
            return f"wrong dtype {dtype}, expected {spec.dtype}"
        if tensor.shape != spec.shape:
            return f"wrong shape {list(tensor.shape)}, expected {list(spec.shape)}"
        return ""

    def _transformed(self, tensors: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        if not self.is_digested:
            return []
        return [
            (name, x)
            for name, x in tensors
            if name in self.transformed and not name.endswith(KV_SUFFIXES)
        ]

    def _known_problems(self) -> list[str]:
        """Return the problems that are known without reading a tensor."""
        named = {problem.split(":")[0] for problem in self.problems}
        lost = [name for name in self.expected if name not in self.received and name not in named]
        found = [*self.problems, *(f"{name}: never arrived" for name in lost)]
        if not self.sentinel:
            found.append(f"{SENTINEL}: never arrived, so this stream is not ours")
        if self.manifest_bytes is None:
            found.append(CUT_SHORT)
        return found

    def _ask(self, now: Destination | None) -> _Asked:
        """Ask the device for all numbers of this refit, and do not wait for the engine's digests.

        It waits for what was launched before: NCCL's receiver loads on its own streams, ahead of
        which the host runs.
        """
        assert self.manifest_bytes is not None
        if self.manifest_bytes.is_cuda:
            torch.cuda.synchronize(self.manifest_bytes.device)
        manifest = self.manifest_bytes.flatten().view(torch.uint8)
        manifest = manifest[: len(manifest) // 8 * 8].view(torch.int64)
        digested = now.digested if now and self.is_digested else []
        kv_scales = now.kv_scales if now else []
        changed = [CHANGED] if now and self.before else []
        of_engine = []
        if now and digested:
            of_engine.append(now.digests())
        if now and kv_scales:
            of_engine.append(now.kv_bits())
        if changed:
            of_engine.append(self.destination.sample.changed(self.before))
        arrived, loaded = self.arrived_digests, self.loaded_digests
        numbers = torch.cat([manifest, *arrived.tensors, *loaded.tensors, *of_engine])
        names = [arrived.names, loaded.names, digested, kv_scales, changed]
        return _Asked(numbers, len(manifest), names)

    def _read(self, asked: _Asked) -> _Found:
        """Read on the host what `_ask` asked for, all at once."""
        read = asked.numbers.tolist()
        kv_names = [name for name in self.received if name.endswith(KV_SUFFIXES)]
        self.manifest = read_manifest(read[: asked.manifest], kv_names)
        rest = iter(read[asked.manifest :])
        found = _Found(*(dict(zip(some, rest, strict=False)) for some in asked.names))
        assert not [*rest], "a number without a name"
        return found

    @cached_property
    def _sent(self) -> dict[str, int]:
        assert self.manifest is not None
        names = [name for name in self.received if not name.endswith(KV_SUFFIXES)]
        return dict(zip(names, self.manifest.digests, strict=True))

    def _wanted(self, found: _Found) -> dict[str, int]:
        """Return the digests that the engine's memory must have, by name."""
        if not self.is_digested:
            return {}
        sent = {name: x for name, x in self._sent.items() if name not in self.transformed}
        return {**self.kept, **sent, **found.loaded}

    def _wire_problems(self, found: _Found) -> list[str]:
        if (sent := self.manifest) is None:
            return [CUT_SHORT]
        if sent.names_hash != hash_of(self.received):
            return [f"{MANIFEST}: lists other tensors than this engine expects"]
        if sent.number != self.number:
            return [
                f"{MANIFEST}: is of refit {sent.number}, this engine expects refit {self.number}"
            ]
        if not self.is_digested:
            return []
        if len(sent.digests) + len(sent.kv_scales) != len(self.received):
            return [f"{MANIFEST}: lacks digests, which verify=bytes needs"]
        was = self._sent
        missing = [n for n in was if n in self.transformed and n not in found.arrived]
        return [
            *(f"{name}: was not digested on arrival" for name in missing),
            *(
                f"{name}: arrived with other bytes than were sent (digest)"
                for name, value in found.arrived.items()
                if value != was[name]
            ),
        ]

    def _engine_problems(
        self, found: _Found, wanted: Mapping[str, int], now: Destination
    ) -> Iterator[str]:
        assert self.manifest is not None
        for name in sorted(now.poisoned(self.poisoned)):
            yield f"{name}: arrived, and was not loaded: the engine still holds its poison"
        for name, scale in self.manifest.kv_scales.items():
            if (held := scale_of(found.kv_scales[name])) != scale:
                yield f"{name}: the engine holds {held}, sent {scale}"
        for name, value in found.in_engine.items():
            if name not in wanted and name not in self.undigested:
                yield f"{name}: was not digested before it was loaded"
            elif wanted.get(name, value) != value:
                whose = "those of the refit before" if name in self.kept else "the sender's"
                yield f"{name}: the engine's bytes are not {whose} (digest)"


def _moved(opened: Destination, now: Destination) -> Iterator[str]:
    for name, address in opened.addresses.items():
        if now.parts[name].tensor.data_ptr() != address:
            yield f"{name}: its storage moved, CUDA graphs would read the old one"


class _Digests:
    """Hold digests on their device, and the names that they belong to."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.tensors: list[Tensor] = []

    def book(self, names: Sequence[str], parts: Sequence[Placed]) -> None:
        """Digest some tensors as they are now, and keep the digests on their device."""
        if names:
            self.names += names
            self.tensors.append(digests_of(parts)())


class _Asked(NamedTuple):
    """Hold numbers on their device, INT64: a manifest's, then one for each of the names."""

    numbers: Tensor
    manifest: int
    """How many are the manifest's."""
    names: Sequence[Sequence[str]]
    """By field of `_Found`."""


class _Found(NamedTuple):
    """Hold what was read at the end, by name: digests, the bits of KV scales, a count."""

    arrived: dict[str, int]
    loaded: dict[str, int]
    in_engine: dict[str, int]
    kv_scales: dict[str, int]
    changed: dict[str, int]
