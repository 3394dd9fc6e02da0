"""Products and sums that repeat themselves on a GPU too; imported before CUDA starts."""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts

import torch


def repeat_exactly(*, warn_only: bool = False) -> None:
    """Let torch take deterministic kernels, in this process from now on.

    Args:
        warn_only: where an operation has none, warn and go on; else it raises RuntimeError.
    """
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    # Nobody reads it, and on a GPU filling it is a launch for every tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore
