"""Dynamic sampling fills a step with prompts that teach something; cut answers can be left out."""

from dataclasses import replace

import pytest
import torch

from fp8_nemo.local.engine import Batch
from fp8_nemo.local.grpo import GrpoLoop
from fp8_nemo.local.rollout import (
    DynamicSamplingError,
    Rollout,
    joined,
    sample_dynamically,
    without_cut,
)
from fp8_nemo.recipe.options.training import GRPO
from fp8_nemo.runs import metrics, run_dir

DAPO = replace(GRPO, use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=2)


def batch_of(first, prompt, response, rows=4):
    """Rows of real tokens, all of one number each, counted from `first`."""
    number_B1 = torch.arange(first, first + rows)[:, None]
    mask_BR = torch.ones(rows, response).bool()
    return Batch(
        number_B1.expand(rows, prompt + response),
        torch.ones(rows, prompt + response).bool(),
        mask_BR,
        -mask_BR.float() * number_B1,
        number_B1[:, None, None].expand(rows, prompt + response, 1, 2),
    )


def drawn(first, rewards, prompt=2, response=2):
    right_B = torch.tensor(rewards)
    batch = batch_of(first, prompt, response, len(rewards))
    return Rollout(batch, right_B - 1, right_B, torch.zeros(len(rewards)).bool())


def test_groups_are_kept_by_the_task_and_in_order_until_the_step_is_full():
    batches = iter([
        drawn(10, [1.0, 1.0, 0.0, 1.0]),
        drawn(20, [0.0, 0.0, 0.0, 0.0]),
        drawn(30, [1.0, 0.0, 0.0, 1.0], prompt=3, response=1),
    ])  # fmt: skip
    found, rewards, count = sample_dynamically(lambda: next(batches), DAPO, 2, 2, 99)
    assert found.right_B.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert found.batch.tokens_BT.tolist() == [
        [99, 12, 12, 12, 12], [99, 13, 13, 13, 13], [30, 30, 30, 30, 99], [31, 31, 31, 31, 99]
    ]  # fmt: skip
    assert rewards.mean() == pytest.approx(5 / 12 - 1) and count == 3


def test_a_step_that_stays_empty_is_one_line_after_one_batch_more_than_asked():
    draws = []

    def draw():
        draws.append(1)
        return drawn(0, [1.0, 1.0])

    with pytest.raises(DynamicSamplingError, match=r"0 of 1 prompts .* after 3 batches"):
        sample_dynamically(draw, DAPO, 1, 2, 0)
    assert len(draws) == 3


def test_rectangles_join_at_the_border_of_prompt_and_response():
    found = joined([batch_of(1, 2, 3, rows=1), batch_of(7, 4, 1, rows=1)], 0)
    assert found.tokens_BT.tolist() == [[0, 0, 1, 1, 1, 1, 1], [7, 7, 7, 7, 7, 0, 0]]
    assert found.mask_BT.tolist()[1] == [True] * 5 + [False] * 2
    assert found.response_mask_BR.tolist() == [[True] * 3, [True, False, False]]
    assert found.rollout_BR.tolist()[1] == [-7.0, 0.0, 0.0]
    assert found.routes_BTLA is not None
    assert found.routes_BTLA[1, :, 0, 0].tolist() == [7] * 5 + [-1] * 2


def test_a_cut_answer_counts_for_nothing_and_stays_in_its_group():
    rollout = replace(drawn(0, [1.0, 0.0]), truncated_B=torch.tensor([False, True]))
    assert without_cut(rollout).response_mask_BR.tolist() == [[True, True], [False, False]]
    assert len(rollout.rewards_B) == 2


def test_a_run_that_samples_dynamically_goes_on_with_the_next_prompts(make_plan):
    plan = make_plan("algorithm=dapo", "algorithm.batch_multiplier=1", "grpo.checkpoint_every=1")
    [frozen] = run_dir.freeze([plan])
    loop = GrpoLoop(plan, frozen.path)
    loop.train(lambda row: None, stop=lambda: True)
    drawn = loop.progress.prompts
    again = GrpoLoop(plan, frozen.path)
    again.train(lambda row: None)
    assert again.progress.prompts > drawn >= 4
    rows = metrics.read_metrics(frozen.path)
    assert all(row["rollout/batches"] >= 1 for row in rows[1:])
    assert sum(row["rollout/batches"] for row in rows[1:]) * 4 == again.progress.prompts
