"""How much closer replayed routes (R3) bring trainer and engine, by experts and by training.

python -m benchmarks.numerics.replayed_routes --out benchmarks/results/replayed-routes-cpu.json

A Qwen3-MoE of two layers, with random weights or taught to calculate, samples on the local backend.
The trainer scores the same tokens twice: sent where its own routers say, and where the engine's
said. `kl` and `replayed_kl` are the two `mismatch/kl`; `rerouted` is the share of routes that
differ, a route being the experts of a token in a layer.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from fp8_nemo.correction.mismatch import LogprobPair, mismatch_metrics
from fp8_nemo.export.make_model import Teaching, make_chat, new_model, save_model, train_model
from fp8_nemo.local.engine import Batch
from fp8_nemo.local.grpo import GrpoLoop
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.problems import load_problems

EXPERTS = ((4, 2), (16, 4), (64, 8), (128, 8))
"""In a layer, and of a token."""
TAUGHT = (0, 300)
"""Steps of `Teaching`."""
PRECISIONS = ("fp8-linear", "fp8-kv-attn")
SAMPLED = 200
"""Prompts; each is answered as often as in a step."""


def words(experts: int, each: int) -> list[str]:
    """Return the model's part of a command line."""
    shape = {"experts": experts, "experts_per_token": each}
    return ["model=tiny-qwen3-moe", *(f"model.shape.{key}={value}" for key, value in shape.items())]


def teach(folder: Path, line: list[str], steps: int) -> None:
    """Write a model with random weights, or one that was taught for some steps."""
    [recipe] = compose(line)
    chat = make_chat()
    model = new_model(recipe.model.shape, chat, recipe.seed)
    problems = load_problems(recipe.data, recipe.seed).train
    teaching = Teaching(steps, 128, 1.0e-3, 20)
    train_model(model, chat, problems, teaching=teaching, seed=recipe.seed, report=lambda *_: None)
    save_model(model, chat, folder)


def row_of(line: list[str], folder: Path) -> dict[str, Any]:
    """Sample once and score twice."""
    [plan] = compose_plans([*line, "replay=r3", f"outputs={folder}"])
    loop = GrpoLoop(plan, folder)
    loop.progress.kv_scales = loop._scales_of_prompts()
    loop._refit(0)
    batch = loop._sample(loop._problems_of(0, SAMPLED), torch.Generator().manual_seed(1))
    replayed, own = _mismatch(loop, batch), _mismatch(loop, replace(batch, routes_BTLA=None))
    return {
        "precision": loop.recipe.precision.name,
        "tokens": int(batch.response_mask_BR.sum()),
        "rerouted": loop._replay_metrics(batch)["replay/rerouted_fraction"],
        "kl": own["mismatch/kl"],
        "replayed_kl": replayed["mismatch/kl"],
        "p99": own["mismatch/abs_log_ratio_p99"],
        "replayed_p99": replayed["mismatch/abs_log_ratio_p99"],
    }


def _mismatch(loop: GrpoLoop, batch: Batch) -> dict[str, float]:
    logprobs = loop.policy.logprobs(batch, None, loop.routes)
    return mismatch_metrics(LogprobPair(logprobs, batch.rollout_BR, batch.response_mask_BR))


def main() -> None:
    """Measure every number of experts, random and taught, in every precision."""
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for taught, (experts, each) in itertools.product(TAUGHT, EXPERTS):
        line = words(experts, each)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            teach(folder / "model", line, taught)
            for precision in PRECISIONS:
                cell = [*line, f"model.path={folder}/model", f"precision={precision}"]
                row = {"experts": experts, "of_a_token": each, "taught_steps": taught}
                rows.append(row | row_of(cell, folder))
                record.keep(options.out, options.commit, rows=rows)
    record.show("Mismatch with the trainer's routes and with the engine's", rows)


if __name__ == "__main__":
    main()
