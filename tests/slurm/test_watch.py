"""`recipes.queue --watch` against a real queue: in a pipe, and as a person has it before them."""

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time

import pytest

from tests.slurm.conftest import ROOT

FAST, HOLD = "cluster.preflight=false", "cluster.extra=[--hold]"
CLEARED = "\x1b[2J\x1b[H"
STYLE = re.compile(r"\x1b\[[0-9;]*m")
CTRL_C = b"\x03"


def shown(ours: int, seconds: float, until: str) -> str:
    """Return what a terminal shows, up to a text."""
    text, end = "", time.monotonic() + seconds
    while until not in text:
        assert time.monotonic() < end, f"{until!r} is not in {text!r}"
        if select.select([ours], [], [], 0.5)[0]:
            text += os.read(ours, 1 << 16).decode()
    return text


def test_a_watched_queue_is_looked_at_until_nothing_is_in_it(slurm, small, tmp_path):
    words = ["cluster.setup='sleep 10; exit 3'", FAST, "cluster.requeue=false"]
    [job] = slurm.submit(*small, *words)
    started = time.monotonic()
    watched = slurm.verb("queue", tmp_path / "o", "--watch")
    assert watched.returncode == 0 and job.id not in slurm.queue()
    titles = [
        line.rstrip() for line in watched.stdout.splitlines() if line.startswith("tiny-llama: ")
    ]
    assert len(titles) >= 2 and titles[-1] == "tiny-llama: 1 failed"
    assert {*titles[:-1]} <= {"tiny-llama: 1 pending", "tiny-llama: 1 running"}
    assert time.monotonic() - started < 60


@pytest.mark.long
def test_a_terminal_is_drawn_anew_until_ctrl_c_which_leaves_the_jobs_alone(slurm, small, tmp_path):
    jobs = slurm.submit("-m", *small, HOLD, "seed=1,2")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (24, 80))
    own = {name: value for name, value in slurm.environment.items() if name != "COLUMNS"}
    line = [sys.executable, "-m", "recipes.queue", str(tmp_path / "o"), "--watch"]
    watch = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *line],  # Ctrl-C reaches those whose terminal it is
        cwd=ROOT, env=own | {"TERM": "xterm", "NO_COLOR": "1"}, stdin=theirs, stdout=theirs,
        stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    try:
        first = shown(ours, 20, until=jobs[1].id)
        assert CLEARED not in first and "tiny-llama: 2 pending" in first
        slurm.call("scancel", jobs[1].id)
        second = shown(ours, 30, until="its job is gone")
        assert CLEARED in second and "tiny-llama: 1 pending, 1 stopped" in second
        lines = STYLE.sub("", second.rpartition(CLEARED)[2]).split("\r\n")
        assert [text for text in lines if len(text.rstrip()) > 80] == []
        os.write(ours, CTRL_C)
        assert watch.wait(10) == 0
        assert "Traceback" not in shown(ours, 5, until="^C")
    finally:
        watch.kill()
        os.close(ours)
    assert jobs[0].id in slurm.queue()
    slurm.verb("queue", tmp_path / "o", "--cancel")
