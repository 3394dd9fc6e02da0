"""The receiver's book of one refit: what must come, what came, what the engine then holds.

What must arrive comes from `weights.wire_specs`, the same function that the sender asks, and is
compared with the engine's own tensors when the ledger opens. Block scales, and one element of every
other tensor, are then poisoned with NaN; at the end the scales must be finite and positive and no
poison left, KV scales must read as they were sent, and no storage address may have moved, since
CUDA graphs hold them.

`verify: full` adds a checksum of every tensor on both sides, the sender's taken before the wire,
the receiver's as it arrives and again from the engine's own memory: it sees a scale that is stale
but plausible.

An engine under tensor or expert parallelism holds a part of what is sent; the ledger is told which.
Thousands of tensors are poisoned and looked at in a few launches, and read once: names are looked
up one by one only after something failed.
"""

# pyright: reportPrivateImportUsage=false
# torch._foreach_* is documented and public, its underscore notwithstanding.
from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8_nemo import weights
from fp8_nemo.quantize import FP8
from fp8_nemo.weights import WireSpec

SENTINEL = "fp8_nemo.sentinel"
MANIFEST = "fp8_nemo.manifest"
SHOWN_PROBLEMS = 8  # a model of 18,000 expert weights may lose them all
FP8_NAN = 0x7F  # E4M3's NaN
KV_SUFFIXES = (".q_scale", ".k_scale", ".v_scale")
CHECKSUM_PERIOD = 65521  # prime: shifting bytes by any block or row size changes their factors
CHECKSUM_AT_ONCE = 2**26  # bytes, each of which takes 16 while it is summed


class RefitError(RuntimeError):
    """A refit that did not land whole; `problems` names every tensor that failed."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        more = len(self.problems) - SHOWN_PROBLEMS
        shown = self.problems[:SHOWN_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
        super().__init__("refit failed: " + "; ".join(shown))

    def __reduce__(self) -> tuple[type, tuple[list[str]]]:
        return RefitError, (self.problems,)  # through Ray, by its names and not its text


@dataclass(frozen=True)
class RefitProof:
    """What a refit is known to have done: `RefitProof(1_313_592, 14, 0)`."""

    bytes: int
    """Received over the wire, weights and scales."""
    verified_weights: int
    """FP8 weights whose bytes and scales the engine took from this refit."""
    checksums: int
    """Tensors whose bytes in the engine equal the sender's; 0 unless `verify: full`."""


class Part(NamedTuple):
    """What one engine holds of a tensor on the wire: `Part(view, (slice(0, 512), slice(None)))`."""

    tensor: Tensor
    """The engine's own memory."""
    of_wire: tuple[slice, ...] = ()
    """Which part of the wire's tensor it holds; all of it if empty."""


def checksum(tensor: Tensor) -> Tensor:
    """An order-sensitive sum of a tensor's bytes, INT64 scalar on its device.

    Byte i counts `1 + i mod 65521` times, so a permutation of blocks shows; 5e11 bytes fit.
    """
    bytes_N = tensor.detach().contiguous().view(torch.uint8).flatten()
    if bytes_N.is_cuda:
        from fp8_nemo import kernels

        return kernels.checksum(bytes_N, CHECKSUM_PERIOD)
    total = torch.zeros((), dtype=torch.int64, device=bytes_N.device)
    for start in range(0, bytes_N.numel(), CHECKSUM_AT_ONCE):
        some_N = bytes_N[start : start + CHECKSUM_AT_ONCE].long()
        index_N = torch.arange(start, start + some_N.numel(), device=some_N.device)
        total += (some_N * (1 + index_N % CHECKSUM_PERIOD)).sum()
    return total


