"""Draw where a decode step goes, from results files of `benchmarks.speed.decode_profile`.

python -m benchmarks.speed.draw_decode

Writes docs/figures/decode-8b.svg, which docs/speed.md shows. Every number in the figure is a text
that `tests/test_docs.py` compares with the files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "docs" / "figures" / "decode-8b.svg"
CELLS = {"bf16": "bf16", "fp8-linear": "linear", "fp8-kv-attn": "kv"}
"""Precisions, and what names their file: `decode-kv-h100.json`."""
POINTS = {(64, 1024): "64 sequences of 1k tokens", (32, 8192): "32 sequences of 8k tokens"}
PARTS = {
    "attention": ("attention",),
    "products": ("linear products",),
    "quantization": ("norm or activation, quantized", "quantization"),
    "sampling": ("sampling",),
}
COLORS = {"attention": "#0072B2", "products": "#009E73", "quantization": "#E69F00",
          "sampling": "#CC79A7", "rest": "#BBBBBB"}  # fmt: skip
"""Okabe and Ito's, which the colour-blind tell apart."""


def rows_of(name: str) -> dict[tuple[int, int], dict[str, Any]]:
    """Return a file's rows by sequences and tokens of context."""
    file = ROOT / "benchmarks" / "results" / f"decode-{name}-h100.json"
    return {(row["batch"], row["prompt"]): row for row in json.loads(file.read_text())["rows"]}


def parts_of(row: dict[str, Any]) -> dict[str, float]:
    """Return milliseconds of a step by part; the rest holds what the device waited for, too."""
    classes = row["profile"]["classes_ms"]
    parts = {name: sum(classes[each] for each in kinds) for name, kinds in PARTS.items()}
    return parts | {"rest": row["wall_ms"] - sum(parts.values())}


def label(row: dict[str, Any], base: dict[str, Any]) -> str:
    """Return what stands at the end of a bar: `7.0 ms, 1.43x`."""
    gain = "" if row is base else f", {base['wall_ms'] / row['wall_ms']:.2f}x"
    return f"{row['wall_ms']:.1f} ms{gain}"


def draw_panel(axes: Axes, point: tuple[int, int]) -> None:
    """Draw one batch: a bar of parts for each precision, the first on top."""
    rows = {cell: rows_of(name)[point] for cell, name in CELLS.items()}
    for place, cell in enumerate(reversed(CELLS)):
        left = 0.0
        for part, width in parts_of(rows[cell]).items():
            name = part if place == 0 else None
            axes.barh(place, width, left=left, color=COLORS[part], label=name, height=0.7)
            left += width
        axes.text(left + 0.3, place, label(rows[cell], rows["bf16"]), va="center")
    axes.set_yticks(range(len(CELLS)), reversed(CELLS))
    axes.set_xlim(0, 24)
    axes.set_title(POINTS[point], loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("milliseconds")


def main() -> None:
    """Draw both batches side by side."""
    matplotlib.rcParams |= {"svg.hashsalt": "decode-8b", "svg.fonttype": "none", "font.size": 10}
    figure = Figure(figsize=(11, 2.9), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, point in zip(panels, POINTS, strict=True):
        draw_panel(axes, point)
    figure.suptitle("A decode step of Llama 3.1 8B on one H100", weight="bold")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    TARGET.parent.mkdir(exist_ok=True)
    figure.savefig(TARGET, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
