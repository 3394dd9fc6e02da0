"""Verdicts on a run's rows: which state, for which reason, and only for what was measured."""

import math
from functools import partial

import pytest

from fp8_nemo.correction import health
from fp8_nemo.correction.health import (
    GROWTH,
    KL,
    SIGNALS,
    STILL,
    WINDOW,
    ZEROS,
    UnstableError,
    summary,
)
from fp8_nemo.runs import metrics
from fp8_nemo.runs.metrics import read_metrics

judge, worst = partial(health.judge, verify="bytes"), partial(health.worst, verify="bytes")
append_judged = partial(metrics.append_judged, verify="bytes")

FINE = {
    KL: 1e-3,
    "mismatch/token_mult_prob_error": 1.03,
    "correction/ess": 0.99,
    "correction/masked_fraction": 0.01,
    "recalibrate/saturated_fraction": 0.1,
    "train/entropy": 0.3,
    "reward/mean": 0.4,
    "train/grad_norm": 0.7,
}


def test_a_usual_fp8_step_is_healthy_and_says_nothing():
    assert judge([FINE]) == ("healthy", [])
    assert judge([]) == judge([{"step": 0, "val/accuracy": 0.3}]) == ("healthy", [])


@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.key)
def test_each_signal_has_its_bounds_and_says_what_to_do(signal):
    beyond = 1e-6 if signal.unstable > signal.watch else -1e-6
    for bound, state, above in (
        (signal.watch, "healthy", "watch"),
        (signal.unstable, "watch", "unstable"),
    ):
        assert judge([FINE | {signal.key: bound}]).state == state
        verdict = judge([FINE | {signal.key: bound + beyond}])
        assert verdict.state == above
        [reason] = verdict.reasons
        side = ">" if beyond > 0 else "<"
        assert reason.startswith(signal.key) and f"{side} {bound:g}: {signal.action}" in reason
        assert f" {bound:g} {side}" not in reason, "the two numbers read alike"


@pytest.mark.parametrize("verify", ["bytes", "names", "off"])
@pytest.mark.parametrize("kl", [0.03, 0.2])
def test_a_high_kl_names_the_proof_as_a_remedy_only_where_it_is_off(kl, verify, tmp_path):
    row = FINE | {"step": 1, KL: kl}
    [reason] = health.judge([row], verify).reasons
    assert ("without glue.verify=bytes" in reason) == (verify != "bytes")
    assert ("every refit was proven" in reason) == (verify == "bytes")
    assert metrics.append_judged(tmp_path, row, stop=False, verify=verify).endswith(reason)
    assert (summary(read_metrics(tmp_path), verify) or "").endswith(reason)


def test_only_the_reasons_of_the_worst_state_are_given():
    verdict = judge([FINE | {"correction/ess": 0.2, "correction/masked_fraction": 0.2}])
    assert verdict.state == "unstable" and len(verdict.reasons) == 1


@pytest.mark.parametrize(
    ("factor", "state"), [(2.9, "healthy"), (3.1, "watch"), (10.1, "unstable")]
)
def test_growth_is_the_last_window_against_the_first(factor, state):
    rows = [FINE] * WINDOW + [FINE | {KL: factor * 1e-3}] * WINDOW
    assert judge(rows[:-1]).state == "healthy", "before two windows there is none"
    verdict = judge(rows)
    assert verdict.state == state
    assert not verdict.reasons or verdict.reasons[0].startswith(GROWTH.key)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("key", [KL, "reward/mean", "train/grad_norm", "train/entropy"])
def test_a_number_that_is_none_is_unstable_and_named(key, broken, tmp_path):
    verdict = judge([FINE] * 2 * WINDOW + [FINE | {key: broken}])
    assert verdict.state == "unstable"
    assert verdict.reasons[0].startswith(f"{key} is not a finite number: ")
    append_judged(tmp_path, FINE | {"step": 1, key: broken}, stop=False)
    assert judge(read_metrics(tmp_path)) == judge([FINE | {key: broken}]), (
        "read back it is the same"
    )


@pytest.mark.parametrize("key", ZEROS)
def test_a_zero_is_to_be_watched_once_it_stays(key):
    zero = FINE | {key: 0.0}
    assert judge([FINE, *[zero] * (STILL - 1)]).state == "healthy"
    verdict = judge([FINE, *[zero] * STILL])
    assert verdict.state == "watch" and verdict.reasons == [
        f"{key} 0 in {STILL} steps: {ZEROS[key]}"
    ]
    assert judge([*[zero] * STILL, FINE]).state == "healthy"
    assert judge([{"step": 0}] * STILL).state == "healthy", "not measured is not zero"


def test_growth_is_of_the_steps_that_have_a_number():
    rows = [FINE | {KL: math.nan}] + [FINE] * WINDOW + [FINE | {KL: 3.1e-3}] * WINDOW
    assert judge(rows).reasons[0].startswith(GROWTH.key)


def test_growth_from_nothing_is_measured_against_what_bf16_shows():
    rows = [{KL: 0.0}] * WINDOW + [{KL: 2.9e-4}] * WINDOW
    assert judge(rows).state == "healthy"
    assert judge([{KL: 0.0}] * WINDOW + [{KL: 3.1e-4}] * WINDOW).state == "watch"


def test_the_worst_step_of_a_run_is_its_first_in_the_worst_state(tmp_path):
    for step, share in enumerate((0.9, 0.9, 0.4, 0.1, 0.2), start=1):
        append_judged(tmp_path, FINE | {"step": step, "correction/ess": share}, stop=False)
    rows = read_metrics(tmp_path)
    found = worst(rows)
    assert found and found[0] == 4 and found[1].state == "unstable"
    assert found[1].reasons[0].startswith("correction/ess 0.1 < 0.3")
    assert worst(rows[:2]) is None and worst([]) is None and worst([{"step": 0}]) is None


def test_a_terminal_is_told_of_a_state_worse_than_all_before_and_why(tmp_path):
    shares = (0.9, 0.4, 0.4, 0.1, 0.4, 0.9, 0.9)
    told = [
        append_judged(tmp_path, FINE | {"step": step, "correction/ess": share}, stop=False)
        for step, share in enumerate(shares)
    ]
    assert [line.partition(": corr")[0] for line in told] == [
        "", "step 1: watch", "", "step 3: unstable", "", "", "",
    ]  # fmt: skip
    assert told[1].startswith("step 1: watch: correction/ess 0.4 < 0.5: few tokens")


def test_every_row_is_written_with_its_state_and_an_unstable_one_can_end_the_run(tmp_path):
    assert append_judged(tmp_path, FINE | {"step": 1}, stop=True) == ""
    bad = FINE | {"step": 2, "correction/ess": 0.1}
    assert append_judged(tmp_path, bad, stop=False).startswith("step 2: unstable: ")
    with pytest.raises(UnstableError, match=r"step 3 is unstable: correction/ess 0\.1 < 0\.3"):
        append_judged(tmp_path, bad | {"step": 3}, stop=True)
    assert [row["health/state"] for row in read_metrics(tmp_path)] == [0, 2, 2]
