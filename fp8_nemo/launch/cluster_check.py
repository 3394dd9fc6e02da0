"""Whether the nodes of a job can run its plan: looked at on every node, before the run.

A check gives findings: what was found on a node, and what is wrong with it, if anything. The nodes
are those of the Ray cluster in `RAY_ADDRESS`; outside a job, of one that is started here.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from fp8_nemo.launch import probe
from fp8_nemo.launch.preflight import hub_mistakes, settings_of
from fp8_nemo.launch.ray_cluster import connect, node_names
from fp8_nemo.nemo.worker_settings import PLUGIN, own_folder
from fp8_nemo.nemo_config.checkout import read_host
from fp8_nemo.nemo_config.host import HostError, root_of
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.model_dir import model_mistakes
from fp8_nemo.recipe.options import Recipe
from fp8_nemo.recipe.problems import DataError, load_problems
from fp8_nemo.runs.provenance import gpus
from fp8_nemo.runs.terminal import table

WORKERS = {
    "policy": "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker",
    "vLLM": "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker",
}
"""The workers whose environments NeMo RL's container keeps apart, by their full names."""
NODE_LIMIT = 45  # seconds for everything that one node is asked
IMPORT_LIMIT = 600  # seconds to import torch for the first time, from a shared folder at worst
REDUCE_LIMIT = 60  # seconds for the all-reduce, NCCL's set-up included
HUB_DATA = {
    "openmath-2": ("nvidia/OpenMathInstruct-2",),
    "dapo-math-17k": ("BytedTsinghua-SIA/DAPO-Math-17k", "BytedTsinghua-SIA/AIME-2024"),
}
"""What NeMo RL's own data sets read from the hub (nemo_rl/data/datasets/response_datasets)."""
BUSY_GIB = 2.0  # memory of a GPU that another process holds and a run would miss
LEAST_SHM_GIB = 2.0  # Ray's object store and NCCL live in /dev/shm
REDUCED_NUMBERS = 16 * 2**20  # FP32: 64 MiB
GIB = 2**30


class Finding(NamedTuple):
    """One look at one node: `Finding("GPUs", "node1", "8 x NVIDIA H100, driver 580.1")`."""

    check: str
    node: str
    found: str
    problem: str = ""
    """What is wrong, and what to do; empty if nothing is."""


def check(plan: Plan, path: Path) -> list[Finding]:
    """Everything that was found, node by node.

    Args:
        plan: of the run.
        path: its directory.

    Raises:
        ConnectionError: no Ray cluster answers.
    """
    import ray

    connect(NODE_LIMIT)
    names = node_names()
    found = [*_cluster_findings(plan.recipe, names)]
    canary = path.absolute() / ".canary"
    canary.write_text(f"{time.time()}\n")
    task = ray.remote(num_cpus=0, max_retries=0)(look)
    question = (plan.to_json(), interpreters(plan), str(canary), canary.read_text())
    asked = {_on(task, node).remote(*question): name for node, name in names.items()}
    for answer, name in asked.items():
        try:
            seen: Any = ray.get(answer, timeout=NODE_LIMIT)
        except Exception as error:  # a task that dies, hangs or cannot import this package
            reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
            found.append(Finding("a task", name, "", f"none can run here: {reason[0]}"))
            continue
        found += findings(plan, name, seen)
    canary.unlink()
    return [*found, *_all_reduce(names)]


def findings_table(found: list[Finding]) -> Table:
    """Lay out what was found, equal findings of several nodes in one row."""
    order = list(dict.fromkeys(each.check for each in found))
    ranked = sorted(found, key=lambda each: (order.index(each.check), *each[2:], each.node))
    rows = [
        (name, ", ".join(each.node for each in same), text, problem or "ok")
        for (name, text, problem), same in groupby(ranked, attrgetter("check", "found", "problem"))
    ]
    return table("check_cluster", ("check", "nodes", "found", "verdict"), rows)


def interpreters(plan: Plan) -> dict[str, str]:
    """Every environment of the run and its Python; a job's own is the one that runs this."""
    found = {"job": sys.executable}
    root = root_of(plan.recipe)
    if plan.backend == "nemo" and plan.recipe.cluster.interpreter == "container" and root:
        venvs = Path(os.environ.get("NEMO_RL_VENV_DIR") or root / "venvs")
        found |= {name: str(venvs / full / "bin" / "python") for name, full in WORKERS.items()}
    return found


Seen = dict[str, Any]
"""Plain data, as it comes back from a node."""


