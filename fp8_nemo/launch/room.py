"""Hold a node's memory, disk and ports against what a plan will take of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from fp8_nemo.plan.memory import GIB, checkpoint_gib, node_gib
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.settled import KEPT_CHECKPOINTS
from fp8_nemo.runs.run_dir import checkpoints, run_path

LEAST_SHM_GIB = 2.0  # Ray's object store and NCCL use /dev/shm

SEARCHED = ((1400, 1999), (3000, 4999), (7000, 8999))
"""Where NeMo RL and vLLM look for free ports (nemo_rl/distributed/virtual_cluster.py)."""

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
    if free["memory"] < (needed := node_gib(plan.settled)):
        less = "grpo.kl_penalty=0 needs no reference policy, " if plan.settled.kl_penalty else ""
        yield (
            f"a node's memory: the plan takes {needed:,.0f} GiB, {free['memory']:,.0f} are free; "
            f"{less}take more nodes (cluster.nodes), or nodes with more"
        )
    saved = len(checkpoints(run_path(plan)))
    needed = max(1, KEPT_CHECKPOINTS + 1 - saved) * checkpoint_gib(plan.settled)
    if free["disk"] < needed:
        yield (
            f"outputs={plan.recipe.outputs}: checkpoints will take {needed:,.0f} GiB, "
            f"{free['disk']:,.0f} are free; make room, or set outputs=FOLDER on another disk"
        )


def ports() -> dict[str, list[int]]:
    """Return this node's listening TCP ports, and from where to where connections get theirs."""
    kernel, listens = Path("/proc/sys/net/ipv4/ip_local_port_range"), "0A"  # as the kernel has it
    lines = [line.split() for kind in ("tcp", "tcp6") for line in _lines(Path("/proc/net") / kind)]
    found = {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == listens}
    return {"listening": sorted(found), "ephemeral": [int(word) for word in _words(kernel)]}


def taken_ports(seen: dict[str, list[int]]) -> tuple[str, str]:
    """Return how many of the ports of `SEARCHED` are in use, and what is wrong; empty if nothing.

    Args:
        seen: what `ports` returned on a node.
    """
    used, problems = [], []
    for low, high in SEARCHED:
        count = sum(low <= port <= high for port in seen["listening"])
        used.append(f"{count} of {low}-{high}")
        if count > (high + 1 - low) / 2:
            problems.append(f"{used[-1]} are in use; `ss -ltnp` says by whom")
    last = SEARCHED[-1][1]
    if seen["ephemeral"] and seen["ephemeral"][0] <= last:
        problems.append(
            f"connections get ports from {seen['ephemeral'][0]} on, and may take what NeMo RL has "
            f"just found free; set net.ipv4.ip_local_port_range to begin above {last}"
        )
    return f"in use: {', '.join(used)}", "; ".join(problems)


def _lines(table: Path) -> list[str]:
    """Return the sockets of one of the kernel's tables; none where it has none."""
    return table.read_text().splitlines()[1:] if table.exists() else []


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []


def _available_memory() -> float:
    """Return the bytes of memory that processes can still get; 0 if Linux does not say."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable")]
    return float(found[0]) * 1024 if found else 0.0
