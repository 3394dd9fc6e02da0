"""Run directories -> one comparison: numbers per cell; `health` alone judges them.

A cell is the runs that differ in nothing but seed, outputs, logging and cluster; its seeds are
averaged. Runs whose other settings differ never are, also where MODEL/PRECISION-CORRECTION is the
same: the label then says what differs, and the notes say what is not matched between cells.

A number that a run lacks (a BF16 cell recalibrates nothing, an unfinished run has no last
validation) is a dash, never a zero. A damaged run directory is named, the others are compared.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

from fp8_nemo.plan.plan import ONLY_CHECKED
from fp8_nemo.recipe.mistake import as_typed
from fp8_nemo.recipe.options.correction import Correction
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.report.runs import FinishedRun
from fp8_nemo.runs.metrics import METRICS, spans
from fp8_nemo.runs.provenance import ENVIRONMENT

BEGUN_WITH = ("weights", "problems", "reward")
"""Keys of environment.json that are digests of what a run began with, not of where it ran."""
LAST_STEPS = 5
HUGE = 1e4
"""Where a number that is a ratio or a mean is written by its power of ten; bytes are not."""
STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""97.5% quantiles of Student's t, from 1 degree of freedom (2 seeds) to 20; those beyond take the
last, which is at most 7% too wide."""
EMULATION = "Local runs are an emulation: they show learning and mismatch, not speed."
OWN_REWARD = "Accuracy is your own reward (data.reward), written as if 1 were 100%."


class MeanOfSeeds(NamedTuple):
    """Hold a number over the seeds that have it: `MeanOfSeeds(mean=31.6, half=5.2, seeds=3)`."""

    mean: float
    half: float | None
    """Half of the 95% interval (Student's t over seeds); None for one seed, NaN if one diverged."""
    seeds: int

    def text(self, style: str, joint: str = " ") -> str:
        """Return `-0.3 ±1.1`; one seed has no interval, and one that rounds to zero is left out."""
        half, none = (format(value, style.lstrip("+")) for value in (self.half or 0.0, 0.0))
        return format(self.mean, style) + ("" if half == none else f"{joint}±{half}")


@dataclass(frozen=True)
class Cell:
    """Hold runs that differ in their seed alone, and numbers by `Column.name`; None is a dash.

    Example: `Cell("fp8-kv-attn-tis", (run_of_seed_42, run_of_seed_43), {"KL": MeanOfSeeds(0.006,
    0.001, 2), "gain": None, ...})`.
    """

    label: str
    runs: tuple[FinishedRun, ...]
    numbers: dict[str, MeanOfSeeds | None]

    @property
    def begun(self) -> tuple[FinishedRun, ...]:
        """Return the runs that recorded their environment, or else the first, for its settings."""
        return tuple(run for run in self.runs if run.environment) or self.runs[:1]

    @property
    def seeds(self) -> str:
        """Return `42, 43, 44`."""
        return ", ".join(map(str, sorted(run.recipe.seed for run in self.runs)))

    @property
    def steps(self) -> str:
        """Return the steps done of steps planned, `30/30`, or `12-30/30` where seeds differ."""
        done, planned = [run.steps for run in self.runs], self.runs[0].recipe.grpo.steps
        least, most = min(done), max(done)
        return f"{least}/{planned}" if least == most else f"{least}-{most}/{planned}"

    def show(self, column: Column, joint: str = " ") -> str:
        """Write a number: `39.8% ±1.2%`, with `(2/3)` if not every seed has it, or a dash.

        One of a run that fell apart can have eighty digits: beyond `HUGE` it is a power of ten.
        """
        number = self.numbers[column.name]
        if number is None:
            return "-"
        huge = max(abs(number.mean), number.half or 0.0) >= HUGE
        style = ".1e" if huge and column.format.lstrip("+") in (".1f", ".3f") else column.format
        of = f"{joint}({number.seeds}/{len(self.runs)})" if number.seeds < len(self.runs) else ""
        return number.text(style, joint) + of


