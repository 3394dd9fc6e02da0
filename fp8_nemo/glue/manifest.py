"""Make what a refit sends besides tensors: a sentinel first, a manifest of all that was sent last.

A manifest is INT64 numbers: a mark, the number of the refit, a hash of the names, each KV scale and
each tensor's digest, in the order sent. How many depends on the names alone, since NeMo RL's
receiver knows all shapes from its set-up. Digests go from device to device; nobody reads them
before the end.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp8_nemo.glue.wire import is_adapted

SENTINEL = "fp8_nemo.sentinel"
MANIFEST = "fp8_nemo.manifest"
KV_SUFFIXES = (".q_scale", ".k_scale", ".v_scale")
MARK = 0x46_50_38_52_45_46_49_54
"""`FP8REFIT`, a manifest's first number. A refused stream is filled up with ones, which never have
it."""


class Manifest(NamedTuple):
    """State what the sender has sent: `Manifest(3, 0x1a2b, {}, [17, 4])`."""

    number: int
    """Of the refit, by the sender's count."""
    names_hash: int
    """`hash_of` the names that were sent."""
    kv_scales: dict[str, float]
    digests: list[int]
    """Digest of each tensor but KV scales, in the order sent; none with `verify: names`."""


def is_sent_again(name: str, adapted: Collection[str]) -> bool:
    """Return whether a refit after the first sends a tensor.

    It sends weights with adapters, their scales, all KV scales, the sentinel and the manifest.

    Args:
        name: on the wire.
        adapted: as in `wire.is_adapted`.
    """
    is_scale = name.endswith(KV_SUFFIXES)
    return is_scale or name in (SENTINEL, MANIFEST) or is_adapted(name, adapted)


def sent_again(
    handshake: Mapping[str, tuple[torch.Size, torch.dtype]], adapted: Collection[str]
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return what a refit after the first sends, its manifest without the digests of the rest.

    Args:
        handshake: names, shapes and types of a whole refit with `verify: bytes`.
        adapted: as in `wire.is_adapted`.
    """
    found = {name: x for name, x in handshake.items() if is_sent_again(name, adapted)}
    [size], dtype = found[MANIFEST]
    left_out = len(handshake) - len(found)
    return found | {MANIFEST: (torch.Size([size - 8 * left_out]), dtype)}


def hash_of(names: Iterable[str]) -> int:
    """Hash names, in their order, to one signed 64-bit integer."""
    text = "\n".join(names).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big", signed=True)


def manifest(
    number: int,
    names: Iterable[str],
    kv_scales: Mapping[str, float],
    digests: Sequence[Tensor],
    device: torch.device | None,
) -> Tensor:
    """Write a manifest's bytes on the device.

    Args:
        number: of the refit.
        names: of all tensors in the order sent, but KV scales.
        kv_scales: in FP32, in the order sent, after all others.
        digests: of what was sent, INT64 on the device, or none.
        device: where they are to be.
    """
    head = [MARK, number, hash_of([*names, *kv_scales]), *map(_bits, kv_scales.values())]
    numbers = [torch.tensor(head).to(device, non_blocking=True), *digests]
    return torch.cat(numbers).view(torch.uint8)


def read_manifest(numbers: Sequence[int], kv_names: Sequence[str]) -> Manifest | None:
    """Return the manifest that `manifest` wrote; None if it did not arrive whole.

    Args:
        numbers: the INT64 that its bytes hold.
        kv_names: of the KV scales that came, in their order.
    """
    if len(numbers) < 3 + len(kv_names) or numbers[0] != MARK:
        return None
    _, number, names, *rest = numbers
    bits, digests = rest[: len(kv_names)], rest[len(kv_names) :]
    return Manifest(number, names, dict(zip(kv_names, map(scale_of, bits), strict=True)), digests)


def _bits(scale: float) -> int:
    return struct.unpack("i", struct.pack("f", scale))[0]


def scale_of(bits: int) -> float:
    """Return the FP32 value whose 32 bits are given as an integer."""
    return struct.unpack("f", struct.pack("I", bits & 0xFFFFFFFF))[0]
