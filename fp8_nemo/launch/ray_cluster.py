"""A Ray cluster for one run on this machine: `python -m fp8_nemo.launch.ray_cluster`.

Prints its address, then lives until a line, or the end, of its standard input. NeMo RL's Megatron
worker takes Ray's GPU id for a device's number (megatron_policy_worker.py:439), so a cluster that
sees `CUDA_VISIBLE_DEVICES=2` gives it a device that does not exist. This one sees all GPUs, by
their own numbers, and holds those that the run was not given.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false, reportArgumentType=false
from __future__ import annotations

import fcntl
import os
import sys
from contextlib import suppress

from fp8_nemo.launch.preflight import visible_gpus


def main() -> int:
    """Start, hold, print, wait."""
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
        "(base_policy_worker.py:137); name others in CUDA_VISIBLE_DEVICES"
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


if __name__ == "__main__":
    raise SystemExit(main())
