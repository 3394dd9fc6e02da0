"""Draw the seconds of a step by phase: pairs that NeMo RL ran, and sums of phases.

python -m benchmarks.speed.draw_steps

Writes docs/figures/real-step-8b.svg, which README shows, from `benchmarks.speed.real_steps`, and
step-8b.svg from `benchmarks.speed.step`. Every number in the figures is a text that
`tests/test_docs.py` compares with the files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "figures"


class Drawing(NamedTuple):
    """A figure: its title, and a results file for each panel's."""

    title: str
    panels: dict[str, str]
    width: float
    height: float


DRAWINGS = {
    "real-step-8b": Drawing(
        "Llama 3.1 8B in NeMo RL: seconds of a step by phase (black: each step)",
        {
            "four H200, all weights, 128 answers of 3,900 tokens": "real-steps-8b-4-h200.json",
            "four H100, likewise": "real-steps-8b-4-h100.json",
        },
        11,
        2.6,
    ),
    "step-8b": Drawing(
        "Llama 3.1 8B: FP8 shortens a step where answers are long",
        {
            "answers of 2,000 tokens, 8 GPUs": "step-8b-h200.json",
            "answers of 7,168 tokens, 32 GPUs": "step-8b-long-h200.json",
        },
        11,
        3.4,
    ),
}
STOCK = "NeMo RL's FP8 recipe"
CELLS = ("bf16", "fp8-kv-attn", "fp8-e2e", "fp8-e2e-kv-attn", STOCK)
COLORS = {
    "rollout": "#0072B2",
    "logprob": "#E69F00",
    "train": "#009E73",
    "refit": "#CC79A7",
    "rest": "#999999",
}
"""Okabe and Ito's, which the colour-blind tell apart."""


def rows_of(file: str) -> dict[str, dict[str, Any]]:
    """Return a results file's rows by precision: `{"bf16": {"rollout": 36.7, ...}}`."""
    content = json.loads((ROOT / "benchmarks" / "results" / file).read_text())
    rows = {row.get("precision") or cell_precision(row["cell"]): row for row in content["rows"]}
    return rows | dict(zip([STOCK], content.get("stock", []), strict=False))


def drawn(file: str) -> dict[str, dict[str, Any]]:
    """Return the rows of a results file that are drawn, the first on top."""
    rows = rows_of(file)
    return {precision: rows[precision] for precision in CELLS if precision in rows}


def cell_precision(cell: str) -> str:
    """Return the precision of `llama31-8b/fp8-e2e-tis`."""
    return cell.partition("/")[2].removesuffix("-tis")


def label(row: dict[str, Any]) -> str:
    """Return what stands at the end of a bar: `120 s, 1.09x`."""
    gain = row.get("times_bf16")
    gain = gain["step"] if isinstance(gain, dict) else gain
    return f"{row['step']:.0f} s" + (f", {gain:.2f}x" if gain else "")


def draw_panel(axes: Axes, title: str, rows: dict[str, dict[str, Any]]) -> None:
    """Draw one workload, on a scale of its own: a bar of phases a precision, the first on top."""
    longest = max(row["step"] for row in rows.values())
    for place, row in enumerate(reversed(rows.values())):
        left = 0.0
        for phase, color in COLORS.items():
            if phase not in row:
                continue
            name = phase if place == 0 else None
            axes.barh(place, row[phase], left=left, color=color, label=name, height=0.7)
            left += row[phase]
        steps = row.get("raw", {}).get("step", [])
        axes.plot(steps, [place] * len(steps), "|", color="black", markersize=9)
        axes.text(max(left, *steps, 0) + longest / 90, place, label(row), va="center")
    axes.set_yticks(range(len(rows)), reversed(rows))
    axes.set_xlim(0, 1.2 * longest)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("seconds")


def begun(name: str, width: float, height: float) -> Figure:
    """Return an empty figure of so many inches, which will be the same file whenever drawn."""
    matplotlib.rcParams |= {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 10}
    return Figure(figsize=(width, height), layout="constrained")


def write(figure: Figure, name: str, title: str) -> None:
    """Write a figure under its title, with the legend of its first panel."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.suptitle(title, weight="bold")
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None}, facecolor="white")


def draw(name: str, drawing: Drawing) -> None:
    """Draw a figure's workloads side by side, and write it."""
    figure = begun(name, drawing.width, drawing.height)
    workloads = {title: drawn(file) for title, file in drawing.panels.items()}
    alike = len({tuple(rows) for rows in workloads.values()}) == 1
    panels = figure.subplots(1, len(workloads), sharey=alike, squeeze=False)[0]
    for axes, (title, rows) in zip(panels, workloads.items(), strict=True):
        draw_panel(axes, title, rows)
    write(figure, name, drawing.title)


def main() -> None:
    """Draw them all."""
    for name, drawing in DRAWINGS.items():
        draw(name, drawing)


if __name__ == "__main__":
    main()
