"""Run one plan inside NeMo RL: its environment, its Ray cluster, its log, its exit code.

`session.py` makes the calls into NeMo RL.
"""

# pyright: reportMissingImports=false
# NeMo RL is importable in a run, not in a type check.
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
from fp8_nemo.launch.environments import settings_of, workers_path
from fp8_nemo.nemo.step_metrics import OverheardLogger
from fp8_nemo.nemo.worker_settings import VARIABLE
from fp8_nemo.nemo_config.host import root_of
from fp8_nemo.nemo_config.overrides import path_variables
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.plain import leaves
from fp8_nemo.recipe.problems import load_problems, write_problems
from fp8_nemo.runs import metrics, process, provenance, run_dir
from fp8_nemo.runs.frozen_code import freeze_code, is_clone

SAVE_BY = "checkpoint_must_save_by"
"""NeMo RL's key of `checkpointing`: how long after its set-up it saves and ends, DD:HH:MM:SS."""


def run(plan: Plan, path: Path) -> int:
    """Train a plan in its run directory and return the exit code.

    Returns:
        0 when NeMo RL ends by itself, 1 if the run failed, 2 for an unusable directory, and
        `process.INTERRUPTED` after Ctrl-C, which saves nothing.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # NeMo RL saves by its own clock, `save_by`
    try:
        with run_dir.locked(path):
            began = provenance.starting_point(plan.recipe, path)
            return _logged(plan, path, began, run_dir.attempt_log(path))
    except (metrics.RunDirError, OSError) as error:
        print(error, file=sys.stderr)
        return 2


def _logged(plan: Plan, path: Path, began: dict[str, str], log: Path) -> int:
    """Make one attempt, print how it ended, and return the exit code."""
    try:
        with copied_to(log):
            _attempt(plan, path, began)
    except KeyboardInterrupt:
        print(f"{path}: stopped; the same line goes on from its last checkpoint", file=sys.stderr)
        return process.INTERRUPTED
    except Exception as error:  # NeMo RL's, Ray's, vLLM's: one line here, the traceback in the log
        with log.open("a") as file:
            traceback.print_exc(file=file)
        print(f"{path}: {_reason(error)} (full traceback: {log})", file=sys.stderr)
        return 1
    steps = metrics.steps_done(metrics.read_metrics(path))
    finished = steps >= plan.recipe.grpo.steps
    print(f"{path}: finished, {steps} steps" if finished else f"{path}: stopped at step {steps}")
    return 0


def _attempt(plan: Plan, path: Path, began: dict[str, str]) -> None:
    """Write what the run reads, drop metrics that will be computed again, and train."""
    root = root_of(plan.recipe)
    assert root, "preflight refuses a plan without a checkout"
    prepare(plan, root)
    if plan.recipe.data.is_made:
        problems = load_problems(plan.recipe.data, plan.recipe.seed)
        write_problems(run_dir.data_dir(path), problems)
    run_dir.rewind(path, plan.backend)
    with provenance.attempt(path, **began), own_ray():
        train(plan, path, root)


CACHES = {
    "DG_JIT_CACHE_DIR": "deep_gemm",
    "TRITON_CACHE_DIR": "triton",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""Variables of compilers that work while a run starts, and the folders that they get."""
VLLM_CACHE = "VLLM_CACHE_ROOT"
"""Of vLLM's compiled model, a minute of an engine's start. Two runs may not share a folder (vLLM
#18851); NeMo RL gives each engine of a run its own below it (vllm_worker.py)."""


def keep_caches(outputs: Path, run: Path) -> None:
    """Keep what a job's compilers make below outputs: a container's own disk goes with the job.

    Minutes of each start depend on it. A variable that the user has set keeps its value; a folder
    of `outputs/.cache` that is another user's alone is left to them.

    Args:
        outputs: of the recipe.
        run: its run directory.
    """
    folder = outputs.absolute() / ".cache"
    own = {VLLM_CACHE: f"vllm/{'-'.join(run.parts[-3:])}"}  # model, cell, seed and hash
    for variable, name in (CACHES | own).items():
        if variable in os.environ:
            continue
        with suppress(OSError):
            (folder / name).mkdir(parents=True, exist_ok=True)
        if os.access(folder / name, os.W_OK | os.X_OK):
            os.environ[variable] = str(folder / name)


def prepare(plan: Plan, root: Path) -> None:
    """Set the plan's environment variables, for this process and the workers that inherit them.

    A variable that the user has set keeps its value, and one line says so.
    """
    assert plan.nemo
    for name, value in (plan.nemo.environment | path_variables(plan.recipe)).items():
        if os.environ.setdefault(name, value) != value:
            print(f"{name}={os.environ[name]}: as the environment has it, the plan says {value}")
    if plan.recipe.cluster.kind == "slurm":
        keep_caches(Path(plan.recipe.outputs), run_dir.run_path(plan))
    os.environ.pop(VARIABLE, None)  # inherited if another run started this one
    os.environ |= settings_of(plan.recipe).to_environment()
    os.environ[session.CONVERSIONS] = str(session.conversion_dir(plan.recipe))
    os.environ["PYTHONPATH"] = workers_path(root, *shown_code(plan.recipe))
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))


