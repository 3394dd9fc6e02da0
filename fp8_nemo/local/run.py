"""Attempt a frozen plan once: environment, log, progress bar, one line if it stops itself."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# How often a thread looks before it sleeps. With libgomp's 300,000 a run beside one busy process on
# two cores took 37 s, so 10, and alone the 9 that both take (docs/research/log.md).
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

import transformers
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from fp8_nemo.correction.health import UnstableError, summary
from fp8_nemo.correction.mismatch import LogprobError
from fp8_nemo.glue.recalibrate import RecalibrateError
from fp8_nemo.glue.wire import RefitError
from fp8_nemo.local.checkpoint import CheckpointError
from fp8_nemo.local.grpo import GrpoLoop, Report
from fp8_nemo.local.modules.deterministic import repeat_exactly
from fp8_nemo.local.rollout import DynamicSamplingError
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.model_dir import model_path
from fp8_nemo.recipe.own.model import ModelError
from fp8_nemo.recipe.own.reward import RewardError
from fp8_nemo.runs import metrics, process, run_dir
from fp8_nemo.runs.provenance import attempt, environment, starting_point
from fp8_nemo.runs.terminal import console, tell

DIVERGED = (
    RefitError, RecalibrateError, LogprobError, UnstableError, DynamicSamplingError, RewardError,
)  # fmt: skip
SHOWN = {
    "reward": "reward/mean",
    "val": "val/accuracy",
    "kl": "mismatch/kl",
    "s/step": "time/step",
}

NOTHING_LEARNED = (
    "note: no step had a gradient: all answers to a problem had the same reward. "
    "grpo.max_new_tokens may cut right answers off, the model's tokenizer may lack characters of "
    "the problems, or the model solves none of them, or all"
)
NOTHING_FITTED = (
    "note: no update was made: every gradient overflowed in FP16. The loss scale halves at each; "
    "train longer, or begin with a smaller precision.loss_scale"
)


def run(plan: Plan, path: Path) -> int:
    """Train a plan; return 0 after the last step, 2 for an unusable directory, 1 if a proof fails.

    SIGUSR1 (Slurm's, before the time limit), SIGTERM and Ctrl-C save after the current step and
    stop; Ctrl-C again stops at once.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    repeat_exactly()
    stop = _stop_on_signals(path)
    try:
        with run_dir.locked(path):
            step = _attempt(plan, path, stop)
    except (ModelError, CheckpointError, metrics.RunDirError, OSError, *DIVERGED) as error:
        if logging.getLogger().hasHandlers():  # there is a log: the directory is this attempt's
            logging.exception("stopped")
        print(error if str(path) in str(error) else f"{path}: {error}", file=sys.stderr)
        return 1 if isinstance(error, DIVERGED) else 2
    except KeyboardInterrupt:
        saved = run_dir.checkpoints(path)
        goes_on = f"goes on from {saved[-1].name}" if saved else "begins again, nothing was saved"
        print(f"{path}: stopped; the same line {goes_on}", file=sys.stderr)
        return process.INTERRUPTED
    if step < plan.recipe.grpo.steps:
        print(f"{path}: stopped, step {step} is saved; the same line goes on", file=sys.stderr)
        return process.INTERRUPTED
    rows = metrics.read_metrics(path)
    tell(f"{path}: finished, {plan.recipe.grpo.steps} steps")
    if health := summary(rows, plan.recipe.glue.verify):
        tell(f"health: {health}")
    if note := _learned_nothing([row for row in rows if row["step"]]):
        tell(note)
    return 0


def _stop_on_signals(path: Path) -> threading.Event:
    """Return the event that SIGUSR1, SIGTERM and Ctrl-C set; a second Ctrl-C interrupts at once.

    A process that was started to ignore Ctrl-C goes on ignoring it.
    """
    stop = threading.Event()
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())

    def interrupted(*_: object) -> None:
        """Save after this step; stop at once when asked again."""
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        print(f"{path}: saves after this step; Ctrl-C again stops at once", file=sys.stderr)

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupted)
    return stop


def _learned_nothing(rows: list[dict[str, Any]]) -> str:
    """Return the note on a run of no gradient, though a correction left tokens to learn from."""
    rejected = any(row.get("correction/masked_fraction") == 1 for row in rows)
    if not rows or rejected or any(row.get("train/grad_norm") != 0 for row in rows):
        return ""
    skipped = any(row.get("train/skipped_updates") for row in rows)
    return NOTHING_FITTED if skipped else NOTHING_LEARNED


def _attempt(plan: Plan, path: Path, stop: threading.Event) -> int:
    log = run_dir.attempt_log(path)
    logging.raiseExceptions = False  # a full disk is told in one line, by what the run stops at
    logging.basicConfig(filename=log, level=logging.INFO, format="%(asctime)s %(message)s")
    with attempt(path, **starting_point(plan.recipe, path)), progress(plan) as report:
        logging.info("environment %s", environment())
        return _loaded(plan, path).train(report, stop.is_set)


def _loaded(plan: Plan, path: Path) -> GrpoLoop:
    """Load model and tokenizer.

    Raises:
        ModelError: they cannot be, though each file is whole.
    """
    try:
        loop = GrpoLoop(plan, path)
        loop.chat.prompt("1+1")
    except Exception as error:  # what transformers, tokenizers and jinja2 raise is theirs
        folder = model_path(plan.recipe.model)
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise ModelError(f"{folder}: this model cannot be loaded ({why})") from error
    return loop


@contextmanager
def progress(plan: Plan) -> Iterator[Report]:
    """Show one line with the time left on a terminal, elsewhere a line every tenth of the way.

    The line fits 80 columns, and stands before the model is loaded. Every row goes to the log.
    """
    shown, steps = console(), plan.recipe.grpo.steps
    every, name = max(1, steps // 10), f"{plan.cell} s{plan.recipe.seed}"
    bar = Progress(
        SpinnerColumn(),
        TextColumn("step {task.completed}/{task.total}", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("left  {task.fields[numbers]}", table_column=Column(no_wrap=True)),
        console=shown,
        disable=not shown.is_terminal,
    )
    latest: dict[str, str] = {}
    with bar:
        task = bar.add_task("", total=steps, numbers="loads the model")

        def report(row: dict[str, Any]) -> None:
            """Show one step."""
            logging.info("%s", row)
            if row.get("health"):
                tell(f"{name}  {row['health']}")
            latest.update({word: f"{row[key]:.2g}" for word, key in SHOWN.items() if key in row})
            numbers = "  ".join(f"{word} {latest[word]}" for word in SHOWN if word in latest)
            bar.update(task, completed=row["step"], numbers=numbers)
            if not shown.is_terminal and row["step"] % every == 0:
                tell(f"{name}  step {row['step']}/{steps}  {numbers}")

        yield report
