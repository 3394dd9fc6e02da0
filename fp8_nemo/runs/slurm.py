"""Queue frozen runs with Slurm: the cells of a line as one array, all of them or none.

A cell that is in the queue is left alone, one that is finished too. The job runs the frozen plan
with a frozen copy of the code, from the folder it was submitted from. `sbatch.py` writes the calls.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import pwd
import shlex
import shutil
import subprocess
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.mistake import as_typed
from fp8_nemo.recipe.options.cluster import SBATCH_OPTIONS
from fp8_nemo.runs.frozen_code import code_dir, freeze_code
from fp8_nemo.runs.metrics import RunDirError, write_whole
from fp8_nemo.runs.queue import QueueError, bare, entries, has_slurm, log_of, unreached
from fp8_nemo.runs.run_dir import (
    Frozen,
    State,
    freeze,
    job_id,
    lock_alone,
    read_plan,
    run_path,
)
from fp8_nemo.runs.sbatch import (
    array_command,
    arrays_dir,
    not_exported,
    options,
    sbatch_command,
    sweep_name,
    write_job_files,
    write_links,
)
from fp8_nemo.runs.terminal import table, tell

LINE_LOCK = ".queue.lock"
"""File in `outputs` that a line holds while it looks, freezes and queues."""


class SubmitError(QueueError):
    """Say why nothing of a line was queued; one line per reason."""


@dataclass(frozen=True)
class Job:
    """Hold one cell of a line and its state: `Job(Path("outputs/..."), "queued", "1234")`."""

    path: Path
    state: State | str
    """new, unfinished, finished; or as Slurm has it, if it was in the queue already."""
    id: str | None = None
    user: str | None = None
    """Whose job it is, if not of who asks."""

    @property
    def watch(self) -> str:
        """Return the command that shows what a job in the queue prints."""
        return shlex.join(["tail", "-F", str(log_of(self.path, self.id or ""))])


def in_queue(plans: Collection[Plan]) -> dict[Path, Job]:
    """Return the jobs that the plans' directories have in Slurm's queue, whoever queued them.

    Raises:
        QueueError: Slurm does not answer.
    """
    known = {run_path(plan): job_id(run_path(plan)) for plan in plans}
    found, me = entries([number for number in known.values() if number]), _own_name()
    jobs = {}
    for plan in plans:
        path = run_path(plan)
        entry = found.get(known[path] or "")
        if entry and entry.is_of(plan):
            jobs[path] = Job(path, entry.state, entry.id, entry.user if entry.user != me else None)
    return jobs


def _own_name() -> str:
    """Return the name under which Slurm has this user's jobs; the number of one without a name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def not_queued(plans: list[Plan]) -> list[Plan]:
    """Return the plans if none is in Slurm's queue: its job would find another plan there.

    Raises:
        SubmitError: one is.
    """
    found = in_queue(plans) if has_slurm() else {}
    lines = [
        f"{job.path}: is in the queue as job {job.id}; wait for it, or `scancel {job.id}` first"
        for job in found.values()
    ]
    if lines:
        raise SubmitError("\n".join(lines))
    return plans


def refuse(plans: list[Plan]) -> list[str]:
    """Look whether a line can be queued, before anything of it exists; return notes.

    Raises:
        SubmitError: a cell cannot be queued, or all are queued and would ignore the line's words.
    """
    queued = in_queue(plans)
    if lines := [line for plan in plans for line in _other_steps(plan, queued)]:
        raise SubmitError("\n".join(lines))
    waiting = [plan for plan in plans if run_path(plan) not in queued]
    kept = [line for plan in plans for line in _kept_keys(plan, queued)]
    if lines := submit_problems(waiting) or ([] if waiting else kept):
        raise SubmitError("\n".join(lines))
    return kept


def submit_problems(plans: Collection[Plan]) -> list[str]:
    """Return one line for each thing for which Slurm, or the job, would turn these plans away.

    Raises:
        RunDirError: the run that one depends on can never end well.
    """
    lines = [*(line for plan in plans for line in _folder_problems(plan)), *not_exported(plans)]
    if plans and shutil.which("sbatch") is None:
        return [
            *lines,
            "cluster.kind=slurm: there is no sbatch on PATH; submit on a login node of the "
            "cluster, or run here with cluster=here",
        ]
    calls = {(*options(plan), *plan.recipe.cluster.extra): plan for plan in plans}
    for words, plan in calls.items():
        # `--wrap` instead of the script: the frozen code may not exist yet.
        call = ["sbatch", "--test-only", *words, "--wrap=true"]
        tried = subprocess.run(call, capture_output=True, text=True)
        if tried.returncode:
            said = [line for line in tried.stderr.strip().splitlines() if line]
            if why := unreached(tried.stderr):
                return [*lines, f"cluster.kind=slurm: {why}, or run here with cluster=here"]
            lines.append(
                f"{plan.cell}: sbatch says {'; '.join(dict.fromkeys(map(bare, said)))} "
                f"({_asked(plan)})"
            )
    return list(dict.fromkeys(lines))


