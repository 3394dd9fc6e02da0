"""Hold a measured mismatch as far as bounds need it: what a correction would reject.

`recipes.measure_mismatch` writes it, a plan whose correction names it (`correction.measurement`) is
held against it, on a login node without torch. For every statistic of `correct.py` it holds
quantiles over tokens, a sequence's number counted once for each of its tokens, since that is what
leaves the loss.
"""

from __future__ import annotations

import bisect
from argparse import ArgumentTypeError
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from fp8_nemo.recipe.mistake import Mistake, verb_line
from fp8_nemo.recipe.options.correction import DIVERGENCES, RATIOS, Correction
from fp8_nemo.recipe.plain import bytes_of, read_json, to_json

POINTS = 1000  # quantiles 0, 1/1000, ..., 1: a share is known to a tenth of a point
VETO = "min-token"
"""The smallest token ratio of a sequence, which a veto looks at."""


class MeasureError(ValueError):
    """Report that there is nothing to measure, or a file that is no measurement; one line."""


def token_share(text: str) -> float:
    """Read a share of tokens as it is written on a command line.

    Raises:
        ArgumentTypeError: it is no number, or not above 0 and below 1.
    """
    try:
        found = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text} must be a number, as 0.02") from None
    if not 0 < found < 1:
        raise ArgumentTypeError(f"{text} must be above 0 and below 1")
    return found


@dataclass(frozen=True)
class Measurement:
    """Hold what was measured: `Measurement(["outputs/..."], 20480, 2048, 8e-4, {...})`."""

    source: list[str]
    """Run directories or files, with the steps that were read."""
    tokens: int
    sequences: int
    kl: float
    """Mean k3, nats per token."""
    quantiles: dict[str, list[float]]
    """Statistic to its `POINTS + 1` quantiles over tokens."""

    def share_above(self, statistic: str, bound: float) -> float:
        """Return the share of tokens whose statistic is above a bound."""
        points = self.quantiles[statistic]
        return 1 - _share(points, bisect.bisect_right(points, bound), bound)

    def share_below(self, statistic: str, bound: float) -> float:
        """Return the share of tokens whose statistic is below a bound."""
        points = self.quantiles[statistic]
        return _share(points, bisect.bisect_left(points, bound), bound)

    def rejected(self, correction: Correction) -> float:
        """Return the share of tokens that a correction takes out of the loss, by mask and veto.

        Where both are set it is at most their sum, which is what is given.
        """
        share = 0.0
        if correction.mask != "none" and correction.low is not None:
            share += self.share_below(correction.mask, correction.low)
        if correction.mask != "none" and correction.high is not None:
            share += self.share_above(correction.mask, correction.high)
        if correction.veto is not None:
            share += self.share_below(VETO, correction.veto)
        return min(1.0, share)

    def bounds(self, statistic: str, reject: float) -> tuple[float | None, float]:
        """Return `(low, high)` that reject a share of tokens: for a ratio half below, half above.

        Args:
            statistic: a row of `correction.STATISTICS`.
            reject: the wanted share, above 0 and below 1.
        """
        points = self.quantiles[statistic]
        if statistic in DIVERGENCES:
            return None, _quantile(points, 1 - reject)
        return _quantile(points, reject / 2), _quantile(points, 1 - reject / 2)

    def to_json(self) -> str:
        """Return the measurement as a file's text, which `read_measurement` reads back."""
        return to_json(asdict(self), indent=1) + "\n"


def read_measurement(file: Path) -> Measurement:
    """Read back what `Measurement.to_json` gave.

    Raises:
        MeasureError: there is no such file, or it holds something else.
    """
    try:
        found = Measurement(**read_json(bytes_of(file)))
        for points in found.quantiles.values():
            if len(points) != POINTS + 1 or not all(isinstance(x, (int, float)) for x in points):
                raise ValueError("quantiles")
    except OSError as error:
        raise MeasureError(f"{file}: {str(error.strerror).lower()}") from None
    except (ValueError, TypeError, AttributeError):
        raise MeasureError(f"{file}: is no measurement of measure_mismatch") from None
    if missing := {*RATIOS, *DIVERGENCES, VETO}.difference(found.quantiles):
        lacks = f"{file}: is of another version, {', '.join(sorted(missing))} is missing"
        raise MeasureError(f"{lacks}; measure again")
    return found


class Verdict(NamedTuple):
    """Hold what a correction's own measurement says of it."""

    mistakes: list[Mistake]
    notes: list[str]


def verdict_of(correction: Correction) -> Verdict:
    """Judge a correction by the measurement that it names; empty if it names none.

    The note says what was measured: another model's mismatch, or of other lengths, says little.
    """
    if correction.measurement is None:
        return Verdict([], [])
    try:
        found = read_measurement(Path(correction.measurement))
    except MeasureError as error:
        remedy = f"write one with `{verb_line('measure_mismatch')} RUN_DIR`"
        key, text = "correction.measurement", str(error)
        return Verdict([Mistake(key, correction.measurement, text, remedy)], [])
    share, length = found.rejected(correction), found.tokens / found.sequences
    note = (
        f"correction.measurement: {correction.name} rejects {share:.2%} of what was measured, "
        f"{length:.0f} tokens a sequence, on {', '.join(found.source)}"
    )
    if share <= correction.max_reject:
        return Verdict([], [note])
    refused = Mistake(
        "correction.name",
        correction.name,
        f"would reject {share:.1%} of the tokens measured in {correction.measurement}, and "
        f"correction.max_reject={correction.max_reject}",
        "take the bounds that measure_mismatch proposes, or raise max_reject",
    )
    return Verdict([refused], [note])


def _share(points: list[float], below: int, bound: float) -> float:
    """Return the share of values under a bound that stands behind the first `below` quantiles."""
    if below in (0, len(points)):
        return float(below > 0)
    left, right = points[below - 1], points[below]
    between = (bound - left) / (right - left) if right > left else 0.0
    return (below - 1 + between) / (len(points) - 1)


def _quantile(points: list[float], share: float) -> float:
    at = share * (len(points) - 1)
    left = min(int(at), len(points) - 2)
    return points[left] + (at - left) * (points[left + 1] - points[left])