def look(plan: Seen, pythons: dict[str, str], canary: str, written: str) -> Seen:
    """What a node sees, as plain data; runs there."""
    from fp8_nemo.plan.plan import plan_from_json

    recipe = plan_from_json(plan).recipe
    file = Path(canary)
    return {
        "gpus": [each._asdict() for each in gpus() or []],
        "environments": {name: _probe(python) for name, python in pythons.items()},
        "folder": "" if file.is_file() and file.read_text() == written else "missing",
        "model": [str(mistake) for mistake in _model_mistakes(recipe)],
        "data": [str(mistake) for mistake in _data_mistakes(recipe)],
        "nemo_rl": _has_nemo_rl(recipe),
        "memory_gib": _available_memory() / GIB,
        "shm_gib": shutil.disk_usage("/dev/shm").free / GIB,
    }


def findings(plan: Plan, node: str, seen: Seen) -> Iterator[Finding]:
    """What `look` saw on a node, held against what the plan needs."""
    nemo = plan.backend == "nemo"
    yield Finding("a task", node, "runs")
    yield _gpu_finding(plan, node, seen["gpus"])
    for name, environment in seen["environments"].items():
        yield _environment_finding(plan, node, name, environment)
    remedy = "set outputs to a folder that all nodes share, and name it in cluster.mounts"
    folder = f"{plan.recipe.outputs} is another folder here; {remedy}" if seen["folder"] else ""
    yield Finding("outputs", node, "shared" if not folder else "", folder)
    yield Finding("model", node, "readable" if not seen["model"] else "", "; ".join(seen["model"]))
    yield Finding("data", node, "readable" if not seen["data"] else "", "; ".join(seen["data"]))
    if nemo:
        missing = "" if seen["nemo_rl"] else "no nemo_rl in it; see cluster.mounts"
        yield Finding("NeMo RL", node, str(root_of(plan.recipe)), missing)
    short = nemo and seen["shm_gib"] < LEAST_SHM_GIB
    yield Finding(
        "memory",
        node,
        f"{seen['memory_gib']:.0f} GiB free, {seen['shm_gib']:.0f} GiB in /dev/shm",
        f"/dev/shm needs {LEAST_SHM_GIB:.0f} GiB for Ray" if short else "",
    )


def _cluster_findings(recipe: Recipe, names: dict[str, str]) -> Iterator[Finding]:
    wanted, found = recipe.cluster.nodes, len(names)
    problem = "" if found >= wanted else f"cluster.nodes={wanted}"
    yield Finding("Ray", "all", f"{found} node{'s' * (found != 1)}", problem)


def _gpu_finding(plan: Plan, node: str, seen: list[Seen]) -> Finding:
    cluster, needed = plan.recipe.cluster, plan.backend == "nemo"
    kinds = sorted({f"{gpu['name']}, driver {gpu['driver']}" for gpu in seen})
    found = f"{len(seen)} x {' and '.join(kinds)}" if seen else "none"
    busy = [n for n, gpu in enumerate(seen) if gpu["used"] / 1024 > BUSY_GIB]
    problem = ""
    if needed and len(seen) < cluster.gpus_per_node:
        problem = f"cluster.gpus_per_node={cluster.gpus_per_node}"
    elif needed and not all(cluster.gpu in gpu["name"].lower() for gpu in seen):
        problem = f"cluster.gpu={cluster.gpu} is not what is here; set the one that is"
    elif needed and busy:
        problem = f"GPU {', '.join(map(str, busy))}: another process holds memory on it"
    return Finding("GPUs", node, found, problem)


def _environment_finding(plan: Plan, node: str, name: str, seen: Seen) -> Finding:
    check = f"packages, {name}"
    if "error" in seen:
        # NeMo RL makes a worker's environment when it is first needed.
        problem = seen["error"] if name == "job" else ""
        return Finding(check, node, "not made yet" if name != "job" else "", problem)
    versions, plugins = seen["versions"], seen["plugins"]
    wrong = []
    for package, version in needed_versions(plan, name).items():
        have = versions.get(package)
        if have is None or (version and have.split("+")[0] != version):
            wrong.append(f"{package} {version or 'any'} needed, {have or 'none'} found")
    lacking = sorted(needed_plugins(plan, name) - set(plugins))
    wrong += [f"vLLM would not see our plugin {plugin}" for plugin in lacking]
    texts = [f"python {seen['python']}", *(f"{key} {value}" for key, value in versions.items())]
    return Finding(check, node, ", ".join(texts), "; ".join(wrong))


def needed_versions(plan: Plan, environment: str) -> dict[str, str | None]:
    """Packages that an environment of the run must have, and their version where it matters."""
    ours = {"fp8-nemo": metadata.version("fp8-nemo")}
    if plan.backend == "local":
        return {"torch": None, "transformers": None, **ours}
    root = root_of(plan.recipe)
    try:
        vllm = read_host(root).vllm if root else None
    except HostError:
        vllm = None
    policy: dict[str, str | None] = {"torch": None}
    if plan.recipe.precision.train.is_quantized:
        policy["transformer-engine"] = None  # NeMo RL's own, made from source, has no -torch
    if environment == "policy":
        return policy
    if environment == "vLLM":
        return {"vllm": vllm, "torch": None}
    alone = plan.recipe.cluster.interpreter == "system"
    return {"ray": None, **ours, **({"vllm": vllm, **policy} if alone else {})}


