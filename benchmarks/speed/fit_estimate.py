"""Fit what bytes and operations do not explain, on every other measured point; test on the others.

python -m benchmarks.speed.fit_estimate benchmarks/results/rollout-*-h200.json
    [--test benchmarks/results/decode-bf16-h100.json ...]
    [--refit benchmarks/results/glue-8b-h200.json] --out benchmarks/results/estimate-h200.json

Of each model: what a decode step costs by itself, by sequence, and by quantizing the inputs of its
linears, from speed.rollout's `resident` points of vLLM on one GPU, with the kernels that a plan
asks for (gate: all points within 10%, fitted or not, and gains over BF16 too); the reserve of an
engine beside weights and cache (gate: KV capacity of the others within 5%); and one fixed cost of a
refit, from the file of benchmarks.glue.compare. Points alternate like the squares of a chessboard,
precisions down and points across, so that neither half has all the large batches or one precision.
Four bits are not fitted here: the rates of their kernel stand in plan/speed.py, MARLIN. Files of
`--test`, of speed.rollout or speed.decode_profile, are tested whole.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import record
from benchmarks.speed.capacity import engine_kv_bytes, kv_capacity
from fp8_nemo.plan.memory import GIB, GPU_GIB
from fp8_nemo.plan.model import count
from fp8_nemo.plan.speed import Fitted, decode_seconds, refit_seconds
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision

NOTHING = Fitted(0.0, 0.0, 0.0)
OPTIONS = ("fp8-kv-attn", "fp8-linear", "nvfp4-w4a16", "bf16")
UNUSED = "cutlass", "experts"  # kernels that no plan asks for
GLUES = {"stock": "bf16", "bytes": "fp8-linear", "ledger": "fp8-linear"}
"""What travels, by glue; `ledger` is of older files. FP8 KV scales weigh nothing."""


class Step(NamedTuple):
    """A decode step that was measured."""

    gpu: str
    precision: str
    batch: int
    prompt: int
    measured: float
    """Seconds."""
    without: float
    """As if neither step, sequence nor quantizing cost anything."""
    to_fit: bool
    gpus: int = 1
    """Of the engine."""
    series: str = ""
    """What its gain is taken within: the file, or all profiles."""

    @property
    def costs(self) -> tuple[float, ...]:
        """How often each fitted cost counts: of a step, of a sequence, of quantizing."""
        counts = 1.0, float(self.batch), float(self.precision.startswith("fp8"))
        return tuple(count / self.gpus for count in counts)


class Measured(NamedTuple):
    """A point and what the formula gives without the constant: `Measured("64x1024", 5.9, 4.1)`."""

    point: str
    measured: float
    without: float
    """In the same unit, as if nothing were fixed."""
    to_fit: bool


def fitted(points: Iterable[Measured]) -> float:
    """Return the constant with the least squares of relative errors: a weighted mean of the rests.

    Raises:
        ValueError: there is no point to fit.
    """
    used = [each for each in points if each.to_fit]
    if not used:
        raise ValueError("no point to fit")
    weights = [each.measured**-2 for each in used]
    rests = [each.measured - each.without for each in used]
    return sum(w * rest for w, rest in zip(weights, rests, strict=True)) / sum(weights)


def compared(model: str, points: Sequence[Measured], constant: float) -> list[dict[str, Any]]:
    """Return a row per point: predicted, measured, relative error, and its half."""
    return [
        {
            "model": model,
            "point": each.point,
            "half": "fitted" if each.to_fit else "tested",
            "measured": each.measured,
            "predicted": each.without + constant,
            "error": (each.without + constant) / each.measured - 1,
        }
        for each in points
    ]


def worst(rows: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the largest error of the tested half; None if nothing was."""
    return max((abs(row["error"]) for row in rows if row["half"] == "tested"), default=None)


def option_of(variant: str) -> str:
    """Return the precision of speed.rollout's variant: `fp8-linear-cutlass` is `fp8-linear`."""
    return next(option for option in OPTIONS if variant.startswith(option))


