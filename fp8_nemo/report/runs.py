"""Read runs, finished or not, from their directories or from the archive of a study."""

from __future__ import annotations

import dataclasses
import gzip
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from fp8_nemo.plan.plan import ONLY_CHECKED, Plan, plan_from_json
from fp8_nemo.recipe.mistake import as_typed
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.plain import leaves, read_json
from fp8_nemo.runs.metrics import (
    FIRST_STEP,
    METRICS,
    RunDirError,
    missing_steps,
    read_metrics,
    steps_done,
    valued,
)
from fp8_nemo.runs.provenance import ATTEMPTS, read_environment
from fp8_nemo.runs.run_dir import PLAN, State, read_plan, state_of

ARCHIVE = ".jsonl.gz"
"""A folder of runs as one file: a line a run, with its path, plan, environment and rows."""
BESIDE_THE_CELL = ("seed", "outputs", "logging", "cluster")
OF_THE_CELL = ("precision.", "correction.", "glue.decode")


@dataclass(frozen=True)
class FinishedRun:
    """Hold one run directory, read.

    Example: `FinishedRun(Path("outputs/tiny-llama/bf16-none/s42-1a2b3c"), plan, rows=[{"step": 0,
    "val/accuracy": 0.4}, {"step": 1, "reward/mean": 0.38}], environment={"python": "3.11.7"})`.
    """

    path: Path
    plan: Plan
    rows: list[dict[str, Any]]
    """metrics.jsonl, one object a step; step 0 is before training."""
    environment: dict[str, str]
    """environment.json less its times, as `{dotted key: text}`; empty if it was not written."""

    @property
    def recipe(self) -> Recipe:
        """Return the plan's recipe."""
        return self.plan.recipe

    @property
    def steps(self) -> int:
        """Return the steps done."""
        return steps_done(self.rows)

    @property
    def state(self) -> State:
        """Return whether the plan's last step is done."""
        return state_of(self.plan, self.steps)

    @cached_property
    def holes(self) -> list[int]:
        """Return the steps behind it that have no row."""
        return missing_steps(self.rows, FIRST_STEP[self.plan.backend], self.steps)

    @cached_property
    def settings(self) -> dict[str, str]:
        """Return what makes its cell, as `{dotted key: text}`, with the backend that was chosen."""
        recipe = dataclasses.asdict(self.recipe) | {"backend": self.plan.backend}
        kept = _as_typed({key: recipe[key] for key in recipe if key not in BESIDE_THE_CELL})
        no_part = {f"correction.{key}" for key in ONLY_CHECKED}
        no_part |= set() if self.recipe.decode_is_chosen else {"glue.decode"}
        return {key: text for key, text in kept.items() if key not in no_part}

    @property
    def matched(self) -> dict[str, str]:
        """Return what runs share if only their precision and correction are to be compared."""
        kept = {k: text for k, text in self.settings.items() if not k.startswith(OF_THE_CELL)}
        begun = {
            "starting weights": self.environment.get("weights", "not recorded"),
            "reward's code": self.environment.get("reward", "not recorded"),
        }
        return kept | begun

    def series(self, key: str) -> dict[int, float]:
        """Return step -> value of a metric, at the steps that have one."""
        return {row["step"]: row[key] for row in self.rows if row.get(key) is not None}


def find_runs(path: Path) -> list[Path]:
    """List the run directory itself, or all below a folder, sorted; never hidden (staging) ones.

    Args:
        path: a run directory, a folder of them, or a folder that was packed into one file
            `FOLDER.jsonl.gz` (`benchmarks/keep_runs.py`); runs in it keep their paths.

    Raises:
        RunDirError: such a file is damaged.
    """
    path = unpacked(path)
    found = [run for run in _packed(_archive_of(path)) if run == path or path in run.parents]
    for folder, below, files in os.walk(path):
        if {PLAN, METRICS} & set(files):
            found.append(Path(folder))
            below.clear()
        for name in files:
            found += _packed(Path(folder) / name) if name.endswith(ARCHIVE) else ()
        below[:] = [name for name in below if not name.startswith(".")]
    return sorted({*found})


def unpacked(path: Path) -> Path:
    """Return the folder that was packed into `FOLDER.jsonl.gz`; any other path as it is."""
    return Path(str(path).removesuffix(ARCHIVE))


def read_run(run_dir: Path) -> FinishedRun:
    """Read one run, finished or not, from its directory, else from the archive that has it.

    Raises:
        RunDirError: it is damaged.
    """
    is_there = (run_dir / PLAN).is_file()
    packed = None if is_there else _packed(_archive_of(run_dir)).get(run_dir)
    try:
        if packed:
            plan = plan_from_json(packed["plan"])
            rows, environment = [valued(row) for row in packed["rows"]], packed["environment"]
        else:
            plan, rows = read_plan(run_dir), read_metrics(run_dir)
            environment = read_environment(run_dir)
    except RunDirError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunDirError(f"{run_dir}: cannot be read ({error})") from error
    environment = {key: value for key, value in environment.items() if key != ATTEMPTS}
    return FinishedRun(run_dir, plan, rows, _as_typed(environment))


def _archive_of(path: Path) -> Path | None:
    """Return the archive that holds a path, if one does: its own, or that of a folder above."""
    archives = (each.with_name(each.name + ARCHIVE) for each in (path, *path.parents) if each.name)
    return next((each for each in archives if each.is_file()), None)


def _packed(archive: Path | None) -> Mapping[Path, dict[str, Any]]:
    return {} if archive is None else _read_archive(archive, archive.stat().st_mtime_ns)


@lru_cache
def _read_archive(archive: Path, written: int) -> dict[Path, dict[str, Any]]:
    """Read an archive: by path, the plan, environment and rows of each run that it holds.

    Another file that is called so, as of problems, holds none.

    Raises:
        RunDirError: it is damaged.
    """
    folder = unpacked(archive)
    try:
        with gzip.open(archive, "rt") as lines:
            found = [read_json(line) for line in lines]
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise RunDirError(f"{archive}: cannot be read ({error})") from error
    return {
        folder / each["run"]: each for each in found if isinstance(each, dict) and "run" in each
    }


def read_runs(paths: Iterable[Path]) -> tuple[list[FinishedRun], list[str]]:
    """Read all runs that can be read; return one line for each directory that cannot."""
    runs, damaged = [], []
    for path in paths:
        try:
            runs.append(read_run(path))
        except RunDirError as error:
            damaged.append(str(error))
    return runs, damaged


def _as_typed(tree: Mapping[str, Any]) -> dict[str, str]:
    """Flatten `{"a": {"b": None}}` to `{"a.b": "null"}`; a group without a key is left out."""
    return {key: as_typed(value) for key, value in leaves(tree).items() if value != {}}
