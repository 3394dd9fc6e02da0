"""Keep the directory of one run: freeze a plan, find it again, resume it, damage nothing.

    outputs/MODEL/PRECISION-CORRECTION/sSEED-HASH6/
        recipe.yaml plan.json environment.json metrics.jsonl log/ checkpoints/ data/ job/
        mismatch/ report/

Run directories are made here alone. Freezing is all-or-nothing over the cells of a sweep:
everything is written into one staging directory and renamed into place, so a mistake in the last
cell leaves no trace of the first. Checkpoints appear by one rename as well; a run that is killed
while saving leaves only a folder that the next save removes. No secret ever comes here: of the
environment only versions and hardware are kept.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fp8_nemo.plan.plan import Plan, plan_from_json
from fp8_nemo.recipe.plain import escape_interpolation, read_json, to_json
from fp8_nemo.recipe.settled import KEPT_CHECKPOINTS, Layout
from fp8_nemo.runs.metrics import (
    FIRST_STEP,
    METRICS,
    RunDirError,
    keep_rows,
    make_folder,
    missing_steps,
    read_metrics,
    rows_until,
    steps_done,
    sync,
    write_rows,
)

PLAN, RECIPE = "plan.json", "recipe.yaml"
LOCK = ".lock"

State = Literal["new", "unfinished", "finished"]


@dataclass(frozen=True)
class Frozen:
    """Name a run directory that is ready: `Frozen(Path("outputs/.../s42-1a2b3c"), "new", 0)`."""

    path: Path
    state: State
    steps: int
    """Steps that are behind it, with metrics and a checkpoint."""


def freeze(plans: Iterable[Plan]) -> list[Frozen]:
    """Make the run directories of all plans, or find those that exist; all or none.

    An unfinished directory gets the new plan (more steps, another cluster); its results stay. A
    finished one is left as it is.

    Raises:
        RunDirError: outputs cannot be written.
    """
    plans = list(plans)
    found = [_existing(plan) for plan in plans]
    done = [each.state == "finished" and (each.path / PLAN).exists() for each in found]
    _write_all([plan for plan, whole in zip(plans, done, strict=True) if not whole])
    return found


def run_path(plan: Plan) -> Path:
    """Return where a plan runs."""
    return Path(plan.recipe.outputs) / plan.run_name


def read_plan(run_dir: Path) -> Plan:
    """Read the frozen plan of a run directory.

    Raises:
        RunDirError: there is none, or it was cut short or changed by hand.
    """
    try:
        return plan_from_json(read_json((run_dir / PLAN).read_text()))
    except OSError as error:
        raise RunDirError(
            f"{run_dir}: no run directory, {PLAN} cannot be read ({error.strerror})"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, OmegaConfBaseException) as error:
        raise RunDirError(
            f"{run_dir / PLAN}: not a plan ({str(error).splitlines()[0]}); "
            "delete the file, and the same line again writes it"
        ) from error


def layout_of(plan: Plan) -> Layout | None:
    """Return the layout with which a run was first submitted; None if it was not, or gave its own.

    One for GPUs that train and sample says nothing of GPUs that do one of the two.

    Raises:
        RunDirError: its plan cannot be read.
    """
    path = run_path(plan)
    if not _exists(path / PLAN):
        return None
    first = read_plan(path)
    return first.layout if first.settled.shares_gpus == plan.settled.shares_gpus else None


def state_of(plan: Plan, steps: int) -> State:
    """Return whether a directory that exists has done what its plan asks for."""
    return "finished" if steps >= plan.recipe.grpo.steps else "unfinished"


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold a run directory alone for as long as the block, or the process, lives.

    Raises:
        RunDirError: another process runs it, or it is somebody else's.
    """
    try:
        lock = (run_dir / LOCK).open("a+")
    except OSError as error:
        raise RunDirError(f"{run_dir}: cannot be written ({error.strerror})") from error
    with lock as file:
        try:
            lock_alone(file.fileno(), run_dir)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            remedy = "wait for it, or end it"
            raise RunDirError(f"{run_dir}: {holder} is running it; {remedy}") from error
        file.truncate(0)
        file.write(f"another process, {os.getpid()} on {platform.node()}, since {now()},")
        file.flush()
        yield
        file.truncate(0)