@dataclass(frozen=True)
class Comparison:
    """Set cells side by side: `Comparison(cells=(bf16, fp8), notes=("not matched: ...",))`."""

    cells: tuple[Cell, ...]
    notes: tuple[str, ...]
    """What a reader must know: damaged directories, emulation, what is not matched."""

    @property
    def runs(self) -> list[FinishedRun]:
        """Return all runs, cell by cell."""
        return [run for cell in self.cells for run in cell.runs]

    @property
    def title(self) -> str:
        """Return `tiny-llama, local backend`."""
        models = dict.fromkeys(run.recipe.model.name for run in self.runs)
        backends = dict.fromkeys(run.plan.backend for run in self.runs)
        return f"{', '.join(models)}, {' and '.join(backends)} backend"


Measure = Callable[[FinishedRun], float | None]


def _mean(key: str, fold: Callable[[Collection[float]], float] = fmean) -> Measure:
    def over_steps(run: FinishedRun) -> float | None:
        values = run.series(key).values()
        return fold(values) if values else None

    return over_steps


def _first_accuracy(run: FinishedRun) -> float | None:
    return run.series("val/accuracy").get(0)


def last_accuracy(run: FinishedRun) -> float | None:
    """Return the last validation of a run that is finished."""
    validated = [value for step, value in run.series("val/accuracy").items() if step > 0]
    return validated[-1] if validated and run.state == "finished" else None


def _gain(run: FinishedRun) -> float | None:
    first, last = _first_accuracy(run), last_accuracy(run)
    return None if first is None or last is None else 100 * (last - first)


def _last_reward(run: FinishedRun) -> float | None:
    rewards = list(run.series("reward/mean").values())
    return fmean(rewards[-LAST_STEPS:]) if rewards else None


def _max_drift(run: FinishedRun) -> float | None:
    series = run.series("recalibrate/max_drift").items()
    drifts = [drift for step, drift in series if step > 1]
    return math.nan if any(map(math.isnan, drifts)) else max(drifts, default=None)


class Column(NamedTuple):
    """Describe one number of every cell: how to write it, take it from a run, and explain it."""

    name: str
    format: str
    measure: Measure
    meaning: str
    terminal: bool = True
    """Whether the terminal's 100 columns have room for it."""
    relative: bool = False
    """Divided by its mean over the BF16 rollouts of the same model in the same comparison."""
    least: bool = False
    """Whether its least seed counts, not their mean."""


SECTIONS: dict[str, tuple[Column, ...]] = {
    "Learning": (
        Column("first acc.", ".1%", _first_accuracy, "validation accuracy at step 0"),
        Column("last acc.", ".1%", last_accuracy, "last validation of a finished run"),
        Column("gain", "+.1f", _gain, "last less first accuracy, in points"),
        Column("reward", ".3f", _last_reward, f"mean over the last {LAST_STEPS} steps done"),
    ),
    "Mismatch and correction": (
        Column("KL", ".1e", _mean("mismatch/kl"),
               "k3 estimate of KL(rollout || train), nats per token"),
        Column("p99", ".3f", _mean("mismatch/abs_log_ratio_p99"),
               "99th percentile over tokens of the absolute log ratio", terminal=False),
        Column("prob. error", ".3f", _mean("mismatch/token_mult_prob_error"),
               "token_mult_prob_error, `mean exp(abs(log ratio))`: 1 is none"),
        Column("mult. mean", ".3f", _mean("correction/multiplier_mean"),
               "mean of what multiplies a token's loss"),
        Column("mult. ESS", ".3f", _mean("correction/ess"),
               "effective sample share of the multipliers: 1 if all are equal"),
        Column("clip", ".2%", _mean("correction/clipped_fraction"),
               "share of tokens whose ratio was truncated"),
        Column("mask", ".2%", _mean("correction/masked_fraction"),
               "share of tokens that were rejected"),
    ),
    "Refit and recalibration": (
        Column("refit bytes", ",.0f", _mean("refit/bytes", max),
               "sent by one refit, the largest", terminal=False),
        Column("refit /BF16", ".2f", _mean("refit/bytes", max),
               "refit bytes, divided by those of the same model's BF16 rollout", relative=True),
        Column("verified", ",.0f", _mean("refit/verified_weights", min),
               "FP8 weights that the engine was proven to hold, the fewest in any refit; 0 in a "
               "BF16 rollout and with glue.verify=off", terminal=False, least=True),
        Column("saturated", ".2%", _mean("recalibrate/saturated_fraction"),
               "share of Q/K/V ranges that exceeded the scale in force"),
        Column("drift", ".1%", _max_drift,
               "largest change of a Q/K/V scale in one step, after step 1", terminal=False),
    ),
}  # fmt: skip
COLUMNS = [column for columns in SECTIONS.values() for column in columns]


