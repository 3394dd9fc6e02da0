"""Check on every node, before a run, that the node can run the plan.

Each check yields findings: what a node has, and what is wrong with it, if anything. The nodes are
those of the Ray cluster in `RAY_ADDRESS`; without it, a cluster is started on this machine.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from fp8_nemo.launch.environments import Seen, interpreters, probed, wrong_packages
from fp8_nemo.launch.preflight import data_problems, hub_mistakes, model_problems
from fp8_nemo.launch.ray_cluster import connect, node_names
from fp8_nemo.launch.room import ports, room, short_of, taken_ports
from fp8_nemo.nemo_config.host import root_of
from fp8_nemo.plan.plan import Plan, plan_from_json
from fp8_nemo.runs.provenance import gpus
from fp8_nemo.runs.terminal import table

HUB_DATA = {
    "openmath-2": ("nvidia/OpenMathInstruct-2",),
    "dapo-math-17k": ("BytedTsinghua-SIA/DAPO-Math-17k", "BytedTsinghua-SIA/AIME-2024"),
}
"""What NeMo RL's own data sets read from the hub (nemo_rl/data/datasets/response_datasets)."""
NODE_LIMIT = 45  # seconds for everything that one node is asked
IMPORT_LIMIT = 600  # seconds to import torch for the first time, from a shared folder at worst
REDUCE_LIMIT = 60  # seconds for the all-reduce, NCCL's set-up included
CLOCK_LIMIT = 5.0
"""Seconds between two nodes' clocks: a run saves by its own before a limit by the controller's."""
BUSY_GIB = 2.0  # memory of a GPU that another process holds and a run would miss
REDUCED_NUMBERS = 16 * 2**20  # FP32: 64 MiB


class Finding(NamedTuple):
    """Hold one check of one node: `Finding("GPUs", "node1", "8 x NVIDIA H100, driver 580.1")`."""

    check: str
    node: str
    found: str
    problem: str = ""
    """What is wrong, and what to do; empty if nothing is."""


def check(plan: Plan, path: Path) -> list[Finding]:
    """Check each node of the Ray cluster, then an all-reduce over all of them.

    Args:
        plan: of the run.
        path: its directory.

    Raises:
        ConnectionError: no Ray cluster answers.
        OSError: nothing can be written into the run directory.
    """
    import ray

    # Only nodes that see the same outputs folder read back what is written here.
    canary = path.absolute() / f".canary-{os.getpid()}"
    canary.write_text(f"{time.time()}\n")
    try:
        connect(NODE_LIMIT)
        names, wanted = node_names(), plan.recipe.cluster.nodes
        count = f"{len(names)} node{'s' * (len(names) != 1)}"
        few = "" if len(names) >= wanted else f"cluster.nodes={wanted}"
        found = [Finding("Ray", "all", count, few)]
        task = ray.remote(num_cpus=0, max_retries=0)(look)
        question = (plan.to_json(), interpreters(plan), str(canary), canary.read_text())
        asked = {_on(task, node).remote(*question): node for node in names}
        for answer, node in asked.items():
            name = names[node]
            try:
                seen: Any = ray.get(answer, timeout=NODE_LIMIT)
            except Exception as error:  # the task died, hangs, or cannot import this package
                found.append(Finding("a task", name, "", f"none can run here: {_last_line(error)}"))
            else:
                found += [*findings(plan, name, seen), _clock(node, name)]
        return [*found, _all_reduce(names)]
    finally:
        canary.unlink()


def findings_table(found: list[Finding]) -> Table:
    """Return the findings as a table, equal findings of several nodes in one row."""
    order = list(dict.fromkeys(each.check for each in found))
    ranked = sorted(found, key=lambda each: (order.index(each.check), *each[2:], each.node))
    rows = [
        (name, problem or "ok", ", ".join(each.node for each in same), text)
        for (name, text, problem), same in groupby(ranked, attrgetter("check", "found", "problem"))
    ]
    return table("check_cluster", ("check", "verdict", "nodes", "found"), rows)


