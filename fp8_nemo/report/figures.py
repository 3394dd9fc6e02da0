"""Draw a comparison: a metric at every step, under a title that states what it shows."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator

from fp8_nemo.report.against_bf16 import against_baselines
from fp8_nemo.report.compare import LAST_STEPS, Cell, Comparison
from fp8_nemo.runs.metrics import replaced

LEAST = 1e-7  # on a logarithmic axis; a KL below it is rounding: FP8 on both sides has 1e-16 here
MOST_POINTS = 100  # a curve of 1000 noisy steps is legible as means of 10
INCHES = 8.0  # of a picture that stands alone; its text is of 10 points
TWO_COLUMNS = 6.0  # inches that a legend of two columns needs
MOST_RUNS = 30  # seeds of more would hide the means
MOST_NAMES = 3  # cells that a title names
OKABE_ITO = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
DASHES, MARKERS = ("-", "--", "-.", ":"), ("o", "s", "^", "D", "v")


class Curve(NamedTuple):
    """Describe one figure, below the table of its section: a metric at every step."""

    name: str
    section: str
    key: str
    axis: str
    scale: str


CURVES = (
    Curve("validation", "Learning", "val/accuracy", "validation accuracy", "linear"),
    Curve("reward", "Learning", "reward/mean", "mean reward", "linear"),
    Curve("mismatch", "Mismatch and correction", "mismatch/kl", "KL, nats per token", "log"),
)


def save_figures(comparison: Comparison, folder: Path) -> dict[str, list[Path]]:
    """Save one PNG for each of `CURVES` that has a point; return them by section of the report."""
    saved: dict[str, list[Path]] = {}
    for curve, figure in draw_figures(comparison):
        saved.setdefault(curve.section, []).append(folder / f"{curve.name}.png")
        with replaced(saved[curve.section][-1]) as file:
            figure.savefig(file, format="png")
    return saved


def draw_figures(comparison: Comparison) -> Iterator[tuple[Curve, Figure]]:
    """Draw each of `CURVES` that has a point, under its finding."""
    for curve in CURVES:
        if figure := draw(curve, comparison, INCHES):
            figure.suptitle(_plain(finding(curve, comparison), 80), fontsize=11)
            yield curve, figure


def draw(curve: Curve, comparison: Comparison, width: float) -> Figure | None:
    """Draw a metric of every cell, without a title; None if no run has a point to draw.

    Args:
        curve: what is drawn.
        comparison: whose cells.
        width: of the figure, in inches.
    """
    least = LEAST if curve.scale == "log" else -math.inf
    seen = [
        index for index, cell in enumerate(comparison.cells) if _is_seen(cell, curve.key, least)
    ]
    if not seen:
        return None
    series = [run.series(curve.key) for run in comparison.runs]
    neighbours = math.ceil(max(map(len, series)) / MOST_POINTS)
    columns, letters = (2, 45) if width >= TWO_COLUMNS else (1, 35)
    labels = {index: _plain(comparison.cells[index].label, letters) for index in seen}
    height = 1.2 + 0.35 * width + _legend_height(list(labels.values()), columns)
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    axes = figure.subplots()
    for index in seen:
        cell, with_seeds = comparison.cells[index], len(series) <= MOST_RUNS
        _draw_cell(axes, cell, index, curve, neighbours, labels[index], with_seeds)
    step = "step" if neighbours == 1 else f"step (a point is the mean of {neighbours})"
    axes.set(xlabel=step, yscale=curve.scale)
    axes.set_title(curve.axis, loc="left", fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 5, 10]))
    if curve.key == "val/accuracy":
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    if curve.scale == "log":
        _few_ticks(axes)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower left", ncols=columns, frameon=False, handlelength=4)
    return figure


def _plain(text: str, letters: int) -> str:
    """Break a text into lines; a dollar in a path would be matplotlib's mathematics."""
    return textwrap.fill(text, letters).replace("$", r"\$")


def _few_ticks(axes: Axes) -> None:
    """Tick a logarithmic axis at powers of ten, or at 1, 2 and 5 within two of them."""
    low, high = max(axes.get_ylim()[0], LEAST), axes.get_ylim()[1]
    axes.set_ylim(low, high)
    axes.yaxis.set_major_locator(LogLocator(subs=(1,) if high / low > 100 else (1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}".replace("e-0", "e-"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())


def to_svg(figure: Figure, name: str) -> str:
    """Write a figure as an SVG element of a page: its font is the page's, and so are its colors.

    The colors of `OKABE_ITO` become the variables `--ink` and `--c1` to `--c6` of the page's style,
    so that they follow its light or dark scheme.

    Args:
        figure: to be written.
        name: unlike that of any other figure in the page, whose parts would have the same ids.
    """
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata={"Date": None}, transparent=True)
    text = file.getvalue().partition("<svg")[2]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r' id="[\w.]+_\d+"| font-family:[^;]*;', "", text)
    for color, variable in zip(OKABE_ITO, ("ink", "c1", "c2", "c3", "c4", "c5", "c6"), strict=True):
        text = re.sub(color, f"var(--{variable})", text, flags=re.I)
    return f"<svg{text}"


def finding(curve: Curve, comparison: Comparison) -> str:
    """Return what a figure shows, in one sentence."""
    return {"validation": _learned, "reward": _rewarded, "mismatch": _mismatched}[curve.name](
        comparison
    )


