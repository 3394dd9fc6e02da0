"""Jobs of the local backend in a real Slurm, with a real Ray across its nodes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.runs import frozen_code, metrics
from fp8_nemo.runs.slurm import prepare, submit
from tests.conftest import SMALL
from tests.slurm.conftest import ROOT, Job, eight_problems, waiting

FAST = "cluster.preflight=false"
LONG = [*SMALL, "seed=7", "grpo.steps=120", "grpo.checkpoint_every=1000"]


def curve(path: Path) -> list[dict]:
    rows = metrics.read_metrics(path)
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


@pytest.fixture
def undisturbed():
    """Start the same run on this machine, without Slurm, beside the jobs; it ends with the test."""
    started = []

    def start(folder: Path, *arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "recipes.grpo", *arguments, f"outputs={folder}"]
        quiet = {"stdout": subprocess.DEVNULL, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
        started.append(subprocess.Popen(command, cwd=ROOT, **quiet))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def of(folder: Path) -> list[dict]:
    [path] = folder.glob("*/*/*/metrics.jsonl")
    return curve(path.parent)


def steps(job: Job) -> int:
    return metrics.steps_done(metrics.read_metrics(job.path))


def kill_raylet(resource: str) -> None:
    """The Ray of one node, by a resource that its command line names."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if words[0].endswith("/raylet") and any(resource in word for word in words):
            os.kill(int(process.name), 9)


@pytest.fixture(scope="session", autouse=True)
def long_job(request, slurm, tmp_path_factory):
    """More work than fits its time limit, beside all other tests."""
    if not any("more_work" in item.name for item in request.session.items):
        return None
    # Slurm gives the signal up to a minute early: a slow machine needs the rest to make a step.
    limits = ["cluster=slurm", "cluster.nodes=1", "cluster.time=3", "cluster.save_before_end=80"]
    folder = tmp_path_factory.mktemp("long")
    place = ["cluster.partition=long", f"outputs={folder}", "grpo.validate_every=1000"]
    [job] = slurm.submit(*LONG, *waiting(folder, 0.07), *limits, *place)
    return job


def test_jobs_of_one_and_of_two_nodes_train_as_a_machine_without_slurm_does(
    slurm, small, tmp_path, undisturbed
):
    alone = [undisturbed(tmp_path / f"here{seed}", *SMALL, f"seed={seed}") for seed in (1, 2)]
    [two] = slurm.submit(*small, "cluster.nodes=2", "seed=1")
    two.finished()
    assert "Ray: 2 of 2 nodes: node1, node2" in two.log
    for check in ("a task", "outputs", "model", "packages, job"):
        assert any(
            row.startswith(f"{check} ") and "node1, node2" in row for row in two.log.split("\n")
        )
    assert "gloo, nodes 2" in two.log and "Killed" not in two.log

    [one] = slurm.submit(*small, "seed=2", FAST)
    one.finished()
    assert "check_cluster" not in one.log
    assert [each.wait() for each in alone] == [0, 0]
    for seed, job in ((1, two), (2, one)):
        assert of(tmp_path / f"here{seed}") == curve(job.path)
    assert "SLURM" not in (one.path / "log" / "attempt-1.log").read_text()

    # At once, while Slurm still knows the job that has ended.
    [more] = slurm.submit(*small, "seed=2", FAST, "grpo.steps=3")
    assert more.path == one.path
    more.finished()
    assert "from step 2 of 3" in more.log and steps(more) == 3


def test_a_sweep_is_queued_once_finishes_and_compares(slurm, small, tmp_path):
    sweep = ["-m", *small, FAST, "precision=bf16,fp8-linear", "correction=none,tis"]
    impossible = slurm.verb("grpo", *sweep, "precision.train_linear=fp8")
    assert impossible.returncode == 2
    assert slurm.verb("grpo", *sweep, "cluster.partition=none-such").returncode == 2
    assert not (tmp_path / "o").exists()

    jobs = slurm.submit(*sweep)
    assert len({job.path for job in jobs}) == len(jobs) == 4
    assert len({job.state["ArrayJobId"] for job in jobs}) == 1
    assert {job.path.parent.name for job in jobs} == {
        f"{precision}-{correction}"
        for precision in ("bf16", "fp8-linear")
        for correction in ("none", "tis")
    }
    assert slurm.submit(*sweep) == []  # all in the queue
    more = slurm.verb("grpo", *sweep, "grpo.steps=9")
    assert more.returncode == 2 and "is in the queue for 2 steps" in more.stderr
    here = slurm.verb("grpo", *sweep, "cluster=here")
    assert here.returncode == 2 and here.stderr.count("is in the queue as job") >= 1
    for job in jobs:
        job.finished(240)
    again = slurm.verb("grpo", *sweep)
    assert again.stdout.count("finished") == 4 and "job " not in again.stdout
    table = slurm.verb("compare", f"{tmp_path}/o/tiny-llama", COLUMNS="200")
    assert table.returncode == 0
    assert all(f"{job.path.parent.name}" in table.stdout for job in jobs)


