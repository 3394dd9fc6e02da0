"""One number for all bytes of a tensor: what it is, that parts add up to it, and what it sees.

The formula is stated here a second time, in Python's integers. A hundred thousand random changes,
exchanges and shifts of buffers must all show; the same runs on a GPU over 8B-sized ones
(tests/gpu/test_proof_on_a_gpu.py).
"""

import ctypes
import random

import pytest
import torch

from fp8_nemo.glue.digest import ALIGNED, RUN, digest, digests_of, placed, runs_of
from fp8_nemo.glue.refit import encode
from fp8_nemo.recipe.options.precision import Precision

WRAP = 2**32


def mix(word, index):
    x = word ^ (index * 0x9E3779B1) % WRAP
    x = (x ^ x >> 16) * 0x7FEB352D % WRAP
    x = (x ^ x >> 15) * 0x846CA68B % WRAP
    x ^= x >> 16
    return x - WRAP if x >= WRAP // 2 else x


def by_hand(tensor):
    """Of a tensor of one or two dimensions."""
    rows = torch.atleast_2d(tensor).contiguous().view(torch.uint8).tolist()
    pitch = -(-len(rows[0]) // 4)
    total = 0
    for r, row in enumerate(rows):
        for c in range(pitch):
            word = int.from_bytes(bytes(row[4 * c : 4 * c + 4]), "little")
            total += mix(word, r * pitch + c)
    return total


def noise(*shape, dtype=torch.uint8, seed=0):
    draw = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), generator=draw).to(torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (5,), (64,), (3, 4), (7, 33), (130, 66), (2, 1), (0, 4)])