def lock_alone(file: int, path: Path) -> None:
    """Lock an open file for this process alone, without waiting.

    Raises:
        BlockingIOError: another process holds it.
        RunDirError: its file system has no locks; names `path`.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        raise RunDirError(
            f"{path}: cannot be locked ({error.strerror}); set outputs=FOLDER on a file "
            "system with locks, or have this one mounted with them (Lustre: flock)"
        ) from error


def now() -> str:
    """Return the time as `2026-11-22T09:30:00+00:00`, in UTC whatever the machine's zone."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def attempt_log(run_dir: Path) -> Path:
    """Return a new log file of this attempt: log/attempt-1.log, log/attempt-2.log, ..."""
    folder = run_dir / "log"
    folder.mkdir(exist_ok=True)
    earlier = len(list(folder.glob("attempt-*.log")))
    path = folder / f"attempt-{earlier + 1}.log"
    path.touch()
    return path


def data_dir(run_dir: Path) -> Path:
    """Return where a run keeps the problems that it made."""
    folder = run_dir / "data"
    folder.mkdir(exist_ok=True)
    return folder


def job_dir(run_dir: Path) -> Path:
    """Return where a run keeps what its Slurm job reads, and its number."""
    folder = run_dir / "job"
    make_folder(folder)
    make_folder(run_dir / "log")  # Slurm opens the job's output there, or fails
    return folder


def job_id(run_dir: Path) -> str | None:
    """Return the number of the Slurm job that has, or had, a run directory; None without one."""
    try:
        return (run_dir / "job" / "id").read_text().strip() or None
    except OSError:
        return None


def report_dir(parent: Path) -> Path:
    """Return the report folder of a run directory, or of the folder above several."""
    folder = parent / "report"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def checkpoints(run_dir: Path) -> list[Path]:
    """List whole checkpoints, oldest first: checkpoints/step-000010, or NeMo RL's step_10, ...

    Raises:
        RunDirError: they cannot be read, which `glob` takes for none.
    """
    folder = run_dir / "checkpoints"
    if _exists(folder) and not os.access(folder, os.R_OK | os.X_OK):
        raise RunDirError(f"{folder}: cannot be read (Permission denied)")
    found = (each for each in folder.glob("step[-_]*") if each.name[5:].isdecimal())
    return sorted(filter(Path.is_dir, found), key=checkpoint_step)


def _exists(path: Path) -> bool:
    """Tell whether a path is there; another user's folders may not even tell.

    Raises:
        RunDirError: they do not.
    """
    try:
        return path.exists()
    except OSError as error:
        raise RunDirError(
            f"{path}: cannot be read ({error.strerror}); set outputs=FOLDER to a folder of yours"
        ) from error


def checkpoint_step(checkpoint: Path) -> int:
    """Return the step that a checkpoint was saved after."""
    return int(checkpoint.name.removeprefix("step")[1:])


def rewind(run_dir: Path, backend: str) -> Path | None:
    """Make metrics.jsonl what it was when the last checkpoint was saved; return that, if any.

    Raises:
        RunDirError: rows that the run had are nowhere.
    """
    last = next(reversed(checkpoints(run_dir)), None)
    step = checkpoint_step(last) if last else -1
    write_rows(run_dir / METRICS, rows_until(run_dir, last, step, FIRST_STEP[backend]))
    return last


@contextmanager
def new_checkpoint(run_dir: Path, step: int) -> Iterator[Path]:
    """Yield a folder to save into; it becomes step-NNNNNN whole or not at all. Prune older ones.

    A copy of the run's rows is put there too.
    """
    folder = run_dir / "checkpoints"
    folder.mkdir(exist_ok=True)
    tidy_checkpoints(run_dir)
    saving = folder / f"saving-{step:06d}"
    saving.mkdir()
    try:
        yield saving
        keep_rows(run_dir, saving)
        for file in (*saving.iterdir(), saving, run_dir):
            sync(file)
        target = folder / f"step-{step:06d}"
        shutil.rmtree(target, ignore_errors=True)
        saving.rename(target)
        sync(folder)
    finally:  # when the disk is full, too
        tidy_checkpoints(run_dir)


