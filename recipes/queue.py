"""Show where runs stand: in Slurm's queue, on which step, why they wait or ended.

python -m recipes.queue outputs/llama31-8b [--watch | --cancel]

--cancel takes the jobs of these runs out of the queue; the line that queued
them goes on from their checkpoints.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from fp8_nemo.recipe.mistake import printable
from fp8_nemo.report.runs import find_runs
from fp8_nemo.runs.metrics import RunDirError
from fp8_nemo.runs.queue import QueueError, Stand, cancel, has_slurm, log_of, queue_table, stands
from fp8_nemo.runs.terminal import console, short_path, tell

from .arguments import Parser, end_with_reader, path

EVERY = 10  # seconds between two looks


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 2 if there is no run, or Slurm does not answer."""
    options = _options(arguments)
    try:
        found = _look(options.paths)
        if options.cancel:
            return _cancel(found)
        while options.watch and any(each.queued for each in found):
            time.sleep(EVERY)
            found = _look(options.paths, clear=sys.stdout.isatty())
    except (QueueError, RunDirError) as error:
        tell(error, sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    return 0


def _look(paths: list[Path], clear: bool = False) -> list[Stand]:
    """Print where the runs below some folders stand."""
    runs = [short_path(run) for path in paths for run in find_runs(path) if run.is_dir()]
    if not runs:
        raise RunDirError(f"{printable(', '.join(map(str, paths)))}: no run directory here")
    found = stands(dict.fromkeys(runs))
    shown = console()
    if clear:
        shown.clear()
    shown.print(queue_table(found))
    if not has_slurm():
        tell("note: there is no squeue on PATH; states are what the run directories say")
    logs = [log for each in found if each.job and (log := log_of(each.path, each.job)).exists()]
    if logs:
        latest = max(logs, key=lambda log: log.stat().st_mtime)
        tell(f"a run's log is RUN_DIR/log/slurm-JOB.out, the latest:\n{latest}")
    return found


def _cancel(found: list[Stand]) -> int:
    numbers = [each.job for each in found if each.queued and each.job]
    if numbers:
        cancel(numbers)
    tell(f"cancelled: {', '.join(numbers)}" if numbers else "nothing of it is in the queue")
    return 0


def _options(words: list[str] | None) -> argparse.Namespace:
    parser = Parser("queue", __doc__)
    text = "run directories, or folders of them; outputs if not given"
    parser.add_argument("paths", metavar="PATH", nargs="*", type=path, help=text)
    text = f"look again every {EVERY} seconds, until none is in the queue"
    parser.add_argument("--watch", action="store_true", help=text)
    parser.add_argument("--cancel", action="store_true", help="take them out of the queue")
    options = parser.parse_args(words)
    options.paths = options.paths or [Path("outputs")]
    return options


if __name__ == "__main__":
    end_with_reader()
    raise SystemExit(main())
