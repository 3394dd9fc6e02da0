"""What a refit sends besides tensors: a sentinel first, a manifest of all that was sent last."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

SENTINEL = "fp8_nemo.sentinel"
MANIFEST = "fp8_nemo.manifest"
KV_SUFFIXES = (".q_scale", ".k_scale", ".v_scale")
CHECKSUM_PERIOD = 65521  # prime: shifting bytes by any block or row size changes their factors
CHECKSUM_AT_ONCE = 2**26  # bytes, each of which takes 16 while it is summed


class Manifest(NamedTuple):
    """What the sender has sent: `Manifest(["lm_head.weight", ...], [], {})`."""

    names: list[str]
    sums: list[int]
    """Of each name's bytes, with `verify: full`."""
    kv_scales: dict[str, float]


def checksum(tensor: Tensor) -> Tensor:
    """An order-sensitive sum of a tensor's bytes, INT64 scalar on its device.

    Byte i counts `1 + i mod 65521` times, so a permutation of blocks shows; 5e11 bytes fit.
    """
    bytes_N = tensor.detach().contiguous().view(torch.uint8).flatten()
    if bytes_N.is_cuda:
        from fp8_nemo.glue import kernels

        return kernels.checksum(bytes_N, CHECKSUM_PERIOD)
    total = torch.zeros((), dtype=torch.int64, device=bytes_N.device)
    for start in range(0, bytes_N.numel(), CHECKSUM_AT_ONCE):
        some_N = bytes_N[start : start + CHECKSUM_AT_ONCE].long()
        index_N = torch.arange(start, start + some_N.numel(), device=some_N.device)
        total += (some_N * (1 + index_N % CHECKSUM_PERIOD)).sum()
    return total


def manifest(names: list[str], sums: list[Tensor], kv_scales: Mapping[str, float]) -> Tensor:
    """Bytes of it, as many in every refit: NeMo RL's receiver knows shapes from its set-up.

    Args:
        names: of all tensors, in the order sent.
        sums: their `checksum`, or none.
        kv_scales: in FP32, in the order of `names`.
    """
    host_sums = torch.stack(sums).tolist() if sums else []
    scales = struct.pack(f">{len(kv_scales)}f", *kv_scales.values()).hex()
    book = {"names": names, "sums": [f"{value:016x}" for value in host_sums], "kv_scales": scales}
    return torch.frombuffer(bytearray(json.dumps(book).encode()), dtype=torch.uint8)


def read_manifest(tensor: Tensor) -> Manifest | None:
    """What `manifest` wrote; None if it did not arrive whole."""
    try:
        book = json.loads(tensor.cpu().numpy().tobytes())
        names = [name for name in book["names"] if name.endswith(KV_SUFFIXES)]
        scales = struct.unpack(f">{len(names)}f", bytes.fromhex(book["kv_scales"]))
        sums = [int(value, 16) for value in book["sums"]]
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        return None
    return Manifest(book["names"], sums, dict(zip(names, scales, strict=True)))
