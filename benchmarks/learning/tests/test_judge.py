"""Intervals against textbook formulas, words against intervals, and the gate's three conditions."""

import math
from statistics import fmean, stdev

import pytest
from scipy import stats

from benchmarks.learning import judge
from benchmarks.learning.judge import Estimate, against, from_zero, gate, pooled, table

BASE = [70.0, 71.5, 69.0, 70.5, 70.0, 69.0]
CELLS = {
    "low": [68.0, 69.0, 70.0, 67.5, 68.5, 69.0],
    "same": [70.0, 70.5, 69.5, 71.0, 69.0, 70.0],
    "high": [71.0, 72.0, 73.0, 70.5, 72.5, 71.0],
}
DUNNETT = 2.54
"""For three cells and 20 degrees of freedom, two-sided, 5%: Dunnett 1964, table II."""


def test_intervals_have_a_pooled_variance_and_dunnetts_published_quantile():
    found = against(BASE, CELLS)
    spread = math.sqrt(fmean(stdev(values) ** 2 for values in (BASE, *CELLS.values())))
    for name, values in CELLS.items():
        less = fmean(values) - fmean(BASE)
        half = DUNNETT * spread * math.sqrt(1 / 6 + 1 / 6)
        assert found[name].difference == pytest.approx(less)
        assert found[name].low == pytest.approx(less - half, abs=0.01)
        assert found[name].high == pytest.approx(less + half, abs=0.01)


def test_a_baseline_or_cell_of_one_seed_gets_no_interval():
    assert not against([70.0], CELLS)
    assert against(BASE, CELLS | {"one": [1.0]}).keys() == CELLS.keys()


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(-2.9, 2.9, "equivalent"), (-2.9, -0.1, "equivalent"), (-3.1, -0.1, "loses"),
     (0.1, 3.1, "gains"), (-3.1, 1.0, "open"), (-1.0, 3.1, "open")],
)  # fmt: skip
def test_a_word_needs_its_whole_interval(low, high, word):
    assert Estimate((low + high) / 2, low, high, 8).verdict == word


def test_intervals_from_zero_share_the_level():
    cells = {"a": [1.0, 2.0, 3.0], "b": [0.0, 1.0, -1.0]}
    spread, freedom = pooled(cells.values())
    assert (spread, freedom) == (1.0, 4)
    half = stats.t.ppf(1 - 0.05 / 4, 4) / math.sqrt(3)
    assert from_zero(cells)["a"] == pytest.approx((2.0, 2.0 - half, 2.0 + half, 3))


def run(*validations, cell="tiny-llama/bf16-none", own=0.0):
    """A run whose BF16 validations are these shares; its own engine serves `own` more."""
    bf16 = {str(5 * step): value for step, value in enumerate(validations)}
    curves = {"bf16": bf16, "own": {step: value + own for step, value in bf16.items()}}
    last = {"bf16": validations[-1], "own": validations[-1] + own}
    return {"cell": cell, "validations": curves, "last": last, "means": {"mismatch/kl": 0.5}}


STEADY = [run(0.4, 0.6, 0.7), run(0.4, 0.61, 0.71)]


@pytest.mark.parametrize(
    ("runs", "passes"),
    [
        (STEADY, True),
        ([*STEADY, run(0.4, 0.72, 0.61)], False),  # falls by 11 points
        ([run(0.4, 0.6, 0.7), run(0.4, 0.65, 0.75)], False),  # areas 65 and 70
        ([run(0.6, 0.6, 0.65), run(0.6, 0.6, 0.65)], False),  # gains 5 points
    ],
)
def test_the_gate_wants_steady_learning_that_repeats_itself(runs, passes):
    assert gate(runs)["passes"] is passes


def test_a_seed_that_one_cell_lacks_is_left_out():
    runs = [{"cell": cell, "seed": seed} for seed in (1, 2) for cell in ("a", "b")]
    assert judge.whole(runs) == runs
    assert judge.whole(runs[:3]) == runs[:2]


def test_learning_is_judged_in_bf16_and_serving_apart():
    cell = "tiny-llama/fp8-linear-none"
    worse = [run(0.4, 0.6, 0.7, cell=cell, own=-0.1), run(0.4, 0.61, 0.71, cell=cell, own=-0.1)]
    (row,) = table(judge.by_cell([*STEADY, *worse])["tiny-llama"])
    assert row["learning"]["difference"] == pytest.approx(0)
    assert row["as served"]["difference"] == pytest.approx(-10)
    assert row["serving"]["difference"] == pytest.approx(-10)
    assert row["means"] == {"mismatch/kl": 0.5}
