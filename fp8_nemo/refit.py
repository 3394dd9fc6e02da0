"""Copying trainer weights into the engine, so that it lands whole or the run stops with a name.

The stream, in a fixed order with fixed shapes: a sentinel, the trainer's weights in export order
(each FP8 weight followed by its `scale_inv`), the KV scales, a manifest. The receiver keeps a
ledger. What must arrive comes from `weights.wire_specs`, the same function that the sender asks,
and is compared with the engine's own tensors when the ledger opens. Block scales, and one element
of every other tensor, are then poisoned with NaN; at the end the scales must be finite and
positive and no poison left, KV scales must read as they were sent, and no storage address may have
moved, since CUDA graphs hold them.

`verify: full` adds a checksum of every tensor on both sides, the sender's taken before the wire,
the receiver's from the engine's own memory: it sees a scale that is stale but plausible.

Weights that are not finite are refused before the manifest is sent: every weight leaves its
verdict on the device, and all are read at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8_nemo import weights
from fp8_nemo.quantize import FP8, quantize_blocks
from fp8_nemo.schema import Precision
from fp8_nemo.weights import WireSpec

SENTINEL = "fp8_nemo.sentinel"
MANIFEST = "fp8_nemo.manifest"
SHOWN_PROBLEMS = 8  # a model of 18,000 expert weights may lose them all
FP8_NAN = 0x7F  # E4M3's NaN
KV_SUFFIXES = (".q_scale", ".k_scale", ".v_scale")
CHECKSUM_PERIOD = 65521  # prime: shifting bytes by any block or row size changes their factors


class RefitError(RuntimeError):
    """A refit that did not land whole; `problems` names every tensor that failed."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = list(problems)
        more = len(self.problems) - SHOWN_PROBLEMS
        shown = self.problems[:SHOWN_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])
        super().__init__("refit failed: " + "; ".join(shown))


@dataclass(frozen=True)
class RefitProof:
    """What a refit is known to have done: `RefitProof(1_313_592, 14, 0)`."""

    bytes: int
    """Received over the wire, weights and scales."""
    verified_weights: int
    """FP8 weights that arrived and were loaded, each with its scales."""
    checksums: int
    """Tensors whose bytes in the engine equal the sender's; 0 unless `verify: full`."""


