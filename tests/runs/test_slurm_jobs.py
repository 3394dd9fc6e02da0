"""The sbatch call and the files beside it, without a Slurm; tests/slurm has one."""

import shlex
from pathlib import Path

import pytest
from fp8_nemo.recipes.plan import main as print_plan

from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.plan import PlanError, plan_recipe
from fp8_nemo.recipe.compose import ComposeError, compose
from fp8_nemo.runs import sbatch, slurm
from fp8_nemo.runs.frozen_code import code_dir
from fp8_nemo.runs.metrics import RunDirError, append_metrics
from fp8_nemo.runs.run_dir import freeze, job_dir, run_path
from tests.conftest import SMALL, small_plan


@pytest.fixture
def slurm_plan(tmp_path):
    return lambda *words: small_plan(tmp_path / "outputs", "cluster=slurm", *words)


def queued_by(plan):
    return sbatch.sbatch_command(plan, code_dir(Path(plan.recipe.outputs)))


def nemo_plan(tmp_path, *words):
    cell = ["model=qwen3-8b", "cluster=slurm", f"outputs={tmp_path}/outputs"]
    return plan_recipe(compose([*cell, *words])[0])


def test_the_call_is_an_argument_list_that_ends_in_script_and_run_directory(slurm_plan, tmp_path):
    plan = slurm_plan("cluster.account=a b", "cluster.extra=['--mem=0','--comment=$(id) x']")
    call, path = queued_by(plan), run_path(plan)
    assert call[:3] == ["sbatch", "--parsable", f"--job-name={plan.cell}"]
    assert call[-2:] == [f"{code_dir(tmp_path / 'outputs')}/fp8_nemo/slurm/grpo.sbatch", str(path)]
    assert "--comment=fp8-nemo" in call and not [word for word in call if "--export" in word]
    assert "--account=a b" in call and call[-4:-2] == ["--mem=0", "--comment=$(id) x"]
    assert f"--output={path}/log/slurm-%j.out" in call
    assert "--requeue" in call and "--signal=B:USR1@600" in call and "--exclusive" in call
    assert not [word for word in call if word.startswith(("--partition", "--qos", "--gpus"))]
    assert "--no-requeue" in queued_by(slurm_plan("cluster.requeue=false"))


def test_plan_prints_the_call_that_would_be_made(capsys, tmp_path):
    words = [*SMALL, "cluster=slurm", "cluster.account=a b", f"outputs={tmp_path}/outputs"]
    assert print_plan(words) == 0
    call = capsys.readouterr().out.partition("Queued by:")[2].replace("\\\n", "")
    [plan] = compose_plans(words)
    assert shlex.split(call) == queued_by(plan)
    assert not (tmp_path / "outputs").exists()


def test_a_sweep_is_one_call_and_cells_of_other_options_are_another(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # without a Slurm that could have no arrays
    words = ["-m", *SMALL, "cluster=slurm", "seed=1,2", f"outputs={tmp_path}/o"]
    assert print_plan([*words, "cluster.max_running=1"]) == 0
    [call] = capsys.readouterr().out.replace("\\\n", "").split("Queued by:")[1:]
    call = shlex.split(call)
    [name] = [word for word in call if word.startswith("--job-name=")]
    links = Path(call[-1])
    assert links.parent == tmp_path / "o" / ".arrays" / f"{name.partition('=')[2]}-1"
    assert "--array=0-1%1" in call and f"--output={links}/%a/log/slurm-%A_%a.out" in call
    assert not (tmp_path / "o").exists()
    plans = [plan for nodes in "12" for plan in compose_plans([*words, f"cluster.nodes={nodes}"])]
    found = slurm.calls(plans)
    assert ["--nodes=1" in call for call in found] == [True, False]
    assert all("--array=0-1" in call for call in found)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("12", "afterok:12"), ("12_3", "afterok:12_3"), ("afterany:7:8", "afterany:7:8"),
        ("singleton", "singleton"),
    ],
)  # fmt: skip
def test_a_dependency_is_a_job_or_what_sbatch_calls_it(slurm_plan, given, said):
    assert f"--dependency={said}" in queued_by(slurm_plan(f"cluster.dependency={given}"))


