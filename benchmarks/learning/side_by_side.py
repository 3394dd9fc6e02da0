"""The cells of a sweep side by side on this machine's GPUs, several on each; the local backend's.

python -m benchmarks.learning.side_by_side --gpus 0,1,2,3 --each 3 \
    -m sweep=experiment outputs=study/dense

`--each` runs share a GPU; whether that gains anything is for the machine to show
(docs/research/log.md). Everything but `--gpus` and `--each` is as for recipes.grpo, and the same
line goes on with what is not finished. What a run prints is in its log/side-by-side.log. Asked to
end (Ctrl-C, SIGTERM, SIGUSR1), it starts no run any more and asks those under way to save. The exit
code is the first of a run that is not 0.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import NamedTuple

from fp8_nemo.recipes.run import problems_with
from rich.progress import Progress

from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.recipe.compose import ComposeError
from fp8_nemo.runs.metrics import RunDirError
from fp8_nemo.runs.process import INTERRUPTED
from fp8_nemo.runs.run_dir import Frozen, freeze

LOG = "side-by-side.log"


class Ended(NamedTuple):
    """What became of a run: `Ended(Path("study/..."), 0, 312.0)`."""

    path: Path
    code: int
    seconds: float


class Runs:
    """Runs under way, at most one for each place on a GPU."""

    def __init__(self, gpus: list[str], each: int) -> None:
        self.places: SimpleQueue[str] = SimpleQueue()
        for gpu in gpus * each:
            self.places.put(gpu)
        self.lock, self.over = Lock(), False
        self.under_way: set[subprocess.Popen[bytes]] = set()

    def run(self, cell: Frozen) -> Ended:
        """Run one cell once a place is free; INTERRUPTED if it did not begin or was stopped."""
        gpu, start = self.places.get(), time.monotonic()
        try:
            code = self._process(cell.path, gpu)
        except OSError as error:
            print(f"{cell.path}: {error}", file=sys.stderr)
            code = 1
        finally:
            self.places.put(gpu)
        return Ended(cell.path, code, time.monotonic() - start)

    def end(self) -> None:
        """Start none any more, and let those under way save."""
        with self.lock:
            self.over = True
            for process in self.under_way:
                process.terminate()

    def _process(self, path: Path, gpu: str) -> int:
        own = {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "1"}
        own |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "fp8_nemo.recipes.run", str(path)]
        (path / "log").mkdir(exist_ok=True)
        with (path / "log" / LOG).open("ab") as log:
            with self.lock:
                if self.over:
                    return INTERRUPTED
                process = subprocess.Popen(
                    command, env=os.environ | own, stdout=log, stderr=log, start_new_session=True
                )
                self.under_way.add(process)
            code = process.wait()
        with self.lock:
            self.under_way.discard(process)
        # Asked before its own handler stood, it is ended by the signal and has nothing to save.
        return INTERRUPTED if code == -signal.SIGTERM and self.over else code


def unfinished(words: list[str]) -> list[Frozen]:
    """Check and freeze, as recipes.grpo does, the cells that are to run; return them.

    Raises:
        ComposeError: the line is wrong, or a cell cannot run here.
        RunDirError: a directory cannot be made or read.
    """
    plans = compose_plans(words)
    lines = [line for plan in plans for line in problems_with(plan)]
    for plan in plans:
        if plan.backend != "local" or plan.recipe.cluster.kind != "here":
            lines.append(f"{plan.cell}: side_by_side runs backend=local, cluster=here alone")
    if lines:
        raise ComposeError(lines)
    frozen = freeze(plans)
    cells = [cell for cell in frozen if cell.state != "finished"]
    print(f"{len(frozen)} cells, {len(frozen) - len(cells)} finished", flush=True)
    return cells


def main() -> int:
    """Run what is not finished; a line for each run that ends."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--gpus", default="0", help="numbers")
    parser.add_argument("--each", type=int, default=1, help="runs on one GPU")
    options, words = parser.parse_known_args()
    try:
        cells = unfinished(words)
    except (ComposeError, RunDirError) as error:
        print(error, file=sys.stderr)
        return 2
    gpus = options.gpus.split(",")
    runs, codes = Runs(gpus, options.each), list[int]()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: runs.end())
    with Progress() as bar, ThreadPoolExecutor(len(gpus) * options.each) as pool:
        task = bar.add_task("runs", total=len(cells))
        for future in as_completed([pool.submit(runs.run, cell) for cell in cells]):
            ended = future.result()
            codes.append(ended.code)
            bar.console.print(f"{ended.path}: exit {ended.code} after {ended.seconds:.0f} s")
            bar.advance(task)
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    sys.exit(main())
