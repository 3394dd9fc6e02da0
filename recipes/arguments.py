"""Share what every verb's line has: help, version, a mistake in one line."""

from __future__ import annotations

import argparse
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fp8_nemo import __version__
from fp8_nemo.nemo_config.versions import SUPPORTED
from fp8_nemo.recipe.checks import unusable
from fp8_nemo.recipe.compose import choices
from fp8_nemo.recipe.mistake import printable, shortened, verb_line
from fp8_nemo.recipe.secrets import hidden

OF_ARGPARSE = {
    r"^the following arguments are required: (.*)": r"\1: must be given",
    r"^unrecognized arguments: (.*)": r"\1: no such flag or argument; --help lists them",
    r"^argument (\S+): expected one argument": r"\1: needs a value",
    r"^argument (\S+): expected at least one argument": r"\1: needs a value",
    r"^argument (\S+): invalid (?:float|token_share) value: '(.*)'": r"\1=\2: must be a number",
    r"^argument (\S+): invalid int value: '(.*)'": r"\1=\2: must be a whole number",
    r"^argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)": r"\1=\2: must be one of \3",
    r"^argument (\S+): ignored explicit argument.*": r"\1: takes no value",
    r"^argument (\S+): ": r"\1: ",
}
"""What argparse says, and what is said here instead."""
CALL = re.compile(r"python -m recipes\.(\w+)")


def end_with_reader() -> None:
    """End this process without a traceback once nobody reads what it prints, as behind `| head`."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def version() -> str:
    """Return `fp8-nemo 0.1.0, for NeMo RL main 7ea279a and v0.7.0`."""
    return f"fp8-nemo {__version__}, for NeMo RL {' and '.join(SUPPORTED)}"


class Parser(argparse.ArgumentParser):
    """Read the words after a verb; a mistake is one line, and no flag may be cut short."""

    def __init__(self, verb: str, text: str | None, more: str = "") -> None:
        """Begin with --help and --version.

        Args:
            verb: as its file is called.
            text: that file's docstring, whose examples are shown as the user has called this.
            more: what --help says after the arguments.
        """
        super().__init__(
            verb_line(verb), allow_abbrev=False, epilog=more,
            description=CALL.sub(lambda call: verb_line(call[1]), (text or "").strip()),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        self.add_argument("--version", action="version", version=version())

    def error(self, message: str) -> NoReturn:
        """Say a mistake in one line, without the usage, and without a secret that was typed."""
        message = printable(hidden(message))
        for theirs, ours in OF_ARGPARSE.items():
            message = re.sub(theirs, ours, message)
        self.exit(2, f"{self.prog}: error: {message}\n")


def cells_parser(verb: str, text: str | None) -> Parser:
    """Make the parser of a verb that takes groups, keys and sweeps; `read_cells` uses it."""
    parser = Parser(verb, text, choices())
    text = "options and keys of the run, listed below"
    parser.add_argument("words", metavar="KEY=VALUE", nargs="*", help=text)
    text = "a run for each combination of the values"
    parser.add_argument("-m", "--multirun", action="store_true", help=text)
    return parser


def read_cells(parser: Parser, words: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the verb's own flags, and the words for `compose_plans`, which names what is wrong."""
    options, others = parser.parse_known_args(words)
    return options, [*options.words, *others, *["-m"] * options.multirun]


def path(text: str) -> Path:
    """Read a path of a line.

    Raises:
        argparse.ArgumentTypeError: it is empty, or no file can be called so.
    """
    if not text:
        raise argparse.ArgumentTypeError("is empty, must name a file or a folder")
    if reason := unusable(text):
        raise argparse.ArgumentTypeError(f"{shortened(text)}: {reason}")
    return Path(text)


def run_dir_of(verb: str, text: str | None, words: Sequence[str] | None) -> Path:
    """Return the run directory, the only argument of a verb."""
    parser = Parser(verb, text)
    parser.add_argument("path", metavar="RUN_DIR", type=path, help="made by grpo, with a plan.json")
    return parser.parse_args(words).path
