"""What scales of heads gain over scales of layers where one K/V head has larger keys than the rest.

python -m benchmarks.numerics.kv_outliers --out benchmarks/results/kv-outliers-cpu.json

In every layer of the shipped tiny Llama the K projection of head 0 is multiplied by a power of two
and the Q projection of its query heads divided by it: both exact, so that the trainer computes the
same policy. `kl` is `mismatch/kl` of what the local engine samples with `fp8-kv-attn`, its scales
of the ranges of a step's prompts.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from fp8_nemo.correction.mismatch import LogprobPair, mismatch_metrics
from fp8_nemo.local.grpo import GrpoLoop
from fp8_nemo.plan.cells import compose_plans

POWERS = (0, 4, 8, 10, 12, 14, 16)
SCALES = ("layer", "head")
SAMPLED = 100
"""Prompts; each is answered as often as in a step."""


@torch.no_grad()
def plant(loop: GrpoLoop, factor: float) -> None:
    """Multiply K of head 0 in each layer, and divide Q of the heads that share it."""
    config, weights = loop.policy.model.config, loop.policy.parameters
    shared = config.num_attention_heads // config.num_key_value_heads * config.head_dim
    for layer in range(loop.num_layers):
        at = f"model.layers.{layer}.self_attn"
        weights[f"{at}.k_proj.weight"][: config.head_dim] *= factor
        weights[f"{at}.q_proj.weight"][:shared] /= factor


def row_of(power: int, scales: str, folder: Path) -> dict[str, Any]:
    """Sample once and return the mismatch."""
    [plan] = compose_plans([
        "precision=fp8-kv-attn", f"precision.kv_scales={scales}",
        f"outputs={folder}",
    ])  # fmt: skip
    loop = GrpoLoop(plan, folder)
    plant(loop, 2.0**power)
    loop.progress.kv_scales = loop._scales_of_prompts()
    loop._refit(0)
    batch = loop._sample(loop._problems_of(0, SAMPLED), torch.Generator().manual_seed(1))
    pair = LogprobPair(loop.policy.logprobs(batch), batch.rollout_BR, batch.response_mask_BR)
    found = mismatch_metrics(pair)
    kept = {"kl": found["mismatch/kl"], "p99": found["mismatch/abs_log_ratio_p99"]}
    return {"larger": 2**power, "kv_scales": scales, "tokens": int(pair.mask_BT.sum())} | kept


def main() -> None:
    """Measure every factor with both granularities."""
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for power, scales in itertools.product(POWERS, SCALES):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(row_of(power, scales, Path(folder)))
        record.keep(options.out, options.commit, rows=rows)
    record.show("Mismatch with outliers in the keys of one head", rows)


if __name__ == "__main__":
    main()
