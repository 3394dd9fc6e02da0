"""One run of the driver: its environment, its log, its exit code."""

import json
import os
import shutil
import signal
import subprocess
import sys
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fp8_nemo.launch import driver
from fp8_nemo.nemo.worker_settings import WorkerSettings
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.model_dir import SHIPPED, weights_digest
from fp8_nemo.runs.metrics import append_metrics
from fp8_nemo.runs.provenance import starting_point, write_environment
from fp8_nemo.runs.run_dir import (
    checkpoint_step,
    checkpoints,
    freeze,
)

NEMO = ("backend=nemo", "glue=stock")


def test_the_reason_is_the_line_that_names_it_not_rays_wrapper():
    text = (
        "The actor died because of an error raised in its creation task\n  File x, line 1\n"
        "\x1b[36m(W pid=1)\x1b[0m ValueError: No available memory for the cache blocks.\n"
    )
    assert (
        driver._reason(RuntimeError(text))
        == "ValueError: No available memory for the cache blocks."
    )
    assert driver._reason(KeyError("reward")) == "KeyError: 'reward'"


def test_what_is_printed_goes_to_the_log_too(tmp_path, capsys):
    with driver.copied_to(tmp_path / "log"):
        print("seen")
        print("heard", file=sys.stderr)
    assert (tmp_path / "log").read_text() == "seen\nheard\n"
    assert capsys.readouterr() == ("seen\n", "heard\n")


