"""What a step of a real recipe takes, put together from measured phases; and beside a real step.

python -m benchmarks.speed.step --out FILE.json --results ROLLOUT.json TRAIN.json GLUE.json \
    [--precisions bf16,fp8-kv-attn] [--tokens 4096] [-- model=llama31-8b cluster=slurm KEY=VALUE]
python -m benchmarks.speed.step --out FILE.json --results ... --run RUN_DIR

Prompts, generations, longest response, GPUs and layout are the plan's; `--tokens` is the mean
response (the longest, unless it is given), `--prompt` the mean prompt. Seconds of one step:

rollout      prompts at the measured prompt speed, then `tokens` at the measured decode speed of the
             nearest batch and context (speed.rollout; each within 15%)
logprob      one forward per micro-batch, twice with a reference policy (speed.train, `scored`)
train        forward and backward; the first micro-batch of each optimizer step quantizes weights
refit        a refit of this precision (glue --parts refit: `bytes`; `fused` of BF16)
recalibrate  what watching the ranges adds, per token (glue --parts ranges), under FP8 KV

Each number names its file; one that was not measured is an error that names the command. A
micro-batch that its sequences do not fill is charged as a full one: right where the host is late,
too much where the device is. Left out: exchange between GPUs beyond what the rows had, optimizer
and its ways to the host and back, data, reward, ends of uneven rollouts.
`--run` sets `time/*` of a run (median from step `--first` on, with its own mean length) beside it,
and so says how much that is.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import record
from fp8_nemo.nemo_config.checkout import host_of
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.settled import Settled
from fp8_nemo.report.runs import find_runs, read_run

ROLLOUT = {"bf16": "bf16", "fp8-linear": "fp8-linear-deepgemm", "fp8-kv-attn": "fp8-kv-attn",
           "fp8-e2e": "fp8-linear-deepgemm", "fp8-e2e-kv-attn": "fp8-kv-attn"}  # fmt: skip
"""The measured engine by precision: NeMo RL asks for DeepGEMM, training changes no rollout."""
EVEN = 0.9
"""Of the longest: sequences with such a mean are about equally long, and fit whole or not at all.

