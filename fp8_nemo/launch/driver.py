"""One run inside NeMo RL: its environment, its Ray cluster, its log, its end.

What is called in NeMo RL, and in which order, is `session.py`.
"""

# pyright: reportMissingImports=false
# NeMo RL stands on the path of a run, not of a type check.
from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

from fp8_nemo.launch import session
from fp8_nemo.launch.preflight import settings_of
from fp8_nemo.launch.session import CONVERSIONS
from fp8_nemo.nemo.step_metrics import OverheardLogger
from fp8_nemo.nemo.worker_settings import VARIABLE, own_folder
from fp8_nemo.nemo_config.checkout import read_host
from fp8_nemo.nemo_config.host import root_of
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.model_dir import model_path
from fp8_nemo.recipe.plain import leaves
from fp8_nemo.recipe.problems import load_problems, write_problems
from fp8_nemo.runs import metrics, process, run_dir
from fp8_nemo.runs.metrics import append_judged
from fp8_nemo.runs.starting_point import starting_point

SAVE_BY = "checkpoint_must_save_by"
"""NeMo RL's, of `checkpointing`: how long after its set-up it saves and ends."""


def run(plan: Plan, path: Path) -> int:
    """Train; 0 when NeMo RL ends by itself, 2 for an unusable directory, 1 if the run broke.

    Ctrl-C stops it without saving: `process.INTERRUPTED`.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # NeMo RL saves by its own clock, `save_within`
    try:
        with run_dir.locked(path):
            began = starting_point(plan.recipe, path)
            return _logged(plan, path, began, run_dir.attempt_log(path))
    except (metrics.RunDirError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def _logged(plan: Plan, path: Path, began: dict[str, str], log: Path) -> int:
    try:
        with copied_to(log):
            _attempt(plan, path, began)
    except KeyboardInterrupt:
        print(f"{path}: stopped; the same line goes on from its last checkpoint", file=sys.stderr)
        return process.INTERRUPTED
    except Exception as error:  # whatever breaks in there, in one line and whole in the log
        with log.open("a") as file:
            traceback.print_exc(file=file)
        print(f"{path}: {_reason(error)} (the whole story: {log})", file=sys.stderr)
        return 1
    steps = metrics.steps_done(metrics.read_metrics(path))
    for saved in run_dir.checkpoints(path)[-1:]:
        if run_dir.checkpoint_step(saved) > steps:  # killed after the checkpoint, before its row
            steps = run_dir.checkpoint_step(saved)
            metrics.append_metrics(path, {"step": steps})
    finished = steps >= plan.recipe.grpo.steps
    print(f"{path}: finished, {steps} steps" if finished else f"{path}: stopped at step {steps}")
    return 0


def prepare(plan: Plan, root: Path) -> None:
    """Give this process, and the workers that inherit from it, the plan's environment."""
    assert plan.nemo
    for name, value in plan.nemo.environment.items():
        if os.environ.setdefault(name, value) != value:
            print(f"{name}={os.environ[name]}: as the environment has it, the plan says {value}")
    os.environ.pop(VARIABLE, None)  # of a run that this one was started from
    os.environ |= settings_of(plan.recipe).to_environment()
    model = plan.recipe.model
    source = None if model.hub_id else model_path(model)
    given = os.environ.get(CONVERSIONS)
    parent = Path(given) if given else Path(plan.recipe.outputs) / ".megatron"
    keys = leaves(plan.recipe.nemo)
    changed = {key: keys[key] for key in keys if key.startswith("policy.hf_config_overrides")}
    folder = run_dir.conversion_dir(parent, model.hf_id or model.name, source, changed)
    os.environ[CONVERSIONS] = str(folder)
    # Workers in environments of their own find NeMo RL and this package, entry point included.
    own = [] if (here := own_folder()) is None else [str(here)]
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = [str(root), *own, *given]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))


