"""The Ray cluster of a run: `python -m fp8_nemo.launch.ray_cluster hold | wait SECONDS NODE...`.

`hold` starts one on this machine, prints its address, then lives until a line, or the end, of its
standard input. NeMo RL's Megatron worker takes Ray's GPU id for a device's number (seam
gpu-by-number), so a cluster that sees `CUDA_VISIBLE_DEVICES=2` gives it a device that does not
exist. This one sees all GPUs, by their own numbers, and holds those that the run was not given.

`wait` waits until every node of a Slurm job has joined, and names those that have not.
slurm/node.sh gives each Ray node a resource `slurm-NAME`, because two nodes may share a host name,
or an address behind a bridge.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false, reportArgumentType=false
from __future__ import annotations

import fcntl
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from pathlib import Path

import fp8_nemo
from fp8_nemo.launch.preflight import visible_gpus
from fp8_nemo.nemo_config.seams import SEAMS

RESOURCE = "slurm-"


def main(arguments: list[str] | None = None) -> int:
    """Hold a cluster, or wait for one; the exit code."""
    command, *words = sys.argv[1:] if arguments is None else arguments
    return hold() if command == "hold" else wait(int(words[0]), words[1:])


def hold() -> int:
    """Start a cluster on this machine, hold the other GPUs, print its address, wait to be ended."""
    mine = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    # All, by number: under tensor parallelism vLLM's workers look their own up in it.
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(visible_gpus() or 0)))
    import ray

    cluster = ray.init(address="local", include_dashboard=False, log_to_driver=False)
    count = int(ray.cluster_resources().get("GPU", 0))
    given = list(map(str, range(count))) if mine is None else [w.strip() for w in mine.split(",")]
    given = [word for word in given if word]
    problem = wrong_numbers(given, count) or taken(given)
    if problem:
        print(problem, file=sys.stderr)
        return 1
    held = hold_others(given) if mine is not None else []
    print(cluster.address_info["gcs_address"], flush=True)
    sys.stdin.readline()
    del held
    return 0


def hold_others(mine: list[str]) -> list[object]:
    """Occupy every GPU of the cluster but `mine`; the actors that do."""
    import ray

    holder = ray.remote(num_gpus=1, num_cpus=0)(_Holder)
    actors = [holder.remote() for _ in range(int(ray.cluster_resources().get("GPU", 0)))]
    ids = [str(each) for each in ray.get([actor.gpu.remote() for actor in actors])]
    for actor, gpu in zip(actors, ids, strict=True):
        if gpu in mine:
            ray.kill(actor)
    return [actor for actor, gpu in zip(actors, ids, strict=True) if gpu not in mine]


def wrong_numbers(given: list[str], count: int) -> str:
    """A line if the GPUs are not named by their numbers; empty if they are."""
    if all(word.isdigit() and int(word) < count for word in given):
        return ""
    return (
        f"CUDA_VISIBLE_DEVICES={','.join(given)}: must be numbers below {count}, the GPUs of this "
        "machine; NeMo RL takes them for numbers"
    )


def taken(given: list[str]) -> str:
    """A line if another run is on one of the GPUs; empty if they are now this process's."""
    busy = [gpu for gpu in given if not take(gpu)]
    if not busy:
        return ""
    return (
        f"GPU {', '.join(busy)}: another run is on it, and NeMo RL's refit has one socket per GPU "
        f"({SEAMS['socket-per-gpu']}); name others in CUDA_VISIBLE_DEVICES"
    )


def take(gpu: str, folder: str = "/tmp") -> bool:
    """Whether this process now has a GPU to itself, among runs of this package on the machine.

    The lock lies where NeMo RL's socket does, and any user may take it.
    """
    file = open_for_anyone(f"{folder}/fp8-nemo-gpu-{gpu}.lock")  # held until the process ends
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def open_for_anyone(path: str) -> int:
    """A lock's file, open for reading; made if there is none, so that any user may take it."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o444))
        os.chmod(path, 0o444)  # whatever this user's umask is
    return os.open(path, os.O_RDONLY)


class _Holder:
    """Holds one GPU's place, and none of its memory."""

    def gpu(self) -> int | str:
        """Its number on this machine."""
        import ray

        return ray.get_gpu_ids()[0]


def wait(limit: int, names: list[str]) -> int:
    """Wait for nodes; 0 when all are there, 1 when time is up. `RAY_ADDRESS` names the cluster."""
    connect(limit)
    missing = wait_for(names, limit)
    for name in missing:
        late = f"has not joined Ray within {limit} s; its part of the log says why"
        print(f"{name}: {late if limit else 'is gone from Ray'}")
    if not missing and limit:
        print(f"Ray: {len(names)} of {len(names)} nodes: {', '.join(names)}", flush=True)
    return 1 if missing else 0


def connect(limit: int) -> None:
    """Attach to the cluster in `RAY_ADDRESS`, which may still be starting; without it, start one.

    Raises:
        ConnectionError: it did not start in `limit` seconds.
    """
    import ray

    deadline = time.monotonic() + limit
    while True:
        try:
            # Never whatever Ray ran on this machine last, which is what no address would mean.
            address = os.environ.get("RAY_ADDRESS", "local")
            with own_code_first():
                ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
            return
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


@contextmanager
def own_code_first() -> Iterator[None]:
    """Connect to Ray from the folder of this code: Ray's workers import from where that was.

    It hands them the driver's working directory before `PYTHONPATH` (`worker.py`, `code_paths`);
    a job's is the clone it was submitted from, which may have been edited since.
    """
    with chdir(Path(fp8_nemo.__file__).parents[1]):
        yield


def wait_for(names: list[str], limit: float) -> list[str]:
    """The nodes that have not joined after `limit` seconds; returns as soon as all have."""
    deadline = time.monotonic() + limit
    while missing := [name for name in names if name not in node_names().values()]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
    return missing


def node_names() -> dict[str, str]:
    """Living nodes, Ray's id to Slurm's name; to the host's name outside Slurm."""
    import ray

    return {node["NodeID"]: _name(node) for node in ray.nodes() if node["Alive"]}


def _name(node: dict) -> str:
    given = [each for each in node["Resources"] if each.startswith(RESOURCE)]
    return given[0].removeprefix(RESOURCE) if given else node["NodeManagerHostname"]


if __name__ == "__main__":
    raise SystemExit(main())
