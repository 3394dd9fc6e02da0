"""The memory of a process is its own, whatever the process held that started it."""

import subprocess
import sys

import pytest

from benchmarks.speed.checkpoint_memory import peak_of

MIB = 2**20


def child(size: int) -> list[str]:
    """A process that holds so many MiB for a moment."""
    program = f"import time; held = bytearray({size} * {MIB}); time.sleep(0.2)"
    return [sys.executable, "-c", program]


def test_a_parent_that_held_more_does_not_count():
    held = bytearray(400 * MIB)
    small = peak_of(child(1))
    del held
    assert small < 100 * MIB < 200 * MIB < peak_of(child(200)) < 300 * MIB


def test_a_command_that_fails_has_no_peak():
    with pytest.raises(subprocess.CalledProcessError):
        peak_of(["false"])
