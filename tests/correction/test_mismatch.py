"""Metrics of `log_ratio = train - rollout` on real tokens: closed forms, a restatement in NumPy.

Values that are exact in binary are compared exactly; where two libraries round an exponential
differently, to 1e-12.
"""

import math

import numpy as np
import pytest
import torch

from fp8_nemo.correction.mismatch import (
    LogprobPair,
    effective_sample_share,
    length_metrics,
    mismatch_metrics,
    ratio,
)


def pair_of(log_ratio_BT, mask_BT=None, rollout=-1.0):
    """A pair with these log ratios; all tokens real unless a mask says otherwise."""
    log_ratio_BT = torch.tensor(log_ratio_BT, dtype=torch.float64)
    mask_BT = torch.ones_like(log_ratio_BT) if mask_BT is None else torch.tensor(mask_BT)
    rollout_BT = torch.full_like(log_ratio_BT, rollout)
    return LogprobPair(rollout_BT + log_ratio_BT, rollout_BT, mask_BT.bool())


def restated(train_BT, rollout_BT, mask_BT):
    """Section 7 of the design in NumPy, token after token."""
    rows = zip(train_BT, rollout_BT, mask_BT, strict=True)
    answers = [t[m] - r[m] for t, r, m in rows if m.any()]
    x_N = np.concatenate(answers)
    ratios_N = np.exp(np.clip(x_N, -20, 20))
    return {
        "mismatch/kl": sum(math.expm1(x) - x for x in x_N) / len(x_N),
        "mismatch/answer_kl": np.mean([sum(math.expm1(x) - x for x in each) for each in answers]),
        "mismatch/differing_answers": np.mean([np.abs(each).max() > 1e-5 for each in answers]),
        "mismatch/token_mult_prob_error": np.exp(np.abs(x_N)).mean(),
        "mismatch/abs_log_ratio_p99": torch.quantile(torch.tensor(np.abs(x_N)), 0.99).item(),
        "mismatch/abs_log_ratio_max": np.abs(x_N).max(),
        "mismatch/ess": ratios_N.sum() ** 2 / (len(x_N) * (ratios_N**2).sum()),
    }


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_metrics_agree_with_numpy_on_random_batches(seed):
    random = np.random.default_rng(seed)
    rollout_BT = -random.exponential(2.0, (7, 23)).astype(np.float32)
    train_BT = (rollout_BT + random.normal(0, 0.3, (7, 23))).astype(np.float32)
    mask_BT = random.random((7, 23)) < 0.6
    mask_BT[3] = False
    found = mismatch_metrics(LogprobPair(*map(torch.tensor, (train_BT, rollout_BT, mask_BT))))
    wide = (each.astype(np.float64) for each in (train_BT, rollout_BT))
    assert found == pytest.approx(restated(*wide, mask_BT), rel=1e-12, abs=0)


def test_equal_logprobs_are_a_perfect_match():
    assert mismatch_metrics(pair_of([[0.0, 0.0], [0.0, 0.0]])) == {
        "mismatch/kl": 0.0,
        "mismatch/answer_kl": 0.0,
        "mismatch/differing_answers": 0.0,
        "mismatch/token_mult_prob_error": 1.0,
        "mismatch/abs_log_ratio_p99": 0.0,
        "mismatch/abs_log_ratio_max": 0.0,
        "mismatch/ess": 1.0,
    }


def test_one_token_of_ratio_four_and_one_of_a_half_in_closed_form():
    found = mismatch_metrics(pair_of([[math.log(4), math.log(0.5)]], rollout=0.0))
    log2 = math.log(2)
    assert found["mismatch/kl"] == pytest.approx(((3 - 2 * log2) + (-0.5 + log2)) / 2, rel=1e-14)
    assert found["mismatch/token_mult_prob_error"] == pytest.approx((4 + 2) / 2, rel=1e-14)
    assert found["mismatch/abs_log_ratio_max"] == 2 * log2
    assert found["mismatch/abs_log_ratio_p99"] == pytest.approx(log2 + 0.99 * log2, rel=1e-14)
    assert found["mismatch/ess"] == pytest.approx(4.5**2 / (2 * 16.25), rel=1e-14)


def test_one_answer_of_four_that_differs_is_seen_where_the_others_differ_by_the_last_bits():
    found = mismatch_metrics(
        pair_of(
            [[1.9e-6, 0.0], [0.0, -9e-6], [0.0, 1.1e-5], [0.3, 0.3], [0.0, 0.0]],
            [[1, 1], [1, 1], [1, 1], [0, 0], [1, 0]],
        )
    )
    assert found["mismatch/differing_answers"] == 0.25


def test_kl_is_of_rollout_to_train_and_not_the_other_way_round():
    rises, falls = (
        mismatch_metrics(pair_of([[x]], rollout=0.0))["mismatch/kl"] for x in (3.0, -3.0)
    )
    assert rises == math.expm1(3) - 3 and falls == math.expm1(-3) + 3


