"""Where steps start from: the weights and moments of one BF16 run, kept at some of its steps.

Shapes: N all weights in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8_nemo.local.engine import Batch
from fp8_nemo.local.grpo import GrpoLoop
from fp8_nemo.local.policy import Policy
from fp8_nemo.plan.plan import Plan, plan_recipe
from fp8_nemo.recipe.compose import compose

BETA_1 = 0.9
"""Of torch's AdamW, which training takes as it is."""


@dataclass(frozen=True)
class Study:
    """Say from which run the checkpoints come, and what is done at each."""

    model: str
    updates: int
    learning_rate: float
    steps: tuple[int, ...]
    repetitions: int = 2
    prompts: int = 64
    seed: int = 1

    def plan(self, precision: str = "bf16", correction: str = "none") -> Plan:
        """Return the plan of a run of a cell."""
        words = [f"model={self.model}", f"precision={precision}", f"correction={correction}"]
        words += [f"grpo.learning_rate={self.learning_rate}", f"grpo.steps={max(self.steps)}"]
        words += [f"grpo.updates_per_step={self.updates}", f"seed={self.seed}", "grpo=demo"]
        [recipe] = compose(words)
        return plan_recipe(recipe)


class Start(NamedTuple):
    """Hold where a step starts from: FP32 masters, Adam's moments and its count."""

    masters: dict[str, Tensor]
    means: dict[str, Tensor]
    squares: dict[str, Tensor]
    updates: float

    @classmethod
    def of(cls, policy: Policy) -> Start:
        """Take them from a policy that has been updated."""
        state = {name: policy.optimizer.state[each] for name, each in policy.masters.items()}
        masters = {name: each.detach().clone() for name, each in policy.masters.items()}
        means, squares = (
            {name: each[key].clone() for name, each in state.items()}
            for key in ("exp_avg", "exp_avg_sq")
        )
        return cls(masters, means, squares, float(next(iter(state.values()))["step"]))

    def put(self, policy: Policy, *, momentum: bool = False) -> Policy:
        """Put a policy there and return it; without momentum a gradient acts all at once."""
        for group in policy.optimizer.param_groups:
            group["betas"] = (BETA_1 if momentum else 0.0, group["betas"][1])
        for name, master in policy.masters.items():
            policy.optimizer.state[master] = {
                "step": torch.tensor(self.updates),
                "exp_avg": self.means[name].clone(),
                "exp_avg_sq": self.squares[name].clone(),
            }
        return load(policy, self.masters)

    def moves_N(self, policy: Policy) -> Tensor:
        """Return by how much an update lowers each weight for a gradient of 1."""
        group = policy.optimizer.param_groups[0]
        filled = 1 - group["betas"][1] ** self.updates
        return group["lr"] / ((flat(self.squares) / filled).sqrt() + group["eps"])


@torch.no_grad()
def load(policy: Policy, masters: dict[str, Tensor]) -> Policy:
    """Give a policy weights, and return it."""
    for name, master in policy.masters.items():
        master.copy_(masters[name])
    policy.load_masters()
    return policy


def starts(study: Study, folder: Path) -> dict[int, Start]:
    """Train BF16 once, keeping what a step starts from; later read it from the folder."""
    files = {step: folder / f"start-{step}.pt" for step in study.steps}
    if not all(file.exists() for file in files.values()):
        rmtree(folder, ignore_errors=True)
        (folder / "run").mkdir(parents=True)
        loop = GrpoLoop(study.plan(), folder / "run")

        def kept(row: dict[str, Any]) -> None:
            """Keep the end of a step."""
            if row["step"] in files:
                torch.save(tuple(Start.of(loop.policy)), files[row["step"]])

        loop.train(kept)
    return {step: Start(*torch.load(file)) for step, file in files.items()}


def flat(tensors: dict[str, Tensor]) -> Tensor:
    """Return tensors in one row."""
    return torch.cat([each.detach().flatten() for each in tensors.values()])


def gradient_of(policy: Policy, batch: Batch, loss_of: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """Update a policy; return the gradient `[N]` as it was before clipping."""
    norm = policy.update(batch, loss_of)
    clipped_N = flat(
        {
            name: torch.zeros_like(master) if master.grad is None else master.grad
            for name, master in policy.masters.items()
        }
    )
    return clipped_N * max(1.0, (norm + 1e-6) / policy.max_grad_norm)
