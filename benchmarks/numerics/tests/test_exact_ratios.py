"""Exact ratios of a shipped model: distributions, scaling, expectations, sums over tokens."""

import math

import pytest
import torch

from benchmarks.numerics.exact_ratios import (
    ExactRatios,
    exact_ratios,
    expected_effect,
    sum_of_tokens,
)
from benchmarks.numerics.sources import EVERYTHING, measure
from fp8_nemo.correction.measure import effect
from fp8_nemo.correction.mismatch import LogprobPair
from fp8_nemo.recipe.model_dir import SHIPPED
from fp8_nemo.recipe.options.correction import Correction
from fp8_nemo.recipe.problems import arithmetic

PROBLEMS = arithmetic(2, 0).validation[:24]
TIS = Correction(level="token", truncate=2.0)
MIS = Correction(level="token", mask="token", low=0.5, high=2.0)
COIN = ExactRatios(*torch.tensor([[[0.75, 0.25]], [[0.5, 0.5]]]).double().log())


@pytest.fixture(scope="module")
def ratios():
    return exact_ratios(SHIPPED / "tiny-llama", PROBLEMS)


def test_every_answer_token_has_two_distributions_that_differ(ratios):
    tokens = sum(len(problem.output) + 1 for problem in PROBLEMS)
    for logprob_NV in ratios:
        assert logprob_NV.shape == (tokens, 128) and logprob_NV.dtype == torch.float64
        assert torch.allclose(logprob_NV.exp().sum(1), torch.ones(tokens).double())
    assert ratios.share_B.sum() == pytest.approx(1)
    ratio_B = ratios.pair.log_ratio_BT[:, 0].exp()
    assert (ratios.share_B @ ratio_B).item() == pytest.approx(1)  # sum of train probabilities
    assert ratio_B.max() > 1.1


def test_its_kl_is_that_of_the_sources_together(ratios):
    [found] = measure(SHIPPED / "tiny-llama", PROBLEMS, [EVERYTHING])
    kl = -(ratios.share_B @ ratios.pair.log_ratio_BT[:, 0]).item()
    assert kl == pytest.approx(found.mean, rel=1e-9) and 1e-3 < kl < 1e-2


def test_scaling_moves_the_rollout_policy_along_the_error_in_logits(ratios):
    assert torch.allclose(ratios.scaled(0).rollout_NV, ratios.train_NV)
    assert torch.allclose(ratios.scaled(1).rollout_NV, ratios.rollout_NV)
    twice = COIN.scaled(2).rollout_NV.exp()[0]  # odds 3 and 1: twice as far is 1/3
    assert twice.tolist() == pytest.approx([0.25, 0.75])


def test_effects_are_expectations():
    found = expected_effect(COIN.pair, COIN.share_B, Correction(level="token", truncate=1.2))
    assert found == pytest.approx((0.5, 0.0, 0.85**2 / ((1.2**2 + 0.25) / 2), 0.85))
    masked = expected_effect(
        COIN.pair, COIN.share_B, Correction(level="token", mask="token", low=1.0)
    )
    assert masked == pytest.approx((0.0, 0.5, 0.5, 0.75))


def test_a_large_sample_has_the_expected_effect(ratios):
    far = ratios.scaled(6)
    drawn = torch.multinomial(
        far.share_B, 100_000, True, generator=torch.Generator().manual_seed(1)
    )
    pair = LogprobPair(far.pair.train_BT[drawn], far.pair.rollout_BT[drawn], drawn[:, None] >= 0)
    for correction in (TIS, MIS):
        expected = expected_effect(far.pair, far.share_B, correction)
        assert effect([pair], correction) == pytest.approx(expected, abs=5e-3)
        assert expected.ess < 0.95


def test_sums_of_tokens_are_binomial_for_a_coin():
    x_G, share_G = sum_of_tokens(COIN, 5)
    assert share_G.sum() == pytest.approx(1)
    for heads in range(6):
        x = heads * math.log(1.5) - (5 - heads) * math.log(2)
        near = (x_G - x).abs() < 0.01
        assert share_G[near].sum() == pytest.approx(math.comb(5, heads) / 32, abs=1e-9)


def test_sums_of_tokens_keep_mean_and_variance(ratios):
    x_B = ratios.pair.log_ratio_N
    mean = ratios.share_B @ x_B
    variance = ratios.share_B @ x_B.square() - mean.square()
    for length in (1, 30, 1000):
        x_G, share_G = sum_of_tokens(ratios, length)
        assert share_G @ x_G == pytest.approx((length * mean).item(), rel=1e-6)
        spread = share_G @ x_G.square() - (share_G @ x_G).square()
        assert spread == pytest.approx((length * variance).item(), rel=1e-3)
