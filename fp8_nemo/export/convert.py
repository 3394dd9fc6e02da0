"""Quantize a checkpoint, or a local run's last one: read the request, then do it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from fp8_nemo.export.calibrate import calibration_of
from fp8_nemo.export.formats import SERVED
from fp8_nemo.export.from_run import exported, last_checkpoint
from fp8_nemo.export.quantized_checkpoint import Progress, WeightError, quantize_checkpoint
from fp8_nemo.export.source import ConversionError, read_config
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.mistake import as_typed
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.runs.run_dir import PLAN, read_plan


def convert(
    source: Path, target: Path, settings: list[str], calibrate: Path | None, progress: Progress
) -> tuple[Precision, list[WeightError]]:
    """Convert a checkpoint, or resume the conversion; return its precision, and each weight's cost.

    Args:
        source: the checkpoint, BF16 or FP32; or a run of the local backend, which is exported.
        target: a folder, new or begun by the same call.
        settings: overrides of the group `precision`, whose default is what a run was rolled out in,
            and of a checkpoint fp8-linear.
        calibrate: texts, one on each line, where the cache is to be FP8; else None.
        progress: told what is done, how many of how many.

    Raises:
        ConversionError: the source, the texts or the settings are not right.
        ComposeError: an option does not exist, or is impossible.
        RunDirError: the run directory is damaged.
    """
    plan = read_plan(source) if (source / PLAN).is_file() else None
    recipe = _recipe_of(source, plan, settings)
    texts = calibration_texts(recipe, calibrate)
    source = exported(source, plan) if plan else source  # once the line is known to be right
    calibration = calibration_of(recipe, source, texts, progress) if texts else None
    errors = quantize_checkpoint(
        source, target, recipe.precision, calibration=calibration, progress=progress
    )
    return recipe.precision, errors


def _recipe_of(source: Path, plan: Plan | None, settings: list[str]) -> Recipe:
    """Return what a checkpoint is to be converted to; a run's last one: as it was rolled out."""
    if plan is None:
        return conversion_recipe(read_config(source)["num_hidden_layers"], settings)
    last_checkpoint(source, plan)  # refuses a run that has none
    if not any(word.startswith("precision=") for word in settings):
        settings = [*_rolled_out(plan), *settings]
    return conversion_recipe(plan.recipe.model.shape.layers, settings)


def _rolled_out(plan: Plan) -> list[str]:
    """Return the overrides that name the precision of a run's rollout; none for BF16."""
    precision = plan.recipe.precision
    if not precision.rollout.is_quantized:
        return []
    served = asdict(precision) | {"kv_scales": "layer"}  # as a checkpoint has them
    return [f"precision.{key}={as_typed(value)}" for key, value in served.items()]


def conversion_recipe(count: int, settings: list[str]) -> Recipe:
    """Return the recipe whose precision a checkpoint of `count` layers is to have.

    Raises:
        ConversionError: the settings ask for weights of a format without a row in `SERVED`, or for
            more than precision.
        ComposeError: an option does not exist, or is impossible.
    """
    strange = [word for word in settings if not word.startswith(("precision=", "precision."))]
    if strange:
        raise ConversionError(f"{strange[0]}: quantize_checkpoint takes precision alone")
    named = any(word.startswith("precision=") for word in settings)
    usual = [] if named else ["precision=fp8-linear"]
    [recipe] = compose([*usual, *settings, f"model.shape.layers={count}"])
    if recipe.precision.rollout.name not in SERVED:
        set_to = [word for word in settings if word.startswith("precision.rollout_linear")]
        said = (set_to or [f"precision={recipe.precision.name}"])[-1]
        held = recipe.precision.rollout.name.upper()
        raise ConversionError(f"{said}: its weights are {held}; choose precision=fp8-linear")
    if (scales := recipe.precision.kv_scales) != "layer":
        raise ConversionError(
            f"precision.kv_scales={scales}: a checkpoint gets one scale a layer; leave it out"
        )
    return recipe


def calibration_texts(recipe: Recipe, file: Path | None) -> list[str]:
    """Return the texts that an FP8 cache is calibrated with; none for a cache in BF16.

    Args:
        recipe: of the conversion.
        file: a text on each line.

    Raises:
        ConversionError: texts are missing, or not wanted.
    """
    name = recipe.precision.name
    if not recipe.precision.cache.is_quantized:
        if file is not None:
            raise ConversionError(
                f"--calibrate {file}: precision={name} has a cache in BF16; choose fp8-kv-attn"
            )
        return []
    if file is None:
        raise ConversionError(
            f"precision={name}: its FP8 cache needs scales; add --calibrate TEXTS, a file with a "
            "text on each line, or precision.rollout_kv=bf16"
        )
    try:
        texts = [line for line in file.read_text().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ConversionError(f"--calibrate {file}: is not UTF-8 ({error.reason})") from None
    except OSError as error:
        raise ConversionError(f"--calibrate {file}: cannot be read ({error.strerror})") from None
    if not texts:
        raise ConversionError(f"--calibrate {file}: holds no text")
    return texts
