"""Compute rewards, advantages and the policy's loss as NeMo RL does (main 7ea279a).

One pure function for each thing that an algorithm chooses. The loss is linear in the advantage, for
factors that are not negative, so that a correction may multiply either. Its mask is the response
without answers that were filtered; its denominator all such tokens of an update, or with
`token_level_loss=false` each sequence's own and then the sequences.

Shapes: B sequences, R response tokens, P prompts, G answers of a prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8_nemo.correction.update import clipped_tokens, entropy_sum, kl_sum
from fp8_nemo.recipe.options.training import Algorithm

STD_EPSILON = 1e-6
MOST_KL = 10
MIN_VARIANCE = 1e-8


def shaped_rewards(
    rewards_B: Tensor,
    lengths_B: Tensor,
    truncated_B: Tensor,
    algorithm: Algorithm,
    longest: int,
) -> Tensor:
    """Return rewards after scaling and shaping (`scale_rewards`, `apply_reward_shaping`).

    Args:
        rewards_B: 0 to 1.
        lengths_B: response tokens.
        truncated_B: true where the longest length cut an answer.
        algorithm: filled.
        longest: response tokens that an answer may have.
    """
    least = algorithm.reward_target_min
    if least:
        rewards_B = least + (1.0 - least) * rewards_B.clamp(0.0, 1.0)
    if algorithm.stop_properly_penalty_coef is not None:
        stopped_B = rewards_B * algorithm.stop_properly_penalty_coef
        return torch.where(truncated_B, stopped_B, rewards_B)
    if algorithm.overlong_buffer is None:
        return rewards_B
    buffer = max(1, round(algorithm.overlong_buffer * longest))
    beyond_B = lengths_B - (longest - buffer)
    penalty = algorithm.overlong_buffer_penalty or 0.0
    return rewards_B + (-beyond_B / buffer * penalty).clamp(max=0.0)


def is_informative(rewards_PG: Tensor) -> Tensor:
    """Return `[P]`: whether the answers to a prompt earn different rewards (dynamic sampling)."""
    return (rewards_PG != rewards_PG[:, :1]).any(1)


def group_advantages(rewards_PG: Tensor, algorithm: Algorithm) -> Tensor:
    """Return advantages `[P G]` over the group's mean, normalized where the others differ.

    `calculate_baseline_and_std_per_prompt` and `GRPOAdvantageEstimator`.
    """
    G = rewards_PG.shape[1]
    leaves_out = algorithm.use_leave_one_out_baseline
    own_PG, n = (rewards_PG, G - 1) if leaves_out else (torch.zeros_like(rewards_PG), G)
    others_PG = (rewards_PG.sum(1, keepdim=True) - own_PG) / n
    squares_PG = (rewards_PG.square().sum(1, keepdim=True) - own_PG.square()) / n
    variance_PG = (squares_PG - others_PG.square()).clamp(min=0) * (n / max(n - 1, 1))
    deviation_PG = variance_PG.sqrt()
    scale_PG = torch.where(deviation_PG > 0, deviation_PG + STD_EPSILON, 1.0)
    if not algorithm.normalize_rewards:
        scale_PG = torch.ones_like(scale_PG)
    return ((rewards_PG - others_PG) / scale_PG).flatten()


def reinforce_plus_plus(
    rewards_PG: Tensor, mask_BR: Tensor, algorithm: Algorithm, kl_cost_BR: Tensor | None
) -> Tensor:
    """Return advantages `[B, R]`, normalized over all real tokens of the step.

    `ReinforcePlusPlusAdvantageEstimator`.

    Args:
        rewards_PG: of the step.
        mask_BR: true at real response tokens.
        algorithm: filled.
        kl_cost_BR: KL to the reference times its weight, with `use_kl_in_reward`.
    """
    if algorithm.minus_baseline:
        rewards_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    value_BR = rewards_PG.flatten().to(mask_BR.device)[:, None].expand(mask_BR.shape)
    if kl_cost_BR is not None:
        value_BR = value_BR - kl_cost_BR
    tokens = mask_BR.sum().clamp(min=1)
    centered_BR = value_BR - (value_BR * mask_BR).sum() / tokens
    variance = (centered_BR.square() * mask_BR).sum() / tokens
    return centered_BR * variance.clamp(min=MIN_VARIANCE).rsqrt()


def clipped_loss(
    ratio_BR: Tensor, current_BR: Tensor, advantages_B1: Tensor, algorithm: Algorithm
) -> Tensor:
    """Return the loss per token: PPO's `max(-A r, -A clip(r))`, CISPO's or REINFORCE's.

    Args:
        ratio_BR: `policy_ratio`.
        current_BR: logprobs that carry the gradient.
        advantages_B1: or of each token, `[B, R]`.
        algorithm: filled.
    """
    if algorithm.disable_ppo_ratio:
        return -advantages_B1 * current_BR
    lowest, highest = clip_bounds(algorithm)
    clipped_BR = ratio_BR.clamp(lowest, highest)
    if algorithm.use_cispo:
        return -advantages_B1 * clipped_BR.detach() * current_BR
    loss_BR = torch.maximum(-advantages_B1 * ratio_BR, -advantages_B1 * clipped_BR)
    if algorithm.ratio_clip_c is None:
        return loss_BR
    most_BR = -advantages_B1 * algorithm.ratio_clip_c
    return torch.where(advantages_B1 < 0, torch.minimum(loss_BR, most_BR), loss_BR)


def clip_bounds(algorithm: Algorithm) -> tuple[float, float]:
    """Return the ratios between which the loss is not clipped."""
    return 1 - (algorithm.ratio_clip_min or 0.0), 1 + (algorithm.ratio_clip_max or 0.0)


def k3(current_BR: Tensor, reference_BR: Tensor) -> Tensor:
    """Return the k3 estimate per token of KL(current || reference), value and gradient NeMo RL's.

    `exp(x - x.detach())` is 1 and carries the gradient of sampling from the policy; where the input
    is clamped to +-20 neither gradient passes (`calculate_kl`, main 7ea279a).
    """
    log_ratio_BR = reference_BR - current_BR
    x_BR = log_ratio_BR.clamp(-20, 20)
    score_BR = (current_BR - current_BR.detach()).exp()
    score_BR = torch.where(log_ratio_BR == x_BR, score_BR, score_BR.detach())
    return (score_BR * (torch.expm1(x_BR) - x_BR)).clamp(max=MOST_KL)


def reduced(
    loss_BR: Tensor, counted_BR: Tensor, all_counted_BR: Tensor, sequences: int, by_token: bool
) -> Tensor:
    """Return some rows' share of an update's loss.

    Args:
        loss_BR: of these rows.
        counted_BR: their tokens that count.
        all_counted_BR: those of the whole update.
        sequences: of the update, answers that were filtered not counted.
        by_token: `token_level_loss`; else sequences weigh alike.
    """
    if by_token:
        return (loss_BR * counted_BR).sum() / all_counted_BR.sum().clamp(min=1)
    mean_B = (loss_BR * counted_BR).sum(1) / counted_BR.sum(1).clamp(min=1)
    return mean_B.sum() / max(1, sequences)


class UpdateMetrics:
    """Add up, over a step's updates, how far they moved the policy.

    Args:
        algorithm: filled.
        updates: of the step, whose means are averaged, as NeMo RL does.
    """

    def __init__(self, algorithm: Algorithm, updates: int) -> None:
        self.algorithm, self.updates = algorithm, updates
        self.sums: dict[str, float] = {}
        self.largest = 0.0

    @torch.no_grad()
    def add(
        self,
        current_BR: Tensor,
        train_BR: Tensor,
        rollout_BR: Tensor,
        ratio_BR: Tensor,
        mask_BR: Tensor,
        tokens: float,
    ) -> None:
        """Add some rows of an update that has so many `tokens`."""
        clip = clip_bounds(self.algorithm)
        found = {
            "train/entropy": entropy_sum(current_BR, rollout_BR, mask_BR),
            "train/kl": kl_sum(current_BR, train_BR, mask_BR),
        }
        if not self.algorithm.disable_ppo_ratio:
            found["train/clip_fraction"] = clipped_tokens(ratio_BR, mask_BR, clip)
            largest = ratio_BR.masked_fill(~mask_BR.bool(), 0.0).max()
            self.largest = max(self.largest, largest.item())
        for key, value in found.items():
            share = value.item() / max(1.0, tokens) / self.updates
            self.sums[key] = self.sums.get(key, 0.0) + share

    def row(self) -> dict[str, float]:
        """Return the `train/` keys of docs/metrics.md, but the gradient's norm."""
        has_ratio = not self.algorithm.disable_ppo_ratio
        return self.sums | ({"train/ratio_max": self.largest} if has_ratio else {})
