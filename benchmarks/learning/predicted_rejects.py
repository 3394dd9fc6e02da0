"""Whether a measurement predicts what later runs reject.

python -m benchmarks.learning.predicted_rejects RUN_DIR ... --out FILE.json --outputs FOLDER \
    --cell "precision=fp8-kv-attn grpo.steps=60" [--seeds ...] [--rates ...] [--masks ...]

Measures the given runs, takes for each statistic the bounds that would reject each share of their
tokens, runs new seeds of the cell with those bounds (`correction=tis` beside them), and compares
the share of tokens that they rejected over all steps. The interval is the 95% one of the mean over
the later runs' steps.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from fp8_nemo.correction.measure import measure, read_pairs
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.recipe.options.correction import Correction
from fp8_nemo.recipe.plain import to_json
from fp8_nemo.runs.metrics import read_metrics
from fp8_nemo.runs.provenance import environment
from fp8_nemo.runs.run_dir import run_path


def later(arguments: list[str]) -> list[dict[str, float]]:
    """Return rows of the runs that a line names; run them here if they do not exist."""
    subprocess.run(
        [sys.executable, "-m", "fp8_nemo.recipes.grpo", "-m", *arguments],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    plans = compose_plans(["-m", *arguments])
    rows = [row for plan in plans for row in read_metrics(run_path(plan))]
    return [row for row in rows if "correction/masked_fraction" in row]


def main() -> None:
    """Measure the runs' mismatch, train on with each mask, compare the rejects, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--outputs", type=Path, required=True)
    parser.add_argument("--seeds", default="11,12,13")
    parser.add_argument("--rates", default="0.02,0.1")
    parser.add_argument("--masks", default="token,geometric,mean-k3,max-k3")
    parser.add_argument("--cell", required=True, help="arguments of the cell, in one word")
    options = parser.parse_args()
    pairs = {at: pair for run in options.runs for at, pair in read_pairs(run).items()}
    measurement = measure(pairs)
    rows: list[dict[str, Any]] = []
    for mask, rate in product(options.masks.split(","), map(float, options.rates.split(","))):
        low, high = measurement.bounds(mask, rate)
        predicted = measurement.rejected(Correction(mask=mask, low=low, high=high))
        bounds = {"mask": mask, "low": low, "high": high, "name": f"tis-{mask}-{rate}"}
        settings = [f"correction.{k}={'null' if v is None else v}" for k, v in bounds.items()]
        found = later(
            ["correction=tis", *settings, f"seed={options.seeds}", f"outputs={options.outputs}",
             *options.cell.split()]
        )  # fmt: skip
        shares = [row["correction/masked_fraction"] for row in found]
        weights = [row["rollout/tokens"] for row in found]
        real = math.fsum(s * w for s, w in zip(shares, weights, strict=True)) / math.fsum(weights)
        half = 1.96 * stdev(shares) / math.sqrt(len(shares))
        within = abs(real - predicted) <= 0.02 or abs(real - predicted) <= half
        rows.append(
            {
                "mask": mask, "asked": rate, "low": low, "high": high, "predicted": predicted,
                "real": real, "interval": half, "within": within, "steps": len(shares),
                "kl": fmean(row["mismatch/kl"] for row in found),
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    content = {
        "command": " ".join(["python", *sys.argv]),
        "environment": environment(),
        "measured": {"tokens": measurement.tokens, "kl": measurement.kl, "source": list(pairs)},
        "rows": rows,
    }
    options.out.write_text(to_json(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
