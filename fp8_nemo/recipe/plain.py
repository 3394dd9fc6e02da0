"""Turn nested data into JSON, dataclasses and flat keys, without OmegaConf."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def to_json(content: Any, indent: int | None = None) -> str:
    """Write standard JSON: NaN and the infinities, for which it has no word, are `null`."""
    return json.dumps(_finite(content), indent=indent, allow_nan=False)


def bytes_of(file: Path) -> bytes:
    """Read a file that a line names; a pipe or a device might never end.

    Raises:
        OSError: it cannot be read, or is no file.
    """
    if file.exists() and not (file.is_file() or file.is_dir()):
        raise OSError(errno.EINVAL, "is a pipe or a device, not a file")
    return file.read_bytes()


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_json(text: str | bytes) -> Any:
    """Read JSON, also of earlier versions, which wrote `NaN` and `Infinity`.

    Raises:
        ValueError: it is none, or nested beyond all use.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _finite(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: _finite(each) for key, each in content.items()}
    return [_finite(each) for each in content] if isinstance(content, list | tuple) else content


def from_plain(cls: type[T], content: Any, at: str = "") -> T:
    """Read a dataclass back from its `dataclasses.asdict`, as JSON gives it.

    Args:
        cls: a dataclass whose fields are scalars, lists, dictionaries or dataclasses.
        content: its fields by name; a field that is left out takes its default.
        at: dotted key of `content`, for messages.

    Raises:
        TypeError: the content is no object, has an unknown key, lacks a key, or holds a value of
            another type; names the key.
    """
    if not isinstance(content, Mapping):
        raise TypeError(f"{at or cls.__name__}: is {content!r}, not an object")
    hints = typing.get_type_hints(cls)
    if unknown := sorted(content.keys() - hints.keys()):
        raise TypeError(f"{at}{unknown[0]}: no such key")
    return cls(**{key: _value(hints[key], each, at + key) for key, each in content.items()})


def _value(hint: Any, value: Any, at: str) -> Any:
    """Read one field's value, checked against its type; JSON has no tuples, and 1 for 1.0."""
    if dataclasses.is_dataclass(hint):
        return from_plain(typing.cast(type, hint), value, at + ".")
    allowed = typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,)
    kinds = tuple(typing.get_origin(each) or each for each in allowed)
    if Any in kinds or (float in kinds and type(value) is int):
        return value
    if type(value) not in kinds:
        raise TypeError(f"{at}: {value!r} is not of type {hint}")
    return value


UNIONS = (typing.Union, types.UnionType)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten `{"a": {"b": 1}}` to `{"a.b": 1}`; an empty map stays a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= leaves(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def escape_interpolation(value: Any) -> Any:
    """Escape a value for OmegaConf, so that `${` in it stays text: it was resolved once before."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {key: escape_interpolation(each) for key, each in value.items()}
    return (
        [escape_interpolation(each) for each in value] if isinstance(value, list | tuple) else value
    )
