"""Type lines in processes that are forked from one that has loaded torch, where a user's start.

Starting one takes 5 s of a processor, nearly all of it imports; forking one takes none. What a line
does is the same: a module runs as `__main__`, with an environment, files and exit code of its own.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

from fp8_nemo.runs import process

ROOT = Path(__file__).parents[1]
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["tests.loaded"])


class Typed:
    """`python -m MODULE WORDS` in the clone, forked; the runs that it starts are forked too."""

    def __init__(self, module: str, *words: object, terminal: Path | None = None) -> None:
        """Start it.

        Args:
            module: to be run.
            words: its arguments.
            terminal: where it writes, instead of files.
        """
        self._folder = tempfile.TemporaryDirectory()
        files = [Path(self._folder.name, name) for name in ("out", "err")]
        self._files = files if terminal is None else [terminal, terminal]
        self._reads = terminal is None
        self._line = [module, *map(str, words)]
        arguments = self._line, self._files, dict(os.environ)
        self._process = FORKING.Process(target=_typed, args=arguments)
        self._process.start()

    @property
    def pid(self) -> int:
        """Number of the process."""
        assert self._process.pid
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.is_alive()

    def end(self, seconds: float = 300) -> subprocess.CompletedProcess[str]:
        """Wait for its end; it is killed after so long."""
        self._process.join(seconds)
        self._process.kill()
        self._process.join()
        said = [file.read_text() if self._reads else "" for file in self._files]
        self._folder.cleanup()
        return subprocess.CompletedProcess(self._line, self._process.exitcode or 0, *said)


def typed(module: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE WORDS` to its end."""
    return Typed(module, *words).end()


def _typed(line: Sequence[str], files: Sequence[Path], environment: Mapping[str, str]) -> None:
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    process.subprocess = SimpleNamespace(Popen=Forked)
    os._exit(_as_main(*line))


class Forked:
    """`subprocess.Popen([python, "-m", MODULE, *WORDS])`, as far as `runs/process.py` needs it."""

    def __init__(
        self, command: Sequence[str], preexec_fn: Callable[[], None] | None, process_group: int
    ) -> None:
        """Start it."""
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            os.setpgid(0, process_group)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if preexec_fn:
                preexec_fn()
            os._exit(_as_main(*command[2:]))

    def wait(self) -> int:
        """Return its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)


def _as_main(module: str, *words: str) -> int:
    """Run a module as Python's `-m` does; its exit code."""
    sys.modules.pop(module, None)  # else runpy warns of it
    sys.argv = [module, *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return 0
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
