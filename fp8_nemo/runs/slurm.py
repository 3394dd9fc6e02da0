"""Queue frozen runs with Slurm: `sbatch` with an argument list, all cells of a line or none.

    RUN_DIR/job/    settings, srun, setup.sh: what slurm/grpo.sbatch reads; id: the job's number

Nothing that a user typed is ever parsed by a shell: it travels as one argument, or as an entry of a
file whose entries are parted by NUL. `cluster.setup` is the exception, being shell commands.

A cell that is in the queue is left alone, one that is finished too. The job runs the frozen plan
with a frozen copy of the code, from the folder it was submitted from.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from fp8_nemo.nemo_config.host import root_of
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.options import Recipe
from fp8_nemo.runs.frozen_code import code_dir, freeze_code
from fp8_nemo.runs.run_dir import Frozen, State, freeze, job_dir, read_plan, run_path
from fp8_nemo.runs.terminal import table

SCRIPT = "fp8_nemo/slurm/grpo.sbatch"


class SubmitError(RuntimeError):
    """A line of which nothing was queued; one line per reason."""


@dataclass(frozen=True)
class Job:
    """One cell of a line and where it stands: `Job(Path("outputs/..."), "queued", "1234")`."""

    path: Path
    state: State | str
    """new, unfinished, finished; or as Slurm has it, if it was in the queue already."""
    id: str | None = None

    @property
    def watch(self) -> str:
        """The command that shows what a job in the queue prints."""
        return shlex.join(["tail", "-F", f"{self.path}/log/slurm-{self.id}.out"])


def sbatch_command(plan: Plan, code: Path | None = None) -> list[str]:
    """The call that queues a plan, as an argument list.

    Args:
        plan: of the run.
        code: folder of the frozen code; None is where the present state of it is, or would be.

    Raises:
        RunDirError: this package does not run from a clone.
    """
    cluster, run_dir = plan.recipe.cluster, run_path(plan).absolute()
    code = code or code_dir(Path(plan.recipe.outputs))
    output = f"{run_dir}/log/slurm-%j.out".replace("%", "%%").replace("%%j.out", "%j.out")
    options = {
        "--job-name": plan.cell,
        "--chdir": str(Path.cwd()),
        "--output": output,
        "--open-mode": "append",
        "--nodes": str(cluster.nodes),
        "--time": cluster.time,
        "--account": cluster.account,
        "--partition": cluster.partition,
        "--qos": cluster.qos,
        "--gpus-per-node": str(cluster.gpus_per_node) if _asks_for_gpus(plan) else None,
    }
    words = [f"{option}={value}" for option, value in options.items() if value is not None]
    words.append("--exclusive")  # a node's ports and GPUs are one run's
    words.append("--requeue" if cluster.requeue else "--no-requeue")
    words.append(f"--signal=B:USR1@{cluster.save_before_end}")
    script = [str(code / SCRIPT), str(run_dir)]
    return ["sbatch", "--parsable", *words, *cluster.extra, *script]


def mounts(plan: Plan) -> list[str]:
    """The folders that a container must see: the user's, and those that the run itself names."""
    recipe = plan.recipe
    named = [recipe.outputs, recipe.model.path, recipe.data.path, root_of(recipe)]
    own = [Path.cwd(), *(Path(each).absolute() for each in named if each)]
    given = [each if ":" in each else f"{each}:{each}" for each in recipe.cluster.mounts]
    targets = {each.split(":")[1] for each in given}
    return [*given, *dict.fromkeys(f"{each}:{each}" for each in own if str(each) not in targets)]


def submit_problems(plans: Iterable[Plan]) -> list[str]:
    """One line for each thing for which Slurm, or the job, would turn these plans away."""
    plans = list(plans)
    lines = [line for plan in plans for line in _folder_problems(plan)]
    if shutil.which("sbatch") is None:
        return [
            *lines,
            "cluster.kind=slurm: there is no sbatch on PATH; submit on a login node of the "
            "cluster, or run here with cluster=here",
        ]
    calls = {tuple(_test_only(sbatch_command(plan))): plan for plan in plans}
    for call, plan in calls.items():
        tried = subprocess.run(call, capture_output=True, text=True)
        if tried.returncode:
            said = [line for line in tried.stderr.strip().splitlines() if line]
            lines.append(
                f"{plan.cell}: sbatch says {'; '.join(dict.fromkeys(map(_bare, said)))} "
                f"({_asked(plan)})"
            )
    return list(dict.fromkeys(lines))


