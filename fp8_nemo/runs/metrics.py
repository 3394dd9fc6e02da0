"""Read and write metrics.jsonl: one JSON object a step, on disk before the next step begins.

A checkpoint has a copy of the rows up to its step. A run that goes on from it restores from there
what metrics.jsonl lacks, or is refused: no curve gets a hole in silence. `null` is a number that
was not finite; it is read as NaN.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fp8_nemo.correction.health import STATE, STATES, UnstableError, judge
from fp8_nemo.recipe.plain import read_json, to_json

METRICS = "metrics.jsonl"
ROWS = "rows.jsonl"
"""A checkpoint's copy of METRICS, under a name of its own: METRICS makes a run directory."""
FIRST_STEP = {"local": 0, "nemo": 1}
"""First step of a whole curve, by backend: NeMo RL has a row 0 only where it validates first."""


class RunDirError(ValueError):
    """Report a run directory that cannot be made, read or resumed; one line."""


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read one object per step. A last line that was cut short by a kill is left out.

    Raises:
        RunDirError: a line other than the last cannot be read.
    """
    return _read_rows(run_dir / METRICS)


def _read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text().split("\n") if path.exists() else []
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        restores = "delete it, and the same line restores it from the run's last checkpoint"
        raise RunDirError(f"{path}: cannot be read, {why}; {restores}") from error
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # after the last newline: empty, or cut
        try:
            rows.append(_row(read_json(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise RunDirError(
                f"{path}:{number}: not a step's JSON object; delete the line, and the same line of "
                "recipes.grpo restores it from the run's last checkpoint"
            ) from error
    return rows


def _row(found: Any) -> dict[str, Any]:
    """Check a line's object: numbers by name, and a step."""
    if type(found["step"]) is not int or {*map(type, found.values())} - {int, float, type(None)}:
        raise ValueError("not numbers")
    return valued(found)


def valued(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as it was before it became JSON, which has `null` for what is not finite."""
    return {key: math.nan if value is None else value for key, value in row.items()}


def steps_done(rows: list[dict[str, Any]]) -> int:
    """Return the steps that a run has behind it, by its metrics."""
    return rows[-1]["step"] if rows else 0


def missing_steps(rows: Iterable[dict[str, Any]], first: int, last: int) -> list[int]:
    """Return the steps from `first` to `last` that have no row."""
    there = {row["step"] for row in rows}
    return [step for step in range(first, last + 1) if step not in there]


def spans(steps: Collection[int]) -> str:
    """Write steps, in order: `1-4, 7`."""
    starts = [step for step in steps if step - 1 not in steps]
    ends = [step for step in steps if step + 1 not in steps]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(f"{start}-{end}" if end > start else f"{start}" for start, end in pairs)


def rows_until(run_dir: Path, checkpoint: Path | None, step: int, first: int) -> list[Any]:
    """Return a run's rows up to a step, those that METRICS lacks from its checkpoint.

    Args:
        run_dir: of the run.
        checkpoint: of that step; None without one.
        step: the last.
        first: a whole curve's first step.

    Raises:
        RunDirError: a row is nowhere.
    """
    rows = [row for row in read_metrics(run_dir) if row["step"] <= step]
    lost = missing_steps(rows, first, step)
    if lost and checkpoint:
        with suppress(RunDirError):
            kept = [row for row in _read_rows(checkpoint / ROWS) if row["step"] <= step]
            rows = [*{row["step"]: row for row in (*kept, *rows)}.values()]
        lost = missing_steps(rows, first, step)
    if lost:
        raise RunDirError(
            f"{run_dir}: {METRICS} lacks step {spans(lost)} of {step}, the last checkpoint has no "
            f'whole copy; put the file back, or add a line {{"step": {lost[0]}}} for each to go on '
            "with a hole"
        )
    return sorted(rows, key=lambda row: row["step"])


def keep_rows(run_dir: Path, checkpoint: Path, *more: dict[str, Any]) -> None:
    """Copy a run's rows, and more, into a checkpoint that is being saved."""
    if rows := [*read_metrics(run_dir), *more]:
        write_rows(checkpoint / ROWS, rows)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Replace a file of rows."""
    write_whole(path, "".join(to_json(row) + "\n" for row in rows))


def append_metrics(run_dir: Path, row: dict[str, Any]) -> None:
    """Add one step; the line is on disk when this returns."""
    path = run_dir / METRICS
    new = not path.exists()
    with path.open("a") as file:
        file.write(to_json(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
    if new:
        sync(run_dir)


def append_judged(run_dir: Path, row: dict[str, Any], stop: bool, verify: str) -> str:
    """Append a step's metrics and its `health/state`, 0 to 2.

    Args:
        run_dir: of the run.
        row: the step's metrics.
        stop: whether an unstable step ends the run.
        verify: the run's `glue.verify`.

    Returns:
        What a terminal says of a state worse than all before: `step 7: watch: REASONS`; else
        nothing, because single tokens throw the state to and fro.

    Raises:
        UnstableError: with the reasons; the row is written.
    """
    before = read_metrics(run_dir)
    verdict = judge([*before, row], verify)
    state, why = STATES.index(verdict.state), "; ".join(verdict.reasons)
    append_metrics(run_dir, row | {STATE: state})
    if stop and verdict.state == STATES[-1]:
        raise UnstableError(
            f"step {row['step']} is unstable: {why} (grpo.stop_when_unstable=false goes on)"
        )
    if state <= max((row.get(STATE, 0) for row in before), default=0):
        return ""
    return ": ".join(filter(None, (f"step {row['step']}", verdict.state, why)))


def write_whole(path: Path, text: str) -> None:
    """Replace a file by one rename: a kill, or a loss of power, leaves the old or the new one."""
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replaced(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Yield a file to write in the place of one that it replaces once it is whole and on disk.

    Its name is always the same, so that what a kill leaves is gone with the next one.
    """
    temporary = temporary or path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    finally:  # when the disk is full, too
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def make_folder(folder: Path) -> list[Path]:
    """Make a folder and its parents, on disk; return those that were missing, outermost first."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()][::-1]
    folder.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync(each.parent)
    return missing


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
