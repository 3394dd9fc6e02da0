"""What real steps inside NeMo RL took, beside BF16's and beside what the plan had said of them.

python -m recipes.grpo model=llama31-8b model.path=models/8b-shape model.shape.layers=8 ...
python -m benchmarks.speed.real_steps --out FILE.json --runs RUN_DIR... [--first 3] [--stock LOG...]

Each run is NeMo RL's own GRPO loop, started as a user starts it; random weights answer up to the
limit. Seconds are medians from step `--first` on, with every step's own beside them. `mfu` is the
model's operations over BF16's peak, of training, and of the logprob pass; `plan` is what
`recipes.plan` estimates for answers of the length that they had. `--stock` adds what NeMo RL's own
`examples/run_grpo.py` printed of the same work, a row for each log, named after its file.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import record
from fp8_nemo.nemo.step_metrics import TIMES
from fp8_nemo.plan.memory import memory_per_gpu
from fp8_nemo.plan.speed import GPU_SPEED
from fp8_nemo.plan.step_time import Lengths, attention_work, layer_work, step_seconds
from fp8_nemo.recipe.settled import Settled
from fp8_nemo.report.runs import FinishedRun, find_runs, read_run

PHASES = ("rollout", "logprob", "train", "refit", "step")
PRINTED = re.compile(r"^ +• (?P<timer>[\w/ ]+): (?P<seconds>[\d.]+)s", re.MULTILINE)
LENGTH = re.compile(r"Mean Generation Length: ([\d.]+)")


def row_of(run: FinishedRun, first: int, prompt: float) -> dict[str, Any]:
    """Return medians, raw seconds, utilization and the plan's estimate of one run."""
    rows = [row for row in run.rows if row.get("step", 0) >= first and "time/step" in row]
    settled = run.plan.settled
    raw = {phase: [row[f"time/{phase}"] for row in rows] for phase in PHASES}
    lengths = Lengths(prompt, median(row["rollout/mean_length"] for row in rows))
    seconds = {phase: median(each) for phase, each in raw.items()}
    said = step_seconds(settled, lengths)
    return {
        "precision": run.plan.recipe.precision.name,
        "layers": run.plan.recipe.model.shape.layers,
        "steps": len(rows),
        "answer": lengths.answer,
        **seconds,
        "rest": seconds["step"] - sum(seconds[each] for each in PHASES[:-1]),
        "mfu_train": mfu(settled, lengths, seconds["train"]),
        "mfu_logprob": mfu(settled, lengths, seconds["logprob"], trains=False),
        "layout": settled.layout._asdict(),
        "plan": said._asdict() | {"step": said.total},
        "plan_memory_gib": {
            phase: sum(parts.values()) / 2**30
            for phase, parts in memory_per_gpu(settled).phases.items()
        },
        "raw": raw,
    }


def row_of_log(log: Path, first: int) -> dict[str, Any]:
    """Return medians and raw seconds of what NeMo RL printed after each step.

    Args:
        log: of `examples/run_grpo.py`.
        first: step that counts first.
    """
    text = log.read_text()
    steps = [
        {TIMES[timer]: float(seconds) for timer, seconds in PRINTED.findall(step) if timer in TIMES}
        for step in text.replace("Total step time", "total_step_time").split("⏱️  Timing:")[first:]
    ]
    lengths = [float(each) for each in LENGTH.findall(text)[first - 1 :]]
    raw = {phase: [step[f"time/{phase}"] for step in steps] for phase in PHASES}
    seconds = {phase: median(each) for phase, each in raw.items()}
    rest = seconds["step"] - sum(seconds[each] for each in PHASES[:-1])
    counts = {"steps": len(steps), "answer": median(lengths)}
    return {"recipe": log.stem, **counts, **seconds, "rest": rest, "raw": raw}


def mfu(settled: Settled, lengths: Lengths, seconds: float, *, trains: bool = True) -> float:
    """Return the model FLOP utilization of a pass over a step's sequences, of BF16's peak.

    Args:
        settled: the run.
        lengths: lengths of its prompts and answers.
        seconds: time that the pass took.
        trains: forward and backward, or forward alone. Recomputed layers do not count, but the
            half of attention's forward that FlashAttention repeats in its backward does (1% of
            the sum at 4k tokens, 4% at 16k). The frozen weights of LoRA have no gradient.
    """
    shape = settled.recipe.model.shape
    products = 2.0 if settled.recipe.lora.is_on else 3.0
    work, ways = layer_work(shape), (products, 3.5) if trains else (1.0, 1.0)
    linear = ways[0] * (shape.layers * (work.quantized + work.other) + work.end)
    attention = ways[1] * shape.layers * attention_work(shape, lengths)
    tokens = settled.sequences_per_step * lengths.sequence
    flops = tokens * (linear + attention) / settled.train_gpus
    return flops / seconds / GPU_SPEED[settled.recipe.cluster.gpu].bf16


def against_bf16(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each row with its phases' speed-up over BF16's of as many layers."""
    rows = list(rows)
    plain = {row["layers"]: row for row in rows if row["precision"] == "bf16"}
    for row in rows:
        if (base := plain.get(row["layers"])) and row is not base:
            row["times_bf16"] = {each: base[each] / row[each] for each in PHASES}
    return rows


def main() -> None:
    """Read the runs, print a table, write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    record.add_options(parser)
    parser.add_argument("--runs", type=Path, nargs="+", required=True)
    parser.add_argument("--first", type=int, default=3, help="step that counts first")
    parser.add_argument("--stock", type=Path, nargs="*", default=[], help="logs of NeMo RL alone")
    parser.add_argument("--prompt", type=float, default=7, help="mean tokens of a prompt")
    options = parser.parse_args()
    runs = [read_run(each) for folder in options.runs for each in find_runs(folder)]
    rows = against_bf16(row_of(run, options.first, options.prompt) for run in runs)
    several = len({row["layers"] for row in rows}) > 1
    environments = {
        row["precision"] + f", {row['layers']} layers" * several: run.environment
        for row, run in zip(rows, runs, strict=True)
    }
    stock = [row_of_log(each, options.first) for each in options.stock]
    record.keep(options.out, options.commit, rows=rows, stock=stock, environments=environments)
    shown = ("precision", "layers", "steps", *PHASES, "mfu_train", "mfu_logprob")
    record.show("seconds of a step", [{key: row[key] for key in shown} for row in rows])
    if stock:
        shown = ("recipe", "steps", "answer", *PHASES)
        record.show("NeMo RL's own recipes", [{key: row[key] for key in shown} for row in stock])


if __name__ == "__main__":
    main()
