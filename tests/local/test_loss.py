"""Each choice of an algorithm by hand: rewards, advantages, ratios, losses, denominators."""

from dataclasses import replace

import pytest
import torch

from fp8_nemo.correction.update import policy_ratio
from fp8_nemo.local.loss import (
    UpdateMetrics,
    clipped_loss,
    group_advantages,
    is_informative,
    reduced,
    reinforce_plus_plus,
    shaped_rewards,
)
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.options.training import GRPO

RATIO = torch.tensor([[0.5, 1.25, 1.5, 12.0]])
GOOD, BAD = torch.tensor([[1.0]]), torch.tensor([[-1.0]])


def algorithm(name, *arguments):
    [recipe] = compose([f"algorithm={name}", *arguments])
    return recipe.algorithm.filled


def losses(advantage, chosen):
    return clipped_loss(RATIO, RATIO.log(), advantage, chosen)[0].tolist()


def test_clip_higher_moves_the_upper_bound_alone():
    assert losses(GOOD, algorithm("dapo")) == pytest.approx([-0.5, -1.25, -1.28, -1.28])
    assert losses(BAD, replace(GRPO, ratio_clip_max=0.28)) == pytest.approx([0.8, 1.25, 1.5, 12.0])


def test_dual_clip_bounds_what_a_bad_token_may_cost():
    assert losses(BAD, algorithm("dapo")) == pytest.approx([0.8, 1.25, 1.5, 10.0])
    assert losses(GOOD, replace(GRPO, ratio_clip_c=1.1)) == losses(GOOD, GRPO)


def test_cispo_weighs_the_logprob_by_the_clipped_ratio_and_clips_no_gradient():
    current = RATIO.log().requires_grad_()
    clipped_loss(current.exp(), current, GOOD, algorithm("cispo")).sum().backward()
    assert current.grad is not None
    assert current.grad[0].tolist() == pytest.approx([-0.5, -1.25, -1.5, -6.0])  # 1 + 5 at most


def test_rloo_has_no_ratio_and_no_deviation():
    rloo, rewards = algorithm("rloo"), torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    assert losses(GOOD, rloo) == pytest.approx((-RATIO.log())[0].tolist())
    assert group_advantages(rewards, rloo).tolist() == pytest.approx([1.0] + [-1 / 3] * 3)


def test_a_baseline_of_the_whole_group_divides_by_its_own_deviation():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    found = group_advantages(rewards, replace(GRPO, use_leave_one_out_baseline=False))
    assert found.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-4)  # 0.75 / 0.5


def test_gspo_gives_every_token_the_geometric_mean_of_its_sequence():
    current = torch.tensor([[2.0, 8.0, 100.0], [3.0, 1.0, 1.0]]).log()
    mask = torch.tensor([[True, True, False], [True, False, False]])
    found = policy_ratio(current, torch.zeros_like(current), mask, by_sequence=True)
    assert found[0].tolist() == pytest.approx([4.0] * 3)
    assert found[1].tolist() == pytest.approx([3.0] * 3)


def test_reinforce_plus_plus_normalizes_over_the_tokens_that_count():
    plus = algorithm("reinforce++")
    rewards = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    mask = torch.tensor([[True, True, True], [True, False, False], [True] * 3, [False] * 3])
    found = reinforce_plus_plus(rewards, mask, plus, None)
    values = torch.tensor([0.5, 0.5, 0.5, -0.5, 0.0, 0.0, 0.0])  # of the seven real tokens
    expected = (values - values.mean()) / values.std(unbiased=False)
    torch.testing.assert_close(found[mask], expected)
    cost = torch.full(mask.shape, 0.25)
    cost[0, 0] = 1.25
    other = reinforce_plus_plus(rewards, mask, plus, cost)
    assert other[0, 0] < other[0, 1] == other[0, 2]


def test_overlong_shaping_costs_the_more_the_nearer_the_end():
    chosen = replace(GRPO, overlong_buffer=0.25, overlong_buffer_penalty=2.0)
    lengths, right = torch.tensor([10, 75, 80, 100]), torch.ones(4)
    found = shaped_rewards(right, lengths, torch.zeros(4).bool(), chosen, 100)
    assert found.tolist() == pytest.approx([1.0, 1.0, 0.6, -1.0])


def test_rewards_are_scaled_before_a_cut_answer_is_taken_off():
    chosen = replace(GRPO, reward_target_min=-1.0, stop_properly_penalty_coef=0.5)
    right, cut = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([True, True, False])
    found = shaped_rewards(right, torch.ones(3), cut, chosen, 4)
    assert found.tolist() == [-0.5, 0.5, 1.0]


def test_a_prompt_is_informative_where_its_answers_earn_different_rewards():
    assert is_informative(torch.tensor([[1.0, 1], [0, 0], [0, 1]])).tolist() == [False, False, True]


def test_tokens_weigh_alike_or_sequences_do():
    loss = torch.tensor([[1.0, 1.0, 1.0], [5.0, 9.0, 9.0], [7.0, 7.0, 7.0]])
    counted = torch.tensor([[True] * 3, [True, False, False], [False] * 3])
    assert reduced(loss, counted, counted, 2, True) == 2.0
    assert reduced(loss, counted, counted, 2, False) == 3.0
    assert reduced(loss[1:], counted[1:], counted, 2, False) == 2.5


def test_what_updates_did_is_the_mean_of_their_tokens():
    moved = UpdateMetrics(GRPO, updates=2)
    mask, train = torch.tensor([[True, True]]), torch.full((1, 2), -1.0)
    for current in (train, train + torch.tensor([[0.5, 0.0]])):
        moved.add(current, train, train, (current - train).exp(), mask, 2.0)
    row = moved.row()
    assert row["train/clip_fraction"] == 0.25
    assert row["train/ratio_max"] == pytest.approx(1.6487, rel=1e-4)
    assert row["train/kl"] == pytest.approx((1.6487 - 1.5) / 4, rel=1e-3)
    assert row["train/entropy"] == pytest.approx((1 + (1 + 0.5 * 1.6487) / 2) / 2, rel=1e-4)
    rloo = UpdateMetrics(algorithm("rloo"), updates=1)
    rloo.add(train, train, train, train.exp(), mask, 2.0)
    assert set(rloo.row()) == {"train/entropy", "train/kl"}
