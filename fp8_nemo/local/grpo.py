"""Run GRPO as NeMo RL does it, on one machine.

A step: sample, reward, score (which also observes Q/K/V ranges), correct, update, recalibrate,
refit, perhaps validate and save. Leave-one-out baseline and normalized advantages (NeMo RL
`algorithms/utils.py`), clipping at 0.2, token-level loss, optional k3 penalty towards the starting
model.

Step 0 of the metrics is the first refit and validation. The engine is refitted at the end of each
step, so it always holds the policy; a resumed run refits first, with the scales it had saved.

Shapes: B sequences, R response tokens, P prompts, G generations per prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8_nemo.correction.correct import Multiplier, correct, correction_metrics
from fp8_nemo.correction.measure import save_pair
from fp8_nemo.correction.mismatch import (
    LogprobPair,
    entropy_metrics,
    length_metrics,
    mismatch_metrics,
)
from fp8_nemo.glue import recalibrate
from fp8_nemo.glue.refit import refit_stream
from fp8_nemo.local import checkpoint
from fp8_nemo.local.chat import Chat
from fp8_nemo.local.engine import Batch, Engine, pad_left
from fp8_nemo.local.policy import Policy
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.model_dir import model_path
from fp8_nemo.recipe.options import Recipe
from fp8_nemo.recipe.problems import Problem, load_problems, reward, write_problems
from fp8_nemo.recipe.settled import VALIDATION_PROBLEMS
from fp8_nemo.runs import metrics, run_dir
from fp8_nemo.runs.metrics import append_judged

CLIP = 0.2
STD_EPSILON = 1e-6

Report = Callable[[dict[str, Any]], None]
Stop = Callable[[], bool]


class GrpoLoop:
    """Run one recipe's GRPO in its directory.

    Args:
        plan: frozen.
        path: the run directory.
    """

    def __init__(self, plan: Plan, path: Path) -> None:
        self.recipe: Recipe = plan.recipe
        self.settled = plan.settled
        self.path = path
        precision = self.recipe.precision
        source = model_path(self.recipe.model)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.problems = load_problems(self.recipe.data, self.recipe.seed)
        if self.recipe.data.is_made:
            write_problems(run_dir.data_dir(path), self.problems)
        self.chat = Chat.load(source)
        self.policy = Policy(source, precision, self.settled.learning_rate, device)
        self.reference = (
            Policy(source, precision, 0.0, device) if self.settled.kl_penalty > 0 else None
        )
        self.engine = Engine(self.policy.model.config, precision, device)
        self.num_layers = self.policy.model.config.num_hidden_layers
        self.fp8_kv = precision.cache.is_quantized
        observer = recalibrate.AmaxObserver(
            self.num_layers, self.recipe.glue.recalibrate.history, device
        )
        sampler = torch.Generator(device).manual_seed(self.recipe.seed)
        self.progress = checkpoint.Progress(0, sampler, observer, {})
        self.refits = 0

    def train(self, report: Report, stop: Stop = lambda: False) -> int:
        """Train from where the directory stands to the plan's last step; one metrics row per step.

        Args:
            report: is given every row.
            stop: whether to save after the present step and leave it at that.

        Returns:
            The last step, which is saved.

        Raises:
            RefitError: a refit was not proven; nothing was sampled from it.
            UnstableError: a step was unstable, and the recipe stops at one.
            CheckpointError: the last checkpoint is damaged.
            RunDirError: rows that the run had are nowhere.
        """
        with torch.random.fork_rng():
            self._resume_or_start(report)
            for step in range(self.progress.step + 1, self.recipe.grpo.steps + 1):
                row = self._step(step)
                health = append_judged(self.path, row, self.recipe.grpo.stop_when_unstable)
                last = step == self.recipe.grpo.steps or stop()
                if step % self.recipe.grpo.checkpoint_every == 0 or last:
                    checkpoint.save(self.path, self.policy, self.progress)
                report(row | {"health": health})
                if last:
                    break
        return self.progress.step

    def _resume_or_start(self, report: Report) -> None:
        saved = run_dir.rewind(self.path, "local")
        if saved:
            checkpoint.load(saved, self.policy, self.progress)
            self._refit()
            return
        row: dict[str, Any] = {"step": 0}
        if self.fp8_kv:
            self.progress.kv_scales = self._scales_of_prompts()
        row |= self._refit()
        if self.recipe.grpo.validate_first:
            row["val/accuracy"] = self._validate()
        metrics.append_metrics(self.path, row)
        report(row)

    def _step(self, step: int) -> dict[str, Any]:
        clock = Clock()
        row: dict[str, Any] = {"step": step}
        with clock("step"):
            with clock("rollout"):
                problems = self._problems_of(step)
                batch = self._sample(problems, self.progress.sampler)
            rewards_B = self._rewards(batch, problems)
            with clock("logprob"):
                self.progress.observer.next_step()
                observes = self.fp8_kv and self.recipe.glue.recalibrate.source == "logprob"
                train_BR = self.policy.logprobs(batch, self.progress.observer if observes else None)
                reference_BR = self.reference.logprobs(batch) if self.reference else None
            pair = LogprobPair(train_BR, batch.rollout_BR, batch.response_mask_BR)
            multiplier = correct(pair, self.recipe.correction)
            with clock("train"):
                advantages_B = group_advantages(
                    rewards_B.view(-1, self.settled.generations_per_prompt)
                )
                row["train/grad_norm"] = self._update(
                    batch, advantages_B, train_BR, reference_BR, multiplier
                )
            row |= rollout_metrics(batch, rewards_B, self.settled.response_tokens)
            row |= (
                entropy_metrics(pair)
                | mismatch_metrics(pair)
                | correction_metrics(multiplier, pair, self.recipe.correction)
            )
            if self._validates(step):
                save_pair(self.path, step, pair)
            if self.fp8_kv:
                with clock("recalibrate"):
                    row |= self._recalibrate(batch)
            with clock("refit"):
                row |= self._refit()
        self.progress.step = step
        if self._validates(step):
            row["val/accuracy"] = self._validate()
        return row | clock.times

    def _validates(self, step: int) -> bool:
        grpo = self.recipe.grpo
        return step % grpo.validate_every == 0 or step == grpo.steps

    def _problems_of(self, step: int) -> list[Problem]:
        """Return the step's problems, each `generations_per_prompt` times, group by group."""
        prompts, train = self.settled.prompts_per_step, self.problems.train
        first = (step - 1) * prompts
        chosen = [train[index % len(train)] for index in range(first, first + prompts)]
        generations = self.settled.generations_per_prompt
        return [each for each in chosen for _ in range(generations)]

    def _sample(self, problems: list[Problem], generator: torch.Generator) -> Batch:
        prompts = [self.chat.prompt(problem.input) for problem in problems]
        limit = self.settled.response_tokens
        return self.engine.generate(prompts, self.chat, limit, generator)

    def _rewards(self, batch: Batch, problems: list[Problem]) -> Tensor:
        answers = self.chat.texts(batch.responses_BR, batch.response_mask_BR)
        return torch.tensor(
            [reward(answer, problem) for answer, problem in zip(answers, problems, strict=True)]
        )

    def _update(
        self,
        batch: Batch,
        advantages_B: Tensor,
        train_BR: Tensor,
        reference_BR: Tensor | None,
        multiplier: Multiplier,
    ) -> float:
        """Do `updates_per_step` optimizer steps on the batch; return the largest gradient norm."""
        size = len(batch.tokens_BT) // self.settled.updates_per_step
        advantages_B1 = advantages_B.to(self.policy.device)[:, None]
        counted_BR = batch.response_mask_BR
        if self.recipe.correction.renormalize_denominator:
            counted_BR = multiplier.kept_BT
        norms = []
        for start in range(0, len(batch.tokens_BT), size):

            def loss_of(current_BR: Tensor, part: slice, start: int = start) -> Tensor:
                """Return the loss of some rows of this update, divided by all of its tokens."""
                rows = slice(start + part.start, start + part.stop)
                loss_BR = multiplier.value_BT[rows] * clipped_loss(
                    current_BR, train_BR[rows], advantages_B1[rows]
                )
                if reference_BR is not None:
                    penalty = self.settled.kl_penalty
                    loss_BR = loss_BR + penalty * k3(current_BR, reference_BR[rows])
                tokens = counted_BR[start : start + size].sum().clamp(min=1)
                return (loss_BR * counted_BR[rows]).sum() / tokens

            norms.append(self.policy.update(batch.rows(start, start + size), loss_of))
        return max(norms)

    def _scales_of_prompts(self) -> dict[str, float]:
        """Set the first scales, before any response: ranges of prompts, with more room."""
        prompts = [self.chat.prompt(each.input) for each in self._problems_of(1)]
        self._observe_prompts(prompts)
        settings = self.recipe.glue.recalibrate
        return recalibrate.kv_scales(self.progress.observer.read(), settings.first_margin)

    def _observe_prompts(self, prompts: list[list[int]]) -> None:
        tokens_BT, mask_BT = pad_left(prompts, self.chat.pad, self.policy.device)
        last_B1 = tokens_BT[:, -1:]
        batch = Batch(tokens_BT, mask_BT, torch.ones_like(last_B1).bool(), last_B1.float())
        self.policy.logprobs(batch, self.progress.observer)

    def _recalibrate(self, batch: Batch) -> dict[str, float]:
        """Set new scales from this step's ranges; return how the scales in force did."""
        settings, observer = self.recipe.glue.recalibrate, self.progress.observer
        if settings.source == "forward":
            self.policy.logprobs(batch, observer)
        amax_SL3, before = observer.read(), self.progress.kv_scales
        self.progress.kv_scales = recalibrate.kv_scales(amax_SL3, settings.margin)
        return {
            "recalibrate/saturated_fraction": recalibrate.saturated_fraction(amax_SL3[0], before),
            "recalibrate/max_drift": recalibrate.max_drift(before, self.progress.kv_scales),
        }

    def _refit(self) -> dict[str, float]:
        verify = self.recipe.glue.verify
        self.refits += 1
        stream = refit_stream(
            self.policy.named_weights(),
            self.recipe.precision,
            self.progress.kv_scales,
            num_layers=self.num_layers,
            verify=verify,
            number=self.refits,
        )
        proof = self.engine.refit(stream, verify, self.refits)
        return {"refit/bytes": proof.bytes, "refit/verified_weights": proof.verified_weights}

    def _validate(self) -> float:
        """Return the share of right answers on held-out problems; the sampling repeats itself."""
        problems = self.problems.validation[:VALIDATION_PROBLEMS]
        generator = torch.Generator(self.policy.device).manual_seed(self.recipe.seed)
        return self._rewards(self._sample(problems, generator), problems).mean().item()


