"""Choose NeMo RL's loop, and repeat what it forbids beside `grpo.max_sample_age`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fp8_nemo.nemo_config.keys import ASYNC, VLLM
from fp8_nemo.nemo_config.seams import SEAMS
from fp8_nemo.nemo_config.versions import Limit
from fp8_nemo.recipe.settled import Settled

SYNCHRONOUS = "grpo.max_sample_age=null"
CLEARS_PREFIXES = f"{ASYNC}.recompute_kv_cache_after_weight_updates"
EXCLUDED = {
    "grpo.use_dynamic_sampling": ("use_dynamic_sampling",),
    "grpo.reward_shaping.enabled": ("overlong_buffer", "stop_properly_penalty_coef"),
    "grpo.reward_scaling.enabled": ("reward_target_min",),
}
"""Keys that NeMo RL's `run_grpo.py` refuses beside its asynchronous loop, which ignores them, and
the options that set each."""


def asynchronous_keys(settled: Settled) -> dict[str, Any]:
    """Return the keys of NeMo RL's loop: synchronous, or with engines a step ahead of training."""
    age = settled.recipe.grpo.max_sample_age
    found: dict[str, Any] = {f"{ASYNC}.enabled": age is not None}
    found[f"{VLLM}.async_engine"] = age is not None
    if age is None:
        return found
    # Else the prefixes that prompts share keep K and V of older weights from refit to refit.
    return found | {f"{ASYNC}.max_trajectory_age_steps": age, CLEARS_PREFIXES: True}


def asynchronous_limits(settled: Settled, written: Mapping[str, Any]) -> Iterator[Limit]:
    """Yield the limits of asynchronous steps, all kept by a synchronous run.

    Args:
        settled: the run's recipe.
        written: every key of NeMo RL's, the base's and the user's own among them.
    """
    yield from _of_placement(settled)
    yield from _of_samples(settled)
    yield from _of_loop(settled, written)


def _of_placement(settled: Settled) -> Iterator[Limit]:
    """Yield the limits of which GPUs sample, and how."""
    recipe, at = settled.recipe, settled.layout
    age, here = recipe.grpo.max_sample_age, recipe.grpo.is_asynchronous
    yield Limit(
        "grpo.max_sample_age",
        age,
        here and settled.shares_gpus,
        "needs GPUs that sample while others train",
        SEAMS["async-apart"].path,
        f"set cluster.rollout_gpus=N, or {SYNCHRONOUS}",
    )
    yield Limit(
        "model.parallel.rollout_expert",
        at.rollout_expert,
        here and at.rollout_expert not in (1, at.rollout_tensor),
        f"must be 1 or rollout_tensor={at.rollout_tensor} with grpo.max_sample_age={age}",
        SEAMS["async-experts"].path,
        f"lower it, or {SYNCHRONOUS}",
    )


def _of_samples(settled: Settled) -> Iterator[Limit]:
    """Yield the limits of samples that are a step old."""
    recipe = settled.recipe
    age, here = recipe.grpo.max_sample_age, recipe.grpo.is_asynchronous
    yield Limit(
        "grpo.max_sample_age",
        age,
        here and age != 1,
        "must be 1: without updates in flight, older samples make nothing faster",
        SEAMS["async-age"].path,
        f"set 1, or {SYNCHRONOUS}",
    )
    yield Limit(
        "precision.rollout_kv",
        recipe.precision.rollout_kv,
        here and recipe.precision.cache.is_quantized,
        f"must be bf16 with grpo.max_sample_age={age}: NeMo RL's asynchronous engine has no FP8 KV",
        SEAMS["async-cache"].path,
        f"choose precision=fp8-linear or fp8-e2e, or {SYNCHRONOUS}",
    )
    yield Limit(
        "correction",
        recipe.correction.name,
        here and not recipe.correction.is_on,
        f"leaves samples uncorrected that are {age} step old",
        SEAMS["async-correction"].path,
        f"choose correction=tis, or {SYNCHRONOUS}",
    )


def _of_loop(settled: Settled, written: Mapping[str, Any]) -> Iterator[Limit]:
    """Yield the limits of keys that NeMo RL's asynchronous loop ignores, or that it needs."""
    recipe, here = settled.recipe, settled.recipe.grpo.is_asynchronous
    for key, options in EXCLUDED.items():
        given = {f"algorithm.{name}": getattr(recipe.algorithm, name) for name in options}
        set_by = next((name for name, value in given.items() if value is not None), f"nemo.{key}")
        yield Limit(
            set_by,
            given.get(set_by, written.get(key)),
            here and bool(written.get(key)),
            "NeMo RL has it in synchronous steps alone",
            SEAMS["async-algorithms"].path,
            f"set it to {'null' if set_by in given else 'false'}, or {SYNCHRONOUS}",
        )
    yield Limit(
        f"nemo.{CLEARS_PREFIXES}",
        written.get(CLEARS_PREFIXES),
        here and not written.get(CLEARS_PREFIXES),
        "must be true: else prompts that begin alike are sampled with K and V of older weights",
        SEAMS["async-prefixes"].path,
        f"leave it out, or {SYNCHRONOUS}",
    )
