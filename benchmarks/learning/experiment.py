"""Do FP8 recipes learn like BF16? Applies the rule of docs/research/earlier-studies.md to runs.

python -m recipes.grpo -m sweep=experiment
python -m benchmarks.learning.experiment outputs/small-llama --out FILE.json

One study at a time: runs of one cell and model differ in their seed alone. `keep_runs.py` keeps
their metrics. The rule was written before the runs and is not to be tuned here.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.record import add_options, keep, show
from fp8_nemo.report.against_bf16 import against_baselines
from fp8_nemo.report.compare import (
    Cell,
    Comparison,
    MeanOfSeeds,
    compare,
    differing,
    differing_problems,
    mean_of_seeds,
)
from fp8_nemo.report.runs import FinishedRun, find_runs, read_runs

MARGIN = 3.0
"""Points of accuracy: the smallest loss that a paper reports of FP8 rollouts is 2.9 (Jet-RL)."""
LEARNS = 10.0
"""Points that BF16 itself must gain on average, or nothing is said of accuracy."""
FEWEST = 3
"""Seeds that a verdict needs."""
GOOD, STILL_GOOD = 1.03, 1.05
"""The band of token_mult_prob_error that needs nothing special (NVIDIA, by secondary pages)."""
JUDGED_HERE = "Judged on the machine named here; a run's environment.json says where it ran."
THIRD = 1 / 3
BASELINE = "bf16-none"
KL = "mismatch/kl"
COLUMNS = {
    "first_accuracy": "first acc.",
    "last_accuracy": "last acc.",
    "kl": "KL",
    "abs_log_ratio_p99": "p99",
    "prob_error": "prob. error",
    "clipped": "clip",
    "rejected": "mask",
}
READ = {
    "cell": "cell",
    "seeds": "seeds",
    "late accuracy, points": "late_accuracy",
    "KL": "kl",
    "99th percentile": "abs_log_ratio_p99",
    "KL, last third by first": "kl_trend",
}
"""What a reader is shown of a row, by the heads of its columns."""
SUPPORTED, NOT_SUPPORTED, OPEN = "supported", "not supported", "not decidable"
KEEPS, LOSES = "keeps", "loses"

Cells = dict[tuple[str, str], Cell]
"""By model and PRECISION-CORRECTION."""


class Verdict(NamedTuple):
    """What the rule says of one claim: `Verdict("small-llama", "fp8-linear, ...", ...)`."""

    model: str
    claim: str
    source: str
    verdict: str
    evidence: str


class Learning(NamedTuple):
    """A claim on what a cell's accuracy does against BF16's: it keeps up with it, or it loses."""

    cell: str
    expected: str
    source: str

    def judge(self, model: str, cells: Cells) -> Verdict | None:
        """Judge by the interval of the late accuracies' differences; None if no cell was run."""
        if (model, self.cell) not in cells:
            return None
        text = f"{self.cell} {self.expected} against {BASELINE}"
        said = partial(Verdict, model, text, self.source)
        if (model, BASELINE) not in cells:
            return said(OPEN, f"no {BASELINE} to hold it against")
        cell, base = cells[model, self.cell], cells[model, BASELINE]
        if apart := _apart(cell, base):
            return said(OPEN, apart)
        learned = _over_seeds(base, gain)
        if learned is None or not learned.mean >= LEARNS:
            return said(OPEN, f"{BASELINE} itself gains {_points(learned)} points")
        found = difference(cell, base, late_accuracy)
        stopped, word = _unfinished(cell, base), learning_word(found)
        evidence = f"{_points(found)} points{stopped}"
        if word is None or stopped:
            return said(OPEN, evidence)
        return said(SUPPORTED if word == self.expected else NOT_SUPPORTED, evidence)


class Order(NamedTuple):
    """A claim on KL: of these cells each has more than the next one."""

    cells: tuple[str, ...]
    source: str

    def judge(self, model: str, cells: Cells) -> Verdict | None:
        """Judge by the intervals of the differences between neighbours."""
        if any((model, name) not in cells for name in self.cells):
            return None
        text = f"KL of {' > '.join(self.cells)}"
        named = [cells[model, name] for name in self.cells]
        found = [difference(one, two, mean_of(KL)) for one, two in pairwise(named)]
        said = above_word(found), _differences(found)
        return Verdict(model, text, self.source, *_unless(_apart(*named), named, *said))


