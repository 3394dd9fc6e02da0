# pyright: standard
"""Ratios of a real model's tokens with exact probabilities: what a correction would multiply.

Problems are read with their right answers by the trainer and by a refitted engine. Before every
answer token, each token of the vocabulary has a probability of being sampled and a ratio: shares
and means are expectations, and machines differ by the rounding of their sums alone.

Shapes: N answer tokens, V vocabulary, B = N V candidates, T tokens, R answer tokens of a sequence,
G points of a grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.numerics.enumerated import expected_multiplier
from benchmarks.numerics.sources import CPU, FP8_KV_ATTN, answer_logprobs, answered, engine_model
from fp8_nemo.correction.correct import correct
from fp8_nemo.correction.measure import Effect
from fp8_nemo.correction.mismatch import LogprobPair
from fp8_nemo.local.chat import Chat
from fp8_nemo.local.policy import Policy
from fp8_nemo.recipe.options.correction import Correction
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.problems import Problem

WIDTH, POINTS = 2.0**-10, 2**18


class ExactRatios(NamedTuple):
    """Logprobs of the whole vocabulary: `ExactRatios(train_NV=tensor(...), rollout_NV=...)`."""

    train_NV: Tensor
    rollout_NV: Tensor

    @property
    def pair(self) -> LogprobPair:
        """`[B, 1]`: every candidate as a sequence of its own."""
        train_B1, rollout_B1 = (each_NV.reshape(-1, 1) for each_NV in self)
        return LogprobPair(train_B1, rollout_B1, torch.ones_like(train_B1).bool())

    @property
    def share_B(self) -> Tensor:
        """Probability of each under `rollout`, all answer tokens being equally likely."""
        return self.rollout_NV.exp().flatten() / len(self.rollout_NV)

    def scaled(self, factor: float) -> ExactRatios:
        """Return the ratios as if `rollout` were `factor` times as far away, in logits."""
        far_NV = torch.lerp(self.train_NV, self.rollout_NV, factor)
        return ExactRatios(self.train_NV, far_NV.log_softmax(-1))


@torch.no_grad()
def exact_ratios(
    path: Path, problems: Sequence[Problem], precision: Precision = FP8_KV_ATTN
) -> ExactRatios:
    """Return logprobs of trainer and engine on the same tokens, which also give KV scales.

    Raises:
        RefitError: a refit was not proven.
        RecalibrateError: a layer's range of Q, K or V is zero or not finite.
    """
    policy, batch = Policy(path, precision, 0.0, CPU), answered(problems, Chat.load(path))
    rollout_BRV = answer_logprobs(engine_model(policy, precision, batch), batch, cached=True)
    train_BRV = answer_logprobs(policy.model, batch, cached=False)
    return ExactRatios(train_BRV[batch.response_mask_BR], rollout_BRV[batch.response_mask_BR])


def expected_effect(pair: LogprobPair, share_B: Tensor, correction: Correction) -> Effect:
    """Return `measure.effect` as an expectation over sequences `[B, T]` of these probabilities."""
    found, value_BT = correct(pair, correction), expected_multiplier(pair, share_B, correction)
    each = found.clipped_BT.double(), found.kept_BT.double(), value_BT, value_BT.square()
    clipped, kept, mean, square = ((share_B @ x_BT.mean(1)).item() for x_BT in each)
    return Effect(clipped, 1 - kept, mean**2 / square if square > 0 else 0.0, mean)


def sum_of_tokens(ratios: ExactRatios, length: int) -> tuple[Tensor, Tensor]:
    """Return the distribution of the sum of `length` tokens' log ratios: `(x_G, share_G)`.

    Two neighbours on the grid share a log ratio, which keeps its mean; a power of the Fourier
    transform adds tokens. Sums wrap around beyond `WIDTH * POINTS / 2`, 128.
    """
    place_B = ratios.pair.log_ratio_N / WIDTH
    left_B = place_B.floor().long()
    right_share_B = ratios.share_B * (place_B - left_B)
    one_G = torch.zeros(POINTS, dtype=torch.float64)
    one_G.index_add_(0, left_B % POINTS, ratios.share_B - right_share_B)
    one_G.index_add_(0, (left_B + 1) % POINTS, right_share_B)
    share_G = torch.fft.irfft(torch.fft.rfft(one_G) ** length, n=POINTS).clamp(min=0)
    return torch.fft.fftfreq(POINTS, 1 / POINTS, dtype=torch.float64) * WIDTH, share_G
