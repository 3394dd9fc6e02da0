"""Compute what multiplies a token's loss, so that off-policy rollouts train the right policy.

A correction is two rows of one table and a few numbers. `level` says which row the multiplier is,
`mask` which row decides whether a token is kept. x is a token's `log_ratio`; but for `token`, a row
gives all tokens of a sequence the same number:

    rows                              value                               bounds
    token, sequence, geometric        exp of x, of its sum, of its mean   low <= value <= high
    token-k2, sum-k2, mean-k2, max-k2 x^2 / 2                             value <= high
    token-k3, sum-k3, mean-k3, max-k3 exp(x) - 1 - x                      value <= high
    mean-error                        mean of exp |x|                     value <= high

Order: truncate, normalize, mask, veto. Bounds are inclusive, and those of a ratio are on `train /
rollout` itself (verl's k1 bounds are on its inverse: asymmetric bounds swap sides). k2 and k3 are
estimates of KL(rollout || train) per token (http://joschu.net/blog/kl-approx.html). `mean-error` is
NeMo RL's `seq_logprob_error_threshold`. Multipliers carry no gradient.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fp8_nemo.correction.mismatch import MAX_LOG_RATIO, LogprobPair, effective_sample_share, ratio
from fp8_nemo.recipe.options.correction import Correction


@dataclass(frozen=True)
class Multiplier:
    """Hold what a batch's losses are multiplied by.

    Example: `Multiplier(value_BT=tensor([[1.0, 2.0], [0.9, 0.0]]), kept_BT=tensor([[True, True],
    [True, False]]), clipped_BT=...)`.
    """

    value_BT: Tensor
    """FP32; zero at padding and where rejected."""
    kept_BT: Tensor
    """Real tokens not rejected; with `renormalize_denominator`, the loss's denominator."""
    clipped_BT: Tensor
    """Real tokens whose ratio was above `truncate`, or below `truncate_low`."""


Aggregate = Callable[[Tensor, Tensor], Tensor]


