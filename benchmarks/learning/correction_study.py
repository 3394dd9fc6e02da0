"""Whether a precision and a correction change what is learned: means over seeds, 95% intervals.

for lr in 2e-4 3e-4; do for cell in "precision=bf16,fp8-e2e correction=none" \
    "precision=fp8-linear correction=none,tis,mis" "precision=fp8-kv-attn correction=none,tis"; do
  python -m recipes.grpo -m $cell seed=1,2,3,4,5 grpo.steps=60 grpo.learning_rate=$lr \
      grpo.validate_every=20 outputs=study/$lr
done; done
python -m benchmarks.learning.correction_study study/2e-4 study/3e-4 --out FILE.json

Of every finished run: the last validation accuracy, the reward of the last ten steps, the mean KL.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import record
from fp8_nemo.report.compare import mean_of_seeds
from fp8_nemo.report.runs import find_runs, read_run

LAST = 10  # steps


def outcome(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the accuracy, reward and mismatch of one run."""
    accuracy = [row["val/accuracy"] for row in rows if "val/accuracy" in row]
    reward = [row["reward/mean"] for row in rows if "reward/mean" in row]
    kl = [row["mismatch/kl"] for row in rows if "mismatch/kl" in row]
    return {"accuracy": accuracy[-1], "reward": fmean(reward[-LAST:]), "kl": fmean(kl)}


def with_interval(values: list[float]) -> dict[str, float]:
    """Return the mean and half of the 95% interval."""
    found = mean_of_seeds(values)
    assert found and found.half is not None, "two seeds at least"
    return {"mean": found.mean, "half": found.half}


def main() -> None:
    """Read the runs, print the tables, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    record.add_options(parser)
    options = parser.parse_args()
    cells: dict[tuple[str, str], dict[int, dict[str, float]]] = defaultdict(dict)
    for folder in options.folders:
        for path in find_runs(folder):
            run = read_run(path)
            if run.state == "finished":
                key = (str(run.recipe.grpo.learning_rate), run.plan.cell)
                cells[key][run.recipe.seed] = outcome(run.rows)
    rows: list[dict[str, Any]] = []
    for (rate, cell), seeds in sorted(cells.items()):
        row: dict[str, Any] = {"learning_rate": float(rate), "cell": cell, "seeds": seeds}
        for key in ("accuracy", "reward", "kl"):
            row[key] = with_interval([found[key] for found in seeds.values()])
        rows.append(row)
        shown = " ".join(
            f"{key} {row[key]['mean']:.4g} +- {row[key]['half']:.2g}"
            for key in ("accuracy", "reward", "kl")
        )
        print(rate, cell, len(seeds), shown)
    record.keep(options.out, options.commit, rows=rows)


if __name__ == "__main__":
    main()
