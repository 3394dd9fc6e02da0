"""The policy that NeMo RL's driver trains: stock, and watched where the batch is whole.

`Policy.train` is the one place that sees a step's rollout batch unpacked and before it is spread
over ranks: the metrics of the mismatch are taken here, and every correction that NeMo RL's loss
does not know multiplies the advantages here. The clipped losses are linear in the advantage,
`max(-wA r, -wA clip(r)) = w max(-A r, -A clip(r))` for `w >= 0`, so this is the corrected loss
exactly, whatever packing, dynamic batching or context parallelism do to it afterwards.

Shapes: B sequences, T tokens, the first of which nothing predicts.
"""

# pyright: reportMissingImports=false
# NeMo RL stands on the path of a run, not of a type check.
from __future__ import annotations

import copy
import math
from typing import Any

import torch
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossFn
from nemo_rl.models.policy.lm_policy import Policy

from fp8_nemo.correction import Multiplier, correct, correction_metrics
from fp8_nemo.mismatch import LogprobPair, mismatch_metrics
from fp8_nemo.overrides import native_correction
from fp8_nemo.quantize import FP8_MAX
from fp8_nemo.recalibrate import RecalibrateError, max_drift, saturated_fraction
from fp8_nemo.schema import Recipe
from fp8_nemo.weights import kv_scale_names

STOCK_MARGIN = 1.05  # megatron_policy_worker.py, calibrate_qkv_fp8_scales


class WatchedPolicy(Policy):
    """NeMo RL's `Policy`, with our correction and the metrics of a step in `row`.

    Args:
        recipe: of the plan.
        arguments: as `setup` gives them to its policy factory.
    """

    def __init__(self, recipe: Recipe, **arguments: Any) -> None:
        self.correction = recipe.correction
        self.num_layers = recipe.model.shape.layers
        self.row: dict[str, float] = {}
        self.refit_bytes = 0
        self.kv_scales: dict[str, float] = {}
        super().__init__(**arguments)

    def train(self, data: Any, loss_fn: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        """`Policy.train` on the corrected batch; the caller's batch stays as it is.

        Raises:
            LogprobError: a logprob of a real token is not finite.
        """
        pair = logprob_pair(data)
        multiplier = correct(pair, self.correction)
        self.row |= mismatch_metrics(pair) | correction_metrics(multiplier, pair, self.correction)
        tokens, sequences = int(pair.mask_BT.sum()), len(pair.mask_BT)
        self.row |= {"rollout/tokens": tokens, "rollout/mean_length": tokens / max(1, sequences)}
        self.row |= {"refit/bytes": self.refit_bytes, "refit/verified_weights": 0}
        if native_correction(self.correction) is None:
            data = corrected(data, multiplier, self.correction.renormalize_denominator)
        results = super().train(data, loss_fn, *arguments, **options)
        self.row["train/grad_norm"] = float(torch.as_tensor(results["grad_norm"]).max())
        return results

    def prepare_refit_info(self) -> dict[str, Any] | None:
        """`Policy.prepare_refit_info`, its bytes noted: what each refit will send."""
        info = super().prepare_refit_info()
        self.refit_bytes = refit_bytes(info or {})
        return info

    def calibrate_qkv_fp8_scales(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """`Policy.calibrate_qkv_fp8_scales`, held against the scales that were in force.

        Raises:
            RecalibrateError: a scale is zero or not finite.
        """
        found = super().calibrate_qkv_fp8_scales(*arguments, **options)
        scales = checked_scales(found["layers"], self.num_layers)
        if self.kv_scales:
            self.row |= drift_metrics(self.kv_scales, scales)
        self.kv_scales = scales
        return found

    def take_row(self) -> dict[str, float]:
        """The metrics since the last call."""
        row, self.row = self.row, {}
        return row


def logprob_pair(data: Any) -> LogprobPair:
    """A rollout batch as NeMo RL holds it, `[B, T]`, as our pair `[B, T - 1]` on the host.

    Raises:
        LogprobError: a logprob of a real token is not finite.
    """
    mask_BT = data["token_mask"][:, 1:].bool() & data["sample_mask"].bool()[:, None]
    return LogprobPair(data["prev_logprobs"][:, 1:], data["generation_logprobs"][:, 1:], mask_BT)


def corrected(data: Any, multiplier: Multiplier, renormalize: bool) -> Any:
    """A shallow copy of the batch whose advantages are multiplied.

    Args:
        data: NeMo RL's batch, `[B, T]`.
        multiplier: `[B, T - 1]`.
        renormalize: rejected tokens leave the mask too, and with it every denominator.
    """
    data = copy.copy(data)
    advantages_BT = data["advantages"].clone()
    advantages_BT[:, 1:] *= multiplier.value_BT
    data["advantages"] = advantages_BT
    if renormalize:
        token_mask_BT = data["token_mask"].clone()
        token_mask_BT[:, 1:] *= multiplier.kept_BT
        data["token_mask"] = token_mask_BT
    return data


def without_correction(loss_fn: ClippedPGLossFn) -> ClippedPGLossFn:
    """NeMo RL's own loss with a multiplier of exactly 1.

    Its configuration must ask for the correction under FP8 (grpo.py:1321); the loss object that
    trains need not.
    """
    plain = copy.copy(loss_fn)
    plain.use_importance_sampling_correction = False
    plain.truncated_importance_sampling_type = None
    plain.truncated_importance_sampling_ratio = None
    plain.truncated_importance_sampling_ratio_min = None
    return plain


def refit_bytes(info: dict[str, Any]) -> int:
    """Bytes of a refit from NeMo RL's metadata, `{name: (shape, dtype)}`."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in info.values())


def checked_scales(scales: dict[str, float], num_layers: int) -> dict[str, float]:
    """Scales as they are, by vLLM's names.

    Raises:
        RecalibrateError: one is missing, zero or not finite: the engine would run with 1.0.
    """
    for layer in range(num_layers):
        for name in kv_scale_names(layer):
            if not (math.isfinite(scales.get(name, 0.0)) and scales.get(name, 0.0) > 0):
                raise RecalibrateError(
                    f"{name}: scale {scales.get(name)}; it must be finite and above 0. Missing or "
                    "zero: no forward reached the layer; NaN or Inf: the policy diverged"
                )
    return scales


def drift_metrics(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """How the scales in force did, by the ranges behind those that were measured next."""
    layers = len(after) // 3
    scales_L3 = [[after[name] for name in kv_scale_names(layer)] for layer in range(layers)]
    amax_L3 = torch.tensor(scales_L3) * FP8_MAX / STOCK_MARGIN
    return {
        "recalibrate/saturated_fraction": saturated_fraction(amax_L3, before),
        "recalibrate/max_drift": max_drift(before, after),
    }
