"""Keep the code that a queued job runs: this package as it was when the job was submitted.

    outputs/.code/HASH/fp8_nemo/...

A job may wait for days while its clone is edited. The package is copied once per state of its
files, laid out as an installation has it (`pyproject.toml` says which folder becomes which
package), with the metadata that shows its entry points to vLLM. A copy needs neither pip nor a
registry on a login node; a test holds it against `pip install --target`.
"""

from __future__ import annotations

import hashlib
import shutil
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from fp8_nemo.recipe.plain import sha256_of
from fp8_nemo.runs.metrics import RunDirError, make_folder, sync
from fp8_nemo.runs.provenance import COMMIT, commit
from fp8_nemo.runs.run_dir import new_staging

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "pyproject.toml"
IGNORED = ("__pycache__", "*.pyc", ".*")


def code_dir(outputs: Path) -> Path:
    """Return where the present state of the code is, or would be, kept for jobs.

    Its commit and `pyproject.toml` are part of the state, as the copy tells them.

    Raises:
        RunDirError: this package does not run from a clone.
    """
    packages = _packages()
    digest = hashlib.sha256(f"{commit() or ''}\0".encode() + (ROOT / PROJECT).read_bytes())
    for package, folder in packages.items():
        for file in _files(folder):
            digest.update(f"{package}/{file.relative_to(folder)}\0".encode())
            digest.update(bytes.fromhex(sha256_of(file)))
    return outputs.absolute() / ".code" / digest.hexdigest()[:12]


def freeze_code(outputs: Path) -> Path:
    """Copy the code to `code_dir`, whole or not at all, unless it is there; return the folder.

    Raises:
        RunDirError: this package does not run from a clone, or there is no room or right to.
    """
    target = code_dir(outputs)
    try:
        if not target.exists():
            _copy_whole(target)
    except OSError as error:
        raise RunDirError(
            f"{target.parent}: a job's copy of the code cannot be written ({error.strerror}); give "
            "this run outputs=FOLDER of your own, or make room"
        ) from error
    return target


def _copy_whole(target: Path) -> None:
    """Copy the code to a folder of its own and move it into place; leave nothing else behind."""
    make_folder(target.parent)
    staging = new_staging(target.parent)
    try:
        for package, folder in _packages().items():
            into = staging.joinpath(*package.split("."))
            into.mkdir(parents=True, exist_ok=True)
            for file in _files(folder):
                copy = into / file.relative_to(folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copy)
        write_metadata(staging)
        (staging / COMMIT).write_text(f"{commit() or ''}\n")
        staging.chmod(0o755)
        for path in (*staging.rglob("*"), staging):  # or a loss of power leaves empty files here
            sync(path)
        try:
            staging.rename(target)
        except OSError:
            if not target.exists():  # else another submission was first
                raise
        sync(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _packages() -> dict[str, Path]:
    """Return the packages that lie in folders of their own, and these folders in the clone."""
    if not is_clone():
        raise RunDirError(
            f"{ROOT}: no clone of fp8-nemo, whose code a job could keep; submit from a clone with "
            "`pip install -e .`"
        )
    folders = _project()["tool"]["setuptools"]["package-dir"]
    return {name: ROOT / folder for name, folder in sorted(folders.items())}


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / PROJECT).read_text())


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of one package, its subpackages included, in a fixed order."""
    for file in sorted(folder.rglob("*")):
        inner = file.relative_to(folder)
        if file.is_file() and not any(
            Path(part).match(each) for part in inner.parts for each in IGNORED
        ):
            yield file


def is_clone() -> bool:
    """Tell whether this package runs from its clone, beside which no metadata lies."""
    return (ROOT / PROJECT).is_file()


def write_metadata(target: Path) -> None:
    """Write to a folder what `importlib.metadata` reads of this package: version, entry points."""
    installed = metadata.distribution("fp8-nemo")
    folder = target / f"fp8_nemo-{installed.version}.dist-info"
    folder.mkdir()
    # A clone's own egg-info calls it PKG-INFO, and is what is found when started in the clone.
    said = installed.read_text("METADATA") or installed.read_text("PKG-INFO") or ""
    (folder / "METADATA").write_text(said)
    # From the clone itself: an installation is as old as its last `pip install`.
    groups = _project()["project"]["entry-points"]
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items()), ""]
    (folder / "entry_points.txt").write_text("\n".join(lines))