@pytest.fixture
def made_run(tmp_path):
    """A run that saved one step, on a model and problems of its own; a line freezes it again."""
    for name in ("train", "validation"):
        lines = [f'{{"input": "{n}+1", "output": "{n + 1}"}}\n' for n in range(64)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    shutil.copytree(SHIPPED / "tiny-llama", tmp_path / "model")
    line = [*NEMO, "precision=bf16", "model=tiny-llama", f"model.path={tmp_path}/model"]
    line += ["data=jsonl", f"data.path={tmp_path}", f"outputs={tmp_path}/outputs"]

    def again(*more):
        [plan] = compose_plans([*line, *more])
        return plan, freeze([plan])[0].path

    plan, path = again()
    write_environment(path, **starting_point(plan.recipe, path))
    (path / "checkpoints" / "step_1").mkdir(parents=True)
    append_metrics(path, {"step": 1})
    return again


@pytest.fixture
def own_signals():
    """Give SIGUSR1 back, which the driver ignores for as long as its process lives."""
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("changed", ["weights", "problems"])
def test_other_weights_or_problems_than_it_began_with_are_refused_unless_allowed(
    made_run, own_signals, tmp_path, changed, capsys
):
    plan, path = made_run()
    began = json.loads((path / "environment.json").read_text())
    assert began["weights"] == weights_digest(SHIPPED / "tiny-llama")
    if changed == "problems":
        (tmp_path / "train.jsonl").open("a").write('{"input": "1+1", "output": "2"}\n')
    else:
        (tmp_path / "model" / "more.safetensors").write_bytes(b"other")
    assert driver.run(plan, path) == 2 and not list(path.glob("log/attempt-*"))
    assert f"{path}: began with {changed} {began[changed]}, here are" in capsys.readouterr().err
    allowed, _ = made_run("cluster.other_versions=allow")
    assert starting_point(allowed.recipe, path)[changed] == began[changed]


@pytest.mark.skipif(bool(find_spec("nemo_rl")), reason="NeMo RL is installed here")
def test_an_attempt_that_fails_is_one_line_and_a_traceback_in_its_log(
    made_run, own_signals, tmp_path, monkeypatch, capsys
):
    plan, path = made_run()
    for name in ("NEMO_RL_ROOT", "PYTHONPATH", "RAY_ADDRESS"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert driver.run(plan, path) == 1
    log = path / "log" / "attempt-1.log"
    line = f"{path}: ModuleNotFoundError: No module named 'nemo_rl' (full traceback: {log})\n"
    assert capsys.readouterr().err == line and "Traceback (most recent call" in log.read_text()


def test_nemo_rl_saves_before_the_jobs_end_unless_a_line_says_when(monkeypatch):
    def saves(*line):
        [recipe] = compose(["model=qwen3-8b", "cluster.save_before_end=600", *line])
        return driver.save_by(recipe, 900.0).get(driver.SAVE_BY, "as the line has it")

    monkeypatch.delenv("FP8_NEMO_JOB_END", raising=False)
    assert saves() is None, "in place of what a base file says"
    monkeypatch.setenv("FP8_NEMO_JOB_END", "")
    assert saves() is None, "as of a job without a limit"
    for end, left in (("100900", "01:03:36:40"), ("1000", "00:00:00:00")):
        monkeypatch.setenv("FP8_NEMO_JOB_END", end)
        assert saves() == left
        own = f"+nemo.checkpointing.{driver.SAVE_BY}=00:03:30:00"
        assert saves(own) == "as the line has it"


def test_workers_inherit_the_plan_and_a_variable_of_the_users_own_is_kept_and_told(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "environ", {**os.environ, "VLLM_NO_USAGE_STATS": "0"})
    line = [NEMO[0], "model=tiny-llama", "glue=ours", f"outputs={tmp_path}/outputs"]
    [plan] = compose_plans(line)
    driver.prepare(plan, tmp_path)
    told = "VLLM_NO_USAGE_STATS=0: as the environment has it, the plan says 1\n"
    assert capsys.readouterr().out == told and os.environ["VLLM_NO_USAGE_STATS"] == "0"
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0"
    sent = WorkerSettings.from_environment()
    assert sent == WorkerSettings.of(plan.recipe, loss_corrects=True)
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)
    assert os.environ["NRL_MEGATRON_CHECKPOINT_DIR"].startswith(f"{tmp_path}/outputs/.megatron")


@pytest.mark.parametrize(("said", "threads"), [(None, 4), ("8", 8)])
def test_the_driver_takes_four_threads_unless_the_user_says_how_many(
    monkeypatch, tmp_path, said, threads
):
    def opened(*_):
        raise InterruptedError

    monkeypatch.setattr(driver.session, "opened", opened)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        with pytest.raises(InterruptedError):
            driver.train(compose_plans(NEMO)[0], tmp_path, tmp_path)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_workers_with_packages_of_their_own_see_our_vllm_plugin_of_a_clone(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "environ", {**os.environ, "PYTHONPATH": ""})
    line = [NEMO[0], "model=tiny-llama", "glue=ours", f"outputs={tmp_path}/outputs"]
    [plan] = compose_plans(line)
    driver.prepare(plan, tmp_path)
    venv.create(tmp_path / "worker")
    names = "import importlib.metadata as m; print(*m.entry_points(group='vllm.general_plugins'))"
    python = [str(tmp_path / "worker" / "bin" / "python"), "-P", "-c", names]
    done = subprocess.run(
        python, cwd="/", env=os.environ, capture_output=True, text=True, check=True
    )
    assert "fp8_nemo.nemo.receiver:register" in done.stdout


def test_a_jobs_compilers_keep_their_work_below_outputs_unless_the_user_says_where(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    ours = {*driver.CACHES, driver.VLLM_CACHE}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    line = [*NEMO, "model=tiny-llama", f"outputs={tmp_path}/outputs"]
    for cluster, said in (("here", None), ("slurm", f"{tmp_path}/outputs/.cache/triton")):
        monkeypatch.setattr(os, "environ", {**kept, "DG_JIT_CACHE_DIR": "/mine"})
        words = [f"cluster={cluster}", "cluster.interpreter=system"]
        driver.prepare(compose_plans([*line, *words])[0], tmp_path)
        assert os.environ.get("TRITON_CACHE_DIR") == said
        assert os.environ["DG_JIT_CACHE_DIR"] == "/mine"
    assert {path.name for path in (tmp_path / "outputs" / ".cache").iterdir()} == {
        "triton", "flashinfer", "vllm",
    }  # fmt: skip
    [plan] = compose_plans([*line, *words])
    monkeypatch.setattr(os, "environ", kept)
    driver.prepare(plan, tmp_path)
    [other] = compose_plans([*line, *words, "seed=2"])
    first = Path(os.environ.pop(driver.VLLM_CACHE))
    driver.prepare(other, tmp_path)
    second = Path(os.environ[driver.VLLM_CACHE])
    assert first != second, "vLLM's compiler breaks a folder that two runs write"
    assert first.is_dir() and first.is_relative_to(tmp_path / "outputs" / ".cache" / "vllm")


def test_a_run_names_the_tiles_of_the_package_that_runs_and_a_plan_none(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "environ", {**os.environ})
    line = [*NEMO, "model=tiny-qwen3-moe", "precision=fp8-linear", f"outputs={tmp_path}"]
    [plan] = compose_plans([*line, "cluster.interpreter=system"])
    driver.prepare(plan, tmp_path)
    folder = Path(os.environ["VLLM_TUNED_CONFIG_FOLDER"])
    assert folder.is_dir() and folder.is_relative_to(Path(driver.__file__).parents[1])
    assert "VLLM_TUNED_CONFIG_FOLDER" not in plan.nemo.environment


def test_checkpoints_of_both_backends_are_ordered_by_step(tmp_path):
    for name in ("step_9", "step_10", "tmp_step_11", "saving-000012"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [checkpoint_step(each) for each in checkpoints(tmp_path)] == [9, 10]
