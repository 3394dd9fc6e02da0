"""Tell the bias of gradients from their noise, over the repetitions at one checkpoint.

A bias is what no number of answers takes away. Its square is estimated without the noise, from
products of different repetitions alone, so it may come out below zero.

Shapes: N all weights in a row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

Cell = tuple[str, str]
"""Precision and correction."""
BASELINE: Cell = ("bf16", "none")
BELOW, ABOVE = "r < 0.5", "r > 2"
"""The tokens that `mis` drops, as if they were corrections; `tis` takes them by r, and by 2."""


class Step(NamedTuple):
    """Hold what one cell's step did."""

    gradient_N: Tensor | None
    """Before clipping; of the first update, if there are more; None of part of a cell."""
    max_norm: float
    seen: dict[str, float]
    """Of the tokens that were learned from."""
    after: Mapping[str, float] = MappingProxyType({})
    """Expected accuracy of the weights after the step, in points, by who computes it."""
    engine: str = ""
    """The cell's own, among those."""
    expected_N: Tensor | None = None
    """The mean gradient over all answers, where it is known."""


class Moments:
    """Add up independent vectors that have one mean, and estimate its square and their spread.

    Args:
        unit_N: direction that is told apart from all others.
    """

    def __init__(self, unit_N: Tensor) -> None:
        self.unit_N, self.sum_N = unit_N, torch.zeros_like(unit_N, dtype=torch.float64)
        self.squares, self.along = 0.0, list[float]()

    def add(self, vector_N: Tensor) -> None:
        """Add a vector."""
        self.sum_N += vector_N
        self.squares += float(vector_N.double().square().sum())
        self.along.append(float(vector_N.double() @ self.unit_N.double()))

    def found(self) -> dict[str, float]:
        """Return the mean along the unit, and squares without noise: across it, and the noise's.

        `along` is a length, `across` and `noise` squares: of the mean vector's part across the
        unit, and of a single vector's distance from the mean.
        """
        n, along = len(self.along), sum(self.along)
        whole = float(self.sum_N.square().sum())
        part = (along**2 - sum(each**2 for each in self.along)) / (n * (n - 1))
        return {
            "along": along / n,
            "across": (whole - self.squares) / (n * (n - 1)) - part,
            "noise": (self.squares - whole / n) / (n - 1),
        }


class Checkpoint:
    """Collect all cells' repetitions at one checkpoint; lengths are in units of the true gradient.

    Args:
        truths: the expected BF16 gradient `[N]` of each repetition's prompts.
        slope_N: points of accuracy that a gradient of 1 gains, to first order.
        before: expected accuracies before the step.
    """

    def __init__(self, truths: Sequence[Tensor], slope_N: Tensor, before: dict[str, float]) -> None:
        self.truths, self.slope_N, self.before = truths, slope_N, before
        truth_N = torch.stack([*truths]).mean(0)
        self.norm = float(truth_N.norm())
        self.unit_N = truth_N / self.norm
        self.moments = defaultdict[Cell, dict[str, Moments]](dict)
        self.repetitions = defaultdict[Cell, list[dict[str, float]]](list)

    def add(self, repetition: int, steps: dict[Cell, Step]) -> None:
        """Add a repetition's steps."""
        steps[BASELINE] = steps[BASELINE]._replace(expected_N=self.truths[repetition])
        for cell, step in steps.items():
            for name, vector_N in self._vectors(repetition, cell, steps).items():
                moments = self.moments[cell].setdefault(name, Moments(self.unit_N))
                moments.add(vector_N / self.norm)
            self.repetitions[cell].append(self._numbers(step))

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each cell."""
        return [
            {
                "cell": list(cell),
                **{name: of.found() for name, of in self.moments[cell].items()},
                "repetitions": repetitions,
            }
            for cell, repetitions in self.repetitions.items()
        ]

    def _vectors(self, repetition: int, cell: Cell, steps: dict[Cell, Step]) -> dict[str, Tensor]:
        """Return a gradient, sampled and expected, from zero, from BF16's, from no correction's."""
        step, none = steps[cell], steps[cell[0], "none"]
        truth_N, found = self.truths[repetition], dict[str, Tensor]()
        if step.gradient_N is not None:
            bf16_N = truth_N if cell == BASELINE else steps[BASELINE].gradient_N
            found |= {"sampled": step.gradient_N, "sampled from BF16": step.gradient_N - bf16_N}
            if step is not none:
                found["sampled from none"] = step.gradient_N - none.gradient_N
        if step.expected_N is not None:
            found |= {"expected": step.expected_N, "expected from BF16": step.expected_N - truth_N}
            if step is not none:
                found["expected from none"] = step.expected_N - none.expected_N
        return found

    def _numbers(self, step: Step) -> dict[str, float]:
        found: dict[str, float] = {}
        if step.gradient_N is not None:
            norm, slope = float(step.gradient_N.norm()), float(self.slope_N @ step.gradient_N)
            found = {
                "norm": norm / self.norm,
                "cosine": float(step.gradient_N @ self.unit_N) / max(norm, 1e-12),
                "slope": slope,
                "gain": slope * min(1.0, step.max_norm / (norm + 1e-6)),
            }
        if step.expected_N is not None:
            found["expected slope"] = float(self.slope_N @ step.expected_N)
        if step.after:
            gained = {name: value - self.before[name] for name, value in step.after.items()}
            found |= {"in BF16": gained["trainer"], "in its own engine": gained[step.engine]}
        return found | step.seen
