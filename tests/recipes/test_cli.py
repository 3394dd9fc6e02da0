"""The verbs as a user types them, in processes of their own; most are forked, not started."""

import fcntl
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8_nemo.local.preflight import NEEDED_PACKAGES
from fp8_nemo.recipe.model_dir import SHIPPED, weights_digest
from fp8_nemo.runs import metrics, process, run_dir
from tests.conftest import SMALL, slowed, small_plan
from tests.forked import Typed, typed

ROOT = Path(__file__).parent.parent.parent


def verb(name: str, *arguments: str) -> subprocess.CompletedProcess:
    return typed(f"recipes.{name}", *arguments)


def started(name: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", f"recipes.{name}", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, **options)


def asked_in_its_imports(line, number, package) -> subprocess.CompletedProcess:
    """What a line of Python says that is sent a signal once the verbs' package is read."""
    command = [sys.executable, *line]
    timed = os.environ | {"PYTHONPROFILEIMPORTTIME": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=timed
    ) as child:
        assert child.stdout and child.stderr
        while not (read := child.stderr.readline()).endswith(f"| {package}\n"):
            assert read, "it ended before"
        child.send_signal(signal.Signals[number])
        said = [each for each in child.stderr if not each.startswith("import time:")]
        printed = child.stdout.read()
    return subprocess.CompletedProcess(command, child.returncode, printed, "".join(said))


def assert_refused(result: subprocess.CompletedProcess, *parts: str) -> None:
    assert result.returncode == 2, result
    assert result.stdout == ""
    [line] = result.stderr.strip().splitlines()
    for part in parts:
        assert part in line


def curve(path: Path) -> list[dict]:
    rows = metrics.read_metrics(path)
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


@pytest.mark.parametrize(
    "argument",
    [
        "modle=tiny-llama",
        "precision=fp8",
        "+grpo.stepz=1",
        "++grpo.stepz=1",
        "grpo.steps=zero",
        "experiment=none-such",
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_creates_nothing(tmp_path, argument):
    result = verb("grpo", argument, f"outputs={tmp_path}/outputs")
    assert_refused(result, argument.partition("=")[0])
    assert list(tmp_path.iterdir()) == []


def test_one_wrong_cell_of_a_sweep_starts_none(tmp_path):
    result = verb(
        "grpo",
        "-m",
        "precision=fp8-linear,bf16",
        "precision.train_linear=fp8",
        f"outputs={tmp_path}/outputs",
    )
    assert_refused(result, "precision.train_linear=fp8: needs", "(cell precision=bf16")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("grpo:\n  stepz: 3\n", "grpo.stepz=3: no such key; did you mean grpo.steps?"),
        ("defaults:\n  - override /precision: fp9\n", "fp9"),
        ("grpo: {steps: many}\n", "grpo.steps=many: must be a whole number"),
        ("grpo: 3\n", "grpo"),
    ],
)
def test_a_mistake_in_an_experiment_file_is_one_line(tmp_path, content, part):
    """In a copy of the clone, so that no stray option shows up in other tests."""
    subprocess.run(["cp", "-r", "conf", "recipes", "fp8_nemo", str(tmp_path)], cwd=ROOT, check=True)
    (tmp_path / "fp8_nemo" / "conf").symlink_to(tmp_path / "conf")
    (tmp_path / "conf" / "experiment" / "wrong.yaml").write_text(f"# @package _global_\n{content}")
    code = "import sys; from recipes.grpo import main; sys.exit(main())"
    result = subprocess.run(
        [sys.executable, "-c", code, "experiment=wrong", f"outputs={tmp_path}/outputs"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert_refused(result, part)
    assert not (tmp_path / "outputs").exists()


def test_unwritable_outputs_are_refused(tmp_path):
    (tmp_path / "file").touch()
    assert_refused(
        verb("grpo", *SMALL, f"outputs={tmp_path}/file/outputs"), "outputs=", "cannot be written"
    )


def test_a_starting_checkpoint_cut_short_is_refused_before_anything_exists(tmp_path):
    subprocess.run(["cp", "-r", str(SHIPPED / "tiny-llama"), str(tmp_path / "model")], check=True)
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    result = verb("grpo", *SMALL, f"model.path={tmp_path}/model", f"outputs={tmp_path}/outputs")
    assert_refused(result, "model.safetensors: is cut short by 1000 bytes")
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("data", "taught"),
    [
        ([], ""),
        (["data=running-sum"], " data=running-sum"),
        (["data=running-sum", "data.difficulty=60"], " data=running-sum data.difficulty=60"),
    ],
)
def test_a_missing_model_says_how_to_make_it(data, taught, tmp_path):
    model, outputs = f"{tmp_path}/none", f"outputs={tmp_path}/outputs"
    result = verb("grpo", "model=small-llama", f"model.path={model}", outputs, *data)
    line = f"python -m recipes.make_model {model} model=small-llama{taught} makes it"
    assert_refused(result, "no such folder", line)
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("model", "other", "line"),
    [
        ("tiny-llama", "tiny-qwen3-moe", "model.shape.experts=0: {} has num_experts=4"),
        ("tiny-qwen3-moe", "tiny-llama", "model.shape.experts=4: {} has num_experts=0"),
        (
            "tiny-qwen3-moe model.shape.expert_ffn=256",
            "tiny-qwen3-moe",
            "model.shape.expert_ffn=256: {} has moe_intermediate_size=128",
        ),
    ],
)
def test_a_folder_with_another_kind_of_model_is_refused(model, other, line, tmp_path):
    folder = SHIPPED / other
    words = f"model={model}".split()
    words += [f"model.path={folder}", f"outputs={tmp_path}/outputs"]
    done = verb("grpo", *words)
    assert (done.returncode, done.stdout) == (2, "")
    said = done.stderr.strip().splitlines()
    assert line.format(folder) in said
    assert all(each.startswith("model.shape.") and str(folder) in each for each in said)


def test_the_local_backend_does_not_look_at_nemo_rl(tmp_path):
    own = os.environ | {"NEMO_RL_ROOT": str(tmp_path)}
    for model, code in (("tiny-llama", 0), ("llama31-8b", 2)):
        command = [sys.executable, "-m", "recipes.plan", f"model={model}"]
        done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, timeout=120)
        assert done.returncode == code, done.stderr


