"""Gradients of a step as they are on average over all answers, where one answer alone is right.

A token that leaves the right answer decides the reward. Along the right answer every next token is
therefore taken with its probability and with the advantage that follows from it: nothing is
sampled. Behind the first wrong token the advantage is that of a wrong answer whatever comes; how
such an answer goes on is sampled, and its next token again is not. There a gradient is left only
where a token's multiplier is not its ratio, so that little of it is noise.

Shapes: B answers, R response tokens, V vocabulary, P prompts, G answers of a prompt, N weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.numerics.sources import answer_logprobs
from fp8_nemo.correction.mismatch import LogprobPair
from fp8_nemo.local.engine import Batch
from fp8_nemo.local.loss import group_advantages
from fp8_nemo.local.policy import Policy
from fp8_nemo.local.rollout import joined
from fp8_nemo.recipe.options.training import Algorithm

Multipliers = Callable[[LogprobPair], Tensor]


def mean_advantages(p_P: Tensor, generations: int, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """Return the mean advantage `[P]` of a right answer, and of a wrong one.

    Args:
        p_P: probability of a right answer to each prompt.
        generations: answers of a prompt.
        algorithm: filled.
    """
    right_KG = torch.ones(generations, generations).tril()  # of row k the first answer, and k more
    wrong_KG = right_KG.clone()
    wrong_KG[:, 0] = 0.0
    others = torch.distributions.Binomial(generations - 1, p_P.double()[:, None].clamp(0, 1))
    chance_PK = others.log_prob(torch.arange(generations).double()).exp()
    right_P, wrong_P = (
        chance_PK @ group_advantages(each_KG, algorithm).view_as(each_KG)[:, 0].double()
        for each_KG in (right_KG, wrong_KG)
    )
    return right_P, wrong_P


@dataclass(frozen=True)
class Places:
    """Hold the places of one engine's answers where a next token is taken with its probability."""

    batch: Batch
    reach_BR: Tensor
    """How often each is reached by an answer to its prompt; zero where it is none."""
    advantage_BRV: Tensor
    """Mean advantage by next token."""
    rollout_BRV: Tensor
    """Logprobs of the engine, in FP64."""
    tokens: float
    """By which the loss is divided."""
    advantages_P: tuple[Tensor, Tensor]
    """Mean advantage of right answers, and of wrong ones."""


def places(
    engine: PreTrainedModel,
    right: Batch,
    sampled: Batch,
    prompt_B: Tensor,
    share_B: Tensor,
    generations: int,
    algorithm: Algorithm,
    padding: int,
) -> Places:
    """Return the places of an engine's answers.

    Args:
        engine: its model.
        right: the right answer to each prompt.
        sampled: different answers that the engine gave.
        prompt_B: of these.
        share_B: of the answers to its prompt that each is.
        generations: answers of a prompt.
        algorithm: filled.
        padding: token that makes rectangles.
    """
    tokens = float((share_B[:, None] * sampled.response_mask_BR).sum())
    off_BR = behind_a_wrong_token(sampled, right, prompt_B)
    goes_on_B = off_BR.any(1)
    off_BR, prompt_B, share_B = off_BR[goes_on_B], prompt_B[goes_on_B], share_B[goes_on_B]
    batch = joined([right, sampled.of(goes_on_B)], padding)
    with torch.no_grad():
        rollout_BRV = answer_logprobs(engine, batch, cached=True)
    P, R = len(right.tokens_BT), batch.response_mask_BR.shape[1]
    chosen_PR1 = batch.responses_BR[:P, :, None]
    mask_PR = batch.response_mask_BR[:P]
    chance_PR = rollout_BRV[:P].gather(2, chosen_PR1)[..., 0].masked_fill(~mask_PR, 0.0)
    so_far_PR = chance_PR.cumsum(1)
    whole_P1 = so_far_PR[:, -1:]
    right_P, wrong_P = mean_advantages(whole_P1[:, 0].exp(), generations, algorithm)
    on_path_PR1 = ((right_P - wrong_P)[:, None] * (whole_P1 - so_far_PR).exp())[..., None]
    advantage_BRV = torch.zeros_like(rollout_BRV)
    advantage_BRV[:P] = wrong_P[:, None, None]
    advantage_BRV[:P].scatter_add_(2, chosen_PR1, on_path_PR1)
    advantage_BRV[P:] = wrong_P[prompt_B][:, None, None]
    reach_BR = torch.zeros(len(batch.tokens_BT), R, dtype=torch.float64)
    reach_BR[:P] = (so_far_PR - chance_PR).exp() * mask_PR
    reach_BR[P:, : off_BR.shape[1]] = share_B[:, None] * off_BR
    real = replace(batch, response_mask_BR=reach_BR > 0)
    return Places(real, reach_BR, advantage_BRV, rollout_BRV, tokens, (right_P, wrong_P))


