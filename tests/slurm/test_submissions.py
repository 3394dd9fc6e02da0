"""A submission that is killed, or finds the disk full: the same line queues each run once."""

import os
import random
import shutil
from pathlib import Path

import pytest

from tests.search.children import Child, Dies, undisturbed, verb
from tests.search.test_full_disk import HALF, Fills, disk
from tests.slurm.conftest import Job, Slurm

__all__ = ["disk"]  # a fixture

pytestmark = pytest.mark.long  # each of them queues real jobs, again and again


def submitted(environment: dict[str, str], *words: str) -> int:
    """Submit a line in this process."""
    os.environ.update(environment)
    return verb("grpo", *words)


def line(slurm: Slurm, small: list[str], outputs: Path):
    """Two cells, held in the queue, so that none begins meanwhile."""
    words = ["-m", *small[:-1], f"outputs={outputs}", "cluster.preflight=false", "seed=1,2"]
    return submitted, slurm.environment, *words, "cluster.extra=[--hold]"


def forget(slurm: Slurm, outputs: Path) -> None:
    """Take every job out of the queue, and delete what was made."""
    if queued := slurm.queue():
        slurm.call("scancel", *queued)
    shutil.rmtree(outputs)


def queued_once(slurm: Slurm, outputs: Path) -> list[Job]:
    """Return the job of each run; one that no run knows of ends by itself when it begins."""
    runs = sorted(outputs.glob("*/*/*/plan.json"))
    jobs = [Job(slurm, (each.parent / "job/id").read_text().strip(), each.parent) for each in runs]
    assert len(jobs) == 2 and {job.id for job in jobs} <= {*slurm.queue()}
    assert len({job.id for job in jobs}) == 2
    return jobs


def killed(slurm: Slurm, small: list[str], tmp_path: Path, kills: int) -> list[list[int]]:
    """Kill a submission so often; return the steps of each run that it queued in the end."""
    outputs, output, draw, done = tmp_path / "o", tmp_path / "output", random.Random(kills), 0
    call = line(slurm, small, outputs)
    seconds, changes = undisturbed(output, *call)
    queued_once(slurm, outputs)
    forget(slurm, outputs)
    while done < kills:
        part = draw.uniform(done, done + 1) / kills
        at = max(1, round(part * changes)) if done % 2 else None
        child = Child(output, *call, before=Dies(at))
        if child.kill(60 if at else draw.uniform(0, seconds)):
            done += 1
            continue
        assert child.end() == 0, child.error
        queued_once(slurm, outputs)
        forget(slurm, outputs)
    undisturbed(output, *call)
    jobs = queued_once(slurm, outputs)
    assert not [each for each in outputs.rglob("*") if any(part in each.name for part in HALF)]
    for number in {each.partition("_")[0] for each in slurm.queue()}:
        slurm.call("scontrol", "release", number)
    for job in jobs:
        job.finished(240)
        assert len(list((job.path / "log").glob("attempt-*"))) == 1
    return [[row["step"] for row in job.curve] for job in jobs]


def filled(slurm: Slurm, small: list[str], disk: Path, some: int) -> list[int]:
    """Fill the disk at so many moments of a submission; return its exit codes."""
    outputs, output, codes = disk / "o", disk.parent / "output", list[int]()
    call = line(slurm, small, outputs)
    _, changes = undisturbed(output, *call)
    forget(slurm, outputs)
    # The last changes are the jobs' numbers, of which Slurm has an array already.
    for at in (*range(2, changes - 1, max(1, changes // some)), changes - 1, changes):
        child = Child(output, *call, before=Fills(disk, at))
        code, where = child.end(), f"change {at} of {changes}: {child.error}"
        codes.append(code)
        (disk / "ballast").unlink()
        if code:
            assert code == 2 and child.error.count("\n") == 1, where
            assert "No space left" in child.error and str(disk) in child.error, where
            assert not slurm.queue(), where
        left = outputs.rglob("*") if outputs.exists() else ()
        assert not [each for each in left if any(part in each.name for part in HALF)], where
        undisturbed(output, *call)
        queued_once(slurm, outputs)
        forget(slurm, outputs)
    return codes


def test_a_submission_killed_six_times_queues_each_run_once(slurm, small, tmp_path):
    assert killed(slurm, small, tmp_path, 6) == [[0, 1, 2]] * 2


def test_a_submission_onto_a_full_disk_is_told_in_one_line_and_queues_nothing(slurm, small, disk):
    assert 2 in filled(slurm, small, disk, 4)


@pytest.mark.long
def test_a_submission_killed_a_hundred_times_queues_each_run_once(slurm, small, tmp_path):
    assert killed(slurm, small, tmp_path, 100) == [[0, 1, 2]] * 2


@pytest.mark.long
def test_a_submission_onto_a_disk_that_is_full_anywhere_queues_nothing(slurm, small, disk):
    assert 2 in filled(slurm, small, disk, 60)
