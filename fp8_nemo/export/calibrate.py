"""What a conversion to FP8 is asked for, and the ranges of Q, K and V over texts.

An FP8 cache needs a scale each for Q, K and V per layer; served from a checkpoint, they come from
texts that the whole model reads in BF16.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from fp8_nemo.export.fp8_checkpoint import (
    Calibration,
    ConversionError,
    Progress,
    WeightError,
    quantize_checkpoint,
    read_config,
)
from fp8_nemo.export.from_run import exported, last_checkpoint
from fp8_nemo.glue.recalibrate import AmaxObserver, kv_scales
from fp8_nemo.local.chat import Chat
from fp8_nemo.local.engine import causal_mask, positions
from fp8_nemo.local.modules import attention
from fp8_nemo.local.modules.precision import set_train_precision
from fp8_nemo.local.policy import load_model
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.options import Precision, Recipe
from fp8_nemo.runs.run_dir import PLAN, read_plan

LONGEST = 4096
"""Tokens of a text that are read: attention here takes memory with their square."""


def convert(
    source: Path, target: Path, settings: list[str], calibrate: Path | None, progress: Progress
) -> list[WeightError]:
    """Convert, or go on with it; what FP8 cost each weight.

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
    if plan:
        last_checkpoint(source, plan)
        named = any(word.startswith("precision=") for word in settings)
        settings = [*([] if named else _rolled_out(plan)), *settings]
    count = plan.recipe.model.shape.layers if plan else read_config(source)["num_hidden_layers"]
    recipe = conversion_recipe(count, settings)
    texts = calibration_texts(recipe, calibrate)
    source = exported(source, plan) if plan else source  # once the line is known to be right
    calibration = calibration_of(recipe, source, texts, progress) if texts else None
    return quantize_checkpoint(
        source, target, recipe.precision, calibration=calibration, progress=progress
    )


def _rolled_out(plan: Plan) -> list[str]:
    """The overrides that name the precision of a run's rollout; none where that was BF16."""
    precision = plan.recipe.precision
    if precision.rollout_linear != "fp8":
        return []
    return [f"precision.{key}={value}" for key, value in asdict(precision).items()]


def conversion_recipe(count: int, settings: list[str]) -> Recipe:
    """The recipe whose precision a checkpoint of `count` layers is to have.

    Raises:
        ConversionError: the settings ask for no FP8 weights, or for more than precision.
        ComposeError: an option does not exist, or is impossible.
    """
    strange = [word for word in settings if not word.startswith(("precision=", "precision."))]
    if strange:
        raise ConversionError(f"{strange[0]}: recipes.quantize_checkpoint takes precision alone")
    [recipe] = compose(["precision=fp8-linear", *settings, f"model.shape.layers={count}"])
    if recipe.precision.rollout_linear != "fp8":
        name = recipe.precision.name
        raise ConversionError(f"precision={name}: its weights are BF16; choose fp8-linear")
    return recipe


def calibration_texts(recipe: Recipe, file: Path | None) -> list[str]:
    """The texts that an FP8 cache is calibrated with; none for a cache in BF16.

    Args:
        recipe: of the conversion.
        file: a text on each line.

    Raises:
        ConversionError: texts are missing, or not wanted.
    """
    name = recipe.precision.name
    if recipe.precision.rollout_kv != "fp8":
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


def calibration_of(
    recipe: Recipe, source: Path, texts: list[str], progress: Progress
) -> Calibration:
    """How the scales of the recipe's FP8 cache are found, once they are needed.

    Args:
        recipe: of the conversion.
        source: the checkpoint, BF16 or FP32.
        texts: to be read by it.
        progress: told how many texts are read.
    """
    margin = recipe.glue.recalibrate.margin
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    report = partial(progress, "calibrating")
    return Calibration(
        {"texts": digest, "margin": margin},
        lambda: scales_of_texts(source, texts, margin, report),
    )


@torch.no_grad()
def scales_of_texts(
    source: Path,
    texts: list[str],
    margin: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """KV scales by vLLM's names, with the whole model in memory in BF16.

    Args:
        source: checkpoint in Hugging Face format.
        texts: one forward each, with the tokenizer's special tokens, cut at `LONGEST` tokens: what
            a first token does to K and V is among what serving meets.
        margin: on the largest value seen.
        progress: told how many texts are read.

    Raises:
        RecalibrateError: a layer's range is zero or not finite.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, chat = load_model(source, device), Chat.load(source)
    set_train_precision(model, Precision())
    observer = AmaxObserver(model.config.num_hidden_layers, 1, device)
    for done, tokens in enumerate(_tokens(chat, texts)):
        progress(done, len(texts))
        tokens_BT = torch.tensor([tokens], device=device)
        mask_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
        for layer, module in enumerate(attention.attention_modules(model)):
            module.watch = partial(observer.observe, layer, mask_BT=mask_BT)
        model(
            input_ids=tokens_BT, attention_mask=causal_mask(mask_BT),
            position_ids=positions(mask_BT), use_cache=False, logits_to_keep=1,
        )  # fmt: skip
    return kv_scales(observer.read(), margin)


def _tokens(chat: Chat, texts: Iterable[str]) -> Iterable[list[int]]:
    return (chat.tokenizer.encode(text)[:LONGEST] for text in texts)
