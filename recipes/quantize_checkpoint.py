"""Convert a Hugging Face checkpoint to a blockwise FP8 one that vLLM serves as it is.

python -m recipes.quantize_checkpoint SRC DST [--calibrate TEXTS] [precision=fp8-linear ...]

Shard by shard; the same line goes on where it was stopped. `precision=fp8-kv-attn` adds the scales
of an FP8 cache, from `--calibrate`, a file with a text on each line. Prints what FP8 cost each
layer; DST/quantization.json has every weight.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from fp8_nemo.compose import ComposeError, compose
from fp8_nemo.schema import Recipe

if TYPE_CHECKING:
    from fp8_nemo.fp8_checkpoint import WeightError

MARGIN = 1.05  # on the largest value of the calibration texts, as conf/glue/ours.yaml's


def main(arguments: list[str] | None = None) -> int:
    """Convert and print; 2 if SRC, DST or the settings are wrong."""
    options = _options(sys.argv[1:] if arguments is None else arguments)
    try:
        recipe = _recipe(options.settings)
        scales = _kv_scales(recipe, options.source, options.calibrate)
        errors = _converted(options.source, options.target, recipe, scales)
    except (ComposeError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    Console(width=100).print(table(errors))
    print(options.target)
    return 0


def table(errors: list[WeightError]) -> Table:
    """One row a layer: mean and largest relative error, and which weight has it."""
    from fp8_nemo.fp8_checkpoint import by_layer

    rows = Table(title="relative error of FP8 weights", title_justify="left")
    for name in ("layer", "weights", "mean", "largest", "in", "became 0"):
        rows.add_column(name, justify="left" if name == "in" else "right")
    for layer, found in by_layer(errors).items():
        mean = fmean(error.relative for error in found)
        zeroed = max(error.zeroed for error in found)
        rows.add_row(
            str(layer), str(len(found)), f"{mean:.4f}", f"{found[0].relative:.4f}",
            found[0].name.partition(f".{layer}.")[2].removesuffix(".weight"), f"{zeroed:.2%}",
        )  # fmt: skip
    return rows


def _recipe(settings: list[str]) -> Recipe:
    strange = [word for word in settings if not word.startswith(("precision=", "precision."))]
    if strange:
        raise ValueError(f"{strange[0]}: recipes.quantize_checkpoint takes precision alone")
    [recipe] = compose(["precision=fp8-linear", *settings])
    if recipe.precision.rollout_linear != "fp8":
        raise ValueError(
            f"precision={recipe.precision.name}: its weights are BF16; choose precision=fp8-linear"
        )
    return recipe


def _kv_scales(recipe: Recipe, source: Path, texts: Path | None) -> dict[str, float] | None:
    if recipe.precision.rollout_kv != "fp8":
        if texts is not None:
            raise ValueError(
                f"--calibrate {texts}: precision={recipe.precision.name} has a cache in BF16; "
                "choose precision=fp8-kv-attn"
            )
        return None
    if texts is None:
        raise ValueError(
            f"precision={recipe.precision.name}: its FP8 cache needs scales; add --calibrate "
            "TEXTS, a file with a text on each line"
        )
    from fp8_nemo.local.calibrate import scales_of_texts

    lines = [line for line in texts.read_text().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"--calibrate {texts}: holds no text")
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn()) as bar:
        return scales_of_texts(source, bar.track(lines, description="calibrating"), MARGIN)


def _converted(
    source: Path, target: Path, recipe: Recipe, scales: dict[str, float] | None
) -> list[WeightError]:
    from fp8_nemo.fp8_checkpoint import quantize_checkpoint

    with Progress(*Progress.get_default_columns(), MofNCompleteColumn()) as bar:
        task = bar.add_task("", visible=False)

        def report(shard: str, done: int, total: int) -> None:
            bar.update(task, description=shard, completed=done, total=total, visible=True)

        return quantize_checkpoint(
            source, target, recipe.precision, kv_scales=scales, progress=report
        )


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("recipes.quantize_checkpoint", description=__doc__)
    parser.usage = argparse.SUPPRESS  # a mistake is one line
    parser.add_argument("source", metavar="SRC", type=Path)
    parser.add_argument("target", metavar="DST", type=Path)
    parser.add_argument("settings", metavar="precision=...", nargs="*")
    parser.add_argument("--calibrate", metavar="TEXTS", type=Path)
    return parser.parse_intermixed_args(words)


if __name__ == "__main__":
    raise SystemExit(main())
