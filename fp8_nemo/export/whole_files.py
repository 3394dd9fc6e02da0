"""Write files that appear whole or not at all, after a kill, a full disk or a loss of power.

What is being written lies in a folder of its own beside them, where libraries put their own
temporary files too; whoever goes on throws that folder away first.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from fp8_nemo.recipe.plain import to_json

PART = ".part"
"""Name of that folder; it is there only while something is written, or after a kill."""


def without_parts(folder: Path) -> None:
    """Throw away what a kill left half written."""
    shutil.rmtree(folder / PART, ignore_errors=True)


def part_of(file: Path) -> Path:
    """Return where a file is to be written before `put` gives it its place."""
    (file.parent / PART).mkdir(exist_ok=True)
    return file.parent / PART / file.name


def put(part: Path, file: Path) -> None:
    """Give what `part_of` named its place, once it is on the disk.

    Raises:
        OSError: the disk is full, or fails.
    """
    _sync(part)
    part.rename(file)
    with suppress(OSError):  # something else is being written
        part.parent.rmdir()
    _sync(file.parent)


def write_json(file: Path, content: Any) -> None:
    """Replace a file by an object, whole."""
    part = part_of(file)
    part.write_text(to_json(content, indent=1) + "\n")
    put(part, file)


def sha256_of(file: Path) -> str:
    """Digest a file's bytes; in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
