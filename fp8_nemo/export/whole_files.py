"""Write files that appear whole or not at all, after a kill, a full disk or a loss of power.

What is being written lies in a folder of its own beside them, where libraries put their own
temporary files too; whoever goes on throws that folder away first.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fp8_nemo.recipe.plain import to_json
from fp8_nemo.runs.metrics import sync

PART = ".part"
"""Name of that folder; it is there only while something is written, or after a kill."""


def without_parts(folder: Path) -> None:
    """Remove what a kill left half written."""
    shutil.rmtree(folder / PART, ignore_errors=True)


@contextmanager
def written(folder: Path) -> Iterator[None]:
    """Leave nothing half written behind in a folder, and no empty folder.

    Raises:
        OSError: the disk is full, or fails; one line, with the folder.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors raises this when the disk is full
        reason = (isinstance(error, OSError) and error.strerror) or error
        text = f"{folder}: cannot be written ({reason}); make room, and the same line goes on"
        raise OSError(text) from error
    finally:
        without_parts(folder)
        with suppress(OSError):
            folder.rmdir()


def part_of(file: Path) -> Path:
    """Return where a file is to be written before `put` gives it its place."""
    (file.parent / PART).mkdir(exist_ok=True)
    return file.parent / PART / file.name


def put(part: Path, file: Path) -> None:
    """Give what `part_of` named its place, once it is on the disk.

    Raises:
        OSError: the disk is full, or fails.
    """
    sync(part)
    part.rename(file)
    with suppress(OSError):  # something else is being written
        part.parent.rmdir()
    sync(file.parent)


def write_json(file: Path, content: Any) -> None:
    """Replace a file by an object, whole."""
    part = part_of(file)
    part.write_text(to_json(content, indent=1) + "\n")
    put(part, file)