def group_advantages(rewards_PG: Tensor) -> Tensor:
    """Return leave-one-out advantages `[P G]`, normalized where the others differ.

    NeMo RL's `calculate_baseline_and_std_per_prompt` and `GRPOAdvantageEstimator` (main 7ea279a).
    """
    G = rewards_PG.shape[1]
    others_PG = (rewards_PG.sum(1, keepdim=True) - rewards_PG) / (G - 1)
    squares_PG = (rewards_PG.square().sum(1, keepdim=True) - rewards_PG.square()) / (G - 1)
    variance_PG = (squares_PG - others_PG.square()).clamp(min=0) * ((G - 1) / max(G - 2, 1))
    deviation_PG = variance_PG.sqrt()
    scale_PG = torch.where(deviation_PG > 0, deviation_PG + STD_EPSILON, 1.0)
    return ((rewards_PG - others_PG) / scale_PG).flatten()


def clipped_loss(current_BR: Tensor, train_BR: Tensor, advantages_B1: Tensor) -> Tensor:
    """Return PPO's clipped surrogate per token, `max(-A r, -A clip(r, 0.8, 1.2))`."""
    ratio_BR = (current_BR - train_BR).exp()
    clipped_BR = ratio_BR.clamp(1 - CLIP, 1 + CLIP)
    return torch.maximum(-advantages_B1 * ratio_BR, -advantages_B1 * clipped_BR)


def k3(current_BR: Tensor, reference_BR: Tensor) -> Tensor:
    """Return the k3 estimate per token of KL(current || reference), value and gradient NeMo RL's.

    `exp(x - x.detach())` is 1 and carries the gradient of sampling from the policy; where the input
    is clamped to +-20 neither gradient passes (`calculate_kl`, main 7ea279a).
    """
    log_ratio_BR = reference_BR - current_BR
    x_BR = log_ratio_BR.clamp(-20, 20)
    score_BR = (current_BR - current_BR.detach()).exp()
    score_BR = torch.where(log_ratio_BR == x_BR, score_BR, score_BR.detach())
    return (score_BR * (torch.expm1(x_BR) - x_BR)).clamp(max=10)


def rollout_metrics(batch: Batch, rewards_B: Tensor, longest: int) -> dict[str, float]:
    """Describe what was sampled: mean reward, lengths, answers that the longest length cut."""
    lengths_B = batch.response_mask_BR.sum(1)
    return {"reward/mean": rewards_B.mean().item()} | length_metrics(lengths_B, longest)


class Clock:
    """Measure seconds by phase, for the `time/` keys."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time a block."""
        start = time.perf_counter()
        yield
        self.times[f"time/{phase}"] = time.perf_counter() - start
