"""Declare what multiplies a token's loss."""

from __future__ import annotations

from dataclasses import dataclass

from fp8_nemo.recipe.options.fields import number, one_of, short_name

RATIOS = ("token", "sequence", "geometric")
"""Aggregates of `log_ratio` whose exponential is a ratio."""
DIVERGENCES = (
    *("token-k2", "sum-k2", "mean-k2", "max-k2"),
    *("token-k3", "sum-k3", "mean-k3", "max-k3", "mean-error"),
)
"""Distances of train and rollout, which have an upper bound alone."""


OF_A_RATIO = {
    "truncate": "truncates a ratio",
    "truncate_low": "truncates a ratio",
    "normalize": "divides by the mean ratio",
}
"""Options of a correction that has a ratio, and what they do to it."""


@dataclass
class Correction:
    """Choose what multiplies a token's loss for the mismatch of rollout and train."""

    name: str = short_name("none")
    """Part of the run directory's name."""
    level: str = one_of("none", *RATIOS)
    """Which aggregate of `log_ratio` the multiplier is the exponential of; `none`: 1."""
    truncate: float | None = number(None, above=0)
    """Lower the ratio to this."""
    truncate_low: float | None = number(None, above=0)
    """Raise the ratio to this."""
    mask: str = one_of("none", *RATIOS, *DIVERGENCES)
    """Which statistic must lie in `[low, high]` for the token to be kept (`correct.py`)."""
    low: float | None = number(None, least=0)
    """Lower bound of `mask`'s statistic."""
    high: float | None = number(None, above=0)
    """Upper bound of `mask`'s statistic."""
    veto: float | None = number(None, above=0, most=1)
    """Drop a sequence in which any token's ratio is below this."""
    normalize: bool = False
    """Divide by the mean multiplier of the step's rollout batch."""
    renormalize_denominator: bool = False
    """Rejected tokens leave the loss's denominator (verl); by default they stay (NeMo RL)."""
    measurement: str | None = None
    """File of `recipes.measure_mismatch`, which says how much would be rejected."""
    max_reject: float = number(0.1, above=0, most=1)
    """Refuse to plan what would reject a larger share of the measured tokens."""

    @property
    def is_on(self) -> bool:
        """Return whether anything but 1 may multiply a token's loss."""
        return (self.level, self.mask, self.veto) != ("none", "none", None)
