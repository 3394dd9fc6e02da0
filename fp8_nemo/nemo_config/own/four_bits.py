"""Say where NeMo RL's engine can hold its linears in four bits (`precision=nvfp4-w4a16`).

vLLM 0.25.1 repacks such a linear for its Marlin kernel; `fp8_nemo/nemo/marlin` refills what was
repacked.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from fp8_nemo.glue.wire import fused_with, is_quantized_weight, named_shapes
from fp8_nemo.nemo_config.seams import SEAMS
from fp8_nemo.nemo_config.versions import Limit
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.settled import Settled

TILES = (64, 128), (128, 64)
"""Multiples that Marlin wants of a linear's out- and in-features, one pair or the other."""
ROUNDS = "four bits round more coarsely than FP8"


def four_bit_limits(settled: Settled) -> Iterator[Limit]:
    """Yield the limits of models, engines and options: of what was not written, or cannot be."""
    recipe = settled.recipe
    four = recipe.precision.rollout_linear == "nvfp4"
    for each in (*_of_model(settled, four), *_of_options(recipe)):
        yield each._replace(broken=four and each.broken)


def _of_model(settled: Settled, four: bool) -> Iterator[Limit]:
    """Yield what was not written for a model, or for its engine."""
    recipe, at = settled.recipe, settled.layout
    shape = recipe.model.shape
    padded = _padded(shape, recipe.precision) if four else None
    yield Limit(
        "precision.rollout_linear",
        recipe.precision.rollout_linear,
        shape.experts > 0,
        "is for dense models: a refit into Marlin's slabs of experts is not written",
        "vllm, prepare_nvfp4_moe_layer_for_marlin",
        "choose precision=fp8-linear",
    )
    yield Limit(
        "model.parallel.rollout_tensor",
        at.rollout_tensor,
        at.rollout_tensor > 1,
        "must be 1 with four bits: a refit into a rank's part of Marlin's layout is not written",
        "fp8_nemo/nemo/marlin/staging.py",
        "set model.parallel.rollout_tensor=1",
    )
    yield Limit(
        "model.shape",
        padded,
        padded is not None,
        f"is of a linear that Marlin would pad: it wants multiples of {TILES[0]} or {TILES[1]}",
        "vllm, marlin_padded_nk",
        "choose precision=fp8-linear or bf16",
    )


def _of_options(recipe: Recipe) -> Iterator[Limit]:
    """Yield the options that four bits cannot go with."""
    yield Limit(
        "correction",
        recipe.correction.name,
        not recipe.correction.is_on,
        f"must correct: {ROUNDS}, and NeMo RL asks for a correction under FP8 alone",
        SEAMS["needs-correction"].path,
        "choose correction=tis",
    )
    yield Limit(
        "glue",
        recipe.glue.name,
        not recipe.glue.sends_fp8,
        "must quantize and send four bits itself: Q, K and V share a scale, which a receiver "
        "that gets them apart cannot make",
        "fp8_nemo/glue/refit.py, in_groups",
        "set glue.quantize=fused glue.transfer=fp8",
    )
    yield Limit(
        "grpo.max_sample_age",
        recipe.grpo.max_sample_age,
        recipe.grpo.is_asynchronous,
        "must be null with four bits: only the synchronous worker starts an engine in them",
        "fp8_nemo/nemo/generation_worker.py, _create_engine",
        "set grpo.max_sample_age=null",
    )
    yield Limit(
        "cluster.gpu",
        recipe.cluster.gpu,
        recipe.cluster.gpu == "b200",
        "was not tried with four bits, and vLLM would take Hopper's way there too",
        "vllm, ModelOptNvFp4W4A16LinearMethod",
        "choose cluster.gpu=h100 or h200",
    )


@cache
def _padded(shape: Shape, precision: Precision) -> str | None:
    """Return the first weight whose fused linear Marlin would pad; None if there is none."""
    named = named_shapes(shape)
    for name, size in named.items():
        if is_quantized_weight(name, size, precision, shape.layers):
            sides = sum(named[each][0] for each in fused_with(name)), size[1]
            if not any(sides[0] % out == 0 and sides[1] % into == 0 for out, into in TILES):
                return name
    return None