class Ledger:
    """One refit, from the receiver's side.

    Args:
        expected: what the wire brings, `weights.wire_specs`.
        engine: the engine's tensors by wire name, whole or in part. Opening the ledger compares
            them with `held` and poisons them. Without it, only the wire is proven.
        held: what the engine should hold whole, where that is not what is sent: a sender in BF16
            feeds an engine that quantizes for itself.
        checksums: refuse a manifest without them (`verify: full`).

    Raises:
        RefitError: the engine's tensors are not those that a refit of this precision fills.
    """

    def __init__(
        self,
        expected: Mapping[str, WireSpec],
        engine: Mapping[str, Tensor | Part] | None = None,
        *,
        held: Mapping[str, WireSpec] | None = None,
        checksums: bool = False,
    ) -> None:
        self.expected, self.checksums = dict(expected), checksums
        self.held = self.expected if held is None else dict(held)
        self.engine = _parts(engine or {})
        self.received: dict[str, int] = {}
        self.kv_scales: dict[str, Tensor] = {}
        self.arrived_sums: dict[str, Tensor] = {}
        self.part_sums: dict[str, Tensor] = {}
        self.problems: list[str] = []
        self.manifest: dict[str, list[str]] | None = None
        self.sentinel = False
        if engine is not None:
            self._compare_engine()
        self.addresses = {name: part.tensor.data_ptr() for name, part in self.engine.items()}
        _poison({name: part.tensor for name, part in self.engine.items()})

    def receive(self, name: str, tensor: Tensor) -> bool:
        """Book one arrival; true if it is a tensor that the engine must now load.

        What is wrong is kept for `close`, so that one failed refit names everything that failed.
        """
        if name == SENTINEL:
            self.sentinel = True
        elif name == MANIFEST:
            self.manifest = read_manifest(tensor)
        elif problem := self._arrival_problem(name, tensor):
            self.problems.append(f"{name}: {problem}")
        else:
            self.received[name] = tensor.numel() * tensor.element_size()
            if name.endswith(KV_SUFFIXES):
                self.kv_scales[name] = tensor.clone()
            if self.checksums:
                self.arrived_sums[name] = checksum(tensor)
            if self.held.get(name) == self.expected[name]:
                self.loading(name, tensor, self.arrived_sums.get(name))
            return True
        return False

    def loading(self, name: str, tensor: Tensor, whole: Tensor | None = None) -> None:
        """Note, for `verify: full`, what the engine is about to load under a name.

        `receive` calls it, with the checksum that it has; whoever quantizes what arrived calls it
        again with the result.
        """
        part = self.engine.get(name)
        if self.checksums and part is not None:
            if part.of_wire:
                self.part_sums[name] = checksum(tensor[part.of_wire])
            else:
                self.part_sums[name] = checksum(tensor) if whole is None else whole

    def close(self, engine: Mapping[str, Tensor | Part] | None = None) -> RefitProof:
        """Settle the book.

        Args:
            engine: the engine's own tensors as they are now, looked up again, where loading may
                have put others in their place; by default those of the opening.

        Raises:
            RefitError: with the name of everything that was dropped, sent twice, unknown, of
                another type or shape, not loaded, or not what the sender had.
        """
        self.engine = _parts(engine) if engine else self.engine
        if any(part.tensor.is_cuda for part in self.engine.values()):
            torch.cuda.synchronize()  # NCCL's receiver loads on streams of its own
        problems = self.wire_problems()
        if self.engine and not problems:
            problems = [*self._engine_problems()]
        if problems:
            raise RefitError(problems)
        return RefitProof(
            bytes=sum(self.received.values()),
            verified_weights=sum(weights.scale_name(name) in self.held for name in self.received),
            checksums=len(self.part_sums),
        )

    def _compare_engine(self) -> None:
        problems = [
            f"{name}: the engine has no such tensor"
            for name in self.held.keys() - self.engine.keys()
        ]
        problems += [
            f"{name}: the engine holds it, a refit does not fill it"
            for name in self.engine.keys() - self.held.keys()
        ]
        for name, part in self.engine.items():
            spec, found = self.held.get(name), spec_of(part.tensor)
            if spec and found != (wanted := _spec_of_part(spec, part.of_wire)):
                problems.append(
                    f"{name}: the engine holds {found.dtype} {list(found.shape)}, a refit sends "
                    f"{wanted.dtype} {list(wanted.shape)}"
                )
        if problems:
            raise RefitError(sorted(problems))

    def _arrival_problem(self, name: str, tensor: Tensor) -> str:
        spec = self.expected.get(name)
        if spec is None:
            return "unknown name"
        if name in self.received:
            return "sent twice"
        found = spec_of(tensor)
        if found.dtype != spec.dtype:
            return f"wrong dtype {found.dtype}, expected {spec.dtype}"
        if found.shape != spec.shape:
            return f"wrong shape {list(found.shape)}, expected {list(spec.shape)}"
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
        elif self.checksums and len(self.manifest["sums"]) != len(self.expected):
            yield f"{MANIFEST}: lacks checksums, which verify=full needs"
        elif set(self.manifest["names"]) != set(self.expected):
            yield f"{MANIFEST}: lists other tensors than this engine expects"
        elif self.checksums:
            yield from self._altered(self.arrived_sums, "arrived with other bytes than were sent")

    def _altered(self, sums: Mapping[str, Tensor], what: str) -> Iterator[str]:
        assert self.manifest is not None
        sent = dict(zip(self.manifest["names"], self.manifest["sums"], strict=True))
        for name, value in on_host(sums).items():
            if value != int(sent[name], 16):
                yield f"{name}: {what} (checksum)"

    def _engine_problems(self) -> Iterator[str]:
        tensors = {name: part.tensor for name, part in self.engine.items()}
        loaded = {name: tensors[name] for name in tensors.keys() - self.kv_scales.keys()}
        for name in sorted(_poisoned(loaded)):
            yield f"{name}: arrived, and was not loaded: the engine still holds its poison"
        held = on_host({name: tensors[name] for name in self.kv_scales})
        for name, sent in on_host(self.kv_scales).items():
            if held[name] != sent:
                yield f"{name}: the engine holds {held[name]}, sent {sent}"
        for name, address in self.addresses.items():
            if tensors[name].data_ptr() != address:
                yield f"{name}: its storage moved, CUDA graphs would read the old one"
        now = {name: checksum(tensors[name]) for name in self.part_sums}
        loaded_sums = on_host(self.part_sums)
        for name, value in on_host(now).items():
            if value != loaded_sums[name]:
                yield f"{name}: the engine's bytes are not the sender's (checksum)"