@contextmanager
def one_line_at_a_time(plans: Iterable[Plan]) -> Iterator[None]:
    """Hold the outputs folders of a line, so that two that are typed at once queue a run once.

    Raises:
        RunDirError: a folder cannot be made, or not be locked.
    """
    with ExitStack() as held:
        for outputs in sorted({plan.recipe.outputs for plan in plans}):
            held.enter_context(_line_lock(outputs))
        yield


@contextmanager
def _line_lock(outputs: str) -> Iterator[None]:
    path = Path(outputs) / LINE_LOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with suppress(OSError):  # the umask may have taken bits away; somebody else's has them
            os.chmod(path, 0o666)
    except OSError as error:
        raise RunDirError(
            f"outputs={outputs}: cannot be written ({error.strerror}); "
            "set outputs=FOLDER to a folder of yours"
        ) from error
    with os.fdopen(file):
        try:
            lock_alone(file, path)
        except BlockingIOError:
            tell(f"{outputs}: another line is being queued, this one waits for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prepare(plans: list[Plan]) -> list[Job]:
    """Freeze the code, and the cells that neither are finished nor queued; return where all stand.

    Raises:
        QueueError: Slurm does not answer; RunDirError: a cell or the code cannot be frozen.
    """
    queued = in_queue(plans)
    waiting = [plan for plan in plans if run_path(plan) not in queued]
    for outputs in {plan.recipe.outputs for plan in waiting}:
        freeze_code(Path(outputs))
    frozen: dict[Path, Frozen] = {each.path: each for each in freeze(waiting)}
    paths = [run_path(plan) for plan in plans]
    return [queued.get(path) or Job(path, frozen[path].state) for path in paths]


def submit(plans: list[Plan], jobs: list[Job]) -> list[Job]:
    """Queue what `prepare` found to be waiting; all or none. Return those jobs with their numbers.

    Raises:
        SubmitError: Slurm refused one; those before it are taken back, whatever stops this.
        RunDirError: what a job reads cannot be written.
    """
    pairs = zip(plans, jobs, strict=True)
    waiting = [plan for plan, job in pairs if job.state in ("new", "unfinished")]
    # Frozen again, should the clone have been edited since `prepare`.
    codes = {outputs: freeze_code(Path(outputs)) for outputs in {p.recipe.outputs for p in waiting}}
    for plan in waiting:
        write_job_files(plan, codes[plan.recipe.outputs])
    done: list[Job] = []
    try:
        for cells in _together(waiting):
            code = codes[cells[0].recipe.outputs]
            queue = _queue_array if is_array(cells) else _queue_each
            for job in queue(cells, code, sweep_name(plans)):
                done.append(job)
                write_whole(job.path / "job" / "id", f"{job.id}\n")
    except BaseException as error:
        if done:  # an array whole, of which `done` may have its first tasks alone
            numbers = dict.fromkeys((each.id or "").partition("_")[0] for each in done)
            subprocess.run(["scancel", *numbers], capture_output=True)
        if isinstance(error, OSError):
            outputs = waiting[0].recipe.outputs
            text = f"outputs={outputs}: cannot be written ({error.strerror}); nothing is queued"
            raise RunDirError(text) from error
        raise
    return done


def calls(plans: list[Plan]) -> list[list[str]]:
    """Return the `sbatch` calls that would queue a line of new cells, as argument lists.

    Raises:
        RunDirError: this package does not run from a clone, or what a cell depends on cannot end.
    """
    found = []
    for cells in _together(plans):
        code = code_dir(Path(cells[0].recipe.outputs))
        if is_array(cells):
            name = sweep_name(plans)
            found.append(array_command(cells, code, name, arrays_dir(cells[0], name)))
        else:
            found += [sbatch_command(plan, code) for plan in cells]
    return found


def _together(plans: Iterable[Plan]) -> list[list[Plan]]:
    """Part plans into those that one call can queue: of the same options and outputs."""
    groups: dict[tuple[str, ...], list[Plan]] = {}
    for plan in plans:
        key = (plan.recipe.outputs, *options(plan), *plan.recipe.cluster.extra)
        groups.setdefault(key, []).append(plan)
    return list(groups.values())


def is_array(plans: Collection[Plan]) -> bool:
    """Tell whether plans of the same options become an array: several, where Slurm has arrays."""
    if len(plans) < 2:
        return False
    try:
        asked = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True)
    except OSError:  # no Slurm here: a plan is looked at
        return True
    sizes = [line.split("=")[1] for line in asked.stdout.splitlines() if "MaxArraySize" in line]
    return bool(sizes) and int(sizes[0]) >= len(plans)


