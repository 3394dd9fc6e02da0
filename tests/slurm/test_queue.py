"""Who is in the queue, and how often: arrays, two lines at once, two users, late words."""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import spent
from tests.recipes.test_terminal import seen
from tests.slurm.conftest import ROOT, Job

FAST, HOLD = "cluster.preflight=false", "cluster.extra=[--hold]"


def names(slurm, *jobs: Job) -> list[str]:
    return [job.state["JobName"] for job in jobs]


def cells(outputs: Path) -> list[Path]:
    return sorted(path.parent for path in outputs.glob("*/*/*/plan.json"))


@pytest.fixture
def shared():
    """A folder that any user may write in; pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="fp8-nemo-shared-", dir="/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def test_the_same_line_twice_at_once_queues_its_cells_once(slurm, small, tmp_path):
    line = [sys.executable, "-m", "recipes.grpo", "-m", *small, HOLD, "seed=1,2"]
    both = [
        subprocess.Popen(line, cwd=ROOT, env=slurm.environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    numbers = [(path / "job" / "id").read_text().strip() for path in cells(tmp_path / "o")]
    queue = slurm.queue()
    assert len(numbers) == 2 and {*numbers} <= {*queue}
    assert sorted(text.count("\njob ") for text in said) == [0, 2]
    assert slurm.verb("queue", tmp_path / "o", "--cancel").returncode == 0
    assert not {*numbers} & {*slurm.queue()}


def test_a_sweep_is_one_array_of_which_so_many_run_at_once_as_the_line_says(slurm, small, tmp_path):
    place = ["cluster.partition=wide", "cluster.max_running=2", "cluster.setup='sleep 3; exit 3'"]
    jobs = slurm.submit("-m", *small, *place, "seed=1,2,3,4", "precision=bf16,fp8-linear")
    arrays = {job.id.partition("_")[0] for job in jobs}
    assert len(jobs) == 8 and len(arrays) == 1
    [name] = {*names(slurm, *jobs)}
    assert name.startswith("sweep-") and f"Comment=fp8-nemo {name}" in slurm.call(
        "scontrol", "show", "job", "-o", jobs[0].id
    )
    running = set()
    while {job.id for job in jobs} & {*slurm.queue()}:
        states = slurm.call("squeue", "--array", "-h", f"--name={name}", "-o", "%T").split()
        running.add(states.count("RUNNING"))
        time.sleep(0.3)
    assert max(running) == 2
    assert all("cluster.setup failed with code 3" in job.log for job in jobs)
    told = slurm.verb("queue", tmp_path / "o").stdout
    assert told.startswith("tiny-llama: 8 failed") and "cluster.setup failed with" in told


def test_a_sweep_without_arrays_is_single_jobs_of_which_each_waits_for_the_nth_before(
    slurm_without_arrays, small, tmp_path
):
    slurm = slurm_without_arrays
    said = subprocess.run(
        ["sbatch", "--array=0-1", "--wrap=true"],
        env=slurm.environment, capture_output=True, text=True,
    )  # fmt: skip
    assert "Invalid job array specification" in said.stderr
    place = ["cluster.max_running=2", "cluster.nodelist=node1", HOLD]
    jobs = slurm.submit("-m", *small, *place, "seed=1,2,3")
    free, _, waits = (job.state["Dependency"] for job in jobs)
    assert free == "(null)" and waits.startswith(f"afterany:{jobs[0].id}")
    assert {*names(slurm, *jobs)} == {jobs[0].path.relative_to(tmp_path / "o").parent.as_posix()}
    done = slurm.verb("queue", tmp_path / "o", "--cancel")
    assert done.stdout.splitlines()[-1] == f"cancelled: {', '.join(job.id for job in jobs)}"


def test_gpus_are_asked_for_where_slurm_counts_them_and_as_gres_says(
    slurm, slurm_without_arrays, small, tmp_path, monkeypatch
):
    monkeypatch.delenv("NEMO_RL_ROOT", raising=False)
    line = ["model=qwen3-8b", "cluster=slurm", "cluster.interpreter=system"]
    planned = [each.verb("plan", *line).stdout for each in (slurm, slurm_without_arrays)]
    assert ["--gpus-per-node=8" in text for text in planned] == [False, True]
    [job] = slurm_without_arrays.submit(*small, HOLD, "cluster.gres='gpu:2'")
    assert job.state["TresPerNode"] == "gres:gpu:2"
    more = slurm_without_arrays.verb("grpo", *small, HOLD, "seed=2", "cluster.gres='gpu:9'")
    assert more.returncode == 2 and len(more.stderr.splitlines()) == 1, more.stderr
    assert "Requested node configuration is not available" in more.stderr
    slurm_without_arrays.verb("queue", tmp_path / "o", "--cancel")


def test_a_cancelled_sweep_is_shown_so_and_the_same_line_queues_it_again(slurm, small, tmp_path):
    line = ["-m", *small, HOLD, "seed=1,2"]
    jobs = slurm.submit(*line)
    shown = slurm.verb("queue", tmp_path / "o")
    assert shown.stdout.startswith("tiny-llama: 2 pending") and "JobHeldUser" in shown.stdout
    cancelled = slurm.verb("queue", tmp_path / "o", "--cancel")
    assert f"cancelled: {jobs[0].id}, {jobs[1].id}" in cancelled.stdout
    again = slurm.verb("queue", tmp_path / "o", "--cancel")
    assert "nothing of it is in the queue" in again.stdout and "2 stopped" in again.stdout
    assert len(slurm.submit(*line)) == 2
    slurm.verb("queue", tmp_path / "o", "--cancel")


def test_sixty_cells_are_queued_for_the_work_of_ten_lines(slurm, small, tmp_path):
    cells = ["precision=bf16,fp8-linear,fp8-kv-attn,fp8-e2e,fp8-e2e-kv-attn", "seed=1,2,3"]
    times = [spent()]
    slurm.submit(*small, HOLD, "seed=4")
    times.append(spent())
    jobs = slurm.submit("-m", *small, HOLD, *cells, "correction=none,tis,mis,geo-mis")
    times.append(spent())
    assert len(jobs) == 60 and len({job.id.partition("_")[0] for job in jobs}) == 1
    one, sixty = (after - before for before, after in pairwise(times))
    assert sixty < 10 * one
    assert slurm.verb("queue", tmp_path / "o", "--cancel").returncode == 0


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_where_runs_stand_fits_the_terminal(slurm, small, tmp_path, columns, monkeypatch):
    sweep = ["precision=bf16,fp8-kv-attn", "correction=none,geo-rs-tis", "seed=1234567,2"]
    slurm.submit("-m", *small, HOLD, *sweep)
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    lines = seen(columns, "queue", tmp_path / "o", kind="xterm")  # a dumb one is 80 wide to rich
    lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in lines]
    free = [line for line in lines if str(tmp_path) not in line]  # a path is not broken
    assert [line for line in free if len(line.rstrip()) > columns] == []
    for word in ("fp8-kv-attn-geo-rs-tis", "pending", "0/2", "JobHeldUser"):
        assert word in "\n".join(lines), "\n".join(lines)
    slurm.verb("queue", tmp_path / "o", "--cancel")


def test_another_users_job_has_the_directory_and_keeps_it(slurm, small, shared):
    line = [*small, f"outputs={shared}/o", HOLD]
    [job] = slurm.submit(*line)
    before = slurm.queue()
    other = slurm.verb_of_nobody("grpo", *line, home=shared)
    assert other.returncode == 0, other.stderr
    assert f"pending, job {job.id} of root" in other.stdout and "\njob " not in other.stdout
    assert {*slurm.queue()} <= {*before}
    assert (job.path / "job" / "id").read_text().strip() == job.id
    slurm.call("scancel", job.id)


def test_a_folder_that_only_its_owner_may_enter_is_one_line(slurm, small, shared):
    line = [*small, f"outputs={shared}/o", HOLD]
    assert slurm.verb("grpo", *line, umask=0o077).returncode == 0
    other = slurm.verb_of_nobody("grpo", *line, home=shared)
    assert other.returncode == 2 and len(other.stderr.splitlines()) == 1, other.stderr
    assert "cannot be read (Permission denied); set outputs=FOLDER" in other.stderr
    slurm.verb("queue", shared / "o", "--cancel")


def test_a_user_may_run_where_another_user_has_left_rays_files(slurm, small, shared):
    left = Path("/tmp/ray/ray_current_cluster")
    made = not left.exists()
    left.parent.mkdir(exist_ok=True)
    left.touch(0o644)
    try:
        line = [*small, f"outputs={shared}/o", FAST]
        done = slurm.verb_of_nobody("grpo", *line, home=shared)
        assert done.returncode == 0, done.stderr
        [path] = cells(shared / "o")
        job = Job(slurm, (path / "job" / "id").read_text().strip(), path).finished()
        assert "Ray did not end" not in job.log
        assert not list(Path("/tmp").glob(f"fp8-nemo-{job.id}-*"))
    finally:
        if made:
            left.unlink()


def test_words_that_a_queued_job_would_ignore_are_refused_or_told(slurm, small, tmp_path):
    [job] = slurm.submit(*small, HOLD, "seed=1")
    late = slurm.verb("grpo", *small, HOLD, "seed=1", "cluster.partition=wide", "cluster.mem=1")
    assert late.returncode == 2 and late.stdout == ""
    [line, mem] = late.stderr.splitlines()
    assert line.startswith(f"cluster.partition=wide: {job.path} is in the queue as job {job.id}")
    assert "with null, which stays; `scancel" in line and mem.startswith("cluster.mem=1: ")
    more = slurm.verb("grpo", "-m", *small, HOLD, "seed=1,2", "cluster.partition=wide")
    assert more.returncode == 0 and "note: cluster.partition=wide" in more.stdout
    assert more.stdout.count("\njob ") == 1
    slurm.verb("queue", tmp_path / "o", "--cancel")


def test_what_the_keys_say_reaches_slurm_and_the_job(slurm, small, tmp_path):
    reserve = ["reservation=mine", "starttime=now", "duration=30", "nodes=node2", "users=root"]
    slurm.call("scontrol", "create", *reserve, "flags=IGNORE_JOBS")
    try:
        keys = {
            "reservation": "mine", "constraint": "node2s", "nodelist": "node2", "mem": "500",
            "exclude": "node1", "comment": "'two words'", "mail": "me@example.org",
            "env": "['SEEN=a b',MY_TOKEN]",
            "setup": "'[ \"$SEEN$(printenv MY_TOKEN | wc -c)\" = \"a b13\" ] || exit 7'",
        }  # fmt: skip
        words = [f"cluster.{key}={value}" for key, value in keys.items()]
        missing = slurm.verb("grpo", *small, *words)
        assert missing.returncode == 2 and "cluster.env=MY_TOKEN: is not set" in missing.stderr
        [job] = slurm.submit(*small, *words, FAST, MY_TOKEN="word-of-mine")
        said = slurm.call("scontrol", "show", "job", "-o", job.id)
        for text in (
            "Reservation=mine", "Features=node2s", "ReqNodeList=node2", "ExcNodeList=node1",
            "MinMemoryNode=500M", "Comment=two words", "MailUser=me@example.org", "MailType=",
        ):  # fmt: skip
            assert text in said
        [after] = slurm.submit(*small, f"cluster.dependency={job.path}", HOLD, "seed=9")
        assert after.state["Dependency"].startswith(f"afterok:{job.id}")
        slurm.call("scancel", after.id)
        job.finished()
        shutil.rmtree(after.path)
        [free] = slurm.submit(*small, f"cluster.dependency={job.path}", HOLD, "seed=9")
        assert free.state["Dependency"] == "(null)"
        slurm.call("scancel", free.id)
        files = [path for path in (tmp_path / "o").rglob("*") if path.is_file()]
        assert not [path for path in files if b"word-of-mine" in path.read_bytes()]
    finally:
        slurm.call("scontrol", "delete", "reservation=mine")


def test_a_disk_that_fills_while_code_is_frozen_is_one_line_and_leaves_nothing(
    slurm, small, tmp_path
):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "none", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs the right to")
    try:
        before = slurm.queue()
        done = slurm.verb("grpo", *small, f"outputs={disk}/o")
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
        assert "No space left on device" in done.stderr
        assert {*slurm.queue()} <= {*before}
        assert {path.name for path in disk.glob("o/*")} == {".queue.lock", ".code"}
        assert list(disk.glob("o/.code/*")) == [] and cells(disk / "o") == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)
