"""Runs of a study side by side are what runs by themselves are, and go on where they stopped."""

import os
import shutil
import signal
import subprocess
import sys
import time
from statistics import fmean

import pytest
from filelock import FileLock

from benchmarks.learning import study
from fp8_nemo.local.grpo import GrpoLoop
from fp8_nemo.plan.cells import compose_plans

SETTINGS = ["model=tiny-llama", "grpo.steps=2", "grpo.prompts_per_step=4", "grpo.validate_every=2"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The lines of a study that was asked for twice, by the first of xdist's workers to come."""
    base = tmp_path_factory.getbasetemp()
    ended = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ended.jsonl"
    with FileLock(f"{ended}.lock"):
        if not ended.exists():
            shutil.copy(asked_twice(tmp_path_factory.mktemp("study")), ended)
    return study.read(ended)


def asked_twice(folder):
    with pytest.MonkeyPatch.context() as patch:
        cells = ["experiment=bf16,fp8-kv-attn-mis", "seed=2,1"]
        patch.setattr(sys, "argv", ["study", str(folder), "--cores", "2", *SETTINGS, *cells])
        assert study.main() == 0
        before = (folder / study.RUNS).read_text()
        assert study.main() == 0
    assert (folder / study.RUNS).read_text() == before
    return folder / study.RUNS


def test_all_cells_of_a_seed_begin_before_the_next_seed(kept):
    began = [line["seed"] for line in sorted(kept, key=lambda line: line["started"])]
    assert began == [1, 1, 2, 2]
    assert {line["cell"].partition("/")[2] for line in kept} == {"bf16-none", "fp8-kv-attn-mis"}


def test_a_run_is_what_it_is_by_itself(kept, tmp_path):
    [plan] = compose_plans([*SETTINGS, "experiment=fp8-kv-attn-mis", "seed=2"])
    rows = []
    GrpoLoop(plan, tmp_path).train(rows.append)
    [line] = [line for line in kept if line["run"] == plan.run_name]
    own = {str(row["step"]): row["val/accuracy"] for row in rows if "val/accuracy" in row}
    assert line["validations"]["own"] == own
    kl = [row["mismatch/kl"] for row in rows if row["step"]]
    assert line["kl"] == pytest.approx(kl, rel=5e-3)
    assert line["means"]["mismatch/kl"] == pytest.approx(fmean(kl), rel=1e-12)


def test_bf16_serves_what_it_learned_and_fp8_another_policy(kept):
    lines = sorted(kept, key=lambda line: (line["seed"], line["cell"]))
    bf16, fp8 = (line["last"] for line in lines[:2])
    assert bf16["own"] == bf16["bf16"]
    assert fp8["own"] != fp8["bf16"]


def test_a_run_names_its_code_its_machine_and_its_times(kept):
    for line in kept:
        assert line["device"] and line["torch"]
        assert len(line["sources"]) == 12
        assert line["started"] <= line["ended"]


def test_a_run_that_fails_costs_no_other(tmp_path, capsys):
    plans = compose_plans(["-m", *SETTINGS, f"model.path={tmp_path}/none,null", "seed=1"])
    file = tmp_path / study.RUNS
    file.touch()
    assert study.all_runs(plans, [""], {}, file) == 1
    assert [line["run"] for line in study.read(file)] == [plans[1].run_name]
    assert plans[0].run_name in capsys.readouterr().err


@pytest.mark.long
def test_cut_off_it_keeps_whole_runs_and_the_same_line_does_the_others(tmp_path):
    script = [sys.executable, "-m", "benchmarks.learning.study", str(tmp_path)]
    line = [*script, *SETTINGS, "experiment=bf16", "seed=1,2,3"]
    file = tmp_path / study.RUNS
    process = subprocess.Popen(line, start_new_session=True)
    deadline = time.monotonic() + 120
    while not (file.exists() and file.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)  # as `timeout` does
    assert process.wait(30) == -signal.SIGTERM
    before = file.read_text()
    assert len(study.read(file)) < 3
    assert subprocess.run(line).returncode == 0
    assert file.read_text().startswith(before)
    assert sorted(found["seed"] for found in study.read(file)) == [1, 2, 3]
