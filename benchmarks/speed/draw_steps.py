"""Draw the seconds of a step by phase, from results files of `benchmarks.speed.step`.

python -m benchmarks.speed.draw_steps

Writes docs/figures/step-8b.svg, which README shows. Every number in the figure is a text that
`tests/test_docs.py` compares with the files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "docs" / "figures" / "step-8b.svg"
PANELS = {
    "answers of 2,000 tokens, 8 GPUs": "step-8b-h200.json",
    "answers of 7,168 tokens, 32 GPUs": "step-8b-long-h200.json",
}
CELLS = ("bf16", "fp8-kv-attn", "fp8-e2e", "fp8-e2e-kv-attn")
COLORS = {"rollout": "#0072B2", "logprob": "#E69F00", "train": "#009E73", "refit": "#CC79A7"}
"""Okabe and Ito's, which the colour-blind tell apart."""


def rows_of(file: str) -> dict[str, dict[str, Any]]:
    """Return a results file's rows by precision: `{"bf16": {"rollout": 36.7, ...}}`."""
    rows = json.loads((ROOT / "benchmarks" / "results" / file).read_text())["rows"]
    return {row["cell"].partition("/")[2].removesuffix("-tis"): row for row in rows}


def label(row: dict[str, Any]) -> str:
    """Return what stands at the end of a bar: `120 s, 1.09x`."""
    return f"{row['step']:.0f} s" + (f", {row['times_bf16']:.2f}x" if "times_bf16" in row else "")


def draw_panel(axes: Axes, title: str, rows: dict[str, dict[str, Any]]) -> None:
    """Draw one workload: a bar of phases for each precision, the first on top."""
    for place, cell in enumerate(reversed(CELLS)):
        left = 0.0
        for phase, color in COLORS.items():
            name = phase if place == 0 else None
            axes.barh(place, rows[cell][phase], left=left, color=color, label=name, height=0.7)
            left += rows[cell][phase]
        axes.text(left + 2, place, label(rows[cell]), va="center")
    axes.set_yticks(range(len(CELLS)), reversed(CELLS))
    axes.set_xlim(0, 235)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("seconds")


def main() -> None:
    """Draw both workloads side by side."""
    matplotlib.rcParams |= {"svg.hashsalt": "step-8b", "svg.fonttype": "none", "font.size": 10}
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (title, file) in zip(panels, PANELS.items(), strict=True):
        draw_panel(axes, title, rows_of(file))
    figure.suptitle("Llama 3.1 8B: FP8 shortens a step where answers are long", weight="bold")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    TARGET.parent.mkdir(exist_ok=True)
    figure.savefig(TARGET, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
