"""Where runs stand without a Slurm to ask: by what lies in their directories."""

import time

import pytest
from fp8_nemo.recipes.queue import main

from fp8_nemo.runs.metrics import append_metrics
from fp8_nemo.runs.queue import bare, stands
from fp8_nemo.runs.run_dir import freeze, job_dir
from tests.conftest import small_plan

LOG = """[2026-11-24T01:02:03 job 7] restart 0 on n1, from step 0 of 2
Ray: 1 of 1 nodes: n1
[2026-11-24T01:02:09 n1] the run failed with code 3
[2026-11-24T01:02:10 job 7] {last}
step 2/2
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Make the directory of a run: its steps and, if it had a job, how its attempts ended."""
    monkeypatch.setenv("PATH", str(tmp_path))  # no squeue

    def make(seed: int, steps: int, last: str = "", failed: str = ""):
        [frozen] = freeze([small_plan(tmp_path / "o", "cluster=slurm", f"seed={seed}")])
        for step in range(1, steps + 1):
            append_metrics(frozen.path, {"step": step, "health/state": step - 1})
        if last:
            (job_dir(frozen.path) / "id").write_text("7\n")
            (frozen.path / "log" / "slurm-7.out").write_text(LOG.format(last=last))
            for attempt in (0, 1):
                (frozen.path / "log" / f"job-7-{attempt}").mkdir()
                time.sleep(0.01)
        if failed:
            (frozen.path / "log" / "job-7-1" / "failed-n1").write_text(f"{failed}\n")
        return frozen.path

    return make


def test_what_slurm_has_forgotten_is_read_from_the_run(run):
    new, done = run(1, 0), run(2, 2)
    killed = run(3, 1, "ended with code 137 at step 1; not requeued")
    failed = run(4, 1, "ended with code 3 at step 1", "n1: the run failed with code 3")
    seen = {each.path: each for each in stands([new, done, killed, failed])}
    assert [(each.state, each.why) for each in seen.values()] == [
        ("unfinished", ""),
        ("finished", ""),
        ("stopped", "ended with code 137 at step 1; not requeued"),
        ("failed", "n1: the run failed with code 3"),
    ]
    assert [each.health for each in seen.values()] == ["", "watch", "healthy", "healthy"]
    assert seen[killed].attempts == 2 and seen[killed].job == "7" and not seen[killed].queued


def test_the_table_counts_states_and_says_that_nobody_could_be_asked(run, tmp_path, capsys):
    run(1, 0), run(2, 2), run(3, 1, "its time was up")
    assert main([str(tmp_path / "o")]) == 0
    told = capsys.readouterr().out
    assert told.startswith("tiny-llama: ") and "1 stopped" in told and "its time was up" in told
    assert "there is no squeue on PATH" in told and "log/slurm-7.out" in told
    assert main([str(tmp_path / "none")]) == 2
    assert "no run directory here" in capsys.readouterr().err


AWAY = "no Slurm controller is reached from here; ask on a login node of the cluster"
DNS = """squeue: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
squeue: error: fetch_config: DNS SRV lookup failed
squeue: error: _establish_config_source: failed to fetch config
squeue: fatal: Could not establish a configuration source
"""
GARBAGE = """sbatch: error: Parse error in file /etc/slurm/slurm.conf line 2: "garbage line"
sbatch: error: ClusterName needs to be specified
sbatch: fatal: Unable to process configuration file
"""
DOWN = "Unable to contact slurm controller (connect failure)"


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        (DNS, AWAY),
        (f"slurm_load_jobs error: {DOWN}\n", AWAY),
        (f"scancel: error: Kill job error on job id 1: {DOWN}\n", AWAY),
        (GARBAGE, "slurm.conf cannot be read here; `sinfo` says why, and where SLURM_CONF leads"),
        ("sbatch: error: invalid partition specified: x\n", "invalid partition specified: x"),
        ("", "nothing"),
    ],
)
def test_what_slurm_22_prints_is_said_in_one_line(printed, said):
    assert bare(printed) == said
