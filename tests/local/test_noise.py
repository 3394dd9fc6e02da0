"""QeRL's noise in a run: each rollout's engine is the trainer plus its own step's draw alone."""

import pytest
import torch

from fp8_nemo.glue.refit import with_noise
from fp8_nemo.local.grpo import GrpoLoop
from fp8_nemo.plan.plan import PlanError
from fp8_nemo.recipe.compose import ComposeError, compose
from fp8_nemo.runs import metrics, run_dir

SCHEDULE = (
    *("noise=aqn", "noise.sigma_start=0.1", "noise.sigma_end=0.05"),
    *("noise.stages=3", "noise.steps=6"),
)
TRAIN = ("grpo.steps=7", "grpo.validate_every=3", "grpo.checkpoint_every=2")
RUN = (*SCHEDULE, *TRAIN)
SIGMAS = {2: 0.1, 3: 0.0, 4: 0.05, 5: 0.05, 6: 0.0}
"""By steps trained, of the rollout after them: 3 and 6 are validated."""


def loop(plan):
    [frozen] = run_dir.freeze([plan])
    return GrpoLoop(plan, frozen.path), frozen.path


def rows(path):
    return [
        {key: value for key, value in row.items() if not key.startswith("time/")}
        for row in metrics.read_metrics(path)
    ]


@pytest.mark.parametrize(
    "words",
    [
        *(("precision=fp8-linear",), ("precision=nvfp4-w4a16",), ("precision=fp8-kv-attn",)),
        ("model=tiny-qwen3-moe", "precision=fp8-linear"),
        ("precision=nvfp4-w4a16", "lora=attention", "grpo.learning_rate=1e-3"),
    ],
    ids=" ".join,
)
def test_an_engine_holds_the_trainers_norms_and_its_own_steps_noise(make_plan, monkeypatch, words):
    run, _ = loop(make_plan(*RUN, *words))
    seen = {}
    sample = run._sample

    def watched(problems, generator):
        trained = run.progress.step
        validates = len(problems) > 16
        held, wanted = run.engine.wire_tensors(), dict(run.policy.named_weights())
        noisy = with_noise(
            wanted.items(), 0.0 if validates else SIGMAS.get(trained, 0.0), run.recipe.precision,
            num_layers=2, seed=42, trained=trained,
        )  # fmt: skip
        norms = {name: x for name, x in noisy if name.endswith("norm.weight")}
        assert all(torch.equal(held[name], x) for name, x in norms.items())
        differs = [name for name in norms if not torch.equal(norms[name], wanted[name])]
        seen[trained, validates] = len(differs)
        masters = {} if run.policy.adapters else run.policy.masters
        for name, master in masters.items():
            assert torch.equal(wanted[name], master.bfloat16()), "the trainer's are its own"
        return sample(problems, generator)

    monkeypatch.setattr(run, "_sample", watched)
    run.train(lambda row: None)
    assert {at: many for at, many in seen.items() if many} == {
        (step, False): 4 for step in (2, 4, 5)
    }
    assert {step for step, validates in seen if validates} == {3, 6, 7}


def test_a_run_stopped_or_made_longer_has_the_noise_of_one_that_was_not(make_plan, tmp_path):
    run, path = loop(make_plan(*RUN))
    run.train(lambda row: None)
    whole = rows(path)
    clean, other = loop(make_plan(*TRAIN))
    clean.train(lambda row: None)
    kl = [[row["mismatch/kl"] for row in each[1:]] for each in (whole, rows(other))]
    assert kl[0][:2] == kl[1][:2] and kl[0][2] != kl[1][2], "the third step's rollout has noise"

    class Stop(Exception):
        pass

    def stop(row):
        if row["step"] == 4:
            raise Stop

    short = make_plan(*RUN, "grpo.steps=5", f"outputs={tmp_path}/stopped")
    again, path = loop(short)
    with pytest.raises(Stop):
        again.train(stop)
    GrpoLoop(short, path).train(lambda row: None)
    longer, _ = loop(make_plan(*RUN, f"outputs={tmp_path}/stopped"))
    longer.train(lambda row: None)
    kept = [{k: v for k, v in row.items() if k != "val/accuracy"} for row in rows(path)]
    assert kept == [{k: v for k, v in row.items() if k != "val/accuracy"} for row in whole]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("noise.steps=null",), "noise.steps=null: is part of the schedule; as noise.steps="),
        (("correction=none",), "correction=none: must correct: noise of the engine alone is a"),
        (("glue=stock",), "glue=stock: must be ours: NeMo RL's refit sends the trainer's norms"),
        (("grpo.max_sample_age=1",), "grpo.max_sample_age=1: which step a sample's noise is of"),
        (("grpo.validate_every=1",), "grpo.validate_every=1: leaves no rollout with noise: the"),
    ],
)
def test_noise_is_refused_where_it_is_not_shown_to_be_right(words, line):
    with pytest.raises((ComposeError, PlanError)) as error:
        compose(["precision=fp8-linear", *SCHEDULE, *words])
    assert [each for each in str(error.value).splitlines() if each.startswith(line)]


def test_without_noise_a_run_keeps_its_directory_and_in_bf16_a_note_says_so(make_plan):
    assert make_plan("noise=none").hash6 == make_plan().hash6 != make_plan(*SCHEDULE).hash6
    noted = make_plan(*SCHEDULE, "precision=bf16").notes
    assert "noise: no effect, nothing is quantized" in noted
    noted = make_plan("noise=none", "noise.steps=6").notes
    assert "noise: no effect, without noise.sigma_start there is none" in noted