def needed_plugins(plan: Plan, environment: str) -> set[str]:
    """The vLLM plugins of ours that an environment with vLLM in it must show."""
    with_vllm = environment == "vLLM" or plan.recipe.cluster.interpreter == "system"
    ours = plan.backend == "nemo" and with_vllm and settings_of(plan.recipe).needs_plugin
    return {PLUGIN} if ours else set()


def _probe(python: str) -> Seen:
    """What another interpreter has, with this package on its path as a run's workers have it."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = filter(None, [str(own_folder() or ""), *given])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    try:
        answer = subprocess.run(
            [python, "-P", probe.__file__],
            capture_output=True,
            text=True,
            timeout=NODE_LIMIT,
            env=environment,
        )
        return json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"error": f"{python}: {error}"}


def _model_mistakes(recipe: Recipe) -> Iterator[Any]:
    model = recipe.model
    if model.hub_id:
        return hub_mistakes(model.hub_id)
    return iter(list(model_mistakes(recipe, pads=False)))


def _data_mistakes(recipe: Recipe) -> Iterator[Any]:
    for name in HUB_DATA.get(recipe.data.name, ()):
        yield from hub_mistakes(name, "dataset")
    if recipe.data.name == "jsonl":
        try:
            load_problems(recipe.data, recipe.seed)
        except DataError as error:
            yield error


def _has_nemo_rl(recipe: Recipe) -> bool:
    root = root_of(recipe)
    return root is not None and (root / "nemo_rl").is_dir()


def _available_memory() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return float(line.split()[1]) * 1024
    return 0.0


def _on(remote: Any, node: str) -> Any:
    """A task or an actor that runs on one node, or not at all."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))


class Reducer:
    """One rank of an all-reduce over all GPUs, or over all nodes by gloo where there are none."""

    def address(self) -> str:
        """A free address of this rank's node, for all to meet at; torch is imported by then."""
        import socket

        import ray.util
        import torch.distributed  # noqa: F401 - alone, it can take minutes the first time

        with socket.socket() as free:
            free.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def reduce(self, rank: int, world: int, meet: str) -> float:
        """Seconds of one all-reduce of 64 MiB, after one to warm up.

        Raises:
            RuntimeError: the sum is not what it must be.
        """
        import torch
        import torch.distributed as dist

        device = "cuda" if torch.cuda.is_available() else "cpu"
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo", init_method=meet, rank=rank, world_size=world
        )
        start = 0.0
        for _ in range(2):
            numbers = torch.full((REDUCED_NUMBERS,), float(rank + 1), device=device)
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(numbers)
            expected = world * (world + 1) / 2
            if not bool((numbers == expected).all()):  # waits for the device
                raise RuntimeError(f"the sum over {world} ranks is not {expected}")
        took = time.perf_counter() - start
        dist.destroy_process_group()
        return took


def _all_reduce(names: dict[str, str]) -> Iterator[Finding]:
    """One finding for all: the ranks, the time, or the reason why they do not meet."""
    import ray
    from ray.exceptions import GetTimeoutError

    counts = {n["NodeID"]: int(n["Resources"].get("GPU", 0)) for n in ray.nodes() if n["Alive"]}
    on_gpus = any(counts.values())
    places = [node for node in names for _ in range(counts[node] if on_gpus else 1)]
    kind = "NCCL, GPUs" if on_gpus else "gloo, nodes"
    rank = ray.remote(num_cpus=0, num_gpus=int(on_gpus), max_restarts=0)(Reducer)
    ranks = [_on(rank, node).remote() for node in places]
    try:
        meet, *_ = ray.get([each.address.remote() for each in ranks], timeout=IMPORT_LIMIT)
    except GetTimeoutError:
        remedy = f"import torch takes more than {IMPORT_LIMIT} s; put it on the nodes' own disks"
        yield Finding("all-reduce", "all", f"{len(ranks)} {kind}", remedy)
        return
    try:
        work = [each.reduce.remote(n, len(ranks), meet) for n, each in enumerate(ranks)]
        took = max(ray.get(work, timeout=REDUCE_LIMIT))
    except Exception as error:  # Ray's, torch's and NCCL's own
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        remedy = "; see NCCL_SOCKET_IFNAME and the firewall (docs/troubleshooting.md)"
        yield Finding("all-reduce", "all", f"{len(ranks)} {kind}", reason[0] + remedy)
        return
    finally:
        for each in ranks:
            ray.kill(each)
    yield Finding("all-reduce", "all", f"{kind} {len(ranks)}, 64 MiB in {took * 1e3:.1f} ms")
