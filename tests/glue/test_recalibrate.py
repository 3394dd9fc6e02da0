"""Ranges of Q, K and V and the scales that follow: real tokens only, nothing forgotten too early.

`scale = margin * amax / 448` per layer for Q, K and V, the maximum over the last `history` steps.
What cannot be a scale is an error that names the tensor; nothing ever becomes 1.0.
"""

import pytest
import torch

from fp8_nemo.glue import recalibrate
from fp8_nemo.glue.recalibrate import (
    AmaxObserver,
    RecalibrateError,
    check_scales,
    kv_scales,
    saturated_fraction,
)


def qkv(query=1.0, key=1.0, value=1.0):
    """One sequence of two tokens, Q of four heads, K and V of two; one element each is not zero."""
    tensors = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 2, 8)
    for tensor, largest in zip(tensors, (query, key, value), strict=True):
        tensor[0, -1, -1, 3] = largest
    return tensors


REAL = torch.ones(1, 2, dtype=torch.bool)


def test_ranges_are_the_largest_absolute_values_of_each_layer_and_tensor():
    observer = AmaxObserver(num_layers=2, history=1)
    observer.observe(0, *qkv(-3.0, 2.0, -0.5), REAL)
    observer.observe(1, *qkv(5.0, -7.0, 11.0), REAL)
    observer.observe(0, *qkv(1.0, -4.0, 0.25), REAL)
    assert observer.read().tolist() == [[[3.0, 4.0, 0.5], [5.0, 7.0, 11.0]]]


@pytest.mark.parametrize("padding", [100.0, float("nan"), float("-inf")])
def test_padding_never_reaches_a_range(padding):
    observer = AmaxObserver(num_layers=1, history=1)
    query, key, value = qkv(1.0, 2.0, 3.0)
    for tensor in (query, key, value):
        tensor[:, :, 0] = padding
    observer.observe(0, query, key, value, torch.tensor([[False, True]]))
    assert observer.read().tolist() == [[[1.0, 2.0, 3.0]]]


def test_a_batch_of_padding_alone_leaves_the_ranges_as_they_were():
    observer = AmaxObserver(num_layers=1, history=1)
    observer.observe(0, *qkv(1.0, 2.0, 3.0), REAL)
    observer.observe(0, *qkv(9.0, 9.0, 9.0), ~REAL)
    assert observer.read().tolist() == [[[1.0, 2.0, 3.0]]]


def test_bf16_activations_are_observed_exactly_and_without_a_gradient():
    observer = AmaxObserver(num_layers=1, history=1)
    tensors = [x.bfloat16().requires_grad_() for x in qkv(1.0078125, 2.015625, 300.0)]
    observer.observe(0, *tensors, REAL)
    assert observer.read().tolist() == [[[1.0078125, 2.015625, 300.0]]]
    assert observer.read().dtype == torch.float32 and not observer.amax_SL3.requires_grad


def test_scales_take_the_maximum_over_history_and_the_oldest_step_is_forgotten():
    observer, seen = AmaxObserver(num_layers=1, history=2), []
    for amax in (8.0, 2.0, 4.0, 1.0):
        observer.next_step()
        observer.observe(0, *qkv(amax, amax, amax), REAL)
        seen.append(kv_scales(observer.read(), 1.0)["model.layers.0.self_attn.k_scale"] * 448)
    assert seen == [8.0, 8.0, 4.0, 4.0]
    assert observer.read()[0, 0, 0] == 1.0, "row 0 is the step under way"


def test_a_resumed_observer_goes_on_as_the_saved_one():
    saved, resumed = (AmaxObserver(num_layers=1, history=3) for _ in range(2))
    for amax in (8.0, 2.0):
        saved.observe(0, *qkv(amax, 2 * amax, 3 * amax), REAL)
        saved.next_step()
    resumed.load(saved.amax_SL3)
    for observer in (saved, resumed):
        observer.observe(0, *qkv(), REAL)
        observer.next_step()
    assert resumed.read().tolist() == saved.read().tolist()
    assert saved.read()[:, 0, 0].tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("shape", [(3, 2, 3), (2, 3, 3), (1, 2, 3), (2, 1, 3)])
def test_a_state_of_other_layers_or_history_is_refused_and_not_spread(shape):
    with pytest.raises((RuntimeError, ValueError)):
        AmaxObserver(num_layers=2, history=2).load(torch.ones(shape))


