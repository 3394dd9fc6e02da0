"""Check a recipe by itself: one `Mistake` per cause, in words that say what to type instead.

Types and unknown keys are checked by `compose.py`, what a measurement says against a correction by
`correction/quantiles.py`, and what NeMo RL forbids by `nemo_config/`.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Iterator
from typing import Any

from fp8_nemo.recipe.mistake import Mistake, as_typed, shortened
from fp8_nemo.recipe.options.correction import DIVERGENCES, OF_A_RATIO, RATIOS, Correction
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import FORMATS, Precision
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.options.training import LORA_MODULES, TASKS, Algorithm, Data
from fp8_nemo.recipe.own.cluster import cluster_mistakes
from fp8_nemo.recipe.plain import leaves

ABSURD = 10**9
"""Where a number without a limit of its own ends: no run has so many of anything."""
LONGEST_NAME, LONGEST_PATH = 255, 3500
"""Bytes of a file's name, and of a path to which a run adds its own: Linux takes 4,095."""
BOUNDS = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
}
"""Limits of a number, by their names in a field's metadata."""


def mistakes(recipe: Recipe) -> list[Mistake]:
    """List everything that is wrong with a recipe by itself, fields first, then pairs of fields."""
    fields = list(_field_mistakes(recipe))
    has_formats = not any(each.key.startswith("precision.") for each in fields)
    return [
        *fields,
        *_path_mistakes(recipe),
        *_shape_mistakes(recipe.model.shape),
        *(_precision_mistakes(recipe) if has_formats else ()),
        *_correction_mistakes(recipe.correction),
        *_algorithm_mistakes(recipe),
        *_replay_mistakes(recipe),
        *_lora_mistakes(recipe),
        *_noise_mistakes(recipe),
        *_data_mistakes(recipe.data),
        *cluster_mistakes(recipe.cluster),
        *_nemo_mistakes(recipe.nemo),
    ]


def _field_mistakes(group: Any, prefix: str = "") -> Iterator[Mistake]:
    for declared in dataclasses.fields(group):
        key, value = prefix + declared.name, getattr(group, declared.name)
        if dataclasses.is_dataclass(value):
            yield from _field_mistakes(value, key + ".")
        elif value is not None:
            yield from limit_mistakes(key, value, declared.metadata)


def limit_mistakes(key: str, value: Any, limits: Any) -> Iterator[Mistake]:
    """Yield how a value of the right type breaks the limits in its field's metadata."""
    if "one_of" in limits and value not in limits["one_of"]:
        yield Mistake(key, value, "must be one of " + ", ".join(limits["one_of"]))
    if "short_name" in limits and not re.fullmatch(r"[\w-][\w.+-]*", value):
        yield Mistake(key, value, "must be letters, digits, dots, dashes, pluses and underscores")
    if "least" not in limits:
        return
    bounds = [(*BOUNDS[name], limit) for name, limit in limits.items() if limit is not None]
    if not (abs(value) < math.inf and all(holds(value, limit) for _, holds, limit in bounds)):
        text = " and ".join(f"{word} {limit}" for word, _, limit in bounds)
        yield Mistake(key, value, f"must be {text}, and finite")
    elif value > ABSURD and limits["most"] is None:
        yield Mistake(key, value, f"must be at most {ABSURD:,}")


def _shape_mistakes(shape: Shape) -> Iterator[Mistake]:
    """Refuse numbers that no model has together."""
    if shape.kv_heads and shape.heads % shape.kv_heads:
        text = f"must divide the query heads, {shape.heads}"
        yield Mistake("model.shape.kv_heads", shape.kv_heads, text)
    if shape.head_dim % 2:
        text = "must be even: RoPE turns halves of a head into each other"
        yield Mistake("model.shape.head_dim", shape.head_dim, text)
    if shape.experts and not 1 <= shape.experts_per_token <= shape.experts:
        text = f"must be 1 to {shape.experts}, the experts of a layer"
        yield Mistake("model.shape.experts_per_token", shape.experts_per_token, text)
    if shape.experts and not shape.expert_ffn:
        yield Mistake("model.shape.expert_ffn", 0, "must be the width of an expert")