def behind_a_wrong_token(
    sampled: Batch, right: Batch, prompt_B: Tensor, *, itself: bool = False
) -> Tensor:
    """Return `[B, R]`: which tokens come after the first wrong one, or with `itself` are it."""
    R = sampled.response_mask_BR.shape[1]
    own = torch.nn.functional.pad(right.responses_BR, (0, R), value=-1)[prompt_B, :R]
    wrong_BR = (sampled.responses_BR != own) & sampled.response_mask_BR
    before_BR = wrong_BR.long().cumsum(1) - (0 if itself else wrong_BR.long())
    return (before_BR > 0) & sampled.response_mask_BR


def expected_gradients(
    policy: Policy, found: Places, multipliers: dict[str, Multipliers]
) -> dict[str, Tensor]:
    """Return the expected gradient `[N]` for each way to multiply tokens.

    Args:
        policy: that computes it; it is not updated.
        found: places of an engine's answers.
        multipliers: by name; they look at one token alone.
    """
    train_BRV = answer_logprobs(policy.model, found.batch, cached=False)
    mask_BRV = found.batch.response_mask_BR[..., None].expand_as(train_BRV)
    flat = (train_BRV.detach(), found.rollout_BRV, mask_BRV)
    pair = LogprobPair(*(each.flatten(1) for each in flat))
    chance_BRV = found.reach_BR[..., None] * found.rollout_BRV.exp() * found.advantage_BRV
    gradients: dict[str, Tensor] = {}
    for name, multiplier in multipliers.items():
        value_BRV = multiplier(pair).view_as(train_BRV)
        loss = -(chance_BRV * value_BRV * train_BRV).sum() / found.tokens
        loss.backward(retain_graph=True)
        gradients[name] = taken(policy)
    return gradients


def expected_by_sequence(
    policy: Policy,
    right: Batch,
    found: Places,
    sampled: Batch,
    prompt_B: Tensor,
    share_B: Tensor,
    truncate: float,
) -> Tensor:
    """Return the expected gradient `[N]` where an answer is multiplied by its own ratio, truncated.

    Not truncated, it would be that of BF16's own answers with these advantages, which is not
    sampled; what truncating takes away is.

    Args:
        policy: that computes it; it is not updated.
        right: the right answer to each prompt.
        found: places of the engine's answers.
        sampled: different answers that the engine gave.
        prompt_B: of these.
        share_B: of the answers to its prompt that each is.
        truncate: the largest multiplier.
    """
    right_P, wrong_P = found.advantages_P
    chance_P = picked(policy, right).sum(1).exp()
    loss = -((right_P - wrong_P) * chance_P).sum()
    with torch.no_grad():
        log_ratio_BR = picked(policy, sampled) - sampled.rollout_BR
        ratio_B = log_ratio_BR.masked_fill(~sampled.response_mask_BR, 0.0).sum(1).exp()
    above_B = ratio_B > truncate
    if above_B.any():
        at_B, part = prompt_B[above_B], sampled.of(above_B)
        wrong_B = behind_a_wrong_token(part, right, at_B, itself=True).any(1)
        advantage_B = torch.where(wrong_B, wrong_P[at_B], right_P[at_B])
        less_B = share_B[above_B] * (truncate - ratio_B[above_B]) * advantage_B
        loss = loss - (less_B * picked(policy, part).sum(1)).sum()
    (loss / found.tokens).backward()
    return taken(policy)


def picked(policy: Policy, batch: Batch) -> Tensor:
    """Return logprobs `[B, R]` of a batch's responses, with gradients, in FP64."""
    logprobs_BRV = answer_logprobs(policy.model, batch, cached=False)
    found_BR = logprobs_BRV.gather(2, batch.responses_BR[..., None])[..., 0]
    return found_BR.masked_fill(~batch.response_mask_BR, 0.0)


def taken(policy: Policy) -> Tensor:
    """Return the gradient `[N]` of a policy's weights, and forget it."""
    found = [
        torch.zeros_like(each) if each.grad is None else each.grad
        for each in policy.parameters.values()
    ]
    policy.model.zero_grad(set_to_none=True)
    return torch.cat([each.float().flatten() for each in found])
