"""Fit the rates of training to a few measured micro-batches; test them on all others.

python -m benchmarks.speed.fit_training benchmarks/results/bench-train-8b-h200.json
    --more benchmarks/results/bench-train-8b-*.json --out estimate-training-h200.json

Of a dense model's layers, alone on a GPU: operations over a rate, per format and pass, and
attention over a rate of its own, by least squares of relative errors. Fitted are the rows of the
first file that recompute nothing; tested are its others and those of `--more`: another day, tensor
parallel, experts. `plan/step_time.py` holds the rates, to three digits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import record
from fp8_nemo.plan.speed import GPU_SPEED
from fp8_nemo.plan.step_time import LINEARS, Lengths, layer_work, stack_seconds
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.options.model import Model
from fp8_nemo.recipe.settled import GROUPED, LOCAL_BASE, Layout, Settled, settle

PASSES = ("forward", "backward")
SPEED = GPU_SPEED["h200"]


class Row(NamedTuple):
    """One pass of one measured micro-batch: `Row("bf16", 0, settled, 8192, 1, 0.055, "file")`."""

    format: str
    way: int
    settled: Settled
    tokens: int
    """Of the micro-batch."""
    sequences: int
    seconds: float
    file: str


def rows_of(file: Path) -> Iterator[Row]:
    """Yield passes of whole stacks: weights quantized before, recompute only if the row says so."""
    content = json.loads(file.read_text())
    for each in content["rows"]:
        wanted = each.get("part") == "stack" and each.get("microbatch") == "cached"
        if "error" in each or not wanted or each["variant"] not in LINEARS:
            continue
        for way, name in enumerate(PASSES):
            seconds = each[name]["median"] / 1e3
            settled, packed = settled_of(each), each.get("sequences", 1)
            yield Row(each["variant"], way, settled, each["tokens"], packed, seconds, file.name)


def settled_of(row: dict[str, Any]) -> Settled:
    """Return a run whose layers are those of a row."""
    precision = "fp8-e2e" if row["variant"] == "fp8" else "bf16"
    [recipe] = compose([
        f"model={row['model']}", "backend=nemo", f"precision={precision}", "cluster.gpu=h200",
        f"model.shape.layers={row['layers']}", f"model.shape.experts={row['experts']}",
        f"+nemo.{GROUPED}='0'",
    ])  # fmt: skip
    layout = Layout(tensor=row["tensor"], recompute=row["recompute"])
    return settle(recipe, LOCAL_BASE, layout)


def fitted(rows: Iterable[Row]) -> dict[str, float]:
    """Return the shares of the peaks that products and attention reach, by format and pass."""
    found = {}
    rows = [row for row in rows if not row.settled.layout.recompute]
    for way, name in enumerate(PASSES):
        mine = [row for row in rows if row.way == way]
        table = np.array([_work(row) for row in mine])
        measured = np.array([row.seconds for row in mine])
        weights = 1 / measured
        answer, *_ = np.linalg.lstsq(table * weights[:, None], np.ones(len(mine)), rcond=None)
        for key, value in zip(("bf16", "fp8", "attention"), answer, strict=True):
            found[f"{key} {name}"] = float(1 / value)
    return found


def _work(row: Row) -> tuple[float, float, float]:
    """Return the seconds at the peaks of BF16's products, FP8's, and attention."""
    shape = row.settled.recipe.model.shape
    work, at = layer_work(shape), (1 + row.way) * row.tokens * shape.layers
    linear = at * (work.quantized + work.other)
    seen = row.tokens * shape.layers * 2 * shape.heads * shape.head_dim
    seen *= row.tokens / row.sequences
    attention = (1, 2.5)[row.way] * seen / SPEED.bf16
    quantized = row.format == "fp8"
    return (
        0.0 if quantized else linear / SPEED.bf16,
        linear / SPEED.fp8 if quantized else 0.0,
        attention,
    )


def compared(row: Row, half: str) -> dict[str, Any]:
    """Compare a row as measured with the row that the plan's rates predict."""
    lengths = Lengths(0, row.tokens / row.sequences)
    predicted = stack_seconds(row.settled, lengths, row.tokens, row.way)
    if row.way and row.settled.layout.recompute:
        predicted += stack_seconds(row.settled, lengths, row.tokens, 0)
    layout, model = row.settled.layout, row.settled.recipe.model
    return {
        "half": half, "file": row.file, "model": _named(model), "experts": model.shape.experts,
        "format": row.format, "pass": PASSES[row.way], "tokens": row.tokens,
        "tensor": layout.tensor, "recompute": layout.recompute,
        "measured": row.seconds, "predicted": predicted, "error": predicted / row.seconds - 1,
    }  # fmt: skip


def _named(model: Model) -> str:
    return f"{model.name} {model.shape.experts} experts" if model.shape.experts else model.name


def main() -> None:
    """Fit the rates, compare them, print them, and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    record.add_options(parser)
    parser.add_argument("results", type=Path, help="of benchmarks.speed.train")
    parser.add_argument("--more", type=Path, nargs="*", default=[], help="fitted to nothing")
    options = parser.parse_args()
    own = list(rows_of(options.results))
    plain = [row for row in own if not row.settled.layout.recompute]
    rates = fitted(plain)
    rows = [compared(row, "fitted" if row in plain else "tested") for row in own]
    others = [file for file in options.more if file != options.results]
    rows += [compared(row, "tested") for file in others for row in rows_of(file)]
    worst: dict[str, float] = {}
    for row in rows:
        key = f"{row['half']}, {row['model']}, tensor {row['tensor']}"
        worst[key] = max(worst.get(key, 0.0), abs(row["error"]))
    record.keep(options.out, options.commit, rates=rates, worst=worst, rows=rows)
    record.show("rates, of the datasheet's peak", [rates])
    record.show("seconds of a pass", [{k: r[k] for k in r if k != "file"} for r in rows])


if __name__ == "__main__":
    main()
