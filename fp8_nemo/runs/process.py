"""Start a line's cells: each in a process of its own, signals passed on, or as Slurm's jobs."""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable

from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.mistake import verb_line
from fp8_nemo.runs import slurm
from fp8_nemo.runs.run_dir import Frozen, freeze
from fp8_nemo.runs.sbatch import container_notes
from fp8_nemo.runs.terminal import console, tell

PR_SET_PDEATHSIG = 1  # linux/prctl.h
INTERRUPTED = 130  # exit code, as a shell reports SIGINT


def start(plans: list[Plan]) -> int:
    """Run every cell here, or queue it, as the line's cluster says; notes come first.

    Returns:
        The first exit code that is not 0.

    Raises:
        RunDirError: a cell's directory cannot be made.
        SubmitError: Slurm refuses a cell, or has one in its queue already.
    """
    notes = [note for plan in plans for note in plan.notes] + container_notes(plans)
    if plans[0].recipe.cluster.kind == "slurm":
        notes += slurm.refuse(plans)
        with slurm.one_line_at_a_time(plans):
            return queue_cells(plans, slurm.prepare(plans), notes)
    cells = freeze(slurm.not_queued(plans))
    _tell_notes(notes)
    return run_cells(cells)


def run_cells(cells: list[Frozen]) -> int:
    """Run every cell in a process of its own; one that is finished is left as it is."""
    codes = list[int]()
    for each in cells:
        if each.state == "finished":
            tell(f"{each.path}: finished, {each.steps} steps; more grpo.steps go on from there")
        elif INTERRUPTED not in codes:
            tell(f"{each.path}: starts, the first step may take a minute")
            codes.append(call_verb("run", str(each.path)))
    return next(filter(None, codes), 0)


def queue_cells(plans: list[Plan], jobs: list[slurm.Job], notes: list[str]) -> int:
    """Queue every cell in Slurm, or none; what is finished or in the queue is left."""
    _tell_notes(notes)
    console().print(slurm.jobs_table(plans, jobs))
    done = slurm.submit(plans, jobs)
    for job in done:
        tell(f"job {job.id}: {job.path}; watch it: {job.watch}")
    if len(plans) > 1:
        folders = shlex.join(sorted({plan.recipe.outputs for plan in plans}))
        tell(f"{len(done)} queued; where they stand: {verb_line('queue')} {folders}")
    return 0


def _tell_notes(notes: Iterable[str]) -> None:
    for note in dict.fromkeys(notes):
        tell(f"note: {note}")


def _ends_with_its_parent() -> Callable[[], None] | None:
    """Return what a child calls before it becomes another program; nothing but on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl

    def ask() -> None:
        """Ask Linux, in the child, to end it with its parent."""
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it was killed before this could ask
            os.kill(os.getpid(), signal.SIGTERM)

    return ask


def call_verb(verb: str, *arguments: str) -> int:
    """Run one of the recipes in a fresh process of this interpreter; its exit code.

    On Linux it ends with this process, as if SIGTERM had come, also where that is killed: else it
    would train on unseen. A child that a signal killed could not say so: it is said here, and the
    code is a shell's.
    Ctrl-C, SIGINT and SIGTERM are passed on once each: the child has a process group of its own,
    so none reaches it by itself. It stops and says so, this waits for it, and gives INTERRUPTED
    however the child ended.
    """
    asked: list[int] = []
    early: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: object) -> None:
        """Pass a signal on; an exception instead could fall before the child's code is read."""
        asked.append(number)
        for child in children:
            child.send_signal(number)
        if not children:
            early.append(number)

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a script's background
        numbers.remove(signal.SIGINT)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    command = [sys.executable, "-m", f"fp8_nemo.recipes.{verb}", *arguments]
    child = subprocess.Popen(command, preexec_fn=_ends_with_its_parent(), process_group=0)
    children.append(child)
    for number in early:  # they came before there was a child to send them to
        child.send_signal(number)
    code = child.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    if asked:
        return INTERRUPTED
    if code < 0:
        often = ", often for lack of memory" if -code == signal.SIGKILL else ""
        why = f"killed by signal {-code} ({signal.strsignal(-code)}){often}"
        goes_on = "the same line goes on from its last checkpoint, or begins again"
        print(f"{' '.join(arguments)}: {why}; {goes_on}", file=sys.stderr)
        return 128 - code
    return code
