"""Run a study of learning: many short runs, seed by seed, side by side; a line for each.

python -m benchmarks.learning.study study/eight sweep=study-eight --cores 2
python -m benchmarks.learning.study study/113m sweep=study-113m --gpus 0,1 --each 6

Words are as for recipes.grpo. Each process holds one place, a CPU core or a share of a GPU, and
does run after run with one thread. All cells of one seed begin before any of the next, so that a
study that is stopped is balanced. A run's line is kept when it ends, in `FOLDER/runs.jsonl`, which
`benchmarks.learning.judge` reads; the same line does what is missing. So a study may be cut off:
`timeout 1200 python -m ...` ends all of its processes. `--each` gains by NVIDIA MPS alone
(`nvidia-cuda-mps-control -d`).

A policy is validated twice at the same steps, on the same problems: in the cell's own engine, as
training does, and in a BF16 engine. The second tells learning; how the two differ on the last
weights tells serving.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import SimpleQueue, get_context
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
import transformers

from fp8_nemo.glue.refit import refit_stream
from fp8_nemo.local.engine import Engine
from fp8_nemo.local.grpo import GrpoLoop
from fp8_nemo.local.modules.deterministic import repeat_exactly
from fp8_nemo.local.rollout import rewarded
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.compose import ComposeError, compose
from fp8_nemo.recipe.model_dir import model_path, weights_digest
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.plain import read_json, to_json
from fp8_nemo.recipe.problems import Problem
from fp8_nemo.recipe.settled import VALIDATION_PROBLEMS
from fp8_nemo.runs.frozen_code import code_dir
from fp8_nemo.runs.metrics import write_whole
from fp8_nemo.runs.provenance import commit, environment
from fp8_nemo.runs.run_dir import now

RUNS = "runs.jsonl"
LAST_SAMPLES = 2
"""Answers to each held-out problem, of the last weights, in each engine."""
MEANS = (
    *("mismatch/kl", "mismatch/abs_log_ratio_p99", "mismatch/token_mult_prob_error"),
    *("correction/clipped_fraction", "correction/masked_fraction"),
    *("correction/clipped_advantage", "correction/masked_advantage"),
    *("train/entropy", "train/kl", "train/clip_fraction", "rollout/mean_length"),
)
"""Metrics of which a run's mean over its steps is kept."""
LARGEST = ("train/grad_norm", "train/ratio_max", "mismatch/abs_log_ratio_max", "health/state")
"""Metrics of which a run's largest value is kept."""


def outcome(plan: Plan) -> dict[str, Any]:
    """Train a plan in a directory that is thrown away; return what a study keeps of it."""
    began = now()
    curves: dict[str, dict[int, float]] = {"own": {}, "bf16": {}}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        loop = GrpoLoop(plan, Path(folder))
        engine = Engine(loop.policy.model.config, _bf16().precision, loop.policy.device)

        def report(row: dict[str, Any]) -> None:
            """Keep a step, and validate in BF16 where the cell's own engine did."""
            rows.append(row)
            if "val/accuracy" in row:
                step = row["step"]
                _load(engine, loop)
                curves["own"][step] = row["val/accuracy"]
                curves["bf16"][step] = accuracy(loop, engine, VALIDATION_PROBLEMS, 1, step)

        loop.train(report)
        last = {
            name: accuracy(loop, each, len(loop.problems.validation), LAST_SAMPLES, len(rows))
            for name, each in (("own", loop.engine), ("bf16", engine))
        }
    steps = [row for row in rows if row["step"]]
    return {
        "started": began,
        "ended": now(),
        "validations": curves,
        "last": last,
        "reward": [round(row["reward/mean"], 4) for row in steps],
        "kl": [float(f"{row['mismatch/kl']:.3g}") for row in steps],
        "means": {key: fmean(found) for key in MEANS if (found := _series(steps, key))},
        "largest": {key: max(found) for key in LARGEST if (found := _series(steps, key))},
    }