def container_notes(plans: Iterable[Plan]) -> list[str]:
    """A line for each thing that the nodes must have and this machine lacks: a slip, perhaps."""
    clusters = [plan.recipe.cluster for plan in plans if plan.recipe.cluster.kind == "slurm"]
    named = [("cluster.container", each.container or "") for each in clusters]
    named += [("cluster.mounts", word.split(":")[0]) for each in clusters for word in each.mounts]
    return [
        f"{key}: {path} is not on this machine; the nodes must have it"
        for key, path in dict.fromkeys(named)
        if path.startswith("/") and not Path(path).exists()
    ]


def in_queue(plans: Iterable[Plan]) -> dict[Path, Job]:
    """The jobs that the plans' directories have in Slurm's queue, by directory.

    Raises:
        SubmitError: Slurm does not answer.
    """
    known = {run_path(plan): _job_id(run_path(plan)) for plan in plans}
    if not any(known.values()):
        return {}
    call = ["squeue", "--me", "--noheader", "--format=%i|%T|%j"]
    asked = subprocess.run(call, capture_output=True, text=True)
    if asked.returncode:
        raise SubmitError(f"squeue: {asked.stderr.strip()}")
    queue = {}
    for line in asked.stdout.splitlines():
        number, state, name = line.split("|", 2)
        queue[number, name] = state.lower()
    return {
        run_path(plan): Job(run_path(plan), queue[key], key[0])
        for plan in plans
        if (key := (known[run_path(plan)] or "", plan.cell)) in queue
    }


def not_queued(plans: list[Plan]) -> list[Plan]:
    """The plans as they are, if none is in Slurm's queue: its job would find another plan there.

    Raises:
        SubmitError: one is.
    """
    found = in_queue(plans) if shutil.which("squeue") else {}
    lines = [
        f"{job.path}: is in the queue as job {job.id}; wait for it, or `scancel {job.id}` first"
        for job in found.values()
    ]
    if lines:
        raise SubmitError("\n".join(lines))
    return plans


def prepare(plans: list[Plan]) -> list[Job]:
    """Freeze the cells that are neither finished nor queued; every cell and where it stands.

    Raises:
        SubmitError: a cell cannot be queued; RunDirError: it cannot be frozen.
    """
    queued = in_queue(plans)
    if changed := [line for plan in plans for line in _changed_in_queue(plan, queued)]:
        raise SubmitError("\n".join(changed))
    if lines := submit_problems(plan for plan in plans if run_path(plan) not in queued):
        raise SubmitError("\n".join(lines))
    frozen: dict[Path, Frozen] = {
        each.path: each for each in freeze([p for p in plans if run_path(p) not in queued])
    }
    paths = [run_path(plan) for plan in plans]
    return [queued.get(path) or Job(path, frozen[path].state) for path in paths]


def submit(plans: list[Plan], jobs: list[Job]) -> list[Job]:
    """Queue what `prepare` found to be waiting; all or none. Those jobs with their numbers.

    Raises:
        SubmitError: Slurm refused one; those before it are taken back, whatever stops this.
    """
    waiting = [
        (plan, job.path)
        for plan, job in zip(plans, jobs, strict=True)
        if job.state in ("new", "unfinished")
    ]
    codes = {
        outputs: freeze_code(Path(outputs)) for outputs in {p.recipe.outputs for p, _ in waiting}
    }
    for plan, _ in waiting:
        write_job_files(plan, codes[plan.recipe.outputs])
    done: list[Job] = []
    try:
        for plan, path in waiting:
            number = _queue(sbatch_command(plan, codes[plan.recipe.outputs]), plan.cell)
            done.append(Job(path, "queued", number))
            (path / "job" / "id").write_text(f"{number}\n")
    except BaseException:
        if done:
            subprocess.run(["scancel", *(each.id or "" for each in done)], capture_output=True)
        raise
    return done


def _queue(call: list[str], cell: str) -> str:
    """The number of a new job."""
    asked = subprocess.run(call, capture_output=True, text=True)
    if asked.returncode:
        raise SubmitError(f"{cell}: sbatch says {_bare(asked.stderr)}; nothing is queued")
    return asked.stdout.strip().splitlines()[-1].split(";")[0]  # --parsable: id, or id;cluster