def test_a_dependency_on_a_run_that_can_never_end_is_one_line(slurm_plan, tmp_path):
    [other] = freeze([slurm_plan("seed=2")])
    for path, said in ((other.path, "is neither finished nor queued"), (tmp_path, "no run dir")):
        with pytest.raises(RunDirError, match=said):
            queued_by(slurm_plan(f"cluster.dependency={path}"))
    job_dir(other.path).joinpath("id").write_text("31_4\n")
    plan = slurm_plan(f"cluster.dependency={other.path}")
    assert "--dependency=afterok:31_4" in queued_by(plan)
    for step in (1, 2):
        append_metrics(other.path, {"step": step})
    assert not [word for word in queued_by(plan) if word.startswith("--dependency")]


def test_the_jobs_environment_holds_what_is_given_and_names_what_is_secret(slurm_plan, monkeypatch):
    plan = slurm_plan("cluster.env=['A=b c',MY_TOKEN,MY_FOLDER]")
    monkeypatch.delenv("MY_FOLDER", raising=False)
    monkeypatch.delenv("MY_TOKEN", raising=False)
    assert [*sbatch.not_exported([plan])] == [
        "cluster.env=MY_TOKEN: is not set here; export it",
        "cluster.env=MY_FOLDER: is not set here; export it, or write MY_FOLDER=VALUE",
    ]
    monkeypatch.setenv("MY_TOKEN", "x")
    monkeypatch.setenv("MY_FOLDER", "y")
    assert [*sbatch.not_exported([plan])] == []
    assert "--export=ALL,MY_TOKEN,MY_FOLDER" in queued_by(plan)
    [frozen] = freeze([plan])
    sbatch.write_job_files(plan, Path("/code"))
    job = run_path(plan) / "job"
    sbatch.write_job_files(plan, Path("/code"))  # once more, over what is there
    for name in ("settings", "srun", "setup.sh"):
        assert (job / name).stat().st_mode & 0o777 == 0o600, name
    assert entries(frozen.path / "job" / "settings")[0] == "A=b c"


def test_a_percent_sign_in_outputs_is_no_pattern_of_slurms(tmp_path):
    plan = small_plan(tmp_path / "50%j", "cluster=slurm")
    [output] = [word for word in queued_by(plan) if word.startswith("--output")]
    assert "50%%j/" in output and output.endswith("slurm-%j.out")