def compare(runs: Iterable[FinishedRun], damaged: Iterable[str] = ()) -> Comparison:
    """Group runs by cell, in the order of their first run, and average their seeds.

    Args:
        runs: what `read_run` returned.
        damaged: lines on directories that could not be read; they head the notes.
    """
    runs, groups = list(runs), defaultdict(list)
    for run in runs:
        groups[frozenset(run.settings.items())].append(run)
    repeated = [line for group in groups.values() for line in _drop_repeated(group)]
    runs = [run for group in groups.values() for run in group]
    labels = _labels([group[0] for group in groups.values()])
    cells = tuple(
        Cell(label, tuple(group), _numbers(group, runs))
        for label, group in zip(labels, groups.values(), strict=True)
    )
    emulation = [EMULATION] if any(run.plan.backend == "local" for run in runs) else []
    own = [OWN_REWARD] if any(run.recipe.data.reward for run in runs) else []
    known = (*damaged, *_holes(runs), *repeated, *emulation, *own)
    return Comparison(cells, (*known, *_unmatched(cells), *_environments(cells)))


def _holes(runs: Iterable[FinishedRun]) -> Iterator[str]:
    for run in runs:
        if run.holes:
            lost = f"{METRICS} lacks step {spans(run.holes)} of {run.steps}"
            yield f"{run.path}: {lost}: its curves have a hole, its means are over the rest"


def _drop_repeated(group: list[FinishedRun]) -> list[str]:
    """Keep the longest run of each seed: twice the same is not two seeds. Says what it dropped."""
    kept = {run.recipe.seed: run for run in sorted(group, key=lambda run: run.steps)}
    dropped = [run for run in group if kept[run.recipe.seed] is not run]
    group[:] = [run for run in group if kept[run.recipe.seed] is run]
    return [
        f"{run.path}: left out, has the seed and the settings of {kept[run.recipe.seed].path}"
        for run in dropped
    ]


def _numbers(
    group: Sequence[FinishedRun], runs: Sequence[FinishedRun]
) -> dict[str, MeanOfSeeds | None]:
    same_model = [run for run in runs if run.recipe.model == group[0].recipe.model]
    bf16 = [run for run in same_model if not run.recipe.precision.rollout.is_quantized]
    numbers = {}
    for column in COLUMNS:
        values = _measured(column, group)
        if column.relative:
            base = _measured(column, bf16)
            values = [value / fmean(base) for value in values if base]
        least = [min(values)] * len(values) if column.least and values else values
        numbers[column.name] = mean_of_seeds(least)
    return numbers


def _measured(column: Column, runs: Iterable[FinishedRun]) -> list[float]:
    return [value for run in runs if (value := column.measure(run)) is not None]


def mean_of_seeds(values: Sequence[float]) -> MeanOfSeeds | None:
    """Return mean and 95% interval of a number that each seed has; None of nothing."""
    if len(values) < 2:
        return MeanOfSeeds(values[0], None, 1) if values else None
    if not all(map(math.isfinite, values)):
        return MeanOfSeeds(fmean(values), math.nan, len(values))
    quantile = STUDENT[min(len(values) - 1, len(STUDENT)) - 1]
    return MeanOfSeeds(
        fmean(values), quantile * stdev(values) / math.sqrt(len(values)), len(values)
    )