def without_torch(name, *arguments):
    """A verb where torch cannot be imported."""
    code = (
        f"import runpy, sys; sys.modules['torch'] = None; sys.argv = {['', *arguments]}; "
        f"runpy.run_module('recipes.{name}', run_name='__main__')"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_making_a_model_takes_no_flag_for_a_folder():
    assert_refused(verb("make_model", "--model"), "the first argument is the folder to make")
    assert not (ROOT / "--model").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("model=qwen3-8b", "model.shape.layers=2", "data=arithmetic"),
        ("model=tiny-qwen3-moe", "model.shape.expert_ffn=96"),
    ],
)
def test_any_model_can_be_made_small_and_none_is_held_against_a_precision(words, tmp_path):
    """As far as torch, which is hidden: what would come then is the training."""
    done = without_torch("make_model", f"{tmp_path}/a,b", *words)
    assert_refused(done, "torch: not installed for")


@pytest.mark.parametrize("word", ["-m", "precision=fp8-e2e", "seeds=1"])
def test_making_a_model_takes_what_makes_one_and_nothing_else(tmp_path, word):
    done = verb("make_model", str(tmp_path / "new"), "model=tiny-llama", "seed=1", word)
    assert_refused(done, f"{word}: a model is made of model, data, seed")


@pytest.mark.parametrize(
    ("name", "flag", "of_its_own"),
    [
        ("plan", "--help", "Show whether a run fits"),
        ("grpo", "-h", "The same line again resumes"),
    ],
)
def test_a_verb_tells_what_it_is_for_and_what_there_is_to_choose(name, flag, of_its_own):
    done = verb(name, flag)
    assert done.returncode == 0 and done.stderr == ""
    assert of_its_own in done.stdout and "  precision   bf16 " in done.stdout


