"""How an attempt ends, and whether the next one follows: preemptions, limits, lost nodes."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from fp8_nemo.runs import metrics
from tests.slurm.conftest import Job

FAST = "cluster.preflight=false"
SIZE = [
    *("grpo.steps=40", "grpo.checkpoint_every=1000", "grpo.validate_every=1000"),
    *("grpo.validate_first=false", FAST),
]


SOME = 10
"""Steps before an attempt is ended; those that are left take ten seconds and more."""


def steps(job: Job) -> int:
    return metrics.steps_done(metrics.read_metrics(job.path))


def rows(job: Job) -> list[int]:
    return [row["step"] for row in metrics.read_metrics(job.path)]


def preempt(slurm, job: Job) -> None:
    """Send a job of a higher tier to the first node of one that has some steps behind it."""
    job.wait(120, until=lambda job: steps(job) >= SOME)
    first = slurm.call("scontrol", "show", "hostnames", job.state["NodeList"]).split()[0]
    urgent = ["--partition=urgent", f"--nodelist={first}", "--exclusive", "--output=/dev/null"]
    slurm.call("sbatch", *urgent, "--wrap=sleep 5")


def saved_and_went_on(job: Job) -> list[int]:
    """Wait for the second attempt, which goes on from what was saved; return all steps."""
    job.wait(120, until=lambda job: "restart 1" in job.log).finished(240)
    again = job.log.partition("restart 1")[2].partition("from step ")[2]
    assert int(again.split()[0]) >= SOME, job.log
    assert "Ray did not end" not in job.log
    for process in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            assert f"RAY_TMPDIR=/tmp/fp8-nemo-{job.id}-".encode() not in process.read_bytes()
    return rows(job)


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_job_that_is_preempted_at_once_saves_and_goes_on(slurm, small, lasting, nodes):
    [job] = slurm.submit(*small, *lasting, *SIZE, f"cluster.nodes={nodes}", "seed=21")
    preempt(slurm, job)
    assert saved_and_went_on(job) == [*range(41)]


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_preempted_cell_gives_its_nodes_back_before_its_grace_ends(slurm, small, lasting, nodes):
    place = ["cluster.partition=graceful", f"cluster.nodes={nodes}", "cluster.max_running=2"]
    first, second = slurm.submit("-m", *small, *lasting, *SIZE, *place, "seed=26,27")
    preempt(slurm, first)
    began = time.monotonic()
    first.wait(60, until=lambda job: job.state["JobState"] == "PENDING")
    assert time.monotonic() - began < 30, "the nodes were held for the whole GraceTime"
    assert "preempted; back into the queue" in first.log
    assert saved_and_went_on(first) == [*range(41)]
    second.wait(240).finished()
    assert second.state["Restarts"] == "0"


def test_a_term_of_the_users_saves_and_ends_the_job_at_once(slurm, small, lasting):
    [job] = slurm.submit(*small, *lasting, *SIZE, "seed=22")
    job.wait(90, until=lambda job: steps(job) >= SOME)
    slurm.call("scancel", "--signal=TERM", job.id)
    began = time.monotonic()
    job.wait(60)
    assert time.monotonic() - began < 30
    assert "asked to end by a TERM, the same line goes on" in job.log
    assert job.state["JobState"] == "FAILED" and "not requeued" not in job.log


@pytest.mark.long
def test_a_sweep_that_is_cancelled_while_it_runs_saves_and_the_same_line_goes_on(
    slurm, small, lasting, tmp_path
):
    line = ["-m", *small, *lasting, *SIZE, "seed=28,29"]
    first, second = slurm.submit(*line, "cluster.max_running=1")
    first.wait(120, until=lambda job: steps(job) >= SOME)
    cancelled = slurm.verb("queue", tmp_path / "o", "--cancel")
    assert cancelled.stdout.splitlines()[-1] == f"cancelled: {first.id}, {second.id}"
    for job in (first, second):
        job.wait(60)
    assert "is saved; Slurm or its user has ended the job" in first.log
    assert slurm.verb("queue", tmp_path / "o").stdout.startswith("tiny-llama: 2 stopped")
    again, new = slurm.submit(*line)
    for job in (again, new):
        assert rows(job.finished(240)) == [*range(41)]
    assert int(again.log.partition("from step ")[2].split()[0]) >= SOME, again.log
    assert "from step 0 of" in new.log


def test_a_killed_run_says_so_and_that_the_same_line_goes_on(slurm, small, lasting):
    [job] = slurm.submit(*small, *lasting, *SIZE, "seed=23")
    job.wait(90, until=lambda job: steps(job) >= 5)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if "fp8_nemo.recipes.run" in words and str(job.path) in words:
            os.kill(int(process.name), signal.SIGKILL)
    job.wait(60)
    assert "ended with code 137 (killed, often for lack of memory)" in job.log
    assert "not requeued, the same line goes on" in job.log


def test_a_job_that_saves_nothing_before_its_limit_is_not_requeued_for_ever(slurm, small):
    late = ["cluster.time=1", "cluster.save_before_end=50", "cluster.setup='sleep 20'"]
    [job] = slurm.submit(*small, *SIZE, *late, "seed=24")
    job.wait(150)
    assert "no step was saved since the start: raise cluster.time" in job.log
    assert job.state["Restarts"] == "0" and job.state["JobState"] != "COMPLETED"


def test_a_job_that_loses_one_node_of_two_goes_on_when_there_are_two_again(slurm, small, lasting):
    often = ["grpo.steps=100", "grpo.checkpoint_every=5", "cluster.nodes=2", "seed=25"]
    [job] = slurm.submit(*small, *lasting, *SIZE, *often)
    job.wait(120, until=lambda job: steps(job) >= SOME)
    slurm.kill_node("node2")
    try:
        job.wait(120, until=lambda job: job.state["JobState"] == "PENDING")
    finally:
        slurm.start_node("node2")
    job.wait(180, until=lambda job: "restart 1" in job.log).finished(300)
    assert rows(job) == [*range(101)]
