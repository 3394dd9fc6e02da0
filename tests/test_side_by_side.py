"""benchmarks/side_by_side.py with real runs of the tiny model, on no GPU."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fp8_nemo.report import find_runs, read_run

ROOT = Path(__file__).parents[1]
SWEEP = ["-m", "model=tiny-llama", "precision=bf16,fp8-linear", "grpo=demo"]
SMALL = ["grpo.prompts_per_step=4", "grpo.generations_per_prompt=2", "grpo.validate_every=10"]


def command(*words):
    script = str(ROOT / "benchmarks" / "side_by_side.py")
    return [sys.executable, script, "--gpus", "0", "--each", "2", *SWEEP, *SMALL, *words]


def test_every_cell_runs_once_and_what_is_finished_is_left(tmp_path):
    pytest.importorskip("torch")
    line = command("grpo.steps=2", f"outputs={tmp_path}")
    first, again = (subprocess.run(line, capture_output=True, text=True) for _ in range(2))
    assert first.returncode == 0, first.stdout + first.stderr
    runs = [read_run(path) for path in find_runs(tmp_path)]
    assert [run.state for run in runs] == ["finished"] * 2
    assert first.stdout.count("exit 0 after") == 2
    assert "2 cells, 2 finished" in again.stdout and "exit" not in again.stdout


def test_a_wrong_line_is_refused_before_anything_starts(tmp_path):
    found = subprocess.run(command("grpo.steps=0", f"outputs={tmp_path}"), capture_output=True)
    assert (
        found.returncode == 2 and b"grpo.steps=0" in found.stderr and not list(tmp_path.iterdir())
    )


def test_asked_to_end_every_run_saves(tmp_path):
    pytest.importorskip("torch")
    process = subprocess.Popen(command("grpo.steps=5000", f"outputs={tmp_path}"))
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("**/metrics.jsonl"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) == 130
    runs = find_runs(tmp_path)
    assert len(runs) == 2 and all(list((run / "checkpoints").iterdir()) for run in runs)
