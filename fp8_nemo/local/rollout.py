"""Sample a step's answers and reward them, once or until every prompt teaches something.

Dynamic sampling (DAPO) draws batches of prompts, keeps those whose answers earn different rewards,
before any shaping, and goes on until a step is full, as NeMo RL's `dynamic_sampling` does.

Shapes: B sequences, T tokens, R response tokens, P prompts, G generations per prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8_nemo.correction.routing import MISSING
from fp8_nemo.local.chat import Chat
from fp8_nemo.local.engine import Batch
from fp8_nemo.local.loss import is_informative, shaped_rewards
from fp8_nemo.recipe.options.training import Algorithm
from fp8_nemo.recipe.problems import Problem


class DynamicSamplingError(RuntimeError):
    """Report a step that found too few prompts whose answers differ; one line."""


@dataclass(frozen=True)
class Rollout:
    """Hold answers and what they earned."""

    batch: Batch
    rewards_B: Tensor
    """As they are learned from: scaled and shaped."""
    right_B: Tensor
    """As the problems give them, 0 to 1."""
    truncated_B: Tensor
    """True where the longest length cut an answer."""

    def of(self, kept_B: Tensor) -> Rollout:
        """Return some of the answers."""
        on_device_B = kept_B.to(self.batch.mask_BT.device)
        return Rollout(
            self.batch.of(on_device_B),
            *(each[kept_B] for each in (self.rewards_B, self.right_B, self.truncated_B)),
        )


def rewarded(
    batch: Batch,
    problems: list[Problem],
    chat: Chat,
    algorithm: Algorithm,
    longest: int,
    reward: Callable[[str, Problem], float],
) -> Rollout:
    """Return a batch with the rewards of its answers.

    Args:
        batch: an answer to each problem.
        problems: as they were asked.
        chat: that reads tokens.
        algorithm: filled.
        longest: response tokens that an answer may have.
        reward: of an answer to a problem.
    """
    answers = chat.texts(batch.responses_BR, batch.response_mask_BR)
    right_B = torch.tensor(
        [reward(answer, problem) for answer, problem in zip(answers, problems, strict=True)]
    )
    lengths_B = batch.response_mask_BR.sum(1)
    ended_B = (batch.response_mask_BR & (batch.responses_BR == chat.end)).any(1)
    truncated_B = ((lengths_B >= longest) & ~ended_B).cpu()
    shaped_B = shaped_rewards(right_B, lengths_B.cpu(), truncated_B, algorithm, longest)
    return Rollout(batch, shaped_B, right_B, truncated_B)


def sample_dynamically(
    draw: Callable[[], Rollout], algorithm: Algorithm, prompts: int, generations: int, padding: int
) -> tuple[Rollout, Tensor, int]:
    """Draw until there are enough prompts to learn from.

    Args:
        draw: samples and rewards another batch.
        algorithm: filled.
        prompts: that a step needs.
        generations: per prompt.
        padding: token that makes rectangles.

    Returns:
        The step's answers, the rewards of all that were sampled, and the batches that it took.

    Raises:
        DynamicSamplingError: `dynamic_sampling_max_gen_batches` were not enough.
    """
    most, rewards, kept = algorithm.dynamic_sampling_max_gen_batches or 1, [], list[Rollout]()
    while sum(len(each.rewards_B) for each in kept) < prompts * generations:
        if len(rewards) > most:  # as NeMo RL, which looks after one more
            found = sum(len(each.rewards_B) for each in kept) // generations
            raise DynamicSamplingError(
                f"{found} of {prompts} prompts had answers that earn different rewards, after "
                f"{len(rewards)} batches; choose problems that the model solves now and then, or "
                "raise algorithm.dynamic_sampling_max_gen_batches or batch_multiplier"
            )
        drawn = draw()
        rewards.append(drawn.rewards_B)
        informative_P = is_informative(drawn.right_B.view(-1, generations))
        kept.append(drawn.of(informative_P.repeat_interleave(generations)))
    first = slice(0, prompts * generations)
    whole = Rollout(
        joined([each.batch for each in kept], padding).of(first),
        *(
            torch.cat([getattr(each, name) for each in kept])[first]
            for name in ("rewards_B", "right_B", "truncated_B")
        ),
    )
    return whole, torch.cat(rewards), len(rewards)


def joined(batches: list[Batch], padding: int) -> Batch:
    """Join rectangles of unequal width: prompts grow to the left, responses to the right."""
    prompt = max(each.mask_BT.shape[1] - each.response_mask_BR.shape[1] for each in batches)
    response = max(each.response_mask_BR.shape[1] for each in batches)
    wide = [_widened(each, prompt, response, padding) for each in batches]
    fields = {name: [vars(each)[name] for each in wide] for name in vars(wide[0])}
    joint: dict[str, Any] = {
        name: None if parts[0] is None else torch.cat(parts) for name, parts in fields.items()
    }
    return Batch(**joint)


def _widened(batch: Batch, prompt: int, response: int, padding: int) -> Batch:
    R = batch.response_mask_BR.shape[1]
    left, right = prompt - (batch.mask_BT.shape[1] - R), response - R
    routes_BTLA = batch.routes_BTLA
    if routes_BTLA is not None:
        routes_BTLA = pad(routes_BTLA, (0, 0, 0, 0, left, right), value=MISSING)
    return Batch(
        pad(batch.tokens_BT, (left, right), value=padding),
        pad(batch.mask_BT, (left, right), value=False),
        pad(batch.response_mask_BR, (0, right), value=False),
        pad(batch.rollout_BR, (0, right)),
        routes_BTLA,
    )


def without_cut(rollout: Rollout) -> Batch:
    """Return the batch whose cut answers count for nothing (`overlong_filtering`)."""
    kept_B = ~rollout.truncated_B.to(rollout.batch.mask_BT.device)
    mask_BR = rollout.batch.response_mask_BR & kept_B[:, None]
    return replace(rollout.batch, response_mask_BR=mask_BR)
