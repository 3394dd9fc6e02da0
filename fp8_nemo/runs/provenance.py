"""What a number was measured on: versions, commit and hardware of this process, and no secret."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

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
    """Versions, commit and hardware of this process: what a number was measured on."""
    return {
        "python": platform.python_version(),
        "versions": {name: version for name in VERSIONS_OF if (version := _version(name))},
        "commit": commit(),
        "hardware": {
            "machine": platform.machine(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "gpus": _gpus(),
            "system": f"{platform.system()} {platform.release()}",
        },
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Commit of the code that runs; `-dirty` if it is not exactly that.

    None outside a clone. A job's frozen copy has been told, and lies in a clone that goes on.
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


def _gpus() -> list[str]:
    """Names of the GPUs that this process may use, by the driver's own tool."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", visible]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    return found.stdout.splitlines()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
