"""The enumerated problem against autograd, sampling and closed forms.

Tolerances are of FP64 sums, but for what goes through `correct`, whose multipliers are FP32.
"""

import math

import pytest
import torch

from benchmarks.numerics.enumerated import (
    GradientError,
    enumerate_answers,
    expected_multiplier,
    gradient_error,
    mean_gradient,
    pooled,
    true_gradient,
)
from fp8_nemo.correction.correct import STATISTICS
from fp8_nemo.correction.mismatch import mismatch_metrics
from fp8_nemo.local.loss import clipped_loss
from fp8_nemo.recipe.compose import compose, option_names
from fp8_nemo.recipe.options.correction import Correction
from fp8_nemo.recipe.options.training import GRPO

FP32 = 1e-6
SEQUENCE = Correction(level="sequence")
PROBLEMS = [(4, 3), (2, 6), (3, 1), (5, 2)]


@pytest.fixture(scope="module")
def options():
    """Every correction of conf/correction."""
    cells = compose(["-m", "correction=glob(*)"])
    found = {cell.correction.name: cell.correction for cell in cells}
    assert sorted(found) == sorted(option_names("correction"))
    return found


def error(problem, correction):
    multiplier_BT = expected_multiplier(problem.pair, problem.share_B, correction)
    return gradient_error(problem, multiplier_BT)


def gradients(problem, value_BT):
    """Each answer's gradient `[B, C V]` by autograd of the local backend's own loss."""
    leaf_CV = problem.train_CV.clone().requires_grad_()  # logprobs are logits, too
    current_BT = leaf_CV.log_softmax(-1)[problem.context_BT, problem.token_BT]
    ratio_BT = (current_BT - current_BT.detach()).exp()
    loss_BT = value_BT * clipped_loss(ratio_BT, current_BT, problem.advantage_B[:, None], GRPO)
    rows = [torch.autograd.grad(-x, leaf_CV, retain_graph=True)[0] for x in loss_BT.sum(1)]
    return torch.stack(rows).flatten(1)


