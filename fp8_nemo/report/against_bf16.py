"""Judge each FP8 cell against its BF16 baseline: accuracy, mismatch, speed, by a rule.

The baseline is the BF16 cell of the same model that differs in the fewest settings beside precision
and correction. Settings that differ all the same are named, and no word is said: runs that are not
matched must not look matched.

Differences are taken seed by seed, over the seeds that both cells have, with a 95% interval, and
over the steps that both runs have done.

    accuracy  of the last validation. `equal`: the interval lies within `EQUAL` points of zero.
              `higher`, `lower`: it does not, and leaves out zero. `open`: neither; more seeds
              would tell.
    mismatch  mean KL of both, and the health of the cell: the worst state of any step.
    speed     of the median step and of its rollout, the first `WARM_UP` left out. `faster`,
              `slower`: the interval leaves out one. `open`: it does not. Only inside NeMo RL, on
              the same nodes, GPUs and versions: the local backend emulates FP8, slowly.

One seed has no interval and gets no word. Nor does the accuracy of a cell of which a seed has not
finished, whether or not the baseline has that seed: what died may be what would have been worse.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean, median

from fp8_nemo.correction.health import STATES
from fp8_nemo.plan.plan import ONLY_CHECKED
from fp8_nemo.report.compare import (
    Cell,
    Comparison,
    MeanOfSeeds,
    differing,
    differing_problems,
    given,
    last_accuracy,
    mean_of_seeds,
)
from fp8_nemo.report.runs import FinishedRun

EQUAL = 2.0  # points of accuracy
WARM_UP = 1  # steps: kernels are compiled in the first
KL_FORMAT = ".1e"
MACHINE = ("hardware.", "versions.", "python")
CLUSTER = ("nodes", "gpus_per_node", "rollout_gpus", "gpu")
CELL, BASELINE = "cell", "baseline"
BF16 = dict.fromkeys(
    ("precision.rollout_linear", "precision.rollout_kv", "precision.train_linear"), "bf16"
)


@dataclass(frozen=True)
class AgainstBaseline:
    """Hold a cell's differences from its baseline.

    Example: `AgainstBaseline("fp8-kv-attn-tis", "bf16-none", (), 3, 3, 0,
    accuracy=MeanOfSeeds(-0.3, 1.1, 3), kl=MeanOfSeeds(5e-3, 4e-4, 3),
    baseline_kl=MeanOfSeeds(5e-5, 2e-6, 3), health="healthy", step=None, rollout=None)`.
    """

    cell: str
    baseline: str
    unmatched: tuple[str, ...]
    """What differs beside precision and correction: `grpo.steps is 60, the baseline's 40`."""
    seeds: int
    """That both have."""
    validated: int
    """Of these, how many have finished in both, and have a last validation."""
    died: int
    """Seeds of the cell alone that have not finished."""
    accuracy: MeanOfSeeds | None
    """Points, the cell's less the baseline's."""
    kl: MeanOfSeeds | None
    """Nats per token."""
    baseline_kl: MeanOfSeeds | None
    health: str
    step: MeanOfSeeds | None
    """Times as fast as the baseline's."""
    rollout: MeanOfSeeds | None

    @property
    def is_finished(self) -> bool:
        """Return whether every seed that speaks for the cell has a last validation."""
        return self.validated == self.seeds + self.died > 0

    @property
    def accuracy_word(self) -> str:
        """Return `higher`, `lower`, `equal`, `open`, or why there is none."""
        if self.accuracy and not self.is_finished and not self.unmatched:
            return f"{self.validated} of {self.seeds + self.died} finished"
        return self._word(self.accuracy, 0.0, "higher", "lower", EQUAL)

    @property
    def speed_word(self) -> str:
        """Return `faster`, `slower`, `open`, or why there is none."""
        return self._word(self.step, 1.0, "faster", "slower", 0.0)

    def _word(
        self, found: MeanOfSeeds | None, none: float, above: str, below: str, equal: float
    ) -> str:
        if self.unmatched:
            return "not matched"
        if found is None:
            return "-"
        if not math.isfinite(found.mean):
            return "diverged"
        if found.half is None:
            return "one seed"
        if abs(found.mean - none) + found.half <= equal:
            return "equal"
        if found.mean - found.half > none:
            return above
        return below if found.mean + found.half < none else "open"

    def __str__(self) -> str:
        said = []
        if self.accuracy:
            said.append(f"accuracy {self.accuracy.text('+.1f')} points ({self.accuracy_word})")
        elif self.validated < self.seeds:
            said.append("no accuracy before both have finished")
        if self.kl:
            of = f", BF16's {self.baseline_kl.mean:{KL_FORMAT}}" if self.baseline_kl else ""
            said.append(f"KL {self.kl.text(KL_FORMAT)}{of}; worst step {self.health}")
        if self.step:
            said.append(f"step {self.step.text('.2f')} times as fast ({self.speed_word})")
        if self.rollout:
            said.append(f"rollout {self.rollout.text('.2f')}")
        said += [f"NOT MATCHED: {each}" for each in self.unmatched]
        seeds = "1 seed each" if self.seeds == 1 else f"{self.seeds} seeds each"
        shared = seeds if self.seeds else "no seed in common"
        return ": ".join([f"{self.cell} against {self.baseline}, {shared}", "; ".join(said) or "-"])


