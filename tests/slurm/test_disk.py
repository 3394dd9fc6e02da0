"""A disk that is full when a job begins, or fills while it runs."""

import pytest

from tests.search.test_full_disk import Fills, disk
from tests.slurm.conftest import Job

__all__ = ["disk"]  # a fixture

FAST, HOLD = "cluster.preflight=false", "cluster.extra=[--hold]"


def steps(job: Job) -> list[int]:
    return [row["step"] for row in job.curve]


@pytest.mark.long
def test_a_job_that_begins_on_a_full_disk_ends_and_the_same_line_queues_it_again(
    slurm, small, disk
):
    line = [*small, f"outputs={disk}/o", FAST]
    [job] = slurm.submit(*line, HOLD)
    Fills(disk, 1)(1)
    slurm.call("scontrol", "release", job.id)
    job.wait(60)
    assert job.state["JobState"] == "FAILED" and job.state["Restarts"] == "0"
    assert (job.path / "job" / "id").read_text() == f"{job.id}\n"
    (disk / "ballast").unlink()
    [again] = slurm.submit(*line)
    assert again.path == job.path
    again.finished()
    assert steps(again) == [0, 1, 2]


def test_a_job_whose_disk_fills_is_not_requeued_and_the_same_line_goes_on(slurm, small, disk):
    """Though its exit code cannot be kept either: grpo.sbatch takes that of the step."""
    size = ["grpo.steps=45", "grpo.checkpoint_every=20", "grpo.validate_every=1000"]
    line = [*small, *size, f"outputs={disk}/o", FAST]
    [job] = slurm.submit(*line)
    job.wait(90, until=lambda job: len(steps(job)) >= 22)
    Fills(disk, 1)(1)
    job.wait(60)
    assert job.state["JobState"] == "FAILED" and job.state["Restarts"] == "0"
    assert not list(job.path.glob("checkpoints/saving-*"))
    (disk / "ballast").unlink()
    [again] = slurm.submit(*line)
    again.finished()
    assert steps(again) == [*range(46)]