def _queue_array(plans: list[Plan], code: Path, name: str) -> Iterator[Job]:
    links = arrays_dir(plans[0], name)
    write_links(plans, links)
    try:
        number = _queue(array_command(plans, code, name, links), f"{len(plans)} cells")
    except BaseException:
        shutil.rmtree(links, ignore_errors=True)
        raise
    for task, plan in enumerate(plans):
        yield Job(run_path(plan), "queued", f"{number}_{task}")


def _queue_each(plans: list[Plan], code: Path, _: str) -> Iterator[Job]:
    """Queue single jobs; with `cluster.max_running=N`, each waits for the Nth before it."""
    numbers: list[str] = []
    for plan in plans:
        most = plan.recipe.cluster.max_running
        waits_for = numbers[-most] if most and len(numbers) >= most else None
        numbers.append(_queue(sbatch_command(plan, code, waits_for), plan.cell))
        yield Job(run_path(plan), "queued", numbers[-1])


def _queue(call: list[str], cell: str) -> str:
    """Return the number of a new job."""
    asked = subprocess.run(call, capture_output=True, text=True)
    if asked.returncode:
        raise SubmitError(f"{cell}: sbatch says {bare(asked.stderr)}; nothing is queued")
    return asked.stdout.strip().splitlines()[-1].split(";")[0]  # --parsable: id, or id;cluster


def jobs_table(plans: list[Plan], jobs: list[Job]) -> Table:
    """Lay out the cells of a line, before any of them is queued."""
    rows = []
    for plan, job in zip(plans, jobs, strict=True):
        cluster = (read_plan(job.path) if job.id else plan).recipe.cluster  # as it was queued
        state = f"{job.state}, job {job.id}" if job.id else job.state
        state += f" of {job.user}" if job.user else ""
        steps = str(plan.recipe.grpo.steps)
        rows.append((plan.cell, state, job.path.name, steps, str(cluster.nodes), cluster.time))
    return table("cells", ("cell", "state", "run directory", "steps", "nodes", "time"), rows)


def _folder_problems(plan: Plan) -> Iterator[str]:
    outputs = Path(plan.recipe.outputs).absolute()
    if not outputs.parent.is_dir():
        yield (
            f"outputs={plan.recipe.outputs}: {outputs.parent} is not there; name a folder that "
            "all nodes share"
        )


def _other_steps(plan: Plan, queued: dict[Path, Job]) -> Iterator[str]:
    """Yield a line if a queued job, which reads its plan when it starts, has other steps."""
    job = queued.get(run_path(plan))
    if job and (steps := read_plan(job.path).recipe.grpo.steps) != plan.recipe.grpo.steps:
        yield (
            f"grpo.steps={plan.recipe.grpo.steps}: {job.path} is in the queue for {steps} steps; "
            f"wait for it, or `scancel {job.id}` first"
        )


def _kept_keys(plan: Plan, queued: dict[Path, Job]) -> Iterator[str]:
    """Yield a line for each key of `cluster` that a queued job has otherwise, and keeps."""
    job = queued.get(run_path(plan))
    if job is None:
        return
    then, now = (dataclasses.asdict(p.recipe.cluster) for p in (read_plan(job.path), plan))
    for key, value in now.items():
        if then[key] != value:
            yield (
                f"cluster.{key}={as_typed(value)}: {job.path} is in the queue as job {job.id} with "
                f"{as_typed(then[key])}, which stays; `scancel {job.id}` first to change it"
            )


def _asked(plan: Plan) -> str:
    cluster = plan.recipe.cluster
    keys = (*SBATCH_OPTIONS, "nodes", "time", "dependency")
    words = [f"cluster.{key}={value}" for key in keys if (value := getattr(cluster, key))]
    return " ".join([*words, *(f"cluster.extra={word}" for word in cluster.extra)])
