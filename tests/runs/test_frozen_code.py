"""The copy of the code that a job runs, held against an installation."""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from fp8_nemo.runs import frozen_code
from fp8_nemo.runs import provenance as environment
from fp8_nemo.runs.metrics import RunDirError
from fp8_nemo.runs.provenance import COMMIT

ROOT = Path(__file__).parents[2]


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and "dist-info" not in str(path))
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in found
        if ".pyc" not in path.name
    }


def test_the_copy_is_what_pip_installs(tmp_path):
    source = tmp_path / "source"  # what is in the index, as a clone of it would be
    subprocess.run(
        ["git", "-C", str(ROOT), "checkout-index", "-a", f"--prefix={source}/"], check=True
    )
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", tmp_path / "pip", source], check=True)
    here = f"import sys; sys.path.insert(0, {str(source)!r}); "
    code = (
        here
        + "import pathlib, fp8_nemo.runs.frozen_code as f; print(f.freeze_code(pathlib.Path('o')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    copied, installed = files(Path(done.stdout.strip())), files(tmp_path / "pip")
    documents = {name for name in copied if name.endswith("README.md")}
    del installed["bin/fp8-nemo"]  # names the Python that installed it
    assert {name: copied[name] for name in copied.keys() - documents - {COMMIT}} == installed


def test_the_copy_runs_away_from_the_clone_and_shows_its_metadata(tmp_path):
    folder = frozen_code.freeze_code(tmp_path / "outputs")
    code = (
        "import importlib.metadata as m, fp8_nemo, fp8_nemo.conf, fp8_nemo.recipes.run;"
        "from fp8_nemo.runs.provenance import commit;"
        "print(fp8_nemo.__file__, fp8_nemo.recipes.__file__, m.version('fp8-nemo'), commit())"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    package, recipes, version, commit = done.stdout.split()
    assert commit == (folder / COMMIT).read_text().strip() == str(environment.commit() or "")
    assert package.startswith(str(folder)) and recipes.startswith(str(folder))
    assert version == metadata.version("fp8-nemo")


def test_the_folder_follows_the_files_and_is_made_once(tmp_path, monkeypatch):
    clone = tmp_path / "clone"
    for name in ("fp8_nemo", "conf", "recipes", "slurm"):
        (clone / name).mkdir(parents=True)
        (clone / name / "a.py").write_text("1\n")
    (clone / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    monkeypatch.setattr(frozen_code, "ROOT", clone)
    first = frozen_code.freeze_code(tmp_path / "o")
    made = first.stat().st_ctime_ns
    (clone / "fp8_nemo" / "__pycache__").mkdir()
    (clone / "fp8_nemo" / "__pycache__" / "a.pyc").write_text("2")
    assert frozen_code.freeze_code(tmp_path / "o") == first and first.stat().st_ctime_ns == made
    (clone / "slurm" / "a.py").write_text("2\n")
    second = frozen_code.freeze_code(tmp_path / "o")
    assert second != first and (first / "fp8_nemo" / "slurm" / "a.py").read_text() == "1\n"
    assert {path.name for path in first.parent.iterdir()} == {first.name, second.name}
    with (clone / "pyproject.toml").open("a") as project:
        project.write("# entry points\n")
    third = frozen_code.freeze_code(tmp_path / "o")
    monkeypatch.setattr(frozen_code, "commit", lambda: "another")
    fourth = frozen_code.freeze_code(tmp_path / "o")
    assert len({first, second, third, fourth}) == 4
    assert (fourth / COMMIT).read_text() == "another\n"


def test_without_a_clone_nothing_is_frozen(tmp_path, monkeypatch):
    monkeypatch.setattr(frozen_code, "ROOT", tmp_path)
    with pytest.raises(RunDirError, match=r"pip install -e \."):
        frozen_code.code_dir(tmp_path)
