"""How many of the engine's bytes a step changes, by format and learning rate, in local runs.

python -m benchmarks.learning.changed_bytes --out benchmarks/results/changed-bytes-cpu.json
python -m benchmarks.learning.changed_bytes --draw --out benchmarks/results/changed-bytes-cpu.json

`refit/changed_bytes` of the shipped tiny Llama, of whose linears all bytes are compared. `first`
is the first update, in which Adam moves every weight by the learning rate; `median` is of the
updates after it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import record
from fp8_nemo.local.grpo import GrpoLoop
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.runs import metrics, run_dir

RATES = (1e-6, 1e-5, 1e-4)
PRECISIONS = ("bf16", "fp8-linear", "nvfp4-w4a16")
STEPS = 20
FIGURE = Path("docs/figures/changed-bytes.svg")


def row_of(
    precision: str, rate: float, seed: int, outputs: Path, steps: int = STEPS
) -> dict[str, Any]:
    """Train a cell and return what its updates changed; the refit before them has no share."""
    [plan] = compose_plans([
        f"precision={precision}", f"grpo.learning_rate={rate}", f"seed={seed}",
        f"grpo.steps={steps}", "grpo.validate_first=false", "correction=tis",
        f"grpo.validate_every={steps}", f"outputs={outputs}",
    ])  # fmt: skip
    [frozen] = run_dir.freeze([plan])
    GrpoLoop(plan, frozen.path).train(lambda row: None)
    _, *rows = metrics.read_metrics(frozen.path)
    shares = [row["refit/changed_bytes"] for row in rows]
    found = {"precision": precision, "learning_rate": rate, "seed": seed}
    return found | {"first": shares[0], "median": median(shares[1:]), "shares": shares}


def draw(rows: list[dict[str, Any]]) -> None:
    """Draw the median over steps and seeds, a line a format."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "changed-bytes", "svg.fonttype": "none"}
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6))
    for precision in PRECISIONS:
        shares = [
            100 * median(row["median"] for row in rows
                         if (row["precision"], row["learning_rate"]) == (precision, rate))
            for rate in RATES
        ]  # fmt: skip
        axes.plot(RATES, shares, marker="o", label=precision)
    axes.set(
        xscale="log", yscale="log", xlabel="learning rate",
        ylabel="bytes changed by a step, %", title="What a refit changes in the engine, tiny Llama",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(FIGURE, metadata={"Date": None}, facecolor="white")


def main() -> None:
    """Run every cell, or draw what was run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--draw", action="store_true", help="draw the figure of a results file")
    record.add_options(parser)
    options = parser.parse_args()
    if options.draw:
        return draw(json.loads(options.out.read_text())["rows"])
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    seeds = range(1, options.seeds + 1)
    with tempfile.TemporaryDirectory() as folder:
        for cell in itertools.product(PRECISIONS, RATES, seeds):
            rows.append(row_of(*cell, Path(folder)))
            record.keep(options.out, options.commit, steps=STEPS, rows=rows)
    shown = [{key: row[key] for key in row if key != "shares"} for row in rows]
    record.show("Bytes of the engine's linears that a step changed", shown)


if __name__ == "__main__":
    main()
