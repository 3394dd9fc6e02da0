"""Run verbs in processes of their own that start fast: forked from one that has loaded torch.

A child can be killed at any moment, as a user's process can, and costs no start of torch.
"""

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.forked import FORKING

CURVES = ("metrics.jsonl", "rows.jsonl")
CHANGES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod")
"""Python's audit events, which come before the change."""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def nothing(number: int) -> None:
    """Let a change be."""


class Child:
    """One call in a process of its own, its output in files."""

    def __init__(
        self,
        output: Path,
        call: Callable[..., int],
        *arguments: Any,
        before: Callable[[int], None] = nothing,
    ) -> None:
        """Start `call(*arguments)`, whose result is the exit code.

        Args:
            output: file of what it prints; `output.err` and, once it has come to its end,
                `output.changes`, how many changes it began, lie beside it.
            call: a function of a module.
            arguments: of the call.
            before: called in the child before each change of a file or folder beside `output`,
                with the change's number from 1, and once after the last one.
        """
        self.output = output
        self._process = FORKING.Process(
            target=_in_child, args=(output, call, arguments, before), daemon=True
        )
        self._process.start()

    def kill(self, seconds: float) -> bool:
        """SIGKILL after so long; whether it was still there, or had killed itself."""
        self._process.join(seconds)
        self._process.kill()
        self._process.join()
        return self._process.exitcode == -signal.SIGKILL

    def end(self, seconds: float = 300) -> int:
        """Return its exit code."""
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"still there: {self.said}{self.error}"
        return self._process.exitcode

    @property
    def said(self) -> str:
        """What it printed."""
        return self.output.read_text()

    @property
    def error(self) -> str:
        """What it printed to standard error."""
        return self.output.with_suffix(".err").read_text()

    @property
    def changes(self) -> int:
        """How many changes of files it began."""
        return int(self.output.with_suffix(".changes").read_text())


def _in_child(
    output: Path,
    call: Callable[..., int],
    arguments: tuple[Any, ...],
    before: Callable[[int], None],
) -> None:
    code = 70
    error = output.with_suffix(".err")
    with output.open("w", buffering=1) as file, error.open("w", buffering=1) as errors:
        watch = Watch(str(output.parent), before)
        with redirect_stdout(file), redirect_stderr(errors):
            try:
                code = call(*arguments)
            except SystemExit as stopped:
                code = stopped.code
            except BaseException:
                traceback.print_exc()
        watch.end()
    output.with_suffix(".changes").write_text(str(watch.changes))
    os._exit(code)


class Watch:
    """Count the changes of files below a folder, and tell of each before it is made."""

    def __init__(self, folder: str, before: Callable[[int], None]) -> None:
        self.changes, self._folder, self._before = 0, folder, before
        self._tells = False  # `before` may change files of its own
        sys.addaudithook(self._hear)

    def end(self) -> None:
        """Tell once more, and hear no more."""
        self._tells = True
        self._before(self.changes + 1)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or self._tells or not str(arguments[0]).startswith(self._folder):
            return
        if event != "open" or arguments[2] & WRITING:
            self._tells = True
            self._before(self.changes + 1)
            self._tells = False
            self.changes += 1


@dataclass
class Dies:
    """Kill the process before its change of a number."""

    at: int | None

    def __call__(self, number: int) -> None:
        """Hear of a change."""
        if number == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def verb(name: str, *words: str) -> int:
    """Call a verb; to be given to `Child`."""
    return import_module(f"fp8_nemo.recipes.{name}").main(list(words))


def frozen(*words: str) -> int:
    """Make the run directories of a line's cells, and run none."""
    from fp8_nemo.plan.cells import compose_plans
    from fp8_nemo.runs.metrics import RunDirError
    from fp8_nemo.runs.run_dir import freeze

    try:
        print(*(f"{each.state} {each.path}" for each in freeze(compose_plans(words))), sep="\n")
    except RunDirError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def kept_code(outputs: str, package: str) -> int:
    """Keep a small package as a job's code, as a submission does this one."""
    from fp8_nemo.runs import frozen_code

    frozen_code._packages = lambda: {"small": Path(package)}
    print(frozen_code.freeze_code(Path(outputs)))
    return 0


def submitted(outputs: str, package: str, *words: str) -> int:
    """Write what a line's one cell needs as a job, but queue nothing."""
    from fp8_nemo.plan.cells import compose_plans
    from fp8_nemo.runs import frozen_code
    from fp8_nemo.runs.sbatch import write_job_files

    frozen_code._packages = lambda: {"small": Path(package)}
    line = (*words, f"outputs={outputs}")
    if code := frozen(*line):
        return code
    write_job_files(compose_plans(line)[0], frozen_code.freeze_code(Path(outputs)))
    return 0


def served(run: str, copy: str) -> int:
    """Copy a run's directory, whole, unless that is done, and convert its model there."""
    done = Path(copy) / "copied"
    if not done.exists():
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run, copy)
        done.touch()
    return verb("quantize_checkpoint", copy, f"{copy}/fp8")


def trained(*words: str) -> int:
    """Freeze a line's one cell and run it in the same process, where a verb starts another one."""
    from fp8_nemo.plan.cells import compose_plans
    from fp8_nemo.runs.run_dir import run_path

    code = frozen(*words)
    return code or verb("run", str(run_path(compose_plans(words)[0])))


def undisturbed(output: Path, call: Callable[..., int], *arguments: Any) -> tuple[float, int]:
    """Let a call come to its end; its seconds, and how many changes of files it began."""
    start = time.monotonic()
    child = Child(output, call, *arguments)
    assert child.end() == 0, child.said + child.error
    return time.monotonic() - start, child.changes


def tree(folder: Path, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return all below a folder by its path: a file's bytes, of metrics its rows, of a folder None.

    Args:
        folder: to be read.
        but: parts of paths, of files that say when or how often something was done.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir() or any(part in name for part in but):
            continue
        found[name] = (
            rows(path) if path.name in ("metrics.jsonl", "rows.jsonl") else path.read_bytes()
        )
    return found


def rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a curve without its times, and without a last one that is cut short."""
    lines = file.read_text().split("\n")[:-1]
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith("time/")}
        for line in lines
    ]
