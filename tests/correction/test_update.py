"""A step's updates, as NeMo RL's micro-batches report them."""

import pytest

from fp8_nemo.correction.update import CLIPPED, MOVED, update_metrics


def batches():
    return {
        "approx_entropy": [0.25, 0.5], "probs_ratio_max": [1.5, float("-inf"), 3.0],
        CLIPPED: [0.125, 0.25], MOVED: [0.01, 0.02], "loss": [1.0],
    }  # fmt: skip


def test_shares_add_up_extrema_do_not_and_ours_are_taken_out():
    given = batches()
    assert update_metrics(given, has_ratio=True) == {
        "train/entropy": 0.75,
        "train/kl": pytest.approx(0.03),
        "train/clip_fraction": 0.375,
        "train/ratio_max": 3.0,
    }
    assert set(given) == {"approx_entropy", "probs_ratio_max", "loss"}


def test_a_loss_without_a_ratio_has_no_largest_one_and_stock_glue_no_two_of_ours():
    assert set(update_metrics(batches(), has_ratio=False)) == {"train/entropy", "train/kl"}
    stock = {key: value for key, value in batches().items() if not key.startswith("fp8")}
    assert set(update_metrics(stock, has_ratio=True)) == {"train/entropy", "train/ratio_max"}