def test_kv_scales_carry_vllms_names_and_margin_times_amax_over_448():
    amax_SL3 = torch.tensor(
        [[[448.0, 1.0, 2.0], [4.0, 5.0, 6.0]], [[1.0, 224.0, 1.0], [7.0, 1.0, 1.0]]]
    )
    at = "model.layers"
    assert kv_scales(amax_SL3, 1.25) == {
        f"{at}.0.self_attn.attn.q_scale": 1.25,
        f"{at}.0.self_attn.k_scale": 0.625,
        f"{at}.0.self_attn.v_scale": 1.25 * 2 / 448,
        f"{at}.1.self_attn.attn.q_scale": 1.25 * 7 / 448,
        f"{at}.1.self_attn.k_scale": 1.25 * 5 / 448,
        f"{at}.1.self_attn.v_scale": 1.25 * 6 / 448,
    }


@pytest.mark.parametrize("amax", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("which", "name"),
    [(0, "self_attn.attn.q_scale"), (1, "self_attn.k_scale"), (2, "self_attn.v_scale")],
)
def test_a_range_that_is_zero_or_not_finite_is_an_error_naming_the_tensor(amax, which, name):
    amax_SL3 = torch.ones(1, 3, 3)
    amax_SL3[0, 2, which] = amax
    with pytest.raises(RecalibrateError, match=rf"model\.layers\.2\.{name}: KV scale {amax} must"):
        kv_scales(amax_SL3, 1.05)


def test_a_layer_that_no_forward_reached_is_an_error_even_if_an_older_step_saw_the_others():
    observer = AmaxObserver(num_layers=2, history=2)
    observer.observe(0, *qkv(), REAL)
    observer.next_step()
    observer.observe(0, *qkv(), REAL)
    with pytest.raises(RecalibrateError, match=r"model\.layers\.1\.self_attn\.attn\.q_scale"):
        kv_scales(observer.read(), 1.05)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_forward_that_is_not_finite_is_remembered_until_scales_are_asked_for(value):
    observer = AmaxObserver(num_layers=1, history=1)
    observer.observe(0, *qkv(key=value), REAL)
    observer.observe(0, *qkv(), REAL)
    with pytest.raises(RecalibrateError, match="k_scale"):
        kv_scales(observer.read(), 1.05)


def test_saturated_fraction_counts_the_ranges_beyond_448_times_their_own_scale():
    scales = kv_scales(torch.full((1, 2, 3), 448.0), 1.0)
    amax_L3 = torch.tensor([[448.0, 449.0, 1.0], [500.0, 448.0, 0.0]])
    assert recalibrate.saturated_fraction(amax_L3, scales) == 2 / 6
    assert recalibrate.saturated_fraction(torch.zeros(2, 3), scales) == 0


def test_saturated_fraction_finds_each_scale_by_its_name():
    amax_L3 = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    scales = kv_scales(amax_L3[None], 1.05)
    sorted_by_name = dict(sorted(scales.items(), reverse=True))
    assert recalibrate.saturated_fraction(amax_L3, sorted_by_name) == 0


def test_ranges_that_stay_as_they_were_never_count_as_saturated_at_margin_one():
    amax_L3 = (1 + torch.arange(3000) / 3000).view(1000, 3)
    assert recalibrate.saturated_fraction(amax_L3, kv_scales(amax_L3[None], 1.0)) == 0


@pytest.mark.parametrize(
    ("after", "drift"), [([1.0, 2.0], 0.0), ([1.5, 2.0], 0.5), ([1.25, 0.5], 0.75)]
)
def test_max_drift_is_the_largest_relative_change_up_or_down(after, drift):
    before, after = (dict(zip("ab", each, strict=True)) for each in ([1.0, 2.0], after))
    assert recalibrate.max_drift(before, after) == drift


def test_each_group_of_heads_has_ranges_and_scales_of_its_own():
    observer = AmaxObserver(num_layers=1, history=1, groups=2)
    query, key, value = (torch.ones(3, heads, 8) for heads in (4, 2, 2))
    query[0, 1, 0], query[1, 2, 0], key[1, 1, 3], value[0, 0, 1] = -5.0, 7.0, 11.0, 13.0
    key[2] = 99.0  # of padding
    observer.observe_rows(0, [query, key, value], torch.tensor([True, True, False]))
    assert observer.read().tolist() == [[[5.0, 7.0, 1.0, 11.0, 13.0, 1.0]]]
    found = kv_scales(observer.read(), 1.0)
    at = "model.layers.0.self_attn"
    assert {name: round(448 * scale) for name, scale in found.items()} == {
        f"{at}.attn.0.q_scale": 5, f"{at}.attn.1.q_scale": 7, f"{at}.0.k_scale": 1,
        f"{at}.1.k_scale": 11, f"{at}.0.v_scale": 13, f"{at}.1.v_scale": 1,
    }  # fmt: skip
    assert saturated_fraction(observer.read()[0] * 1.5, found) == 1.0
    with pytest.raises(RecalibrateError, match=r"self_attn\.1\.k_scale: KV scale None"):
        check_scales({n: s for n, s in found.items() if ".1.k_" not in n}, 1, 2)
