"""Offer the verbs: one file, one command. Nouns live in `fp8_nemo/`.

Python reads this file before a verb's imports, which take a second: Ctrl-C ends those quietly too.
"""

import sys

INTERRUPTED = 130  # of `fp8_nemo.runs.process`, which is yet to be imported
_shown_before = sys.excepthook


def _show(kind, error, traceback) -> None:
    """Show what nothing caught; of Ctrl-C nothing is shown, the exit code says it.

    Raises:
        SystemExit: it was Ctrl-C.
    """
    if issubclass(kind, KeyboardInterrupt):
        raise SystemExit(INTERRUPTED)
    _shown_before(kind, error, traceback)


sys.excepthook = _show