LEARNING = (
    Learning("fp8-linear-none", LOSES, "verl, FP8 page (TIS off); NVIDIA's blog: 0.586 of 0.616"),
    Learning("fp8-linear-tis", KEEPS, "FP8-RL, arXiv 2601.18150"),
    Learning("fp8-linear-tis", LOSES, "NVIDIA's blog: correction narrows the gap, not closes it"),
    Learning("fp8-linear-mis", KEEPS, "FP8-RL, arXiv 2601.18150"),
    Learning("fp8-kv-attn-none", LOSES, "Jet-RL, arXiv 2601.14243, tables 2 and 3"),
    Learning("fp8-kv-attn-tis", KEEPS, "FP8-RL; NeMo RL #1212"),
    Learning("fp8-kv-attn-mis", KEEPS, "FP8-RL, arXiv 2601.18150"),
    Learning("fp8-kv-attn-seq-tis", KEEPS, "this repository's notebook 02, how to choose"),
    Learning("fp8-e2e-none", KEEPS, "Jet-RL, arXiv 2601.14243"),
    Learning("fp8-e2e-tis", KEEPS, "NVIDIA's blog: 0.613 of 0.616"),
    Learning("fp8-e2e-kv-attn-tis", KEEPS, "NVIDIA's blog; NeMo RL #1212"),
)
ORDERS = (
    Order(("fp8-linear-none", "fp8-e2e-none", BASELINE), "verl, FP8 page; NVIDIA's blog"),
    Order(("fp8-linear-tis", "fp8-e2e-tis", BASELINE), "verl, FP8 page; NVIDIA's blog"),
    Order(("fp8-kv-attn-tis", "fp8-linear-tis"), "NeMo RL #1212"),
    Order(("fp8-kv-attn-none", "fp8-linear-none"), "NeMo RL #1212"),
)
MOE_CELLS = (BASELINE, "fp8-linear-none", "fp8-linear-tis", "fp8-e2e-tis")
GROWING = ("fp8-linear-tis", "fp8-kv-attn-tis")


def late_accuracy(run: FinishedRun) -> float | None:
    """Return the mean of the validations in the last third of a finished run, in points."""
    if run.state != "finished":
        return None
    first = run.recipe.grpo.steps * (1 - THIRD)
    late = [value for step, value in run.series("val/accuracy").items() if step > first]
    return 100 * fmean(late) if late else None


def gain(run: FinishedRun) -> float | None:
    """Return the late accuracy less the one before training, in points."""
    first, late = run.series("val/accuracy").get(0), late_accuracy(run)
    return None if first is None or late is None else late - 100 * first


def mean_of(key: str) -> Callable[[FinishedRun], float | None]:
    """Return a function that averages a metric of a run over training."""

    def measure(run: FinishedRun) -> float | None:
        values = run.series(key).values()
        return fmean(values) if values else None

    return measure


def trend(run: FinishedRun) -> float | None:
    """Return the mean KL of the last third over that of the first; None without any KL."""
    values = list(run.series(KL).values())
    third = int(len(values) * THIRD)
    if not third or not fmean(values[:third]) > 0:
        return None
    return fmean(values[-third:]) / fmean(values[:third])


def difference(
    cell: Cell, other: Cell, measure: Callable[[FinishedRun], float | None]
) -> MeanOfSeeds | None:
    """Return the cell's values less the other's, seed by seed, over their common seeds."""
    theirs = {run.recipe.seed: measure(run) for run in other.runs}
    ours = {run.recipe.seed: measure(run) for run in cell.runs}
    pairs = [(ours[seed], theirs.get(seed)) for seed in ours]
    return mean_of_seeds(
        [mine - its for mine, its in pairs if mine is not None and its is not None]
    )


def learning_word(found: MeanOfSeeds | None) -> str | None:
    """Return `keeps` if a loss of `MARGIN` is ruled out, `loses` if no loss is; else None."""
    if not _is_interval(found):
        return None
    low, high = _bounds(found)
    if low > -MARGIN:
        return KEEPS
    return LOSES if high < 0 else None