def test_a_digest_is_the_sum_of_its_mixed_words(shape, dtype):
    tensor = noise(*shape, dtype=dtype)
    assert digest(tensor).item() == (by_hand(tensor) if tensor.numel() else 0)
    if tensor.ndim == 2 and tensor.numel():  # of the values as they are read, however they lie
        across = torch.empty(shape[::-1], dtype=dtype).T.copy_(tensor)
        assert digest(across).item() == digest(tensor).item()


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_parts_add_up_to_the_whole_however_they_are_cut(rows, columns, dtype):
    whole = noise(12, 32, dtype=dtype)
    total = 0
    for r in range(rows):
        for c in range(columns):
            part = (
                slice(12 // rows * r, 12 // rows * (r + 1)),
                slice(32 // columns * c, 32 // columns * (c + 1)),
            )
            fused = torch.cat([noise(3, 32 // columns, dtype=dtype, seed=9), whole[part]])
            total += digests_of([placed(fused[3:], whole.shape, part)])().item()
    assert total == digest(whole).item() == by_hand(whole)


def as_the_kernel_reads(part):
    """A part's digest by the table that the kernel is given, its bytes read by their addresses."""
    x, first, pitch = part
    beyond = x.data_ptr() % ALIGNED
    known = runs_of(((x.shape, x.stride(), x.itemsize, beyond, first, pitch),))
    total, tiles = 0, {}
    for is_even, start, count, tiles_in_all in known.launches:
        rows = known.numbers[start : start + count * RUN].view(count, RUN).tolist()
        for at, tile, R, length, row_stride, value_stride, size, words, index, slot in rows:
            assert tile == tiles.get(is_even, 0) and slot == 0
            tiles[is_even] = tile + -(-R // 32) * -(-length // 512)
            for r in range(R):
                row = x.data_ptr() - beyond + at + r * row_stride
                places = (row + n // size * value_stride + n % size for n in range(length))
                held = b"".join(ctypes.string_at(place, 1) for place in places)
                for c in range(-(-length // 4)):
                    word = int.from_bytes(held[4 * c : 4 * c + 4], "little")
                    total += mix(word, index + r * words + c)
        assert tiles[is_even] == tiles_in_all
    return total


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_the_kernels_table_reads_every_word_of_a_part_where_it_is(dtype):
    whole, row = noise(96, 132, dtype=dtype), noise(4100, dtype=dtype)
    across = noise(36, 44, dtype=dtype).T
    shifted = noise(1 + 64 * 32)[1:].view(64, 32)
    cut = (slice(33, 96), slice(0, 132)), (slice(0, 96), slice(32, 64))
    parts = [placed(whole[each], whole.shape, each) for each in cut]
    parts += [placed(x, x.shape) for x in (whole, row, row[:5], across, shifted, whole[:, 3:4])]
    parts += [placed(row[8:20], row.shape, (slice(8, 20),)), placed(whole[:0], whole[:0].shape)]
    for part in parts:
        assert as_the_kernel_reads(part) == digests_of([part])().item()


def test_a_layout_is_looked_at_once_wherever_its_parts_are():
    lying = tuple((x.shape, x.stride(), x.itemsize, 0, 0, 32) for x in [noise(64, 128)] * 3)
    known = runs_of(lying)
    assert known.parts == [0, 1, 2] and known.numbers[-3:].tolist() == [0, 0, 0]
    assert known.numbers[known.at].tolist() == [0, 0, 0] and known.at.tolist() == [0, RUN, 2 * RUN]
    assert runs_of(tuple((*each[:3], 0, 0, 32) for each in lying)) is known


def test_a_bias_is_cut_along_its_one_side():
    bias = noise(24, dtype=torch.bfloat16)
    parts = [slice(0, 12), slice(12, 24)]
    digests = digests_of([placed(bias[each], bias.shape, (each,)) for each in parts])()
    assert digests.sum() == digest(bias) and digests[0] != digests[1]


@pytest.mark.parametrize("columns", [slice(0, 6), slice(6, 12), slice(2, 12)])
def test_a_cut_within_a_word_is_refused(columns):
    with pytest.raises(ValueError, match=r"in a row are not whole words"):
        placed(torch.zeros(2, 4).to(torch.uint8), (2, 12), (slice(0, 2), columns))


def test_the_last_part_of_a_ragged_row_ends_with_it():
    whole = noise(5, 131)
    parts = [(slice(0, 5), slice(0, 64)), (slice(0, 5), slice(64, 131))]
    found = digests_of([placed(whole[each], whole.shape, each) for each in parts])()
    assert found.sum() == digest(whole)


def test_a_group_is_digested_as_it_travels():
    """Each tensor by itself, in the order of the wire; a slab's matrices one by one."""
    slab = "model.layers.0.mlp.experts.gate_up_proj"
    group = [(slab, torch.randn(2, 512, 256)), ("model.norm.weight", torch.randn(256))]
    encoded = encode(group, Precision(rollout_linear="fp8"), num_layers=1, digests=True)
    wanted = [digest(tensor).item() for _, tensor in encoded.tensors]
    assert len(wanted) == 2 * 2 * 2 + 1 and encoded.digests_T.tolist() == wanted
    assert encode(group, Precision(), num_layers=1).digests_T is None


def changed(tensor, how, draw):
    """A tensor with one random change, and whether there is any."""
    bytes_N = tensor.clone().view(torch.uint8).flatten()
    N, at, other = len(bytes_N), draw.randrange(len(bytes_N)), draw.randrange(len(bytes_N))
    if how == "byte":
        bytes_N[at] = bytes_N[at] ^ draw.randrange(1, 256)
    elif how == "bit":
        bytes_N[at] ^= 1 << draw.randrange(8)
    elif how == "swap":
        bytes_N[[at, other]] = bytes_N[[other, at]]
    elif how == "swap words":
        at, other = min(at, N - 4), min(other, N - 4)
        one, two = bytes_N[at : at + 4].clone(), bytes_N[other : other + 4].clone()
        bytes_N[at : at + 4], bytes_N[other : other + 4] = two, one
    elif how == "shift":
        start, stop = sorted((at, other))
        bytes_N[start:stop] = bytes_N[start:stop].roll(draw.choice((1, 2, 4, 16, 128)))
    else:
        rows = bytes_N.view(tensor.shape[0], -1)
        one, two = draw.randrange(len(rows)), draw.randrange(len(rows))
        rows[[one, two]] = rows[[two, one]]
    assert len(bytes_N) == N
    new = bytes_N.view(tensor.dtype).view(tensor.shape)
    return new, not torch.equal(new.view(torch.uint8), tensor.view(torch.uint8))


HOWS = ["byte", "bit", "swap", "swap words", "shift", "rows"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("shape", [(16, 32), (5, 67), (64, 4)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_of_a_hundred_thousand_random_changes_none_is_missed(how, shape):
    """5,556 each here: 100,008 in all."""
    torch.set_num_threads(1)
    draw = random.Random(f"{how} {shape}")
    tensor = noise(*shape)
    tensor[: shape[0] // 4] = 0  # zeros, of which a shift or an exchange changes little
    before, tried, made = digest(tensor).item(), 0, []
    while tried < 5556:
        new, differs = changed(tensor, how, draw)
        tried += differs
        if differs:
            made.append(placed(new, new.shape))
    assert (digests_of(made)() != before).all()
