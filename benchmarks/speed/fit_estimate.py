"""Fit what bytes and operations do not explain, on every other measured point; test on the others.

python -m benchmarks.speed.fit_estimate benchmarks/results/rollout-*-h200.json
    [--refit benchmarks/results/glue-8b-h200.json] --out benchmarks/results/estimate-h200.json

Of each model: one fixed cost of a decode step, from speed.rollout's `resident` points of vLLM with
the kernels that a plan asks for (gate: the others within 20%); the reserve of an engine beside
weights and cache (gate: KV capacity of the others within 5%); and one fixed cost of a refit, from
the file of benchmarks.glue.compare. Points alternate like the squares of a chessboard, precisions
down and points across, so that neither half has all the large batches or one precision.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import record
from benchmarks.speed.capacity import engine_kv_bytes, kv_capacity
from fp8_nemo.plan.memory import GIB, GPU_GIB, count
from fp8_nemo.plan.speed import decode_seconds, refit_seconds
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.options import Precision, Shape

OPTIONS = ("fp8-kv-attn", "fp8-linear", "bf16")
UNUSED = "cutlass"  # a kernel that no plan asks for
GLUES = {"stock": "bf16", "ledger": "fp8-linear"}  # what travels; FP8 KV scales weigh nothing


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


def decode_points(content: Mapping[str, Any], model: str) -> Iterator[Measured]:
    """Yield the resident points of a file, precision by precision, by context and batch."""
    rows = [r for r in content["rows"] if r["model"] == model and r["regime"] == "resident"]
    rows = [r for r in rows if r["engine"] == "vLLM" and not r["precision"].endswith(UNUSED)]
    for down, variant in enumerate(dict.fromkeys(row["precision"] for row in rows)):
        shape, precision = recipe_parts(model, option_of(variant))
        mine = [row for row in rows if row["precision"] == variant]
        mine.sort(key=lambda row: (row["prompt"], row["batch"]))
        for across, row in enumerate(mine):
            without = decode_seconds(
                shape, precision, row["batch"], row["context"], content["gpu"], fixed=0.0
            )
            point = f"{variant} {row['batch']}x{row['prompt']}"
            measured = row["seconds_per_step"]["median"]
            yield Measured(point, measured, without, (down + across) % 2 == 0)


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
    for n, (glue, option) in enumerate(GLUES.items()):
        shape, precision = recipe_parts(model, option)
        without = refit_seconds(shape, precision, gpu, fixed=0.0)
        yield Measured(glue, content["refit"][glue]["median"]["transfer"], without, n == 0)


def recipe_parts(model: str, precision: str) -> tuple[Shape, Precision]:
    """Return shape and precision of two options of conf/."""
    [recipe] = compose([f"model={model}", "backend=nemo", f"precision={precision}"])
    return recipe.model.shape, recipe.precision


def gate(name: str, rows: Sequence[Mapping[str, Any]], limit: float) -> dict[str, Any]:
    """Return one line: the worst error of the tested half against its limit."""
    error = worst(rows)
    holds = error is not None and error <= limit
    return {"what": name, "worst error": error, "limit": limit, "holds": holds}


def main() -> None:
    """Fit the constants, test them, show them, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    parser.add_argument("results", type=Path, nargs="+", help="of benchmarks.speed.rollout")
    parser.add_argument("--refit", type=Path, help="of benchmarks.glue.compare")
    options = parser.parse_args()
    content: dict[str, list[dict[str, Any]]] = {"constants": [], "gates": [], "decode": [],
                                                "capacity": [], "refit": []}  # fmt: skip
    for file in options.results:
        measured = json.loads(file.read_text())
        for model in dict.fromkeys(row["model"] for row in measured["rows"]):
            points = list(decode_points(measured, model))
            if not any(each.to_fit for each in points):
                print(f"{file}: {model} has no row to fit", file=sys.stderr)
                continue
            fixed = fitted(points)
            reserve = fitted(reserves(measured, model))
            constants = {"model": model, "decode_seconds": fixed, "reserve_gib": reserve / GIB}
            content["constants"].append(constants)
            rows = compared(model, points, fixed)
            caches = capacities(measured, model, reserve)
            content["decode"] += rows
            content["capacity"] += caches
            content["gates"].append(gate(f"{model}: decode", rows, 0.2))
            content["gates"].append(gate(f"{model}: KV capacity", caches, 0.05))
    if options.refit:
        measured = json.loads(options.refit.read_text())
        found = re.search(r"model=(\S+)", measured["command"])
        gpu = re.search(r"cluster\.gpu=(\S+)", measured["command"])
        assert found and gpu and gpu[1] in GPU_GIB
        points = list(refit_points(measured, found[1], gpu[1]))
        fixed = fitted(points)
        content["constants"].append({"model": found[1], "refit_seconds": fixed})
        content["refit"] = compared(found[1], points, fixed)
        content["gates"].append(gate(f"{found[1]}: refit", content["refit"], 0.2))
    record.keep(options.out, options.commit, **content)
    record.show("decode, seconds per step", content["decode"])
    record.show("gates", content["gates"])


if __name__ == "__main__":
    main()