def _precision_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    precision, layers = recipe.precision, recipe.model.shape.layers
    yield from [*_quantized_mistakes(precision)] or _plain_mistakes(precision)
    kept = precision.bf16_layers
    if kept and precision.rollout.is_quantized and kept >= layers:
        yield Mistake(
            "precision.first_layers_bf16 + precision.last_layers_bf16",
            kept,
            f"leaves none of the model's {layers} layers in {precision.rollout.name.upper()}",
            "lower one of them, or choose precision=bf16",
        )
    shape, block, group = recipe.model.shape, precision.rollout.block, precision.rollout.group
    remedy = "choose precision=bf16, or another width"
    for key in ("hidden", "expert_ffn" if shape.experts else "ffn", "head_dim"):
        if group and (side := getattr(shape, key)) % group:
            linears = f"{precision.rollout.name} linears, whose groups would span two rows"
            text = f"must be a multiple of {group} with {linears}"
            yield Mistake(f"model.shape.{key}", side, text, remedy)
    if block and shape.experts and shape.expert_ffn % block:
        slab = "gate and up lie in one slab, whose blocks would span both"
        text = f"must be a multiple of {block} with FP8 linears: {slab}"
        yield Mistake("model.shape.expert_ffn", shape.expert_ffn, text, remedy)


def _quantized_mistakes(precision: Precision) -> Iterator[Mistake]:
    """Refuse a quantized cache or trainer beside an engine whose linears have another format."""
    for key, option in (("rollout_kv", "fp8-kv-attn"), ("train_linear", "fp8-e2e")):
        held = getattr(precision, key)
        if FORMATS[held].is_quantized and precision.rollout_linear != held:
            text = f"needs precision.rollout_linear={held}, got {precision.rollout_linear}"
            remedy = f"choose precision={option}, or set precision.{key}=bf16"
            yield Mistake(f"precision.{key}", held, text, remedy)


def _plain_mistakes(precision: Precision) -> Iterator[Mistake]:
    """Refuse BF16 beside FP16, FP8 beside FP16, and a loss scale of the wrong one."""
    plain = precision.plain
    for key in ("rollout_linear", "rollout_kv"):
        held = FORMATS[getattr(precision, key)]
        if held != plain and (plain.scales_loss or not held.is_quantized):
            yield Mistake(
                f"precision.{key}",
                held.name,
                f"must be {plain.name}: precision.train_linear={precision.train_linear} computes "
                "in it, and no kernel mixes it with this",
                "choose precision=bf16 or precision=fp16, each of which sets both sides",
            )
            return
    if (precision.loss_scale is not None) != plain.scales_loss:
        text = "must be a number: FP16 loses small gradients without it"
        if not plain.scales_loss:
            text = f"must be null: {plain.name} loses no small gradients"
        yield Mistake("precision.loss_scale", precision.loss_scale, text)


def _correction_mistakes(correction: Correction) -> Iterator[Mistake]:
    low, high = correction.low, correction.high
    if correction.mask == "none":
        for key, bound in (("low", low), ("high", high)):
            if bound is not None:
                text = "bounds a mask, and correction.mask=none"
                remedy = (
                    "set correction.mask=token, sequence, geometric or a divergence, as token-k2"
                )
                yield Mistake(f"correction.{key}", bound, text, remedy)
    elif low is None and high is None and correction.mask in (*RATIOS, *DIVERGENCES):
        yield Mistake("correction.mask", correction.mask, "needs correction.low or correction.high")
    elif correction.mask in DIVERGENCES and (low is not None or high is None):
        text = f"correction.mask={correction.mask} is a distance, which has an upper bound alone"
        yield Mistake("correction.low", low, text, "set correction.high, and correction.low=null")
    elif low is not None and high is not None and low > high:
        text = f"is above correction.high={high}, so nothing would be kept"
        yield Mistake("correction.low", low, text)
    least, most = correction.truncate_low, correction.truncate
    for key, what in OF_A_RATIO.items() if correction.level == "none" else ():
        if value := getattr(correction, key):
            remedy = f"set correction.level={', '.join(RATIOS[:-1])} or {RATIOS[-1]}"
            yield Mistake(f"correction.{key}", value, f"{what}, and correction.level=none", remedy)
    if least is not None and most is not None and least > most:
        yield Mistake("correction.truncate_low", least, f"is above correction.truncate={most}")