@pytest.mark.parametrize(("V", "T"), PROBLEMS)
def test_every_answer_is_listed_once_and_probabilities_sum_to_one(V, T):
    problem = enumerate_answers(V, T, 0.5, 1)
    assert len({tuple(row) for row in problem.token_BT.tolist()}) == V**T
    assert problem.share_B.sum() == pytest.approx(1, abs=1e-12)
    assert problem.pair.train_BT.sum(1).exp().sum() == pytest.approx(1, abs=1e-12)
    assert problem.share_B @ problem.advantage_B == pytest.approx(0, abs=1e-12)
    contexts = {}
    for tokens, places in zip(problem.token_BT.tolist(), problem.context_BT.tolist(), strict=True):
        assert len(set(places)) == T
        for t, place in enumerate(places):
            assert contexts.setdefault(place, tokens[:t]) == tokens[:t]
    assert sorted(contexts) == list(range((V**T - 1) // (V - 1))) == list(range(len(contexts)))


def test_noise_changes_the_rollout_policy_alone_and_kl_is_that_of_the_k3_estimate():
    quiet, loud = enumerate_answers(4, 4, 0.0, 3), enumerate_answers(4, 4, 0.7, 3)
    assert torch.equal(quiet.train_CV, loud.train_CV) and torch.equal(quiet.reward_B, loud.reward_B)
    assert torch.equal(quiet.train_CV, quiet.rollout_CV) and quiet.kl == 0
    k3_BT = STATISTICS["token-k3"](loud.pair)
    k3 = (loud.share_B @ k3_BT.mean(1)).item()
    assert loud.kl == pytest.approx(k3, rel=1e-9) and k3 > 0.05
    assert mismatch_metrics(loud.pair)["mismatch/kl"] != pytest.approx(loud.kl)


@pytest.mark.parametrize(("V", "T"), PROBLEMS)
def test_the_truth_is_the_gradient_of_the_mean_reward(V, T):
    problem = enumerate_answers(V, T, 0.5, 2)
    leaf_CV = problem.train_CV.clone().requires_grad_()
    logprob_BT = leaf_CV.log_softmax(-1)[problem.context_BT, problem.token_BT]
    (logprob_BT.sum(1).exp() @ problem.reward_B).backward()
    assert leaf_CV.grad is not None and leaf_CV.grad.norm() > 1e-3
    assert torch.allclose(true_gradient(problem), leaf_CV.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["none", "tis", "mis", "seq-mis", "geo-mis"])
def test_mean_and_deviation_are_those_of_the_grpo_losses_of_all_answers(options, name):
    problem = enumerate_answers(3, 4, 0.6, 5)
    value_BT = expected_multiplier(problem.pair, problem.share_B, options[name])
    each_BN = gradients(problem, value_BT)
    mean_N = problem.share_B @ each_BN
    scatter_B = (each_BN - mean_N).square().sum(1)
    true_N, found = true_gradient(problem).flatten(), gradient_error(problem, value_BT)
    size = true_N.norm()
    deviation = (problem.share_B @ scatter_B).sqrt() / size
    assert torch.allclose(mean_gradient(problem, value_BT).flatten(), mean_N, rtol=0, atol=1e-12)
    assert found.bias == pytest.approx(((mean_N - true_N).norm() / size).item(), rel=1e-9)
    assert found.deviation == pytest.approx(deviation.item(), rel=1e-9)
    assert found.length == pytest.approx((mean_N.norm() / size).item(), rel=1e-9)
    angle = torch.cosine_similarity(mean_N, true_N, dim=0).item()
    assert found.cosine == pytest.approx(angle, rel=1e-9)


@pytest.mark.parametrize(("V", "T"), PROBLEMS)
def test_sequence_importance_sampling_without_a_bound_is_unbiased(V, T):
    problem = enumerate_answers(V, T, 0.5, 4)
    exact_BT = problem.pair.log_ratio_BT.sum(1, keepdim=True).exp().expand_as(problem.token_BT)
    assert gradient_error(problem, exact_BT).bias < 1e-10
    assert error(problem, SEQUENCE).bias < FP32
    assert error(problem, Correction()).bias > 0.02


def test_without_a_mismatch_no_correction_has_a_bias(options):
    problem = enumerate_answers(4, 4, 0.0, 6)
    plain = error(problem, Correction())
    for name, correction in options.items():
        found = error(problem, correction)
        assert found.bias < 1e-10, name
        assert found.cosine == pytest.approx(1) and found.length == pytest.approx(1)
        assert found.deviation == pytest.approx(plain.deviation, rel=1e-12) and plain.deviation > 1


def test_without_a_correction_bias_grows_with_the_mismatch():
    problems = [
        [enumerate_answers(4, 4, noise, seed) for seed in range(4)] for noise in (0.1, 0.3, 0.9)
    ]
    biases = [pooled([error(each, Correction()) for each in some]).bias for some in problems]
    assert biases[0] > 0.02 and biases[1] > 2 * biases[0] and biases[2] > 2 * biases[1]


def test_tokens_are_not_enough_a_token_ratio_leaves_what_the_prefix_did():
    one, several = enumerate_answers(4, 1, 0.5, 7), enumerate_answers(4, 4, 0.5, 7)
    token = Correction(level="token")
    assert error(one, token).bias < FP32
    assert error(several, token).bias > 0.1 > 1e4 * error(several, SEQUENCE).bias


@pytest.mark.parametrize("name", ["none", "tis", "seq-tis", "seq-mis"])
def test_rollouts_that_are_sampled_agree_with_the_exact_mean_within_their_error(options, name):
    problem, rollouts = enumerate_answers(3, 3, 0.8, 8), 40_000
    value_BT = expected_multiplier(problem.pair, problem.share_B, options[name])
    draw = torch.Generator().manual_seed(9)
    drawn_N = torch.multinomial(problem.share_B, rollouts, replacement=True, generator=draw)
    sampled = gradients(problem, value_BT)[drawn_N].mean(0)
    found, size = gradient_error(problem, value_BT), true_gradient(problem).norm()
    away = (sampled - mean_gradient(problem, value_BT).flatten()).norm() / size
    standard_error = found.deviation / math.sqrt(rollouts)
    assert 0 < away < 2 * standard_error
    assert found.bias > 5 * standard_error


def test_a_batch_mean_becomes_an_expectation():
    problem = enumerate_answers(4, 3, 0.9, 10)
    settings = {"level": "token", "truncate": 1.5, "mask": "token", "low": 0.7, "high": 1.4}
    plain, divided, kept_only = (
        expected_multiplier(problem.pair, problem.share_B, Correction(**settings, **extra))
        for extra in ({}, {"normalize": True}, {"renormalize_denominator": True})
    )
    raw_BT = problem.pair.log_ratio_BT.exp()
    mean = problem.share_B @ raw_BT.clamp(max=1.5).mean(1)
    kept = problem.share_B @ ((raw_BT >= 0.7) & (raw_BT <= 1.4)).double().mean(1)
    assert kept < 0.9 and mean < 0.99
    assert torch.allclose(divided, plain / mean) and torch.allclose(kept_only, plain / kept)


def test_a_correction_that_rejects_everything_leaves_a_bias_of_one_and_no_noise():
    problem = enumerate_answers(4, 3, 0.9, 11)
    nothing = Correction(mask="token", low=1e6, renormalize_denominator=True)
    assert error(problem, nothing) == GradientError(1.0, 0.0, 0.0, 0.0)


def test_root_mean_squared_error_adds_squares_and_problems_are_pooled():
    one, other = GradientError(3.0, 40.0, 1.0, 0.5), GradientError(4.0, 30.0, 2.0, 1.0)
    assert one.rmse(100) == 5.0
    assert pooled([one, other]) == pytest.approx((math.sqrt(12.5), math.sqrt(1250), 1.5, 0.75))
