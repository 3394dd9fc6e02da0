"""A disk that is full at any write of ours: one line, nothing half written, and then it goes on.

The disk is a small tmpfs. It is filled before a change of a file, so that the next bytes find no
room; in `make test` before some changes of each call, in `make test-long` before every one, and so
that it fills up within files too.
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
PAGE = 4096
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
    """Fill the disk, but for some pages, before the change of a number."""

    disk: Path
    at: int
    pages: int = 0

    def __call__(self, number: int) -> None:
        """Hear of a change."""
        if number != self.at:
            return
        with (self.disk / "ballast").open("wb", buffering=0) as file:
            for size in (2**20, PAGE):
                try:
                    while file.write(bytes(size)) == size:
                        pass
                except OSError:
                    continue
            file.truncate(max(0, file.tell() - self.pages * PAGE))


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
PAGES = {"run": 149, "sweep": 1, "conversion": 3, "comparison": 3, "measurement": 5, "export": 13}
"""How many more a call gets from one try to the next: about a hundred tries of the large ones."""


class Call:
    """A call that meets a full disk again and again, each time from the same beginning."""

    def __init__(self, disk: Path, what: str) -> None:
        self.disk, self.what = disk, what
        self.outputs, self.output = disk / "outputs", disk.parent / "output"
        self.outputs.mkdir()
        self.call = CALLS[what](disk)
        self.begun = shutil.copytree(self.outputs, disk.parent / "begun")
        _, self.changes = undisturbed(self.output, *self.call)
        self.whole = tree(self.outputs, LEFT_OUT)

    def meets(self, at: int, pages: int = 0) -> int:
        """Let the disk be full from a change on, but for some pages; return the exit code.

        See that one line says so and nothing is half written, and that the same line goes on.
        """
        shutil.rmtree(self.outputs)
        shutil.copytree(self.begun, self.outputs)
        child = Child(self.output, *self.call, before=Fills(self.disk, at, pages))
        code = child.end()
        where = f"{self.what}, change {at} of {self.changes}, {pages} pages: {child.error}"
        (self.disk / "ballast").unlink()
        half = [name for name in tree(self.outputs) if any(part in name for part in HALF)]
        assert not half, where
        if code:
            assert code == 2 and child.error.count("\n") == 1, where
            assert "No space left" in child.error and "Traceback" not in child.error, where
            undisturbed(self.output, *self.call)
        assert tree(self.outputs, LEFT_OUT) == self.whole, where
        return code


@pytest.mark.parametrize("what", SOME)
def test_a_disk_that_is_full_before_a_change_is_told_in_one_line(what, disk):
    call = Call(disk, what)
    tried = range(1, call.changes + 1, max(1, call.changes // SOME[what]))
    assert 2 in [call.meets(at) for at in tried], "the disk was never full"


@pytest.mark.long
@pytest.mark.parametrize("what", CALLS)
def test_a_disk_that_is_full_before_any_change_is_told_in_one_line(what, disk):
    call = Call(disk, what)
    tried = range(1, call.changes + 1)
    assert 2 in [call.meets(at) for at in tried], "the disk was never full"


@pytest.mark.long
@pytest.mark.parametrize("what", CALLS)
def test_a_disk_that_is_full_within_any_file_is_told_in_one_line(what, disk):
    """With room for no page, for some more, and so on, until there is room for all of it."""
    call, pages = Call(disk, what), 0
    while call.meets(1, pages):
        pages += PAGES[what]
    assert pages > 2 * PAGES[what]
