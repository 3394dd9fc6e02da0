"""One rollout and one update from a checkpoint, cell by cell, with common random numbers.

`__main__.py` says why; this measures. A rollout is kept as its different answers, which is two
thirds of the work: GRPO asks each prompt several times, and most answers come again.

Shapes: B answers, R response tokens, P prompts, G answers of a prompt, N all weights in a row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.learning.one_step.expected import (
    Places,
    expected_by_sequence,
    expected_gradients,
    mean_advantages,
    places,
)
from benchmarks.learning.one_step.moments import ABOVE, BASELINE, BELOW, Cell, Checkpoint, Step
from benchmarks.learning.one_step.starts import Start, Study, flat, gradient_of, load
from benchmarks.numerics.sources import CPU, answer_logprobs, answered
from fp8_nemo.correction.correct import Multiplier, correct
from fp8_nemo.correction.mismatch import LogprobPair, ratio
from fp8_nemo.correction.update import policy_ratio
from fp8_nemo.glue.recalibrate import AmaxObserver, kv_scales
from fp8_nemo.glue.refit import refit_stream
from fp8_nemo.local.chat import Chat
from fp8_nemo.local.engine import Batch, Engine
from fp8_nemo.local.loss import clipped_loss, group_advantages
from fp8_nemo.local.policy import MAX_GRAD_NORM, Policy
from fp8_nemo.local.rollout import rewarded
from fp8_nemo.recipe.model_dir import model_path
from fp8_nemo.recipe.options.correction import Correction
from fp8_nemo.recipe.options.training import Algorithm
from fp8_nemo.recipe.problems import Problem, load_problems, reward
from fp8_nemo.recipe.settled import VALIDATION_PROBLEMS

CORRECTIONS = {
    "bf16": ("none",),
    "fp8-linear": ("none", "tis", "mis"),
    "fp8-kv-attn": ("none", "tis", "mis", "seq-tis"),
    "fp8-e2e": ("none", "tis"),
    "fp8-e2e-kv-attn": ("none", "tis"),
}
SAMPLED_BY = {name: name.replace("e2e-kv", "kv").replace("e2e", "linear") for name in CORRECTIONS}
"""Whose engine: FP8 on both sides holds the same bytes there as FP8 in the rollout alone."""
TRAINED_BY = {name: "fp8-e2e" if "e2e" in name else "bf16" for name in CORRECTIONS}
BOUNDS = {BELOW: (0.0, 0.5), ABOVE: (2.0, torch.inf)}
SAME = 1e-6
"""Multipliers that differ by less are not computed twice."""


@dataclass(frozen=True)
class Answers:
    """Hold a rollout's different answers; each counts as often as it was given."""

    batch: Batch
    prompt_B: Tensor
    """Number of the prompt."""
    count_B1: Tensor
    advantage_B1: Tensor

    @property
    def tokens_BR(self) -> Tensor:
        """Return how often each token was sampled, zero at padding."""
        return self.count_B1 * self.batch.response_mask_BR

    def of(self, kept_B: Tensor) -> Answers:
        """Return some of the answers."""
        columns = (self.prompt_B, self.count_B1, self.advantage_B1)
        return Answers(self.batch.of(kept_B), *(each[kept_B] for each in columns))


