"""Generated command lines and files: every one is taken, or refused in lines for people.

No traceback, and nothing is made. 200 lines in `make test`, 2,000 in `make test-long`; of each kind
of file 40, and 400.
"""

import importlib.util
import json
import shutil
import sys
from importlib import import_module
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
from tests.search.generated import (
    FILES,
    OBJECTS,
    VERB_WORDS,
    WORDS,
    call,
    few_or_many,
    times,
    wrong_in,
)

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


@few_or_many(200, 2000)
def test_lines_are_taken_or_told(number):
    @times(number)
    @given(WORDS, st.booleans())
    @example(["--help"], True)
    @example(["--version"], True)
    def each(words, runs):
        told = call(grpo.main, [*words, WRONG]) if runs else call(plan.main, words)
        asked = told.out.startswith(("usage: ", "fp8-nemo "))  # for help, or for the version
        if told.code or (runs and not asked):
            assert wrong_in(told) == "", told
        assert list(Path.cwd().iterdir()) == []

    each()


VERBS = ("compare", "queue", "measure_mismatch", "quantize_checkpoint", "make_model",
         "check_cluster")  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
@few_or_many(30, 300)
def test_lines_of_the_other_verbs_are_taken_or_told(verb, number):
    main = import_module(f"fp8_nemo.recipes.{verb}").main
    wrong = [WRONG] * (verb == "make_model")  # or it might make one

    @times(number)
    @given(VERB_WORDS)
    def each(words):
        told = call(main, [*words, *wrong])
        if told.code:
            assert wrong_in(told) == "", told
        assert "Traceback" not in told.error and list(Path.cwd().iterdir()) == []

    each()


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


@few_or_many(40, 400)
def test_files_of_options_are_taken_or_told(conf, number):
    @times(number)
    @example("cluster", b"# @package _global_\n0: null\n")
    @given(OF_A_SITE, FILES)
    def each(group, content):
        file = conf / group / "generated.yaml"
        file.write_bytes(content)
        told = call(plan.main, [f"{group}=generated"])
        file.unlink()
        if told.code:
            assert wrong_in(told) == "", told
        assert list(Path.cwd().iterdir()) == []

    each()


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


@pytest.mark.parametrize("name", DAMAGED)
@few_or_many(40, 400)
def test_files_of_a_run_are_taken_or_told(made, tmp_path, name, number):
    @times(number)
    @given(OBJECTS)
    def each(content):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(made, copy)
        (copy / name).write_bytes(content)
        runs, lines = read_runs([copy])
        assert len(runs) + len(lines) == 1
        assert "".join(lines).isprintable(), lines
        if runs:
            assert comparison_table(compare(runs, lines)).row_count == 1
        if name == "plan.json":
            told = call(run.main, [str(copy)])
            assert wrong_in(told) == "", told

    each()


@pytest.fixture
def source(tmp_path) -> Path:
    """A checkpoint."""
    shutil.copytree(SHIPPED / "tiny-llama", tmp_path / "source")
    return tmp_path / "source"


OF_A_CHECKPOINT = ("config.json", "model.safetensors.index.json", "model.safetensors")


@pytest.mark.parametrize("name", OF_A_CHECKPOINT)
@few_or_many(20, 400)
def test_files_of_a_checkpoint_are_taken_or_told(source, name, number):
    before = (source / name).read_bytes() if (source / name).exists() else None

    @times(number)
    @given(OBJECTS)
    def each(content):
        (source / name).write_bytes(content)
        told = call(quantize_checkpoint.main, [str(source), "fp8"])
        (source / name).unlink() if before is None else (source / name).write_bytes(before)
        if told.code == 0:
            assert json.loads(Path("fp8/config.json").read_text())["quantization_config"]
        else:
            assert wrong_in(told) == "", told
            assert not Path("fp8/config.json").exists()
        shutil.rmtree("fp8", ignore_errors=True)

    each()