def failing(verdicts: Mapping[str, Tensor]) -> list[str]:
    """Names whose verdict, a boolean on the device, is false: one read for all of them."""
    if not verdicts:
        return []
    passed = torch.stack(list(verdicts.values())).tolist()
    return [name for name, ok in zip(verdicts, passed, strict=True) if not ok]


def on_host(numbers: Mapping[str, Tensor]) -> dict[str, Any]:
    """One number each, in one read for all; of one type, or of types that promote without loss."""
    if not numbers:
        return {}
    flat = [number.flatten() for number in numbers.values()]
    return dict(zip(numbers, torch.cat(flat).tolist(), strict=True))


def manifest(names: list[str], sums: list[Tensor]) -> Tensor:
    """Names, and checksums of fixed width: the manifest's shape never changes between refits."""
    host_sums = torch.stack(sums).tolist() if sums else []
    text = json.dumps({"names": names, "sums": [f"{value:016x}" for value in host_sums]})
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def read_manifest(tensor: Tensor) -> dict[str, list[str]] | None:
    """What `manifest` wrote; None if it did not arrive whole."""
    try:
        return json.loads(tensor.cpu().numpy().tobytes())
    except ValueError:
        return None


def spec_of(tensor: Tensor) -> WireSpec:
    """Type and shape of a tensor as the wire names them."""
    return WireSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _parts(engine: Mapping[str, Tensor | Part]) -> dict[str, Part]:
    return {name: x if isinstance(x, Part) else Part(x) for name, x in engine.items()}


def _spec_of_part(spec: WireSpec, of_wire: tuple[slice, ...]) -> WireSpec:
    if not of_wire:
        return spec
    sides = zip(of_wire, spec.shape, strict=True)
    return WireSpec(spec.dtype, tuple(len(range(*part.indices(side))) for part, side in sides))


def _poison(tensors: Mapping[str, Tensor]) -> None:
    """NaN, which no trainer sends, into all of a block scale and the first element of the rest."""
    scales, bytes_, others = _by_poison(tensors)
    by_dtype: dict[torch.dtype, list[Tensor]] = {}  # of one dtype, all go in a few launches
    for tensor in (*scales.values(), *others.values()):
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for some in by_dtype.values():
        torch._foreach_mul_(some, torch.nan)
    if bytes_:
        nan = torch.full((), FP8_NAN, dtype=torch.uint8, device=next(iter(bytes_.values())).device)
        torch._foreach_copy_(list(bytes_.values()), [nan] * len(bytes_))


def _poisoned(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors in which loading has left the poison, or put a scale that is none."""
    scales, bytes_, others = _by_poison(tensors)
    found: list[str] = []
    if scales:
        all_N = torch.cat([scale.flatten() for scale in scales.values()])
        if not (torch.isfinite(all_N) & (all_N > 0)).all():
            live = {n: (torch.isfinite(scale) & (scale > 0)).all() for n, scale in scales.items()}
            found += failing(live)
    if bytes_:
        first_N = torch.stack(list(bytes_.values())).tolist()
        nan = (FP8_NAN, FP8_NAN | 0x80)
        found += [name for name, first in zip(bytes_, first_N, strict=True) if first in nan]
    found += [name for name, first in on_host(others).items() if not math.isfinite(first)]
    return found


def _by_poison(
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Block scales whole; the first byte of FP8 weights; the first element of the rest."""
    scales, bytes_, others = {}, {}, {}
    for name, tensor in tensors.items():
        if not tensor.numel():  # the last rank of a vocabulary may hold padding alone
            continue
        if name.endswith(weights.SCALE_SUFFIX):
            scales[name] = tensor
        elif tensor.dtype == FP8:
            bytes_[name] = tensor.view(torch.uint8).as_strided((), ())
        else:
            others[name] = tensor.as_strided((), ())
    return scales, bytes_, others
