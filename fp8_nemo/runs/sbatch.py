"""Write the `sbatch` call of a run, or of the runs of a sweep, and the files that a job reads.

    RUN_DIR/job/           settings, srun, enter, setup.sh: what slurm/grpo.sbatch reads; the job's
                           number in id, and in attempt the folder of its last attempt
    outputs/.arrays/NAME/  cells/0, 1, ...: links to the run directories of an array's tasks

Nothing that a user typed is ever parsed by a shell: it travels as one argument, or as an entry of a
file whose entries are parted by NUL. `cluster.setup` is the exception, being shell commands.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from fp8_nemo.nemo_config.host import root_of
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.options.cluster import SBATCH_OPTIONS, Cluster
from fp8_nemo.recipe.secrets import SECRET_VARIABLE
from fp8_nemo.runs.metrics import RunDirError, read_metrics, replaced, steps_done
from fp8_nemo.runs.run_dir import job_dir, job_id, read_plan, run_path, state_of

SCRIPT = "fp8_nemo/slurm/grpo.sbatch"
SWEEP = "sweep-"
"""What the name of a sweep's array begins with."""
TAG = "fp8-nemo"
"""Comment of a job whose line has none."""
MAIL_TYPES = "BEGIN,END,FAIL,REQUEUE"
NUMBER = re.compile(r"\d+(_\d+)?")
CONDITIONS = re.compile(r"singleton|after\w*:.+")


def sbatch_command(plan: Plan, code: Path, waits_for: str | None = None) -> list[str]:
    """Return the call that queues one run, as an argument list.

    Args:
        plan: of the run.
        code: folder of the frozen code.
        waits_for: number of a job that must have ended before.

    Raises:
        RunDirError: the run that it depends on can never end well.
    """
    run_dir, comment = run_path(plan).absolute(), plan.recipe.cluster.comment or TAG
    names = [f"--job-name={plan.cell}", f"--comment={comment}", f"--output={_log(run_dir, '%j')}"]
    return ["sbatch", "--parsable", *names, *options(plan, waits_for), *_last(plan, code, run_dir)]


def array_command(plans: Sequence[Plan], code: Path, name: str, links: Path) -> list[str]:
    """Return the call that queues runs with the same `options` as one array.

    Args:
        plans: of the runs; the first is task 0.
        code: folder of the frozen code.
        name: of the array.
        links: folder whose entries 0, 1, ... lead to the run directories.

    Raises:
        RunDirError: the run that they depend on can never end well.
    """
    cluster = plans[0].recipe.cluster
    most = f"%{cluster.max_running}" if cluster.max_running else ""
    names = [
        *(f"--job-name={name}", f"--comment={cluster.comment or f'{TAG} {name}'}"),
        *(f"--array=0-{len(plans) - 1}{most}", f"--output={_log(links, '%A_%a', '%a/')}"),
    ]
    return ["sbatch", "--parsable", *names, *options(plans[0]), *_last(plans[0], code, links)]


def options(plan: Plan, waits_for: str | None = None) -> list[str]:
    """Return sbatch's options of a plan, without names; runs with equal ones can be one array.

    Raises:
        RunDirError: the run that it depends on can never end well.
    """
    cluster = plan.recipe.cluster
    inherited = [word for word in cluster.env if "=" not in word]
    conditions = [condition(cluster), f"afterany:{waits_for}" if waits_for else None]
    values = {
        "--chdir": str(Path.cwd()),
        "--open-mode": "append",
        "--nodes": str(cluster.nodes),
        "--time": cluster.time,
        **{f"--{key}": getattr(cluster, key) for key in SBATCH_OPTIONS},
        "--gpus-per-node": str(cluster.gpus_per_node) if _asks_for_gpus(plan) else None,
        "--dependency": ",".join(filter(None, conditions)) or None,
        "--mail-user": cluster.mail,
        "--mail-type": MAIL_TYPES if cluster.mail else None,
        "--export": ",".join(["ALL", *inherited]) if inherited else None,
    }
    words = [f"{option}={value}" for option, value in values.items() if value is not None]
    words.append("--exclusive")  # a node's ports and GPUs are one run's
    words.append("--requeue" if cluster.requeue else "--no-requeue")
    words.append(f"--signal=B:USR1@{cluster.save_before_end}")
    return words


