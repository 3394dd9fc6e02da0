"""Digests by the Triton kernels, on a CPU under Triton's interpreter, against torch's.

A process of its own, TRITON_INTERPRET being read when a kernel is defined. What needs a device, a
pinned table and the choice of one, is left out.
"""

import os
from contextlib import nullcontext

os.environ["TRITON_INTERPRET"] = "1"

import torch

from fp8_nemo.glue import digest as reference
from fp8_nemo.glue import kernels
from fp8_nemo.glue.digest import placed

torch.cuda.device = lambda device: nullcontext()
torch.Tensor.pin_memory = lambda tensor: tensor


def noise(*shape, dtype=torch.uint8):
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,)).to(torch.uint8).view(dtype).view(shape)


def copied(tensor):
    """Return the same values at another address, lying alike and as far from an aligned one."""
    size = sum((side - 1) * step for side, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = torch.zeros((max(size, 0) + 1) * tensor.itemsize + 64, dtype=torch.uint8)
    start = (tensor.data_ptr() - memory.data_ptr()) % kernels.ALIGNED
    values = memory[start : start + (max(size, 0) + 1) * tensor.itemsize].view(tensor.dtype)
    return values.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def digests_of_every_layout():
    """Whole and cut, aligned or not, ragged, transposed, one row, one number, nothing."""
    parts = []
    for dtype in (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32):
        for shape in ((1,), (5,), (4096,), (3, 4), (130, 66), (40, 600), (70, 1), (0, 8)):
            parts.append(placed(noise(*shape, dtype=dtype), shape))
        whole = noise(96, 128, dtype=dtype)
        for rows, columns in ((slice(0, 96), slice(32, 64)), (slice(33, 96), slice(0, 128))):
            parts.append(placed(whole[rows, columns], whole.shape, (rows, columns)))
        across = noise(36, 44, dtype=dtype).T
        parts.append(placed(across, across.shape))
    shifted = noise(1 + 64 * 32)[1:].view(64, 32)
    parts += [placed(shifted, shifted.shape), placed(noise(1 << 15), (1 << 15,))]
    runs = [
        run
        for x, first, pitch in parts
        for run in reference._runs(x.shape, x.stride(), x.itemsize, x.data_ptr(), first, pitch)
    ]
    assert {run.is_even for run in runs} == {True, False}
    digests = kernels.digests(parts)
    for _ in range(2):  # each time from zero
        assert torch.equal(digests(), reference.digests_of(parts)())
    elsewhere = [part._replace(tensor=copied(part.tensor)) for part in parts]
    assert torch.equal(kernels.digests(elsewhere)(), digests())
    assert reference.runs_of.cache_info().hits == 1, "the same layout was looked at twice"
    assert kernels.digests(parts[:1] * 2)().tolist() == digests()[:1].tolist() * 2
    nothing = [placed(noise(0, 8), (0, 8))]
    assert kernels.digests(nothing)().tolist() == [0]


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digests_of_every_layout()
