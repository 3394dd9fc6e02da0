"""Start a run's Ray cluster, or wait for it: `python -m ...ray_cluster hold | wait S NODE...`.

`hold` starts a cluster on this machine, prints its address, and keeps it until its standard input
gives a line or ends. NeMo RL's Megatron worker takes Ray's GPU id for a device number (seam
gpu-by-number): in a cluster that only sees `CUDA_VISIBLE_DEVICES=2`, id 0 would become a device
that does not exist. So the cluster sees all GPUs, and `hold` occupies those that are not the run's.

`wait` waits S seconds until every node of a Slurm job has joined, and names those that have not.
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

from fp8_nemo.launch.preflight import visible_gpus
from fp8_nemo.nemo_config.seams import SEAMS
from fp8_nemo.recipe.model_dir import SHIPPED

RESOURCE = "slurm-"


def main() -> int:
    """Hold a cluster or wait for one, and return the exit code."""
    command, *words = sys.argv[1:]
    return hold() if command == "hold" else wait(int(words[0]), words[1:])


def hold() -> int:
    """Start a cluster on this machine, occupy the other GPUs, print its address, wait for input."""
    mine = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    # Every number, not unset: under tensor parallelism vLLM's workers look up their own in it.
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(visible_gpus() or 0)))
    import ray

    cluster = ray.init(address="local", include_dashboard=False, log_to_driver=False)
    count = int(ray.cluster_resources().get("GPU", 0))
    words = map(str, range(count)) if mine is None else map(str.strip, mine.split(","))
    given = list(filter(None, words))
    if problem := wrong_numbers(given, count) or taken(given):
        print(problem, file=sys.stderr)
        return 1
    held = hold_others(given, count) if mine is not None else []
    print(cluster.address_info["gcs_address"], flush=True)
    sys.stdin.readline()
    del held  # Ray ends an actor that nothing refers to, so the name had to live until here
    return 0


def hold_others(mine: list[str], count: int) -> list[object]:
    """Occupy all `count` GPUs of the cluster but `mine`, and return the actors that do."""
    import ray

    holder = ray.remote(num_gpus=1, num_cpus=0)(_Holder)
    actors, held = [holder.remote() for _ in range(count)], []
    # Ray chooses which actor gets which GPU, so all are started, and those on ours are ended.
    for actor, number in zip(actors, ray.get([each.gpu.remote() for each in actors]), strict=True):
        if str(number) in mine:
            ray.kill(actor)
        else:
            held.append(actor)
    return held


class _Holder:
    """Occupy one GPU in Ray's books, and none of its memory."""

    def gpu(self) -> int | str:
        """Return the index of the GPU, or its name, as Ray has it."""
        import ray

        return ray.get_gpu_ids()[0]


def wrong_numbers(given: list[str], count: int) -> str:
    """Return one line if the GPUs are not named by their numbers; empty if they are."""
    if all(word.isdigit() and int(word) < count for word in given):
        return ""
    return (
        f"CUDA_VISIBLE_DEVICES={','.join(given)}: must be numbers below {count}, the GPUs of this "
        "machine; NeMo RL takes them for numbers"
    )


def taken(given: list[str]) -> str:
    """Take GPUs for this process; return one line if another run has one, empty if none has."""
    busy = [gpu for gpu in given if not take(gpu)]
    if not busy:
        return ""
    return (
        f"GPU {', '.join(busy)}: another run is on it, and NeMo RL's refit has one socket per GPU "
        f"({SEAMS['socket-per-gpu']}); name others in CUDA_VISIBLE_DEVICES"
    )


def take(gpu: str, folder: str = "/tmp") -> bool:
    """Take a GPU until this process ends; return whether no other run on the machine has it.

    The lock is in the folder of NeMo RL's socket, and any user can take it.
    """
    file = open_for_anyone(f"{folder}/fp8-nemo-gpu-{gpu}.lock")  # never closed: closing unlocks
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def open_for_anyone(path: str) -> int:
    """Open a lock file for reading and return its descriptor; make it readable for any user."""
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o444))
        os.chmod(path, 0o444)  # the umask may have taken bits away
    return os.open(path, os.O_RDONLY)


def wait(limit: int, names: list[str]) -> int:
    """Wait for nodes of the cluster in `RAY_ADDRESS`; return 0 if all joined, 1 if time is up."""
    connect(limit)
    deadline = time.monotonic() + limit
    while missing := [name for name in names if name not in node_names().values()]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
    for name in missing:
        late = f"has not joined Ray within {limit} s; its part of the log says why"
        print(f"{name}: {late if limit else 'is gone from Ray'}")
    if not missing and limit:
        print(f"Ray: {len(names)} of {len(names)} nodes: {', '.join(names)}", flush=True)
    return 1 if missing else 0


def connect(limit: int) -> None:
    """Connect to the cluster in `RAY_ADDRESS`, which may still be starting; without it, start one.

    Raises:
        ConnectionError: the cluster did not answer within `limit` seconds.
    """
    import ray

    # `local` and not None, with which Ray takes whatever cluster last ran on this machine.
    address = os.environ.get("RAY_ADDRESS", "local")
    deadline = time.monotonic() + limit
    while True:
        try:
            with outside_code():
                ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
            return
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)


@contextmanager
def outside_code() -> Iterator[None]:
    """Run the block in a folder without Python, so that Ray's workers import by `PYTHONPATH`.

    Ray puts the driver's working directory before `PYTHONPATH` (`worker.py`, `code_paths`). A job's
    is the clone that it was submitted from, which may have been edited since. The folder of this
    package, if it is installed, has the driver's other packages, which would hide a worker's own.
    """
    with chdir(SHIPPED):
        yield


def node_names() -> dict[str, str]:
    """Return the living nodes, `{Ray's id: Slurm's name}`; outside Slurm, the host's name."""
    import ray

    return {node["NodeID"]: _name(node) for node in ray.nodes() if node["Alive"]}


def _name(node: dict) -> str:
    given = [each for each in node["Resources"] if each.startswith(RESOURCE)]
    return given[0].removeprefix(RESOURCE) if given else node["NodeManagerHostname"]


if __name__ == "__main__":
    raise SystemExit(main())
