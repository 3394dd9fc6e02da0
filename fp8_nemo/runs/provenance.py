"""Record what a number was measured on: versions, commit and hardware, and no secret."""

from __future__ import annotations

import math
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

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
