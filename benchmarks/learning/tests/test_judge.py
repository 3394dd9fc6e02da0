"""Intervals against textbook formulas, words against intervals, and the gate's three conditions."""

import math
import sys
from statistics import fmean, stdev

import pytest
from scipy import stats

from benchmarks.learning import judge
from benchmarks.learning.judge import Estimate, against, from_zero, gate, pooled, table
from fp8_nemo.recipe.plain import read_json, to_json

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


def run(*validations, cell="tiny-llama/bf16-none", own=0.0, kl=(0.0, 0.0, 0.0)):
    """A run whose BF16 validations are these shares; its own engine serves `own` more."""
    bf16 = {str(5 * step): value for step, value in enumerate(validations)}
    curves = {"bf16": bf16, "own": {step: value + own for step, value in bf16.items()}}
    last = {"bf16": validations[-1], "own": validations[-1] + own}
    means = {"mismatch/kl": 0.5}
    return {"cell": cell, "validations": curves, "last": last, "means": means, "kl": [*kl]}


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


def test_kl_that_doubles_within_every_run_grows():
    cell = "tiny-llama/fp8-linear-none"
    steps = [(1e-3, 0.5, 2e-3), (2e-3, 0.5, 4.2e-3), (1e-3, 0.5, 1.9e-3)]
    growing = [run(0.4, 0.6, 0.5 + kl[0], cell=cell, kl=kl) for kl in steps]
    (row,) = table(judge.by_cell([*STEADY, *growing])["tiny-llama"])
    assert row["drift"]["word"] == judge.GROWS
    assert row["drift"]["factor"] == pytest.approx((2 * 2.1 * 1.9) ** (1 / 3))
    assert row["largest fall"] == pytest.approx(9.9)


def test_a_kl_that_falls_shrinks_and_one_that_does_both_is_open():
    falling = [run(0.4, kl=(2.0, 0.0, last)) for last in (1.0, 1.01)]
    both = [run(0.4, kl=kl) for kl in ((1.0, 0.0, 2.0), (2.0, 0.0, 1.0))]
    found = judge.drift({"falling": falling, "both": both})
    assert [each["word"] for each in found.values()] == [judge.OPEN, judge.OPEN]
    assert judge.drift({"falling": falling})["falling"]["word"] == judge.SHRINKS


def test_where_both_sides_compute_alike_nothing_grows():
    assert judge.drift({"a": [run(0.4)] * 3}) == {}


@pytest.mark.parametrize(("last", "code"), [(0.7, 0), (0.49, 1)])
def test_a_line_of_commands_stops_where_bf16_fails_its_gate(tmp_path, monkeypatch, last, code):
    runs = [run(0.4, 0.6, share) | {"seed": seed} for seed, share in enumerate((0.7, last))]
    (tmp_path / "runs.jsonl").write_text("\n".join(to_json(each) for each in runs))
    out, rule = tmp_path / "gate.json", "docs/research/study-rule-2.md"
    monkeypatch.setattr(sys, "argv", ["judge", str(tmp_path), "--out", str(out), "--rule", rule])
    assert judge.main() == code
    assert read_json(out.read_text())["rule"] == rule


def test_a_folder_where_no_run_has_ended_is_named(tmp_path, monkeypatch):
    (tmp_path / "runs.jsonl").touch()
    monkeypatch.setattr(sys, "argv", ["judge", str(tmp_path), "--out", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit, match=f"{tmp_path}: no run has ended"):
        judge.main()
