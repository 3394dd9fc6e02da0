"""A disk that is full at any write of ours: one line, nothing half written, and then it goes on.

The disk is a small tmpfs. It is filled before a change of a file, so that the next bytes find no
room; in `make test` before some changes of each call, in `make test-long` before every one.
"""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from fp8_nemo.recipe.model_dir import SHIPPED
from tests.conftest import SMALL
from tests.search.children import Child, frozen, trained, tree, undisturbed, verb
from tests.search.test_kills import OF_AN_ATTEMPT, RUN

LEFT_OUT = (*OF_AN_ATTEMPT, "quantization.json")
"""The second has the time of its source, which an export makes."""
HALF = (".part", ".tmp", "staging-", "saving-")
"""In the names of what is not whole yet."""


@pytest.fixture
def disk(tmp_path):
    """A file system of 64 MiB in memory, which this test alone fills."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    made = subprocess.run(mount, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@dataclass
class Fills:
    """Fill the disk before the change of a number."""

    disk: Path
    at: int

    def __call__(self, number: int) -> None:
        """Hear of a change."""
        if number != self.at:
            return
        with (self.disk / "ballast").open("wb", buffering=0) as file:
            for size in (2**20, 2**12):
                try:
                    while file.write(bytes(size)) == size:
                        pass
                except OSError:
                    continue


def run(disk: Path):
    return trained, *RUN, f"outputs={disk}/outputs"


def sweep(disk: Path):
    return frozen, "-m", *SMALL, "precision=bf16,fp8-linear", f"outputs={disk}/outputs"


def conversion(disk: Path):
    return verb, "quantize_checkpoint", str(SHIPPED / "tiny-llama"), f"{disk}/outputs/fp8"


def comparison(disk: Path):
    undisturbed(disk.parent / "output", *run(disk))
    return verb, "compare", f"{disk}/outputs", "--html"


def measurement(disk: Path):
    undisturbed(disk.parent / "output", *run(disk))
    return verb, "measure_mismatch", str(next(disk.glob("outputs/*/*/*")))


def export(disk: Path):
    undisturbed(disk.parent / "output", *run(disk))
    [path] = disk.glob("outputs/*/*/*")
    return (
        verb,
        "quantize_checkpoint",
        str(path),
        f"{disk}/outputs/fp8",
        "precision.rollout_kv=bf16",
    )


CALLS = {each.__name__: each for each in (run, sweep, conversion, comparison, measurement, export)}
SOME = {"run": 2, "sweep": 3, "conversion": 4}


def fill(disk: Path, what: str, some: int | None) -> None:
    """Fill the disk before so many changes, or all, and see what is said and what is left."""
    outputs, begun, output = disk / "outputs", disk.parent / "begun", disk.parent / "output"
    outputs.mkdir()
    call = CALLS[what](disk)
    shutil.copytree(outputs, begun)
    undisturbed(output, *call)
    whole = tree(outputs, LEFT_OUT)
    changes = int(output.with_suffix(".changes").read_text())
    numbers = range(1, changes + 1)
    for at in numbers if some is None else numbers[:: max(1, changes // some)]:
        shutil.rmtree(outputs)
        shutil.copytree(begun, outputs)
        child = Child(output, *call, before=Fills(disk, at))
        code, where = child.end(), f"{what}, change {at} of {changes}: {child.error}"
        (disk / "ballast").unlink()
        half = [name for name in tree(outputs) if any(part in name for part in HALF)]
        assert not half, where
        if code:
            assert code == 2 and child.error.count("\n") == 1, where
            assert "No space left" in child.error and "Traceback" not in child.error, where
        undisturbed(output, *call)
        assert tree(outputs, LEFT_OUT) == whole, where


@pytest.mark.parametrize("what", SOME)
def test_a_disk_that_is_full_before_a_change_is_told_in_one_line(what, disk):
    fill(disk, what, SOME[what])


@pytest.mark.long
@pytest.mark.parametrize("what", CALLS)
def test_a_disk_that_is_full_before_any_change_is_told_in_one_line(what, disk):
    fill(disk, what, None)
