"""Two hundred wrong lines, a row each: one line says what is wrong, and nothing is made.

Every verb is called as a user types it, in this process, in a folder that holds what a user may
point at by mistake. `wrong_lines.txt` is the table: a line as a shell reads it, and below it what
its message must hold.
"""

import os
import shlex
import shutil
from importlib import import_module
from pathlib import Path

import pytest

from fp8_nemo.recipe.model_dir import SHIPPED
from fp8_nemo.runs.run_dir import freeze
from tests.conftest import small_plan

TABLE = (Path(__file__).parent / "wrong_lines.txt").read_text().splitlines()
LINES = [(line, message.strip()) for line, message in zip(TABLE[::2], TABLE[1::2], strict=True)]
UNSET = ("NEMO_RL_ROOT", "RAY_ADDRESS", "UNSET_NAME", "HF_TOKEN")


@pytest.fixture(scope="module")
def around(tmp_path_factory) -> Path:
    """A folder with a run, a model, and things that are broken or something else."""

    folder = tmp_path_factory.mktemp("around")
    (folder / "notes.txt").write_text("notes\n")
    (folder / "empty").mkdir()
    [made] = freeze([small_plan(folder / "made")])
    made.path.rename(folder / "run")
    shutil.rmtree(folder / "made")
    models = {"broken-model": "{", "listed-model": "[]", "bare-model": "{}"}
    for name, config in models.items():
        shutil.copytree(SHIPPED / "tiny-llama", folder / name)
        (folder / name / "config.json").write_text(config)
    shutil.copytree(SHIPPED / "tiny-llama", folder / "source")
    shutil.copytree(SHIPPED / "tiny-llama", folder / "garbled-model")
    (folder / "garbled-model" / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0[]")
    for name, line in {"broken-data": '{"input": "1", "outp', "latin-data": "\xe9"}.items():
        (folder / name).mkdir()
        for side in ("train", "validation"):
            (folder / name / f"{side}.jsonl").write_bytes(line.encode("latin-1"))
    for name, plan in {"damaged-run": '{"a": 1}', "empty-plan": "", "no-plan": "[]"}.items():
        shutil.copytree(folder / "run", folder / name)
        (folder / name / "plan.json").write_text(plan)
    shutil.copytree(folder / "run", folder / "garbled-run")
    (folder / "garbled-run" / "metrics.jsonl").write_bytes(b"\xff\n\n")
    os.mkfifo(folder / "pipe")
    (folder / "endless").symlink_to("/dev/zero")
    shutil.copytree(folder / "broken-data", folder / "piped-data")
    shutil.copytree(folder / "source", folder / "piped-model")
    for file in ("piped-data/train.jsonl", "piped-model/config.json"):
        (folder / file).unlink()
        os.mkfifo(folder / file)
    (folder / "broken-pairs" / "mismatch").mkdir(parents=True)
    (folder / "broken-pairs" / "mismatch" / "step-000001.safetensors").write_bytes(b"cut")
    return folder


def content(folder: Path) -> dict[str, tuple[int, int] | None]:
    """Name everything in a folder, with the size and time of files."""
    found = sorted(folder.rglob("*"))
    stats = {str(path): path.stat() for path in found}
    return {
        name: (each.st_size, each.st_mtime_ns) if Path(name).is_file() else None
        for name, each in stats.items()
    }


@pytest.fixture
def in_folder(around, monkeypatch):
    """Stand in that folder, on a machine without Slurm and NeMo RL."""
    monkeypatch.chdir(around)
    monkeypatch.setenv("PATH", str(around / "empty"))
    monkeypatch.setenv("COLUMNS", "80")
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    return around


@pytest.mark.parametrize(("line", "message"), LINES, ids=[line for line, _ in LINES])
def test_a_wrong_line_is_told_in_one_and_nothing_is_made(line, message, in_folder, capsys):
    verb, *words = shlex.split(line.encode().decode("unicode_escape") if "\\x" in line else line)
    before = content(in_folder)
    try:
        code = import_module(f"fp8_nemo.recipes.{verb}").main(words)
    except SystemExit as stopped:  # as argparse ends it
        code = stopped.code
    out, error = capsys.readouterr()
    assert (code, out) == (2, ""), error
    assert error.endswith("\n") and error.count("\n") == 1 and "Traceback" not in error
    assert message in error and all(each.isprintable() for each in error[:-1])
    assert content(in_folder) == before


def test_the_table_holds_two_hundred():
    assert len({line for line, _ in LINES}) == len(LINES) >= 200
