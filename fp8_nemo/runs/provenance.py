"""Record what a run was measured on, and when: versions, commit, hardware, times; no secret."""

from __future__ import annotations

import math
import os
import platform
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from fp8_nemo.recipe.model_dir import model_path, weights_digest
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.own.reward import reward_digest
from fp8_nemo.recipe.plain import read_json, to_json
from fp8_nemo.recipe.problems import problems_digest
from fp8_nemo.runs.metrics import RunDirError, write_whole
from fp8_nemo.runs.run_dir import checkpoints, now

ENVIRONMENT = "environment.json"
ATTEMPTS = "attempts"
"""Key of ENVIRONMENT: `{"started": TIME, "ended": TIME}` of each attempt; a kill leaves no end."""

VERSIONS_OF = (
    "fp8-nemo",
    "torch",
    "transformers",
    "safetensors",
    "hydra-core",
    "omegaconf",
    "numpy",
    "nemo-rl",
    "vllm",
    "ray",
    "megatron-core",
    "transformer-engine",
    "transformer-engine-torch",
)

COMMIT = "COMMIT"
"""File beside a job's copy of the package that says which commit it is of."""
QUIETLY: dict[str, Any] = {"capture_output": True, "text": True, "check": True, "timeout": 10}


def environment() -> dict[str, Any]:
    """Return versions, commit and hardware of this process: what a number was measured on."""
    found = gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return {
        "python": platform.python_version(),
        "versions": {name: version for name in VERSIONS_OF if (version := _version(name))},
        "commit": commit(),
        "hardware": {
            "machine": platform.machine(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "gpus": [f"{gpu.name}, {gpu.driver}" for gpu in found or []],
            "system": f"{platform.system()} {platform.release()}",
        },
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the commit of the code that runs; with `-dirty` if the code is not exactly that.

    It is None outside a clone. A job's frozen copy carries its commit in a file: the clone around
    it may have moved on.
    """
    here = Path(__file__)
    if (told := here.parents[2] / COMMIT).is_file():
        return told.read_text().strip() or None
    git = ["git", "-C", str(here.parent)]
    describe = [*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:  # a copy that lies in somebody's clone is none of its files
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], **QUIETLY)
        return subprocess.run(describe, **QUIETLY).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


class Gpu(NamedTuple):
    """Describe one GPU, memory in MiB: `Gpu("NVIDIA H100 80GB HBM3", "580.95.05", 81559, 4)`."""

    name: str
    driver: str
    memory: float
    used: float


def gpus(visible: str | None = None) -> list[Gpu] | None:
    """Ask the driver's own tool for this machine's GPUs; None where it cannot be asked.

    Args:
        visible: numbers or names of those that are asked for, as `CUDA_VISIBLE_DEVICES` has them;
            all by default.
    """
    keys = "name,driver_version,memory.total,memory.used"
    command = ["nvidia-smi", f"--query-gpu={keys}", "--format=csv,noheader,nounits"]
    command += ["-i", visible] if visible else []
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[word.strip() for word in line.split(",")] for line in found.stdout.splitlines()]
    return [Gpu(name, driver, _mib(total), _mib(used)) for name, driver, total, used in rows]


def _mib(text: str) -> float:
    """Read a number; a driver may answer `[N/A]`."""
    return float(text) if text.isdigit() else math.nan


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def changed_versions(run_dir: Path) -> list[str]:
    """List each package that is not the one that the run's last attempt had.

    Raises:
        RunDirError: environment.json is damaged.
    """
    before, now = began_with(run_dir).get("versions", {}), environment()["versions"]
    return [
        f"{run_dir}: began with {name} {before[name]}, here is {now.get(name, 'none')}; install "
        "that again, or set cluster.other_versions=allow"
        for name in before
        if now.get(name) != before[name]
    ]


def began_with(run_dir: Path) -> dict[str, Any]:
    """Return the environment that a run with checkpoints began in; empty for one without."""
    return read_environment(run_dir) if checkpoints(run_dir) else {}


def starting_point(recipe: Recipe, path: Path) -> dict[str, str]:
    """Return digests of weights and problems for `environment.json`: as the run began.

    A run that went on with another model in the same folder, or other lines in the same file, would
    show one curve of two experiments.

    Args:
        recipe: of the run.
        path: its directory.

    Raises:
        RunDirError: they are others now, and `cluster.other_versions` is not `allow`.
        OSError: a file of the model's or of the problems' cannot be read.
    """
    now, began = dict(_digests(recipe)), began_with(path)
    for name, digest in now.items():
        if began.get(name, digest) != digest and recipe.cluster.other_versions == "refuse":
            raise RunDirError(
                f"{path}: began with {name} {began[name]}, here are {digest}; put back what was "
                "there, give the run other outputs, or set cluster.other_versions=allow"
            )
    return now | {name: began[name] for name in now if name in began}


def _digests(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Digest what lies in files: NeMo RL may fetch a hub's model or data only later."""
    if not recipe.model.hub_id:
        yield "weights", weights_digest(model_path(recipe.model))
    if not recipe.data.is_on_hub:
        yield "problems", problems_digest(recipe.data, recipe.seed)
    if recipe.data.reward:
        yield "reward", reward_digest(Path(recipe.data.reward))


def read_environment(run_dir: Path) -> dict[str, Any]:
    """Return what environment.json holds; empty without one.

    Raises:
        RunDirError: it is damaged.
    """
    path = run_dir / ENVIRONMENT
    try:
        found = read_json(path.read_bytes()) if path.exists() else {}
        if not isinstance(found, dict) or not isinstance(found.get("versions", {}), dict):
            raise ValueError("no environment")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is damaged"
        remedy = "delete the file, and the same line writes it again"
        raise RunDirError(f"{path}: cannot be read, {why}; {remedy}") from error
    return found


@contextmanager
def attempt(run_dir: Path, **began: str) -> Iterator[None]:
    """Record in environment.json what an attempt runs on, when it starts, and when it ends.

    Each attempt's times are kept, the rest is the last one's; its log keeps its own. SIGTERM ends
    a block that has no handler for it, as it would without this, once the time is written.

    Args:
        run_dir: of the run.
        began: `starting_point`.
    """
    write_environment(run_dir, **began)

    def end(number: int, _: object) -> None:
        """Write the end, and end."""
        _end_attempt(run_dir)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        _end_attempt(run_dir)


def write_environment(run_dir: Path, **began: str) -> None:
    """Begin an attempt in environment.json."""
    earlier = read_environment(run_dir).get(ATTEMPTS, [])
    content = environment() | began | {ATTEMPTS: [*earlier, {"started": now()}]}
    write_whole(run_dir / ENVIRONMENT, to_json(content, indent=1) + "\n")


def _end_attempt(run_dir: Path) -> None:
    content = read_environment(run_dir)
    content[ATTEMPTS][-1]["ended"] = now()
    write_whole(run_dir / ENVIRONMENT, to_json(content, indent=1) + "\n")
