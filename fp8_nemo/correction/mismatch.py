"""Measure how far the sampled policy is from the trained one, on the tokens that were sampled.

Everything starts from `log_ratio = train_logprob - rollout_logprob` over real tokens, in FP64,
under the mask before any correction. The KL estimate is k3 (http://joschu.net/blog/kl-approx.html):
unbiased, and never negative, term by term.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DIFFERS = 1e-5
"""Nats: beyond what two log-softmaxes of equal logits differ by (docs/research/mismatch.md)."""
MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8 squares and sums in FP64 without overflow


class LogprobError(ValueError):
    """Report logprobs that have no mean: the policy, or the engine, has diverged."""


@dataclass(frozen=True)
class LogprobPair:
    """Hold one batch, scored twice.

    Example: two sequences, the second one token shorter:
    `LogprobPair(train_BT=tensor([[-0.1, -2.0], [-0.7, 0.0]]), rollout_BT=tensor([[-0.1, -2.1],
    [-0.6, 0.0]]), mask_BT=tensor([[True, True], [True, False]]))`.

    Raises:
        ValueError: shapes differ.
        LogprobError: a real token's logprob is not finite.
    """

    train_BT: Tensor
    """Logprob of each token as the trainer computes it."""
    rollout_BT: Tensor
    """Logprob of each token as the engine sampled it."""
    mask_BT: Tensor
    """True at real tokens: response tokens, the end of sequence included."""

    def __post_init__(self) -> None:
        """Refuse what would turn every mean into NaN."""
        shapes = {tuple(t.shape) for t in (self.train_BT, self.rollout_BT, self.mask_BT)}
        if len(shapes) != 1:
            raise ValueError(f"train, rollout and mask differ in shape: {sorted(shapes)}")
        for side, logprob_BT in (("train", self.train_BT), ("rollout", self.rollout_BT)):
            broken = int((~torch.isfinite(logprob_BT) & self.mask_BT.bool()).sum())
            if broken:
                raise LogprobError(f"{side} logprobs of {broken} real tokens are not finite")

    @property
    def log_ratio_BT(self) -> Tensor:
        """Return `train - rollout` in FP64, zero at padding."""
        log_ratio_BT = self.train_BT.double() - self.rollout_BT.double()
        return log_ratio_BT.masked_fill(~self.mask_BT.bool(), 0.0)

    @property
    def log_ratio_N(self) -> Tensor:
        """Return `train - rollout` of the real tokens alone, flat, in FP64."""
        return self.log_ratio_BT[self.mask_BT.bool()]


def ratio(log_ratio: Tensor) -> Tensor:
    """Return `exp(log_ratio)`, the exponent clamped to +-20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def effective_sample_share(multiplier_N: Tensor) -> float:
    """Return `(sum m)^2 / (n sum m^2)`: 1 if all are equal, 1/n if one has all, 0 if all are 0."""
    squares = multiplier_N.square().sum()
    if not squares > 0:
        return 0.0
    return (multiplier_N.sum().square() / (multiplier_N.numel() * squares)).item()


def length_metrics(
    lengths_B: Tensor, longest: int, full_B: Tensor | None = None
) -> dict[str, float]:
    """Return the `rollout/` metrics of a step's responses.

    Args:
        lengths_B: response tokens.
        longest: that a response may have: one that long was cut, most likely.
        full_B: true where prompt and response fill the sequence, which cuts too.
    """
    cut_B = lengths_B >= longest
    if full_B is not None:
        cut_B = cut_B | full_B
    tokens, sequences = int(lengths_B.sum()), max(1, len(lengths_B))
    return {
        "rollout/tokens": tokens,
        "rollout/mean_length": tokens / sequences,
        "rollout/cut_fraction": int(cut_B.sum()) / sequences,
    }


def mismatch_metrics(pair: LogprobPair) -> dict[str, float]:
    """Return the `mismatch/` keys of docs/metrics.md; none if the batch holds no real token.

    - `kl`: k3 estimate of KL(rollout || train), `mean(expm1(x) - x)`; nats per token, no clamp
    - `answer_kl`: its sum over an answer, mean of the answers that have a real token
    - `differing_answers`: their share with a token whose `|x|` is above 1e-5
    - `token_mult_prob_error`: `mean(exp(|x|))`, NeMo RL's; 1 is perfect
    - `abs_log_ratio_p99`, `abs_log_ratio_max`: the tail
    - `ess`: effective sample share of the unmodified token ratios
    """
    mask_BT, x_BT = pair.mask_BT.bool(), pair.log_ratio_BT
    x_N = x_BT[mask_BT]
    if not x_N.numel():
        return {}
    distance_N, k3_N = x_N.abs(), torch.expm1(x_N) - x_N
    answers, differing = mask_BT.any(1).sum(), (x_BT.abs() > DIFFERS).any(1).sum()
    return {
        "mismatch/kl": k3_N.mean().item(),
        "mismatch/answer_kl": (k3_N.sum() / answers).item(),
        "mismatch/differing_answers": (differing / answers).item(),
        "mismatch/token_mult_prob_error": distance_N.exp().mean().item(),
        # `torch.quantile` sorts, and takes 2**24 values at the most.
        "mismatch/abs_log_ratio_p99": float(np.quantile(distance_N.cpu().numpy(), 0.99)),
        "mismatch/abs_log_ratio_max": distance_N.max().item(),
        "mismatch/ess": effective_sample_share(ratio(x_N)),
    }