def _each(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return value_BT


def _sum(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return (value_BT * mask_BT).sum(dim=1, keepdim=True).expand_as(value_BT)


def _mean(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return _sum(value_BT, mask_BT) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)


def _max(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    kept_BT = value_BT * mask_BT
    return kept_BT.amax(dim=1, keepdim=True).expand_as(value_BT) if kept_BT.shape[1] else kept_BT


def _itself(x: Tensor) -> Tensor:
    return x


def _k2(x: Tensor) -> Tensor:
    return _clamped(x).square() / 2


def _k3(x: Tensor) -> Tensor:
    return torch.expm1(_clamped(x)) - _clamped(x)


def _error(x: Tensor) -> Tensor:
    return ratio(x.abs())


def _clamped(x: Tensor) -> Tensor:
    return x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


THROWN_AWAY = 1e-8
"""A mean multiplier at which `normalize` leaves a batch as it is (verl, rollout_corr_helper.py)."""


class Statistic(NamedTuple):
    """Describe one row: `Statistic(_k3, _mean)` is a sequence's mean k3."""

    of_token: Callable[[Tensor], Tensor]
    aggregate: Aggregate
    finish: Callable[[Tensor], Tensor] = _itself

    def __call__(self, pair: LogprobPair) -> Tensor:
        """Return `[B, T]`, of any value at padding."""
        mask_BT = pair.mask_BT.bool()
        return self.finish(self.aggregate(self.of_token(pair.log_ratio_BT), mask_BT))


STATISTICS: dict[str, Statistic] = {
    "token": Statistic(_itself, _each, ratio),
    "sequence": Statistic(_itself, _sum, ratio),
    "geometric": Statistic(_itself, _mean, ratio),
    "token-k2": Statistic(_k2, _each),
    "sum-k2": Statistic(_k2, _sum),
    "mean-k2": Statistic(_k2, _mean),
    "max-k2": Statistic(_k2, _max),
    "token-k3": Statistic(_k3, _each),
    "sum-k3": Statistic(_k3, _sum),
    "mean-k3": Statistic(_k3, _mean),
    "max-k3": Statistic(_k3, _max),
    "mean-error": Statistic(_error, _mean),
}


@torch.no_grad()
def correct(pair: LogprobPair, correction: Correction) -> Multiplier:
    """Return the multiplier of every token of a step's rollout batch.

    `normalize` divides by a mean over the whole batch, so call this once a step, not per
    micro-batch.

    Args:
        pair: the batch, `[B, T]`.
        correction: the recipe's correction.
    """
    mask_BT = pair.mask_BT.bool()
    value_BT = torch.ones_like(pair.log_ratio_BT)
    if correction.level != "none":
        value_BT = STATISTICS[correction.level](pair)
    lowest, highest = _or(correction.truncate_low, 0.0), _or(correction.truncate, torch.inf)
    clipped_BT = mask_BT & ((value_BT > highest) | (value_BT < lowest))
    value_BT = value_BT.clamp(lowest, highest)
    if correction.normalize:
        value_BT = value_BT / _batch_mean(value_BT, mask_BT, correction.level)
    kept_BT = mask_BT.clone()
    if correction.mask != "none":
        bounded_BT = STATISTICS[correction.mask](pair)
        kept_BT &= bounded_BT >= _or(correction.low, 0.0)
        kept_BT &= bounded_BT <= _or(correction.high, torch.inf)
    if correction.veto is not None:
        vetoed_BT = mask_BT & (STATISTICS["token"](pair) < correction.veto)
        kept_BT &= ~vetoed_BT.any(dim=1, keepdim=True)
    return Multiplier((value_BT * kept_BT).float(), kept_BT, clipped_BT)


def correction_metrics(
    multiplier: Multiplier, pair: LogprobPair, correction: Correction
) -> dict[str, float]:
    """Return the `correction/` keys of docs/metrics.md; none if the batch holds no real token.

    `ess` counts all real tokens, or at sequence level all sequences that have one.
    """
    mask_BT = pair.mask_BT.bool()
    if not mask_BT.any():
        return {}
    samples_N = _samples(multiplier.value_BT, mask_BT, correction.level).double()
    return {
        "correction/multiplier_mean": multiplier.value_BT[mask_BT].double().mean().item(),
        "correction/ess": effective_sample_share(samples_N),
        "correction/clipped_fraction": multiplier.clipped_BT[mask_BT].double().mean().item(),
        "correction/masked_fraction": (~multiplier.kept_BT[mask_BT]).double().mean().item(),
    }


def advantage_metrics(
    multiplier: Multiplier, pair: LogprobPair, advantages: Tensor
) -> dict[str, float]:
    """Return the mean advantage of rejected and of truncated tokens, where there are any.

    Below zero, a correction takes more bad tokens away than good ones.

    Args:
        multiplier: of the batch.
        pair: the same batch, `[B, T]`.
        advantages: `[B, 1]` or `[B, T]`, before any correction.
    """
    mask_BT = pair.mask_BT.bool()
    advantages_BT = advantages.expand(mask_BT.shape)
    chosen = {
        "correction/masked_advantage": mask_BT & ~multiplier.kept_BT,
        "correction/clipped_advantage": multiplier.clipped_BT,
    }
    return {
        key: advantages_BT[chosen_BT].double().mean().item()
        for key, chosen_BT in chosen.items()
        if chosen_BT.any()
    }


def _batch_mean(value_BT: Tensor, mask_BT: Tensor, level: str) -> Tensor:
    """Return the mean of the samples; 1 if there is none.

    Also 1 where the correction has thrown the batch away, as in verl: it gets no weight back.
    """
    samples_N = _samples(value_BT, mask_BT, level)
    mean = samples_N.mean() if samples_N.numel() else torch.ones(())
    return mean if mean > THROWN_AWAY else torch.ones(())


def _samples(value_BT: Tensor, mask_BT: Tensor, level: str) -> Tensor:
    """Return the multipliers of real tokens, or by level one of each sequence that has a token."""
    if level in ("sequence", "geometric") and mask_BT.shape[1]:
        return value_BT.amax(dim=1)[mask_BT.any(dim=1)]
    return value_BT[mask_BT]


def _or(bound: float | None, default: float) -> float:
    return default if bound is None else bound