@pytest.mark.parametrize(("name", "flags"), [("plan", ["-m", "--keys"]), ("grpo", ["-m"])])
def test_an_unknown_flag_is_sent_to_the_help_which_lists_every_flag(name, flags):
    assert_refused(verb(name, "--key"), "--key: unknown flag; --help lists them")
    shown = verb(name, "--help").stdout
    assert all(f"\n  {flag}" in shown for flag in [*flags, "-h, --help", "--version"])


@pytest.mark.parametrize("name", ["run", "check_cluster"])
def test_a_verb_of_one_run_directory_tells_what_it_is_for(name):
    done = verb(name, "--help")
    assert done.returncode == 0 and done.stderr == "" and f"recipes.{name} " in done.stdout


def test_a_broken_line_of_data_is_refused_with_file_and_line(tmp_path):
    line = '{"input": "1+2", "output": "3"}\n'
    (tmp_path / "train.jsonl").write_text(line * 5 + '{"input": "1+2", "out\n' + line)
    (tmp_path / "validation.jsonl").write_text(line)
    result = verb(
        "grpo", *SMALL[:-1], "data=jsonl", f"data.path={tmp_path}", f"outputs={tmp_path}/outputs"
    )
    assert_refused(result, "train.jsonl:6: ")
    assert not (tmp_path / "outputs").exists()


def test_a_nemo_cell_without_a_checkout_says_so_and_creates_nothing(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "NEMO_RL_ROOT"}
    arguments = ["backend=nemo", "glue=stock", f"outputs={tmp_path}/outputs"]
    result = started("grpo", *arguments, env=environment)
    assert_refused(result, "cluster.nemo_root=null: backend=nemo runs in NeMo RL", "NEMO_RL_ROOT")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        "grpo outputs={0}/outputs",
        "make_model {0}/model model=tiny-llama",
        "measure_mismatch {0}/run",
        "quantize_checkpoint {0}/source {0}/target",
    ],
)
def test_what_needs_torch_says_so_where_there_is_none(line, tmp_path):
    result = without_torch(*line.format(tmp_path).split())
    assert_refused(result, "torch: not installed for", "pip install 'fp8-nemo[local]'")
    assert list(tmp_path.iterdir()) == []


def test_the_local_extra_is_what_a_run_asks_for():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]["local"]
    assert tuple(re.match(r"\w+", each)[0] for each in extra) == NEEDED_PACKAGES