def decode_steps(content: Mapping[str, Any], model: str) -> Iterator[Step]:
    """Yield the resident points of a file, precision by precision, by context and batch."""
    rows = [r for r in content["rows"] if r["model"] == model and r["regime"] == "resident"]
    rows = [r for r in rows if r["engine"] == "vLLM"]
    rows = [r for r in rows if not r["precision"].endswith(UNUSED)]
    for down, variant in enumerate(dict.fromkeys(row["precision"] for row in rows)):
        mine = [row for row in rows if row["precision"] == variant]
        mine.sort(key=lambda row: (row["prompt"], row["batch"]))
        for across, row in enumerate(mine):
            seconds = row["seconds_per_step"]["median"]
            to_fit = (down + across) % 2 == 0 and "tensor" not in row
            yield step_of(model, content["gpu"], option_of(variant), row, seconds, to_fit)


def tested_steps(content: Mapping[str, Any]) -> dict[str, list[Step]]:
    """Return the points of a file of either benchmark by model, none of them to fit."""
    if "asked" in content:
        return {content["asked"]["model"]: list(profiled_steps(content))}
    models = dict.fromkeys(row["model"] for row in content["rows"])
    return {m: [each._replace(to_fit=False) for each in decode_steps(content, m)] for m in models}


def profiled_steps(content: Mapping[str, Any]) -> Iterator[Step]:
    """Yield the points of a file of benchmarks.speed.decode_profile, none of them to fit."""
    asked = content["asked"]
    for row in content["rows"]:
        precision, seconds = option_of(asked["precision"]), row["wall_ms"] / 1e3
        yield step_of(asked["model"], asked["gpu"], precision, row, seconds, False)


def step_of(
    model: str, gpu: str, option: str, row: Mapping[str, Any], seconds: float, to_fit: bool
) -> Step:
    """Return one measured step, and what the formula gives without its costs."""
    shape, precision = recipe_parts(model, option)
    batch, gpus = row["batch"], row.get("tensor", 1)
    without = decode_seconds(shape, precision, batch, row["context"], gpu, NOTHING, gpus)
    return Step(gpu, option, batch, row["prompt"], seconds, without, to_fit, gpus)


def fitted_costs(steps: Iterable[Step]) -> list[float]:
    """Return the three costs with the least squares of relative errors.

    Raises:
        ValueError: there is no point to fit.
    """
    used = [each for each in steps if each.to_fit]
    if not used:
        raise ValueError("no point to fit")
    shares = np.array([[cost / each.measured for cost in each.costs] for each in used])
    rests = np.array([1 - each.without / each.measured for each in used])
    return np.linalg.lstsq(shares, rests, rcond=None)[0].tolist()


def compared_steps(model: str, steps: Sequence[Step], costs: Sequence[float]) -> list[dict]:
    """Return a row per step: predicted, measured, its gain over BF16, and the errors of both."""
    told = [
        step.without + sum(a * b for a, b in zip(step.costs, costs, strict=True)) for step in steps
    ]
    at = [(step.series, step.gpu, step.gpus, step.batch, step.prompt) for step in steps]
    plain = {at[n]: n for n, step in enumerate(steps) if step.precision == "bf16"}
    rows = []
    for place, step, seconds in zip(at, steps, told, strict=True):
        base = plain.get(place)
        gain = told_gain = None
        if base is not None:
            gain, told_gain = steps[base].measured / step.measured, told[base] / seconds
        rows.append({
            "model": model, "gpu": step.gpu, "gpus": step.gpus, "precision": step.precision,
            "point": f"{step.batch}x{step.prompt}", "half": "fitted" if step.to_fit else "tested",
            "measured": step.measured, "predicted": seconds, "error": seconds / step.measured - 1,
            "gain": gain,
            "gain error": gain and told_gain and told_gain / gain - 1,
        })  # fmt: skip
    return rows


def reserves(content: Mapping[str, Any], model: str) -> Iterator[Measured]:
    """Yield the bytes of an engine beside weights and cache, precision by precision."""
    engines = [e for e in content["engines"] if e["model"] == model and e["engine"] == "vLLM"]
    for down, engine in enumerate(engines):
        shape, precision = recipe_parts(model, option_of(engine["precision"]))
        bytes_per_token = count(shape, precision).kv_bytes_per_token
        share = float(content["share"])
        most = engine_kv_bytes(shape, precision, content["gpu"], share, reserve=0.0)
        missing = most - engine["kv_tokens"] * bytes_per_token
        yield Measured(engine["precision"], missing, 0.0, down % 2 == 0)


