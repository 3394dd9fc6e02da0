"""Measure the host memory that a conversion and a checkpoint take inside NeMo RL's policy worker.

python -m benchmarks.speed.staging --path models/8b2 --model llama31-8b --layers 2 \
    --out benchmarks/results/staging-h200.json [-- KEY=VALUE ...]

The worker is `Fp8PolicyWorkerImpl`, as in `benchmarks.speed.train_worker`, alone on one GPU. It
converts the model, trains once, then saves a checkpoint twice: by NeMo RL's `save_checkpoint`, then
by ours, which gives staged memory back. Rows are GiB of the host that are not available, over
those before the worker was made: the `most` while it worked, and what is `left` once it has. Files
are written to disk, whose pages the system takes back by itself. Ours saves second, with what the
first save left still there. `weights` and `state` are GiB by the plan's formulas: what is trained,
in BF16, and a checkpoint.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

from benchmarks import record
from benchmarks.speed.train_worker import add_options, alone, batch_of, packed, worker_of
from fp8_nemo.launch.room import room
from fp8_nemo.plan.memory import GIB, checkpoint_gib, trained_parameters
from fp8_nemo.plan.plan import Plan

LENGTH, SEQUENCES = 2048, 8
EVERY = 0.05
"""Seconds between two looks at the host's memory."""


def watched(work: Callable[[], Any], taken: Callable[[], float]) -> tuple[Any, dict[str, float]]:
    """Do some work: what it returns, and the GiB taken at most, and left, and its seconds."""
    seen, done = [taken()], Event()

    def look() -> None:
        while not done.wait(EVERY):
            seen.append(taken())

    looking, began = Thread(target=look, daemon=True), time.perf_counter()
    looking.start()
    try:
        found = work()
    finally:
        done.set()
        looking.join()
    seconds = time.perf_counter() - began
    gc.collect()
    return found, {"most": max(seen), "left": taken(), "seconds": seconds}


def train(worker: Any, config: Any, plan: Plan) -> None:
    """Train once, so that there is a state of the optimizer to save."""
    from nemo_rl.algorithms.loss import ClippedPGLossFn

    shard = packed(config, batch_of(plan, SEQUENCES, LENGTH), SEQUENCES * LENGTH)
    worker.prepare_for_training()
    worker.train(shard, ClippedPGLossFn(config.loss_fn), gbs=shard.size)


def main() -> None:
    """Make the worker, train, save twice, write the file after each row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser, "llama31-8b")
    parser.add_argument("--folder", type=Path, help="on a disk, for what is written; /tmp if unset")
    parser.set_defaults(length=LENGTH, sequences=SEQUENCES)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with alone(parser, options, options.folder) as (plan, scratch):
        import nemo_rl.models.policy.workers.megatron_policy_worker as stock
        import torch

        torch.zeros(1, device="cuda")  # the device's own part is none of it
        before = room(plan)["memory"]

        def taken() -> float:
            return before - room(plan)["memory"]

        def keep(what: str, row: dict[str, float]) -> None:
            rows.append({"what": what, **row})
            settled = plan.settled
            record.keep(
                options.out, options.commit, rows=rows,
                weights=2 * trained_parameters(settled) / GIB, state=checkpoint_gib(settled),
            )  # fmt: skip
            print(rows[-1], flush=True)

        (worker, config), row = watched(partial(worker_of, plan, scratch), taken)
        keep("conversion, ours", row)
        _, row = watched(partial(train, worker, config, plan), taken)
        keep("a trained step", row)
        saves = {
            "checkpoint, NeMo RL's": stock.MegatronPolicyWorkerImpl.save_checkpoint,
            "checkpoint, ours": type(worker).save_checkpoint,
        }
        for n, (what, save) in enumerate(saves.items()):
            folder = scratch / f"step_{n}"
            places = str(folder / "weights"), str(folder / "optimizer")
            _, row = watched(partial(save, worker, *places), taken)
            keep(what, row)
    record.show(f"{options.model}, GiB of the host", rows)


if __name__ == "__main__":
    main()
