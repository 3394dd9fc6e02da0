"""Sum a tensor's bytes up in one number: the place of each counts, and parts can be added.

    digest = sum of mix(word xor 0x9E3779B1 * index), modulo 2^64

A word is four bytes of one row, the last one filled up with zeros. Its index is its place among the
words of the tensor on the wire, whatever part of it an engine holds and however that part lies: so
the digests of a tensor-parallel cut add up to that of the whole. `mix` (lowbias32 by C. Wellons)
maps 32 bits one to one and is linear in none of them: any one word that changes shows for certain,
words that are exchanged or shifted but for one chance in 2^32.

On a CUDA device all tensors of a list are read in one launch (`kernels.py`), which gives the same
numbers; a CPU's torch operations are its reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

WORD = 4
FACTOR, FIRST, SECOND = -0x61C8864F, 0x7FEB352D, -0x7B935975
"""As INT32: 0x9E3779B1 of an index, 0x7FEB352D and 0x846CA68B of `mix`."""
WORDS_AT_ONCE = 2**22
"""Words that a CPU mixes at once, each of which takes 16 bytes meanwhile."""


ALIGNED = 16
"""Bytes that a thread loads at once."""
TILE_ROWS, TILE_WORDS = 32, 128
"""What one program of the kernel digests."""
RUN = 10
"""Numbers in a row of the kernel's table: `Run`, and which part it is of."""


class Placed(NamedTuple):
    """Place a tensor: the rectangle of the wire's tensor that it is."""

    tensor: Tensor
    """`[R, C]`, or one row `[C]`, of any strides, on the engine's own memory."""
    first: int
    """Index of its first word."""
    pitch: int
    """Words from one row of the wire's tensor to the next."""


