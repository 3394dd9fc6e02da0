"""Say which of NeMo RL's losses a run has: its correction, and the options of its algorithm."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from fp8_nemo.nemo_config.keys import (
    BUFFER,
    LONGEST,
    OPTIONAL,
    PENALTY,
    SCALES,
    SHAPES,
    STOP_COEFFICIENT,
)
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.settled import Settled


def native_correction(recipe: Recipe) -> dict[str, Any] | None:
    """Return the keys of `loss_fn` with which NeMo RL's own loss applies a correction, or None.

    Our `tis` is its `tis`, our `mis` its `icepop`, and a bare token ratio its correction without a
    type. Every other correction multiplies the advantages before the loss sees them
    (`nemo/policy.py`). Its `seq-mask-tis` does not bound the token ratio, so it is not `geo-mis`.
    With one ratio a sequence (GSPO) NeMo RL corrects by the sequence's product whatever the type
    says, so every correction is ours.
    """
    correction = recipe.correction
    if recipe.algorithm.filled.sequence_level_importance_ratios:
        return None
    plain = (
        correction.level == "token"
        and correction.veto is None
        and correction.truncate_low is None
        and not correction.normalize
        and not correction.renormalize_denominator
    )
    if plain and correction.mask == "none":
        return {
            "type": None if correction.truncate is None else "tis",
            "ratio": correction.truncate,
            "ratio_min": None,
        }
    if plain and correction.mask == "token" and correction.high and correction.truncate is None:
        return {"type": "icepop", "ratio": correction.high, "ratio_min": correction.low or 0.0}
    return None


def loss_keys(settled: Settled) -> dict[str, Any]:
    """Return the keys of the loss that every run writes."""
    recipe, native = settled.recipe, native_correction(settled.recipe)
    found = native or dict.fromkeys(("type", "ratio", "ratio_min"))
    return {
        # NeMo RL insists on it under FP8 (seam needs-correction) and in its asynchronous loop;
        # without a native correction the driver takes it out of the loss again.
        "loss_fn.use_importance_sampling_correction": native is not None
        or recipe.precision.rollout_linear == "fp8"
        or recipe.grpo.is_asynchronous,
        **{f"loss_fn.truncated_importance_sampling_{key}": each for key, each in found.items()},
        "loss_fn.token_level_loss": True,
        "loss_fn.reference_policy_kl_penalty": settled.kl_penalty,
    }


def given_options(recipe: Recipe) -> dict[str, tuple[str, Any]]:
    """Return, by NeMo RL's key, each option that is not null and writes it, with its value."""
    return {
        key: (option, value)
        for option, keys in OPTIONAL.items()
        if (value := attrgetter(option)(recipe)) is not None
        for key in keys
    }


def algorithm_keys(settled: Settled) -> dict[str, Any]:
    """Return the options of the algorithm, of warm-up and gradient clip, that are given."""
    algorithm = settled.recipe.algorithm
    found = {key: value for key, (_, value) in given_options(settled.recipe).items()}
    if algorithm.overlong_buffer is not None:
        found |= {
            SHAPES: True,
            BUFFER: max(1, round(algorithm.overlong_buffer * settled.response_tokens)),
            PENALTY: algorithm.filled.overlong_buffer_penalty,
            LONGEST: settled.response_tokens,
            STOP_COEFFICIENT: None,
        }
    if algorithm.stop_properly_penalty_coef is not None:
        found |= {SHAPES: True}
    return found | ({SCALES: True} if algorithm.reward_target_min is not None else {})