def tidy_checkpoints(run_dir: Path) -> None:
    """Remove what a kill left half saved, or not yet removed, and all but the last checkpoints."""
    folder = run_dir / "checkpoints"
    ours = [each for each in checkpoints(run_dir) if each.name.startswith("step-")]
    for each in (*folder.glob("saving-*"), *ours[:-KEPT_CHECKPOINTS]):
        shutil.rmtree(each)


def _existing(plan: Plan) -> Frozen:
    path = run_path(plan)
    if not _exists(path):
        return Frozen(path, "new", 0)
    with locked(path):
        tidy_checkpoints(path)
        rows, saved = read_metrics(path), checkpoints(path)
    steps = steps_done(rows)
    if saved:
        return _saved(plan, path, rows, saved[-1])
    if steps < plan.recipe.grpo.steps:
        if steps > plan.recipe.grpo.checkpoint_every or _was_finished(path, steps):
            raise RunDirError(
                f"{path}: its checkpoints are gone, so it cannot go on; delete it to start again"
            )
        steps = 0
    return Frozen(path, state_of(plan, steps), steps)


def _saved(plan: Plan, path: Path, rows: list[dict[str, float]], last: Path) -> Frozen:
    """Find a run that has checkpoints: it is finished with its last row and its last checkpoint.

    Raises:
        RunDirError: it goes on, and rows that it had are nowhere.
    """
    step, first = checkpoint_step(last), FIRST_STEP[plan.backend]
    steps = min(steps_done(rows), step)  # a kill may fall between the last row and its checkpoint
    state = state_of(plan, steps)
    if state != "finished" and missing_steps(rows, first, step):
        rows_until(path, last, step, first)
    return Frozen(path, state, steps)


def _was_finished(path: Path, steps: int) -> bool:
    """Return whether the run there was finished: at least as many steps as its plan has."""
    return (path / PLAN).exists() and steps >= read_plan(path).recipe.grpo.steps


def _write_all(plans: list[Plan]) -> None:
    if not plans:
        return
    made: list[Path] = []
    try:
        for outputs in {Path(plan.recipe.outputs) for plan in plans}:
            made += make_folder(outputs)
        staging = new_staging(Path(plans[0].recipe.outputs))
        made.append(staging)
        for plan in plans:
            _write(plan, staging / plan.run_name)
        for plan in plans:
            made += make_folder(run_path(plan).parent)
        for plan in sorted(plans, key=lambda plan: run_path(plan).exists()):  # new ones first
            made += _move(staging / plan.run_name, run_path(plan))
        shutil.rmtree(staging)
        for folder in {each.parent for each in made} | {run_path(plan) for plan in plans}:
            sync(folder)
    except OSError as error:
        for path in reversed(made):
            _unmake(path)
        raise RunDirError(
            f"outputs={plans[0].recipe.outputs}: cannot be written ({error.strerror}); "
            "set outputs=FOLDER to a folder of yours"
        ) from error


def new_staging(parent: Path, name: str = ".staging") -> Path:
    """Make a folder to be renamed once it is whole; throw away those that killed processes left."""
    here = f"{name}-{platform.node()}-"
    for left in parent.glob(f"{here}*"):
        of_here = re.fullmatch(r"(\d+)-\w+", left.name.removeprefix(here))  # gpu-17 is not gpu's
        if of_here and not _is_alive(int(of_here[1])):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{here}{os.getpid()}-", dir=parent))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def _unmake(folder: Path) -> None:
    """Remove what a failed freeze made, and nothing that another process has put there since."""
    for name in (PLAN, RECIPE):
        (folder / name).unlink(missing_ok=True)
    if folder.name.startswith(".staging-"):
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.rmdir()


def _write(plan: Plan, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    recipe = escape_interpolation(dataclasses.asdict(plan.recipe))
    (folder / PLAN).write_text(to_json(plan.to_json(), indent=1) + "\n")
    (folder / RECIPE).write_text(OmegaConf.to_yaml(OmegaConf.create(recipe)))
    for each in (folder / PLAN, folder / RECIPE, folder):
        sync(each)


def _move(staged: Path, path: Path) -> list[Path]:
    """Put a staged directory, or its files, in place; return what is new."""
    if not path.exists():
        staged.rename(path)
        return [path]
    for file in staged.iterdir():
        file.replace(path / file.name)
    return []
