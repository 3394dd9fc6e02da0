"""Run directories: made whole or not at all, found again by the same line, never half-read."""

import dataclasses
import errno
import json
import os
import platform
import shutil

import pytest

from fp8_nemo.plan.plan import plan_recipe
from fp8_nemo.recipe.compose import compose
from fp8_nemo.runs import metrics, provenance, run_dir


@pytest.fixture
def plan(tmp_path):
    return plan_recipe(compose([f"outputs={tmp_path}/outputs", "grpo.steps=30"])[0])


def longer(plan, steps: int):
    grpo = dataclasses.replace(plan.recipe.grpo, steps=steps)
    return dataclasses.replace(plan, recipe=dataclasses.replace(plan.recipe, grpo=grpo))


def run_steps(path, first: int, last: int) -> None:
    for step in range(first, last + 1):
        metrics.append_metrics(path, {"step": step})
    with run_dir.new_checkpoint(path, last):
        pass


def test_a_run_killed_between_its_last_row_and_its_last_checkpoint_is_not_finished(plan):
    [first] = run_dir.freeze([plan])
    run_steps(first.path, 0, 20)
    for step in range(21, 31):
        metrics.append_metrics(first.path, {"step": step})
    [again] = run_dir.freeze([plan])
    assert (again.state, again.steps) == ("unfinished", 20)