@contextmanager
def own_ray() -> Iterator[None]:
    """A Ray cluster of this run alone, unless `RAY_ADDRESS` names one.

    NeMo RL attaches to whatever cluster it finds on the machine, so two runs side by side would
    share GPUs; an address it cannot miss. `CUDA_VISIBLE_DEVICES` says which GPUs are the run's.
    """
    if os.environ.get("RAY_ADDRESS"):
        yield
        return
    # Whoever reaches a Ray cluster runs code in it, and Ray 2.60 asks for a token by itself.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    cluster = subprocess.Popen(
        [sys.executable, "-m", "fp8_nemo.launch.ray_cluster", "hold"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the run, which still needs its cluster to stop
    )
    assert cluster.stdin and cluster.stdout
    stop, said = cluster.stdin, cluster.stdout
    try:
        address = said.readline().strip()
        if not address:
            raise RuntimeError("Ray did not start; its own message stands above")
        os.environ["RAY_ADDRESS"] = address
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # the cluster keeps to it, by number
        yield
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        _leave_ray()
        # A line, not the end of the stream: forked data loaders hold that open too.
        for step in (lambda: stop.write("\n"), stop.close, said.close):
            with suppress(OSError):  # it may have ended by itself, with a message of its own
                step()
        cluster.wait()


def _leave_ray() -> None:
    """Before the cluster ends: else Ray looks for it for 60 s, then aborts this process."""
    if "ray" in sys.modules:  # imported before its token is set, it would not be let in
        sys.modules["ray"].shutdown()


@contextmanager
def copied_to(log: Path) -> Iterator[None]:
    """Everything that is printed goes to the attempt's log too."""
    with (
        log.open("a", buffering=1) as file,
        redirect_stdout(_Both(sys.stdout, file)),
        redirect_stderr(_Both(sys.stderr, file)),
    ):
        yield


class _Both:
    """A stream and its copy."""

    def __init__(self, stream: TextIO, copy: TextIO) -> None:
        self._stream, self._copy = stream, copy

    def write(self, text: str) -> int:
        self._copy.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        self._copy.flush()
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _attempt(plan: Plan, path: Path, began: dict[str, str]) -> None:
    root = root_of(plan.recipe)
    assert root, "preflight has looked"
    read_host(root)
    prepare(plan, root)
    run_dir.write_environment(path, **began)
    if plan.recipe.data.is_made:
        problems = load_problems(plan.recipe.data, plan.recipe.seed)
        write_problems(run_dir.data_dir(path), problems)
    saved = run_dir.checkpoints(path)
    metrics.rewind_metrics(path, run_dir.checkpoint_step(saved[-1]) if saved else -1)
    with own_ray():
        train(plan, path, root)


def train(plan: Plan, path: Path, root: Path) -> None:
    """Set up, and NeMo RL's own loop."""
    with session.opened(plan, path, root) as parts:
        # After the set-up, which takes minutes: NeMo RL counts from here on.
        if f"checkpointing.{SAVE_BY}" not in leaves(plan.recipe.nemo):
            end = job_end()
            left = save_within(end, plan.recipe.cluster.save_before_end, time.time())
            parts.config.checkpointing[SAVE_BY] = left
        overheard = OverheardLogger(
            parts.logger, parts.policy.take_row, lambda row: _write(plan, path, row)
        )
        session.run_grpo(parts, overheard)


def _write(plan: Plan, path: Path, row: dict[str, Any]) -> None:
    """One step's metrics, and what they say of the run's health where that changes."""
    if health := append_judged(path, row, plan.recipe.grpo.stop_when_unstable):
        print(f"{plan.cell}  {health}")


def job_end() -> float | None:
    """Return when Slurm ends this job, in seconds since 1970; None without a limit.

    grpo.sbatch has asked Slurm, because `init_ray` removes Slurm's variables.
    """
    end = os.environ.get("FP8_NEMO_JOB_END")
    return float(end) if end else None


def save_within(end: float | None, save_before_end: int, now: float) -> str | None:
    """NeMo RL's `SAVE_BY`, DD:HH:MM:SS from `now`; None without an end."""
    if end is None:
        return None
    left = max(0, int(end - save_before_end - now))
    minutes, hours = left // 60, left // 3600
    return f"{hours // 24:02}:{hours % 24:02}:{minutes % 60:02}:{left % 60:02}"


def _reason(error: BaseException) -> str:
    """The line that says why: Ray wraps a worker's error, and its traceback, in its own."""
    named = re.findall(r"^.*?((?:\w+\.)*\w*(?:Error|Exception): .+)$", str(error), re.M)
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return named[-1].strip() if named else f"{type(error).__name__}: {first}"
