"""Say what FP16 on both sides (`precision=fp16`) needs of NeMo RL's configuration, and where not.

Megatron multiplies the loss by a scale and leaves out an update whose gradients overflow, but only
if its optimizer knows that the weights are FP16 (arXiv 2510.26788; docs/research/nemo.md). What
NeMo RL lacks beside these keys is done by our policy worker (`nemo/policy_worker.py`, LossScale).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fp8_nemo.nemo_config.keys import MEGATRON
from fp8_nemo.nemo_config.seams import SEAMS
from fp8_nemo.nemo_config.versions import Limit
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.settled import GROWTH_INTERVAL

OPTIMIZER = f"{MEGATRON}.optimizer"
AWARE = f"{OPTIMIZER}.use_precision_aware_optimizer"
REDUCED = f"{MEGATRON}.distributed_data_parallel_config.grad_reduce_in_fp32"
LEAST_SCALE = 1.0
"""Megatron's `min_loss_scale`, below which a scale does not start."""
OTHER_LOSSES = {
    f"{MEGATRON}.moe_router_load_balancing_type": "none",
    f"{MEGATRON}.model_overrides.moe_z_loss_coeff": None,
    f"{MEGATRON}.mtp_num_layers": 0,
}
"""Keys of losses beside the policy's, and the values without one."""


def fp16_keys(precision: Precision) -> dict[str, Any]:
    """Return weights and gradients' types, and a loss scale as the local backend's.

    With a hysteresis of 1 every overflow halves the scale, as torch's own scaler does.
    """
    if not precision.plain.scales_loss:
        return {}
    return {
        "policy.precision": precision.plain.dtype,
        f"{OPTIMIZER}.bf16": False,
        f"{OPTIMIZER}.fp16": True,
        f"{OPTIMIZER}.initial_loss_scale": precision.loss_scale,
        f"{OPTIMIZER}.loss_scale_window": GROWTH_INTERVAL,
        f"{OPTIMIZER}.hysteresis": 1,
        REDUCED: True,
    }


def fp16_limits(recipe: Recipe, written: Mapping[str, Any]) -> Iterator[Limit]:
    """Yield the limits of FP16: keys that would lose gradients, losses that go without the scale.

    Args:
        recipe: of the run.
        written: every key that NeMo RL gets.
    """
    precision, in_fp16 = recipe.precision, recipe.precision.plain.scales_loss
    yield Limit(
        "precision.loss_scale",
        precision.loss_scale,
        in_fp16 and (precision.loss_scale or 0) < LEAST_SCALE,
        f"must be at least {LEAST_SCALE:g}, where Megatron's scale ends",
        "megatron/core/optimizer/grad_scaler.py, DynamicGradScaler",
        "raise it",
    )
    for key, value in ((AWARE, False), (REDUCED, True)):
        yield Limit(
            f"nemo.{key}",
            written.get(key),
            in_fp16 and written.get(key) != value,
            f"must be {str(value).lower()} with precision=fp16: else the scale is taken off in "
            "FP16, which loses small gradients",
            SEAMS["fp16-unscaled"].path,
            "leave it out",
        )
    for key, without in OTHER_LOSSES.items():
        yield Limit(
            f"nemo.{key}",
            written.get(key),
            in_fp16 and written.get(key, without) != without,
            f"must be {'null' if without is None else without} with precision=fp16: NeMo RL takes "
            "the loss scale off that loss, and Megatron then divides its gradients by it",
            SEAMS["fp16-other-losses"].path,
            "leave it out, or choose precision=bf16",
        )
