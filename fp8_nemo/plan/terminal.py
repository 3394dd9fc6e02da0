"""Write for a terminal: lines and tables that fit its width, commands to paste, a verb's --help.

Piped output is `PIPED` columns wide. A word is never cut: a path that is longer than a line stays
whole, so that it can be copied.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from textwrap import fill, wrap

from rich.console import Console

import fp8_nemo
from fp8_nemo.nemo_config.versions import SUPPORTED
from fp8_nemo.recipe.checks import verb_line

WIDEST, PIPED = 120, 100
GAP = "  "
NONE = ("-", "")
"""What a cell of a table says where there is no number."""
NUMBER = re.compile(r"[-+±\d.,%e()/ naif]+")
LEAST_OF_A_TEXT = 24
"""Columns below which a long text in a table is not broken further, unless a word is longer."""
CALL = re.compile(r"python -m recipes\.(\w+)")


def columns() -> int:
    """Return how many columns a line may have: `COLUMNS`, else the terminal's, else `PIPED`."""
    return min(shutil.get_terminal_size((PIPED, 24)).columns, WIDEST)


def console() -> Console:
    """Return a console of that width, for progress displays."""
    return Console(width=columns(), markup=False, highlight=False)


def busy(what: str) -> AbstractContextManager[object]:
    """Show on a terminal that something is under way, until it is done."""
    return console().status(what)


def wrapped(text: str, first: str = "", indent: str = GAP) -> str:
    """Break a text between words, the first line after `first`, the others after `indent`."""
    return fill(
        text, columns(), initial_indent=first, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def say(*texts: str) -> None:
    """Print each text, broken between words."""
    for text in texts:
        print(wrapped(text), flush=True)


def complain(*lines: object) -> None:
    """Print each line to stderr: broken between words on a terminal, whole where it is piped."""
    for line in "\n".join(map(str, lines)).splitlines():
        print(wrapped(line) if sys.stderr.isatty() else line, file=sys.stderr)


def fields(pairs: Iterable[tuple[str, str]], indent: str = "") -> str:
    """Return names and texts in two columns: `rollout     linear fp8, attention and KV bf16`."""
    pairs = list(pairs)
    wide = max((len(name) for name, _ in pairs), default=0) + len(GAP)
    after = indent + " " * wide
    return "\n".join(wrapped(text or "-", f"{indent}{name:{wide}}", after) for name, text in pairs)


def shell(words: Iterable[str]) -> str:
    """Return a command that can be pasted: lines are broken by a backslash, between arguments."""
    lines = [""]
    for word in map(_quoted, words):
        if lines[-1] and len(f"{lines[-1]} {word} \\") > columns():
            lines[-1] += " \\"
            lines.append(f"{GAP}{word}")
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def _quoted(word: str) -> str:
    """Quote a word for a shell: one that holds single quotes alone is read in double ones."""
    return f'"{word}"' if "'" in word and not {*'"$`\\!'} & {*word} else shlex.quote(word)


def table(title: str, heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as text.

    Columns without a number are left out. If it is wider than a line, a column that says the same
    in every row is told below it, then long texts and headings are broken between words; if it is
    still too wide, each row becomes a block of its own.

    Args:
        title: the line above it.
        heading: names of the columns; the first one names the rows.
        rows: a text for each column; one may have several lines.
    """
    grid = [[name, *cells] for name, *cells in zip(heading, *rows, strict=True)]
    grid = [grid[0], *(each for each in grid[1:] if not {*each[1:]} <= {*NONE})]
    below = list[str]()
    if len(rows) > 1 and _widths(grid, shrink=False) is None:
        same = [each for each in grid[1:] if len({*each[1:]}) == 1]
        below = [wrapped(f"{name}: {texts[0]} in every row") for name, *texts in same]
        grid = [each for each in grid if each not in same]
    widths = _widths(grid, shrink=True)
    lines = _lines(grid, widths) if widths else _blocks(grid)
    return "\n".join([wrapped(title), *lines, *below])


def _widths(grid: list[list[str]], *, shrink: bool) -> list[int] | None:
    """Return a width for each column such that a row fits a line; None if there is none."""
    widths = [max(len(line) for text in column for line in text.split("\n")) for column in grid]
    floors = [
        max(
            LEAST_OF_A_TEXT if at and width > LEAST_OF_A_TEXT else 0,
            *(len(part) for text in column for part in _broken(text, 1, at == 0)),
        )
        for at, (column, width) in enumerate(zip(grid, widths, strict=True))
    ]
    over = sum(widths) + len(GAP) * (len(grid) - 1) - columns()
    while over > 0 and shrink:
        spare = [width if width > floor else 0 for width, floor in zip(widths, floors, strict=True)]
        if not any(spare):
            return None
        widths[spare.index(max(spare))] -= 1
        over -= 1
    return widths if over <= 0 else None


def _lines(grid: list[list[str]], widths: list[int]) -> Iterator[str]:
    right = [all(map(NUMBER.fullmatch, [text or "-" for text in column[1:]])) for column in grid]
    for number, row in enumerate(zip(*grid, strict=True)):
        broken = [
            _broken(text, width, at == 0)
            for at, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        for line in zip_longest(*broken, fillvalue=""):
            cells = zip(line, widths, right, strict=True)
            yield GAP.join(part.rjust(w) if r else part.ljust(w) for part, w, r in cells).rstrip()
        if number == 0:
            yield GAP.join("─" * width for width in widths)


def _broken(text: str, width: int, is_name: bool) -> list[str]:
    """Break a cell's text between words; a row's name at its hyphens too."""
    lines = (
        wrap(line, width, break_long_words=False, break_on_hyphens=is_name) or [""]
        for line in text.split("\n")
    )
    return [part for each in lines for part in each]


def _blocks(grid: list[list[str]]) -> Iterator[str]:
    for name, *texts in zip(*(column[1:] for column in grid), strict=True):
        yield wrapped(name)
        known = [(column[0], text) for column, text in zip(grid[1:], texts, strict=True)]
        yield fields(
            ((key, " ".join(text.split())) for key, text in known if text not in NONE), GAP
        )


class Parser(argparse.ArgumentParser):
    """Read the words after a verb; a mistake is one line, and no flag may be cut short."""

    def __init__(self, verb: str, about: str | None, more: str = "") -> None:
        """Begin with --help and --version.

        Args:
            verb: as its file in recipes/ is called.
            about: that file's docstring.
            more: what --help says after the arguments.
        """
        super().__init__(
            prog=verb_line(verb),
            description="\n\n".join(map(_told, (about or "").strip().split("\n\n"))),
            epilog=more,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.add_argument("--version", action="version", version=version())

    def error(self, message: str) -> None:  # type: ignore[override]
        """End the process with one line and exit code 2."""
        complain(f"{self.prog}: error: {message}; --help shows what there is")
        raise SystemExit(2)


def _told(paragraph: str) -> str:
    """Return a paragraph of a docstring in lines that fit; a line that is a command stays one."""
    if not CALL.match(paragraph):
        return wrapped(paragraph, indent="")
    called = CALL.sub(lambda call: verb_line(call[1]), paragraph)
    return "\n".join(shell(line.split()) for line in called.splitlines())


def version() -> str:
    """Return the version of this package and those of NeMo RL that it supports."""
    return f"fp8-nemo {fp8_nemo.__version__}, for NeMo RL {' and '.join(SUPPORTED)}"
