"""Run a verb in a process of its own, and pass signals on to it."""

from __future__ import annotations

import signal
import subprocess
import sys

INTERRUPTED = 130  # exit code, as a shell reports SIGINT


def call_verb(verb: str, *arguments: str) -> int:
    """Run one of the recipes in a fresh process of this interpreter; its exit code.

    A child that a signal killed could not say so: it is said here, and the code is a shell's.
    Ctrl-C reaches the child too, SIGTERM is passed on; the child stops and says so, this waits for
    it, and gives INTERRUPTED however the child ended.
    """
    asked = list[int]()
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # as in a script's background, where the child ignores it too
        # An exception could fall between the child's end and the reading of its code, then 0.
        signal.signal(signal.SIGINT, lambda number, _: asked.append(number))
    child = subprocess.Popen([sys.executable, "-m", f"fp8_nemo.recipes.{verb}", *arguments])

    def pass_on(number: int, _: object) -> None:
        """SIGTERM, which reaches this process alone."""
        asked.append(number)
        child.terminate()

    before_term = signal.signal(signal.SIGTERM, pass_on)
    code = child.wait()
    signal.signal(signal.SIGINT, before)
    signal.signal(signal.SIGTERM, before_term)
    if asked:
        return INTERRUPTED
    if code < 0:
        often = ", often for lack of memory" if -code == signal.SIGKILL else ""
        why = f"killed by signal {-code} ({signal.strsignal(-code)}){often}"
        goes_on = "the same line goes on from its last checkpoint, or begins again"
        print(f"{' '.join(arguments)}: {why}; {goes_on}", file=sys.stderr)
        return 128 - code
    return code