def test_a_requeued_job_goes_on_where_it_was(slurm, small, lasting, tmp_path, undisturbed):
    size = ["grpo.steps=40", "grpo.checkpoint_every=5", "grpo.validate_every=30", "seed=3"]
    here = undisturbed(tmp_path / "here", *SMALL, *lasting, *size)
    [job] = slurm.submit(*small, *lasting, *size, FAST)
    job.wait(90, until=lambda job: steps(job) >= 12)
    slurm.call("scontrol", "requeue", job.id)
    job.wait(90, until=lambda job: "restart 1" in job.log).finished(180)
    assert here.wait() == 0
    assert of(tmp_path / "here") == curve(job.path)


@pytest.mark.long  # one that loses a node of two goes on likewise
def test_a_job_whose_node_is_lost_goes_on_on_another(slurm, small, tmp_path, undisturbed):
    """Its processes live on behind the dead slurmd, and must not write beside the new attempt."""
    size = ["grpo.steps=800", "grpo.checkpoint_every=20", "grpo.validate_every=400", "seed=4"]
    here = undisturbed(tmp_path / "here", *SMALL, *size)
    [job] = slurm.submit(*small, *size, FAST)
    job.wait(90, until=lambda job: steps(job) >= 30)
    first = job.state["NodeList"]
    slurm.kill_node(first)
    try:
        job.wait(120, until=lambda job: "restart 1" in job.log)
        assert job.state["NodeList"] != first and "from step 800 of" not in job.log
        job.finished(240)
    finally:
        slurm.start_node(first)
    assert here.wait() == 0
    assert of(tmp_path / "here") == curve(job.path)