def look(content: Seen, pythons: dict[str, str], canary: str, written: str) -> Seen:
    """Return what a node has, as plain data; runs on the node.

    Args:
        content: of the plan, as plain data.
        pythons: environment to interpreter.
        canary: a file in the run directory.
        written: what this file holds on the first node.
    """
    plan, file = plan_from_json(content), Path(canary)
    root, data_sets = root_of(plan.recipe), HUB_DATA.get(plan.recipe.data.name, ())
    unread = [str(each) for name in data_sets for each in hub_mistakes(name, "dataset")]
    return {
        "gpus": [each._asdict() for each in gpus() or []],
        "environments": {name: probed(python) for name, python in pythons.items()},
        "shared": file.is_file() and file.read_text() == written,
        "model": list(model_problems(plan)),
        "data": [*unread, *data_problems(plan)],
        "nemo_rl": root is not None and (root / "nemo_rl").is_dir(),
        "room": room(plan),
        "ports": ports(),
    }


def findings(plan: Plan, node: str, seen: Seen) -> Iterator[Finding]:
    """Compare what `look` saw on a node with what the plan needs."""
    nemo, shared = plan.backend == "nemo", seen["shared"]
    remedy = "set outputs to a folder that all nodes share, and name it in cluster.mounts"
    apart = f"{plan.recipe.outputs} is another folder here; {remedy}"
    yield Finding("a task", node, "runs")
    yield _gpu_finding(plan, node, seen["gpus"])
    for name, environment in seen["environments"].items():
        yield _environment_finding(plan, node, name, environment)
    yield Finding("outputs", node, "shared" if shared else "", "" if shared else apart)
    for name in ("model", "data"):
        yield Finding(name, node, "" if seen[name] else "readable", "; ".join(seen[name]))
    if nemo:
        missing = "" if seen["nemo_rl"] else "no nemo_rl in it; see cluster.mounts"
        yield Finding("NeMo RL", node, str(root_of(plan.recipe)), missing)
    free = ", ".join(f"{gib:,.0f} GiB {place}" for place, gib in seen["room"].items())
    yield Finding("free", node, free, "; ".join(short_of(plan, seen["room"])))
    if nemo:
        yield Finding("ports", node, *taken_ports(seen["ports"]))


def _clock(node: str, name: str) -> Finding:
    """Ask a node what time it is, and compare it with the clock of the node that asks."""
    import ray

    tell = ray.remote(num_cpus=0, max_retries=0)(now)
    before = now()
    try:
        [told] = ray.get([_on(tell, node).remote()], timeout=NODE_LIMIT)
    except Exception as error:  # Ray's own: the node has gone since it was asked the rest
        return Finding("clock", name, "", _last_line(error))
    return clock_finding(name, before, told, now())


def now() -> float:
    """Return the seconds since 1970 by the clock of the node that this runs on."""
    return time.time()


def clock_finding(node: str, before: float, told: float, after: float) -> Finding:
    """Judge a node's clock by what it told between two looks at this one's; seconds since 1970."""
    ahead = told - after if told > after else min(0.0, told - before)
    if abs(ahead) <= CLOCK_LIMIT:
        return Finding("clock", node, f"within {CLOCK_LIMIT:.0f} s of the first node's")
    which = "ahead of" if ahead > 0 else "behind"
    return Finding(
        "clock", node, "", f"{abs(ahead):,.0f} s {which} the first node's: set it, as NTP would"
    )


def _gpu_finding(plan: Plan, node: str, seen: list[Seen]) -> Finding:
    cluster = plan.recipe.cluster
    kinds = sorted({f"{gpu['name']}, driver {gpu['driver']}" for gpu in seen})
    found = f"{len(seen)} x {' and '.join(kinds)}" if seen else "none"
    busy = [str(n) for n, gpu in enumerate(seen) if gpu["used"] / 1024 > BUSY_GIB]
    if plan.backend == "local":
        return Finding("GPUs", node, found)  # it needs none
    problem = ""
    if len(seen) < cluster.gpus_per_node:
        problem = f"cluster.gpus_per_node={cluster.gpus_per_node}"
    elif not all(cluster.gpu in gpu["name"].lower() for gpu in seen):
        problem = f"cluster.gpu={cluster.gpu} is not what is here; set the one that is"
    elif busy:
        problem = f"GPU {', '.join(busy)}: another process holds memory on it"
    return Finding("GPUs", node, found, problem)


