"""What the glue inside NeMo RL's workers is told: the recipe, by one environment variable.

The driver sets it before Ray starts, and every worker process inherits it; a process without it
leaves NeMo RL as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import fp8_nemo
from fp8_nemo.recipe.options import Glue, Precision, Recipe
from fp8_nemo.recipe.plain import from_plain

if TYPE_CHECKING:  # a login node has no torch
    from fp8_nemo.glue.quantize import Formula

VARIABLE = "FP8_NEMO_RECIPE"
PLUGIN = "fp8_nemo"
"""Our entry point of the group `PLUGINS`, by which vLLM finds our receiver."""
PLUGINS = "vllm.general_plugins"


def own_folder() -> Path | None:
    """What a worker's path needs to find this package; None where it lies among others.

    A clone, or a job's frozen copy; a driver's whole `site-packages` would bring packages of
    another Python into the workers.
    """
    folder = Path(fp8_nemo.__file__).parents[1]
    return None if folder.name in ("site-packages", "dist-packages") else folder


def to_environment(recipe: Recipe) -> dict[str, str]:
    """The variable for the workers of a run; empty where nothing in them is ours."""
    if not needs_plugin(recipe):
        return {}
    return {VARIABLE: json.dumps(dataclasses.asdict(recipe))}


def from_environment() -> Recipe | None:
    """The recipe of the run that this process works for; None outside one, or with glue=stock."""
    text = os.environ.get(VARIABLE)
    return None if text is None else _recipe(text)


@functools.cache  # a worker asks in every step and every refit
def _recipe(text: str) -> Recipe:
    return from_plain(Recipe, json.loads(text))


def observes(recipe: Recipe) -> bool:
    """Whether the policy's workers watch Q, K and V in the logprob forward."""
    return recipe.precision.rollout_kv == "fp8" and recipe.glue.recalibrate.source == "logprob"


def needs_plugin(recipe: Recipe) -> bool:
    """Whether vLLM's workers must be ours: they receive, or keep the scales that were observed."""
    return recipe.glue.has_receiver or observes(recipe)


def wire_precision(recipe: Recipe) -> Precision:
    """What travels: with `transfer: bf16` the receiver quantizes."""
    if recipe.glue.transfer == "fp8":
        return recipe.precision
    return dataclasses.replace(recipe.precision, rollout_linear="bf16")


def formula(glue: Glue) -> Formula:
    """`quantize: stock` is NeMo RL's rounding, wherever it is done."""
    return "exact" if glue.quantize == "fused" else "stock"
