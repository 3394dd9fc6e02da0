"""Judge a run's health by its own metrics: a verdict per step, with reason and action.

The same rows give the same state in the terminal, in the report and when a run asks whether
to go on. A step is `unstable` if one signal is, else `watch` if one asks for it.

Where the bounds come from: papers on FP8 rollouts call a `token_mult_prob_error` of up to 1.03-1.05
usual; NeMo RL's guide looks for trouble where it climbs past 1.01-1.02, and at a KL of 1e-3
(docs/guides/grpo.md, main 7ea279a), which FP8 KV exceeds in a healthy run; verl warns at an
effective sample share of 0.3 and a KL of 0.1 (docs/algo/rollout_corr.md, b178a3c). A rejected share
of 0.1 is this package's `max_reject`. The other bounds are this package's own: 0.02 nats is several
times what FP8 KV showed inside NeMo RL (docs/research/nemo.md), 1.5 and half of the batch are far
beyond any run that learned. Growth is over a window against the run's first steps: in NeMo RL #1801
`token_mult_prob_error` grew until the run crashed. A reward or a gradient of 0 in one step may be
chance; in `STILL` steps on end nothing is learned. A policy of less than 0.01 nats per token gives
one answer alone, and groups of it have no advantage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

STATES = ("healthy", "watch", "unstable")
STATE = "health/state"
KL = "mismatch/kl"
WINDOW = 10  # steps
STILL = 5  # steps
SMALLEST_KL = 1e-4  # below it, growth is noise: BF16 in NeMo RL has 5e-5

Row = Mapping[str, float]


class Signal(NamedTuple):
    """Give a metric's bounds and what to do: `Signal("mismatch/kl", 0.02, 0.1, "...")`."""

    key: str
    watch: float
    unstable: float
    """Above `watch` if bad is large; below it if bad is small."""
    action: str

    def state(self, value: float) -> int:
        """Return the index in `STATES` of a value of this metric."""
        sign = 1 if self.unstable > self.watch else -1
        return (sign * value > sign * self.watch) + (sign * value > sign * self.unstable)


class Verdict(NamedTuple):
    """Hold a step's state and why: `Verdict("watch", ["mismatch/kl 0.03 > 0.02: ..."])`."""

    state: str
    reasons: list[str]


class UnstableError(RuntimeError):
    """Name the step after which a run was not to go on; one line."""


STALE = "without glue.verify=bytes a refit may have brought stale weights or scales"
"""What to do about a high KL where refits are not proven byte by byte."""
SIGNALS = (
    Signal(
        KL, 0.02, 0.1,
        "every refit was proven byte by byte: with experts take replay=r3, else a precision "
        "without an FP8 cache, or bf16",
    ),
    Signal(
        "mismatch/token_mult_prob_error", 1.05, 1.5,
        "one outlier token can cause it; if it stays, see docs/troubleshooting.md",
    ),
    Signal("correction/ess", 0.5, 0.3, "few tokens carry the update: lower correction.truncate"),
    Signal(
        "correction/masked_fraction", 0.1, 0.5,
        "bounds too tight for this mismatch: recipes.measure_mismatch proposes others",
    ),
    Signal(
        "rollout/cut_fraction", 0.3, 1.1,
        "answers are cut before they end, and earn nothing: raise grpo.max_new_tokens",
    ),
    Signal(
        "train/entropy", 0.01, -1.0,
        "all answers to a problem are alike, and teach nothing: raise grpo.kl_penalty, or lower "
        "grpo.learning_rate",
    ),
    Signal(
        "replay/missing_fraction", 0.001, 0.05,
        "routes that vLLM did not report are the trainer's own: turn its prefix cache off",
    ),
    Signal(
        "recalibrate/saturated_fraction", 0.5, 1.1,
        "ranges outgrow their scales each step: raise glue.recalibrate.margin or history",
    ),
)  # fmt: skip
NOT_FINITE = "the policy or its scales have diverged: lower grpo.learning_rate"
ZEROS = {
    "reward/mean": "no answer earns anything: look at answers and at the reward's rule",
    "train/grad_norm": "nothing is learned: all answers to a problem have the same reward, or the "
    "correction rejects every token",
    "refit/changed_bytes": "refits bring vLLM the weights that it had: updates are below the "
    "format's steps, or the trainer exports old weights",
}
"""Metrics that are 0 in `STILL` steps on end only where something is wrong, to watch."""
GROWTH = Signal(f"growth of {KL}", 3.0, 10.0, "lower the learning rate, or correct more strictly")