def above_word(found: Iterable[MeanOfSeeds | None], threshold: float = 0.0) -> str:
    """Return whether all intervals lie above a threshold; one that lies below refutes."""
    found = list(found)
    if any(_is_interval(each) and _bounds(each)[1] < threshold for each in found):
        return NOT_SUPPORTED
    if all(_is_interval(each) and _bounds(each)[0] > threshold for each in found):
        return SUPPORTED
    return OPEN


def verdicts(cells: Cells) -> Iterator[Verdict]:
    """Yield every claim that the cells at hand can decide."""
    models = list(dict.fromkeys(model for model, _ in cells))
    for model in models:
        found = [claim.judge(model, cells) for claim in (*LEARNING, *ORDERS)]
        yield from (each for each in found if each is not None)
        yield from _band(model, cells)
        yield from _trends(model, cells)
    yield from _moe_against_dense(models, cells)


def _band(model: str, cells: Cells) -> Iterator[Verdict]:
    """Yield whether token_mult_prob_error stays in the range that NVIDIA's blog accepts."""
    fp8 = {name: cell for (of, name), cell in cells.items() if of == model and name != BASELINE}
    for name, cell in fp8.items():
        found = cell.numbers["prob. error"]
        below = {SUPPORTED: NOT_SUPPORTED, NOT_SUPPORTED: SUPPORTED, OPEN: OPEN}
        word = below[above_word([found], STILL_GOOD)]
        good = above_word([found], GOOD) == NOT_SUPPORTED
        evidence = f"{_shown(found, '.4f')}{f', below {GOOD} too' if good else ''}"
        text = f"token_mult_prob_error of {name} is below {STILL_GOOD}"
        said = _unless(_apart(cell), [cell], word, evidence)
        yield Verdict(model, text, "NVIDIA's blog, by secondary pages", *said)


def _trends(model: str, cells: Cells) -> Iterator[Verdict]:
    """Yield whether KL grows in a mixture of experts, and in a dense model does not."""
    for name in GROWING:
        if (model, name) not in cells:
            continue
        cell = cells[model, name]
        found, moe = _over_seeds(cell, trend), _is_moe(cell)
        word = above_word([found], 1.0)
        if not moe:
            word = {SUPPORTED: NOT_SUPPORTED, NOT_SUPPORTED: SUPPORTED, OPEN: OPEN}[word]
        text = f"KL of {name} {'grows' if moe else 'does not grow'} over training"
        evidence = f"last third {_shown(found, '.2f')} times the first"
        said = _unless(_apart(cell), [cell], word, evidence)
        yield Verdict(model, text, "FP8-RL, by secondary notes", *said)


def _moe_against_dense(models: list[str], cells: Cells) -> Iterator[Verdict]:
    sides: dict[bool, str] = {_is_moe(cells[key]): key[0] for key in cells}
    if len(sides) < 2 or len(models) > 2:
        return
    for name in MOE_CELLS:
        experts, dense = (cells.get((sides[m], name)) for m in (True, False))
        if experts is None or dense is None:
            continue
        found = [difference(experts, dense, mean_of(KL))]
        text, where = (
            f"KL of {name} is higher in the mixture of experts",
            " against ".join(sides[moe] for moe in (True, False)),
        )
        said = _unless("", [experts, dense], above_word(found), _differences(found))
        yield Verdict(where, text, "verl, FP8 page", *said)


def cells_of(comparison: Comparison) -> Cells:
    """Return the comparison's cells by name.

    Raises:
        SystemExit: two of one name, whose runs differ in more than their seed.
    """
    found: Cells = {}
    for cell in comparison.cells:
        key = (cell.runs[0].recipe.model.name, cell.runs[0].plan.cell.rpartition("/")[2])
        if key in found:
            raise SystemExit(f"{found[key].label} and {cell.label}: one study at a time")
        found[key] = cell
    return found


def row(cell: Cell) -> dict[str, Any]:
    """Return one line of the table: learning, mismatch and correction of a cell over its seeds."""
    numbers = {name: cell.numbers[column] for name, column in COLUMNS.items()}
    numbers["late_accuracy"] = _over_seeds(cell, late_accuracy)
    numbers["gain"] = _over_seeds(cell, gain)
    numbers["kl_trend"] = _over_seeds(cell, trend)
    found = {name: number._asdict() if number else None for name, number in numbers.items()}
    return {"cell": cell.runs[0].plan.cell, "seeds": cell.seeds, "steps": cell.steps} | found