def accuracy(loop: GrpoLoop, engine: Engine, problems: int, samples: int, stream: int) -> float:
    """Return the share of right answers to held-out problems that an engine samples.

    Two engines of one run and one `stream` take the same random numbers.
    """
    asked: list[Problem] = loop.problems.validation[:problems] * samples
    generator = torch.Generator(loop.policy.device)
    generator.manual_seed(10**6 * stream + loop.recipe.seed)
    right = []
    for start in range(0, len(asked), VALIDATION_PROBLEMS):
        part = asked[start : start + VALIDATION_PROBLEMS]
        prompts = [loop.chat.prompt(problem.input) for problem in part]
        longest = loop.settled.response_tokens
        batch = engine.generate(prompts, loop.chat, longest, generator)
        found = rewarded(batch, part, loop.chat, loop.algorithm, longest, loop.reward)
        right += found.right_B.tolist()
    return fmean(right)


def _load(engine: Engine, loop: GrpoLoop) -> None:
    """Give a BF16 engine the policy's weights."""
    weights, layers = loop.policy.named_weights(), loop.num_layers
    stream = refit_stream(weights, _bf16().precision, {}, num_layers=layers, verify="off", number=0)
    engine.refit(stream, "off")


@cache
def _bf16() -> Recipe:
    return compose(["precision=bf16", "model=tiny-llama"])[0]


def _series(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def run(plan: Plan, made_by: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's line: what it is, what made it, what came out."""
    start = time.process_time()
    found: dict[str, Any] = {"cell": plan.cell, "seed": plan.recipe.seed, "run": plan.run_name}
    found |= {**made_by, **_machine(), "weights": weights_digest(model_path(plan.recipe.model))}
    return found | outcome(plan) | {"cpu_seconds": round(time.process_time() - start, 1)}


@cache
def _machine() -> dict[str, str]:
    """Return what this process runs on: `{"device": "AMD EPYC", "torch": "2.13.0+cpu"}`."""
    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else environment()["hardware"]["processor"]
    return {"device": device, "torch": torch.__version__}


def _begin(places: SimpleQueue[str]) -> None:
    """Give a process its place, one thread, and kernels that repeat themselves."""
    os.environ["CUDA_VISIBLE_DEVICES"] = places.get()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    repeat_exactly()


def all_runs(
    plans: Sequence[Plan], places: Sequence[str], made_by: Mapping[str, Any], file: Path
) -> int:
    """Do runs, as many at once as there are places; keep each line as it ends.

    Args:
        plans: in the order in which they begin.
        places: what each process sees as CUDA_VISIBLE_DEVICES; on a CPU core nothing.
        made_by: what every line says of the code.
        file: of the lines.

    Returns:
        1 if a run failed; the others are done all the same.
    """
    context = get_context("spawn")
    queue: SimpleQueue[str] = context.SimpleQueue()
    for place in places:
        queue.put(place)
    code = 0
    with ProcessPoolExecutor(len(places), context, _begin, (queue,)) as pool:
        asked = {pool.submit(run, plan, made_by): plan.run_name for plan in plans}
        for future in as_completed(asked):
            if error := future.exception():
                print(f"{asked[future]}: {error!r}", file=sys.stderr, flush=True)
                code = 1
                continue
            found = future.result()
            write_whole(file, file.read_text() + to_json(found) + "\n")
            print(f"{asked[future]}: {_short(found)}", flush=True)
    return code


def _short(found: Mapping[str, Any]) -> str:
    area = fmean(value for step, value in found["validations"]["bf16"].items() if step)
    return f"area {100 * area:.1f}, {found['cpu_seconds']:.0f} s"


def read(file: Path) -> list[dict[str, Any]]:
    """Return the runs that a file holds, a line each."""
    return [read_json(line) for line in file.read_text().splitlines()]


def main() -> int:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    places = parser.add_mutually_exclusive_group()
    places.add_argument("--cores", type=int, default=1, help="runs at once, each on a CPU core")
    places.add_argument("--gpus", default="", help="numbers; in the place of cores")
    parser.add_argument("--each", type=int, default=1, help="runs at once on one GPU")
    options, words = parser.parse_known_args()
    try:
        plans = sorted(compose_plans(["-m", *words]), key=lambda plan: plan.recipe.seed)
    except ComposeError as error:
        print(error, file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / RUNS
    file.touch()
    done = {line["run"] for line in read(file)}
    made_by = {"commit": commit(), "sources": code_dir(options.folder).name, "line": words}
    missing = [plan for plan in plans if plan.run_name not in done]
    gpus = options.gpus.split(",") if options.gpus else []
    return all_runs(missing, gpus * options.each or [""] * options.cores, made_by, file)


if __name__ == "__main__":
    sys.exit(main())
