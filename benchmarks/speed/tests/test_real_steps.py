"""What benchmarks/speed/real_steps.py computes of a step."""

import pytest

from benchmarks.speed.real_steps import mfu, row_of_log
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


PRINTED = """
▶ Worker Initialization Timing:
  Total setup: 270.4s
"""
STEP = """
  • Mean Generation Length: {length}

⏱️  Timing:
  • Total step time: {step}s
  • generation: 30.00s (52.3%)
  • policy_training: 20.00s (35.9%)
  • prepare_for_generation/total: 1.07s (1.8%)
  • policy_and_reference_logprobs: 5.50s (9.8%)
  • prepare_for_generation/transfer_and_update_weights: 0.30s (0.5%)

🔍 Performance Metrics:
"""


def test_what_nemo_rl_prints_of_its_steps_is_a_row(tmp_path):
    """The text is that of main 7ea279a, of a run on two H200s, but for its numbers."""
    log = tmp_path / "fp8-e2e.log"
    steps = [(3832.2, 102.05), (3862.9, 56.5), (3899.0, 58.5)]
    log.write_text(PRINTED + "".join(STEP.format(length=a, step=b) for a, b in steps))
    row = row_of_log(log, first=2)
    assert (row["recipe"], row["steps"], row["answer"]) == ("fp8-e2e", 2, (3862.9 + 3899.0) / 2)
    assert row["raw"]["step"] == [56.5, 58.5] and row["rollout"] == 30.0 and row["refit"] == 1.07
    assert row["rest"] == pytest.approx(57.5 - 56.57)
