"""Keep a trainer's weights and optimizer in page-locked memory while the engine has the GPU.

NeMo RL copies each tensor of the optimizer by `v.to("cpu")`, which allocates pageable memory every
time: 1.4 GB/s down and 5.5 GB/s up on an H200's host, 27 of 110 s of a step
(benchmarks/results/step-check-h200.json). Here one page-locked buffer outlives the copies. Megatron
copies a buffer of weights to pageable memory first, and from there to a page-locked power of two.
Here the place of the weights is page-locked at once, and exact. And Megatron copies a checkpoint to
the host before it writes one, by an allocator that keeps the memory; here it is given back.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from itertools import accumulate
from mmap import mmap
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes at which each tensor begins in the buffer."""

State = MutableMapping[str, Any]
"""What an optimizer holds of one parameter: tensors by name, and scalars that stay as they are."""


class HostState:
    """Hold one optimizer's tensors on the host while the engine has the GPU.

    The first call allocates the buffer, which stays until a larger one is needed.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @torch.no_grad()
    def to_host(self, states: Iterable[State]) -> None:
        """Replace every CUDA tensor by its copy in the buffer, and wait for the copies."""
        states = list(states)
        if not any(map(_on_device, states)):
            return
        self.to_device(states)  # what an earlier call left in the buffer would be overwritten
        tensors = [value for state in states for value in _on_device(state).values()]
        sizes = [each.nbytes for each in tensors]
        offsets, total = places(sizes)
        self._grow(total)
        views = iter(
            self._buffer[at : at + size].view(each.dtype).view(each.shape)
            for at, size, each in zip(offsets, sizes, tensors, strict=True)
        )
        for state in states:
            for name, value in _on_device(state).items():
                state[name] = next(views).copy_(value, non_blocking=True)
        torch.cuda.synchronize()

    @torch.no_grad()
    def to_device(self, states: Iterable[State], device: str = "cuda") -> None:
        """Replace every host tensor by a copy on the device, in the order of its stream."""
        for state in states:
            for name, value in state.items():
                if torch.is_tensor(value) and not value.is_cuda:
                    state[name] = value.to(device, non_blocking=True)

    def _grow(self, size: int) -> None:
        """Allocate a larger buffer if this one is too small."""
        if self._buffer.numel() < size:
            torch.cuda.synchronize()  # copies from the old buffer may be under way
            self._buffer = torch.empty(0, dtype=torch.uint8)  # frees it first: never both
            self._buffer = page_locked(size)


def page_locked(size: int) -> Tensor:
    """Allocate bytes `[size]` on the host, page-locked for as long as a tensor views them.

    It registers the memory itself: torch's page-locking allocator rounds up to a power of two. The
    memory begins at a page of its own, which no other registration shares.

    Raises:
        MemoryError: the system does not lock that much.
    """
    memory = _Registered(-1, size)
    bytes_N = torch.frombuffer(memory, dtype=torch.uint8)
    if failed := memory.register(bytes_N.data_ptr()):
        raise MemoryError(
            f"{size / 2**30:.1f} GiB of host memory cannot be page-locked for the optimizer "
            f"(CUDA error {failed}); raise the limit of locked memory (ulimit -l), or set "
            "model.memory.optimizer=keep"
        )
    return bytes_N


class _Registered(mmap):
    """Memory that CUDA knows to be page-locked until it is freed.

    Freed without a word it would stay registered, and what is mapped at its address next refused.
    """

    _address: int | None = None

    def register(self, address: int) -> int:
        """Page-lock all of it, and return CUDA's error, 0 if there is none."""
        runtime: Any = torch.cuda.cudart()
        failed = int(runtime.cudaHostRegister(address, len(self), 0))
        self._address = None if failed else address
        return failed

    def __del__(self) -> None:
        if self._address is not None and not sys.is_finalizing():
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self._address)


def prepare_buffers(buffers: Iterable[Any]) -> None:
    """Give Megatron's buffers of weights their place on the host (seam copies-before-pinning).

    Where the system does not lock that much, Megatron makes one as it does by itself.

    Args:
        buffers: `_ParamAndGradBuffer`; one that has a place, or no weights, stays as it is.
    """
    for each in buffers:
        weights_N = each.param_data
        if weights_N is not None and each.param_data_cpu is None:
            with suppress(MemoryError):
                each.param_data_cpu = page_locked(weights_N.nbytes).view(weights_N.dtype)


def release_staging() -> None:
    """Give back what torch keeps page-locked of copies that are gone (seam stages-checkpoints).

    Memory that a tensor still views stays.
    """
    public = getattr(torch.accelerator, "empty_host_cache", None)  # since torch 2.12
    (public or torch._C._host_emptyCache)()


def places(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return each tensor's offset in a buffer and the buffer's length, in bytes."""
    aligned = (-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
    *offsets, end = accumulate(aligned, initial=0)
    return offsets, end


def _on_device(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        name: value for name, value in state.items() if torch.is_tensor(value) and value.is_cuda
    }