def different(batch: Batch, rewards_PG: Tensor, algorithm: Algorithm) -> Answers:
    """Return a rollout's different answers: those equal to a prompt have equal advantages."""
    G, advantage_B = rewards_PG.shape[1], group_advantages(rewards_PG, algorithm)
    places: dict[tuple[int, ...], list[int]] = {}
    for at, row in enumerate(torch.cat([batch.tokens_BT, batch.mask_BT], 1).tolist()):
        places.setdefault((at // G, *row), []).append(at)
    first_B = torch.tensor([each[0] for each in places.values()])
    count_B1 = torch.tensor([[float(len(each))] for each in places.values()])
    return Answers(batch.of(first_B), first_B // G, count_B1, advantage_B[first_B, None])


class Given(NamedTuple):
    """Hold what an engine answered, and what it might have."""

    answers: Answers
    places: Places | None
    """None where a step has more than one update."""


class Bench:
    """Do a study's steps from one checkpoint after the other.

    Args:
        study: which.
    """

    def __init__(self, study: Study) -> None:
        self.study, plan = study, study.plan()
        self.settled, self.algorithm = plan.settled, plan.recipe.algorithm.filled
        self.margin = plan.recipe.glue.recalibrate.margin
        path, most = model_path(plan.recipe.model), plan.recipe.grpo.max_grad_norm or MAX_GRAD_NORM
        self.problems = load_problems(plan.recipe.data, study.seed)
        self.chat = Chat.load(path)
        precisions = {name: study.plan(name).recipe.precision for name in CORRECTIONS}
        self.policies = {
            name: Policy(
                path, precisions[name], study.learning_rate, CPU, max_grad_norm=most
            )
            for name in dict.fromkeys(TRAINED_BY.values())
        }  # fmt: skip
        config = self.policies["bf16"].model.config
        self.precisions = {name: precisions[name] for name in dict.fromkeys(SAMPLED_BY.values())}
        self.engines = {name: Engine(config, of, CPU) for name, of in self.precisions.items()}
        self.layers = config.num_hidden_layers
        self.held_out = answered(self.problems.validation[:VALIDATION_PROBLEMS], self.chat)
        names = dict.fromkeys(each for of in CORRECTIONS.values() for each in of)
        self.corrections = {each: study.plan(correction=each).recipe.correction for each in names}
        self.scales: dict[str, float] = {}

    def checkpoint(self, start: Start, number: int) -> dict[str, Any]:
        """Do all cells' steps from one checkpoint; return its part of the results.

        Args:
            start: where from.
            number: of the checkpoint, which draws prompts and answers.
        """
        self._set_scales(start, number)
        before = self._accuracies(start.masters, ("trainer", *self.engines))
        rollouts = [self._rollout(start, (number, at)) for at in range(self.study.repetitions)]
        sampled = [each["bf16"].answers for each in rollouts]
        lengths = [each.tokens_BR.sum() / each.count_B1.sum() for each in sampled]
        asked = [self._asked((number, at)) for at in range(self.study.repetitions)]
        truths = [
            self.expected_gradient(start, problems, float(length))
            for problems, length in zip(asked, lengths, strict=True)
        ]
        found = Checkpoint(truths, self._slope_N(start), before)
        for repetition, rollout in enumerate(rollouts):
            right = answered(asked[repetition], self.chat)
            found.add(repetition, dict(self._steps(start, rollout, right)))
        return {"accuracy": before, "norm": found.norm, "cells": found.rows()}

    def expected_gradient(self, start: Start, problems: list[Problem], length: float) -> Tensor:
        """Return the mean BF16 gradient `[N]` over all answers to some problems.

        An answer is right or wrong, and the logprobs of all answers have no gradient on average:
        what is left is that of the right one's probability, times what being right is worth.

        Args:
            start: of the step.
            problems: that are asked.
            length: mean tokens of an answer, by which a step divides.
        """
        policy, batch = start.put(self.policies["bf16"]), answered(problems, self.chat)
        p_B = policy.logprobs(batch).sum(1).exp()
        right_B, wrong_B = mean_advantages(p_B, self.settled.generations_per_prompt, self.algorithm)
        worth_B = (right_B - wrong_B).float()

        def loss_of(current_BR: Tensor, part: slice) -> Tensor:
            """Return some problems' share."""
            found_B = worth_B[part] * current_BR.sum(1).exp()
            return -found_B.sum() / (len(problems) * length)

        return gradient_of(policy, batch, loss_of)

    def _slope_N(self, start: Start) -> Tensor:
        """Return what a gradient of 1 gains, in points of held-out accuracy, weight by weight."""
        policy, problems = start.put(self.policies["bf16"]), len(self.held_out.mask_BT)

        def loss_of(current_BR: Tensor, part: slice) -> Tensor:
            """Return some problems' share of what is not right."""
            return -current_BR.sum(1).exp().sum() / problems

        return 100 * gradient_of(policy, self.held_out, loss_of) * start.moves_N(policy)

    def _asked(self, draw: tuple[int, int]) -> list[Problem]:
        return random.Random(str(draw)).sample(self.problems.train, self.study.prompts)

    def _sampled(self, engine: str, draw: tuple[int, int]) -> Answers:
        generations = self.settled.generations_per_prompt
        problems = [each for each in self._asked(draw) for _ in range(generations)]
        prompts = [self.chat.prompt(each.input) for each in problems]
        longest, generator = self.settled.response_tokens, torch.Generator()
        generator.manual_seed(1000 * draw[0] + draw[1])
        batch = self.engines[engine].generate(prompts, self.chat, longest, generator)
        found = rewarded(batch, problems, self.chat, self.algorithm, longest, reward)
        return different(batch, found.rewards_B.view(-1, generations), self.algorithm)

    def _rollout(self, start: Start, draw: tuple[int, int]) -> dict[str, Given]:
        """Let every engine answer the same prompts with the same random numbers."""
        start.put(self.policies["bf16"])
        right, found = answered(self._asked(draw), self.chat), dict[str, Given]()
        for name, engine in self.engines.items():
            self._refit(name)
            answers, there = self._sampled(name, draw), None
            if self.study.updates == 1:
                there = places(
                    engine.model, right, answers.batch, answers.prompt_B, self._shares(answers),
                    self.settled.generations_per_prompt, self.algorithm, self.chat.pad,
                )  # fmt: skip
            found[name] = Given(answers, there)
        return found

    def _shares(self, answers: Answers) -> Tensor:
        return answers.count_B1[:, 0].double() / self.settled.generations_per_prompt

    def _set_scales(self, start: Start, number: int) -> None:
        """Set scales from the ranges of a rollout of BF16's own, as a run has them."""
        policy, observer = start.put(self.policies["bf16"]), AmaxObserver(self.layers, 1)
        self._refit("bf16")
        policy.logprobs(self._sampled("bf16", (number, self.study.repetitions)).batch, observer)
        self.scales = kv_scales(observer.read(), self.margin)

    def _refit(self, engine: str) -> None:
        """Give an engine the BF16 trainer's weights."""
        weights, precision = self.policies["bf16"].named_weights(), self.precisions[engine]
        scales = self.scales if precision.cache.is_quantized else {}
        stream = refit_stream(
            weights, precision, scales, num_layers=self.layers, verify="off", number=1
        )
        self.engines[engine].refit(stream, "off", 1)

    @torch.no_grad()
    def _accuracies(self, masters: dict[str, Tensor], names: Sequence[str]) -> dict[str, float]:
        """Return the expected share of right answers to the held-out problems, in points.

        Args:
            masters: weights.
            names: `trainer`, which is BF16's, or engines.
        """
        policy = load(self.policies["bf16"], masters)
        found: dict[str, float] = {}
        for name in names:
            if name == "trainer":
                logprobs_BR = policy.logprobs(self.held_out)
            else:
                self._refit(name)
                logprobs_BR = engine_logprobs(self.engines[name], self.held_out)
            found[name] = 100 * logprobs_BR.double().sum(1).exp().mean().item()
        return found

    def _steps(
        self, start: Start, rollout: dict[str, Given], right: Batch
    ) -> Iterator[tuple[Cell, Step]]:
        """Yield every cell's step; what stands on either side of `mis`'s bounds is one, too."""
        for precision, names in CORRECTIONS.items():
            given = rollout[SAMPLED_BY[precision]]
            answers, trainer = given.answers, start.put(self.policies[TRAINED_BY[precision]])
            train_BR = trainer.logprobs(answers.batch)
            pair = LogprobPair(train_BR, answers.batch.rollout_BR, answers.batch.response_mask_BR)
            expected = self._expected(precision, given, right)
            done: list[tuple[Tensor, Step]] = []
            for name in names:
                found = correct(pair, self.corrections[name])
                same = [step for value_BR, step in done if is_same(value_BR, found.value_BT)]
                step = same[0] if same else self._whole_step(start, precision, answers, pair, found)
                done.append((found.value_BT, step))
                yield (precision, name), step._replace(expected_N=expected.get(name))
            ratio_BR, most = ratio(pair.log_ratio_BT), trainer.max_grad_norm
            for name, (low, high) in BOUNDS.items():
                if name in expected:
                    seen = counted("here", (ratio_BR > low) & (ratio_BR < high), answers)
                    yield (precision, name), Step(None, most, seen, expected_N=expected[name])

    def _expected(self, precision: str, given: Given, right: Batch) -> dict[str, Tensor]:
        """Return expected gradients, by correction and by side; BF16's is `expected_gradient`."""
        if given.places is None or precision == BASELINE[0]:
            return {}
        policy, answers = self.policies[TRAINED_BY[precision]], given.answers
        by_token = [name for name in CORRECTIONS[precision] if name != "seq-tis"]
        multipliers = {name: partial(multiplied, self.corrections[name]) for name in by_token}
        if "mis" in by_token:
            multipliers[ABOVE] = partial(above, self.corrections["tis"])
        found = expected_gradients(policy, given.places, multipliers)
        if "mis" in by_token:  # the two differ on both sides of its bounds, and nowhere else
            found[BELOW] = found["tis"] - found["mis"] - found[ABOVE]
        if "seq-tis" in CORRECTIONS[precision]:
            found["seq-tis"] = expected_by_sequence(
                policy, right, given.places, answers.batch, answers.prompt_B,
                self._shares(answers), self.corrections["seq-tis"].truncate or torch.inf,
            )  # fmt: skip
        return found

    def _whole_step(
        self, start: Start, precision: str, answers: Answers, pair: LogprobPair, found: Multiplier
    ) -> Step:
        """Update with a correction; say what it did to tokens, and what the weights are worth."""
        trainer, engine = TRAINED_BY[precision], SAMPLED_BY[precision]
        gradient_N = self._update(start, trainer, answers, pair.train_BT, found.value_BT)
        policy, x_BR, tokens_BR = self.policies[trainer], pair.log_ratio_BT, answers.tokens_BR
        seen = {"kl": float(((torch.expm1(x_BR) - x_BR) * tokens_BR).sum() / tokens_BR.sum())}
        for name, chosen_BR in (("clipped", found.clipped_BT), ("masked", ~found.kept_BT)):
            seen |= counted(name, chosen_BR, answers)
        after = self._accuracies(policy.masters, ("trainer", engine))
        return Step(gradient_N, policy.max_grad_norm, seen, after, engine)

    def _update(
        self, start: Start, trainer: str, answers: Answers, train_BR: Tensor, value_BR: Tensor
    ) -> Tensor:
        """Put a trainer at the start and let it do the step's updates; the first one's gradient."""
        momentum = self.study.updates > 1
        policy = start.put(self.policies[trainer], momentum=momentum)
        gradients: list[Tensor] = []
        size = self.study.prompts // self.study.updates
        for first in range(0, self.study.prompts, size):
            due_B = (answers.prompt_B >= first) & (answers.prompt_B < first + size)
            tokens = float(answers.tokens_BR[due_B].sum())
            due_B &= (answers.advantage_B1 * value_BR != 0).any(1)  # the others have no gradient
            if not due_B.any():
                continue
            part, of_train_BR, of_value_BR = answers.of(due_B), train_BR[due_B], value_BR[due_B]
            loss_of = self._loss(part, of_train_BR, part.tokens_BR * of_value_BR / tokens)
            gradients.append(gradient_of(policy, part.batch, loss_of))
        return gradients[0] if gradients else torch.zeros_like(flat(policy.masters))

    def _loss(
        self, answers: Answers, train_BR: Tensor, share_BR: Tensor
    ) -> Callable[[Tensor, slice], Tensor]:
        """Return some answers' share of the loss, as `GrpoLoop` has it."""

        def loss_of(current_BR: Tensor, rows: slice) -> Tensor:
            """Return the share of some of them."""
            mask_BR = answers.batch.response_mask_BR[rows]
            ratio_BR = policy_ratio(current_BR, train_BR[rows], mask_BR, by_sequence=False)
            advantage_B1 = answers.advantage_B1[rows]
            loss_BR = clipped_loss(ratio_BR, current_BR, advantage_B1, self.algorithm)
            return (share_BR[rows] * loss_BR).sum()

        return loss_of


def engine_logprobs(engine: Engine, batch: Batch) -> Tensor:
    """Return logprobs `[B, R]` of a batch's responses as an engine gives them, in FP64."""
    logprobs_BRV = answer_logprobs(engine.model, batch, cached=True)
    found_BR = logprobs_BRV.gather(2, batch.responses_BR[..., None])[..., 0]
    return found_BR.masked_fill(~batch.response_mask_BR, 0.0)


def multiplied(correction: Correction, pair: LogprobPair) -> Tensor:
    """Return what a correction multiplies tokens by."""
    return correct(pair, correction).value_BT


def above(tis: Correction, pair: LogprobPair) -> Tensor:
    """Return what `tis` multiplies tokens by that `mis` drops for their large ratio."""
    return multiplied(tis, pair) * (ratio(pair.log_ratio_BT) > BOUNDS[ABOVE][0])


def is_same(one_BR: Tensor, other_BR: Tensor) -> bool:
    """Return whether two corrections multiply alike."""
    return float((one_BR - other_BR).abs().max()) < SAME


def counted(name: str, chosen_BR: Tensor, answers: Answers) -> dict[str, float]:
    """Return the share of chosen tokens, their mean advantage, and how many have a negative one.

    Where no token is chosen, the share alone.
    """
    of_BR = answers.tokens_BR * chosen_BR
    found = {f"{name} share": float(of_BR.sum() / answers.tokens_BR.sum())}
    if of_BR.any():
        mean = float((of_BR * answers.advantage_B1).sum() / of_BR.sum())
        bad = float((of_BR * (answers.advantage_B1 < 0)).sum() / of_BR.sum())
        found |= {f"{name} advantage": mean, f"{name} bad": bad}
    return found
