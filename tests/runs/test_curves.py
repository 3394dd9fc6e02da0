"""A curve has a row for every step, standard JSON, and times: whatever ended the run before."""

import ast
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fp8_nemo.recipe.plain import read_json, to_json
from fp8_nemo.runs import metrics, provenance, run_dir
from tests.conftest import small_plan

ROOT = Path(__file__).parents[2]
STEPS = range(7)


@pytest.fixture
def run(make_plan):
    """A run of six steps with a checkpoint after three and after six; its plan and directory."""
    plan = make_plan("grpo.steps=6")
    [frozen] = run_dir.freeze([plan])
    for step in STEPS:
        metrics.append_metrics(frozen.path, {"step": step, "reward/mean": step / 8})
        if step in (3, 6):
            with run_dir.new_checkpoint(frozen.path, step):
                pass
    return plan, frozen.path


def lose(path: Path, *steps: int) -> None:
    kept = [row for row in metrics.read_metrics(path) if row["step"] not in steps]
    metrics.write_rows(path / metrics.METRICS, kept)


def longer(plan) -> list[run_dir.Frozen]:
    return run_dir.freeze([small_plan(Path(plan.recipe.outputs), "grpo.steps=9")])


@pytest.mark.parametrize("lost", [(4,), (0, 1, 2), (6,), tuple(STEPS)], ids=str)
def test_rows_that_a_checkpoint_has_are_restored_from_it(run, lost):
    plan, path = run
    whole = metrics.read_metrics(path)
    lose(path, *lost)
    assert longer(plan)[0].state == "unfinished"
    assert run_dir.rewind(path, "local").name == "step-000006"
    assert metrics.read_metrics(path) == whole


def test_a_deleted_and_a_cut_file_are_restored_and_the_last_row_counts_as_undone(run):
    plan, path = run
    whole, file = metrics.read_metrics(path), path / metrics.METRICS
    text = file.read_text()
    for damage in (file.unlink, lambda: file.write_text(text[:-9])):
        damage()
        assert run_dir.freeze([plan])[0].state == "unfinished"
        run_dir.rewind(path, "local")
        assert metrics.read_metrics(path) == whole
        assert run_dir.freeze([plan])[0].state == "finished"


def test_a_row_that_is_nowhere_is_refused_in_one_line_unless_the_hole_is_agreed_to(run):
    plan, path = run
    (path / "checkpoints" / "step-000006" / metrics.ROWS).unlink()
    lose(path, 2, 4, 5)
    with pytest.raises(metrics.RunDirError) as refused:
        longer(plan)
    [line] = str(refused.value).splitlines()
    assert f"{path}: metrics.jsonl lacks step 2, 4-5 of 6" in line and '{"step": 2}' in line
    assert run_dir.read_plan(path) == plan, "nothing was frozen"
    with (path / metrics.METRICS).open("a") as file:
        file.writelines(f'{{"step": {step}}}\n' for step in (2, 4, 5))
    assert longer(plan)[0].state == "unfinished"
    run_dir.rewind(path, "local")
    assert [row["step"] for row in metrics.read_metrics(path)] == [*STEPS]


def test_a_checkpoints_copy_that_is_damaged_is_no_copy(run):
    plan, path = run
    (path / "checkpoints" / "step-000006" / metrics.ROWS).write_bytes(b"\xff\n")
    assert run_dir.freeze([plan])[0].state == "finished", "nobody asks the copy"
    lose(path, 2)
    with pytest.raises(metrics.RunDirError, match="lacks step 2 of 6"):
        longer(plan)


def test_a_row_is_one_of_numbers(tmp_path):
    for line in ('{"step": "1"}', '{"step": true}', '{"step": 1, "x": "y"}', "[" * 10_000, "3"):
        (tmp_path / metrics.METRICS).write_text(f'{{"step": 0}}\n{line}\n')
        with pytest.raises(metrics.RunDirError, match=r"metrics\.jsonl:2: not a step's JSON"):
            metrics.read_metrics(tmp_path)


def strict(text: str):
    """Read JSON as others do, who have no NaN."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_a_number_that_is_not_finite_is_null_on_disk_and_nan_again_when_read(tmp_path):
    row = {"step": 1, "mismatch/kl": math.inf, "reward/mean": math.nan, "val/accuracy": 0.5}
    metrics.append_metrics(tmp_path, row)
    text = (tmp_path / metrics.METRICS).read_text()
    assert strict(text) == row | {"mismatch/kl": None, "reward/mean": None}
    [read] = metrics.read_metrics(tmp_path)
    assert math.isnan(read["mismatch/kl"]) and math.isnan(read["reward/mean"])
    assert strict(to_json([{"a": (math.nan, [-math.inf, 1])}])) == [{"a": [None, [None, 1]]}]


def test_what_earlier_versions_wrote_is_read(tmp_path):
    (tmp_path / metrics.METRICS).write_text('{"step": 1, "a": NaN, "b": Infinity}\n')
    [row] = metrics.read_metrics(tmp_path)
    assert math.isnan(row["a"]) and row["b"] == math.inf
    file = tmp_path / metrics.METRICS
    metrics.write_rows(file, metrics.rows_until(tmp_path, None, 1, 1))
    assert strict((tmp_path / metrics.METRICS).read_text())["b"] is None


def test_nothing_here_writes_json_that_is_none():
    """Every `json.dump` refuses NaN, or is the one function that writes it as null."""
    calls = [
        (path, node)
        for folder in ("fp8_nemo", "recipes", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "tests" not in path.parts and path.name != "probe.py"  # whose text has words alone
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("json.dump", "json.dumps")
    ]
    assert calls
    for path, call in calls:
        assert "allow_nan=False" in ast.unparse(call), f"{path}:{call.lineno}"


def test_nested_beyond_all_use_is_no_json():
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json("[" * 100_000)


def attempts(path: Path) -> list[dict[str, str]]:
    return provenance.read_environment(path)[provenance.ATTEMPTS]


def test_each_attempt_keeps_its_start_and_its_end_however_it_ended(tmp_path):
    with provenance.attempt(tmp_path):
        assert [*attempts(tmp_path)[0]] == ["started"]
    for error in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error), provenance.attempt(tmp_path, weights="abc"):
            raise error
    found = attempts(tmp_path)
    assert len(found) == 4 and all([*each] == ["started", "ended"] for each in found)
    times = [each[key] for each in found for key in ("started", "ended")]
    assert times == sorted(times) and all(time.endswith("+00:00") for time in times)
    assert provenance.read_environment(tmp_path)["weights"] == "abc"


@pytest.mark.parametrize(("number", "ended"), [(signal.SIGTERM, True), (signal.SIGKILL, False)])
def test_a_signal_ends_an_attempt_and_what_can_be_caught_leaves_its_time(tmp_path, number, ended):
    code = (
        "import sys, time; from pathlib import Path; from fp8_nemo.runs.provenance import attempt\n"
        "with attempt(Path(sys.argv[1])):\n    print('in', flush=True)\n    time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline() == b"in\n"
        os.kill(child.pid, number)
        assert child.wait(30) == -number
    [found] = attempts(tmp_path)
    assert ("ended" in found) == ended


@pytest.mark.parametrize("text", ["{", "[]", "", '{"versions": 3}', "\xff"])
def test_a_damaged_environment_is_named(run, text):
    _, path = run
    (path / "environment.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(metrics.RunDirError, match=r"environment\.json: cannot be read, it is dam"):
        provenance.changed_versions(path)
