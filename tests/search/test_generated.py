"""Generated command lines and files: every one is taken, or refused in lines for people.

No traceback, and nothing is made. 200 lines in `make test`, 2,000 in `make test-long`; of each kind
of file 40, and 400.
"""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest
from fp8_nemo.recipes import grpo, plan, quantize_checkpoint, run
from hypothesis import example, given
from hypothesis import strategies as st

from fp8_nemo.recipe.model_dir import SHIPPED
from fp8_nemo.report.compare import compare
from fp8_nemo.report.page import comparison_table
from fp8_nemo.report.runs import read_runs
from fp8_nemo.runs.run_dir import freeze
from tests.conftest import small_plan
from tests.search.generated import FILES, OBJECTS, WORDS, call, is_told, times

CONF = Path(__file__).parents[2] / "conf"
OF_A_SITE = st.sampled_from(["cluster", "correction", "experiment", "sweep"])
WRONG = "grpo.steps=0"  # so that a line that is right for the rest trains nothing


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    """Stand in an empty folder, without NeMo RL."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in ("NEMO_RL_ROOT", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return folder


def a_line_is_told(words: list[str], runs: bool) -> None:
    told = call(grpo.main, [*words, WRONG]) if runs else call(plan.main, words)
    asked = told.out.startswith(("usage: ", "fp8-nemo "))  # for help, or for the version
    assert (told.code == 0 and (asked or not runs)) or is_told(told)
    assert not list(Path.cwd().iterdir())


@times(200)
@given(WORDS, st.booleans())
@example(["--help"], True)
@example(["--version"], True)
def test_two_hundred_lines(words, runs):
    a_line_is_told(words, runs)


@pytest.mark.long
@times(2000)
@given(WORDS, st.booleans())
def test_two_thousand_lines(words, runs):
    a_line_is_told(words, runs)


@pytest.fixture
def conf(tmp_path, monkeypatch) -> Path:
    """A copy of `conf/`, in the place of the package's own, that takes new options."""
    folder = tmp_path / "conf"
    shutil.copytree(CONF, folder)
    spec = importlib.util.spec_from_file_location(
        "fp8_nemo.conf", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "fp8_nemo.conf", module)
    monkeypatch.setattr(sys.modules["fp8_nemo"], "conf", module, raising=False)
    return folder


def an_option_is_told(conf: Path, group: str, content: bytes) -> None:
    file = conf / group / "generated.yaml"
    file.write_bytes(content)
    told = call(plan.main, [f"{group}=generated"])
    assert told.code == 0 or is_told(told), (group, content)
    file.unlink()
    assert not list(Path.cwd().iterdir())


@times(40)
@given(group=OF_A_SITE, content=FILES)
def test_files_of_options(conf, group, content):
    an_option_is_told(conf, group, content)


@pytest.mark.long
@times(400)
@given(group=OF_A_SITE, content=FILES)
def test_four_hundred_files_of_options(conf, group, content):
    an_option_is_told(conf, group, content)


def test_an_option_of_that_folder_is_taken(conf):
    (conf / "correction" / "generated.yaml").write_text(
        "defaults: [tis, _self_]\nname: generated\n"
    )
    told = call(plan.main, ["correction=generated"])
    assert told.code == 0 and "fp8-kv-attn-generated" in told.out


DAMAGED = ("plan.json", "metrics.jsonl", "environment.json")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A run directory that has not begun."""
    [frozen] = freeze([small_plan(tmp_path_factory.mktemp("made"))])
    return frozen.path


def a_run_is_told(made: Path, folder: Path, name: str, content: bytes) -> None:
    copy = folder.parent / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(made, copy)
    (copy / name).write_bytes(content)
    runs, lines = read_runs([copy])
    assert len(runs) + len(lines) == 1 and all(each.isprintable() for each in "".join(lines))
    if runs:
        assert comparison_table(compare(runs, lines)).row_count == 1
    if name == "plan.json":
        assert is_told(call(run.main, [str(copy)])), content


@pytest.mark.parametrize("name", DAMAGED)
@times(40)
@given(content=OBJECTS)
def test_files_of_a_run(made, empty, name, content):
    a_run_is_told(made, empty, name, content)


@pytest.mark.long
@pytest.mark.parametrize("name", DAMAGED)
@times(400)
@given(content=OBJECTS)
def test_four_hundred_files_of_a_run(made, empty, name, content):
    a_run_is_told(made, empty, name, content)


@pytest.fixture
def source(tmp_path) -> Path:
    """A checkpoint."""
    shutil.copytree(SHIPPED / "tiny-llama", tmp_path / "source")
    return tmp_path / "source"


def a_checkpoint_is_told(source: Path, name: str, content: bytes) -> None:
    before = (source / name).read_bytes() if (source / name).exists() else None
    (source / name).write_bytes(content)
    told = call(quantize_checkpoint.main, [str(source), "fp8"])
    assert told.code == 0 or is_told(told), (name, content)
    if told.code == 0:
        assert json.loads(Path("fp8/config.json").read_text())["quantization_config"]
    else:
        assert not Path("fp8/config.json").exists()
    shutil.rmtree("fp8", ignore_errors=True)
    (source / name).unlink() if before is None else (source / name).write_bytes(before)


OF_A_CHECKPOINT = ("config.json", "model.safetensors.index.json", "model.safetensors")


@pytest.mark.parametrize("name", OF_A_CHECKPOINT)
@times(20)
@given(content=OBJECTS)
def test_files_of_a_checkpoint(source, name, content):
    a_checkpoint_is_told(source, name, content)


@pytest.mark.long
@pytest.mark.parametrize("name", OF_A_CHECKPOINT)
@times(400)
@given(content=OBJECTS)
def test_four_hundred_files_of_a_checkpoint(source, name, content):
    a_checkpoint_is_told(source, name, content)
