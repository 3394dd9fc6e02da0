"""No line is wider than the terminal, for any verb, at 80, 100 and 160 columns."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console

from fp8_nemo.runs.terminal import command, table
from tests.conftest import SMALL
from tests.forked import Typed

ROOT = Path(__file__).parents[2]
ARCHIVE = ROOT / "benchmarks" / "results" / "runs.jsonl.gz"


def seen(columns, *words, kind="dumb"):
    """What a verb writes to a terminal of so many columns, lines as they are shown."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, (50, columns))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", kind)
        patch.setenv("NO_COLOR", "1")
        patch.delenv("COLUMNS", raising=False)
        child = Typed("recipes.cli", *words, terminal=Path(os.ttyname(theirs)))
    text = b""
    while child.is_alive or select.select([ours], [], [], 0)[0]:
        if select.select([ours], [], [], 0.02)[0]:
            text += os.read(ours, 1 << 16)
    child.end()
    os.close(theirs)
    os.close(ours)
    return text.decode().replace("\r\n", "\n").replace("\r", "\n").splitlines()


LONG_LINES = (
    ["plan", "model=llama31-8b", "precision=fp8-kv-attn", "grpo.max_new_tokens=8192"],
    ["compare", "RUNS"],
)


@pytest.mark.parametrize(
    ("columns", "words"),
    [(columns, words) for columns in (80, 160) for words in LONG_LINES]
    + [(80, words) for words in (
        ["plan", "model=qwen3-30b-a3b", "--keys"],
        ["plan", "precision=bf16", "precision.rollout_kv=fp8", "grpo.steps=zero"],
        ["measure-mismatch", "nowhere"],
        *([verb, "--help"] for verb in ("plan", "grpo", "compare", "measure-mismatch", "run")),
        *([verb, "--help"] for verb in ("quantize-checkpoint", "make-model", "check-cluster")),
        ["queue", "--help"], ["queue", "nowhere"],
        ["--help"], ["--version"], ["grpo", "--version"],
    )],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else value,
)  # fmt: skip
def test_no_line_is_wider_than_the_terminal(columns, words, tmp_path):
    shutil.copy(ARCHIVE, tmp_path)  # the page is written beside the runs
    lines = seen(columns, *(tmp_path / "runs" if word == "RUNS" else word for word in words))
    # A path alone, or `KEY=PATH`, is never broken: it would not paste. One key is longer than 80.
    whole = r"([\w.]+=)?/[\w./-]+|[\w.]+\.fuse_allreduce_rms=False"
    free = [line for line in lines if not re.fullmatch(whole, line.strip())]
    assert lines and [line for line in free if len(line.rstrip()) > columns] == []


def test_a_comparison_in_eighty_columns_breaks_no_name(tmp_path):
    shutil.copy(ARCHIVE, tmp_path)
    lines = seen(80, "compare", tmp_path / "runs")
    starts = [line.split()[0] for line in lines if line.startswith(("bf16", "fp8"))]
    assert {"bf16-none", "fp8-e2e-tis", "fp8-kv-attn-none", "fp8-kv-attn-tis"} == {*starts}
    assert any(line.startswith("In every row: steps 40/40") for line in lines)
    assert any("Left out" in line for line in lines)


def test_a_run_its_mismatch_and_its_checkpoint_fit_eighty_columns(tmp_path):
    outputs = tmp_path / "o"
    lines = seen(80, "grpo", *SMALL, "precision=fp8-linear", f"outputs={outputs}")
    [run] = outputs.glob("*/*/s*")
    lines += seen(80, "measure-mismatch", run)
    lines += seen(80, "quantize-checkpoint", run, tmp_path / "fp8")
    free = [line for line in lines if str(tmp_path) not in line]  # a path is not broken
    assert len(free) > 20 and [line for line in free if len(line.rstrip()) > 80] == []


def test_what_is_the_same_in_every_row_goes_below_a_table_that_is_too_wide(monkeypatch):
    heads, rows = ("cell", "steps", "value"), [("a" * 30, "40", "1"), ("b" * 30, "40", "2")]
    for columns, kept in ((60, True), (36, False)):
        monkeypatch.setenv("COLUMNS", str(columns))
        console = Console(width=columns)
        with console.capture() as shown:
            console.print(table("t", heads, rows))
        assert ("In every row: steps 40." in shown.get()) != kept
        assert "value" in shown.get()


def test_a_command_is_broken_so_that_it_can_be_pasted(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    words = ["printf", "%s\n", "two words", "a=b" * 20, "it's", "it's " * 30, "last"]
    text = command(words)
    assert len(text.splitlines()) > 2 and max(map(len, text.splitlines())) <= 40
    said = subprocess.run(["sh", "-c", text], capture_output=True, text=True).stdout
    assert said.splitlines() == words[2:]


VERBS = ("plan", "grpo", "run", "queue", "compare", "measure_mismatch", "quantize_checkpoint",
         "make_model", "check_cluster")  # fmt: skip


def dispatched(*words: str) -> subprocess.CompletedProcess:
    """The script that pip makes of `[project.scripts]`, outside of the clone."""
    code = "import sys; from fp8_nemo.recipes.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", VERBS)
def test_help_has_usage_example_and_a_text_for_every_argument(name):
    for told, prog in (
        (dispatched(name, "--help").stdout, f"fp8-nemo {name.replace('_', '-')} "),
        ("\n".join(seen(100, name, "--help")), f"python -m recipes.{name} "),
    ):
        assert told.startswith(f"usage: {prog}") and f"\n{prog}" in told
        listed = told.partition("positional arguments:")[2].partition("GROUP=OPTION")[0]
        lines = [line for line in listed.splitlines() if line.startswith("  ")]
        for line, after in zip(lines, [*lines[1:], ""], strict=True):
            assert "  " in line.strip() or line.startswith("     ") or after.startswith("     ")


def test_making_a_model_lists_the_groups_that_it_takes_alone():
    told = dispatched("make-model", "--help").stdout
    assert "tiny-llama" in told and "running-sum" in told and "fp8-kv-attn" not in told


def test_what_is_advised_is_called_as_the_user_has_called_this(tmp_path):
    line = ["grpo", "model=small-llama", "model.path=/none", f"outputs={tmp_path}"]
    said = dispatched(*line).stderr
    assert said.endswith("; fp8-nemo make-model /none model=small-llama makes it\n")
    said = " ".join(" ".join(seen(120, *line)).split())
    assert "; python -m recipes.make_model /none model=small-llama makes it" in said


@pytest.mark.parametrize("words", [["compare", "--htm", "x"], ["measure_mismatch", "--rej", "x"]])
def test_a_flag_that_is_cut_short_is_refused(words):
    done = dispatched(*words)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "error: " in done.stderr


@pytest.mark.parametrize("columns", [80, 160])
def test_a_runs_progress_is_one_whole_line_with_the_time_left(columns, tmp_path):
    lines = seen(
        columns, "grpo", *SMALL, "precision=fp8-kv-attn", f"outputs={tmp_path}", kind="xterm"
    )
    shown = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in lines]
    assert any("left  loads the model" in line for line in shown), shown
    last = r"step 2/2 \d:\d\d:\d\d left  reward [\d.]+  val [\d.]+  kl \S+  s/step [\d.]+"
    assert any(re.search(last, line) for line in shown), shown
