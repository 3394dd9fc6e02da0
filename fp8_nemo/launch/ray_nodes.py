"""The Ray cluster of a Slurm job: `python -m fp8_nemo.launch.ray_nodes SECONDS NODE...`.

Waits until every node has joined, and names those that have not. slurm/node.sh gives each Ray node
a resource `slurm-NAME`, because two nodes may share a host name, or an address behind a bridge.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

import fp8_nemo

RESOURCE = "slurm-"


def main(arguments: list[str] | None = None) -> int:
    """0 when all are there, 1 when the time is up; `RAY_ADDRESS` names the cluster."""
    limit, *names = sys.argv[1:] if arguments is None else arguments
    connect(int(limit))
    missing = wait_for(names, int(limit))
    for name in missing:
        late = f"has not joined Ray within {limit} s; its part of the log says why"
        print(f"{name}: {late if int(limit) else 'is gone from Ray'}")
    if not missing and int(limit):
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
