"""Hold a node's memory and disk against what a plan will take of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from fp8_nemo.plan.memory import GIB, checkpoint_gib, host_gib
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.settled import KEPT_CHECKPOINTS
from fp8_nemo.runs.run_dir import checkpoints, run_path

LEAST_SHM_GIB = 2.0  # Ray's object store and NCCL use /dev/shm

Room = dict[str, float]
"""GiB that a node has free, by place: `memory`, `shm`, `disk`."""


def room(plan: Plan) -> Room:
    """Return what is free on this machine: memory, shared memory, and the disk of `outputs`."""
    outputs = Path(plan.recipe.outputs).absolute()
    there = next(each for each in (outputs, *outputs.parents) if each.exists())
    return {
        "memory": _available_memory() / GIB,
        "shm": shutil.disk_usage("/dev/shm").free / GIB,
        "disk": shutil.disk_usage(there).free / GIB,
    }


def short_of(plan: Plan, free: Room) -> Iterator[str]:
    """Yield a line for each place that has less free than a run inside NeMo RL will take."""
    if plan.backend != "nemo":
        return
    if free["shm"] < LEAST_SHM_GIB:
        yield f"/dev/shm needs {LEAST_SHM_GIB:.0f} GiB for Ray, {free['shm']:.1f} are free"
    if free["memory"] < (needed := host_gib(plan.settled)):
        yield (
            f"a node's memory: the plan page-locks {needed:,.0f} GiB, {free['memory']:,.0f} are "
            "free; take more nodes (cluster.nodes), or nodes with more"
        )
    saved = len(checkpoints(run_path(plan)))
    needed = max(1, KEPT_CHECKPOINTS + 1 - saved) * checkpoint_gib(plan.settled)
    if free["disk"] < needed:
        yield (
            f"outputs={plan.recipe.outputs}: checkpoints will take {needed:,.0f} GiB, "
            f"{free['disk']:,.0f} are free; make room, or set outputs=FOLDER on another disk"
        )


def _available_memory() -> float:
    """Return the bytes of memory that processes can still get; 0 if Linux does not say."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable")]
    return float(found[0]) * 1024 if found else 0.0
