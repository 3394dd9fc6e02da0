"""Draw what one step of each cell does against BF16's, from `benchmarks.learning.one_step`.

python -m benchmarks.learning.one_step.draw

Writes docs/figures/one-step.svg, which docs/research/one-step.md shows.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.learning.one_step.judge import Estimate, sideways

ROOT = Path(__file__).parents[3]
TARGET = ROOT / "docs" / "figures" / "one-step.svg"
RESULTS = ROOT / "benchmarks" / "results" / "one-step-cpu.json"
CELLS = (
    *("fp8-linear-none", "fp8-linear-tis", "fp8-linear-mis"),
    *("fp8-kv-attn-none", "fp8-kv-attn-tis", "fp8-kv-attn-mis", "fp8-kv-attn-seq-tis"),
    *("fp8-e2e-none", "fp8-e2e-kv-attn-none", "fp8-e2e-kv-attn-tis"),
)
"""From the top; `fp8-e2e-tis` is `fp8-e2e-none`, since all its ratios are 1."""
STUDIES = {"dense": ("#0072B2", "o", 0.14), "experts": ("#D55E00", "s", -0.14)}
FOUR = {f"{name} four updates": style for name, style in STUDIES.items()}
"""Colour, marker and height by study; Okabe and Ito's, which the colour-blind tell apart."""


def rows_of() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of the summary by study and cell."""
    return {
        (each["study"], each["cell"]): each for each in json.loads(RESULTS.read_text())["summary"]
    }


def gain(row: dict[str, Any]) -> tuple[float, float, float]:
    """Return the expected gain in percent of BF16's, with two standard errors down and up."""
    mean, error = row["expected gain"].values()
    return mean, 2 * error, 2 * error


def across(row: dict[str, Any]) -> tuple[float, float, float]:
    """Return the length sideways in percent, and how much longer it is at most."""
    found, most = sideways(Estimate(**row["sideways square"]))
    return found, 0.0, most - found


def after(row: dict[str, Any]) -> tuple[float, float, float]:
    """Return points of accuracy after four updates, with two standard errors."""
    mean, error = row["in BF16, from BF16"].values()
    return mean, 2 * error, 2 * error


PANELS = (
    ("what a step gains, % above BF16's", STUDIES, gain),
    ("sideways, % of BF16's gradient", STUDIES, across),
    ("four updates, points from BF16's step", FOUR, after),
)


def draw(axes: Axes, title: str, studies: dict[str, Any], numbers: Any) -> None:
    """Draw a number of every cell, with what two standard errors allow."""
    rows = rows_of()
    for study, (color, marker, height) in studies.items():
        for place, cell in enumerate(reversed(CELLS)):
            value, down, up = numbers(rows[study, cell])
            axes.errorbar(
                value, place + height, xerr=[[down], [up]], color=color, marker=marker,
                markersize=5, capsize=2, label=study.split()[0] if place == 0 else None,
            )  # fmt: skip
    axes.axvline(0, color="#999999", linewidth=0.8, zorder=0)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#EEEEEE")


def main() -> None:
    """Draw the panels side by side."""
    matplotlib.rcParams |= {"svg.hashsalt": "one-step", "svg.fonttype": "none", "font.size": 10}
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    panels = figure.subplots(1, len(PANELS), sharey=True)
    for axes, panel in zip(panels, PANELS, strict=True):
        draw(axes, *panel)
    names = [re.sub("-(none|mis|(seq-)?tis)$", r" \1", cell) for cell in reversed(CELLS)]
    panels[0].set_yticks(range(len(CELLS)), names)
    figure.suptitle("One step from the same weights, with two standard errors", weight="bold")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(TARGET, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
