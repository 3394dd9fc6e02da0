"""Ask whether BF16 rounding noise explains why NeMo RL's mismatch differs from the local backend's.

python -m benchmarks.numerics.rounding_noise --out benchmarks/results/rounding-noise-cpu.json

Samples once per precision with the local engine, then scores the same tokens on the train side:
`local` as it is; `unrounded` with activations in FP32, so that the sides differ by the engine's
BF16 roundings (attention still returns BF16); `noise A` with every linear's FP32 product times
1 + u, u uniform in +-A, before it is rounded to BF16: half an ulp is 2^-9. `stock weights` samples
anew from an engine whose weights were quantized by NeMo RL's formula; `same texts` is half the mean
squared log ratio of either engine over the texts of both, which no sampling sets apart. Rounding a
linear's output, or noise of 2^-9 after its rounding, would change nothing: the local backend rounds
there already.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Callable
from copy import copy, deepcopy
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn

from benchmarks import record
from benchmarks.numerics.stock_formula import stock_quantize_list
from fp8_nemo.correction.mismatch import LogprobPair, mismatch_metrics
from fp8_nemo.glue import refit
from fp8_nemo.local.engine import Batch, Decoder, Engine
from fp8_nemo.local.grpo import GrpoLoop
from fp8_nemo.local.modules.experts import Experts
from fp8_nemo.local.policy import Policy
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.recipe.model_dir import model_path
from fp8_nemo.recipe.plain import to_json
from fp8_nemo.runs.provenance import environment

MODELS = ("tiny-llama", "tiny-qwen3-moe")
PRECISIONS = ("bf16", "fp8-linear", "fp8-e2e", "fp8-kv-attn", "fp8-e2e-kv-attn")
PROMPTS = 3200
SEEDS = {-9: 3, -13: 1, -20: 1}  # by exponent of the noise


def with_noise(policy: Policy, size: float, seed: int) -> Policy:
    """Change the FP32 product of every linear and expert matrix by up to `size`, then round it."""
    generator = torch.Generator().manual_seed(seed)

    def after(multiply: Callable[..., Tensor], x: Tensor, *rest: Any) -> Tensor:
        y = multiply(x.float(), *rest)
        factor = torch.empty_like(y).uniform_(1 - size, 1 + size, generator=generator)
        return (y * factor).bfloat16()

    for module in policy.model.modules():
        if isinstance(module, (nn.Linear, Experts)):
            name = "product" if isinstance(module, Experts) else "forward"
            setattr(module, name, partial(after, getattr(module, name)))
    return policy


def sample(run: GrpoLoop) -> Batch:
    """Sample one batch as step 1 does: after a refit, FP8 KV with the scales of prompts."""
    if run.fp8_kv:
        run.progress.kv_scales = run._scales_of_prompts()
    run._refit(0)
    problems = islice(cycle(run.problems.train), PROMPTS)
    return run._sample(list(problems), torch.Generator().manual_seed(run.recipe.seed))


@torch.no_grad()
def half_square(engine: Engine, policy: Policy, batches: list[Batch]) -> float:
    """Return half the mean squared log ratio of the tokens of some texts, whoever sampled them."""
    squares = []
    for batch in batches:
        prompt = batch.tokens_BT.shape[1] - batch.response_mask_BR.shape[1]
        rows, mask = batch.tokens_BT.split(1, 1), batch.mask_BT.split(1, 1)
        start = batch.tokens_BT[:, :prompt], batch.mask_BT[:, :prompt]
        decoder = Decoder(engine.model, *start, len(rows) - prompt)
        logprob_BV, rollout = decoder.first(), []
        for place in range(prompt, len(rows)):
            rollout.append(logprob_BV.gather(1, rows[place]))
            if place + 1 < len(rows):
                logprob_BV = decoder.next(rows[place], mask[place])
        scored_BR = torch.cat(rollout, dim=1)
        pair = LogprobPair(policy.logprobs(batch), scored_BR, batch.response_mask_BR)
        squares.append(pair.log_ratio_N.square())
    return torch.cat(squares).mean().item() / 2


def measure(model: str, precision: str, folder: Path) -> dict[str, Any]:
    """Return `mismatch/kl` of every variant, one number per repetition."""
    [plan] = compose_plans([f"model={model}", f"precision={precision}", "grpo=demo"])
    run = GrpoLoop(plan, folder)

    path, device = model_path(run.recipe.model), run.policy.device
    fresh = partial(Policy, path, run.recipe.precision, 0.0, device)

    def kl(batch: Batch, policy: Policy) -> float:
        pair = LogprobPair(policy.logprobs(batch), batch.rollout_BR, batch.response_mask_BR)
        return mismatch_metrics(pair)["mismatch/kl"]

    def noisy(batch: Batch, power: int) -> list[float]:
        return [kl(batch, with_noise(fresh(), 2**power, seed)) for seed in range(SEEDS[power])]

    batch, unrounded = sample(run), fresh()
    unrounded.model.float()
    found = {"local": [kl(batch, run.policy)], "unrounded": [kl(batch, unrounded)]}
    found |= {f"noise 2^{power}": noisy(batch, power) for power in SEEDS}
    if precision != "bf16":
        ours = copy(run.engine)
        ours.model = deepcopy(run.engine.model)
        with patch.object(refit, "quantize_list", stock_quantize_list):
            stock = sample(run)
        for name, engine in (("same texts, ours", ours), ("same texts, stock weights", run.engine)):
            found[name] = [half_square(engine, run.policy, [batch, stock])]
        found["stock weights"] = [kl(stock, run.policy)]
        found["stock weights, noise 2^-9"] = noisy(stock, -9)
    medians = {name: median(values) for name, values in found.items()}
    about = {"model": model, "precision": precision, "tokens": int(batch.response_mask_BR.sum())}
    return about | {"median": medians, "repetitions": found}


def main() -> None:
    """Measure every precision and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    transformers.logging.disable_progress_bar()
    rows = []
    for model, precision in product(MODELS, PRECISIONS):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(model, precision, Path(folder)))
        print(model, precision, rows[-1]["median"], flush=True)
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip()
    content = {"command": record.command(), "commit": commit, "environment": environment()}
    out.write_text(to_json(content | {"cells": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
