"""How long an optimizer's state takes to the host and back, as NeMo RL moves it and as we do.

python -m benchmarks.speed.move_optimizer --out FILE.json [--gib 9.4] [--repetitions 3]

One GPU, tensors as the distributed optimizer of Llama 3.1 8B holds them on one of 8 GPUs: per
weight a shard of two FP32 moments. By turns, on one machine; medians and raw seconds.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks import record
from fp8_nemo.glue.wire import named_shapes
from fp8_nemo.nemo.host_memory import HostState, State
from fp8_nemo.plan.memory import GIB
from fp8_nemo.recipe.compose import compose


def state_of(gib: float) -> list[State]:
    """Make two FP32 moments of each weight's shard, `gib` GiB in all."""
    [recipe] = compose(["model=llama31-8b", "backend=nemo"])
    sizes = [math.prod(shape) for shape in named_shapes(recipe.model.shape).values()]
    share = gib * GIB / (8 * sum(sizes))
    return [
        {
            name: torch.rand(max(1, int(size * share)), device="cuda")
            for name in ("exp_avg", "exp_avg_sq")
        }
        for size in sizes
    ]


def stock_to(device: str, states: list[State]) -> None:
    """Move states as NeMo RL's `move_optimizer(device)` does."""
    for state in states:
        for name, value in state.items():
            state[name] = value.to(device)


def clocked(call: Callable[[list[State]], None], states: list[State]) -> float:
    """Return the seconds until the device is idle again."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call(states)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return time.perf_counter() - start


def main() -> None:
    """Measure the moves of the optimizer, print the rows, and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    record.add_options(parser)
    parser.add_argument("--gib", type=float, default=9.4)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    record.need("torch")
    states, host = state_of(options.gib), HostState()
    first = clocked(host.to_host, states) + clocked(host.to_device, states)
    raw: dict[str, list[float]] = {"stock down": [], "stock up": [], "ours down": [], "ours up": []}
    for _ in range(options.repetitions):
        raw["stock down"].append(clocked(partial(stock_to, "cpu"), states))
        raw["stock up"].append(clocked(partial(stock_to, "cuda"), states))
        raw["ours down"].append(clocked(host.to_host, states))
        raw["ours up"].append(clocked(host.to_device, states))
    rows: list[dict[str, Any]] = [
        {"way": way, "GB/s": options.gib * GIB / 1e9 / median(each)} | record.repeated(each)
        for way, each in raw.items()
    ]
    record.keep(options.out, options.commit, gib=options.gib, rows=rows, first=first)
    shown = [{key: row[key] for key in ("way", "median", "GB/s")} for row in rows]
    record.show(f"{options.gib} GiB", shown)


if __name__ == "__main__":
    main()