def against_baselines(comparison: Comparison) -> list[AgainstBaseline]:
    """Compare every cell that is not BF16, where its model has a BF16 cell."""
    found = []
    for cell in comparison.cells:
        baseline = baseline_of(cell, comparison.cells)
        if baseline is not None and not is_bf16(cell):
            found.append(_against(cell, baseline))
    return found


def baseline_of(cell: Cell, cells: Iterable[Cell]) -> Cell | None:
    """Return the BF16 cell of the same model that differs least; of equals the uncorrected."""
    model = cell.runs[0].recipe.model.name
    bf16 = [each for each in cells if is_bf16(each) and each.runs[0].recipe.model.name == model]

    def distance(other: Cell) -> tuple[int, bool]:
        corrected = other.runs[0].recipe.correction.name != "none"
        return len(list(_unmatched(cell, other))), corrected

    return min(bf16, key=distance, default=None)


def is_bf16(cell: Cell) -> bool:
    """Return whether nothing of a cell is FP8, FP16 or of four bits."""
    settings = cell.runs[0].settings
    return all(settings[key] == value for key, value in BF16.items())


def _against(cell: Cell, baseline: Cell) -> AgainstBaseline:
    ours, theirs = _by_seed(cell), _by_seed(baseline)
    pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    timed = pairs if all(_same_machine(*pair) for pair in pairs) else []
    accuracies = [(last_accuracy(mine), last_accuracy(its)) for mine, its in pairs]
    points = [
        100 * (mine - its) for mine, its in accuracies if mine is not None and its is not None
    ]
    kl = [_shared(*pair, "mismatch/kl") for pair in pairs]
    return AgainstBaseline(
        cell.label,
        baseline.label,
        tuple(_unmatched(cell, baseline)),
        len(pairs),
        len(points),
        sum(run.state != "finished" for seed, run in ours.items() if seed not in theirs),
        accuracy=mean_of_seeds(points),
        kl=mean_of_seeds([fmean(mine) for mine, _ in kl if mine]),
        baseline_kl=mean_of_seeds([fmean(its) for _, its in kl if its]),
        health=health_of(cell),
        step=mean_of_seeds([*_speeds(timed, "time/step")]),
        rollout=mean_of_seeds([*_speeds(timed, "time/rollout")]),
    )


def health_of(cell: Cell) -> str:
    """Return the worst state of any step of a cell; a dash before its first."""
    states = [state for run in cell.runs for state in run.series("health/state").values()]
    return STATES[int(max(states))] if states else "-"


def unstable_seeds(cell: Cell) -> str:
    """Return in how many seeds a step was unstable: `1 of 3 seeds`."""
    worst = [max(run.series("health/state").values(), default=0) for run in cell.runs]
    return f"{worst.count(STATES.index('unstable'))} of {len(worst)} seeds"


def _by_seed(cell: Cell) -> dict[int, FinishedRun]:
    return {run.recipe.seed: run for run in cell.runs}


def _speeds(pairs: Iterable[tuple[FinishedRun, FinishedRun]], key: str) -> Iterator[float]:
    """Yield how many times as fast each run is as its baseline, by their median steps."""
    for pair in pairs:
        mine, its = _shared(*pair, key, after=WARM_UP)
        if mine and median(mine) > 0:
            yield median(its) / median(mine)


def _shared(
    mine: FinishedRun, its: FinishedRun, key: str, after: int = 0
) -> tuple[list[float], list[float]]:
    """Return a metric of both at the steps that both have: one run may be further."""
    series = mine.series(key), its.series(key)
    steps = [step for step in series[0] if step in series[1] and step > after]
    return [series[0][step] for step in steps], [series[1][step] for step in steps]


def _unmatched(cell: Cell, baseline: Cell) -> Iterator[str]:
    """Yield a sentence for each setting that differs beside precision and correction.

    A correction of the baseline that is neither none nor the cell's own is one of them.
    """
    sides = {CELL: cell, BASELINE: baseline}
    named = [(side, run.matched) for side, each in sides.items() for run in each.begun]
    runs = [(side, run) for side, each in sides.items() for run in each.runs]
    for key, holders in (differing(named) | differing_problems(runs)).items():
        mine = " or ".join(value for value, names in holders.items() if CELL in names)
        its = " or ".join(value for value, names in holders.items() if BASELINE in names)
        yield f"{key} is {mine}, the baseline's {its}"
    corrections = [each.runs[0].recipe.correction for each in (cell, baseline)]
    used = [{k: v for k, v in vars(each).items() if k not in ONLY_CHECKED} for each in corrections]
    if corrections[1].name != "none" and used[0] != used[1]:
        yield f"the baseline's correction is {corrections[1].name}: {given(corrections[1])}"


def _same_machine(mine: FinishedRun, its: FinishedRun) -> bool:
    """Return whether the seconds of two compare: both inside NeMo RL, on the same machines."""
    both = [
        {key: text for key, text in run.environment.items() if key.startswith(MACHINE)}
        for run in (mine, its)
    ]
    nodes = [[getattr(run.recipe.cluster, key) for key in CLUSTER] for run in (mine, its)]
    inside = mine.plan.backend == its.plan.backend == "nemo"
    return inside and nodes[0] == nodes[1] and both[0] == both[1] != {}
