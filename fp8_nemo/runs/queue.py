"""Say where runs stand: as Slurm has them, and by their directories what Slurm has forgotten."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from fp8_nemo.correction.health import STATE, STATES
from fp8_nemo.plan.plan import Plan
from fp8_nemo.runs.metrics import read_metrics, steps_done
from fp8_nemo.runs.run_dir import job_id, read_plan, state_of
from fp8_nemo.runs.sbatch import SWEEP
from fp8_nemo.runs.terminal import table

GONE = "Invalid job id"
"""What squeue says of one job that Slurm has forgotten."""
_AWAY = "no Slurm controller is reached from here; ask on a login node of the cluster"
UNREACHED = {
    "resolve_ctls_from_dns_srv": _AWAY,
    "establish a configuration source": _AWAY,
    "Unable to contact": _AWAY,
    "process configuration file": "slurm.conf cannot be read here; `sinfo` says why, and where "
    "SLURM_CONF leads",
}
"""What Slurm's commands say, among other lines, where nobody can be asked; and what we say."""
SAID = re.compile(r"^\[\S+ (?:job )?\S+\] (.+)$", re.M)
"""A line of grpo.sbatch's or node.sh's in a job's log."""
LAST_BYTES = 8192
"""Of a log, in which its last line of ours is looked for."""


class QueueError(RuntimeError):
    """Say in one line per reason what Slurm did not answer, or did not take."""


class Entry(NamedTuple):
    """Hold what Slurm says of a job: `Entry("12_3", "pending", "Resources", "alice", "sweep-")`."""

    id: str
    state: str
    reason: str
    user: str
    name: str

    def is_of(self, plan: Plan) -> bool:
        """Tell by its name whether it is a plan's job: Slurm gives numbers again after years."""
        return self.name == plan.cell or self.name.startswith(SWEEP)


class Stand(NamedTuple):
    """Hold where one run stands."""

    path: Path
    plan: Plan
    state: str
    """finished, unfinished, stopped or failed; of a job in the queue what Slurm calls it."""
    why: str
    """Why it waits, as Slurm says it, or why it has ended, as its log says it."""
    steps: int
    attempts: int
    health: str
    """The worst state of its steps; empty before the first."""
    job: str | None
    """Number of its last job."""
    queued: bool
    """Whether Slurm has that job in its queue."""


def entries(numbers: Collection[str]) -> dict[str, Entry]:
    """Return what Slurm says of jobs that it still has in its queue, by number.

    Raises:
        QueueError: Slurm does not answer.
    """
    if not numbers:
        return {}
    call = ["squeue", "--array", "--noheader", "--format=%i|%T|%r|%u|%j"]
    call.append(f"--jobs={','.join(numbers)}")
    try:
        asked = subprocess.run(call, capture_output=True, text=True)
    except OSError as error:
        raise QueueError(f"squeue: {error.strerror}; ask on a login node") from error
    if asked.returncode and GONE not in asked.stderr:
        raise QueueError(f"squeue: {bare(asked.stderr)}")
    lines = [line.split("|", 4) for line in asked.stdout.splitlines()]
    found = [Entry(*words) for words in lines if len(words) == len(Entry._fields)]
    return {each.id: each._replace(state=each.state.lower()) for each in found}


def stands(paths: Iterable[Path]) -> list[Stand]:
    """Return where runs stand; Slurm is asked once, if it is here and one has, or had, a job.

    Raises:
        QueueError: Slurm does not answer; RunDirError: a run directory is damaged.
    """
    paths = list(paths)
    numbers = {path: job_id(path) for path in paths}
    found = entries({number for number in numbers.values() if number}) if has_slurm() else {}
    return [_stand(path, numbers[path], found.get(numbers[path] or "")) for path in paths]


def has_slurm() -> bool:
    """Tell whether this machine can ask Slurm."""
    return shutil.which("squeue") is not None


def _stand(path: Path, number: str | None, entry: Entry | None) -> Stand:
    plan, rows = read_plan(path), read_metrics(path)
    entry = entry if entry and entry.is_of(plan) else None
    attempts = len(list(path.glob("log/job-*"))) or len(list(path.glob("log/attempt-*.log")))
    worst = max((int(row.get(STATE, 0)) for row in rows), default=None)
    if entry:
        state, why = entry.state, entry.reason if entry.reason != "None" else ""
    else:
        state, why = _end(path, plan, steps_done(rows), number)
    health = "" if worst is None else STATES[worst]
    return Stand(
        path, plan, state, why, steps_done(rows), attempts, health, number, entry is not None
    )


def _end(path: Path, plan: Plan, steps: int, number: str | None) -> tuple[str, str]:
    """Return the state of a run that is not in the queue, and what was said last."""
    if (state := state_of(plan, steps)) == "finished" or number is None:
        return state, ""
    said = SAID.findall(_tail(log_of(path, number)))
    attempts = sorted(path.glob(f"log/job-{number}-*"), key=lambda each: each.stat().st_mtime)
    last = attempts[-1] if attempts else path
    failed = [file.read_text().strip() for file in sorted(last.glob("failed-*"))]
    if failed:
        return "failed", failed[0]
    return "stopped", said[-1] if said else "its job is gone, and printed nothing"


def log_of(path: Path, number: str) -> Path:
    """Return the file that all attempts of a job print to."""
    return path / "log" / f"slurm-{number}.out"


def _tail(file: Path) -> str:
    if not file.is_file():
        return ""
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - LAST_BYTES))
        return stream.read().decode(errors="replace")


def queue_table(found: Sequence[Stand]) -> Table:
    """Lay out where runs stand, one row a run; what all share is left out of their names."""
    models = {each.plan.recipe.model.name for each in found}
    rows = [
        (
            each.plan.cell.partition("/")[2] if len(models) == 1 else each.plan.cell,
            each.state,
            f"{each.steps}/{each.plan.recipe.grpo.steps}",
            each.health or "-",
            each.why or "-",
            each.path.name,
            str(each.attempts),
            each.job or "-",
        )
        for each in found
    ]
    count = Counter(each.state for each in found)
    title = f"{', '.join(sorted(models))}: {', '.join(f'{n} {s}' for s, n in count.items())}"
    heads = ("cell", "state", "step", "health", "why", "run", "attempts", "job")
    return table(title, heads, rows)


def cancel(numbers: Sequence[str]) -> None:
    """Take jobs out of the queue; those that run save first, as far as they can.

    Raises:
        QueueError: Slurm refuses, as for another user's job.
    """
    asked = subprocess.run(["scancel", *numbers], capture_output=True, text=True)
    if asked.returncode or "error" in asked.stderr:
        raise QueueError(f"scancel: {bare(asked.stderr)}")


def unreached(said: str) -> str | None:
    """Return why no controller could be asked; None if one has answered."""
    return next((text for words, text in UNREACHED.items() if words in said), None)


def bare(said: str) -> str:
    """Return Slurm's message without its prefixes."""
    if text := unreached(said):
        return text
    last = said.strip().splitlines()[-1] if said.strip() else "nothing"
    prefixes = ("sbatch: error: ", "allocation failure: ", "Batch job submission failed: ")
    for prefix in (*prefixes, "squeue: error: ", "slurm_load_jobs error: ", "scancel: error: "):
        last = last.removeprefix(prefix)
    return last