def condition(cluster: Cluster) -> str | None:
    """Return `cluster.dependency` as sbatch takes it; None without one, or if it is met.

    Raises:
        RunDirError: it names a folder that is no run, or a run that is neither done nor queued.
    """
    text = cluster.dependency
    if text is None or CONDITIONS.fullmatch(text):
        return text
    if NUMBER.fullmatch(text):
        return f"afterok:{text}"
    path = Path(text)
    if state_of(read_plan(path), steps_done(read_metrics(path))) == "finished":
        return None
    if (number := job_id(path)) is None:
        raise RunDirError(
            f"cluster.dependency={text}: is neither finished nor queued; queue it first"
        )
    return f"afterok:{number}"


def _log(folder: Path, number: str, inner: str = "") -> str:
    """Return where a job prints to, as a pattern of sbatch's, in which `%` means something."""
    return f"{folder.absolute()}/".replace("%", "%%") + f"{inner}log/slurm-{number}.out"


def _last(plan: Plan, code: Path, argument: Path) -> list[str]:
    return [*plan.recipe.cluster.extra, str(code / SCRIPT), str(argument)]


def sweep_name(plans: Iterable[Plan]) -> str:
    """Return a line's name: `sweep-1a2b3c`, the same whenever the line has the same cells."""
    cells = "\0".join(sorted(plan.run_name for plan in plans))
    return SWEEP + hashlib.sha256(cells.encode()).hexdigest()[:6]


def arrays_dir(plan: Plan, name: str) -> Path:
    """Return the folder of links that the next array of a name will have."""
    parent, number = Path(plan.recipe.outputs).absolute() / ".arrays", 1
    while (folder := parent / f"{name}-{number}").exists():
        number += 1
    return folder / "cells"  # so deep that no OUTPUTS/*/*/* finds a run twice


def write_links(plans: Sequence[Plan], folder: Path) -> None:
    """Lead from a task's number to its run directory."""
    folder.mkdir(parents=True)
    for number, plan in enumerate(plans):
        (folder / str(number)).symlink_to(run_path(plan).absolute())


def mounts(plan: Plan) -> list[str]:
    """Return the folders that a container must see: the user's, and those that the run names."""
    recipe = plan.recipe
    reward = recipe.data.reward and Path(recipe.data.reward).parent
    named = [recipe.outputs, recipe.model.path, recipe.data.path, reward, root_of(recipe)]
    own = [Path.cwd(), *(Path(each).absolute() for each in named if each)]
    given = [each if ":" in each else f"{each}:{each}" for each in recipe.cluster.mounts]
    targets = {each.split(":")[1] for each in given}
    return [*given, *dict.fromkeys(f"{each}:{each}" for each in own if str(each) not in targets)]


def container_notes(plans: Iterable[Plan]) -> list[str]:
    """Return a line for each thing that the nodes must have and this machine lacks: a slip?"""
    clusters = [plan.recipe.cluster for plan in plans if plan.recipe.cluster.kind == "slurm"]
    named = [("cluster.container", each.container or "") for each in clusters]
    named += [("cluster.mounts", word.split(":")[0]) for each in clusters for word in each.mounts]
    by_pyxis = any(each.container and not each.enter for each in clusters) and not _has_pyxis()
    pyxis = (
        "srun has no --container-image (pyxis) here; the nodes must have it, or set cluster.enter"
    )
    return [f"cluster.container: {pyxis}"] * by_pyxis + [
        f"{key}: {path} is not on this machine; the nodes must have it"
        for key, path in dict.fromkeys(named)
        if path.startswith("/") and not Path(path).exists()
    ]