def shown_code(recipe: Recipe) -> list[Path]:
    """Return the copy of this package by which workers with other packages see its entry points.

    They inherit `PYTHONPATH` alone, and a clone has no metadata: pip leaves it among the driver's
    packages. A job runs such a copy already.
    """
    apart = recipe.cluster.interpreter == "container"
    return [freeze_code(Path(recipe.outputs))] if apart and is_clone() else []


@contextmanager
def own_ray() -> Iterator[None]:
    """Start a Ray cluster for this run alone, unless `RAY_ADDRESS` names one.

    NeMo RL attaches to any cluster that it finds on the machine, so two runs side by side would
    share GPUs; `RAY_ADDRESS` prevents this. `CUDA_VISIBLE_DEVICES` names the run's GPUs.

    Raises:
        RuntimeError: Ray did not start.
    """
    if os.environ.get("RAY_ADDRESS"):
        yield
        return
    # Whoever reaches a Ray cluster can run code in it, and Ray 2.60 asks for a token by default.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    cluster = subprocess.Popen(
        [sys.executable, "-m", "fp8_nemo.launch.ray_cluster", "hold"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # keeps Ctrl-C from the cluster, which the run needs to stop
    )
    assert cluster.stdin and cluster.stdout
    stop, said = cluster.stdin, cluster.stdout
    try:
        address = said.readline().strip()
        if not address:
            raise RuntimeError("Ray did not start; its own message stands above")
        os.environ["RAY_ADDRESS"] = address
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray sees all GPUs and holds the others
        yield
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        # Leave before the cluster ends: else Ray looks for it for 60 s, then aborts this process.
        if "ray" in sys.modules:  # only then has this process joined; too early, it has no token
            sys.modules["ray"].shutdown()
        # A line, not only the end of the stream: forked data loaders hold that open too.
        for step in (lambda: stop.write("\n"), stop.close, said.close):
            with suppress(OSError):  # the cluster may have ended by itself, and said why
                step()
        cluster.wait()


@contextmanager
def copied_to(log: Path) -> Iterator[None]:
    """Copy everything that the block prints to a log file."""
    with (
        log.open("a", buffering=1) as file,
        redirect_stdout(_Both(sys.stdout, file)),
        redirect_stderr(_Both(sys.stderr, file)),
    ):
        yield


class _Both:
    """Write to a stream and to its copy."""

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


THREADS = 4
"""Of PyTorch in the driver, which slices a batch into thousands of small tensors. Some of those
operations wake every thread. With the 64 that PyTorch takes on 64 cores the slices took 0.6 to
5.5 s a step, while GPUs waited (device-8b-4-h100.json); with one to four on two cores 0.02 to 0.12
(driver-threads-cpu.json). Metrics of large batches gain from more than one."""


def take_few_threads() -> None:
    """Let PyTorch use four threads in this process, unless `OMP_NUM_THREADS` says how many."""
    import torch  # a login node, which imports this module too, has none

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(THREADS, torch.get_num_threads()))


def train(plan: Plan, path: Path, root: Path) -> None:
    """Set up NeMo RL and run its loop; write each step's metrics, print worse health."""
    take_few_threads()
    stops, verify = plan.recipe.grpo.stop_when_unstable, plan.recipe.glue.verify

    def write(row: dict[str, Any]) -> None:
        if health := metrics.append_judged(path, row, stops, verify):
            print(f"{plan.cell}  {health}")

    def keep(folder: Path) -> None:
        """Copy the rows into a checkpoint, tmp_step_7: NeMo RL saves before it logs the step."""
        step = int(folder.name.rpartition("_")[2])
        metrics.keep_rows(path, folder, logger.row_so_far(step, parts.policy.row))

    with session.opened(plan, path, root) as parts:
        logger = OverheardLogger(parts.logger, parts.policy.take_row, write)
        parts.policy.keep_rows = keep
        # Computed only here: NeMo RL counts from the end of its set-up, which takes minutes.
        parts.config.checkpointing.update(save_by(plan.recipe, time.time()))
        session.run_grpo(parts, logger, plan.recipe.grpo.max_sample_age)


def save_by(recipe: Recipe, now: float) -> dict[str, str | None]:
    """Return NeMo RL's key `SAVE_BY`, None without a time limit; no key if the user has set it.

    grpo.sbatch asks Slurm for the job's end, because `init_ray` removes Slurm's variables.

    Args:
        recipe: of the run.
        now: seconds since 1970.
    """
    if f"checkpointing.{SAVE_BY}" in leaves(recipe.nemo):
        return {}
    end = os.environ.get("FP8_NEMO_JOB_END")  # seconds since 1970; empty without a limit
    if not end:
        return {SAVE_BY: None}
    left = max(0, int(float(end) - recipe.cluster.save_before_end - now))
    minutes, hours, days = left // 60, left // 3600, left // 86400
    return {SAVE_BY: f"{days:02}:{hours % 24:02}:{minutes % 60:02}:{left % 60:02}"}


def _reason(error: BaseException) -> str:
    """Return the line of an error that says why: Ray wraps a worker's error and its traceback."""
    named = re.findall(r"^.*?((?:\w+\.)*\w*(?:Error|Exception): .+)$", str(error), re.M)
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return named[-1].strip() if named else f"{type(error).__name__}: {first}"