def judge(rows: Sequence[Row], verify: str) -> Verdict:
    """Return the verdict on the last of a run's rows so far.

    Args:
        rows: of `metrics.jsonl`; those without a mismatch count for nothing.
        verify: the run's `glue.verify`, on which hangs what to do about a high KL.
    """
    if not rows:
        return Verdict(STATES[0], [])
    row = {key: value for key, value in rows[-1].items() if math.isfinite(value)}
    found = [(signal, row[signal.key]) for signal in _signals(verify) if signal.key in row]
    if (growth := _growth(rows)) is not None:
        found.append((GROWTH, growth))
    states = [(n, _reason(signal, value)) for signal, value in found if (n := signal.state(value))]
    states += [(1, reason) for reason in _zeros(rows)]
    broken = [key for key in rows[-1] if key not in row]
    states += [(2, f"{key} is not a finite number: {NOT_FINITE}") for key in broken]
    worst = max((state for state, _ in states), default=0)
    return Verdict(STATES[worst], [reason for state, reason in states if state == worst])


def _signals(verify: str) -> Iterator[Signal]:
    for signal in SIGNALS:
        unproven = signal.key == KL and verify != "bytes"
        yield signal._replace(action=STALE) if unproven else signal


def _zeros(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a reason for each of `ZEROS` that was 0 in the last steps."""
    for key, action in ZEROS.items():
        last = [row[key] for row in rows[-STILL:] if key in row]
        if len(last) == STILL and not any(last):
            yield f"{key} 0 in {STILL} steps: {action}"


def worst(rows: Sequence[Row], verify: str) -> tuple[int, Verdict] | None:
    """Return the first step of a run's worst state, and why; None if always healthy.

    Args:
        rows: as `append_judged` wrote them.
        verify: as for `judge`.
    """
    states = [row.get(STATE, 0) for row in rows]
    if not any(states):
        return None
    at = states.index(max(states))
    return int(rows[at]["step"]), judge(rows[: at + 1], verify)


def summary(rows: Sequence[Row], verify: str) -> str | None:
    """Return a run's health: `watch in 9 of 40 steps, worst step 31: REASONS`; None if healthy.

    Args: as `worst`.
    """
    if not (found := worst(rows, verify)):
        return None
    step, verdict = found
    steps = [row.get(STATE, 0) for row in rows if row["step"]]
    count = sum(state == STATES.index(verdict.state) for state in steps)
    why = "; ".join(verdict.reasons)
    return f"{verdict.state} in {count} of {len(steps)} steps, worst step {step}: {why}"


def _growth(rows: Sequence[Row]) -> float | None:
    """Return the last window's mean KL over the first's; None before two windows have passed."""
    kl = [row[KL] for row in rows if math.isfinite(row.get(KL, math.nan))]
    if len(kl) < 2 * WINDOW:
        return None
    first, last = sum(kl[:WINDOW]) / WINDOW, sum(kl[-WINDOW:]) / WINDOW
    return last / max(first, SMALLEST_KL)


def _reason(signal: Signal, value: float) -> str:
    """Say why a step is not healthy."""
    bound = (signal.watch, signal.unstable)[signal.state(value) - 1]
    side = ">" if signal.unstable > signal.watch else "<"
    texts = (f"{value:.{digits}g}" for digits in range(3, 18))
    found = next(text for text in texts if text != f"{bound:g}")  # not "1.05 above 1.05"
    return f"{signal.key} {found} {side} {bound:g}: {signal.action}"
