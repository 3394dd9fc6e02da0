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
from fp8_nemo.runs.metrics import replaced

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


@contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Yield where to write a file that gets its place once it is whole and on disk.

    Raises:
        OSError: the disk is full, or fails.
    """
    part = file.parent / PART / file.name
    part.parent.mkdir(exist_ok=True)
    with replaced(file, part):
        yield part
    with suppress(OSError):  # something else is being written
        part.parent.rmdir()


def write_json(file: Path, content: Any) -> None:
    """Replace a file by an object, whole."""
    with whole(file) as part:
        part.write_text(to_json(content, indent=1) + "\n")
