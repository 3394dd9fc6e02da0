"""Judge recipes against BF16: pooled variance, Dunnett's intervals, an equivalence test.

python -m benchmarks.learning.judge study/gate study/eight --out FILE.json
python -m benchmarks.learning.judge --earlier benchmarks/results --out FILE.json

The first line judges runs of `benchmarks.learning.study`, the second the runs that earlier studies
kept, whose own rule was another one. docs/research/study-rule.md and study-rule-2.md have the rule;
they were written before the runs and are not to be tuned here. The exit code is 1 where BF16 fails
its gate, so that a line of commands stops there.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import scipy
from scipy import stats

from benchmarks.learning import earlier
from benchmarks.learning.study import RUNS, read
from benchmarks.record import add_options, keep, show
from fp8_nemo.report.runs import FinishedRun, find_runs, read_runs

RULE = "docs/research/study-rule.md"
LEVEL = 0.95
BASELINE = "bf16-none"
MARGIN = 3.0
"""Points of accuracy: the smallest loss that a paper reports of FP8 rollouts is 2.9 (Jet-RL)."""
LEARNS = 10.0
"""Points that BF16 itself must gain on average."""
FEWEST = 3
"""Seeds of an earlier study's cell that is judged again."""
MOST_FALL, MOST_SPREAD = 10.0, 2.0
"""Points that BF16 may fall from one validation to the next, and its areas' standard deviation."""
EQUIVALENT, LOSES, GAINS, OPEN = "equivalent", "loses", "gains", "open"
GROWS, SHRINKS = "grows", "shrinks"


class Estimate(NamedTuple):
    """Hold a difference with its simultaneous interval: `Estimate(-0.4, -1.3, 0.5, 8)`."""

    difference: float
    low: float
    high: float
    seeds: int

    @property
    def verdict(self) -> str:
        """Return what the interval decides; within the margin on both sides comes first."""
        if self.low > -MARGIN and self.high < MARGIN:
            return EQUIVALENT
        return LOSES if self.high < 0 else GAINS if self.low > 0 else OPEN


def against(baseline: Sequence[float], cells: Mapping[str, Sequence[float]]) -> dict[str, Estimate]:
    """Return each cell's mean less the baseline's, all intervals at once at 95% (Dunnett).

    Args:
        baseline: a number for each seed; seeds are not paired.
        cells: the same; those of one seed alone are left out.
    """
    judged = {name: values for name, values in cells.items() if len(values) > 1}
    if len(baseline) < 2 or not judged:
        return {}
    # Dunnett's quantile is integrated at random points; they are the same ones every time.
    test = stats.dunnett(*judged.values(), control=baseline, rng=0)
    found = test.confidence_interval(LEVEL)
    return {
        name: Estimate(fmean(values) - fmean(baseline), float(low), float(high), len(values))
        for (name, values), low, high in zip(judged.items(), found.low, found.high, strict=True)
    }


def from_zero(cells: Mapping[str, Sequence[float]]) -> dict[str, Estimate]:
    """Return each cell's mean, all intervals at once at 95% (Bonferroni), with one variance."""
    judged = {name: values for name, values in cells.items() if len(values) > 1}
    if not judged:
        return {}
    spread, freedom = pooled(judged.values())
    quantile = stats.t.ppf(1 - (1 - LEVEL) / 2 / len(judged), freedom)
    found = {}
    for name, values in judged.items():
        mean, half = fmean(values), float(quantile) * spread / math.sqrt(len(values))
        found[name] = Estimate(mean, mean - half, mean + half, len(values))
    return found


def pooled(cells: Iterable[Sequence[float]]) -> tuple[float, int]:
    """Return the standard deviation within cells, and its degrees of freedom."""
    cells = [values for values in cells if len(values) > 1]
    freedom = sum(len(values) - 1 for values in cells)
    squares = sum(stdev(values) ** 2 * (len(values) - 1) for values in cells)
    return math.sqrt(squares / freedom), freedom


Line = dict[str, Any]
"""A run as `benchmarks.learning.study` keeps it."""


def area(run: Line, engine: str) -> float:
    """Return the mean of a run's validations, that before training left out, in points."""
    return 100 * fmean(value for step, value in run["validations"][engine].items() if int(step))


def served(run: Line) -> float:
    """Return the last weights' accuracy in the cell's own engine less that in BF16, in points."""
    return 100 * (run["last"]["own"] - run["last"]["bf16"])


