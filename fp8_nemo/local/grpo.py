"""Run GRPO as NeMo RL does it, on one machine.

A step: sample, reward, score (which also observes Q/K/V ranges), correct, update, recalibrate,
refit, perhaps validate and save. What an algorithm chooses, from the rewards to the loss, is in
`loss.py`, and dynamic sampling in `rollout.py`; with `algorithm=grpo` it is a leave-one-out
baseline, normalized advantages, clipping at 0.2, token-level loss, an optional k3 penalty towards
the starting model.

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

from fp8_nemo.correction.correct import (
    Multiplier,
    advantage_metrics,
    correct,
    correction_metrics,
)
from fp8_nemo.correction.measure import packed, pair_file
from fp8_nemo.correction.metrics import changed_bytes
from fp8_nemo.correction.mismatch import LogprobPair, length_metrics, mismatch_metrics
from fp8_nemo.correction.routing import RouteCount, replay_metrics
from fp8_nemo.correction.update import policy_ratio
from fp8_nemo.glue import recalibrate
from fp8_nemo.glue.refit import refit_stream, with_noise
from fp8_nemo.local import checkpoint
from fp8_nemo.local.chat import Chat
from fp8_nemo.local.engine import Batch, Engine, pad_left
from fp8_nemo.local.loss import (
    UpdateMetrics,
    clipped_loss,
    group_advantages,
    k3,
    reduced,
    reinforce_plus_plus,
)
from fp8_nemo.local.policy import MAX_GRAD_NORM, Policy
from fp8_nemo.local.rollout import Rollout, rewarded, sample_dynamically, without_cut
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.model_dir import model_path
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.own.reward import rewarder
from fp8_nemo.recipe.problems import Problem, load_problems, write_problems
from fp8_nemo.recipe.settled import VALIDATION_PROBLEMS
from fp8_nemo.runs import metrics, run_dir
from fp8_nemo.runs.metrics import append_judged

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
        self.algorithm = self.recipe.algorithm.filled
        self.path = path
        precision = self.recipe.precision
        source = model_path(self.recipe.model)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.problems = load_problems(self.recipe.data, self.recipe.seed)
        self.reward = rewarder(self.recipe.data)
        self.chat = Chat.load(source)
        replays, most = self.recipe.replay.is_on, self.recipe.grpo.max_grad_norm
        self.policy = Policy(
            source,
            precision,
            self.settled.learning_rate,
            device,
            max_grad_norm=most or MAX_GRAD_NORM,
            replays=replays,
            lora=self.recipe.lora,
        )
        self.reference = (
            Policy(source, precision, 0.0, device) if self.settled.kl_penalty > 0 else None
        )
        self.engine = Engine(self.policy.model.config, precision, device, records=replays)
        self.routes = RouteCount(device) if replays else None
        self.num_layers = self.policy.model.config.num_hidden_layers
        self.fp8_kv = precision.cache.is_quantized
        observer = recalibrate.AmaxObserver(
            self.num_layers,
            self.recipe.glue.recalibrate.history,
            device,
            self.engine.kv_groups,
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
            DynamicSamplingError: a step found too few prompts to learn from.
            CheckpointError: the last checkpoint is damaged.
            RunDirError: rows that the run had are nowhere.
            OSError: the problems that it samples cannot be written.
        """
        if self.recipe.data.is_made:
            write_problems(run_dir.data_dir(self.path), self.problems)
        with torch.random.fork_rng():
            self._resume_or_start(report)
            for step in range(self.progress.step + 1, self.recipe.grpo.steps + 1):
                row = self._step(step)
                stops, verify = self.recipe.grpo.stop_when_unstable, self.recipe.glue.verify
                health = append_judged(self.path, row, stops, verify)
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
            self._refit(self.progress.step)
            return
        row: dict[str, Any] = {"step": 0}
        if self.fp8_kv:
            self.progress.kv_scales = self._scales_of_prompts()
        row |= self._refit(0)
        if self.recipe.grpo.validate_first:
            row["val/accuracy"] = self._validate()
        metrics.append_metrics(self.path, row)
        report(row)

    def _step(self, step: int) -> dict[str, Any]:
        clock = Clock()
        row: dict[str, Any] = {"step": step}
        with clock("step"):
            with clock("rollout"):
                rollout, sampled = self._rollout(step)
            batch = without_cut(rollout) if self.algorithm.overlong_filtering else rollout.batch
            with clock("logprob"):
                self.progress.observer.next_step()
                observes = self.fp8_kv and self.recipe.glue.recalibrate.source == "logprob"
                observer = self.progress.observer if observes else None
                train_BR = self.policy.logprobs(batch, observer, self.routes)
                reference_BR = self.reference.logprobs(batch) if self.reference else None
            pair = LogprobPair(train_BR, batch.rollout_BR, batch.response_mask_BR)
            multiplier = correct(pair, self.recipe.correction)
            advantages = self._advantages(rollout, batch, train_BR, reference_BR)
            if warmup := self.recipe.grpo.warmup_steps:
                self.policy.warm_up(step - 1, warmup)
            with clock("train"):
                row |= self._update(batch, advantages, train_BR, reference_BR, multiplier)
            lengths_B = rollout.batch.response_mask_BR.sum(1)
            row |= sampled | length_metrics(lengths_B, self.settled.response_tokens)
            row |= mismatch_metrics(pair) | correction_metrics(
                multiplier, pair, self.recipe.correction
            )
            row |= advantage_metrics(multiplier, pair, advantages)
            row |= self._replay_metrics(batch)
            if self.recipe.grpo.validates(step) and pair.mask_BT.any():
                with metrics.replaced(pair_file(self.path, step)) as file:
                    file.write_bytes(packed(pair))
            if self.fp8_kv:
                with clock("recalibrate"):
                    row |= self._recalibrate(batch)
            with clock("refit"):
                row |= self._refit(step)
        self.progress.step = step
        if self.recipe.grpo.validates(step):
            row["val/accuracy"] = self._validate()
        return row | clock.times

    def _problems_of(self, first: int, prompts: int) -> list[Problem]:
        """Return problems from `first` on, each `generations_per_prompt` times, group by group."""
        train = self.problems.train
        chosen = [train[index % len(train)] for index in range(first, first + prompts)]
        generations = self.settled.generations_per_prompt
        return [each for each in chosen for _ in range(generations)]

    def _sample(self, problems: list[Problem], generator: torch.Generator) -> Batch:
        prompts = [self.chat.prompt(problem.input) for problem in problems]
        return self.engine.generate(prompts, self.chat, self.settled.response_tokens, generator)

    def _answered(self, problems: list[Problem], generator: torch.Generator) -> Rollout:
        """Sample answers and reward them."""
        batch, longest = self._sample(problems, generator), self.settled.response_tokens
        return rewarded(batch, problems, self.chat, self.algorithm, longest, self.reward)

    def _rollout(self, step: int) -> tuple[Rollout, dict[str, float]]:
        """Sample a step's answers; return them, and what all that were sampled earned."""
        prompts, sampler = self.settled.prompts_per_step, self.progress.sampler
        if not self.algorithm.use_dynamic_sampling:
            rollout = self._answered(self._problems_of((step - 1) * prompts, prompts), sampler)
            return rollout, {"reward/mean": rollout.rewards_B.mean().item()}

        def draw() -> Rollout:
            """Sample answers to the next prompts."""
            first, many = self.progress.prompts, self.settled.prompts_per_batch
            self.progress.prompts += many
            return self._answered(self._problems_of(first, many), sampler)

        generations = self.settled.generations_per_prompt
        rollout, rewards_N, batches = sample_dynamically(
            draw, self.algorithm, prompts, generations, self.chat.pad
        )
        found = {"reward/mean": rewards_N.mean().item(), "rollout/batches": batches}
        return rollout, found

    def _advantages(
        self, rollout: Rollout, batch: Batch, train_BR: Tensor, reference_BR: Tensor | None
    ) -> Tensor:
        """Return advantages `[B, 1]`, or of each token."""
        rewards_PG = rollout.rewards_B.view(-1, self.settled.generations_per_prompt)
        if self.algorithm.estimator == "grpo":
            return group_advantages(rewards_PG, self.algorithm).to(self.policy.device)[:, None]
        cost_BR = None
        if self.algorithm.use_kl_in_reward and reference_BR is not None:
            cost_BR = self.settled.kl_penalty * k3(train_BR, reference_BR)
        return reinforce_plus_plus(rewards_PG, batch.response_mask_BR, self.algorithm, cost_BR)

    def _replay_metrics(self, batch: Batch) -> dict[str, float]:
        """Say how many routes of the step's tokens were exchanged, and how many were not known."""
        if self.routes is None or batch.routes_BTLA is None:
            return {}
        routed_BT = batch.mask_BT.clone()
        routed_BT[:, :-1] &= batch.mask_BT[:, 1:]  # an answer's last token was never fed
        routed_BT[:, -1] = False
        return replay_metrics(self.routes.take(), batch.routes_BTLA, routed_BT)

    def _update(
        self,
        batch: Batch,
        advantages: Tensor,
        train_BR: Tensor,
        reference_BR: Tensor | None,
        multiplier: Multiplier,
    ) -> dict[str, float]:
        """Do `updates_per_step` optimizer steps on the batch; return the `train/` metrics."""
        algorithm, updates = self.algorithm, self.settled.updates_per_step
        size = len(batch.tokens_BT) // updates
        mask_BR = counted_BR = batch.response_mask_BR
        if self.recipe.correction.renormalize_denominator:
            counted_BR = multiplier.kept_BT
        in_loss = None if algorithm.use_kl_in_reward else reference_BR
        moved, norms = UpdateMetrics(algorithm, updates), []
        for start in range(0, len(batch.tokens_BT), size):
            whole = slice(start, start + size)

            def loss_of(current_BR: Tensor, part: slice, whole: slice = whole) -> Tensor:
                """Return some rows' share of this update's loss."""
                rows = slice(whole.start + part.start, whole.start + part.stop)
                ratio_BR = policy_ratio(
                    current_BR,
                    train_BR[rows],
                    mask_BR[rows],
                    by_sequence=bool(algorithm.sequence_level_importance_ratios),
                )
                loss_BR = multiplier.value_BT[rows] * clipped_loss(
                    ratio_BR, current_BR, advantages[rows], algorithm
                )
                if in_loss is not None:
                    penalty = self.settled.kl_penalty
                    loss_BR = loss_BR + penalty * k3(current_BR, in_loss[rows])
                moved.add(
                    current_BR,
                    train_BR[rows],
                    batch.rollout_BR[rows],
                    ratio_BR,
                    mask_BR[rows],
                    float(mask_BR[whole].sum()),
                )
                return reduced(
                    loss_BR,
                    counted_BR[rows],
                    counted_BR[whole],
                    int(mask_BR[whole].any(1).sum()),
                    bool(algorithm.token_level_loss),
                )

            norms.append(self.policy.update(batch.of(whole), loss_of))
        largest = max((norm for norm in norms if norm is not None), default=0.0)
        return {"train/grad_norm": largest} | self._scale_metrics(norms) | moved.row()

    def _scale_metrics(self, norms: list[float | None]) -> dict[str, float]:
        """Say what the loss is scaled by, and how many updates overflowed; nothing but in FP16."""
        if not self.policy.scaler.is_enabled():
            return {}
        scale = self.policy.scaler.get_scale()
        return {"train/loss_scale": scale, "train/skipped_updates": norms.count(None)}

    def _scales_of_prompts(self) -> dict[str, float]:
        """Set the first scales, before any response: ranges of prompts, with more room."""
        prompts = self.settled.prompts_per_step
        prompts = [self.chat.prompt(each.input) for each in self._problems_of(0, prompts)]
        tokens_BT, mask_BT = pad_left(prompts, self.chat.pad, self.policy.device)
        last_B1 = tokens_BT[:, -1:]
        batch = Batch(tokens_BT, mask_BT, torch.ones_like(last_B1).bool(), last_B1.float())
        self.policy.logprobs(batch, self.progress.observer)
        settings = self.recipe.glue.recalibrate
        return recalibrate.kv_scales(self.progress.observer.read(), settings.first_margin)

    def _recalibrate(self, batch: Batch) -> dict[str, float]:
        """Set new scales from this step's ranges; return how the scales in force did."""
        settings, observer = self.recipe.glue.recalibrate, self.progress.observer
        if settings.source == "forward":
            self.policy.logprobs(batch, observer)
        amax_SL3, before = observer.read(), self.progress.kv_scales
        self.progress.kv_scales = recalibrate.kv_scales(amax_SL3, settings.margin)
        return recalibrate.change_metrics(amax_SL3[0], before, self.progress.kv_scales)

    def _refit(self, trained: int) -> dict[str, float]:
        recipe, verify = self.recipe, self.recipe.glue.verify
        self.refits += 1
        named_weights = with_noise(
            self.policy.named_weights(),
            recipe.noise.sigma(trained, recipe.grpo),
            recipe.precision,
            num_layers=self.num_layers,
            seed=recipe.seed,
            trained=trained,
        )
        stream = refit_stream(
            named_weights,
            recipe.precision,
            self.progress.kv_scales,
            num_layers=self.num_layers,
            kv_groups=self.engine.kv_groups,
            verify=verify,
            number=self.refits,
        )
        proof = self.engine.refit(stream, verify, self.refits)
        found = {"refit/bytes": proof.bytes, "refit/verified_weights": proof.verified_weights}
        return found | changed_bytes(proof.changed, proof.sampled)

    def _validate(self) -> float:
        """Return the share of right answers on held-out problems; the sampling repeats itself."""
        problems = self.problems.validation[:VALIDATION_PROBLEMS]
        generator = torch.Generator(self.policy.device).manual_seed(self.recipe.seed)
        return self._answered(problems, generator).right_B.mean().item()


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