def test_a_new_run_has_its_plan_and_recipe_and_nothing_of_the_environment(plan, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret-word")
    [frozen] = run_dir.freeze([plan])
    assert (frozen.state, frozen.steps) == ("new", 0)
    assert sorted(each.name for each in frozen.path.iterdir()) == ["plan.json", "recipe.yaml"]
    assert run_dir.read_plan(frozen.path) == plan
    provenance.write_environment(frozen.path)
    for file in frozen.path.iterdir():
        assert "secret-word" not in file.read_text()


def test_the_same_line_finds_the_directory_and_more_steps_extend_it(plan):
    [first] = run_dir.freeze([plan])
    run_steps(first.path, 0, 30)
    [again] = run_dir.freeze([plan])
    assert (again.path, again.state, again.steps) == (first.path, "finished", 30)
    [more] = run_dir.freeze([longer(plan, 40)])
    assert (more.path, more.state) == (first.path, "unfinished")
    assert run_dir.read_plan(first.path).recipe.grpo.steps == 40
    assert len(metrics.read_metrics(first.path)) == 31


def test_a_finished_run_whose_checkpoints_are_deleted_stays_finished_and_keeps_its_curve(plan):
    [first] = run_dir.freeze([plan])
    run_steps(first.path, 0, 30)
    shutil.rmtree(first.path / "checkpoints")
    assert run_dir.freeze([plan])[0].state == "finished"
    with pytest.raises(metrics.RunDirError, match="its checkpoints are gone"):
        run_dir.freeze([longer(plan, 40)])
    assert len(metrics.read_metrics(first.path)) == 31


@pytest.mark.parametrize("every", [30, 50])
def test_a_finished_curve_is_kept_where_the_whole_run_was_one_stretch_without_a_checkpoint(
    tmp_path, every
):
    words = [f"outputs={tmp_path}/outputs", "grpo.steps=30", f"grpo.checkpoint_every={every}"]
    plan = plan_recipe(compose(words)[0])
    [first] = run_dir.freeze([plan])
    for step in range(30):  # and lost before its only checkpoint: nothing to keep
        metrics.append_metrics(first.path, {"step": step})
    [again] = run_dir.freeze([plan])
    assert (again.state, again.steps) == ("unfinished", 0)
    metrics.append_metrics(first.path, {"step": 30})
    with pytest.raises(metrics.RunDirError, match="its checkpoints are gone"):
        run_dir.freeze([longer(plan, 40)])
    assert run_dir.read_plan(first.path) == plan


def test_a_refused_freeze_leaves_the_plans_of_other_cells_as_they_were(plan, tmp_path):
    [first] = run_dir.freeze([plan])
    blocked = dataclasses.replace(plan, cell="tiny-llama/other-none")
    (tmp_path / "outputs" / "tiny-llama" / "other-none").write_text("in the way")
    with pytest.raises(metrics.RunDirError):
        run_dir.freeze([longer(plan, 40), blocked])
    assert run_dir.read_plan(first.path) == plan


def test_a_file_system_without_locks_is_not_another_process(plan, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    [first] = run_dir.freeze([plan])
    monkeypatch.setattr(run_dir.fcntl, "flock", flock)
    with pytest.raises(metrics.RunDirError, match=r"cannot be locked \(Function not implemented\)"):
        run_dir.freeze([plan])
    assert run_dir.read_plan(first.path) == plan


def test_a_running_directory_is_not_frozen_again(plan):
    [first] = run_dir.freeze([plan])
    with run_dir.locked(first.path), pytest.raises(metrics.RunDirError, match="another process"):
        run_dir.freeze([longer(plan, 40)])
    assert run_dir.read_plan(first.path) == plan


def test_a_directory_and_checkpoints_of_somebody_else_are_said_to_be(plan, monkeypatch):
    [first] = run_dir.freeze([plan])
    (first.path / "checkpoints").mkdir()
    monkeypatch.setattr(os, "access", lambda path, _: path.name != "checkpoints")  # root may all
    with pytest.raises(metrics.RunDirError, match=r"/checkpoints: cannot be read \(Permission"):
        run_dir.checkpoints(first.path)
    (first.path / run_dir.LOCK).unlink(missing_ok=True)
    (first.path / run_dir.LOCK).mkdir()
    refused = pytest.raises(metrics.RunDirError, match=r"cannot be written \(Is a directory\)")
    with refused, run_dir.locked(first.path):
        pass


def test_a_finished_directory_is_left_as_it_is(plan):
    [first] = run_dir.freeze([plan])
    run_steps(first.path, 0, 30)
    before = {each: each.stat().st_mtime_ns for each in first.path.glob("[!.]*")}
    run_dir.freeze([longer(plan, 20)])
    assert {each: each.stat().st_mtime_ns for each in first.path.glob("[!.]*")} == before


def test_outputs_that_cannot_be_written_leave_nothing_behind(plan, tmp_path):
    (tmp_path / "outputs").write_text("a file stands where the folder should be")
    with pytest.raises(
        metrics.RunDirError, match=r"outputs=.*: cannot be written .*set outputs=FOLDER"
    ):
        run_dir.freeze([plan])
    assert [each.name for each in tmp_path.iterdir()] == ["outputs"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(plan, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(metrics.RunDirError, match="Permission denied"):
        run_dir.freeze([plan])


def test_a_cell_that_cannot_be_placed_leaves_no_trace_of_the_others(plan, tmp_path):
    other = dataclasses.replace(plan, cell="tiny-llama/other-none")
    (tmp_path / "outputs" / "tiny-llama").mkdir(parents=True)
    (tmp_path / "outputs" / "tiny-llama" / "other-none").write_text("in the way")
    with pytest.raises(metrics.RunDirError):
        run_dir.freeze([plan, other])
    assert [each.name for each in (tmp_path / "outputs" / "tiny-llama").iterdir()] == ["other-none"]
    assert [each.name for each in (tmp_path / "outputs").iterdir()] == ["tiny-llama"]


def test_a_damaged_plan_is_named(plan):
    [frozen] = run_dir.freeze([plan])
    text = (frozen.path / "plan.json").read_text()
    for broken in (
        text[: len(text) // 2],
        "{}",
        json.dumps({**json.loads(text), "recipe": {"stepz": 1}}),
    ):
        (frozen.path / "plan.json").write_text(broken)
        with pytest.raises(metrics.RunDirError, match=r"plan\.json: not a plan"):
            run_dir.read_plan(frozen.path)


def test_a_last_line_cut_short_by_a_kill_is_dropped_and_a_broken_one_is_named(plan):
    [frozen] = run_dir.freeze([plan])
    run_steps(frozen.path, 0, 2)
    file = frozen.path / "metrics.jsonl"
    file.write_text(file.read_text() + '{"step": 3, "rew')
    assert [row["step"] for row in metrics.read_metrics(frozen.path)] == [0, 1, 2]
    file.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(metrics.RunDirError, match=r"metrics\.jsonl:2: not a step"):
        metrics.read_metrics(frozen.path)


def test_rewinding_drops_later_steps(plan):
    [frozen] = run_dir.freeze([plan])
    run_steps(frozen.path, 0, 5)
    rows = metrics.rows_until(frozen.path, None, 3, 0)
    metrics.write_rows(frozen.path / metrics.METRICS, rows)
    assert [row["step"] for row in metrics.read_metrics(frozen.path)] == [0, 1, 2, 3]


def test_a_checkpoint_appears_whole_or_not_at_all_and_two_are_kept(plan):
    [frozen] = run_dir.freeze([plan])
    for step in (10, 20, 30):
        with run_dir.new_checkpoint(frozen.path, step) as folder:
            (folder / "state.json").write_text(str(step))
    assert [run_dir.checkpoint_step(each) for each in run_dir.checkpoints(frozen.path)] == [20, 30]
    with pytest.raises(RuntimeError), run_dir.new_checkpoint(frozen.path, 40) as folder:
        raise RuntimeError("killed while saving")
    assert [run_dir.checkpoint_step(each) for each in run_dir.checkpoints(frozen.path)] == [20, 30]
    with run_dir.new_checkpoint(frozen.path, 40) as folder:
        assert not list(folder.iterdir())
    assert not list((frozen.path / "checkpoints").glob("saving-*"))


def test_each_attempt_has_its_own_log(plan):
    [frozen] = run_dir.freeze([plan])
    names = [run_dir.attempt_log(frozen.path).name for _ in range(2)]
    assert names == ["attempt-1.log", "attempt-2.log"]


def test_who_runs_a_directory_is_named_by_process_and_machine(plan):
    [first] = run_dir.freeze([plan])
    held = f"{first.path}: another process, {os.getpid()} on {platform.node()}, since 20"
    for _ in range(2):  # what is refused leaves the holder's word
        with run_dir.locked(first.path), pytest.raises(metrics.RunDirError) as refused:
            run_dir.freeze([longer(plan, 40)])
        assert str(refused.value).startswith(held)
        assert str(refused.value).endswith(" is running it; wait for it, or end it")
    assert (first.path / run_dir.LOCK).read_text() == ""


def test_what_is_only_called_like_a_checkpoint_is_none(plan):
    [first] = run_dir.freeze([plan])
    run_steps(first.path, 0, 30)
    (first.path / "checkpoints" / "step-x1").mkdir()
    (first.path / "checkpoints" / "step-000099").touch()
    assert [path.name for path in run_dir.checkpoints(first.path)] == ["step-000030"]


def test_only_what_a_dead_process_of_this_host_left_is_thrown_away(tmp_path):
    here = platform.node()
    dead = 1 << 22  # above every number that Linux gives a process
    left = [f".staging-{here}-{dead}-abc_1"]
    kept = [f".staging-{here}-{os.getpid()}-abc", f".staging-{here}-{dead}-4242-abc",
            f".staging-{here}-login-{dead}-abc", f".staging-other-{dead}-abc"]  # fmt: skip
    for name in left + kept:
        (tmp_path / name).mkdir()
    made = run_dir.new_staging(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {made.name, *kept}