def test_nemo_rl_asks_for_gpus_where_slurm_cannot_be_asked_whether_it_counts_them(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    call = queued_by(nemo_plan(tmp_path, "cluster.interpreter=system"))
    assert "--gpus-per-node=8" in call


def entries(path: Path) -> list[str]:
    return path.read_text().split("\0")[:-1]


def test_the_job_files_hold_what_was_typed_parted_by_nul(slurm_plan, tmp_path):
    plan = slurm_plan("cluster.setup='module load \"x\"; y'", "cluster.python=/a b/python")
    [frozen] = freeze([plan])
    sbatch.write_job_files(plan, Path("/code"))
    folder = frozen.path / "job"
    assert entries(folder / "settings")[:3] == [
        "FP8_NEMO_CODE=/code",
        "FP8_NEMO_PYTHON=/a b/python",
        "FP8_NEMO_STEPS=2",
    ]
    assert entries(folder / "srun") == []
    assert (folder / "setup.sh").read_text() == 'module load "x"; y\n'
    assert (frozen.path / "log").is_dir()


def test_a_container_sees_the_folders_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NEMO_RL_ROOT", raising=False)
    image = ["cluster.container=/i.sqsh", "cluster.mounts=[/shared,/a:/b]", "model.path=/m/llama"]
    options = sbatch.container_options(nemo_plan(tmp_path, *image))
    assert options[0] == "--container-image=/i.sqsh"
    assert options[1].removeprefix("--container-mounts=").split(",") == [
        *("/shared:/shared", "/a:/b", f"{tmp_path}:{tmp_path}"),
        *(f"{tmp_path}/outputs:{tmp_path}/outputs", "/m/llama:/m/llama"),
    ]
    assert sbatch.container_options(nemo_plan(tmp_path, "cluster.interpreter=system")) == []


def test_a_site_without_pyxis_enters_its_containers_by_a_command_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    enter = "cluster.enter=[apptainer,exec,'--bind={mounts}','--pwd={folder}','{image}']"
    image = ["cluster.container='/i{mounts}.sif'", "cluster.mounts=[/a:/b]"]
    plan = nemo_plan(tmp_path, enter, *image)
    assert sbatch.container_options(plan) == []
    mounted = f"/a:/b,{tmp_path}:{tmp_path},{tmp_path}/outputs:{tmp_path}/outputs"
    assert sbatch.enter_command(plan) == [
        *("apptainer", "exec", f"--bind={mounted}", f"--pwd={tmp_path}", "/i{mounts}.sif"),
    ]
    bare = ["cluster.container=null", "cluster.interpreter=system"]
    assert sbatch.enter_command(nemo_plan(tmp_path, enter, *bare)) == []
    assert sbatch.enter_command(nemo_plan(tmp_path, *image)) == []


def test_what_the_nodes_must_have_and_this_machine_lacks_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    srun = tmp_path / "srun"
    (tmp_path / "i.sqsh").touch()
    here = [f"cluster.container={tmp_path}/i.sqsh", f"cluster.mounts=[{tmp_path}:/data]"]
    away = [f"cluster.container={tmp_path}/j.sqsh", f"cluster.mounts=[{tmp_path}/none:/data]"]
    hub = ["cluster.container=nvcr.io/nvidia/nemo-rl:v0.7.0"]
    assert sbatch.container_notes([nemo_plan(tmp_path, *here), nemo_plan(tmp_path, *hub)]) == []
    plan = nemo_plan(tmp_path, *away)
    assert sbatch.container_notes([plan, plan]) == [
        f"cluster.container: {tmp_path}/j.sqsh is not on this machine; the nodes must have it",
        f"cluster.mounts: {tmp_path}/none is not on this machine; the nodes must have it",
    ]
    srun.write_text("#!/bin/sh\necho '      --container-image=PATH  [pyxis] the image to use'\n")
    srun.chmod(0o755)
    assert sbatch.container_notes([nemo_plan(tmp_path, *here)]) == []
    srun.write_text("#!/bin/sh\necho '  -n, --ntasks=ntasks'\n")
    [note] = sbatch.container_notes([nemo_plan(tmp_path, *here)])
    assert note.startswith("cluster.container: srun has no --container-image (pyxis) here")
    entered = ["cluster.enter=[enter,'{image}']", *here]
    assert sbatch.container_notes([nemo_plan(tmp_path, *entered)]) == []


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("cluster.time=4h", "cluster.time=4h: must be a limit as Slurm reads it"),
        ("cluster.time=43200", "quote it"),
        ("cluster.time=9", "must be less than the 540 seconds"),
        ("cluster.extra=['mem=0']", "cluster.extra=mem=0: must be options of sbatch"),
        ("cluster.extra=[--mem=0]", "quote a value that holds ="),
        ("cluster.mounts=[shared]", "cluster.mounts=shared: must be an absolute folder"),
    ],
)
def test_a_mistake_in_the_cluster_is_one_line(word, said):
    with pytest.raises(ComposeError) as found:
        compose_plans(["cluster=slurm", word])
    assert said in str(found.value) and len(found.value.lines) == 1


def test_an_image_is_needed_for_environments_of_nemo_rls_own(tmp_path):
    with pytest.raises(PlanError, match=r"set cluster\.container=IMAGE"):
        nemo_plan(tmp_path)
