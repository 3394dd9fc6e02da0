"""No secret of who submits is in what a job leaves: run directory, log, copy of the code."""

from tests.slurm.conftest import Slurm

PLANTED = {
    "HF_TOKEN": "hf_SEKRETsekretSEKRETsekret",
    "MY_PASSWORD": "SEKRET of two words",
    "WANDB_API_KEY": "SEKRET-not-named",
}


def test_a_whole_run_directory_and_the_code_beside_it_hold_no_planted_secret(
    slurm: Slurm, small, tmp_path
):
    """Of a job with its preflight on two nodes, whose setup uses the secret, and of one refused."""
    used = "cluster.setup='export MY_TOKEN=$HF_TOKEN; test -n \"$MY_PASSWORD\"'"
    named = ["cluster.nodes=2", "cluster.env=[HF_TOKEN,MY_PASSWORD]", used]
    refused = slurm.verb("grpo", *small, "+nemo.logger={wandb:{api_key:SEKRET", **PLANTED)
    assert refused.returncode == 2 and "SEKRET" not in refused.stdout + refused.stderr
    [job] = slurm.submit(*small, *named, **PLANTED)
    job.finished()
    for verb, argument in (("queue", job.path), ("compare", tmp_path / "o")):
        told = slurm.verb(verb, str(argument), **PLANTED)
        assert told.returncode == 0 and "SEKRET" not in told.stdout + told.stderr
    files = [path for path in (tmp_path / "o").rglob("*") if path.is_file()]
    within = {str(path.relative_to(tmp_path / "o").parent).split("/")[0] for path in files}
    assert ".code" in within and job.log and list(job.path.glob("log/attempt-1.log"))
    assert {"settings", "setup.sh", "srun", "id"} <= {each.name for each in files}
    for path in (job.path / "job").iterdir():  # who else may look learns the number alone
        closed = path.name not in ("id", "attempt")
        assert (path.stat().st_mode & 0o077 == 0) == closed, path
    for path in files:
        assert b"SEKRET" not in path.read_bytes(), path