def test_kl_estimates_the_divergence_of_tokens_that_the_rollout_sampled():
    rollout, train = np.array([0.5, 0.25, 0.25]), np.array([0.25, 0.25, 0.5])
    tokens = [0, 0, 1, 2]  # each as often as the rollout's policy says
    sampled = [torch.tensor(np.log(policy[tokens]))[None] for policy in (train, rollout)]
    found = mismatch_metrics(LogprobPair(*sampled, torch.ones(1, 4)))
    assert found["mismatch/kl"] == pytest.approx(
        (rollout * np.log(rollout / train)).sum(), rel=1e-14
    )


def test_no_term_of_kl_is_ever_negative_however_small_the_ratio():
    for x in np.logspace(-18, 1, 96).tolist():
        for signed in (x, -x):
            assert mismatch_metrics(pair_of([[signed]], rollout=0.0))["mismatch/kl"] >= 0


def test_small_mismatch_keeps_its_digits():
    train_BT = torch.tensor([[-8.0 + 2.0**-20]], dtype=torch.float32)
    found = mismatch_metrics(LogprobPair(train_BT, torch.full((1, 1), -8.0), torch.ones(1, 1)))
    assert found["mismatch/kl"] == pytest.approx(2.0**-41, rel=1e-6)  # x^2 / 2; in FP32: 0
    assert found["mismatch/abs_log_ratio_max"] == 2.0**-20


def test_kl_and_error_are_not_clamped_while_ratios_are():
    found = mismatch_metrics(pair_of([[30.0, 25.0]], rollout=0.0))
    kl, error = math.expm1(30) + math.expm1(25) - 55, math.exp(30) + math.exp(25)
    assert found["mismatch/kl"] == pytest.approx(kl / 2, rel=1e-14)
    assert found["mismatch/token_mult_prob_error"] == pytest.approx(error / 2, rel=1e-14)
    assert found["mismatch/ess"] == 1.0
    assert ratio(torch.tensor([-1e9, -20.0, 0.0, 20.0, 1e9]).double()).tolist() == pytest.approx(
        [math.exp(-20), math.exp(-20), 1.0, math.exp(20), math.exp(20)], rel=1e-15
    )


def test_padding_counts_nowhere_whatever_it_holds():
    train_BT = torch.tensor([[-1.0, float("nan")], [float("-inf"), -2.0]])
    rollout_BT = torch.tensor([[-1.5, 7.0], [float("-inf"), -2.0]])
    pair = LogprobPair(train_BT, rollout_BT, torch.tensor([[1, 0], [0, 1]]))
    assert pair.log_ratio_BT.tolist() == [[0.5, 0.0], [0.0, 0.0]]
    assert pair.log_ratio_N.tolist() == [0.5, 0.0] and pair.log_ratio_N.dtype == torch.float64
    assert mismatch_metrics(pair) == mismatch_metrics(pair_of([[0.5], [0.0]]))


def test_a_batch_without_a_real_token_has_no_metrics():
    assert mismatch_metrics(pair_of([[1.0, 2.0]], [[0, 0]])) == {}


@pytest.mark.parametrize(
    ("multipliers", "share"),
    [
        ([3.0, 3.0, 3.0], 1.0),
        ([5.0, 0.0, 0.0, 0.0], 0.25),
        ([2.0, 1.0, 1.0, 0.0], 16 / 24),
        ([0.0], 0.0),
    ],
)
def test_effective_sample_share_in_closed_form(multipliers, share):
    assert effective_sample_share(torch.tensor(multipliers, dtype=torch.float64)) == share


@pytest.mark.parametrize(
    ("train", "rollout", "mask"),
    [((2, 3), (2, 2), (2, 3)), ((2, 3), (2, 3), (3, 2)), ((1,), (1, 1), (1, 1))],
)
def test_a_pair_refuses_shapes_that_differ(train, rollout, mask):
    with pytest.raises(ValueError, match="differ in shape"):
        LogprobPair(torch.zeros(train), torch.zeros(rollout), torch.ones(mask))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", ["train", "rollout"])
def test_a_pair_refuses_logprobs_of_real_tokens_that_are_not_finite(side, value):
    logprobs = {"train": torch.zeros(2, 2), "rollout": torch.zeros(2, 2)}
    logprobs[side][1, 0] = logprobs[side][0, 1] = value
    with pytest.raises(ValueError, match=f"{side} logprobs of 1 real tokens are not finite"):
        LogprobPair(logprobs["train"], logprobs["rollout"], torch.tensor([[1, 0], [1, 1]]).bool())


def test_responses_that_are_as_long_as_they_may_be_are_cut():
    lengths_B = torch.tensor([3, 8, 5, 8])
    found = length_metrics(lengths_B, longest=8)
    assert found == {
        "rollout/tokens": 24, "rollout/mean_length": 6.0, "rollout/cut_fraction": 0.5,
    }  # fmt: skip
    full_B = torch.tensor([True, True, False, False])  # a long prompt left no more room
    assert length_metrics(lengths_B, 8, full_B)["rollout/cut_fraction"] == 0.75
    assert length_metrics(torch.tensor([], dtype=torch.int64), 8)["rollout/cut_fraction"] == 0