def placed(tensor: Tensor, shape: Sequence[int], of_wire: tuple[slice, ...] = ()) -> Placed:
    """Return a part of a wire tensor with its place in that tensor.

    Args:
        tensor: the part, in one or two dimensions.
        shape: shape of the whole wire tensor.
        of_wire: rows and columns that the part covers; the whole if empty.

    Raises:
        ValueError: it begins or ends within a word of the whole.
    """
    length = tensor.itemsize * shape[-1]
    pitch = -(-length // WORD)
    if not of_wire:
        return Placed(tensor, 0, pitch)
    *rows, columns = of_wire
    start, stop = (tensor.itemsize * side for side in (columns.start, columns.stop))
    if start % WORD or (stop % WORD and stop != length):
        raise ValueError(f"bytes {start} to {stop} of {length} in a row are not whole words")
    row = rows[0].start if rows else 0
    return Placed(tensor, row * pitch + start // WORD, pitch)


def digests_of(parts: Sequence[Placed]) -> Callable[[], Tensor]:
    """Return a function that digests these tensors, which must stay where they are.

    Each call returns INT64 `[N]` on their device. The host reads nothing.

    Args:
        parts: all on one device.
    """
    if parts and parts[0].tensor.is_cuda:
        from fp8_nemo.glue import kernels

        return kernels.digests(parts)
    return lambda: torch.tensor([_in_torch(part) for part in parts], dtype=torch.int64)


def digest(tensor: Tensor) -> Tensor:
    """Return the digest of a whole tensor, an INT64 scalar on the tensor's device."""
    return digests_of([placed(tensor, tensor.shape)])()[0]


class Run(NamedTuple):
    """Describe rows of bytes on the device, as `kernels._digest` reads them; strides in bytes."""

    address: int
    first_tile: int
    rows: int
    length: int
    row_stride: int
    value_stride: int
    itemsize: int
    pitch: int
    """Words of the wire's tensor from row to row."""
    first: int
    """Index of the first word."""

    @property
    def is_even(self) -> bool:
        """Return whether its words can be loaded four at a time, 16 aligned bytes."""
        aligned = not (self.address % ALIGNED or self.length % ALIGNED)
        return aligned and self.value_stride == self.itemsize and not self.row_stride % ALIGNED

    @property
    def tiles(self) -> int:
        """Return the number of programs that digest it."""
        return -(-self.rows // TILE_ROWS) * -(-self.length // (WORD * TILE_WORDS))


class Runs(NamedTuple):
    """Hold what the kernel is told about parts that lie in one way, wherever they are."""

    numbers: Tensor
    """INT64: every run with the part that it is of, then a zero for each part's digest."""
    at: Tensor
    """Where in `numbers` the address of each run is, of which only the unaligned rest is known."""
    parts: list[int]
    """Of which part each run is."""
    launches: list[tuple[bool, int, int, int]]
    """Whether its runs are even, where in `numbers` they begin, how many they are, and tiles."""


@lru_cache(maxsize=2**10)  # the groups of every refit are the same: 49 of 8B, 222 of 30B's experts
def runs_of(parts: tuple[tuple, ...]) -> Runs:
    """Return the kernel's table for these parts, each given as the arguments of `_runs`."""
    found = [(part, run) for part, each in enumerate(parts) for run in _runs(*each)]
    found.sort(key=lambda pair: not pair[1].is_even)
    numbers, launches = [], []
    for is_even, together in groupby(found, key=lambda pair: pair[1].is_even):
        first, tiles = len(numbers), 0
        for part, run in together:
            numbers += [*run._replace(first_tile=tiles), part]
            tiles += run.tiles
        launches.append((is_even, first, (len(numbers) - first) // RUN, tiles))
    return Runs(
        torch.tensor(numbers + [0] * len(parts), dtype=torch.int64),
        torch.arange(0, len(numbers), RUN), [part for part, _ in found], launches,
    )  # fmt: skip


def _runs(
    shape: Sequence[int], strides: Sequence[int], size: int, at: int, first: int, pitch: int
) -> Iterator[Run]:
    """Yield a part's rows as runs; a contiguous part is cut anew into rows of a tile's width.

    Args:
        shape: `[R, C]` or `[C]`.
        strides: in values.
        size: bytes of a value.
        at: the part's address, or what of it is beyond an aligned one.
        first: as `Placed.first`.
        pitch: as `Placed.pitch`.
    """
    rows, columns = (1, *shape)[-2:]
    row, value = (columns * strides[-1], *strides)[-2:]
    is_contiguous = (columns == 1 or value == 1) and (rows == 1 or row == columns)
    wide = TILE_WORDS
    if is_contiguous and columns * size == pitch * WORD:
        full, rest = divmod(rows * pitch, wide)
        for count, words in ((full, wide), (1, rest)):
            if count and words:
                yield Run(at, 0, count, words * WORD, wide * WORD, size, size, wide, first)
            at, first = at + full * wide * WORD, first + full * wide
    elif rows and columns:
        yield Run(at, 0, rows, columns * size, row * size, value * size, size, pitch, first)


def _in_torch(part: Placed) -> int:
    """Return a part's digest as the reference: fill rows up to words, mix and sum some at once."""
    part_RC = torch.atleast_2d(part.tensor)
    bytes_RC = part_RC.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    words_RC = pad(bytes_RC, (0, -bytes_RC.shape[1] % WORD)).view(torch.int32)
    index_C = torch.arange(words_RC.shape[1]) + part.first
    total = torch.zeros((), dtype=torch.int64)
    rows = max(1, WORDS_AT_ONCE // max(1, words_RC.shape[1]))
    for start in range(0, len(words_RC), rows):
        some_RC = words_RC[start : start + rows]
        index_R = torch.arange(start, start + len(some_RC)) * part.pitch
        total += _mixed(some_RC, (index_R[:, None] + index_C).int()).sum(dtype=torch.int64)
    return int(total)


def _mixed(word: Tensor, index: Tensor) -> Tensor:
    x = word ^ (index * FACTOR)
    x = (x ^ _shifted(x, 16)) * FIRST
    x = (x ^ _shifted(x, 15)) * SECOND
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, by: int) -> Tensor:
    """Shift words right and fill with zeros: torch's own shift repeats the sign of an INT32."""
    return (x >> by) & ((1 << (32 - by)) - 1)
