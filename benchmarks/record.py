"""What every benchmark does at its end: one table in the terminal, one results file.

A results file has the command, the commit, versions and hardware, and each row's repetitions beside
its median; `benchmarks.render_results` and the notebooks read nothing else.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.speed.decode_kernels import RANGES
from fp8_nemo.recipe.plain import to_json
from fp8_nemo.runs.provenance import environment


def add_options(parser: ArgumentParser) -> None:
    """Add `--out` and `--commit`, which every benchmark takes."""
    parser.add_argument("--out", type=Path, required=True, help="the results file")
    parser.add_argument("--commit", default="", help="of the code, where it is no clone")


def need(*packages: str, device: bool = True) -> None:
    """Stop with a remedy unless these packages, and a CUDA device, are there."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        sys.exit(f"{_script()}: needs {', '.join(missing)}; run it where NeMo RL's "
                 "packages are, its container or its environment (docs/install.md)")  # fmt: skip
    import torch

    if device and not torch.cuda.is_available():
        sys.exit(f"{_script()}: needs a CUDA device; torch {torch.__version__} sees "
                 "none (nvidia-smi, CUDA_VISIBLE_DEVICES)")  # fmt: skip


def repeated(numbers: Sequence[float]) -> dict[str, Any]:
    """Return `{"median": 2.0, "repetitions": [1.9, 2.0, 2.2]}`."""
    return {"median": median(numbers), "repetitions": list(numbers)}


def keep(out: Path, commit: str, **content: Any) -> None:
    """Write the results so far, whole or not at all; called after every row, to lose none.

    A clone knows its commit better than `--commit` does.
    """
    head = {
        "command": command(),
        "commit": _environment()["commit"] or commit or None,
        "environment": _environment(),
    }
    new = out.with_name(f"{out.name}.new")
    new.write_text(to_json(head | content, indent=1) + "\n")
    new.replace(out)


def command() -> str:
    """Return what was typed, with torchrun's part, which torchrun does not hand on."""
    launcher = "python"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        count = os.environ["LOCAL_WORLD_SIZE"]
        launcher = f"python -m torch.distributed.run --nproc-per-node {count}"
    module = "-m " * (sys.modules["__main__"].__spec__ is not None)
    return " ".join([launcher, f"{module}{_script()}", *sys.argv[1:]])


def _script() -> str:
    """Return `benchmarks.speed.train` of `python -m benchmarks.speed.train`, else the file."""
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec else sys.argv[0]


def kernels(work: Callable[[], Any]) -> list[tuple[str, float]]:
    """Return name and milliseconds of each kernel and copy of some work on its device.

    Empty where the profiler does not start: the times beside it are worth having.
    """
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            work()
    except (AssertionError, RuntimeError) as error:
        print(f"no profile: {error}", flush=True)
        return []
    found = ((each.key, each.self_device_time_total / 1e3) for each in seen.key_averages())
    return [(name, spent) for name, spent in found if spent and not name.startswith(RANGES)]


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table, numbers with three digits, the first row's keys as its heading."""
    grid = Table(title=title, title_justify="left")
    for name in rows[0] if rows else ():
        grid.add_column(name)
    for row in rows:
        grid.add_row(*(_text(row.get(name)) for name in rows[0]))
    Console(width=200).print(grid)


_environment = cache(environment)  # it asks nvidia-smi, beside what others time


def _text(value: Any) -> str:
    if isinstance(value, Mapping) and "median" in value:
        value = value["median"]
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
