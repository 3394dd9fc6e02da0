"""What every verb's command line has in common: help, version, a mistake in one line."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import NoReturn

from fp8_nemo import __version__
from fp8_nemo.nemo_config.versions import SUPPORTED

HELP, VERSION = ("-h", "--help"), "--version"


def version() -> str:
    """Return `fp8-nemo 0.1.0, for NeMo RL main 7ea279a and v0.7.0`."""
    return f"fp8-nemo {__version__}, for NeMo RL {' and '.join(SUPPORTED)}"


def answered(words: Collection[str], text: str) -> bool:
    """Print the help or the version if a command line asks for one; say whether it did.

    Args:
        words: the arguments.
        text: the verb's help.
    """
    if VERSION in words:
        print(version())
    elif {*HELP} & {*words}:
        print(text.strip())
    else:
        return False
    return True


class Parser(argparse.ArgumentParser):
    """argparse with the module's text as it is written, and without guesses at half a flag."""

    def __init__(self, verb: str, text: str | None) -> None:
        super().__init__(
            f"recipes.{verb}", description=text, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        self.add_argument(VERSION, action="version", version=version())

    def error(self, message: str) -> NoReturn:
        """Say a mistake in one line, without the usage."""
        self.exit(2, f"{self.prog}: {message}\n")
