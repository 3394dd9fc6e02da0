"""What a person sees: every verb fits the terminal, says what it is for, and is called by name."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from fp8_nemo.recipes import compare, make_model, measure_mismatch, plan, quantize_checkpoint

from fp8_nemo.export import make_model as making
from fp8_nemo.launch.cluster_check import Finding, findings_table
from fp8_nemo.plan.terminal import shell, table, wrapped
from fp8_nemo.recipe.model_dir import SHIPPED
from fp8_nemo.runs.slurm import Job, jobs_table
from tests.conftest import SMALL, small_plan

WIDTHS = (80, 100, 160)
VERBS = ("plan", "grpo", "run", "compare", "measure_mismatch", "quantize_checkpoint",
         "make_model", "check_cluster")  # fmt: skip


def assert_fits(text: str, width: int) -> None:
    """No line is longer; but for a word that stands alone, as a path does to be copied."""
    long = [line for line in text.splitlines() if len(line) > width]
    assert not [line for line in long if len(line.rstrip("\\").split()) > 1]


def call(*words: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def on_a_terminal(width: int, *words: str, cwd: Path) -> tuple[int, str]:
    """Exit code and everything that a terminal of this width is sent."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {key: text for key, text in os.environ.items() if key != "COLUMNS"}
    environment |= {"TERM": "xterm"}
    child = subprocess.Popen(
        [sys.executable, "-m", *words], cwd=cwd, env=environment, stdin=theirs, stdout=theirs,
        stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the terminal's end, as Linux tells it
            break
        if not part:
            break
        seen += part
    os.close(ours)
    return child.wait(), re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder in which `o` holds four small runs, by the short path that people use."""
    folder = tmp_path_factory.mktemp("runs")
    line = [*SMALL, "precision=bf16,fp8-kv-attn", "seed=1,2", "outputs=o"]
    done = call("fp8_nemo.recipes.grpo", "-m", *line, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "words",
    [
        "model=tiny-llama",
        "model=llama31-8b precision=fp8-kv-attn cluster=slurm cluster.interpreter=system",
        "model=qwen3-30b-a3b precision=fp8-e2e correction=seq-mis --keys",
        "-m sweep=precision-x-correction model=llama31-8b",
    ],
)
def test_a_plan_fits_the_terminal(words, width, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(width))
    assert plan.main([*words.split(), "outputs=o"]) == 0
    assert_fits(capsys.readouterr().out, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_what_reads_runs_fits_the_terminal(runs, width, capsys, monkeypatch):
    monkeypatch.chdir(runs)
    monkeypatch.setenv("COLUMNS", str(width))
    one = next(Path("o").glob("*/fp8-kv-attn-*/s1-*"))
    target = Path(f"q{width}")
    assert compare.main(["o"]) == 0
    assert measure_mismatch.main([str(one)]) == 0
    assert quantize_checkpoint.main([str(SHIPPED / "tiny-llama"), str(target)]) == 0
    out, err = capsys.readouterr()
    assert_fits(out, width)
    assert "Against BF16" in out and "Bounds that reject" in out and "vllm serve" in out
    assert err == ""


@pytest.mark.parametrize("width", WIDTHS)
def test_a_run_fits_the_terminal_from_its_first_line_to_its_last(runs, width):
    words = ["fp8_nemo.recipes.grpo", *SMALL, "precision=fp8-kv-attn", f"outputs=t{width}"]
    code, seen = on_a_terminal(width, *words, cwd=runs)
    assert code == 0, seen
    assert_fits(seen.replace("\r", "\n"), width)
    begun, shown = seen.partition("loads the model")[::2]
    assert "tiny-llama/fp8-kv-attn-tis, seed 42: starts; 2 steps" in begun
    assert re.search(r"step 2/2 \d:\d\d:\d\d left  reward [\d.]+  kl ", shown)
    assert "finished, 2 steps" in " ".join(shown.split())


@pytest.mark.parametrize("width", WIDTHS)
def test_making_a_model_fits_the_terminal(width, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(making, "ANSWERS", making.ANSWERS._replace(steps=2, batch=4))
    assert make_model.main(["m", "model=tiny-llama"]) == 0
    out = capsys.readouterr().out
    assert_fits(out, width)
    assert "held-out answers are right" in " ".join(out.split())


@pytest.mark.parametrize("width", WIDTHS)
def test_jobs_and_nodes_fit_the_terminal(width, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", str(width))
    plans = [small_plan(tmp_path, "cluster=slurm", f"seed={seed}") for seed in (1, 2)]
    jobs = [Job(Path(f"o/{each.run_name}"), "new") for each in plans]
    versions = ", ".join(f"package-{n} 1.2.{n}" for n in range(20))
    wrong = "cannot be read by this user; ask for it, or name another folder with outputs="
    found = [Finding("packages", f"node{n}", versions) for n in range(20)]
    found += [Finding("outputs", "node7", "shared", wrong), Finding("GPUs", "all", "8 x H100")]
    for text in (jobs_table(plans, jobs), findings_table(found)):
        assert_fits(text, width)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", VERBS)
def test_help_has_usage_example_and_a_text_for_every_argument(name, width):
    done = call(f"fp8_nemo.recipes.{name}", "--help", env=os.environ | {"COLUMNS": str(width)})
    assert done.returncode == 0 and done.stderr == ""
    prog = f"python -m fp8_nemo.recipes.{name} "
    assert done.stdout.startswith(f"usage: {prog}") and f"\n{prog}" in done.stdout
    assert_fits(done.stdout, width)
    listed = done.stdout.partition("positional arguments:")[2].partition("GROUP=OPTION")[0]
    lines = [line for line in listed.splitlines() if line.startswith("  ")]
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        assert "  " in line.strip() or line.startswith("     ") or after.startswith("     "), line


def test_making_a_model_lists_the_groups_that_it_takes_alone():
    told = call("fp8_nemo.recipes.make_model", "--help").stdout
    assert "tiny-llama" in told and "running-sum" in told and "fp8-kv-attn" not in told


def dispatched(*words: str) -> subprocess.CompletedProcess:
    """The script that pip makes of `[project.scripts]`."""
    code = "import sys; from fp8_nemo.recipes.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)


def test_fp8_nemo_lists_its_verbs_and_its_version():
    told = dispatched("--help")
    for name in VERBS:
        assert f"\n  {name.replace('_', '-')} " in told.stdout
    assert dispatched().stdout == told.stdout
    version = dispatched("--version").stdout
    assert re.fullmatch(
        r"fp8-nemo \d+\.\d+\.\d+, for NeMo RL main 7ea279a .* and v0\.7\.0 .*\n", version
    )
    for words in (["plan"], ["compare"]):
        assert dispatched(*words, "--version").stdout == version
        assert call(f"fp8_nemo.recipes.{words[0]}", "--version").stdout == version


@pytest.mark.parametrize("name", ["make-model", "make_model"])
def test_fp8_nemo_calls_a_verb_outside_the_clone_by_either_spelling(name):
    told = dispatched(name, "--help").stdout
    assert told.startswith("usage: fp8-nemo make-model ") and "\nfp8-nemo make-model m" in told


def test_fp8_nemo_says_how_it_is_called_in_what_it_advises():
    done = dispatched("grpo", "model=small-llama", "model.path=/none", "outputs=/tmp/none")
    assert done.returncode == 2
    assert done.stderr.strip().endswith("fp8-nemo make-model /none model=small-llama makes it")


def test_a_verb_that_there_is_not_is_one_line():
    done = dispatched("quantise")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "fp8-nemo: quantise: no such verb; --help shows them\n"


@pytest.mark.parametrize(
    ("name", "words"), [("compare", ["--htm", "x"]), ("measure_mismatch", ["--rej", "0.1", "x"])]
)
def test_a_flag_that_is_cut_short_is_refused(name, words):
    done = call(f"fp8_nemo.recipes.{name}", *words)
    assert done.returncode == 2 and f"unrecognized arguments: {words[0]}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_plan_begins_with_whether_it_fits_and_how_fast_it_is(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    line = ["model=llama31-8b", "precision=fp8-kv-attn", "model.parallel.tensor=2"]
    assert plan.main(line) == 0
    first, fits, speed, empty, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("llama31-8b/fp8-kv-attn-") and empty == ""
    assert re.fullmatch(r"Fits: \d+\.\d of 79\.6 GiB per GPU in its fullest phase, .*", fits)
    assert re.match(r"Speed: decodes 1\.\d\d times as fast as BF16, [\d,]+ tokens/s per ", speed)
    assert plan.main([*line, "grpo.max_new_tokens=100000"]) == 0
    _, fits, *_ = capsys.readouterr().out.splitlines()
    assert fits.startswith("Does not fit: ")
    assert plan.main(["model=qwen3-8b"]) == 0
    assert "Speed: no estimate, this model" in capsys.readouterr().out
    assert plan.main(["model=tiny-llama"]) == 0
    assert "no estimate of memory or of speed" in capsys.readouterr().out


def test_the_stock_command_is_behind_keys_and_a_shell_reads_it_as_it_is(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert plan.main(["model=llama31-8b"]) == 0
    assert "run_grpo.py" not in capsys.readouterr().out
    assert plan.main(["model=llama31-8b", "--keys"]) == 0
    command = capsys.readouterr().out.partition("checkout:\n\n")[2].partition("\n\n")[0]
    read = subprocess.run(
        ["bash", "-c", f'python() {{ printf "%s\\n" "$@"; }}\n{command}'],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert read[0] == "examples/run_grpo.py" and "logger.wandb.project='fp8-nemo'" in read
    assert all("=" in word for word in read[3:])


@pytest.mark.parametrize("word", ["a b", "it's", "$x's", 'a"b', "\\", "`x`'", "!'", "a\nb", ""])
def test_a_shell_reads_a_command_as_it_was_given(word, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    words = [word, "and-some-more", word, "x" * 30, word]
    printed = subprocess.run(
        ["bash", "-c", shell(["printf", "%s\\0", *words])], capture_output=True, text=True
    ).stdout
    assert printed.split("\0")[:-1] == words


ROWS = [("one-name", "12.5%", "-", "same"), ("another-name", "3.0%", "-", "same")]


def test_a_table_leaves_out_what_is_empty_and_tells_what_is_the_same_once(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    heading = ("name", "share", "none", "word")
    assert table("T", heading, ROWS).splitlines() == [
        "T", "name          share  word", "────────────  ─────  ────",
        "one-name      12.5%  same", "another-name   3.0%  same",
    ]  # fmt: skip
    monkeypatch.setenv("COLUMNS", "24")
    assert table("T", heading, ROWS).splitlines()[-2:] == [
        "another-name   3.0%", "word: same in every row",
    ]  # fmt: skip
    monkeypatch.setenv("COLUMNS", "14")
    assert table("T", ("name", "share", "why"), [("one", "12.5%", "reasonable")]).splitlines() == [
        "T", "one", "  share  12.5%", "  why    reasonable",
    ]  # fmt: skip


def test_a_line_is_broken_between_words_alone(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    text = f"see outputs/{'x' * 30}/y for some-hyphenated-words"
    assert wrapped(text).split() == text.split()
