"""What multiplies a token's loss so that off-policy rollouts train the policy that they should.

A correction is two rows of one table and a few numbers. `level` says which aggregate of `log_ratio`
the multiplier is the exponential of, `mask` which aggregate decides whether a token is kept:

    aggregate   of a token's log_ratio            ratio used by
    token       itself                            tis, mis (IcePop)
    sequence    its sum over the sequence         seq-tis, seq-mis
    geometric   its mean over the sequence        geo-mis

Order: truncate, normalize, mask, veto. Bounds are on the ratio `train / rollout` itself and
inclusive (verl's k1 bounds are on its inverse: asymmetric bounds swap sides). Multipliers carry no
gradient.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8_nemo import schema
from fp8_nemo.mismatch import LogprobPair, effective_sample_share, ratio


@dataclass(frozen=True)
class Multiplier:
    """What a batch's losses are multiplied by.

    Example: `Multiplier(value_BT=tensor([[1.0, 2.0], [0.9, 0.0]]), kept_BT=tensor([[True, True],
    [True, False]]), clipped_BT=...)`.
    """

    value_BT: Tensor
    """FP32; zero at padding and where rejected."""
    kept_BT: Tensor
    """Real tokens not rejected; with `renormalize_denominator`, the loss's denominator."""
    clipped_BT: Tensor
    """Real tokens whose ratio was above `truncate`."""


def _per_token(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return log_ratio_BT


def _per_sequence(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return log_ratio_BT.sum(dim=1, keepdim=True).expand_as(log_ratio_BT)


def _per_sequence_mean(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return _per_sequence(log_ratio_BT, mask_BT) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)


AGGREGATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": _per_token,
    "sequence": _per_sequence,
    "geometric": _per_sequence_mean,
}


@torch.no_grad()
def correct(pair: LogprobPair, correction: schema.Correction) -> Multiplier:
    """The multiplier of every token of a step's rollout batch.

    `normalize` divides by a mean over the whole batch, so call this once a step, not per
    micro-batch.

    Args:
        pair: the batch, `[B, T]`.
        correction: the recipe's correction.
    """
    mask_BT = pair.mask_BT.bool()

    def ratio_at(level: str) -> Tensor:
        return ratio(AGGREGATES[level](pair.log_ratio_BT, mask_BT))

    value_BT = torch.ones_like(pair.log_ratio_BT)
    if correction.level != "none":
        value_BT = ratio_at(correction.level)
    clipped_BT = mask_BT & (value_BT > _or(correction.truncate, torch.inf))
    value_BT = value_BT.clamp(max=_or(correction.truncate, torch.inf))
    if correction.normalize:
        value_BT = value_BT / _batch_mean(value_BT, mask_BT, correction.level)
    kept_BT = mask_BT.clone()
    if correction.mask != "none":
        bounded_BT = ratio_at(correction.mask)
        kept_BT &= bounded_BT >= _or(correction.low, 0.0)
        kept_BT &= bounded_BT <= _or(correction.high, torch.inf)
    if correction.veto is not None:
        vetoed_BT = mask_BT & (ratio_at("token") < correction.veto)
        kept_BT &= ~vetoed_BT.any(dim=1, keepdim=True)
    return Multiplier((value_BT * kept_BT).float(), kept_BT, clipped_BT)


def correction_metrics(
    multiplier: Multiplier, pair: LogprobPair, correction: schema.Correction
) -> dict[str, float]:
    """The `correction/` keys of design section 7; empty if the batch holds no real token.

    `ess` counts all real tokens, or at sequence level all sequences that have one.
    """
    mask_BT = pair.mask_BT.bool()
    if not mask_BT.any():
        return {}
    value_N = multiplier.value_BT[mask_BT].double()
    samples_N = value_N
    if _by_sequence(correction.level):
        samples_N = multiplier.value_BT.amax(dim=1)[mask_BT.any(dim=1)].double()
    return {
        "correction/multiplier_mean": value_N.mean().item(),
        "correction/ess": effective_sample_share(samples_N),
        "correction/clipped_fraction": multiplier.clipped_BT[mask_BT].double().mean().item(),
        "correction/masked_fraction": 1 - multiplier.kept_BT[mask_BT].double().mean().item(),
    }


def _batch_mean(value_BT: Tensor, mask_BT: Tensor, level: str) -> Tensor:
    """Mean over real tokens, or over sequences that have one; 1 if there is none."""
    samples_N = value_BT[mask_BT]
    if _by_sequence(level):
        samples_N = value_BT[mask_BT.any(dim=1), 0]
    return samples_N.mean() if samples_N.numel() else torch.ones(())


def _by_sequence(level: str) -> bool:
    return level in ("sequence", "geometric")


def _or(bound: float | None, default: float) -> float:
    return default if bound is None else bound
