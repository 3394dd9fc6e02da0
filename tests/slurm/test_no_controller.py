"""A machine with Slurm's commands and no cluster behind them: one line says so, nothing is made."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8_nemo.runs.run_dir import freeze, job_dir
from tests.conftest import small_plan
from tests.slurm.conftest import ROOT

AWAY = "no Slurm controller is reached from here; ask on a login node of the cluster"
BROKEN = "slurm.conf cannot be read here; `sinfo` says why, and where SLURM_CONF leads"
NOBODY = """ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=9
AuthType=auth/munge
NodeName=node1 CPUs=1
PartitionName=batch Nodes=node1 Default=YES
"""
CONFIGS = {"none": (None, AWAY), "garbage": ("garbage\n", BROKEN), "of-nobody": (NOBODY, AWAY)}
AT_ONCE = ["none", "garbage"]
SLOW = pytest.param("of-nobody", marks=pytest.mark.long)
"""Slurm asks nobody again and again, for 18 seconds a command."""


@pytest.fixture
def away(request, tmp_path):
    """Return what Slurm's commands find for a configuration, and what we say then."""
    text, said = CONFIGS[request.param]
    found = {name: value for name, value in os.environ.items() if name != "SLURM_CONF"}
    if text is None:
        if Path("/etc/slurm/slurm.conf").exists():
            pytest.skip("this machine is part of a cluster")
        return found, said
    file = tmp_path / "slurm.conf"
    file.write_text(text)
    return found | {"SLURM_CONF": str(file)}, said


def verb(environment, *words):
    line = [sys.executable, "-m", "recipes.cli", *map(str, words)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("away", [*AT_ONCE, SLOW], indirect=True)
def test_a_line_for_a_cluster_that_is_not_there_is_one_line_and_makes_nothing(
    away, small, tmp_path
):
    environment, said = away
    done = verb(environment, "grpo", "-m", "seed=1,2", *small)
    told = f"cluster.kind=slurm: {said}, or run here with cluster=here\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("away", AT_ONCE, indirect=True)
def test_a_run_that_had_a_job_is_not_looked_for_where_there_is_no_cluster(away, small, tmp_path):
    """Whether that job still runs cannot be known here, so that nothing is begun beside it."""
    environment, said = away
    [frozen] = freeze([small_plan(tmp_path / "o", "cluster=slurm", *small[-3:])])
    (job_dir(frozen.path) / "id").write_text("7\n")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "o").rglob("*")}
    lines = [["queue", tmp_path / "o"], ["queue", tmp_path / "o", "--cancel"]]
    for words in (*lines, ["grpo", *small], ["grpo", *small, "cluster=here"]):
        done = verb(environment, *words)
        assert (done.returncode, done.stdout) == (2, ""), done.stdout
        assert done.stderr == f"squeue: {said}\n"
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "o").rglob("*")}