def _environment_finding(plan: Plan, node: str, name: str, seen: Seen) -> Finding:
    check = f"packages, {name}"
    if "error" in seen and name != "job":  # NeMo RL makes a worker's environment at its first use
        return Finding(check, node, "not made yet")
    if "error" in seen:
        return Finding(check, node, "", seen["error"])
    wrong = wrong_packages(plan, name, seen)
    versions = seen["versions"].items()
    texts = [f"python {seen['python']}", *(f"{key} {value}" for key, value in versions)]
    return Finding(check, node, ", ".join(texts), "; ".join(wrong))


def _last_line(error: Exception) -> str:
    """Return the last line of an error's text, where Ray puts the cause; its type if empty."""
    return (str(error).strip().splitlines()[-1:] or [type(error).__name__])[0]


def _on(remote: Any, node: str) -> Any:
    """Bind a task or an actor to one node: it runs there, or not at all."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))


class Reducer:
    """Be one rank of an all-reduce: over all GPUs, or over all nodes by gloo without GPUs."""

    def address(self) -> str:
        """Import torch, and return a free address of this rank's node where all ranks can meet."""
        import socket

        import ray.util
        import torch.distributed  # noqa: F401 - alone, it can take minutes the first time

        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def reduce(self, rank: int, world: int, meet: str) -> float:
        """Return the seconds of one all-reduce of 64 MiB, after one to warm up.

        Raises:
            RuntimeError: the sum is wrong.
        """
        import torch
        import torch.distributed as dist

        device, backend = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
        dist.init_process_group(backend, init_method=meet, rank=rank, world_size=world)
        start, expected = 0.0, world * (world + 1) / 2
        for _ in range(2):
            numbers = torch.full((REDUCED_NUMBERS,), float(rank + 1), device=device)
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(numbers)
            if not bool((numbers == expected).all()):  # waits for the device
                raise RuntimeError(f"the sum over {world} ranks is not {expected}")
        took = time.perf_counter() - start
        dist.destroy_process_group()
        return took


def _all_reduce(names: dict[str, str]) -> Finding:
    """Run an all-reduce over all nodes, `{Ray's id: name}`; return its time, or why it failed."""
    import ray
    from ray.exceptions import GetTimeoutError

    counts = {n["NodeID"]: int(n["Resources"].get("GPU", 0)) for n in ray.nodes() if n["Alive"]}
    on_gpus = any(counts.values())
    places = [node for node in names for _ in range(counts[node] if on_gpus else 1)]
    kind = "NCCL, GPUs" if on_gpus else "gloo, nodes"
    rank = ray.remote(num_cpus=0, num_gpus=int(on_gpus), max_restarts=0)(Reducer)
    ranks = [_on(rank, node).remote() for node in places]
    remedy = "see NCCL_SOCKET_IFNAME and the firewall (docs/troubleshooting.md)"
    found, problem = f"{len(ranks)} {kind}", ""
    late = f"import torch takes more than {IMPORT_LIMIT} s; put it on the nodes' own disks"
    try:
        meet, *_ = ray.get([each.address.remote() for each in ranks], timeout=IMPORT_LIMIT)
        late = f"no sum within {REDUCE_LIMIT} s; {remedy}"
        work = [each.reduce.remote(n, len(ranks), meet) for n, each in enumerate(ranks)]
        took = max(ray.get(work, timeout=REDUCE_LIMIT))
        found = f"{kind} {len(ranks)}, 64 MiB in {took * 1e3:.1f} ms"
    except GetTimeoutError:
        problem = late
    except Exception as error:  # Ray's, torch's and NCCL's own
        problem = f"{_last_line(error)}; {remedy}"
    for each in ranks:
        ray.kill(each)
    return Finding("all-reduce", "all", found, problem)
