"""Summarize the steps of `measure.py`: each cell against BF16 and against no correction.

Every number is a mean over checkpoints with its standard error. A ratio is one of sums, its error
the jackknife's. Cells are compared at the same checkpoint, with the same random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

BASELINE = ("bf16", "none")
Row = dict[str, Any]


class Estimate(NamedTuple):
    """Hold a number with its standard error: `Estimate(-0.03, 0.01)`."""

    mean: float
    error: float

    def text(self, style: str = "+.1f") -> str:
        """Return `-0.03 ±0.01`."""
        return f"{self.mean:{style}} ±{self.error:{style.lstrip('+')}}"


def mean_of(values: Sequence[float]) -> Estimate:
    """Return a mean over checkpoints."""
    return Estimate(fmean(values), stdev(values) / math.sqrt(len(values)))


def ratio_of(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Return the ratio of two sums over the same checkpoints."""
    n, whole = len(above), sum(above) / sum(below)
    rests = [(sum(above) - a, sum(below) - b) for a, b in zip(above, below, strict=True)]
    without = [a / b for a, b in rests if b]
    spread = (n - 1) / n * sum((each - fmean(without)) ** 2 for each in without)
    return Estimate(whole, math.sqrt(spread))


def percent_more(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Return by how many percent a sum is above another one."""
    found = ratio_of(above, below)
    return Estimate(100 * (found.mean - 1), 100 * found.error)


def summary(checkpoints: list[Row]) -> list[Row]:
    """Return a row for each study and cell."""
    rows: list[Row] = []
    for study in dict.fromkeys(each["study"] for each in checkpoints):
        by_cell: dict[tuple[str, str], list[Row]] = {}
        for each in checkpoints:
            for row in each["cells"] if each["study"] == study else ():
                by_cell.setdefault(tuple(row["cell"]), []).append(row)
        for cell, found in by_cell.items():
            if len(found) > 1:
                others = {"BF16": by_cell[BASELINE]}
                others |= {name: by_cell.get((cell[0], name)) for name in ("none", "tis")}
                numbers = numbers_of(found, {name: each for name, each in others.items() if each})
                numbers |= told(found)
                shown = {name: each._asdict() for name, each in numbers.items()}
                head = {"study": study, "cell": "-".join(cell), "checkpoints": len(found)}
                rows.append(head | shown)
    return rows


def numbers_of(rows: list[Row], others: dict[str, list[Row]]) -> dict[str, Estimate]:
    """Return a cell's numbers, those that its rows have, also against other cells.

    Lengths are in percent of the true gradient's; a `sideways square` is in its square's percent,
    so that 1 is a tenth of its length.
    """
    found: dict[str, Estimate] = {}
    if "expected from BF16" in rows[0]:
        found["along"] = mean_of([100 * row["expected from BF16"]["along"] for row in rows])
        found["sideways square"] = mean_of(
            [100 * row["expected from BF16"]["across"] for row in rows]
        )
    if "expected slope" in rows[0]["repetitions"][0]:
        of_rows, of_bf16 = (_each(each, "expected slope") for each in (rows, others["BF16"]))
        found["expected gain"] = percent_more(of_rows, of_bf16)
    if "sampled" in rows[0]:
        noise, of_bf16 = (
            [row["sampled"]["noise"] for row in each] for each in (rows, others["BF16"])
        )
        found["noise"] = percent_more(noise, of_bf16)
        found["cosine"] = mean_of(_each(rows, "cosine"))
        found["norm"] = mean_of(_each(rows, "norm"))
    for name in ("in BF16", "in its own engine"):
        if name in rows[0]["repetitions"][0]:
            for other, its in others.items():
                found[f"{name}, from {other}"] = _apart(rows, its, name)
    if "kl" in rows[0]["repetitions"][0]:
        found["kl"] = mean_of(_each(rows, "kl"))
    return found


def told(rows: list[Row]) -> dict[str, Estimate]:
    """Return of chosen tokens their share, in percent, mean advantage, and how many are bad."""
    found: dict[str, Estimate] = {}
    for name in ("clipped", "masked", "here"):
        steps = [row["repetitions"] for row in rows]
        shares = [sum(step.get(f"{name} share", 0.0) for step in each) for each in steps]
        if not sum(shares):
            continue
        found[f"{name} share"] = mean_of(
            [100 * share / len(each) for share, each in zip(shares, steps, strict=True)]
        )
        for key in (f"{name} advantage", f"{name} bad"):
            weighed = [
                sum(step[f"{name} share"] * step.get(key, 0.0) for step in each) for each in steps
            ]
            found[key] = ratio_of(weighed, shares)
    return found


def sideways(square: Estimate) -> tuple[float, float]:
    """Return the length across the true gradient, in percent of it, and what it is at most.

    The most is that of two standard errors.
    """
    most = math.sqrt(max(0.0, square.mean + 2 * square.error))
    return 10 * math.sqrt(max(0.0, square.mean)), 10 * most


def _each(rows: list[Row], name: str) -> list[float]:
    return [fmean(step[name] for step in row["repetitions"]) for row in rows]


def _apart(rows: list[Row], others: list[Row], name: str) -> Estimate:
    pairs = zip(_each(rows, name), _each(others, name), strict=True)
    return mean_of([one - other for one, other in pairs])


HEAD = (
    "cell",
    "gain, dense",
    "experts",
    "sideways, dense",
    "experts",
    "four updates, dense",
    "experts",
)


def page_table(rows: list[Row]) -> list[tuple[str, ...]]:
    """Return the table that docs/research/one-step.md shows, its heading first."""
    by_cell = {(row["study"], row["cell"]): row for row in rows}
    cells = [cell for study, cell in by_cell if study == "dense" and " " not in cell]
    table: list[tuple[str, ...]] = [HEAD]
    for cell in cells[1:]:
        once = [by_cell[study, cell] for study in ("dense", "experts")]
        four = [by_cell[f"{study} four updates", cell] for study in ("dense", "experts")]
        gains = [Estimate(**row["expected gain"]).text("+.1f") for row in once]
        lengths = [
            "{:.0f} (to {:.0f})".format(*sideways(Estimate(**row["sideways square"])))
            for row in once
        ]
        points = [Estimate(**row["in BF16, from BF16"]).text("+.2f") for row in four]
        table.append((f"`{cell}`", *gains, *lengths, *points))
    return table
