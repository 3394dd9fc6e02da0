"""A comparison as pictures: one PNG per metric, legible for colour-blind readers."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fp8_nemo.report.compare import Cell, Comparison

LEAST = 1e-7  # on a logarithmic axis; a KL below it is rounding: FP8 on both sides has 1e-16 here
MOST_POINTS = 100  # a curve of 1000 noisy steps is legible as means of 10
OKABE_ITO = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
DASHES, MARKERS = ("-", "--", "-.", ":"), ("o", "s", "^", "D", "v")


class Curve(NamedTuple):
    """One figure, below the table of its section: a metric at every step."""

    name: str
    section: str
    key: str
    axis: str
    scale: str


CURVES = (
    Curve("reward", "Learning", "reward/mean", "mean reward", "linear"),
    Curve("validation", "Learning", "val/accuracy", "validation accuracy", "linear"),
    Curve("mismatch", "Mismatch and correction", "mismatch/kl", "KL, nats per token", "log"),
)


def save_figures(comparison: Comparison, folder: Path) -> dict[str, list[Path]]:
    """One PNG for each of `CURVES` that has a point, by section of the report."""
    saved: dict[str, list[Path]] = {}
    for curve, figure in draw_figures(comparison):
        saved.setdefault(curve.section, []).append(folder / f"{curve.name}.png")
        figure.savefig(saved[curve.section][-1])
    return saved


def draw_figures(comparison: Comparison) -> Iterator[tuple[Curve, Figure]]:
    """Each of `CURVES` that has a point."""
    for curve in CURVES:
        series = [run.series(curve.key) for run in comparison.runs]
        least = LEAST if curve.scale == "log" else -math.inf
        if not any(value >= least for each in series for value in each.values()):
            continue
        width = math.ceil(max(map(len, series)) / MOST_POINTS)
        labels = [_label(cell, curve) for cell in comparison.cells]
        figure = Figure(figsize=(8, 4.2 + _legend_height(labels)), dpi=150, layout="constrained")
        axes = figure.subplots()
        for index, (cell, label) in enumerate(zip(comparison.cells, labels, strict=True)):
            _draw(axes, cell, index, curve, width, label)
        step = "step" if width == 1 else f"step (a point is the mean of {width})"
        axes.set(xlabel=step, ylabel=curve.axis, yscale=curve.scale, title=comparison.title)
        if curve.scale == "log":
            axes.set_ylim(bottom=max(axes.get_ylim()[0], LEAST))
        axes.grid(alpha=0.3)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, handlelength=4)
        yield curve, figure


def _label(cell: Cell, curve: Curve) -> str:
    values = [value for run in cell.runs for value in run.series(curve.key).values()]
    unseen = curve.scale == "log" and values and max(values) < LEAST
    return textwrap.fill(cell.label + (f" (below {LEAST:g})" if unseen else ""), 45)


def _legend_height(labels: list[str]) -> float:
    """Inches of a legend of two columns, the first half of the labels in the first."""
    half = math.ceil(len(labels) / 2)
    lines = [
        sum(1 + label.count("\n") for label in side) for side in (labels[:half], labels[half:])
    ]
    return 0.22 * max(lines)


def _draw(axes: Axes, cell: Cell, index: int, curve: Curve, width: int, label: str) -> None:
    """Seeds as thin lines, their mean as a thick one, as far as every seed goes."""
    seeds = [series for run in cell.runs if (series := run.series(curve.key))]
    if not seeds:
        return
    color, dashes, marker = (each[index % len(each)] for each in (OKABE_ITO, DASHES, MARKERS))
    for series in seeds if len(seeds) > 1 else []:
        axes.plot(*_points(series, width), color=color, linewidth=0.7, alpha=0.4)
    shared = sorted(set.intersection(*map(set, seeds)))
    steps, means = _points({step: fmean(each[step] for each in seeds) for step in shared}, width)
    every = max(1, len(steps) // 8)
    axes.plot(
        steps, means, color=color, linestyle=dashes, marker=marker, linewidth=2, markersize=5,
        markevery=(index % every, every), label=label,
    )  # fmt: skip


def _points(series: Mapping[int, float], width: int) -> tuple[list[float], list[float]]:
    """Steps and values, each the mean of `width` neighbours."""
    pairs = list(series.items())
    groups = [pairs[start : start + width] for start in range(0, len(pairs), width)]
    steps = [fmean(step for step, _ in group) for group in groups]
    return steps, [fmean(value for _, value in group) for group in groups]
