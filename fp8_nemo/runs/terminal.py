"""Write for the terminal that there is: as wide as it is, nothing cut inside a word.

Piped output keeps every message on one line, so that scripts and `grep` find it whole; tables are
then 100 columns wide, or as `COLUMNS` says.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fp8_nemo.recipe.mistake import printable

PIPED, WIDEST = 100, 120


def width() -> int:
    """Return the columns to fill: the terminal's, at most 120, where lines are still read."""
    return min(shutil.get_terminal_size((PIPED, 24)).columns, WIDEST)


def console() -> Console:
    """Return rich's console of that width; text in brackets is text."""
    return Console(width=width(), markup=False, highlight=False)


def short_path(path: Path) -> Path:
    """Spell a path in one way: relative where the user stands above it."""
    path, here = path.resolve(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def tell(text: object, file: IO[str] | None = None) -> None:
    """Print a message, wrapped between words where a terminal shows it.

    What would command the terminal, such as a control character in a path, is escaped.

    Args:
        text: lines of it are wrapped one by one; what follows goes below the text, indented.
        file: standard output unless given.
    """
    target: Any = file or sys.stdout
    lines = [printable(line) for line in str(text).removesuffix("\n").split("\n")]
    if target.isatty():
        lines = [part for line in lines for part in _wrapped(line)]
    print(*lines, sep="\n", file=target, flush=True)


def table(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], notes: Iterable[str] = ()
) -> Table:
    """Lay out rows so that they fit.

    What is the same in every row goes below the table; if that is not enough, columns are left out
    from the right, and named.

    Args:
        title: stands above.
        heads: of the columns, the most important first.
        rows: texts; those of several lines are as wide as their longest line.
        notes: lines below.
    """
    kept, said = [*range(len(heads))], []
    for column in reversed(range(1, len(heads))):
        values = {row[column] for row in rows}
        if _columns_needed(heads, rows, kept) > width() and len(rows) > 1 and len(values) == 1:
            kept.remove(column)
            said.insert(0, f"{' '.join(heads[column].split())} {values.pop()}")
    left_out = []
    while len(kept) > 1 and _columns_needed(heads, rows, kept) > width():
        left_out.insert(0, " ".join(heads[kept.pop()].split()))
    below = [f"In every row: {', '.join(said)}."] * bool(said)
    below += [f"Left out, a wider terminal has it: {', '.join(left_out)}."] * bool(left_out)
    below += notes
    grid = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0,
        show_edge=False, caption=Text("\n".join(below)), caption_justify="left",
    )  # fmt: skip
    for column in kept:
        numbers = all(row[column][:1] in "0123456789+-" for row in rows)
        grid.add_column(heads[column], overflow="fold", justify="right" if numbers else "left")
    for row in rows:
        grid.add_row(*(Text(row[column]) for column in kept))
    return grid


def _columns_needed(
    heads: Sequence[str], rows: Sequence[Sequence[str]], kept: Iterable[int]
) -> int:
    lines = [[line for row in (heads, *rows) for line in row[at].split("\n")] for at in kept]
    return sum(max(map(_least, column)) + 1 for column in lines)


def _least(line: str) -> int:
    """Return the columns that a line needs: sentences may wrap, down to 24 columns or a word."""
    return min(len(line), max(24, *map(len, line.split() or [""])))


def command(words: Iterable[str]) -> str:
    """Return a shell command that can be pasted: broken by backslashes, between words if it fits.

    A word wider than a line goes on in the first column of the next, where the shell joins it.
    """
    text, used = "", 0
    for word in words:
        first, *rest = _pieces(word, width() - 7)
        if text and used + len(first) + 3 > width():
            text, used = f"{text} \\\n    ", 4
        elif text:
            text, used = f"{text} ", used + 1
        text += "\\\n".join([first, *rest])
        used = len(rest[-1]) if rest else used + len(first)
    return text


def _pieces(word: str, most: int) -> Iterator[str]:
    """Yield a word in quoted pieces of at most so many characters."""
    while len(shlex.quote(word)) > most:
        end = next(end for end in range(most, 0, -1) if len(shlex.quote(word[:end])) <= most)
        yield shlex.quote(word[:end])
        word = word[end:]
    yield shlex.quote(word)


def _wrapped(line: str) -> list[str]:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(
        line, width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [""]
