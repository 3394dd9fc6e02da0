"""Run a study of learning: many short runs in one process, seed by seed; a line for each.

OMP_NUM_THREADS=1 python -m benchmarks.learning.study study/eight sweep=study-eight

Words are as for recipes.grpo. All cells of one seed run before any of the next, so that a study
that is stopped is balanced; the same line goes on behind the last whole run. What is kept is
`FOLDER/runs.jsonl`, which `benchmarks.learning.judge` reads.

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
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

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
from fp8_nemo.recipe.options import Recipe
from fp8_nemo.recipe.plain import read_json, to_json
from fp8_nemo.recipe.problems import Problem
from fp8_nemo.recipe.settled import VALIDATION_PROBLEMS
from fp8_nemo.runs.frozen_code import code_dir
from fp8_nemo.runs.metrics import write_whole
from fp8_nemo.runs.provenance import commit

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
    began = _now()
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
        "ended": _now(),
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


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def read(file: Path) -> list[dict[str, Any]]:
    """Return the runs that a file holds, a line each."""
    return [read_json(line) for line in file.read_text().splitlines()]


def main() -> int:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("folder", type=Path)
    options, words = parser.parse_known_args()
    try:
        plans = sorted(compose_plans(["-m", *words]), key=lambda plan: plan.recipe.seed)
    except ComposeError as error:
        print(error, file=sys.stderr)
        return 2
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    repeat_exactly()
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / RUNS
    file.touch()
    done = {line["run"] for line in read(file)}
    made_by = {"commit": commit(), "sources": code_dir(options.folder).name, "line": words}
    for plan in plans:
        if plan.run_name in done:
            continue
        named = {"cell": plan.cell, "seed": plan.recipe.seed, "run": plan.run_name}
        start = time.process_time()
        found: dict[str, Any] = named | made_by
        found |= {"weights": weights_digest(model_path(plan.recipe.model))}
        found |= outcome(plan) | {"cpu_seconds": round(time.process_time() - start, 1)}
        write_whole(file, file.read_text() + to_json(found) + "\n")
        area = fmean(value for step, value in found["validations"]["bf16"].items() if step)
        print(f"{plan.run_name}: area {100 * area:.1f}, {found['cpu_seconds']:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