ENDPOINTS: dict[str, Callable[[Line], float]] = {
    "learning": lambda run: area(run, "bf16"),
    "as served": lambda run: area(run, "own"),
    "last weights": lambda run: 100 * run["last"]["bf16"],
}
"""What is compared with BF16's: the first decides, the others are described."""


def largest_fall(run: Line) -> float:
    """Return how far BF16's validations fell at most, from one to the next, in points."""
    values = [*run["validations"]["bf16"].values()]
    return 100 * max(before - after for before, after in pairwise(values))


def gate(runs: Sequence[Line]) -> dict[str, Any]:
    """Judge BF16 alone: whether it learns, holds what it learned, and repeats itself."""
    areas = [ENDPOINTS["learning"](run) for run in runs]
    gains = [100 * run["last"]["bf16"] - 100 * first(run) for run in runs]
    falls = [largest_fall(run) for run in runs]
    found = {"areas": areas, "spread": stdev(areas), "gains": gains, "falls": falls}
    passed = max(falls) <= MOST_FALL and stdev(areas) < MOST_SPREAD and fmean(gains) >= LEARNS
    return found | {"passes": passed}


def first(run: Line) -> float:
    """Return BF16's validation before training."""
    return next(value for step, value in run["validations"]["bf16"].items() if not int(step))