EXCLUDED: tuple[tuple[str, Any, str, Any, str], ...] = (
    ("use_cispo", True, "disable_ppo_ratio", True, "weighs by the ratio that this leaves out"),
    ("use_cispo", True, "sequence_level_importance_ratios", True, "clips a token's ratio"),
    ("use_cispo", True, "token_level_loss", False, "weighs tokens alike"),
    ("sequence_level_importance_ratios", True, "token_level_loss", True, "weighs sequences alike"),
    ("sequence_level_importance_ratios", True, "disable_ppo_ratio", True, "is a ratio"),
    ("use_kl_in_reward", True, "estimator", "grpo", "is Reinforce++'s, GRPO would drop the KL"),
)
"""Values of `algorithm` that exclude each other, mostly by NeMo RL's asserts, and why."""
DUAL_CLIP_EXCLUDED = ("use_cispo", "disable_ppo_ratio")
"""What leaves no clipped loss that `ratio_clip_c` could bound."""


def _algorithm_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    algorithm, filled = recipe.algorithm, recipe.algorithm.filled
    for key, value, other, excluded, why in EXCLUDED:
        if getattr(filled, key) == value and getattr(filled, other) == excluded:
            text = f"{why}, so algorithm.{other}={as_typed(excluded)} goes without it"
            remedy = f"change one of the two, or choose algorithm=grpo, not {algorithm.name}"
            yield Mistake(f"algorithm.{key}", value, text, remedy)
    for key in DUAL_CLIP_EXCLUDED:
        if filled.ratio_clip_c is not None and getattr(filled, key):
            text = f"bounds a clipped loss, and algorithm.{key}=true has none"
            yield Mistake("algorithm.ratio_clip_c", filled.ratio_clip_c, text, "set it to null")
    yield from _reward_mistakes(algorithm)
    if recipe.correction.renormalize_denominator and filled.sequence_level_importance_ratios:
        key, beside = "correction.renormalize_denominator", "sequence_level_importance_ratios=true"
        text = "would take rejected tokens out of the sequence's ratio too, with"
        yield Mistake(key, True, f"{text} algorithm.{beside}", f"set {key}=false")


def _reward_mistakes(algorithm: Algorithm) -> Iterator[Mistake]:
    if algorithm.overlong_buffer is not None and algorithm.stop_properly_penalty_coef is not None:
        yield Mistake(
            "algorithm.overlong_buffer",
            algorithm.overlong_buffer,
            "NeMo RL ignores it beside algorithm.stop_properly_penalty_coef",
            "set one of them to null",
        )
    if (algorithm.filled.batch_multiplier or 1) != 1 and not algorithm.filled.use_dynamic_sampling:
        yield Mistake(
            "algorithm.batch_multiplier",
            algorithm.batch_multiplier,
            "more prompts than a step's need dynamic sampling",
            "set algorithm.use_dynamic_sampling=true, or leave it out",
        )


def _replay_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    if recipe.replay.is_on and not recipe.model.shape.experts:
        text = f"{recipe.model.name} is dense, and has no router whose choice could be replayed"
        remedy = "choose replay=none, or a mixture of experts, as model=qwen3-30b-a3b"
        yield Mistake("replay", recipe.replay.name, text, remedy)


def _lora_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    lora, modules = recipe.lora, recipe.lora.target_modules
    if not lora.is_on:
        if lora.alpha is not None or modules:
            text = "adapters have a rank"
            yield Mistake("lora.rank", None, text, "give a number, or choose lora=none")
        return
    unknown = [each for each in modules if each not in LORA_MODULES]
    if unknown or not modules or len(set(modules)) < len(modules):
        text = f"must be some of {', '.join(LORA_MODULES)}, each once"
        yield Mistake("lora.target_modules", unknown[0] if unknown else modules, text)
    if lora.alpha is None:
        yield Mistake("lora.alpha", None, "scales the adapters", "give a number, usually 32")
    if recipe.precision.train.is_quantized:
        yield Mistake(
            "lora",
            lora.name,
            f"trains in BF16, and precision.train_linear={recipe.precision.train_linear}: the "
            "trainer would compute fp8(W) x + B A x, the engine fp8(W + B A) x",
            "choose precision=fp8-linear or fp8-kv-attn",
        )