def _labels(runs: Sequence[FinishedRun]) -> list[str]:
    """Name cells PRECISION-CORRECTION, after the model of several, and by what namesakes differ."""
    one_model = len({run.recipe.model.name for run in runs}) == 1
    labels = []
    for run in runs:
        namesakes = [("", other.settings) for other in runs if other.plan.cell == run.plan.cell]
        name = run.plan.cell.rpartition("/")[2] if one_model else run.plan.cell
        own = [f"{key}={run.settings.get(key, 'not set')}" for key in differing(namesakes)]
        labels.append(" ".join([name, *own]))
    return labels


def _unmatched(cells: Iterable[Cell]) -> Iterator[str]:
    """Name what differs between cells of a model beside precision and correction, and seeds."""
    cells, models = list(cells), defaultdict(list)
    for cell in cells:
        matched = [run.matched | {"seed": cell.seeds} for run in cell.begun]
        models[matched[0]["model.name"]] += [(cell.label, each) for each in matched]
    for named in models.values():
        yield from _sentences("not matched", differing(named))
    runs = [(cell.label, run) for cell in cells for run in cell.runs]
    yield from _sentences("not matched", differing_problems(runs))


def _environments(cells: Iterable[Cell]) -> Iterator[str]:
    named = [(cell.label, run) for cell in cells for run in cell.runs]
    missing = [str(run.path) for _, run in named if not run.environment]
    if missing:
        yield f"no {ENVIRONMENT} in {', '.join(missing)}"
    recorded = [
        (label, {key: text for key, text in run.environment.items() if key not in BEGUN_WITH})
        for label, run in named
        if run.environment
    ]
    yield from _sentences("environments differ", differing(recorded))


def _sentences(start: str, found: Mapping[str, Mapping[str, Sequence[str]]]) -> Iterator[str]:
    for key, holders in found.items():
        parts = [f"{text} in {', '.join(dict.fromkeys(names))}" for text, names in holders.items()]
        yield f"{start}: {key} is {'; '.join(parts)}"


def differing(named: Sequence[tuple[str, Mapping[str, str]]]) -> dict[str, dict[str, list[str]]]:
    """Return key -> value -> names that have it, for keys whose value is not one everywhere."""
    found = {}
    for key in dict.fromkeys(key for _, values in named for key in values):
        holders = defaultdict(list)
        for name, values in named:
            holders[values.get(key, "not set")].append(name)
        if len(holders) > 1:
            found[key] = holders
    return found


def differing_problems(named: Iterable[tuple[str, FinishedRun]]) -> dict[str, dict[str, list[str]]]:
    """Return the same, of the problems of one `data`, where recorded; seed by seed."""
    alike = defaultdict(list)
    for name, run in named:
        if digest := run.environment.get("problems"):
            data = tuple(each for each in run.settings.items() if each[0].startswith("data."))
            seed = run.recipe.seed
            alike[data, seed].append((name, {f"problem set of seed {seed}": digest}))
    found = defaultdict(dict)
    for each in alike.values():
        for key, holders in differing(each).items():
            found[key] |= holders
    return found


def given(option: Precision | Correction) -> str:
    """Return what an option sets beside its name: `level=token truncate=2.0`; "" if nothing.

    A name is the file's that a line began with, and every key of it can be set on the line.
    """
    plain = vars(type(option)())
    return " ".join(
        f"{key}={as_typed(value)}"
        for key, value in vars(option).items()
        if value != plain[key] and key not in ("name", *ONLY_CHECKED)
    )


def markdown_table(rows: Sequence[Sequence[Any]]) -> str:
    """Write rows, the first of which is the heading; a pipe in a text does not break it."""
    texts = [[str(text).replace("|", "\\|") for text in row] for row in rows]
    lines = [" | ".join(row) for row in (texts[0], ["---"] * len(rows[0]), *texts[1:])]
    return "\n".join(f"| {line} |" for line in lines)