def capacities(content: Mapping[str, Any], model: str, reserve: float) -> list[dict[str, Any]]:
    """Return the tokens of each engine's cache, predicted and as the engine reports them."""
    found = []
    for point in reserves(content, model):
        shape, precision = recipe_parts(model, option_of(point.point))
        room = engine_kv_bytes(shape, precision, content["gpu"], float(content["share"]), reserve)
        real = room + reserve - point.measured
        size = count(shape, precision).kv_bytes_per_token
        measured, predicted = real / size, float(kv_capacity(shape, precision, room))
        at = Measured(point.point, measured, predicted, point.to_fit)
        found += compared(model, [at], 0.0)
    return found


def refit_points(content: Mapping[str, Any], model: str, gpu: str) -> Iterator[Measured]:
    """Yield what a refit's transfer took in one run of benchmarks/glue/compare.py."""
    refits = content["refit"]
    for n, (glue, option) in enumerate((k, v) for k, v in GLUES.items() if k in refits):
        shape, precision = recipe_parts(model, option)
        without = refit_seconds(count(shape, precision), gpu, fixed=0.0)
        yield Measured(glue, refits[glue]["median"]["transfer"], without, n == 0)


def recipe_parts(model: str, precision: str) -> tuple[Shape, Precision]:
    """Return shape and precision of two options of conf/."""
    [recipe] = compose([f"model={model}", "backend=nemo", f"precision={precision}"])
    return recipe.model.shape, recipe.precision


def gate(name: str, error: float | None, limit: float) -> dict[str, Any]:
    """Return one line: the worst error against its limit."""
    holds = error is not None and error <= limit
    return {"what": name, "worst error": error, "limit": limit, "holds": holds}


def main() -> None:
    """Fit the constants, test them, show them, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    parser.add_argument("results", type=Path, nargs="+", help="of benchmarks.speed.rollout")
    parser.add_argument("--refit", type=Path, help="of benchmarks.glue.compare")
    helped = "of benchmarks.speed.rollout or decode_profile"
    parser.add_argument("--test", type=Path, nargs="*", default=[], help=helped)
    options = parser.parse_args()
    tested: dict[str, list[Step]] = {}
    for file in options.test:
        measured = json.loads(file.read_text())
        series = "profiles" if "asked" in measured else file.stem
        for model, steps in tested_steps(measured).items():
            tested.setdefault(model, []).extend(each._replace(series=series) for each in steps)
    content: dict[str, list[dict[str, Any]]] = {"constants": [], "gates": [], "decode": [],
                                                "capacity": [], "refit": []}  # fmt: skip
    for file in options.results:
        measured = json.loads(file.read_text())
        for model in dict.fromkeys(row["model"] for row in measured["rows"]):
            steps = [*decode_steps(measured, model), *tested.get(model, ())]
            if not any(each.to_fit for each in steps):
                print(f"{file}: {model} has no row to fit", file=sys.stderr)
                continue
            costs = fitted_costs(steps)
            reserve = fitted(reserves(measured, model))
            named = dict(zip(("decode", "sequence", "quantize"), costs, strict=True))
            content["constants"].append({"model": model, "reserve_gib": reserve / GIB} | named)
            rows = compared_steps(model, steps, costs)
            caches = capacities(measured, model, reserve)
            content["decode"] += rows
            content["capacity"] += caches
            gains = [abs(row["gain error"]) for row in rows if row["gain"]]
            content["gates"] += [
                gate(f"{model}: decode", max(abs(row["error"]) for row in rows), 0.1),
                gate(f"{model}: gain over BF16", max(gains, default=None), 0.1),
                gate(f"{model}: KV capacity", worst(caches), 0.05),
            ]
    if options.refit:
        measured = json.loads(options.refit.read_text())
        found = re.search(r"model=(\S+)", measured["command"])
        gpu = re.search(r"cluster\.gpu=(\S+)", measured["command"])
        assert found and gpu and gpu[1] in GPU_GIB
        points = list(refit_points(measured, found[1], gpu[1]))
        fixed = fitted(points)
        content["constants"].append({"model": found[1], "refit_seconds": fixed})
        content["refit"] = compared(found[1], points, fixed)
        content["gates"].append(gate(f"{found[1]}: refit", worst(content["refit"]), 0.2))
    record.keep(options.out, options.commit, **content)
    record.show("decode, seconds per step", content["decode"])
    record.show("gates", content["gates"])


if __name__ == "__main__":
    main()
