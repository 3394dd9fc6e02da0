"""Read and write metrics.jsonl: one JSON object a step, on disk before the next step begins."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp8_nemo.correction.health import STATE, STATES, UnstableError, judge

METRICS = "metrics.jsonl"


class RunDirError(ValueError):
    """Report a run directory that cannot be made, read or resumed; one line."""


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read one object per step. A last line that was cut short by a kill is left out.

    Raises:
        RunDirError: a line other than the last cannot be read.
    """
    path = run_dir / METRICS
    try:
        lines = path.read_text().split("\n") if path.exists() else []
    except (OSError, ValueError) as error:
        raise RunDirError(f"{path}: cannot be read ({error})") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if number == len(lines):  # text after the last newline: empty, or cut short
            break
        try:
            rows.append(json.loads(line))
            int(rows[-1]["step"])
        except (ValueError, TypeError, KeyError) as error:
            raise RunDirError(
                f"{path}:{number}: not a step's JSON object; delete the line or the directory"
            ) from error
    return rows


def steps_done(rows: list[dict[str, Any]]) -> int:
    """Return the steps that a run has behind it, by its metrics."""
    return rows[-1]["step"] if rows else 0


def rewind_metrics(run_dir: Path, step: int) -> None:
    """Drop the metrics of steps after `step`: they are about to be computed again."""
    kept = [row for row in read_metrics(run_dir) if row["step"] <= step]
    write_whole(run_dir / METRICS, "".join(json.dumps(row) + "\n" for row in kept))


def append_metrics(run_dir: Path, row: dict[str, Any]) -> None:
    """Add one step; the line is on disk when this returns."""
    with (run_dir / METRICS).open("a") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def append_judged(run_dir: Path, row: dict[str, Any], stop: bool) -> str:
    """Append a step's metrics and its `health/state`, 0 to 2.

    Args:
        run_dir: of the run.
        row: the step's metrics.
        stop: whether an unstable step ends the run.

    Returns:
        What a terminal says of a state worse than all before: `step 7: watch: REASONS`; else
        nothing, because single tokens throw the state to and fro.

    Raises:
        UnstableError: with the reasons; the row is written.
    """
    before = read_metrics(run_dir)
    verdict = judge([*before, row])
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
def replaced(path: Path) -> Iterator[Path]:
    """Yield a file to write in the place of one that it replaces once it is whole and on disk.

    Its name is always the same, so that what a kill leaves is gone with the next one.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    finally:  # of a full disk
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
