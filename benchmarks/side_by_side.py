"""The cells of a sweep side by side on this machine's GPUs, several on each; the local backend's.

python benchmarks/side_by_side.py --gpus 0,1,2,3 --each 4 -m sweep=experiment outputs=study/dense

A small model leaves most of a GPU idle, so several runs share one. Everything but `--gpus` and
`--each` is as for recipes.grpo, and the same line goes on with what is not finished. What a run
prints is in its log/side-by-side.log. Asked to end (SIGTERM), it lets every run save and starts
none. The exit code is the first of a run that is not 0.
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
from typing import NamedTuple

from rich.progress import Progress

from fp8_nemo.compose import ComposeError, compose_plans
from fp8_nemo.run_dir import INTERRUPTED, Frozen, RunDirError, freeze

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
        self.under_way: set[subprocess.Popen[bytes]] = set()
        self.over = False

    def run(self, cell: Frozen) -> Ended:
        """One cell, once a place is free."""
        gpu, start = self.places.get(), time.monotonic()
        code = INTERRUPTED if self.over else self._process(cell.path, gpu)
        self.places.put(gpu)
        return Ended(cell.path, code, time.monotonic() - start)

    def end(self) -> None:
        """Start none any more, and let those under way save."""
        self.over = True
        for process in list(self.under_way):
            process.terminate()

    def _process(self, path: Path, gpu: str) -> int:
        own = {"CUDA_VISIBLE_DEVICES": gpu, "OMP_NUM_THREADS": "1"}
        own |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "fp8_nemo.recipes.run", str(path)]
        (path / "log").mkdir(exist_ok=True)
        with (path / "log" / LOG).open("ab") as log:
            process = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log)
            self.under_way.add(process)
            code = process.wait()
            self.under_way.discard(process)
        return code


def main() -> int:
    """Run what is not finished; a line for each run that ends."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--gpus", default="0", help="numbers")
    parser.add_argument("--each", type=int, default=1, help="runs on one GPU")
    options, words = parser.parse_known_args()
    try:
        frozen = freeze(compose_plans(words))
    except (ComposeError, RunDirError) as error:
        print(error, file=sys.stderr)
        return 2
    cells = [cell for cell in frozen if cell.state != "finished"]
    print(f"{len(frozen)} cells, {len(frozen) - len(cells)} finished", flush=True)
    gpus = options.gpus.split(",")
    runs, codes = Runs(gpus, options.each), list[int]()
    signal.signal(signal.SIGTERM, lambda *_: runs.end())
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