def jobs_table(plans: list[Plan], jobs: list[Job]) -> Table:
    """Lay out the cells of a line, before any of them is queued."""
    rows = []
    for plan, job in zip(plans, jobs, strict=True):
        cluster = (read_plan(job.path) if job.id else plan).recipe.cluster  # as it was queued
        state = f"{job.state}, job {job.id}" if job.id else job.state
        steps = str(plan.recipe.grpo.steps)
        rows.append((plan.cell, state, job.path.name, steps, str(cluster.nodes), cluster.time))
    return table("cells", ("cell", "state", "run directory", "steps", "nodes", "time"), rows)


def write_job_files(plan: Plan, code: Path) -> None:
    """What grpo.sbatch and node.sh read."""
    cluster, folder = plan.recipe.cluster, job_dir(run_path(plan))
    settings = {
        "FP8_NEMO_CODE": code,
        "FP8_NEMO_PYTHON": _python(plan.recipe),
        "FP8_NEMO_STEPS": plan.recipe.grpo.steps,
        "FP8_NEMO_REQUEUE": int(cluster.requeue),
        "FP8_NEMO_PREFLIGHT": int(cluster.preflight),
        "FP8_NEMO_JOIN_TIMEOUT": cluster.join_timeout,
    }
    _write_entries(folder / "settings", [f"{name}={value}" for name, value in settings.items()])
    _write_entries(folder / "srun", container_options(plan))
    (folder / "setup.sh").write_text(f"{cluster.setup or ':'}\n")


def container_options(plan: Plan) -> list[str]:
    """Options of `srun` that run every node's part in a container (pyxis); none without one."""
    image = plan.recipe.cluster.container
    if image is None:
        return []
    return [
        f"--container-image={image}",
        f"--container-mounts={','.join(mounts(plan))}",
        f"--container-workdir={Path.cwd()}",
        "--no-container-mount-home",  # a home's packages would shadow the image's
    ]


def _python(recipe: Recipe) -> str:
    return recipe.cluster.python or ("python3" if recipe.cluster.container else sys.executable)


def _asks_for_gpus(plan: Plan) -> bool:
    """Whether to name GPUs: where Slurm counts them, and for NeMo RL; an exclusive node has all."""
    if plan.backend != "nemo":
        return False
    partition = plan.recipe.cluster.partition
    call = ["sinfo", "--noheader", "--format=%G", *([f"--partition={partition}"] * bool(partition))]
    try:
        asked = subprocess.run(call, capture_output=True, text=True)
    except OSError:
        return True
    return asked.returncode != 0 or "gpu" in asked.stdout


def _folder_problems(plan: Plan) -> Iterator[str]:
    outputs = Path(plan.recipe.outputs).absolute()
    if not outputs.parent.is_dir():
        yield (
            f"outputs={plan.recipe.outputs}: {outputs.parent} is not there; name a folder that "
            "all nodes share"
        )


def _changed_in_queue(plan: Plan, queued: dict[Path, Job]) -> Iterator[str]:
    """A queued job reads its plan when it starts: it is not changed under it."""
    job = queued.get(run_path(plan))
    if job and (steps := read_plan(job.path).recipe.grpo.steps) != plan.recipe.grpo.steps:
        yield (
            f"grpo.steps={plan.recipe.grpo.steps}: {job.path} is in the queue for {steps} steps; "
            f"wait for it, or `scancel {job.id}` first"
        )


def _job_id(path: Path) -> str | None:
    try:
        return (path / "job" / "id").read_text().strip() or None
    except OSError:
        return None


def _test_only(command: list[str]) -> list[str]:
    # `--wrap` instead of the script: the frozen code may not exist yet.
    own = ("--job-name=", "--output=", "--parsable")  # what differs from cell to cell
    options = [word for word in command[1:] if word.startswith("-") and not word.startswith(own)]
    return ["sbatch", "--test-only", *options, "--wrap=true"]


def _asked(plan: Plan) -> str:
    cluster = plan.recipe.cluster
    keys = ("partition", "account", "qos", "nodes", "time")
    words = [f"cluster.{key}={value}" for key in keys if (value := getattr(cluster, key))]
    return " ".join([*words, *(f"cluster.extra={word}" for word in cluster.extra)])


def _bare(said: str) -> str:
    """Slurm's message without its prefixes."""
    last = said.strip().splitlines()[-1] if said.strip() else "nothing"
    for prefix in ("sbatch: error: ", "allocation failure: ", "Batch job submission failed: "):
        last = last.removeprefix(prefix)
    return last


def _write_entries(path: Path, entries: Iterable[str]) -> None:
    path.write_bytes(b"".join(os.fsencode(f"{entry}\0") for entry in entries))
