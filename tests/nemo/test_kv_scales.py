"""Scales of a run, step by step: what is in force, from which ranges, and when a forward is due."""

import json

import pytest
import torch

from fp8_nemo.glue.recalibrate import RecalibrateError, kv_scales
from fp8_nemo.glue.wire import kv_scale_names
from fp8_nemo.nemo.kv_scales import KvScales, ranges_of
from fp8_nemo.recipe.options.precision import Recalibrate

K = "model.layers.1.self_attn.k_scale"


def ranges(value):
    return torch.full((2, 3), value)


def step(scales, value):
    """A step that trains and then shows these ranges; the scale of K, times 448."""
    scales.saw_ranges()
    scales.trained()
    metrics = scales.take_ranges(ranges(value))
    scales.done()
    return metrics, scales.in_force[K] * 448


def test_the_first_scales_have_a_margin_of_their_own_and_later_ones_the_history():
    scales = KvScales(2, Recalibrate(history=2))
    assert scales.needs_forward and scales.in_force == {}
    scales.saw_ranges()
    assert scales.take_ranges(ranges(1.0)) == {}, "nothing to compare with"
    scales.done()
    assert scales.in_force[K] * 448 == pytest.approx(2.0)
    found = [step(scales, value)[1] / 1.05 for value in (8.0, 2.0, 4.0, 1.0)]
    assert found == pytest.approx([8.0, 8.0, 4.0, 4.0])


def test_a_forward_is_due_only_where_none_was_seen_and_the_scales_are_missing_or_old():
    scales = KvScales(2, Recalibrate())
    step(scales, 1.0)
    assert not scales.needs_forward, "nothing was trained since"
    scales.trained()
    assert scales.needs_forward
    scales.saw_ranges()
    assert not scales.needs_forward


def test_metrics_judge_new_ranges_by_the_scales_that_sampled():
    scales = KvScales(2, Recalibrate(history=1))
    step(scales, 1.0)
    metrics, _ = step(scales, 1.2)
    assert metrics["recalibrate/saturated_fraction"] == 1.0
    assert metrics["recalibrate/max_drift"] == pytest.approx(0.2, abs=1e-5)
    metrics, _ = step(scales, 1.2)
    assert metrics["recalibrate/saturated_fraction"] == metrics["recalibrate/max_drift"] == 0


def test_a_resumed_run_starts_with_the_history_and_the_scales(tmp_path):
    before, resumed = KvScales(2, Recalibrate()), KvScales(2, Recalibrate())
    resumed.restore(tmp_path / "absent")
    assert resumed.in_force == {}
    step(before, 8.0)
    before.save(tmp_path / "ranges.json")
    assert json.loads((tmp_path / "ranges.json").read_text()).keys() == {"amax_SL3", "kv_scales"}
    resumed.restore(tmp_path / "ranges.json")
    assert resumed.in_force == before.in_force and not resumed.needs_forward
    assert step(resumed, 2.0)[1] == pytest.approx(8.0 * 1.05), "its history came along"
    with pytest.raises(ValueError, match="Q/K/V ranges"):
        KvScales(3, Recalibrate()).restore(tmp_path / "ranges.json")


def test_scales_of_nemo_rls_own_forward_are_taken_whole_or_refused_by_name():
    scales = KvScales(2, Recalibrate(source="forward"))
    given = {name: 0.02 for layer in range(2) for name in kv_scale_names(layer)}
    assert scales.take_scales(given) == {} and scales.in_force == given
    grown = given | {K: 0.03}
    assert scales.take_scales(grown)["recalibrate/max_drift"] == pytest.approx(0.5)
    again = kv_scales(ranges_of(grown, 1.05)[None], 1.05)
    assert again == pytest.approx(grown), "the ranges behind NeMo RL's scales"
    with pytest.raises(RecalibrateError, match=rf"{K}: KV scale 0\.0 must"):
        scales.take_scales(given | {K: 0.0})
    with pytest.raises(RecalibrateError, match=r"model\.layers\.2\.self_attn\.attn\.q_scale"):
        KvScales(3, Recalibrate()).take_scales(given)
