"""Run cells inside NeMo RL side by side, one per GPU, and keep what they measured.

python -m benchmarks.glue.nemo_cells --gpus 4 --models models --outputs outputs --out FILE.json \
    [--cells precisions,moe,graphs,resume,parallel,local]

Makes the two small models first (`recipes.make_model`), then works through the cells: `precisions`
are the five of `small-llama` times none, tis, mis; `moe` is `small-qwen3-moe` in bf16, fp8-linear
and fp8-e2e with tis; `graphs` is one cell with CUDA graphs, which the others leave off to start
sooner; `resume` goes on with a cell of `precisions` for two more steps; `parallel` needs two GPUs a
cell (tensor and expert parallel); `local` is the same small model, data and seed on the local
backend. A cell takes two minutes, mostly to start.
Needs NEMO_RL_ROOT and NeMo RL's packages (docs/install.md). Prints a line per cell as it ends.
"""

from __future__ import annotations

import argparse
import os
import queue
import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path
from typing import NamedTuple

from benchmarks.record import command
from benchmarks.record_runs import record
from fp8_nemo.recipe.plain import to_json
from fp8_nemo.report.runs import find_runs, read_run

PRECISIONS = ("bf16", "fp8-linear", "fp8-kv-attn", "fp8-e2e", "fp8-e2e-kv-attn")
SIZE = ("grpo=demo", "grpo.steps=3", "grpo.prompts_per_step=128", "grpo.generations_per_prompt=16")
GRAPHS = ("backend=nemo", "glue=stock", "cluster.interpreter=system", "cluster.gpu=h200")
NEMO = (*GRAPHS, "+nemo.policy.generation.vllm_cfg.enforce_eager=true")
MODELS = ("small-llama", "small-qwen3-moe")


class Cell(NamedTuple):
    """One run: `Cell("small-llama", 1, ("backend=nemo", "precision=bf16", "correction=tis"))`."""

    model: str
    gpus: int
    arguments: tuple[str, ...]


def cells(wanted: list[str]) -> list[Cell]:
    """Return the cells of the named groups, the most telling first."""
    llama, moe = MODELS
    groups = {
        "precisions": [
            Cell(llama, 1, (*NEMO, f"precision={precision}", f"correction={correction}"))
            for correction, precision in product(("tis", "none", "mis"), PRECISIONS)
        ],
        "moe": [
            Cell(moe, 1, (*NEMO, f"precision={precision}", "correction=tis"))
            for precision in ("bf16", "fp8-linear", "fp8-e2e")
        ],
        "graphs": [Cell(llama, 1, (*GRAPHS, "precision=fp8-e2e-kv-attn", "correction=seq-tis"))],
        "resume": [
            Cell(
                llama,
                1,
                (*NEMO, "precision=fp8-e2e-kv-attn", "correction=tis", "grpo.steps=5"),
            )
        ],
        "parallel": [
            Cell(
                llama,
                2,
                (
                    *(*NEMO, "precision=fp8-e2e-kv-attn", "correction=geo-mis"),
                    *("model.parallel.tensor=2", "model.parallel.rollout_tensor=2"),
                ),
            ),
            Cell(
                moe,
                2,
                (*NEMO, "precision=fp8-e2e", "correction=seq-mis", "model.parallel.expert=2"),
            ),
        ],
        "local": [
            Cell(llama, 1, ("backend=local", f"precision={precision}", "correction=tis"))
            for precision in PRECISIONS
        ],
    }
    return [cell for name in wanted for cell in groups[name]]


def run(cell: Cell, gpus: list[str], models: Path, outputs: Path) -> str:
    """Run one cell to its end and return a line about it."""
    words = [*SIZE, *cell.arguments, f"model={cell.model}", f"model.path={models / cell.model}"]
    words += [f"cluster.gpus_per_node={cell.gpus}", f"outputs={outputs}"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "fp8_nemo.recipes.grpo", *words],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    last = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1:]
    took = time.monotonic() - start
    return f"{done.returncode} {took:4.0f} s  {cell.model} {' '.join(cell.arguments[-2:])}: {last}"


def run_all(todo: list[Cell], gpus: int, models: Path, outputs: Path) -> list[str]:
    """Run the cells on as many lanes as they leave GPUs for; pairs of GPUs come last.

    Returns:
        A line per cell, as they ended: exit code, seconds, arguments, last line.
    """
    lines: list[str] = []
    for width in (1, 2):
        lanes = [[str(g) for g in range(at, at + width)] for at in range(0, gpus, width)]
        waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        for cell in todo:
            if cell.gpus == width:
                waiting.put(cell)
        threads = [
            threading.Thread(target=_lane, args=(waiting, lane, models, outputs, lines))
            for lane in lanes
            if len(lane) == width and int(lane[-1]) < gpus
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return lines


def _lane(
    waiting: queue.SimpleQueue[Cell], lane: list[str], models: Path, outputs: Path, lines: list[str]
) -> None:
    while True:
        try:
            cell = waiting.get_nowait()
        except queue.Empty:
            return
        lines.append(run(cell, lane, models, outputs))
        print(lines[-1], flush=True)


def make_models(models: Path, gpus: int) -> None:
    """Make the two starting models, on a GPU each where there are two, unless they exist."""
    makers = [
        subprocess.Popen(
            [sys.executable, "-m", "fp8_nemo.recipes.make_model", models / name, f"model={name}"],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": str(number % gpus)},
            stdout=subprocess.DEVNULL,
        )
        for number, name in enumerate(MODELS)
        if not (models / name).exists()
    ]
    codes = [maker.wait() for maker in makers]
    if any(codes):
        raise SystemExit("a model could not be made; its message stands above")


def main() -> None:
    """Make the models, run the cells, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--outputs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cells", default="precisions,moe,graphs,resume,parallel,local")
    parser.add_argument("--only", action="append", help="cells whose arguments hold this text")
    parser.add_argument("--commit", help="of the code, where it runs outside a clone")
    options = parser.parse_args()
    make_models(options.models, options.gpus)
    todo = [
        cell
        for cell in cells(options.cells.split(","))
        if not options.only or any(text in " ".join(cell.arguments) for text in options.only)
    ]
    lines = run_all(todo, options.gpus, options.models, options.outputs)
    runs = [record(read_run(path)) for path in find_runs(options.outputs)]
    content = {"command": command(), "commit": options.commit, "cells": lines}
    options.out.write_text(to_json(content | {"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
