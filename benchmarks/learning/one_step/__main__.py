"""What a correction does in one step: the same step from the same weights, cell by cell.

OMP_NUM_THREADS=1 python -m benchmarks.learning.one_step --folder study/one-step \
    --out benchmarks/results/one-step-cpu.json

BF16 trains once for each study, and its weights and second moments are kept at twenty steps. From
each of them every cell does one rollout and one update, a few times over. All cells are asked the
same prompts with the same random numbers, so most of their answers are the same, and a difference
between two cells has little noise. Cells that share an engine share its answers.

Nothing that is compared with is sampled: one answer alone is right, so that a policy's expected
accuracy on the held-out problems is the mean probability of their answers, and BF16's expected
gradient follows from the gradients of such probabilities (`Bench.expected_gradient`).

An update is the recipe's: loss, clipping, AdamW, rounding to BF16. Where a step has one, it is
without momentum: it does at once what momentum would spread over some ten steps. Where it has four,
momentum is the run's.

The same line goes on behind the last whole checkpoint. `judge.py` summarizes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from benchmarks.learning.one_step.judge import Estimate, summary
from benchmarks.learning.one_step.measure import Bench
from benchmarks.learning.one_step.starts import Study, starts
from benchmarks.record import add_options, keep, show
from fp8_nemo.recipe.plain import read_json
from fp8_nemo.runs.frozen_code import code_dir
from fp8_nemo.runs.provenance import commit
from fp8_nemo.runs.run_dir import now

MEASURE = ("starts", "measure", "expected", "moments")
"""Files whose digest stands in the results."""
SHOWN = ("expected gain", "along", "sideways square", "in BF16, from BF16", "in BF16, from none")
SIXTHS, BETWEEN = tuple(range(6, 61, 6)), tuple(range(3, 61, 6))
STUDIES = {
    "dense": Study("tiny-llama", 1, 1e-4, (*SIXTHS, *BETWEEN)),
    "experts": Study("tiny-qwen3-moe", 1, 1e-4, SIXTHS),
    "dense four updates": Study("tiny-llama", 4, 2e-4, SIXTHS, repetitions=3),
    "experts four updates": Study("tiny-qwen3-moe", 4, 2e-4, SIXTHS, repetitions=3),
}
"""Rates: the demo's, and that of the stress test of two cores, four updates a step."""


def sources() -> dict[str, str]:
    """Return digests of the package's sources, and of what measures here."""
    ours = sorted(Path(__file__).with_name(f"{name}.py") for name in MEASURE)
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in ours)).hexdigest()[:12]
    return {"fp8_nemo": code_dir(Path()).name, "one_step": digest}


def main() -> None:
    """Do the checkpoints that are missing, a study after the other."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="of the runs' weights")
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=list(STUDIES))
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    done: list[dict[str, Any]] = []
    if options.out.exists():
        done = read_json(options.out.read_bytes())["checkpoints"]
    for name in options.studies:
        study, known = STUDIES[name], {each["step"] for each in done if each["study"] == name}
        if known >= {*study.steps}:
            continue
        bench = Bench(study)
        for step, start in starts(study, options.folder / name.replace(" ", "-")).items():
            if step in known:
                continue
            head = {"study": name, "step": step, "started": now()} | _code()
            spent = time.process_time()
            found = bench.checkpoint(start, step)
            tail = {"ended": now(), "cpu_seconds": time.process_time() - spent}
            done.append(rounded(head | tail | found))
            write(options, done)
            print(name, step, f"{tail['cpu_seconds']:.0f} s of CPU", flush=True)
    write(options, done)
    show("one step", [shown(row) for row in summary(done)])


def shown(row: dict[str, Any]) -> dict[str, str]:
    """Return what a terminal shows of a row of the summary."""
    numbers = {name: Estimate(**row[name]).text("+.2f") for name in SHOWN if name in row}
    return {"study": row["study"], "cell": row["cell"]} | dict.fromkeys(SHOWN, "-") | numbers


def write(options: argparse.Namespace, done: list[dict[str, Any]]) -> None:
    """Write all that there is."""
    studies = {name: vars(study) for name, study in STUDIES.items()}
    times = {
        "started": min(each["started"] for each in done),
        "ended": max(each["ended"] for each in done),
    }
    keep(
        options.out,
        options.commit,
        **times,
        studies=studies,
        summary=rounded(summary(done)),
        checkpoints=done,
    )


@cache
def _code() -> dict[str, Any]:
    return {"commit": commit(), "sources": sources()}


def rounded(value: Any, digits: int = 5) -> Any:
    """Return a result with so many digits of each number, which is more than is known."""
    if isinstance(value, dict):
        return {key: rounded(each, digits) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each, digits) for each in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
