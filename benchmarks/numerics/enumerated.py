# pyright: standard
"""Bias and variance of a corrected policy gradient, on a problem small enough to know the truth.

One prompt, answers of exactly T tokens, logits of their own for every context (the tokens so far):
all answers are listed, every expectation is a sum, nothing is sampled.

The truth is the gradient of the mean reward under `train` with respect to its logits. One rollout's
estimate is `A sum_t m_t grad log train(token_t | context_t)`, m being what `correction.correct`
gives and A the reward less its mean under `rollout`: GRPO's loss at the first update of a step
(`current` is `train`) with a large group. What divides both (T, a group's deviation) is left out.

Shapes: B answers, T tokens, V vocabulary, C contexts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fp8_nemo.correction.correct import correct
from fp8_nemo.correction.mismatch import LogprobPair
from fp8_nemo.recipe.options.correction import Correction

SPREAD = 2.0  # standard deviation of logits: entropy is 0.55 of the uniform distribution's
REWARDED = 0.25  # share of the answers that are right


@dataclass(frozen=True)
class Enumeration:
    """Every answer, as both policies see it.

    Example, as tensors: `Enumeration(token_BT=[[0], [1]], context_BT=[[0], [0]], train_CV=
    log([[0.5, 0.5]]), rollout_CV=log([[0.4, 0.6]]), reward_B=[0.0, 1.0])`.
    """

    token_BT: Tensor
    context_BT: Tensor
    """Which of the C contexts each token follows; never twice the same in one answer."""
    train_CV: Tensor
    """Logprobs, in FP64."""
    rollout_CV: Tensor
    reward_B: Tensor

    @property
    def pair(self) -> LogprobPair:
        """All answers as one batch, each once."""
        at, every_BT = (self.context_BT, self.token_BT), self.token_BT >= 0
        return LogprobPair(self.train_CV[at], self.rollout_CV[at], every_BT)

    @property
    def share_B(self) -> Tensor:
        """Probability of each answer under `rollout`."""
        return self.pair.rollout_BT.sum(1).exp()

    @property
    def advantage_B(self) -> Tensor:
        """Reward less its mean under `rollout`."""
        return self.reward_B - self.share_B @ self.reward_B

    @property
    def kl(self) -> float:
        """Exact KL(rollout || train), nats per token."""
        return -(self.share_B @ self.pair.log_ratio_BT.mean(1)).item()


class GradientError(NamedTuple):
    """In units of the true gradient's norm: `GradientError(0.1, 20.0, 0.95, 0.999)`."""

    bias: float
    """Norm of mean estimate less truth."""
    deviation: float
    """Standard deviation of one rollout's estimate: root of its covariance's trace."""
    length: float
    """Norm of the mean estimate."""
    cosine: float
    """Of the angle between mean estimate and truth; 0 if the mean estimate is 0."""

    def rmse(self, rollouts: float) -> float:
        """Return the root mean squared error of the mean over independent rollouts."""
        return math.sqrt(self.bias**2 + self.deviation**2 / rollouts)


def enumerate_answers(V: int, T: int, noise: float, seed: int) -> Enumeration:
    """Enumerate a policy, the rollout policy that noise makes of it, and rewards of 0 or 1.

    `V**T` answers; `noise` is the standard deviation of what `rollout` adds to each logit. The
    `REWARDED` answers with the highest sums of a score per token and place are right.
    """
    draw, C = torch.Generator().manual_seed(seed), (V**T - 1) // (V - 1)
    answer_B1, place_T = torch.arange(V**T)[:, None], torch.arange(T)
    token_BT = answer_B1 // V ** (T - 1 - place_T) % V
    context_BT = (V**place_T - 1) // (V - 1) + answer_B1 // V ** (T - place_T)
    logits_CV = SPREAD * torch.randn(C, V, generator=draw, dtype=torch.float64)
    score_TV = torch.randn(T, V, generator=draw, dtype=torch.float64)
    noise_CV = noise * torch.randn(C, V, generator=draw, dtype=torch.float64)
    score_B = score_TV[place_T, token_BT].sum(1)
    reward_B = (score_B > score_B.quantile(1 - REWARDED)).double()
    train_CV, rollout_CV = (x.log_softmax(-1) for x in (logits_CV, logits_CV + noise_CV))
    return Enumeration(token_BT, context_BT, train_CV, rollout_CV, reward_B)


def expected_multiplier(pair: LogprobPair, share_B: Tensor, correction: Correction) -> Tensor:
    """Return multipliers `[B, T]` of a batch so large that means are expectations.

    `pair` has sequences of one length, each once, `share_B` their probabilities. `normalize`
    divides by the expected value before masks, `renormalize_denominator` by the expected share of
    kept tokens.
    """
    plain = replace(correction, normalize=False)
    found = correct(pair, plain)
    divisor = torch.ones(())
    if correction.normalize:
        unmasked = correct(pair, replace(plain, mask="none", veto=None))
        divisor = share_B @ unmasked.value_BT.double().mean(1)
    if correction.renormalize_denominator and found.kept_BT.any():
        divisor = divisor * (share_B @ found.kept_BT.double().mean(1))
    return found.value_BT.double() / divisor


def true_gradient(problem: Enumeration) -> Tensor:
    """Return the gradient `[C, V]` of the mean reward under `train` in its logits."""
    coefficient_B = problem.pair.train_BT.sum(1).exp() * problem.reward_B
    return _gradient(problem, coefficient_B[:, None].expand_as(problem.token_BT))


def mean_gradient(problem: Enumeration, value_BT: Tensor) -> Tensor:
    """Return the expected estimate `[C, V]` with these multipliers."""
    return _gradient(problem, (problem.share_B * problem.advantage_B)[:, None] * value_BT)


def gradient_error(problem: Enumeration, value_BT: Tensor) -> GradientError:
    """Return the exact error of the gradient that multipliers `[B, T]` give.

    No context occurs twice in an answer, so an answer's squared norm is a sum over its tokens; that
    of a softmax's `grad log p`, which is `onehot - p`, is `1 - 2 p + sum p^2`.
    """
    true_CV, mean_CV = true_gradient(problem), mean_gradient(problem, value_BT)
    p_CV = problem.train_CV.exp()
    square_CV = 1 - 2 * p_CV + p_CV.square().sum(1, keepdim=True)
    square_BT = value_BT.square() * square_CV[problem.context_BT, problem.token_BT]
    square = problem.share_B @ (problem.advantage_B.square() * square_BT.sum(1))
    size, length = true_CV.norm(), mean_CV.norm()
    return GradientError(
        bias=((mean_CV - true_CV).norm() / size).item(),
        deviation=((square - length.square()).clamp(min=0).sqrt() / size).item(),
        length=(length / size).item(),
        cosine=((mean_CV * true_CV).sum() / (size * length)).item() if length > 0 else 0.0,
    )


def pooled(errors: Sequence[GradientError]) -> GradientError:
    """Pool the errors of several problems: root mean squares of bias and deviation, else means."""
    columns = torch.tensor(errors, dtype=torch.float64).T
    root_means, means = columns[:2].square().mean(1).sqrt(), columns[2:].mean(1)
    return GradientError(*root_means.tolist(), *means.tolist())


def _gradient(problem: Enumeration, coefficient_BT: Tensor) -> Tensor:
    """Sum over all tokens their weight times `grad log p`."""
    at = problem.context_BT, problem.token_BT
    said_CV = torch.zeros_like(problem.train_CV).index_put(at, coefficient_BT, accumulate=True)
    return said_CV - said_CV.sum(1, keepdim=True) * problem.train_CV.exp()
