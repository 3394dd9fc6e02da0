"""What is measured of the runs that earlier studies kept (docs/research/earlier-studies.md).

Runs of recipes.grpo, each validated in its cell's own engine. `judge --earlier` judges them.
"""

from __future__ import annotations

from statistics import fmean

from fp8_nemo.report.compare import Comparison, MeanOfSeeds, mean_of_seeds
from fp8_nemo.report.runs import FinishedRun


def late_accuracy(run: FinishedRun) -> float | None:
    """Return the mean of the validations in the last third of a finished run, in points."""
    if run.state != "finished":
        return None
    steps, validated = run.recipe.grpo.steps, run.series("val/accuracy")
    late = [value for step, value in validated.items() if 3 * step > 2 * steps]
    return 100 * fmean(late) if late else None


def gain(run: FinishedRun) -> float | None:
    """Return the late accuracy less the one before training, in points."""
    first, late = run.series("val/accuracy").get(0), late_accuracy(run)
    return None if first is None or late is None else late - 100 * first


def area(run: FinishedRun) -> float | None:
    """Return the mean of a finished run's validations, that before training left out, in points."""
    values = [value for step, value in run.series("val/accuracy").items() if step]
    return 100 * fmean(values) if values and run.state == "finished" else None


def means(comparison: Comparison) -> list[tuple[str, ...]]:
    """Lay out what each cell reached and how it mismatched, as `report.markdown_table` takes it."""
    table = [("cell", "seeds", "late accuracy, points", "KL, nats per token", "rejected")]
    for cell in comparison.cells:
        late = [value for run in cell.runs if (value := late_accuracy(run)) is not None]
        numbers = (
            _text(mean_of_seeds(late), ".1f"),
            _text(cell.numbers["KL"], ".1e"),
            _text(cell.numbers["mask"], ".2%"),
        )
        table.append((cell.label, str(len(cell.runs)), *numbers))
    return table


def _text(found: MeanOfSeeds | None, style: str) -> str:
    return found.text(style) if found else "-"