def growth(run: Line) -> float | None:
    """Return the logarithm of a run's mean KL in its last third of steps over that in its first.

    None where the first third has no KL, as where both sides compute alike.
    """
    kl = run["kl"]
    first, last = (fmean(part) for part in (kl[: len(kl) // 3], kl[-(len(kl) // 3) :]))
    return math.log(last / first) if first > 0 and last > 0 else None


def drift(cells: Mapping[str, Sequence[Line]]) -> dict[str, Any]:
    """Return by what factor each cell's KL grows within a run, with intervals, and a word."""
    found = {
        cell: [value for run in runs if (value := growth(run)) is not None]
        for cell, runs in cells.items()
    }
    return {
        cell: {"factor": math.exp(each.difference), "low": math.exp(each.low)}
        | {"high": math.exp(each.high), "seeds": each.seeds, "word": _grows(each)}
        for cell, each in from_zero(found).items()
    }


def _grows(found: Estimate) -> str:
    return GROWS if found.low > 0 else SHRINKS if found.high < 0 else OPEN


def by_cell(runs: Iterable[Line]) -> dict[str, dict[str, list[Line]]]:
    """Return runs by model and cell."""
    found: dict[str, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        model, _, cell = run["cell"].partition("/")
        found[model][cell].append(run)
    return found


def table(cells: Mapping[str, Sequence[Line]]) -> list[dict[str, Any]]:
    """Return a row for each cell but the baseline: endpoints, serving, mismatch, verdict."""
    others = {name: runs for name, runs in cells.items() if name != BASELINE}
    found = {
        name: against(
            [of(run) for run in cells.get(BASELINE, ())],
            {cell: [of(run) for run in runs] for cell, runs in others.items()},
        )
        for name, of in ENDPOINTS.items()
    }
    found["serving"] = from_zero({cell: [*map(served, runs)] for cell, runs in others.items()})
    drifts = drift(others)
    return [
        {
            "cell": cell,
            "verdict": found["learning"][cell].verdict,
            **{name: each[cell]._asdict() for name, each in found.items()},
            "drift": drifts.get(cell),
            "largest fall": max(map(largest_fall, runs)),
            "means": _means(runs),
        }
        for cell, runs in others.items()
        if cell in found["learning"]
    ]


def _means(runs: Sequence[Line]) -> dict[str, float]:
    keys = dict.fromkeys(key for run in runs for key in run["means"])
    return {key: fmean(run["means"][key] for run in runs if key in run["means"]) for key in keys}


def study(runs: Sequence[Line], rule: str = RULE) -> dict[str, Any]:
    """Return a results file's content for the runs of a study."""
    models = by_cell(runs)
    found: dict[str, Any] = {"rule": rule, "margin": MARGIN}
    found["gate"] = {model: gate(cells[BASELINE]) for model, cells in models.items()}
    found["rows"] = {model: table(cells) for model, cells in models.items()}
    found["spreads"] = {
        model: dict(zip(("pooled", "degrees of freedom"), pooled(_areas(cells)), strict=True))
        for model, cells in models.items()
        if len(cells) > 1
    }
    return found | {"runs": [_kept(run) for run in runs]}


def whole(runs: Sequence[Line]) -> list[Line]:
    """Return the runs of those seeds that every cell has: a study stops between two cells."""
    seeds: dict[str, set[int]] = defaultdict(set)
    for run in runs:
        seeds[run["cell"]].add(run["seed"])
    shared = set.intersection(*seeds.values())
    return [run for run in runs if run["seed"] in shared]


def _kept(run: Line) -> Line:
    """Return a run without what the results file says once, and without its single steps."""
    kept = {key: value for key, value in run.items() if key not in ("line", "reward", "kl")}
    return kept | {"growth": growth(run)}


def _areas(cells: Mapping[str, Sequence[Line]]) -> list[list[float]]:
    return [[ENDPOINTS["learning"](run) for run in runs] for runs in cells.values()]


def again(folder: Path) -> dict[str, Any]:
    """Judge the runs of earlier studies again, by late accuracy as they were and by area."""
    rows = []
    for archive in sorted(folder.rglob("*.jsonl.gz")):
        runs = read_runs(find_runs(archive.with_name(archive.name.removesuffix(".jsonl.gz"))))[0]
        kept: dict[tuple[str, str], dict[str, list[FinishedRun]]] = defaultdict(dict)
        for run in runs:
            key = (run.recipe.model.name, str(run.recipe.grpo.learning_rate))
            kept[key].setdefault(run.plan.cell.rpartition("/")[2], []).append(run)
        for (model, rate), cells in kept.items():
            of_study = {"study": archive.name.removesuffix(".jsonl.gz"), "model": model}
            rows += [of_study | {"learning_rate": rate} | row for row in _again(cells)]
    return {"rule": RULE, "margin": MARGIN, "rows": rows}


def _again(cells: Mapping[str, Sequence[FinishedRun]]) -> list[dict[str, Any]]:
    measures = {"late accuracy": earlier.late_accuracy, "area": earlier.area}
    rows: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, measure in measures.items():
        values = {
            cell: [value for run in runs if (value := measure(run)) is not None]
            for cell, runs in cells.items()
        }
        base = values.pop(BASELINE, [])
        enough = {cell: each for cell, each in values.items() if len(each) >= FEWEST}
        if len(base) < FEWEST or not enough or not _learns(cells[BASELINE]):
            continue
        spread, freedom = pooled([base, *enough.values()])
        for cell, found in against(base, enough).items():
            said = found._asdict() | {"verdict": found.verdict}
            rows[cell][name] = said | {"pooled": spread, "degrees of freedom": freedom}
    return [{"cell": cell} | found for cell, found in rows.items()]


def _learns(baseline: Sequence[FinishedRun]) -> bool:
    gains = [found for run in baseline if (found := earlier.gain(run)) is not None]
    return bool(gains) and fmean(gains) >= LEARNS


def shown(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Return a row as text: `-0.4 (-1.3 to 0.5)`."""
    found = {name: row[name] for name in ("study", "model", "cell") if name in row}
    for name in names:
        if each := row.get(name):
            found[name] = f"{each['difference']:+.1f} ({each['low']:+.1f} to {each['high']:+.1f})"
            found[f"{name}: verdict"] = each.get("verdict", "")
    if each := row.get("drift"):
        text = f"{each['factor']:.2f} ({each['low']:.2f} to {each['high']:.2f})"
        found["KL, last third by first"] = f"{text} {each['word']}"
    return found | {"verdict": row.get("verdict", "")}


def main() -> int:
    """Judge, print the tables, and write them; 1 if BF16 fails its gate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="*", help="of benchmarks.learning.study")
    parser.add_argument("--earlier", type=Path, help="folder of archives (benchmarks.keep_runs)")
    parser.add_argument("--rule", default=RULE, help="the page that the results name")
    add_options(parser)
    options = parser.parse_args()
    if options.earlier:
        content = again(options.earlier)
        show("again", [shown(row, ("late accuracy", "area")) for row in content["rows"]])
    else:
        found = {each: read(each / RUNS) for each in options.folders}
        if empty := [str(each) for each, lines in found.items() if not lines]:
            sys.exit(f"{', '.join(empty)}: no run has ended there yet")
        runs = [run for lines in found.values() for run in whole(lines)]
        content = study(runs, options.rule)
        for model, rows in content["rows"].items():
            print(model, content["gate"][model], content["spreads"].get(model))
            show(model, [shown(row, ("learning", "as served", "serving")) for row in rows])
    keep(options.out, options.commit, scipy=scipy.__version__, **content)
    return int(not all(each["passes"] for each in content.get("gate", {}).values()))


if __name__ == "__main__":
    sys.exit(main())