def not_exported(plans: Iterable[Plan]) -> Iterator[str]:
    """Yield a line for each variable that `cluster.env` names alone and nobody has exported."""
    names = dict.fromkeys(word for plan in plans for word in plan.recipe.cluster.env)
    for name in names:
        if "=" not in name and name not in os.environ:
            or_write = "" if SECRET_VARIABLE.fullmatch(name) else f", or write {name}=VALUE"
            yield f"cluster.env={name}: is not set here; export it{or_write}"


def write_job_files(plan: Plan, code: Path) -> None:
    """Write what grpo.sbatch and node.sh read.

    Raises:
        RunDirError: there is no room, or no right to.
    """
    cluster = plan.recipe.cluster
    settings = {
        "FP8_NEMO_CODE": code,
        "FP8_NEMO_PYTHON": cluster.python or ("python3" if cluster.container else sys.executable),
        "FP8_NEMO_STEPS": plan.recipe.grpo.steps,
        "FP8_NEMO_REQUEUE": int(cluster.requeue),
        "FP8_NEMO_PREFLIGHT": int(cluster.preflight),
        "FP8_NEMO_JOIN_TIMEOUT": cluster.join_timeout,
    }
    given = [word for word in cluster.env if "=" in word]
    try:
        folder = job_dir(run_path(plan))
        entries = [*given, *(f"{name}={value}" for name, value in settings.items())]
        _write_entries(folder / "settings", entries)
        _write_entries(folder / "srun", container_options(plan))
        _write_entries(folder / "enter", enter_command(plan))
        _write(folder / "setup.sh", f"{cluster.setup or ':'}\n")
    except OSError as error:
        raise RunDirError(
            f"{run_path(plan)}: cannot be written ({error.strerror}); nothing is queued, the same "
            "line goes on, or set outputs=FOLDER to another folder"
        ) from error


def container_options(plan: Plan) -> list[str]:
    """Return `srun`'s options for each node's part in a container, if pyxis is to enter one."""
    cluster = plan.recipe.cluster
    if cluster.container is None or cluster.enter:
        return []
    return [
        f"--container-image={cluster.container}",
        f"--container-mounts={','.join(mounts(plan))}",
        f"--container-workdir={Path.cwd()}",
        "--no-container-mount-home",  # a home's packages would shadow the image's
    ]


def enter_command(plan: Plan) -> list[str]:
    """Return the site's command in front of each node's part, if one is to enter a container."""
    cluster = plan.recipe.cluster
    if cluster.container is None:
        return []
    named = {
        "{image}": cluster.container,
        "{mounts}": ",".join(mounts(plan)),
        "{folder}": str(Path.cwd()),
    }
    return [re.sub("|".join(named), lambda found: named[found[0]], word) for word in cluster.enter]


def _asks_for_gpus(plan: Plan) -> bool:
    """Tell whether to name GPUs: for NeMo RL, where Slurm counts them; the node has all anyway."""
    cluster = plan.recipe.cluster
    return plan.backend == "nemo" and not cluster.gres and _counts_gpus(cluster.partition)


def _has_pyxis() -> bool:
    """Tell whether `srun` here takes an image; True where there is no `srun` to ask."""
    try:
        asked = subprocess.run(["srun", "--help"], capture_output=True, text=True)
    except OSError:
        return True
    return "--container-image" in asked.stdout


@cache
def _counts_gpus(partition: str | None) -> bool:
    call = ["sinfo", "--noheader", "--format=%G", *([f"--partition={partition}"] * bool(partition))]
    try:
        asked = subprocess.run(call, capture_output=True, text=True)
    except OSError:
        return True
    return asked.returncode != 0 or "gpu" in asked.stdout


def _write_entries(path: Path, entries: Iterable[str]) -> None:
    _write(path, "".join(f"{entry}\0" for entry in entries))


def _write(path: Path, text: str) -> None:
    """Write a file that its owner alone reads; another owner's, of a shared folder, is replaced."""
    with replaced(path) as new:
        new.unlink(missing_ok=True)
        new.touch(mode=0o600)
        new.write_bytes(os.fsencode(text))