def _learned(comparison: Comparison) -> str:
    words: dict[str, list[str]] = {}
    for each in against_baselines(comparison):
        words.setdefault(each.accuracy_word, []).append(each.cell)
    ends = {
        "higher": "more accurate than BF16",
        "equal": "as accurate as BF16",
        "lower": "less accurate than BF16",
        "open": "not decided",
        "one seed": "not decided by one seed",
        "diverged": "diverged",
    }
    if words.keys() == {"open"}:
        return "No accuracy is shown to differ from BF16's"
    parts = [f"{_listed(words[word])}: {end}" for word, end in ends.items() if word in words]
    return "; ".join(parts) or "No accuracy can be held against BF16 yet"


def _listed(labels: Sequence[str]) -> str:
    """Write `a, b and c`, or only how many there are."""
    if len(labels) > MOST_NAMES:
        return f"{len(labels)} cells"
    return " and ".join(filter(None, [", ".join(labels[:-1]), labels[-1]]))


def _is_seen(cell: Cell, key: str, least: float) -> bool:
    return any(value >= least for run in cell.runs for value in run.series(key).values())


def _rewarded(comparison: Comparison) -> str:
    gains = {}
    for cell in comparison.cells:
        rewards = [list(run.series("reward/mean").values()) for run in cell.runs]
        each = [_risen(r) for r in rewards if len(r) > 1]
        if each:
            gains[cell.label] = fmean(each)
    if not gains:
        return "The reward of one step"
    flat = [label for label, gain in gains.items() if not gain > 0]
    if flat:
        return f"The reward does not rise in {_listed(flat)}"
    least, most = min(gains.values()), max(gains.values())
    return f"The reward rises in every cell, by {least:.2f} to {most:.2f}"


def _risen(rewards: Sequence[float]) -> float:
    """Return what the last steps' mean is above the first's, which share no step."""
    steps = min(LAST_STEPS, len(rewards) // 2)
    return fmean(rewards[-steps:]) - fmean(rewards[:steps])


def _mismatched(comparison: Comparison) -> str:
    cells = [cell for cell in comparison.cells if cell.numbers["KL"]]
    kl = {cell.label: each.mean for cell in cells if (each := cell.numbers["KL"])}
    finite = {label: mean for label, mean in kl.items() if math.isfinite(mean)}
    said = []
    if finite:
        most = max(finite, key=finite.__getitem__)
        said.append(f"The mean KL is highest in {most}, {finite[most]:.1e}")
    if diverged := [label for label in kl if label not in finite]:
        said.append(f"not finite in {_listed(diverged)}")
    if unseen := [each.label for each in cells if not _is_seen(each, "mismatch/kl", LEAST)]:
        said.append(f"below {LEAST:g}, so not drawn: {_listed(unseen)}")
    return "; ".join(said)


def _legend_height(labels: list[str], columns: int) -> float:
    """Return the inches of a legend, whose first column holds the first labels."""
    each = math.ceil(len(labels) / columns)
    sides = (labels[start : start + each] for start in range(0, len(labels), each))
    return 0.22 * max(sum(1 + label.count("\n") for label in side) for side in sides)


def _draw_cell(
    axes: Axes, cell: Cell, index: int, curve: Curve, width: int, label: str, with_seeds: bool
) -> None:
    """Draw the mean of a cell's seeds as a thick line, as far as all go; several as thin lines."""
    color, dashes, marker = (each[index % len(each)] for each in (OKABE_ITO, DASHES, MARKERS))
    apart = cell.runs[0].recipe.grpo.validate_every if curve.key == "val/accuracy" else 1
    seeds = [series for run in cell.runs if (series := run.series(curve.key))]
    for series in seeds if with_seeds and len(seeds) > 1 else ():
        axes.plot(*_points(series, width, apart), color=color, linewidth=0.7, alpha=0.4)
    shared = sorted(set.intersection(*map(set, seeds)))
    mean = {step: fmean(each[step] for each in seeds) for step in shared}
    steps, means = _points(mean, width, apart)
    every = max(1, len(steps) // 8)
    axes.plot(
        steps, means, color=color, linestyle=dashes, marker=marker, linewidth=2, markersize=5,
        markevery=[*range(index % every, len(steps), every), *_alone(means)], label=label,
    )  # fmt: skip


def _points(series: Mapping[int, float], width: int, apart: int) -> tuple[list[float], list[float]]:
    """Return steps and values, each the mean of `width` neighbours, with NaN where one is missing.

    A line is drawn from point to point, and ends at NaN: it must not cross a hole.

    Args:
        series: step -> value; one that is NaN is missing.
        width: points of the series in a point of the figure.
        apart: steps between neighbours, at most.
    """
    pieces: list[list[tuple[int, float]]] = []
    for step, value in series.items():
        if not math.isfinite(value):
            continue
        if not pieces or step - pieces[-1][-1][0] > apart:
            pieces.append([])
        pieces[-1].append((step, value))
    steps, values = [], []
    for piece in pieces:
        for start in range(0, len(piece), width):
            group = piece[start : start + width]
            steps.append(fmean(step for step, _ in group))
            values.append(fmean(value for _, value in group))
        steps.append(math.nan)
        values.append(math.nan)
    return steps[:-1], values[:-1]


def _alone(values: Sequence[float]) -> list[int]:
    """Return the points between two holes, of which no line would tell."""
    walled = [math.nan, *values, math.nan]
    return [
        at
        for at, value in enumerate(values)
        if not math.isnan(value) and math.isnan(walled[at]) and math.isnan(walled[at + 2])
    ]
