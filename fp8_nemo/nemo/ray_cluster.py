"""A Ray cluster for one run on this machine: `python -m fp8_nemo.nemo.ray_cluster`.

Prints its address, then lives until a line, or the end, of its standard input. NeMo RL's Megatron
worker takes Ray's GPU id for a device's number (megatron_policy_worker.py:439), so a cluster that
sees `CUDA_VISIBLE_DEVICES=2` gives it a device that does not exist. This one sees all GPUs, by
their own numbers, and holds those that the run was not given.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import fcntl
import os
import sys
import tempfile


def main() -> int:
    """Start, hold, print, wait."""
    mine = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    import ray

    cluster = ray.init(address="local", include_dashboard=False, log_to_driver=False)
    gpus = [str(each) for each in range(int(ray.cluster_resources().get("GPU", 0)))]
    given = mine.split(",") if mine else gpus
    held = hold_others(given) if mine else []
    taken = [gpu for gpu in given if not take(gpu)]
    if taken:
        print(
            f"GPU {', '.join(taken)}: another run is on it, and NeMo RL's refit has one socket per "
            "GPU (base_policy_worker.py:137); name others in CUDA_VISIBLE_DEVICES",
            file=sys.stderr,
        )
        return 1
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


def take(gpu: str) -> bool:
    """Whether this process now has the GPU to itself, among runs of this package on the machine."""
    path = os.path.join(tempfile.gettempdir(), f"fp8-nemo-gpu-{gpu}.lock")
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # open, and held, until the process ends
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class _Holder:
    """Holds one GPU's place, and none of its memory."""

    def gpu(self) -> int:
        import ray

        return ray.get_gpu_ids()[0]


if __name__ == "__main__":
    raise SystemExit(main())
