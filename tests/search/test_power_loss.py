"""After a loss of power at any moment a run goes on without a hole, a conversion to the same bytes.

What was not synced is lost (`power.py`). In `make test` at some moments, in `make test-long` at
every one.
"""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8_nemo.recipe.model_dir import SHIPPED
from tests.search.children import (
    Child,
    kept_code,
    rows,
    submitted,
    trained,
    tree,
    undisturbed,
    verb,
)
from tests.search.power import Power
from tests.search.test_kills import OF_AN_ATTEMPT, RUN


def lost(
    tmp_path: Path, call, parts: int | None, but: tuple[str, ...] = OF_AN_ATTEMPT
) -> tuple[list[Path], dict]:
    """Return the disks of so many moments of a call, or of all, and what it makes undisturbed.

    Args:
        tmp_path: with the folder `disk`, on which the call works; what lies there is synced.
        call: with its arguments.
        parts: how many moments; None for all.
        but: as for `tree`.
    """
    disk, output, before = (tmp_path / name for name in ("disk", "output", "before"))
    shutil.copytree(disk, before)
    _, changes = undisturbed(output, *call)
    whole = tree(disk, but)
    put(before, disk)
    end = changes + 1
    every = 1 if parts is None else max(1, changes // parts)
    moments = frozenset({*range(max(1, every // 2), end, every), end})
    child = Child(output, *call, before=Power(disk, tmp_path / "images", moments))
    assert child.end() == 0, child.error
    assert tree(disk, but) == whole
    found = sorted((tmp_path / "images").glob("*/*"), key=lambda each: int(each.parent.name))
    assert len(found) == 2 * len(moments)
    return found, whole


def put(image: Path, disk: Path) -> None:
    """Put a disk in the place of another."""
    shutil.rmtree(disk)
    shutil.copytree(image, disk)


def runs(tmp_path: Path, parts: int | None) -> Iterator[str]:
    """Yield each moment after which a resumed run is not what it is without a loss."""
    disk = tmp_path / "disk"
    disk.mkdir()
    call = (trained, *RUN, f"outputs={disk}/outputs")
    images, whole = lost(tmp_path, call, parts)
    for image in images:
        where = f"{image.parent.name} {image.name}"
        put(image, disk)
        child = Child(tmp_path / "output", *call)
        assert child.end() == 0, f"{where}: {child.error}"
        [path] = disk.glob("outputs/*/*/*")
        steps = [row["step"] for row in rows(path / "metrics.jsonl")]
        if steps != [0, 1, 2, 3, 4, 5] or tree(disk, OF_AN_ATTEMPT) != whole:
            yield where


def conversions(tmp_path: Path, parts: int | None) -> Iterator[str]:
    """Yield each moment after which a conversion that is done again is not whole."""
    disk = tmp_path / "disk"
    disk.mkdir()
    call = (verb, "quantize_checkpoint", str(SHIPPED / "tiny-qwen3-moe"), f"{disk}/new/fp8")
    images, whole = lost(tmp_path, call, parts)
    assert all(tree(image) == whole for image in images[-2:]), "it was done, and is not kept"
    for image in images:
        where = f"{image.parent.name} {image.name}"
        if loads(image / "new" / "fp8"):
            assert tree(image) == whole, f"{where}: it can be loaded, and is not whole"
        put(image, disk)
        undisturbed(tmp_path / "output", *call)
        if tree(disk) != whole:
            yield where


def exports(tmp_path: Path, parts: int | None) -> Iterator[str]:
    """Yield each moment after which a run's model that is converted again is not whole."""
    disk = tmp_path / "disk"
    line = [word for word in RUN if not word.startswith("precision=")]
    undisturbed(tmp_path / "output", trained, *line, "precision=fp8-linear", f"outputs={disk}")
    [run] = disk.glob("*/*/*")
    call = (verb, "quantize_checkpoint", str(run), f"{run}/fp8")
    but = (*OF_AN_ATTEMPT, "fp8/quantization.json")  # which says when its shards were written
    images, whole = lost(tmp_path, call, parts, but)
    for image in images:
        put(image, disk)
        undisturbed(tmp_path / "output", *call)
        if tree(disk, but) != whole:
            yield f"{image.parent.name} {image.name}"


def submissions(tmp_path: Path, parts: int | None) -> Iterator[str]:
    """Yield each moment after which a line that is submitted again leaves no whole job."""
    disk, package = tmp_path / "disk", tmp_path / "small"
    disk.mkdir()
    package.mkdir()
    (package / "__init__.py").write_text("NAME = 'small'\n")
    call = (submitted, f"{disk}/outputs", str(package), *RUN, "cluster=slurm")
    images, whole = lost(tmp_path, call, parts)
    queued = [tree(image, OF_AN_ATTEMPT) for image in images[-2:]]
    lacking = [{n for n in whole if each.get(n) != whole[n]} for each in queued]
    assert lacking == [set(), set()], "it was done, and is not kept for the job"
    for image in images:
        put(image, disk)
        undisturbed(tmp_path / "output", *call)
        found = tree(disk, OF_AN_ATTEMPT)
        if {name: each for name, each in found.items() if ".staging" not in name} != whole:
            yield f"{image.parent.name} {image.name}"


def code(tmp_path: Path, parts: int | None) -> Iterator[str]:
    """Yield each moment after which a job would find a copy of the code that is not whole."""
    disk, package = tmp_path / "disk", tmp_path / "small"
    disk.mkdir()
    (package / "inner").mkdir(parents=True)
    for name in ("__init__.py", "one.py", "inner/__init__.py"):
        (package / name).write_text(f"NAME = {name!r}\n")
    call = (kept_code, f"{disk}/outputs", str(package))
    images, whole = lost(tmp_path, call, parts)
    assert all(tree(image) == whole for image in images[-2:]), "it was done, and is not kept"
    for image in images:
        put(image, disk)
        undisturbed(tmp_path / "output", *call)
        found = tree(disk)
        if {name: each for name, each in found.items() if ".staging" not in name} != whole:
            yield f"{image.parent.name} {image.name}"


def loads(folder: Path) -> bool:
    """Tell whether a converted checkpoint seems whole: it has its configuration."""
    try:
        return bool(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError):
        return False


LOST = {"runs": runs, "conversions": conversions, "exports": exports, "code": code,
        "submissions": submissions}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "parts"),
    [("runs", 1), ("conversions", 6), ("exports", 3), ("code", 12), ("submissions", 6)],
)
def test_after_a_loss_of_power_at_some_moments_it_goes_on_without_a_hole(what, parts, tmp_path):
    assert list(LOST[what](tmp_path, parts)) == []


@pytest.mark.long
@pytest.mark.parametrize("what", LOST)
def test_after_a_loss_of_power_at_any_moment_it_goes_on_without_a_hole(what, tmp_path):
    assert list(LOST[what](tmp_path, None)) == []


def test_what_was_not_synced_is_lost(tmp_path):
    """The tool itself: a file that is written and renamed without a sync is there, and empty."""
    disk = tmp_path / "disk"
    disk.mkdir()
    power = Power(disk, tmp_path / "images", frozenset({2, 3}))
    fsync = os.fsync
    try:
        power(1)
        (disk / "new").write_text("bytes")
        (disk / "new").rename(disk / "file")
        power(2)
        for path in (disk / "file", disk):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        (disk / "file").write_text("more")
        power(3)
    finally:
        os.fsync = fsync
    images = {f"{n} {name}": tree(tmp_path / "images" / n / name) for n in "23" for name in
              ("ahead", "behind")}  # fmt: skip
    assert images == {
        "2 ahead": {"file": b""}, "2 behind": {},
        "3 ahead": {"file": b"bytes"}, "3 behind": {"file": b"bytes"},
    }  # fmt: skip