Shorter ones are taken to fill micro-batches.
"""
NEAR = 1.15
"""Of the batch and of the context: a rollout at 1,017 tokens takes the row at 1,131."""


class Missing(ValueError):
    """A measurement that no results file has; the command that makes it."""


class Found(NamedTuple):
    """Seconds and where they come from: `Found(41.2, "bench-train-8b-h200.json")`."""

    seconds: float
    source: str


class Load(NamedTuple):
    """Mean tokens of a sequence, and of a micro-batch at most: `Load(256, 3840, 4096, 1)`."""

    prompt: float
    response: float
    micro_batch: int
    together: float
    """Sequences of a micro-batch."""


Files = dict[str, dict[str, Any]]


def read_files(paths: Iterable[Path]) -> Files:
    """Return contents by file name."""
    return {path.name: json.loads(path.read_text()) for path in paths}


def load_of(plan: Plan, prompt: float, response: float | None) -> Load:
    """Return tokens as the plan limits them; a response as long as there is room, unless given."""
    if plan.nemo is None:
        raise SystemExit(f"{plan.cell} runs on the {plan.backend} backend: no speed of it is one")
    written = plan.nemo.overrides
    room = written["policy.max_total_sequence_length"] - prompt
    longest = min(room, written["policy.generation.max_new_tokens"])
    mean, tokens = min(response or longest, longest), plan.settled.micro_batch_tokens
    together = tokens / (prompt + mean)
    return Load(prompt, mean, tokens, int(together) if mean > EVEN * longest else together)


def rollout(settled: Settled, load: Load, files: Files) -> Found:
    """Return the seconds of all engines at work, each with its share of the sequences."""
    recipe, tensor = settled.recipe, settled.layout.rollout_tensor
    batch = settled.sequences_per_step / settled.engines
    context = load.prompt + load.response / 2
    name = ROLLOUT[recipe.precision.name]
    near = [
        (distance, row, file)
        for file, row in _rows(files)
        if row.get("regime") == "resident"
        and row["prompt_tokens_per_second"]
        and row.get("layers", whole(recipe)) == recipe.model.shape.layers
        and (row["model"], row["precision"]) == (recipe.model.name, name)
        and row.get("rollout_tensor", 1) == tensor
        and (distance := _apart(row, batch, context)) is not None
    ]
    if not near:
        raise Missing(
            f"rollout of {recipe.model.name} in {name}, batch {batch:.0f}, context {context:.0f}: "
            f"python -m benchmarks.speed.rollout --out FILE --model {recipe.model.name} "
            f"--precisions {name} --points {batch:.0f}x{context:.0f} "
            f"(of {whole(recipe)} layers and one GPU an engine: model.parallel.rollout_tensor=1)"
        )
    _, row, file = min(near, key=lambda each: each[0])
    prompts = batch * load.prompt / middle(row["prompt_tokens_per_second"])
    return Found(prompts + batch * load.response / middle(row["tokens_per_second"]), file)


def whole(recipe: Recipe) -> int:
    """Return the layers of the model in conf/model; a benchmark measures all unless it says so."""
    [usual] = compose([f"model={recipe.model.name}"])
    return usual.model.shape.layers


def _apart(row: dict[str, Any], batch: float, context: float) -> float | None:
    factors = (abs(math.log(row["batch"] / batch)), abs(math.log(row["context"] / context)))
    return sum(factors) if max(factors) <= math.log(NEAR) else None


def micro_batches(settled: Settled, load: Load) -> int:
    """Return the micro-batches that one data-parallel rank works through in a step."""
    return math.ceil(settled.sequences_per_step / load.together / settled.data_parallel)


def train(settled: Settled, load: Load, files: Files) -> Found:
    """Return the seconds of all micro-batches, forward and backward; a `first` one per update."""
    both, rc = ("forward", "backward"), settled.layout.recompute
    updates = settled.updates_per_step
    first, file = _micro_batch(settled, load, files, both, "first", rc)
    cached, _ = _micro_batch(settled, load, files, both, "cached", rc)
    count = micro_batches(settled, load)
    return Found(min(updates, count) * first + max(0, count - updates) * cached, file)


def logprob(settled: Settled, load: Load, files: Files) -> Found:
    """Return the seconds of a forward of all micro-batches; two forwards with a KL penalty."""
    passes = 2 if settled.kl_penalty else 1
    first, file = _micro_batch(settled, load, files, ("scored",), "first", False)
    cached, _ = _micro_batch(settled, load, files, ("scored",), "cached", False)
    return Found(passes * (first + (micro_batches(settled, load) - 1) * cached), file)


def _micro_batch(
    settled: Settled, load: Load, files: Files, passes: Sequence[str], which: str, recompute: bool
) -> Found:
    """Return seconds of the whole model: its ends, measured round one layer, and its layers."""
    one = _layer(settled, load, files, passes, which, False)
    layer = _layer(settled, load, files, passes, which, recompute)
    ends, file = _train_row(settled, load, files, which, "ends", False)
    around = sum(middle(ends[each]) for each in passes) / 1e3 - one
    return Found(around + settled.recipe.model.shape.layers * layer, file)


def _layer(
    settled: Settled, load: Load, files: Files, passes: Sequence[str], which: str, recompute: bool
) -> float:
    row, _ = _train_row(settled, load, files, which, "stack", recompute)
    return sum(middle(row[each]) for each in passes) / 1e3 / row["layers"]


def _train_row(
    settled: Settled, load: Load, files: Files, which: str, part: str, recompute: bool
) -> tuple[dict[str, Any], str]:
    model, variant = settled.recipe.model, settled.recipe.precision.train_linear
    parallel, held = settled.layout, model.shape.experts // settled.layout.expert
    wanted = {
        "model": model.name, "variant": variant, "part": part, "recompute": recompute,
        "microbatch": which if variant == "fp8" else "cached", "tokens": load.micro_batch,
        "tensor": parallel.tensor,
    }  # fmt: skip
    for file, row in _rows(files):
        is_one = "error" not in row and row.get("sequences", 1) == 1
        alike = is_one and all(row.get(key) == value for key, value in wanted.items())
        if alike and row["experts"] // row["expert"] == held:  # by exchange, or only as many
            return row, file
    start = f"torchrun --nproc-per-node {parallel.tensor}" if parallel.tensor > 1 else "python"
    cell = f" model.shape.experts={held}" if held else ""
    raise Missing(
        f"train, {part} of {model.name} in {variant}, {load.micro_batch} tokens, "
        f"recompute={recompute}: {start} -m benchmarks.speed.train --out FILE "
        f"--model {model.name} --tokens {load.micro_batch} --cases bf16,fp8 -- "
        f"model.parallel.tensor={parallel.tensor}{cell}"
    )


def refit(settled: Settled, _: Load, files: Files) -> Found:
    """Return a refit's seconds as NeMo RL's loop waits for it, with our glue.

    The same weights travel in every FP8 precision. Where BF16's own was not measured, `fused` of an
    FP8 engine stands for it: as many bytes from our worker, which that engine quantizes too.
    """
    recipe, fp8 = settled.recipe, [name for name in ROLLOUT if name != "bf16"]
    quantized = recipe.precision.rollout_linear == "fp8"
    content, file = _glue(recipe, files, "refit", fp8 if quantized else ["bf16", *fp8])
    kinds = ("bytes", "ledger") if quantized else ("fused",)  # of before: `ledger`
    kind = next((each for each in kinds if each in content), None)
    if kind is None:
        raise Missing(
            f"refit: {file} has no `{kinds[0]}`; benchmarks.glue.compare --parts refit makes it"
        )
    return Found(content[kind]["median"]["refit"], file)


def recalibrate(settled: Settled, load: Load, files: Files) -> Found:
    """Return what watching the ranges adds to the logprob forward, in BF16 training as in FP8.

    Nothing without FP8 KV.
    """
    recipe = settled.recipe
    if recipe.precision.rollout_kv != "fp8":
        return Found(0.0, "none: BF16 cache")
    content, file = _glue(recipe, files, "ranges", [recipe.precision.name, "fp8-kv-attn"])
    measured = content["tokens"] / int(_word(files[file], "cluster.gpus_per_node") or 1)
    ours = settled.sequences_per_step * (load.prompt + load.response) / settled.train_gpus
    return Found(max(0.0, content["overhead"]) * ours / measured, file)


def _glue(
    recipe: Recipe, files: Files, part: str, precisions: Sequence[str]
) -> tuple[dict[str, Any], str]:
    """Return the first of these precisions that was measured on this model.

    A refit's GPUs are shared, or not, as the recipe's are; other parts are of shared ones.
    """
    model, precision = recipe.model.name, recipe.precision.name
    shared, found = part != "refit" or not recipe.cluster.rollout_gpus, {}
    for file, content in files.items():
        layers = int(_word(content, "model.shape.layers") or whole(recipe))
        alike = _word(content, "model") == model and layers == recipe.model.shape.layers
        if alike and content.get(part) and content.get("colocated", True) == shared:
            found.setdefault(_word(content, "precision"), (content[part], file))
    for name in precisions:
        if name in found:
            return found[name]
    raise Missing(
        f"{part} of {model} in {precision}: python -m benchmarks.glue.compare --outputs outputs "
        f"--out FILE --parts {part} -- model={model} precision={precision} "
        f"cluster.gpus_per_node={'1' if shared else '2 cluster.rollout_gpus=1'} ..."
    )


def _word(content: dict[str, Any], key: str) -> str | None:
    words = content.get("command", "").split()
    return next((each.split("=", 1)[1] for each in words if each.startswith(f"{key}=")), None)


def _rows(files: Files) -> Iterable[tuple[str, dict[str, Any]]]:
    for file, content in files.items():
        rows = content.get("rows")
        yield from ((file, row) for row in rows or () if isinstance(row, dict))


def middle(number: float | dict[str, Any]) -> float:
    """Return a number, or the median of its repetitions."""
    return number["median"] if isinstance(number, dict) else number


PHASES = {"rollout": rollout, "logprob": logprob, "train": train, "refit": refit,
          "recalibrate": recalibrate}  # fmt: skip


def step(settled: Settled, load: Load, files: Files) -> dict[str, Found]:
    """Return the seconds of every phase, and of the step.

    Raises:
        Missing: measurements that no file has, one line for each.
    """
    found, missing = {}, []
    for phase, seconds in PHASES.items():
        try:
            found[phase] = seconds(settled, load, files)
        except Missing as error:
            missing.append(str(error))
    if missing:
        raise Missing("\n".join(dict.fromkeys(missing)))
    return found | {"step": Found(sum(each.seconds for each in found.values()), "the sum")}


def measured(rows: Iterable[dict[str, Any]], first: int) -> dict[str, float]:
    """Return median seconds of a run's phases from its step `first` on, and its mean response."""
    later = [row for row in rows if row.get("step", 0) >= first]
    keys = ("rollout/mean_length", *(f"time/{phase}" for phase in (*PHASES, "step")))
    held = {key: [row[key] for row in later if key in row] for key in keys}
    return {key.removeprefix("time/"): median(values) for key, values in held.items() if values}