@pytest.fixture
def clone(tmp_path) -> Path:
    """A clone that a test may edit."""
    folder = tmp_path / "clone"
    folder.mkdir()
    for name in ("fp8_nemo", "recipes", "conf", "slurm", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    return folder


def test_a_clone_that_is_edited_while_a_line_is_queued_runs_as_it_is_then(
    slurm, small, clone, monkeypatch
):
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    monkeypatch.setattr(frozen_code, "ROOT", clone)
    plans = compose_plans([*small, FAST])
    jobs = prepare(plans)
    (clone / "fp8_nemo" / "edited.py").touch()
    [job] = submit(plans, jobs)
    Job(slurm, job.id, job.path).finished()
    [edited] = clone.parent.glob("o/.code/*/fp8_nemo/edited.py")
    assert str(edited.parents[1]) in (job.path / "job" / "settings").read_text()


def test_a_waiting_job_runs_the_code_that_was_submitted(slurm, small, clone):
    [job] = slurm.submit(*small, "cluster.extra=[--hold]", cwd=clone)
    for name in ("local/run.py", "nemo/cluster_check.py", "__init__.py"):
        (clone / "fp8_nemo" / name).write_text("raise SystemExit(9)\n")
    (clone / "slurm" / "node.sh").write_text("exit 9\n")
    slurm.call("scontrol", "release", job.id)
    job.finished()
    assert steps(job) == 2


def test_what_a_user_types_reaches_the_job_as_it_is_and_no_secret_does(slurm, tmp_path):
    odd = "a b;$(touch pwned) `touch pwned` 'q' \"d\" & | > pwned\nline"
    data, outputs = tmp_path / odd, tmp_path / "o $(touch pwned);'x' %j"
    data.mkdir()
    eight_problems(data)

    def quoted(path: Path) -> str:
        return "'" + str(path).replace("'", "\\'") + "'"

    done = slurm.verb(
        "grpo", *SMALL[:-1], "data=jsonl", f"data.path={quoted(data)}", FAST,
        f"outputs={quoted(outputs)}", "cluster=slurm", "cluster.nodes=1", "cluster.time=30",
        "cluster.setup='export SEEN=1'", MY_TOKEN="a-secret-of-mine",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [file] = outputs.glob("*/*/*/plan.json")
    assert json.loads(file.read_text())["recipe"]["data"]["path"] == str(data)
    Job(slurm, (file.parent / "job" / "id").read_text().strip(), file.parent).finished()
    assert not [path for top in (ROOT, tmp_path) for path in top.glob("**/pwned")]
    kept = [path for path in outputs.rglob("*") if path.is_file()]
    assert kept and not [path for path in kept if b"a-secret-of-mine" in path.read_bytes()]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cluster.partition=none-such"], "cluster.partition=none-such"),
        (["cluster.partition=paid"], "Invalid account or account/partition combination"),
        (["cluster.nodes=9"], "cluster.nodes=9"),
        (["outputs=/no/such/folder/o"], "outputs=/no/such/folder/o: /no/such/folder is not there"),
        (["cluster.time=soon"], "cluster.time=soon"),
        (["backend=nemo", "glue=stock", "cluster.interpreter=system"], "NEMO_RL_ROOT"),
    ],
)  # fmt: skip
def test_what_slurm_would_refuse_is_one_line_and_queues_nothing(
    slurm, small, tmp_path, arguments, said
):
    before = slurm.queue()
    done = slurm.verb("grpo", *small, *arguments, NEMO_RL_ROOT="")
    assert done.returncode == 2 and done.stdout == ""
    [line] = done.stderr.strip().splitlines()
    assert said in line
    assert {*slurm.queue()} <= {*before}  # one that was ending may have ended
    assert not (tmp_path / "o").exists()


def test_without_sbatch_there_is_one_line(slurm, small, tmp_path):
    done = slurm.verb("grpo", *small, PATH=str(tmp_path))
    assert done.returncode == 2 and "there is no sbatch on PATH" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_node_that_does_not_join_is_named(slurm, small):
    late = "cluster.setup='[ $SLURMD_NODENAME = node1 ] || sleep 60'"
    [job] = slurm.submit(*small, "cluster.nodes=2", "cluster.join_timeout=5", late)
    job.wait(90)
    assert "node2: has not joined Ray within 5 s" in job.log
    assert job.state["JobState"] == "FAILED"


def test_a_node_that_fails_ends_the_job_at_once_with_the_reason(slurm, small):
    broken = "cluster.setup='[ $SLURMD_NODENAME = node1 ] || exit 3'"
    [job] = slurm.submit(*small, "cluster.nodes=2", broken)
    job.wait(60)
    assert "node2: cluster.setup failed with code 3" in job.log

    size = ["grpo.steps=5000", "grpo.validate_every=5000", FAST, "seed=5", "cluster.nodes=2"]
    [job] = slurm.submit(*small, *size)
    job.wait(90, until=lambda job: steps(job) >= 10)
    kill_raylet("slurm-node2")
    job.wait(60)
    assert "ray-node2.log, raylet exit code(s)=-9 (signal 9)) failed" in job.log
    assert job.state["JobState"] == "FAILED" and job.state["Restarts"] == "0"


def test_the_runs_exit_code_is_the_jobs(slurm, small, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    eight_problems(data)
    cell = [*small, "data=jsonl", f"data.path={data}", "data.difficulty=null", FAST]
    [job] = slurm.submit(*cell, "cluster.extra=[--hold]")
    shutil.rmtree(data)
    slurm.call("scontrol", "release", job.id)
    job.wait(60)
    assert job.state["ExitCode"] == "2:0", job.log


def test_more_work_than_the_time_limit_allows_goes_on_from_where_it_was_saved(long_job):
    """That a job which goes on has the curve of an undisturbed one is the matter of others."""
    long_job.wait(900)
    assert "the time limit is near: saving" in long_job.log
    assert "finished, 120 steps" in long_job.log  # Slurm itself may have forgotten the job by now
    assert [row["step"] for row in curve(long_job.path)] == [*range(121)]