def refit_stream(
    named_weights: Iterable[tuple[str, Tensor]],
    precision: Precision,
    kv_scales: Mapping[str, float] | None,
    *,
    num_layers: int,
    metadata_only: bool = False,
    checksums: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Everything that one refit sends, by name.

    Args:
        named_weights: the trainer's weights in export order; slabs of experts allowed.
        precision: the recipe's precision.
        kv_scales: `recalibrate.kv_scales`; None where the cache is BF16.
        num_layers: layers of the model.
        metadata_only: NeMo RL runs the stream once at set-up for names, types and shapes, before
            any KV scale exists: NaN stands in for them.
        checksums: let the manifest carry one per tensor (`verify: full`).

    Raises:
        RefitError: a weight is not finite, or a KV scale is missing or not finite and positive.
    """
    names: list[str] = []
    sums: list[Tensor] = []
    nonfinite: dict[str, Tensor] = {}
    device = torch.device("cpu")
    yield SENTINEL, torch.zeros(1, dtype=torch.uint8)
    for name, weight in named_weights:
        device = weight.device
        nonfinite[name] = torch.zeros((), dtype=torch.bool, device=device)
        for wire, tensor in _encode(name, weight, precision, num_layers, nonfinite[name]):
            names.append(wire)
            sums += [checksum(tensor)] if checksums else []
            yield wire, tensor
    if not metadata_only and (broken := _failing({n: ~bad for n, bad in nonfinite.items()})):
        raise RefitError(f"{name}: holds NaN or Inf in the trainer" for name in broken)
    if precision.rollout_kv == "fp8":
        for wire, scale in _checked_kv_scales(kv_scales or {}, num_layers, metadata_only).items():
            tensor = scale.to(device)
            names.append(wire)
            sums += [checksum(tensor)] if checksums else []
            yield wire, tensor
    yield MANIFEST, _manifest(names, sums)


def checksum(tensor: Tensor) -> Tensor:
    """An order-sensitive sum of a tensor's bytes, INT64 scalar on its device.

    Byte i counts `1 + i mod 65521` times, so a permutation of blocks shows; 5e11 bytes fit.
    """
    bytes_N = tensor.detach().contiguous().view(torch.uint8).flatten().long()
    index_N = torch.arange(bytes_N.numel(), device=bytes_N.device)
    return (bytes_N * (1 + index_N % CHECKSUM_PERIOD)).sum()


class Ledger:
    """The receiver's book of one refit: what must come, what came, what the engine then holds.

    Args:
        expected: `weights.wire_specs` of the model, as the engine knows it.
        engine: the engine's own tensors by wire name. Opening the ledger compares them with
            `expected` and poisons them. Without it, only the wire is proven.
        checksums: refuse a manifest without them (`verify: full`).

    Raises:
        RefitError: the engine's tensors are not those that a refit of this precision fills.
    """

    def __init__(
        self,
        expected: Mapping[str, WireSpec],
        engine: Mapping[str, Tensor] | None = None,
        *,
        checksums: bool = False,
    ) -> None:
        self.expected, self.checksums = dict(expected), checksums
        self.engine = {} if engine is None else engine
        self.received: dict[str, int] = {}
        self.kv_scales: dict[str, Tensor] = {}
        self.problems: list[str] = []
        self.manifest: dict[str, list[str]] | None = None
        self.sentinel = False
        if engine is not None:
            self._compare_engine()
        self.addresses = {name: tensor.data_ptr() for name, tensor in self.engine.items()}
        for name, tensor in self.engine.items():
            _poison(name, tensor)

    def receive(self, name: str, tensor: Tensor) -> bool:
        """Book one arrival; true if it is a tensor that the engine must now load.

        What is wrong is kept for `close`, so that one failed refit names everything that failed.
        """
        if name == SENTINEL:
            self.sentinel = True
        elif name == MANIFEST:
            self.manifest = _read_manifest(tensor)
        elif problem := self._arrival_problem(name, tensor):
            self.problems.append(f"{name}: {problem}")
        else:
            self.received[name] = tensor.numel() * tensor.element_size()
            if name.endswith(KV_SUFFIXES):
                self.kv_scales[name] = tensor.clone()
            return True
        return False

    def close(self, engine: Mapping[str, Tensor] | None = None) -> RefitProof:
        """Settle the book.

        Args:
            engine: the engine's own tensors as they are now, looked up again, where loading may
                have put others in their place; by default those of the opening.

        Raises:
            RefitError: with the name of everything that was dropped, sent twice, unknown, of
                another type or shape, not loaded, or not what the sender had.
        """
        self.engine = engine or self.engine
        problems = [*self.problems, *self._wire_problems()]
        if self.engine and not problems:
            problems = [*self._engine_problems()]
        if problems:
            raise RefitError(problems)
        return RefitProof(
            bytes=sum(self.received.values()),
            verified_weights=sum(
                weights.scale_name(name) in self.received for name in self.received
            ),
            checksums=len(self._sums()) if self.engine else 0,
        )

    def _compare_engine(self) -> None:
        problems = [
            f"{name}: the engine has no such tensor"
            for name in self.expected.keys() - self.engine.keys()
        ]
        problems += [
            f"{name}: the engine holds it, a refit does not fill it"
            for name in self.engine.keys() - self.expected.keys()
        ]
        problems += [
            f"{name}: the engine holds {found.dtype} {list(found.shape)}, a refit sends "
            f"{spec.dtype} {list(spec.shape)}"
            for name, tensor in self.engine.items()
            if (spec := self.expected.get(name)) and (found := _spec_of(tensor)) != spec
        ]
        if problems:
            raise RefitError(sorted(problems))

    def _arrival_problem(self, name: str, tensor: Tensor) -> str:
        spec = self.expected.get(name)
        if spec is None:
            return "unknown name"
        if name in self.received:
            return "sent twice"
        found = _spec_of(tensor)
        if found.dtype != spec.dtype:
            return f"wrong dtype {found.dtype}, expected {spec.dtype}"
        if found.shape != spec.shape:
            return f"wrong shape {list(found.shape)}, expected {list(spec.shape)}"
        return ""

    def _wire_problems(self) -> Iterator[str]:
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
        elif self.manifest["names"] != list(self.expected):
            yield f"{MANIFEST}: lists other tensors than this engine expects"

    def _engine_problems(self) -> Iterator[str]:
        loaded = self.engine.keys() - self.kv_scales.keys()
        live = {name: _is_live(name, self.engine[name]) for name in sorted(loaded)}
        for name in _failing(live):
            yield f"{name}: arrived, and was not loaded: the engine still holds its poison"
        equal = {name: (self.engine[name] == sent).all() for name, sent in self.kv_scales.items()}
        for name in _failing(equal):
            sent = self.kv_scales[name].tolist()
            yield f"{name}: the engine holds {self.engine[name].tolist()}, sent {sent}"
        for name, address in self.addresses.items():
            if self.engine[name].data_ptr() != address:
                yield f"{name}: its storage moved, CUDA graphs would read the old one"
        match = {name: checksum(self.engine[name]) == sent for name, sent in self._sums().items()}
        for name in _failing(match):
            yield f"{name}: the engine's bytes are not the sender's (checksum)"

    def _sums(self) -> dict[str, int]:
        assert self.manifest is not None
        return {
            name: int(text, 16)
            for name, text in zip(self.manifest["names"], self.manifest["sums"], strict=False)
        }


def _encode(
    name: str, weight: Tensor, precision: Precision, num_layers: int, nonfinite: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """One weight or slab as it travels: by checkpoint name, each FP8 one with its scales."""
    wires = weights.wire_names(name, tuple(weight.shape))
    projections = weights.slab_projections(name)
    pieces = weight[None]
    if projections:  # [E, 2 O, I] holds gate above up: taken apart, so that no block spans both
        pieces = weight.unflatten(1, (len(projections), -1)).flatten(0, 1)
    if not weights.is_fp8_weight(name, tuple(weight.shape), precision, num_layers):
        pieces = pieces.to(torch.bfloat16)
        nonfinite.copy_(~torch.isfinite(pieces).all())
        yield from zip(wires, pieces, strict=True)
        return
    quantized = quantize_blocks(pieces, pow2=precision.scales == "pow2", nonfinite=nonfinite)
    for wire, fp8_OI, scale_inv_PQ in zip(wires, *quantized, strict=True):
        yield wire, fp8_OI
        yield weights.scale_name(wire), scale_inv_PQ


def _checked_kv_scales(
    kv_scales: Mapping[str, float], num_layers: int, metadata_only: bool
) -> dict[str, Tensor]:
    """KV scales by name as they travel, FP32 `[1]`, in layer order."""
    names = [name for layer in range(num_layers) for name in weights.kv_scale_names(layer)]
    wanted = {name: torch.tensor([kv_scales.get(name, torch.nan)]) for name in names}
    broken = [
        f"{name}: KV scale {kv_scales.get(name)} must be finite and above 0 in FP32"
        for name, scale in wanted.items()
        if not (torch.isfinite(scale) & (scale > 0))
    ]
    if broken and not metadata_only:
        raise RefitError(broken)
    return wanted


def _failing(verdicts: Mapping[str, Tensor]) -> list[str]:
    """Names whose verdict, a boolean on the device, is false: one read for all of them."""
    if not verdicts:
        return []
    passed = torch.stack(list(verdicts.values())).tolist()
    return [name for name, ok in zip(verdicts, passed, strict=True) if not ok]


def _poison(name: str, tensor: Tensor) -> None:
    """NaN, which no trainer sends, into all of a block scale and the first element of the rest."""
    if name.endswith(weights.SCALE_SUFFIX):
        tensor.fill_(torch.nan)
    elif tensor.dtype == FP8:
        tensor.view(torch.uint8)[(0,) * tensor.ndim] = FP8_NAN
    else:
        tensor[(0,) * tensor.ndim] = torch.nan


def _is_live(name: str, tensor: Tensor) -> Tensor:
    """Whether loading has replaced the poison, a boolean on the device."""
    if name.endswith(weights.SCALE_SUFFIX):
        return (torch.isfinite(tensor) & (tensor > 0)).all()
    return torch.isfinite(tensor[(0,) * tensor.ndim].float())


def _manifest(names: list[str], sums: list[Tensor]) -> Tensor:
    """Names, and checksums of fixed width: the manifest's shape never changes between refits."""
    host_sums = torch.stack(sums).tolist() if sums else []
    text = json.dumps({"names": names, "sums": [f"{value:016x}" for value in host_sums]})
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _read_manifest(tensor: Tensor) -> dict[str, list[str]] | None:
    try:
        return json.loads(bytes(tensor.cpu().tolist()))
    except ValueError:
        return None


def _spec_of(tensor: Tensor) -> WireSpec:
    return WireSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