def main() -> int:
    """Put the phases together, print a table, write the file; 2 if a measurement is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    record.add_options(parser)
    parser.add_argument("--results", type=Path, nargs="+", required=True, help="measured phases")
    parser.add_argument("--precisions", default=",".join(ROLLOUT))
    parser.add_argument("--prompt", type=float, default=256, help="mean tokens of a prompt")
    parser.add_argument("--tokens", type=float, help="mean tokens of a response")
    parser.add_argument("--run", type=Path, help="a folder with one run directory, to compare")
    parser.add_argument("--first", type=int, default=2, help="of the run's steps that count")
    parser.add_argument("arguments", nargs="*", help="of the cell, as for recipes.grpo")
    options = parser.parse_args()
    files, real = read_files(options.results), {}
    if options.run:
        [found] = find_runs(options.run)
        run = read_run(found)
        plans, real = [run.plan], measured(run.rows, options.first)
    else:
        usual = ["backend=nemo", "model=llama31-8b", "cluster=slurm", "correction=tis",
                 "cluster.interpreter=system"]  # fmt: skip
        cells = [
            [*usual, *options.arguments, f"precision={p}"] for p in options.precisions.split(",")
        ]
        plans = [plan for cell in cells for plan in compose_plans(cell, host_of)]
    rows, missing = [], []
    for plan in plans:
        load = load_of(plan, options.prompt, options.tokens or real.get("rollout/mean_length"))
        try:
            found = step(plan.settled, load, files)
        except Missing as error:
            missing.append(str(error))
            continue
        seconds = {phase: each.seconds for phase, each in found.items()}
        row = {"cell": plan.cell, "gpus": plan.settled.gpus, **load._asdict(), **seconds}
        if plan.recipe.precision.name != "bf16" and rows:
            row["times_bf16"] = rows[0]["step"] / seconds["step"]
        rows.append(row | {"sources": {phase: each.source for phase, each in found.items()}})
    if missing:
        print("not measured yet:", *dict.fromkeys("\n".join(missing).splitlines()), sep="\n  ")
        return 2
    if real:
        rows = [{"of": "predicted"} | rows[0], {"of": "measured", "cell": rows[0]["cell"]} | real]
    how = "Sums of phases that the files under `sources` measured, on their machines."
    record.keep(options.out, options.commit, notes=[how], rows=rows)
    for row in rows:
        print(row["cell"], row.get("sources", "measured in the run"))
    shown = ["of", "cell", "gpus", "response", *PHASES, "step", "times_bf16"]
    record.show("seconds of a step", [{key: row.get(key) for key in shown} for row in rows])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
