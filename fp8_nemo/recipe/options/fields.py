"""Declare the fields of options, each with what it allows."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def short_name(default: str) -> Any:
    """Declare a name that becomes part of a path: letters, digits, dots, dashes, underscores."""
    return field(default=default, metadata={"short_name": True})


def one_of(*allowed: str) -> Any:
    """Declare a string field with a closed list of values, the first of which is the default."""
    return field(default=allowed[0], metadata={"one_of": allowed})


def optional_one_of(*allowed: str) -> Any:
    """Declare a string field with a closed list of values, or null."""
    return field(default=None, metadata={"one_of": allowed})


def number(
    default: float | None,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Any:
    """Declare a numeric field with an allowed range; `least` and `most` are inclusive."""
    return field(default=default, metadata={"least": least, "above": above, "most": most})
