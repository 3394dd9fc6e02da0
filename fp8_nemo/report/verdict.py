"""Say which precision to take, why, and which runs would settle what is not settled.

The rule, for each model of a comparison, by the words of `against_bf16.py`:

    out        accuracy `lower` or diverged, an unstable step, a step no faster in the mean.
    proven     accuracy `equal` or `higher`. The fastest proven cell is taken.
    open       accuracy `open`. Without a proven cell, the fastest open one is taken for now.
    one seed   proves nothing. Undecided.
    unknown    not matched, not finished, or BF16 itself did not learn or was unstable. Undecided.

If all cells are out, BF16 stays. Where no step was timed (the local backend emulates FP8 on a CPU),
better health decides, then fewer bytes a refit, then the smaller possible loss.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fp8_nemo.correction.health import STATES
from fp8_nemo.recipe.compose import ComposeError, compose
from fp8_nemo.recipe.mistake import as_typed
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.plain import leaves, to_json
from fp8_nemo.report.against_bf16 import (
    EQUAL,
    AgainstBaseline,
    against_baselines,
    baseline_of,
    health_of,
    unstable_seeds,
)
from fp8_nemo.report.compare import STUDENT, Cell, Comparison

GROUPS = ("model", "precision", "correction", "data", "grpo", "glue", "cluster")
ALWAYS_TYPED = ("model", "precision", "correction")
BASELINE = ("precision=bf16", "correction=none")
FIRST_INTERVAL = 3
"""Seeds that give an interval worth having: of two it is 9 standard deviations to either side."""
ON_A_CPU = "Speed cannot be known from these runs: the local backend emulates FP8 on a CPU."
PROVEN, OPEN, ONE_SEED, UNKNOWN, OUT = "proven", "open", "one seed", "unknown", "out"
STANDINGS = (PROVEN, OPEN, ONE_SEED, UNKNOWN, OUT)
"""Best first."""


class Standing(NamedTuple):
    """Say how a cell stands: `Standing("out", "less accurate than BF16", "-3.4 ±2.4 points", ...)`.

    Its text is reason and evidence: `less accurate than BF16 (-3.4 ±2.4 points, 3 seeds)`.
    """

    word: str
    """One of `STANDINGS`."""
    reason: str
    evidence: str
    found: AgainstBaseline
    cell: Cell

    def __str__(self) -> str:
        return f"{self.reason} ({self.evidence})"


class Choice(NamedTuple):
    """Say what to take for one model.

    Example: `Choice("tiny-llama", "fp8-e2e-tis", "Take fp8-e2e-tis", "as accurate as BF16 within 2
    points (+0.1 ±0.6 points, 3 seeds); sends 0.53 times BF16's bytes", (), "", (), standings)`.
    """

    model: str
    take: str | None
    """Label of the cell; None if BF16 stays or nothing is decided."""
    headline: str
    why: str
    caveats: tuple[str, ...]
    """Sentences on what cannot be known."""
    remedy: str
    """What `commands` are for; empty if nothing is to be run."""
    commands: tuple[str, ...]
    standings: tuple[Standing, ...]
    """Of the cells that have a baseline, best first."""

    def __str__(self) -> str:
        return " ".join([f"{self.headline}: {self.why}.", *self.caveats])


def choices(comparison: Comparison) -> list[Choice]:
    """Choose a precision for every model of a comparison, in the order of its cells."""
    models = defaultdict(list)
    for cell in comparison.cells:
        models[cell.runs[0].recipe.model.name].append(cell)
    against = {found.cell: found for found in against_baselines(comparison)}
    found = [_choose(model, cells, against) for model, cells in models.items()]
    if len(found) == 1:
        return found
    return [
        each if each.take else each._replace(headline=f"{each.headline} for {each.model}")
        for each in found
    ]


def _choose(model: str, cells: Sequence[Cell], against: dict[str, AgainstBaseline]) -> Choice:
    labels = {cell.label: cell for cell in cells}
    standings = sorted(
        (_standing(against[cell.label], cell, labels) for cell in cells if cell.label in against),
        key=_rank,
    )
    if not standings:
        return _ask_for_the_other_side(model, cells)
    best = standings[0]
    equals = [each for each in standings if each.word == best.word]
    take, why = None, "; ".join(f"{each.found.cell} is {each}" for each in equals)
    if best.word in (PROVEN, OPEN):
        take, equals, why = best.found.cell, [best], f"{best}{_gains(best)}"
    elif best.word == ONE_SEED:
        why = "one seed a cell cannot rank precisions"
    headline = {
        PROVEN: f"Take {take}", OPEN: f"Take {take} for now", OUT: "Stay with BF16",
    }.get(best.word, "Undecided")  # fmt: skip
    rerun = [*{each.found.baseline: labels[each.found.baseline] for each in equals}.values()]
    rerun += [each.cell for each in equals]
    remedy, seeds = _seeds_to_run(best, rerun)
    commands = _commands(rerun, seeds) if seeds else ()
    if seeds and not commands:
        remedy += f" Repeat the lines that made these runs with seed={_joined(seeds)}."
    caveats = (*_on_speed(best, standings),)
    return Choice(model, take, headline, why, caveats, remedy, commands, (*standings,))


def _ask_for_the_other_side(model: str, cells: Sequence[Cell]) -> Choice:
    """Choose nothing without a pair of FP8 and BF16; say how to run the side that is missing."""
    runs = [run for cell in cells for run in cell.runs]
    recipe = runs[0].recipe
    side, words = ("FP8", []) if baseline_of(cells[0], cells) else ("BF16", BASELINE)
    [other] = compose(words)
    is_matched = side == "FP8" and recipe.correction.name != "none"
    correction = recipe.correction if is_matched else other.correction
    recipe = dataclasses.replace(recipe, precision=other.precision, correction=correction)
    line = _line(recipe, sorted({run.recipe.seed for run in runs}))
    remedy, commands = ("Run it.", (line,)) if line else ("", ())
    why = f"there is no {side} run of {model} to compare with"
    caveats = (ON_A_CPU,) if runs[0].plan.backend == "local" else ()
    return Choice(model, None, "Undecided", why, caveats, remedy, commands, ())


def _standing(found: AgainstBaseline, cell: Cell, labels: dict[str, Cell]) -> Standing:
    """Say how a cell stands against its baseline, by the rule at the head of this module."""
    seeds = "1 seed" if found.seeds == 1 else f"{found.seeds} seeds"
    baseline = labels[found.baseline]
    gain = baseline.numbers["gain"]
    if found.health == STATES[-1]:
        if health_of(baseline) == STATES[-1]:
            return Standing(UNKNOWN, "unstable, and so is BF16", found.baseline, found, cell)
        return Standing(OUT, "unstable in some step", unstable_seeds(cell), found, cell)
    if found.step and found.step.mean < 1 and found.speed_word in ("slower", "open"):
        speed = f"{found.step.text('.2f')} times as fast, {seeds}"
        word = "slower" if found.speed_word == "slower" else "not shown to be faster"
        return Standing(OUT, f"{word} than BF16", speed, found, cell)
    if gain and gain.mean <= 0:
        lost = f"{found.baseline} gained {gain.text('+.1f')} points"
        return Standing(UNKNOWN, "not to be judged, BF16 did not learn", lost, found, cell)
    if found.accuracy is None or found.unmatched or not found.is_finished:
        ended = found.seeds and _have_ended((cell, baseline))
        waiting = "finished without a last validation" if ended else "not finished"
        reason = f"not matched to {found.baseline}" if found.unmatched else waiting
        missing = found.unmatched[0] if found.unmatched else _unfinished(found)
        return Standing(UNKNOWN, reason, missing, found, cell)
    if not math.isfinite(found.accuracy.mean):
        return Standing(OUT, "diverged", seeds, found, cell)
    loss = round(found.accuracy.half or 0.0, 1) - round(found.accuracy.mean, 1)
    word, reason = {
        "lower": (OUT, "less accurate than BF16"),
        "higher": (PROVEN, "more accurate than BF16"),
        "equal": (PROVEN, f"as accurate as BF16 within {EQUAL:g} points"),
        "open": (OPEN, f"not shown to be worse than BF16, but may lose up to {loss:.1f} points"),
        "one seed": (ONE_SEED, "not proven by one seed"),
    }[found.accuracy_word]
    points = f"{found.accuracy.text('+.1f')} points, {seeds}"
    return Standing(word, reason, points, found, cell)


def _unfinished(found: AgainstBaseline) -> str:
    """Say how far a cell and its baseline are."""
    if not found.seeds:
        return f"no seed in common with {found.baseline}"
    seeds = found.seeds + found.died
    return f"{found.validated} of {seeds} seeds have a last validation on both sides"


def _have_ended(cells: Iterable[Cell]) -> bool:
    return all(run.state == "finished" for cell in cells for run in cell.runs)


def _rank(standing: Standing) -> tuple[float, ...]:
    """Return what sorts the cell to take first."""
    found, sent = standing.found, standing.cell.numbers["refit /BF16"]
    speed = found.step.mean if found.step else 0.0
    share = round(sent.mean, 2) if sent else 1.0
    least = -math.inf
    if found.accuracy and math.isfinite(found.accuracy.mean):
        least = found.accuracy.mean - (found.accuracy.half or 0.0)
    place = STANDINGS.index(standing.word)
    return place, -speed, ["-", *STATES].index(found.health), share, -least


def _gains(best: Standing) -> str:
    """Say what a cell buys, as far as it was measured."""
    found, sent, said = best.found, best.cell.numbers["refit /BF16"], ""
    if sent and round(sent.mean, 2) != 1:
        said = f"; sends {sent.mean:.2f} times BF16's bytes"
    if found.step:
        doubt = {"open": " (not shown faster)", "one seed": " (one seed)"}
        said += f"; takes a step {found.step.text('.2f')} times as fast"
        said += doubt.get(found.speed_word, "")
    return said


def _on_speed(best: Standing, standings: Iterable[Standing]) -> Iterator[str]:
    """Yield what is not known of speed, and which open cells are faster than a proven one."""
    speed = best.found.step
    if best.cell.runs[0].plan.backend == "local":
        yield ON_A_CPU
    elif best.word == OUT:
        return
    elif speed is None:
        yield "Speed is not known: no step of both was timed on the same machines and versions."
    elif best.word == PROVEN:
        for each in (other.found for other in standings if other.word == OPEN):
            if each.step and each.step.mean > speed.mean:
                yield f"{each.cell} is {each.step.text('.2f')} times as fast, its accuracy open."


def _seeds_to_run(best: Standing, cells: Iterable[Cell]) -> tuple[str, list[int]]:
    """Say which seeds would settle a choice; none where more seeds are no answer."""
    there = sorted({run.recipe.seed for cell in cells for run in cell.runs})
    found, fresh = best.found, range(there[-1] + 1, there[-1] + len(STUDENT) + 1)
    if best.word == ONE_SEED:
        run = [*fresh[:2]]
        return (
            f"Run seeds {_joined(run, ', ')}: {FIRST_INTERVAL} a cell give a first interval.",
            run,
        )
    if best.word == UNKNOWN and not found.unmatched and not found.is_finished:
        if found.seeds and _have_ended(cells):
            return "Validate the last step: grpo.validate_every must divide grpo.steps.", []
        return "Resume what has stopped and run what is missing.", there
    if best.word != OPEN:
        return "", []
    if (enough := seeds_to_decide(found)) is None:
        return f"At this spread of seeds, {len(STUDENT) + 1} seeds would not decide.", []
    run = [*fresh[: enough - found.seeds]]
    said = f"{enough} seeds a cell would decide, if their mean and spread stay as they are."
    return f"Run seed{'s' * (len(run) > 1)} {_joined(run, ', ')}: {said}", run


def seeds_to_decide(found: AgainstBaseline) -> int | None:
    """Count the seeds at which an open accuracy would be equal or different, all else as it is.

    Returns:
        More than `found.seeds`; None if the table of Student's t ends before.
    """
    if found.accuracy is None or found.accuracy.half is None:
        return None
    mean, seeds = abs(found.accuracy.mean), found.accuracy.seeds
    deviation = found.accuracy.half * math.sqrt(seeds) / STUDENT[min(seeds - 1, len(STUDENT)) - 1]
    for more in range(seeds + 1, len(STUDENT) + 2):
        half = STUDENT[more - 2] * deviation / math.sqrt(more)
        if mean + half <= EQUAL or mean > half:
            return more
    return None


def _commands(cells: Iterable[Cell], seeds: Sequence[int]) -> tuple[str, ...]:
    """Write the lines that run cells with these seeds; cells of one correction share a line."""
    sharing: dict[str, list[str]] = defaultdict(list)
    for cell in cells:
        recipe = cell.runs[0].recipe
        line, name = _line(recipe, seeds), recipe.precision.name
        if line is None:
            return ()
        sharing[line.replace(f"precision={name}", "precision={}", 1)].append(name)
    return tuple(
        line.replace("precision={}", f"precision={','.join(dict.fromkeys(names))}", 1)
        for line, names in sharing.items()
    )


def _line(recipe: Recipe, seeds: Sequence[int]) -> str | None:
    """Write the line that runs a recipe with these seeds; None if none composes to just that."""
    try:
        [usual] = compose([f"model={recipe.model.name}"])
        here = usual.cluster.interpreter  # `auto` finds it where the line is typed
        cluster = dataclasses.replace(recipe.cluster, interpreter=here)
        recipe = dataclasses.replace(recipe, cluster=cluster)
        names = {group: getattr(recipe, group).name for group in GROUPS}
        options = [
            f"{group}={name}"
            for group, name in names.items()
            if group in ALWAYS_TYPED or name != getattr(usual, group).name
        ]
        [base] = compose(options)
        if not recipe.decode_is_chosen:  # whatever it was, it changes nothing
            glue = dataclasses.replace(recipe.glue, decode=base.glue.decode)
            recipe = dataclasses.replace(recipe, glue=glue)
        words = [*options, *_settings(recipe, base)]
        [again] = compose([*words, f"seed={recipe.seed}"])
    except ComposeError:  # a site's own option that is not here
        return None
    typed = shlex.join(["-m", *words, f"seed={_joined(seeds)}"])
    return f"python -m recipes.grpo {typed}" if again == recipe else None


def _settings(recipe: Recipe, base: Recipe) -> Iterator[str]:
    """Yield KEY=VALUE for what a recipe sets otherwise than its options."""
    usual = leaves(dataclasses.asdict(base))
    for key, value in leaves(dataclasses.asdict(recipe)).items():
        if key != "seed" and value != usual.get(key):
            text = to_json(value) if isinstance(value, list) else as_typed(value)
            yield f"{'' if key in usual else '+'}{key}={text}"


def _joined(seeds: Iterable[int], by: str = ",") -> str:
    return by.join(map(str, seeds))
