"""Read a dataclass back from the plain mapping that `dataclasses.asdict` made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


def from_plain(cls: type[T], content: Mapping[str, Any]) -> T:
    """Build a dataclass, and the dataclasses in its fields, from a mapping.

    Raises:
        TypeError: a key is unknown, or a group of keys is not a mapping; named.
    """
    hints = get_type_hints(cls)
    if not isinstance(content, Mapping):
        raise TypeError(f"{cls.__name__}: {content!r} is no group of keys")
    for key in content.keys() - hints.keys():
        raise TypeError(f"{cls.__name__}: has no key {key}")
    groups = {key: hint for key, hint in hints.items() if isinstance(hint, type)}
    return cls(
        **{
            key: from_plain(groups[key], value) if is_dataclass(groups.get(key)) else value
            for key, value in content.items()
        }
    )
