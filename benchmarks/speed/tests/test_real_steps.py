"""What benchmarks/speed/real_steps.py computes of a step."""

import pytest

from benchmarks.speed.real_steps import mfu
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.step_time import step_seconds, usual_lengths


def test_a_planned_training_reaches_more_than_half_of_the_peak_and_logprobs_a_third_of_its_work():
    words = ("model=llama31-8b", "correction=tis", "precision=bf16", "cluster.gpu=h200")
    [plan] = compose_plans([*words])
    settled, lengths = plan.settled, usual_lengths(plan.settled)
    reached = mfu(settled, lengths, step_seconds(settled).train)
    assert 0.5 < reached < 0.6
    assert mfu(settled, lengths, 1.0, trains=False) / mfu(settled, lengths, 1.0) == pytest.approx(
        1 / 3, rel=0.02
    )
    assert mfu(settled, lengths, 2.0) == mfu(settled, lengths, 1.0) / 2


def test_gpus_that_sample_alone_reach_nothing_of_a_training():
    words = ("model=llama31-8b", "correction=tis", "precision=bf16", "model.layout=null")
    shared, apart = (
        compose_plans([*words, f"cluster.rollout_gpus={gpus}"])[0].settled for gpus in (0, 6)
    )
    lengths = usual_lengths(shared)
    assert mfu(apart, lengths, 4.0) == mfu(shared, lengths, 1.0)


def test_frozen_weights_have_no_gradient_to_compute():
    words = ("model=llama31-8b", "correction=tis", "precision=bf16")
    whole, adapters = (
        compose_plans([*words, f"lora={each}"])[0].settled for each in ("none", "all-linear")
    )
    lengths = usual_lengths(whole)
    ratio = mfu(adapters, lengths, 1.0) / mfu(whole, lengths, 1.0)
    assert 2 / 3 < ratio < 0.7
