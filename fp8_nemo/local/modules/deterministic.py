"""Make products and sums repeat themselves on a GPU too; imported before CUDA starts."""

from __future__ import annotations

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts

import torch


def repeat_exactly() -> None:
    """Let torch take deterministic kernels alone, in this process from now on.

    Not `warn_only`: torch's attention would then go backward by kernels that do not repeat.
    """
    torch.use_deterministic_algorithms(True)
    # Nobody reads it, and on a GPU filling it is a launch for every tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore
