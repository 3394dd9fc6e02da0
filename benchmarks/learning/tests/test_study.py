"""Runs of a study in one process are what runs by themselves are, and go on where they stopped."""

import sys
from statistics import fmean

import pytest

from benchmarks.learning import study
from fp8_nemo.local.grpo import GrpoLoop
from fp8_nemo.plan.cells import compose_plans

SETTINGS = ["model=tiny-llama", "grpo.steps=2", "grpo.prompts_per_step=4", "grpo.validate_every=2"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The lines of a study that was asked for twice."""
    folder = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        cells = ["experiment=bf16,fp8-rollout-mis", "seed=2,1"]
        patch.setattr(sys, "argv", ["study", str(folder), *SETTINGS, *cells])
        patch.setattr(study, "LAST_SAMPLES", 1)
        assert study.main() == 0
        before = (folder / study.RUNS).read_text()
        assert study.main() == 0
    assert (folder / study.RUNS).read_text() == before
    return study.read(folder / study.RUNS)


def test_all_cells_of_a_seed_run_before_the_next_seed(kept):
    found = [(line["seed"], line["cell"].partition("/")[2]) for line in kept]
    cells = ["bf16-none", "fp8-kv-attn-mis"]
    assert found == [(seed, cell) for seed in (1, 2) for cell in cells]


def test_a_run_is_what_it_is_by_itself(kept, tmp_path):
    [plan] = compose_plans([*SETTINGS, "experiment=fp8-rollout-mis", "seed=2"])
    rows = []
    GrpoLoop(plan, tmp_path).train(rows.append)
    line = kept[-1]
    assert line["run"] == plan.run_name
    own = {str(row["step"]): row["val/accuracy"] for row in rows if "val/accuracy" in row}
    assert line["validations"]["own"] == own
    kl = [row["mismatch/kl"] for row in rows if row["step"]]
    assert line["kl"] == pytest.approx(kl, rel=5e-3)
    assert line["means"]["mismatch/kl"] == pytest.approx(fmean(kl), rel=1e-12)


def test_bf16_serves_what_it_learned_and_fp8_another_policy(kept):
    bf16, fp8 = (line["last"] for line in kept[:2])
    assert bf16["own"] == bf16["bf16"]
    assert fp8["own"] != fp8["bf16"]


def test_a_run_names_its_code_and_its_times(kept):
    for line in kept:
        assert len(line["sources"]) == 12
        assert line["started"] <= line["ended"]
