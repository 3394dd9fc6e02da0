"""Measure how far a step's updates move the policy away from the one that they started from.

`ratio = current / train`; both policies score the tokens that were sampled. With one update a step
the ratio is 1 wherever the trainer computes the same number twice.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CLIPPED, MOVED = "fp8_nemo_clipped", "fp8_nemo_moved"
"""Ours among the metrics of NeMo RL's micro-batches, where `_min` and `_max` would be extrema."""


def policy_ratio(
    current_BT: Tensor, train_BT: Tensor, mask_BT: Tensor, *, by_sequence: bool
) -> Tensor:
    """Return current over train per token, or its geometric mean over each sequence (GSPO)."""
    log_ratio_BT = current_BT - train_BT
    if not by_sequence:
        return log_ratio_BT.exp()
    tokens_B1 = mask_BT.sum(1, keepdim=True).clamp(min=1)
    mean_B1 = (log_ratio_BT * mask_BT).sum(1, keepdim=True) / tokens_B1
    return mean_B1.exp().expand_as(log_ratio_BT)


@torch.no_grad()
def clipped_tokens(ratio_BT: Tensor, mask_BT: Tensor, clip: tuple[float, float]) -> Tensor:
    """Return how many real tokens have a ratio outside the clip, whatever their advantage."""
    outside_BT = (ratio_BT < clip[0]) | (ratio_BT > clip[1])
    return (outside_BT & mask_BT.bool()).sum()


@torch.no_grad()
def kl_sum(current_BT: Tensor, train_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the k3 estimate of KL(train || current), summed over real tokens."""
    x_BT = (current_BT - train_BT).masked_fill(~mask_BT.bool(), 0.0)
    return (torch.expm1(x_BT) - x_BT).sum()


@torch.no_grad()
def entropy_sum(current_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the entropy's estimate, `-r log current` with `r = current / rollout`, summed.

    NeMo RL's `approx_entropy`.
    """
    weighed_BT = (current_BT - rollout_BT).exp() * current_BT
    return -weighed_BT.masked_fill(~mask_BT.bool(), 0.0).sum()


def update_metrics(
    of_micro_batches: dict[str, list[float]], *, has_ratio: bool
) -> dict[str, float]:
    """Return a step's `train/` metrics from those of NeMo RL's micro-batches; ours are taken out.

    Its workers have divided each by the update's tokens and by the step's updates, so that the sum
    is the mean over updates.

    Args:
        of_micro_batches: `all_mb_metrics` of `Policy.train`.
        has_ratio: whether the loss has one; else NeMo RL writes logprobs in its place.
    """
    sums = {
        "train/entropy": of_micro_batches.get("approx_entropy"),
        "train/kl": of_micro_batches.pop(MOVED, None),
        "train/clip_fraction": of_micro_batches.pop(CLIPPED, None),
    }
    found = {key: float(sum(values)) for key, values in sums.items() if values is not None}
    ratios = [x for x in of_micro_batches.get("probs_ratio_max", ()) if math.isfinite(x)]
    if not has_ratio:
        found.pop("train/clip_fraction", None)
    elif ratios:
        found["train/ratio_max"] = max(ratios)
    return found
