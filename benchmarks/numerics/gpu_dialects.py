"""The tables of `dialects` with the stacks' own kernels in them, as far as they run on this GPU.

A kernel is taken if it runs on real arguments; how far it is from torch is kept beside it. What is
not here stays torch: the places where values are rounded are right there, the order of sums is not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.numerics import dialects, te_kernels, vllm_kernels
from benchmarks.numerics.dialects import Table, difference
from benchmarks.numerics.table_forward import Model, Ops, Shape, forward

Tables = tuple[Table, Table, dict[str, Table]]
"""Of the trainer, of the engine, and by name of what the engine alone may do."""
COMPILED = ("norm", "silu")
"""What Inductor makes in an engine that is not eager: `dialects` has its roundings."""


def kernels(shape: Shape, options: argparse.Namespace) -> Tables:
    """Return every kernel that the shape, `options.precision` and `options.engine` call for."""
    trainer, engine = dict(te_kernels.TRAINER), vllm_kernels.prefill(shape)
    alone = vllm_kernels.alone(options.tokens)
    if options.align:
        engine |= {op: trainer[op] for op in dialects.ALIGNED}
        alone["our kernels"] = vllm_kernels.aligned(options.precision)
    elif options.engine != "eager":
        engine = {op: kernel for op, kernel in engine.items() if op not in COMPILED}
    if options.precision == "bf16":
        engine.pop("quantize")
    if options.precision != "fp8-e2e":
        trainer.pop("quantize")
    return trainer, engine, alone


def working(add: Callable[..., Any], model: Model, tokens_NS: Tensor, in_torch: Tables,
            own: Tables, left_out: list[str]) -> Tables:  # fmt: skip
    """Return the tables with every kernel that ran on real arguments; torch stands for the others.

    Each kernel is compared with torch on the arguments of the first layer and of the last norm and
    product, in both sides' forward: `relative` of 0.01 is rounding, 1 another operation.

    Args:
        add: keeps a part of the budget and returns it.
        model: whose forwards give the arguments.
        tokens_NS: what they read, `[N, S]`.
        in_torch: the tables without a kernel.
        own: as `kernels` gives them.
        left_out: operations that torch does here too.
    """
    trainer, engine, alone = in_torch
    calls = {op: {} for op in trainer}
    for side, table in (("trainer", trainer), ("engine", engine)):
        forward(model, table, tokens_NS, _keeper(calls, side, model.shape.layers))

    def taken(name: str, kernel_of: Table, reference_of: Ops) -> Table:
        found = {}
        for op in (op for op in kernel_of if op in reference_of and op not in left_out):
            kernel, reference = kernel_of[op], reference_of[op]
            made = add("kernels", f"{name}: {op}", lambda: _compare(kernel, reference, calls[op]))  # noqa: B023
            if "error" not in made:
                found[op] = kernel
        return found

    found = {name: taken(name, table, {**engine, **alone.get(name, {})})
             for name, table in own[2].items()}  # fmt: skip
    return (
        {**trainer, **taken("trainer", own[0], trainer)},
        {**engine, **taken("engine", own[1], engine)},
        {name: table for name, table in found.items() if table},
    )


def _keeper(calls: dict[str, dict[str, tuple]], side: str, last: int) -> Callable[..., None]:
    def keep(op: str, place: str, layer: int, arguments: tuple, found: Any) -> None:
        if layer in (0, last):
            calls[op].setdefault(f"{place}, {side}'s arguments", arguments)

    return keep


def _compare(kernel: Callable, reference: Callable, calls: dict[str, tuple]) -> dict[str, Any]:
    found = {}
    for place, arguments in calls.items():
        made = kernel(*arguments)
        torch.cuda.synchronize()
        found[place] = difference(made, reference(*arguments))
    return {"relative": max(each["relative"] for each in found.values()), "places": found}
