"""benchmarks/learning/side_by_side.py with real runs of the tiny model, on no GPU."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.learning import side_by_side
from fp8_nemo.report.runs import find_runs, read_run
from fp8_nemo.runs.run_dir import Frozen

ROOT = Path(__file__).parents[3]

SWEEP = ["-m", "model=tiny-llama", "precision=bf16,fp8-linear", "grpo=demo"]
SMALL = ["grpo.prompts_per_step=4", "grpo.generations_per_prompt=2", "grpo.validate_every=10"]


def command(*words):
    script = ["-m", "benchmarks.learning.side_by_side"]
    return [sys.executable, *script, "--gpus", "0", "--each", "2", *SWEEP, *SMALL, *words]


def test_every_cell_runs_once_and_what_is_finished_is_left(tmp_path):
    pytest.importorskip("torch")
    line = command("grpo.steps=2", f"outputs={tmp_path}")
    first, again = (subprocess.run(line, capture_output=True, text=True) for _ in range(2))
    assert first.returncode == 0, first.stdout + first.stderr
    runs = [read_run(path) for path in find_runs(tmp_path)]
    assert [run.state for run in runs] == ["finished"] * 2
    assert first.stdout.count("exit 0 after") == 2
    assert "2 cells, 2 finished" in again.stdout and "exit" not in again.stdout


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["grpo.steps=0"], "grpo.steps=0"),
        (["cluster=slurm"], "side_by_side runs backend=local, cluster=here alone"),
        (["model.path=none"], "no such folder"),
    ],
)
def test_a_wrong_line_is_refused_before_anything_starts(tmp_path, words, line):
    line_typed = command(*words, f"outputs={tmp_path}")
    found = subprocess.run(line_typed, capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 2 and line in found.stderr
    assert not list(tmp_path.iterdir())


def test_a_run_that_cannot_begin_gives_its_place_back(tmp_path):
    runs = side_by_side.Runs(["0"], 1)
    (tmp_path / "log").write_text("in the way")
    cell = Frozen(tmp_path, "new", 0)
    assert [runs.run(cell).code for _ in range(2)] == [1, 1]
    runs.end()
    (tmp_path / "log").unlink()
    assert runs.run(cell).code == 130 and not runs.under_way


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_end_it_starts_none_and_what_runs_saves(tmp_path, number):
    pytest.importorskip("torch")
    line = command("grpo.steps=5000", "seed=1,2", f"outputs={tmp_path}")  # four cells, two places
    process = subprocess.Popen(line)
    deadline = time.monotonic() + 120
    try:
        while len(list(tmp_path.glob("tiny-llama/*/*/metrics.jsonl"))) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        process.send_signal(number)
        assert process.wait(60) == 130
    finally:
        process.terminate()
    begun = list(tmp_path.glob("tiny-llama/*/*/metrics.jsonl"))
    assert len(begun) == 2
    assert all(list((file.parent / "checkpoints").iterdir()) for file in begun)