def test_a_plan_is_printed_fast_without_torch(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    result = started("plan", "model=llama31-8b", "precision=fp8-kv-attn", f"outputs={tmp_path}")
    assert result.returncode == 0 and "224 FP8" in result.stdout
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert spent < 3 * slowed()  # 1 s on an idle core
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_says_once_what_all_its_runs_share(tmp_path):
    line = ("model=llama31-8b", f"outputs={tmp_path}")
    done = verb("plan", "-m", *line, "precision=bf16,fp8-kv-attn", "seed=1,2")
    assert done.returncode == 0, done.stderr
    once, each = "\n data ", "\n run directory "
    assert (done.stdout.count(once), done.stdout.count(each)) == (1, 4)
    assert "all 4 runs" in done.stdout and "layout 2" not in done.stdout
    assert "layout 2" in verb("plan", *line).stdout


@pytest.mark.parametrize("called", [["recipes.plan"], ["recipes.cli", "plan"]])
def test_a_plan_whose_reader_has_gone_ends_without_a_traceback(called):
    command = [sys.executable, "-m", *called, "--keys", "model=qwen3-30b-a3b"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as plan:
        assert plan.stdout and plan.stderr
        pipe, seen = plan.stdout.fileno(), b""
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)  # less than the last line
        while b"The same with NeMo RL alone" not in seen:
            seen += (part := os.read(pipe, 256))
            assert part, "it ended before"
        plan.stdout.close()  # as `| head` does once it has its lines
        assert plan.stderr.read() == b""


def test_a_run_is_finished_once_extended_by_more_steps_and_else_left_alone(tmp_path):
    line = [*SMALL, f"outputs={tmp_path}/outputs", "precision=fp8-linear"]
    first = verb("grpo", *line)
    assert first.returncode == 0, first.stderr
    [path] = (tmp_path / "outputs").glob("*/*/*")
    whole = curve(path)
    environment = json.loads((path / "environment.json").read_text())
    assert environment["versions"]["torch"]
    assert environment["weights"] == weights_digest(SHIPPED / "tiny-llama")
    again = verb("grpo", *line)
    assert again.returncode == 0 and "finished, 2 steps" in again.stdout
    assert curve(path) == whole
    assert verb("grpo", *line, "grpo.steps=3").returncode == 0
    assert [row["step"] for row in curve(path)] == [0, 1, 2, 3]
    assert curve(path)[:2] == whole[:2]
    assert len(list((path / "log").iterdir())) == 2
    whole = curve(path)
    (path / "metrics.jsonl").unlink()
    assert verb("grpo", *line, "grpo.steps=3").returncode == 0
    assert curve(path) == whole, "from the checkpoint"
    attempts = json.loads((path / "environment.json").read_text())["attempts"]
    assert [[*each] for each in attempts] == [["started", "ended"]] * 3


def test_a_damaged_environment_is_one_line(tmp_path):
    line = [*SMALL, f"outputs={tmp_path}/outputs", "precision=fp8-linear"]
    assert verb("grpo", *line).returncode == 0
    [path] = (tmp_path / "outputs").glob("*/*/*")
    (path / "environment.json").write_text('{"versions": {')
    refused = verb("grpo", *line, "grpo.steps=3")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert f"{path}/environment.json: cannot be read, it is damaged; delete" in refused.stderr


def test_a_mismatch_is_measured_and_a_plan_held_against_it(tmp_path):
    run = verb("grpo", *SMALL, "precision=fp8-kv-attn", f"outputs={tmp_path}/outputs")
    assert run.returncode == 0, run.stderr
    [path] = (tmp_path / "outputs").glob("*/*/*")
    measured = verb("measure_mismatch", path, "--reject", "0.05")
    assert measured.returncode == 0, measured.stderr
    assert "bounds that reject 5.00%" in measured.stdout and "geo-rs" in measured.stdout
    file = path / "report" / "mismatch.json"
    assert measured.stdout.strip().endswith(str(file))
    strict = ["correction=tis", "correction.mask=token", "correction.high=0.5"]
    named = f"correction.measurement={file}"
    refused = verb("grpo", *SMALL, *strict, named, f"outputs={tmp_path}/more")
    assert_refused(refused, "correction.name=tis: would reject 100.0%", "max_reject=0.1")
    assert not (tmp_path / "more").exists()
    assert_refused(verb("measure_mismatch", tmp_path), "no mismatch/step-")
    for wrong in (["--reject", "1"], ["--mask", "k3"], []):
        bad = verb("measure_mismatch", *([path] if wrong else []), *wrong)
        assert_refused(bad, "recipes.measure_mismatch: error:")
    bad = verb("measure_mismatch", path, "--write", "mine-not")
    assert bad.returncode == 2 and "must begin with my" in bad.stderr


def test_an_unstable_step_ends_a_run_that_asks_for_it(tmp_path):
    line = [*SMALL, "precision=fp8-kv-attn", "correction=seq-mis", "correction.high=0.5"]
    line += ["correction.low=0.4", "correction.max_reject=1"]
    on = verb("grpo", *line, f"outputs={tmp_path}/on")
    assert on.returncode == 0 and "unstable: correction/ess" in on.stdout, on.stdout
    stopped = verb("grpo", *line, "grpo.stop_when_unstable=true", f"outputs={tmp_path}/stopped")
    assert stopped.returncode == 1
    assert "step 1 is unstable: correction/ess" in stopped.stderr.splitlines()[-1]
    [path] = (tmp_path / "stopped").glob("*/*/*")
    assert metrics.read_metrics(path)[-1]["health/state"] == 2


@pytest.mark.long  # tests/search/test_kills.py kills one process; here it is a line's whole group
def test_killed_at_any_moment_and_started_again_gives_the_undisturbed_curve(tmp_path):
    line = [*SMALL, "grpo.steps=40", "grpo.checkpoint_every=5", "grpo.validate_every=10"]
    assert verb("grpo", *line, f"outputs={tmp_path}/whole").returncode == 0
    [whole] = (tmp_path / "whole").glob("*/*/*")
    command = [sys.executable, "-m", "recipes.grpo", *line, f"outputs={tmp_path}/killed"]
    for after in (1, 9, 23):  # rows seen, then SIGKILL to the whole group, wherever it stands
        child = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True
        )
        while child.poll() is None:
            found = list((tmp_path / "killed").glob("*/*/*/metrics.jsonl"))
            if found and found[0].read_text().count("\n") > after:
                break
            time.sleep(0.01)
        os.killpg(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0
    [killed] = (tmp_path / "killed").glob("*/*/*")
    assert curve(killed) == curve(whole)


LASTING = [*SMALL, "grpo.steps=16", "grpo.checkpoint_every=1000", "grpo.validate_every=10"]
"""A run that is long enough to be asked to end."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    outputs = tmp_path_factory.mktemp("undisturbed")
    assert verb("grpo", *LASTING, f"outputs={outputs}").returncode == 0
    [path] = outputs.glob("*/*/*")
    return path


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=["USR1", "TERM"])
def test_asked_to_stop_it_saves_where_it_is_and_goes_on_from_there(tmp_path, undisturbed, number):
    line = ["recipes.grpo", *LASTING, f"outputs={tmp_path}/asked"]
    if number == signal.SIGUSR1:  # Slurm's goes to the run itself, not to what started it
        [frozen] = run_dir.freeze([small_plan(tmp_path / "asked", *LASTING)])
        line = ["recipes.run", frozen.path]
    child = Typed(*line)
    while not (found := list((tmp_path / "asked").glob("[!.]*/*/*/metrics.jsonl"))) or (
        found[0].read_text().count("\n") < 5
    ):
        time.sleep(0.01)
    os.kill(child.pid, number)
    asked = child.end()
    assert "is saved; the same line goes on" in asked.stderr
    assert asked.returncode == process.INTERRUPTED
    [path] = (tmp_path / "asked").glob("*/*/*")
    [saved] = run_dir.checkpoints(path)
    assert 4 <= run_dir.checkpoint_step(saved) == curve(path)[-1]["step"] < 16
    assert typed(*line).returncode == 0
    assert curve(path) == curve(undisturbed)


def test_other_versions_than_it_began_with_are_refused_unless_allowed(tmp_path):
    line = [*SMALL, f"outputs={tmp_path}"]
    assert verb("grpo", *line).returncode == 0
    [path] = tmp_path.glob("*/*/*")
    environment = json.loads((path / "environment.json").read_text())
    environment["versions"] |= {"torch": "2.5.0", "vllm": "0.9"}
    (path / "environment.json").write_text(json.dumps(environment))
    refused = verb("grpo", *line, "grpo.steps=3")
    assert refused.returncode == 2 and len(refused.stderr.strip().splitlines()) == 2
    assert f"began with torch 2.5.0, here is {torch.__version__}" in refused.stderr
    assert "began with vllm 0.9, here is none" in refused.stderr
    assert curve(path)[-1]["step"] == 2
    allowed = verb("grpo", *line, "grpo.steps=3", "cluster.other_versions=allow")
    assert allowed.returncode == 0 and curve(path)[-1]["step"] == 3


def test_a_run_that_could_learn_nothing_says_so(tmp_path):
    for name in ("train", "validation"):
        lines = [f'{{"input": "{n}+1", "output": "far beyond four tokens"}}\n' for n in range(64)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    data = ["data=jsonl", f"data.path={tmp_path}"]
    said = [verb("grpo", *SMALL, f"outputs={tmp_path}/{n}", *data[: 2 * n]).stdout for n in (0, 1)]
    assert ["note: no step had a gradient" in each for each in said] == [False, True]
    assert "grpo.max_new_tokens may cut right answers off" in said[1]
    scale = ["precision=fp16", "precision.loss_scale=1e10"]
    skipped = verb("grpo", *SMALL, f"outputs={tmp_path}/skipped", *scale).stdout
    assert "every gradient overflowed" in skipped and "same reward" not in skipped
    tight = ["precision=fp8-linear", "correction=mis", "correction.low=0", "correction.high=1e-6"]
    rejected = verb("grpo", *SMALL, f"outputs={tmp_path}/tight", *tight).stdout
    assert "correction/masked_fraction" in rejected and "had a gradient" not in rejected


def test_other_problems_or_weights_than_it_began_with_are_refused_unless_allowed(tmp_path):
    shutil.copytree(SHIPPED / "tiny-llama", tmp_path / "model")
    for name in ("train", "validation"):
        lines = [f'{{"input": "{n}+1", "output": "{n + 1}"}}\n' for n in range(64)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    line = [*SMALL, "data=jsonl", f"data.path={tmp_path}", f"outputs={tmp_path}/outputs"]
    line.append(f"model.path={tmp_path}/model")
    assert verb("grpo", *line).returncode == 0
    [path] = (tmp_path / "outputs").glob("*/*/*")
    train = tmp_path / "train.jsonl"
    kept = train.read_text()
    train.write_text(kept.replace('"output": "1"', '"output": "7"'))
    refused = verb("grpo", *line, "grpo.steps=3")
    assert refused.returncode == 2 and "began with problems " in refused.stderr
    train.write_text(kept)
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    refused = verb("grpo", *line, "grpo.steps=3")
    assert refused.returncode == 2 and "began with weights " in refused.stderr
    assert curve(path)[-1]["step"] == 2
    assert verb("grpo", *line, "grpo.steps=3", "cluster.other_versions=allow").returncode == 0


def test_a_checkpoint_cut_short_is_named_and_the_one_before_it_serves(tmp_path):
    line = [*SMALL, "grpo.steps=4", "grpo.checkpoint_every=1", f"outputs={tmp_path}/outputs"]
    assert verb("grpo", *line).returncode == 0
    [path] = (tmp_path / "outputs").glob("*/*/*")
    whole = curve(path)
    last = path / "checkpoints" / "step-000004"
    tensors = last / "state.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:5000])
    result = verb("grpo", *line, "grpo.steps=5")
    assert_refused(result, "step-000004: state.safetensors is cut short", "delete this folder")
    assert curve(path) == whole and len(list((path / "log").iterdir())) == 1
    assert run_dir.read_plan(path).recipe.grpo.steps == 4
    subprocess.run(["rm", "-r", str(last)], check=True)
    assert verb("grpo", *line, "grpo.steps=5").returncode == 0
    assert [row["step"] for row in curve(path)] == [0, 1, 2, 3, 4, 5]


def test_a_run_directory_that_is_none_is_refused(tmp_path):
    assert_refused(verb("run", tmp_path), "no run directory")
    assert_refused(verb("run"), "RUN_DIR: must be given")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("compare", "PATH: must be given"),
        ("compare x --htm", "--htm: no such flag or argument; --help lists them"),
        ("measure_mismatch x --reject", "--reject: needs a value"),
        ("measure_mismatch x --reject x", "--reject: x must be a number, as 0.02"),
        ("measure_mismatch x --reject 2", "--reject: 2 must be above 0 and below 1"),
        ("measure_mismatch x --mask k3", "--mask=k3: must be one of "),
    ],
)
def test_what_a_verb_cannot_read_is_told_in_our_own_words(line, said, capsys):
    name, *words = line.split()
    with pytest.raises(SystemExit) as ended:
        import_module(f"fp8_nemo.recipes.{name}").main(words)
    assert ended.value.code == 2
    [told] = capsys.readouterr().err.splitlines()
    assert f"error: {said}" in told


def test_a_sweep_runs_every_cell_and_compare_reads_them(tmp_path):
    both = "precision=bf16,fp8-linear"
    result = started("grpo", "-m", *SMALL, both, f"outputs={tmp_path}/outputs")
    assert result.returncode == 0, result.stderr
    assert len(list((tmp_path / "outputs").glob("*/*/*/metrics.jsonl"))) == 2
    compared = started("compare", tmp_path / "outputs" / "tiny-llama")
    assert compared.returncode == 0, compared.stderr
    report = Path(compared.stdout.strip().splitlines()[-1].split()[-1])
    assert "fp8-linear" in report.read_text() and list(report.parent.glob("*.png"))


@pytest.mark.parametrize("interrupt", [os.killpg, os.kill], ids=["ctrl-c", "kill -INT"])
def test_ctrl_c_stops_run_and_sweep_with_one_line_and_the_run_goes_on_later(tmp_path, interrupt):
    line = ["-m", *SMALL, "grpo.steps=200", "grpo.checkpoint_every=2", "seed=1,2"]
    command = [sys.executable, "-m", "recipes.grpo", *line, f"outputs={tmp_path}/outputs"]
    child = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not list((tmp_path / "outputs").glob("[!.]*/*/*/checkpoints/step-*")):
        assert child.poll() is None
        time.sleep(0.02)
    interrupt(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    asked, said = errors.strip().splitlines()
    assert asked.endswith("saves after this step; Ctrl-C again stops at once")
    assert "stopped, step " in said and said.endswith(" is saved; the same line goes on")
    assert len(list((tmp_path / "outputs").glob("*/*/*/metrics.jsonl"))) == 1


def test_ctrl_c_while_a_cell_still_imports_ends_the_sweep(tmp_path):
    line = ["-m", *SMALL, "seed=1,2", f"outputs={tmp_path}/outputs"]
    command = [sys.executable, "-m", "recipes.grpo", *line]
    child = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not list((tmp_path / "outputs").glob("[!.]*/*/*/plan.json")):
        assert child.poll() is None
        time.sleep(0.02)
    time.sleep(0.3)
    os.killpg(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130, errors
    assert not list((tmp_path / "outputs").glob("*/*/*/log/*")), "no cell began"


def test_a_plan_tells_what_the_nodes_must_have_and_this_machine_lacks(tmp_path):
    site = [
        "cluster=slurm",
        f"cluster.mounts=[{tmp_path}/none:/data]",
        "cluster.container=/no.sqsh",
    ]
    done = verb("plan", "model=llama31-8b", *site)
    assert done.returncode == 0, done.stderr
    assert "note: cluster.container: /no.sqsh is not on this machine" in done.stdout
    assert done.stdout.count(f"note: cluster.mounts: {tmp_path}/none is not") == 1


def test_a_cell_that_was_killed_is_named_and_the_next_one_runs(tmp_path):
    line = ["-m", *SMALL, "grpo.steps=16", "seed=1,2", f"outputs={tmp_path}/outputs"]
    child = Typed("recipes.grpo", *line)
    while not list((tmp_path / "outputs").glob("[!.]*/*/s1-*/metrics.jsonl")):
        assert child.is_alive
        time.sleep(0.02)
    [cell] = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    os.kill(int(cell), signal.SIGKILL)
    ended = child.end()
    assert ended.returncode == 137
    [said] = [line for line in ended.stderr.splitlines() if "killed by" in line]
    assert "/s1-" in said and ": killed by signal 9 (Killed), often for lack of memory" in said
    [other] = (tmp_path / "outputs").glob("*/*/s2-*")
    assert metrics.steps_done(metrics.read_metrics(other)) == 16


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_sweep_that_is_asked_to_end_does_also_where_its_cell_ends_well_or_by_it(number):
    code = (
        "from fp8_nemo.runs.process import call_verb\n"
        "print(call_verb('plan', 'model=tiny-llama'))\n"
    )
    ended = asked_in_its_imports(["-c", code], number, "fp8_nemo.recipes")
    assert ended.stdout.splitlines()[-1] == "130" and not ended.stderr


@pytest.mark.parametrize("verb", ["plan", "grpo", "queue", "compare", "cli", "run"])
def test_ctrl_c_while_a_verb_imports_ends_it_without_a_word(verb):
    ended = asked_in_its_imports(["-m", f"recipes.{verb}", "--version"], "SIGINT", "recipes")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone tells a child")
def test_a_run_ends_with_the_process_that_started_it_and_goes_on_later(tmp_path):
    line = [*SMALL, "grpo.steps=2000", "grpo.checkpoint_every=1000", f"outputs={tmp_path}/outputs"]
    command = [sys.executable, "-m", "recipes.grpo", *line]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while not list((tmp_path / "outputs").glob("[!.]*/*/*/metrics.jsonl")):
        assert parent.poll() is None
        time.sleep(0.02)
    [child] = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    parent.kill()
    parent.wait()
    [path] = (tmp_path / "outputs").glob("*/*/*")
    until = time.monotonic() + 60
    while "ended" not in json.loads((path / "environment.json").read_text())["attempts"][0]:
        assert time.monotonic() < until, f"{child} trains on"
        time.sleep(0.05)
    [saved] = run_dir.checkpoints(path)
    assert 0 < run_dir.checkpoint_step(saved) < 1000, "it saved where it was asked to end"


def test_no_model_beyond_this_machine_is_made(tmp_path):
    said = "model=llama31-8b: has 8.0 billion parameters, and 3 are the most"
    assert_refused(verb("make_model", tmp_path / "new", "model=llama31-8b"), said)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_another_process_runs_is_refused(tmp_path):
    line = [*SMALL, f"outputs={tmp_path}/outputs"]
    assert verb("grpo", *line).returncode == 0
    [path] = (tmp_path / "outputs").glob("*/*/*")
    before = curve(path)
    with run_dir.locked(path):
        result = verb("grpo", *line, "grpo.steps=3")
    assert_refused(result, f"another process, {os.getpid()} on ", " is running it; wait")
    assert curve(path) == before


def test_a_weight_that_is_not_finite_stops_the_run_and_is_named(tmp_path):
    shutil.copytree(SHIPPED / "tiny-llama", tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][3, 5] = torch.nan
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    line = [*SMALL, "precision=fp8-linear", f"model.path={tmp_path}/model"]
    result = verb("grpo", *line, f"outputs={tmp_path}/outputs")
    [begun] = result.stdout.splitlines()
    assert result.returncode == 1 and begun.endswith(": starts, the first step may take a minute")
    [said] = result.stderr.strip().splitlines()
    assert said.endswith(f"refit failed: {name}: holds NaN or Inf in the trainer")
    [metrics] = (tmp_path / "outputs").glob("*/*/*/metrics.jsonl")
    assert metrics.read_text() == ""