def judged(comparison: Comparison) -> dict[str, Any]:
    """Return all of the results file: rows, verdicts, baselines, notes, and the runs."""
    return {
        "rule": "docs/research/earlier-studies.md",
        "rows": [row(cell) for cell in comparison.cells],
        "verdicts": [each._asdict() for each in verdicts(cells_of(comparison))],
        "against_baselines": [asdict(each) for each in against_baselines(comparison)],
        "notes": [JUDGED_HERE, *comparison.notes],
        "runs": [str(run.path) for run in comparison.runs],
    }


def _over_seeds(cell: Cell, measure: Callable[[FinishedRun], float | None]) -> MeanOfSeeds | None:
    return mean_of_seeds([value for run in cell.runs if (value := measure(run)) is not None])


def _is_interval(found: MeanOfSeeds | None) -> bool:
    """Return whether there are enough seeds for a verdict, and none that diverged."""
    if found is None or found.half is None or not math.isfinite(found.half):
        return False
    return found.seeds >= FEWEST


def _bounds(found: MeanOfSeeds | None) -> tuple[float, float]:
    assert found is not None and found.half is not None
    return found.mean - found.half, found.mean + found.half


def _apart(*cells: Cell) -> str:
    """Return what differs between all runs of some cells besides precision, correction and seed."""
    runs = [(cell.label, run) for cell in cells for run in cell.runs]
    found = differing([(label, run.matched) for label, run in runs]) | differing_problems(runs)
    texts = [f"{key} is {' or '.join(values)}" for key, values in found.items()]
    return f"not matched: {'; '.join(texts)}" if found else ""


def _unless(apart: str, cells: Iterable[Cell], word: str, evidence: str) -> tuple[str, str]:
    """Return a verdict and its evidence, open where something differs or a run is unfinished."""
    stopped = _unfinished(*cells)
    return (OPEN if apart or stopped else word), apart or evidence + stopped


def _unfinished(*cells: Cell) -> str:
    stopped = [run for cell in cells for run in cell.runs if run.state != "finished"]
    texts = [f"{run.plan.cell} seed {run.recipe.seed} at step {run.steps}" for run in stopped]
    return f"; not finished: {', '.join(texts)}" if texts else ""


def _is_moe(cell: Cell) -> bool:
    return cell.runs[0].recipe.model.shape.experts > 0


def _shown(found: MeanOfSeeds | None, style: str) -> str:
    return f"{found.text(style)} ({found.seeds} seeds)" if found else "not measured"


def _points(found: MeanOfSeeds | None) -> str:
    return _shown(found, "+.1f")


def _differences(found: Iterable[MeanOfSeeds | None]) -> str:
    return ", ".join(_shown(each, "+.1e") for each in found)


def main() -> None:
    """Read the runs, judge the claims, print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="run directories, or folders of them")
    add_options(parser)
    options = parser.parse_args()
    paths = [path for folder in options.runs for path in find_runs(folder)]
    content = judged(compare(*read_runs(paths)))
    keep(options.out, options.commit, **content)
    show("cells", [short(each) for each in content["rows"]])
    show("claims", content["verdicts"])


def learning_table(comparison: Comparison) -> list[tuple[str, ...]]:
    """Lay out cells by accuracy and mismatch, as `report.markdown_table` takes them."""
    table = [(*READ, "rejected")]
    for cell in comparison.cells:
        found = short(row(cell))
        rejected = cell.numbers[COLUMNS["rejected"]]
        share = f"{100 * rejected.mean:.2f}%" if rejected else "-"
        table.append((*(found[key] for key in READ.values()), share))
    return table


def claims_table(found: Iterable[Verdict]) -> list[tuple[str, ...]]:
    """Lay out claims and the rule's verdicts, as `report.markdown_table` takes them."""
    heads = ("claim", "by", "verdict", "evidence")
    return [heads, *((each.claim, each.source, each.verdict, each.evidence) for each in found)]


def short(found: dict[str, Any]) -> dict[str, Any]:
    """Return a row with estimates as text: mean and half of the interval; one seed has none."""

    def text(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        half = "" if value["half"] is None else f" ±{value['half']:.2g}"
        return f"{value['mean']:.3g}{half}"

    return {name: text(value) for name, value in found.items()}


if __name__ == "__main__":
    main()