def _noise_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    noise, grpo = recipe.noise, recipe.grpo
    if not (noise.is_on and recipe.precision.rollout.is_quantized):
        return
    for key in (key for key, value in vars(noise).items() if value is None):
        remedy = f"as noise.steps={grpo.steps or 100}" if key == "steps" else "give a number"
        yield Mistake(f"noise.{key}", None, "is part of the schedule", remedy)
    if not recipe.correction.is_on:
        text = "must correct: noise of the engine alone is a mismatch with the trainer"
        yield Mistake("correction", recipe.correction.name, text, "choose correction=tis")
    if not recipe.glue.has_receiver:
        text = "must be ours: NeMo RL's refit sends the trainer's norms as they are"
        yield Mistake("glue", recipe.glue.name, text, "choose glue=ours, or noise=none")
    if grpo.is_asynchronous:
        text = "which step a sample's noise is of was not tested in asynchronous GRPO"
        yield Mistake("grpo.max_sample_age", grpo.max_sample_age, text, "set null, or noise=none")
    if grpo.validate_every == 1:
        text = "leaves no rollout with noise: the one after a validation has none"
        yield Mistake("grpo.validate_every", 1, text, "raise it, or set noise=none")


def unusable(path: str) -> str | None:
    """Return why no file can be called so; None if one can."""
    try:
        longest = max(len(part.encode()) for part in path.split("/"))
    except UnicodeEncodeError:
        return "is no UTF-8"
    if longest > LONGEST_NAME:
        return f"a name in it has {longest:,} bytes, and {LONGEST_NAME} is the most"
    if (size := len(path.encode())) > LONGEST_PATH:
        return f"has {size:,} bytes, and {LONGEST_PATH:,} is the most"
    return None


MOUNTED = ("outputs", "data.path", "data.reward", "model.path", "cluster.nemo_root")
"""What `runs.sbatch.mounts` shows a container."""


def _path_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    paths = {
        "outputs": recipe.outputs,
        "data.path": recipe.data.path,
        "data.reward": recipe.data.reward,
        "model.path": recipe.model.path,
        "correction.measurement": recipe.correction.measurement,
        "cluster.nemo_root": recipe.cluster.nemo_root,
        "cluster.python": recipe.cluster.python,
        "cluster.container": recipe.cluster.container,
    }
    for key, path in paths.items():
        if path and path.startswith(("~", "$")):
            yield Mistake(key, path, "names a path that is called so", f'write "{key}=$HOME/..."')
        if path and (text := unusable(path)):
            yield Mistake(key, shortened(path), text)
    if not recipe.outputs:
        yield Mistake("outputs", "", "must name a folder")
    for key in MOUNTED if recipe.cluster.container else ():
        if (path := paths[key]) and re.search("[,:]", path):
            text = "has a comma or a colon, which part the folders that a container sees"
            yield Mistake(key, path, text, "choose another path, or cluster.container=null")


def _data_mistakes(data: Data) -> Iterator[Mistake]:
    if data.name == "jsonl" and data.path is None:
        remedy = "give data.path=FOLDER with train.jsonl and validation.jsonl"
        yield Mistake("data.path", None, "data=jsonl reads a folder", remedy)
    task = TASKS.get(data.name)
    if task and data.difficulty is not None and not task.least <= data.difficulty <= task.most:
        text = f"must be from {task.least} to {task.most}, the {task.measure} of data={data.name}"
        yield Mistake("data.difficulty", data.difficulty, text)


def _nemo_mistakes(nemo: dict[str, Any]) -> Iterator[Mistake]:
    """Refuse what plan.json cannot hold: JSON has neither NaN nor infinities."""
    for key, value in leaves(nemo).items():
        if isinstance(value, float) and not math.isfinite(value):
            yield Mistake(f"nemo.{key}", value, "must be a finite number")
