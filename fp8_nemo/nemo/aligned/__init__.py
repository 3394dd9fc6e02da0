"""The trainer's operations inside vLLM (`precision.align`): RoPE, SiLU, FP8 quantizer, norm."""

from __future__ import annotations

from typing import Any

from fp8_nemo.recipe.options.precision import Precision


def register(precision: Precision) -> None:
    """Give the engine of this process the trainer's operations, before its model; once a process.

    Importing registers them; it needs vLLM, so nothing is imported until it is asked for.
    """
    if precision.is_exact:
        from fp8_nemo.nemo.aligned import exact  # noqa: F401
    elif precision.is_aligned:
        from fp8_nemo.nemo.aligned import engine  # noqa: F401


def check(model: Any) -> None:
    """Look for operations of vLLM's own in an exact engine's model (`exact.check`)."""
    from fp8_nemo.nemo.aligned import exact

    exact.check(model)
