"""Draw where a decode step goes, from results files of `benchmarks.speed.decode_profile`.

python -m benchmarks.speed.draw_decode

Writes docs/figures/decode-8b.svg and decode-30b.svg, which docs/speed.md shows. Every number in a
figure is a text that `tests/test_docs.py` compares with the files.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from benchmarks.speed.draw_steps import ROOT, begun, write

CELLS = {"bf16": "bf16", "fp8-linear": "linear", "fp8-kv-attn": "kv"}
"""Precisions, and what names their file: `decode-kv-h100.json`."""
POINTS = {(64, 1024): "64 sequences of 1k tokens", (32, 8192): "32 sequences of 8k tokens"}
EXPERTS = "fused_moe_kernel"
PARTS = {
    "attention": ("attention",),
    "products": ("linear products",),
    "quantization": ("norm or activation, quantized", "quantization"),
    "sampling": ("sampling",),
}
COLORS = {"attention": "#0072B2", "experts": "#56B4E9", "products": "#009E73",
          "quantization": "#E69F00", "sampling": "#CC79A7", "rest": "#BBBBBB"}  # fmt: skip
"""Okabe and Ito's, which the colour-blind tell apart."""


class Drawing(NamedTuple):
    """Say what a figure shows."""

    file: str
    """Of a results file, with `{}` for what `CELLS` says."""
    title: str
    longest: float
    """Milliseconds up to which its axis goes."""


DRAWINGS = {
    "decode-8b": Drawing("decode-{}-h100", "A decode step of Llama 3.1 8B on one H100", 24),
    "decode-30b": Drawing("decode-30b-{}-h200", "A decode step of Qwen3-30B-A3B on one H200", 27),
}


def rows_of(drawing: Drawing, cell: str) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the rows of a precision's file by sequences and tokens of context."""
    file = ROOT / "benchmarks" / "results" / f"{drawing.file.format(CELLS[cell])}.json"
    return {(row["batch"], row["prompt"]): row for row in json.loads(file.read_text())["rows"]}


def parts_of(row: dict[str, Any]) -> dict[str, float]:
    """Return milliseconds of a step by part; the rest holds what the device waited for, too.

    The experts' products stand apart from the other linear layers'; parts of nothing are left out.
    """
    classes = row["profile"]["classes_ms"]
    parts = {name: sum(classes[each] for each in kinds) for name, kinds in PARTS.items()}
    rest = row["wall_ms"] - sum(parts.values())
    experts = sum(each["ms"] for each in row["profile"]["top"] if each["kernel"] == EXPERTS)
    parts["products"] -= experts
    parts |= {"experts": experts, "rest": rest}
    return {name: parts[name] for name in COLORS if parts[name]}


def label(row: dict[str, Any], base: dict[str, Any]) -> str:
    """Return what stands at the end of a bar: `7.0 ms, 1.43x`."""
    gain = "" if row is base else f", {base['wall_ms'] / row['wall_ms']:.2f}x"
    return f"{row['wall_ms']:.1f} ms{gain}"


def draw_panel(axes: Axes, drawing: Drawing, point: tuple[int, int]) -> None:
    """Draw one batch: a bar of parts for each precision, the first on top."""
    rows = {cell: rows_of(drawing, cell)[point] for cell in CELLS}
    for place, cell in enumerate(reversed(CELLS)):
        left = 0.0
        for part, width in parts_of(rows[cell]).items():
            name = part if place == 0 else None
            axes.barh(place, width, left=left, color=COLORS[part], label=name, height=0.7)
            left += width
        axes.text(left + 0.3, place, label(rows[cell], rows["bf16"]), va="center")
    axes.set_yticks(range(len(CELLS)), reversed(CELLS))
    axes.set_xlim(0, drawing.longest)
    axes.set_title(POINTS[point], loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("milliseconds")


def draw(name: str, drawing: Drawing) -> None:
    """Draw both batches side by side."""
    figure = begun(name, 11, 2.9)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, point in zip(panels, POINTS, strict=True):
        draw_panel(axes, drawing, point)
    write(figure, name, drawing.title)


def main() -> None:
    """Draw each figure."""
    for name, drawing in DRAWINGS.items():
        draw(name, drawing)


if __name__ == "__main__":
    main()
