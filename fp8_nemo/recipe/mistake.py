"""Say what is wrong with a line, in words that its user typed or can type."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple


class Mistake(NamedTuple):
    """Name one thing that is wrong: `Mistake("grpo.steps", 0, "1 or more", "give a number")`."""

    key: str
    got: Any
    allowed: str
    remedy: str = ""

    def __str__(self) -> str:
        """Return one line: key, value, what is allowed, what to do."""
        text = f"{self.key}={as_typed(self.got)}: " + "; ".join(filter(None, self[2:]))
        return printable(text)


def as_typed(value: Any) -> str:
    """Return a value as a user types it: `null`, `true`, `fp8`."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def printable(line: str) -> str:
    """Escape what would break a line, or command the terminal, in a word that is repeated."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in line)


def verb_line(verb: str) -> str:
    """Return how to call a verb, in the way in which the user has called this one.

    `python -m recipes.plan` in a clone, `fp8-nemo plan` anywhere.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    package = spec.name.rpartition(".")[0] if spec else ""
    if package.endswith("recipes"):
        return f"python -m {package}.{verb}"
    return f"fp8-nemo {verb.replace('_', '-')}"


def shortened(path: str) -> str:
    """Return the beginning of a path that a message can show."""
    shown = path.encode(errors="replace").decode()
    return shown if len(shown) <= 40 else f"{shown[:40]}..."
