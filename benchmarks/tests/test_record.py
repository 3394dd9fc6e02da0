"""A benchmark that cannot run here says so in a line, and what to do."""

import gzip
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fp8_nemo.report.runs import find_runs, read_run
from fp8_nemo.runs.provenance import environment

BENCHMARKS = Path(__file__).parents[1]
KEPT = BENCHMARKS / "results" / "runs.jsonl.gz"


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
@pytest.mark.parametrize("script", ["quantize", "rollout", "train"])
def test_a_benchmark_names_the_packages_that_it_lacks(script, tmp_path):
    command = [
        sys.executable,
        "-m",
        f"benchmarks.speed.{script}",
        "--out",
        str(tmp_path / "x.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and not (tmp_path / "x.json").exists()
    [line] = done.stderr.splitlines()
    assert line.startswith(f"benchmarks.speed.{script}: needs ") and "docs/install.md" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_told():
    code = "from benchmarks import record; record.need('json')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=BENCHMARKS.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "needs a CUDA device" in done.stderr


@pytest.mark.parametrize("clone", [True, False])
def test_a_clone_knows_its_commit_better_than_the_one_who_asks(clone, tmp_path):
    code = (
        "import pathlib; from benchmarks import record; record.keep(pathlib.Path('x.json'), 'abc')"
    )
    own = (
        os.environ
        | {"PYTHONPATH": str(BENCHMARKS.parent)}
        | ({} if clone else {"GIT_DIR": "nowhere"})
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=own, check=True, timeout=120)
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["commit"] == (environment()["commit"] or "abc" if clone else "abc")


def test_the_command_of_a_results_file_has_torchruns_part(tmp_path):
    (tmp_path / "bench.py").write_text(
        "import os, pathlib\nfrom benchmarks import record\n"
        "if os.environ['RANK'] == '0':\n    record.keep(pathlib.Path('x.json'), 'c', rows=[])\n"
    )
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [sys.executable, *launcher, "bench.py", "--out", "x.json"]
    own = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)}
    subprocess.run(command, cwd=tmp_path, env=own, check=True, timeout=300, capture_output=True)
    found = json.loads((tmp_path / "x.json").read_text())["command"]
    assert found == " ".join(["python", *command[1:]])


@pytest.mark.parametrize("known", [None, "8965e637a28d"])
def test_kept_runs_have_the_commit_that_they_could_not_tell(known, tmp_path):
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    one = json.loads(gzip.decompress(KEPT.read_bytes()).splitlines()[0])
    found = one["environment"]
    (run / "plan.json").write_text(json.dumps(one["plan"]))
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in one["rows"]))
    (run / "environment.json").write_text(json.dumps(found | {"commit": known}))
    command = [sys.executable, "-m", "benchmarks.keep_runs", "runs", "kept", "--commit", "abc"]
    own = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)}
    subprocess.run(command, cwd=tmp_path, env=own, check=True, timeout=120)
    [line] = gzip.decompress((tmp_path / "kept.jsonl.gz").read_bytes()).splitlines()
    kept = json.loads(line)
    assert kept["environment"] == found | {"commit": known or "abc"}
    assert (kept["run"], kept["plan"], kept["rows"]) == ("one", one["plan"], one["rows"])
    [read] = find_runs(tmp_path / "kept")
    assert read_run(read).rows == one["rows"]
