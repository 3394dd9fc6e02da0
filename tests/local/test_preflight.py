"""A model's files are checked by their own headers, without torch."""

import json
import shutil
import struct

import pytest

from fp8_nemo.local.preflight import problems_with
from fp8_nemo.recipe.model_dir import SHIPPED, missing_bytes, model_mistakes
from fp8_nemo.runs.run_dir import freeze, new_checkpoint


@pytest.fixture
def copy(tmp_path):
    shutil.copytree(SHIPPED / "tiny-llama", tmp_path / "model")
    return tmp_path / "model"


def test_the_shipped_models_are_whole_and_small():
    for name in ("tiny-llama", "tiny-qwen3-moe"):
        files = list((SHIPPED / name).glob("*.safetensors"))
        assert files and not any(map(missing_bytes, files))
        assert sum(each.stat().st_size for each in (SHIPPED / name).iterdir()) < 4e6


@pytest.mark.parametrize("kept", [0, 7, 8, 500, -1])
def test_a_file_cut_anywhere_lacks_bytes(copy, kept):
    file = copy / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:kept])
    assert missing_bytes(file) > 0


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(make_plan, copy, name):
    (copy / name).unlink()
    [line] = problems_with(make_plan(f"model.path={copy}"))
    assert line.startswith(f"model.path={copy}: ") and (name in line or "safetensors" in line)


def test_a_model_of_another_shape_than_the_plan_counts_with_is_refused(make_plan):
    [line] = problems_with(make_plan("model.shape.layers=4"))
    assert line.startswith("model.shape.layers=4: ") and line.endswith("num_hidden_layers=2")


@pytest.mark.parametrize("name", ["pad_token", "eos_token"])
def test_a_tokenizer_that_sampling_cannot_use_is_refused(make_plan, copy, name):
    file = copy / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: None}))
    [line] = problems_with(make_plan(f"model.path={copy}"))
    assert line.endswith(f"its tokenizer has no {name}")


@pytest.mark.parametrize(("first", "second"), [(8, b"?"), (0, b"?" * 8)])
def test_a_header_that_is_none_is_named(make_plan, copy, first, second):
    file = copy / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:first] + second + content[first + len(second) :])
    [line] = problems_with(make_plan(f"model.path={copy}"))
    assert line.startswith(f"model.path={file}: has a broken header")


@pytest.mark.parametrize("header", [b"[1]", b'{"w": {}}', b'{"w": 3}'])
def test_a_header_of_something_else_is_named(make_plan, copy, header):
    file = copy / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    [line] = problems_with(make_plan(f"model.path={copy}"))
    assert line.startswith(f"model.path={file}: has a broken header (it names no tensors")


def test_a_checkpoint_with_a_broken_header_is_named(make_plan):
    plan = make_plan()
    [frozen] = freeze([plan])
    with new_checkpoint(frozen.path, 1) as saving:
        (saving / "state.safetensors").write_bytes(b"?" * 64)
    [line] = problems_with(plan)
    assert "state.safetensors has a broken header (a header of " in line
    assert "delete this folder" in line


def test_training_does_not_start_from_a_checkpoint_in_fp8(make_plan, copy):
    file = copy / "config.json"
    content = json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    file.write_text(json.dumps(content))
    [line] = problems_with(make_plan(f"model.path={copy}"))
    assert line.startswith(f"model.path={copy}: is quantized already")


def test_nemo_rl_pads_with_the_end_where_a_tokenizer_has_nothing_to_pad_with(make_plan, copy):
    file = copy / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_token": None}))
    recipe = make_plan(f"model.path={copy}").recipe
    assert not list(model_mistakes(recipe, pads=False)) and list(model_mistakes(recipe, pads=True))


BROKEN = {"list": b"[]", "number": b"3", "empty": b"", "deep": b"[" * 100_000, "bytes": b"\xff\x00"}
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


@pytest.mark.parametrize("content", BROKEN.values(), ids=list(BROKEN))
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_garbage_is_named(make_plan, copy, name, content):
    (copy / name).write_bytes(content)
    [line] = problems_with(make_plan(f"model.path={copy}"))
    assert line == f"model.path={copy}: {name} is no JSON object; copy it again"


def test_a_tokenizer_without_a_model_is_none(make_plan, copy):
    (copy / "tokenizer.json").write_text("{}")
    [line] = problems_with(make_plan(f"model.path={copy}"))
    assert "tokenizer.json is no tokenizer, it has no model" in line


OFFSETS = (
    b"{}",
    b"[" * 90_000,
    *(b'{"a": {"data_offsets": %s}}' % at for at in (b'["x"]', b"[0]")),
)


@pytest.mark.parametrize("header", OFFSETS)
def test_a_header_of_garbage_is_named(make_plan, copy, header):
    (copy / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    [line] = problems_with(make_plan(f"model.path={copy}"))
    assert "model.safetensors: has a broken header (" in line


def test_a_file_in_a_folders_place_is_said_to_be_one(make_plan, copy):
    [line] = problems_with(make_plan(f"model.path={copy}/config.json"))
    assert line == f"model.path={copy}/config.json: is a file; give the model's folder"


def test_a_local_run_has_its_own_models_positions_not_those_of_a_hub(make_plan):
    [line] = problems_with(
        make_plan("model.hf_id=Qwen/Qwen2.5-Math-7B", "grpo.max_new_tokens=3000")
    )
    assert line.startswith("grpo.max_new_tokens=3000: leaves a prompt no place in the model's 2048")


def test_more_tokens_than_the_model_has_positions_are_refused(make_plan, tmp_path):
    [line] = problems_with(make_plan("grpo.max_new_tokens=100000"))
    assert line == (
        "grpo.max_new_tokens=100000: leaves a prompt no place in the model's 2048 positions; "
        "lower it"
    )
    usual, longest = '{"input": "1+2", "output": "3"}\n', "1+" * 1021 + "1"
    for extra, refused in (("", False), ("+1", True)):
        problem = json.dumps({"input": longest + extra, "output": "3"})
        (tmp_path / "train.jsonl").write_text(f"{usual}\n{problem}\n{problem}\n")
        (tmp_path / "validation.jsonl").write_text(usual)
        found = problems_with(make_plan("data=jsonl", f"data.path={tmp_path}"))
        assert len(found) == refused
        assert not refused or found[0] == (
            f"{tmp_path}/train.jsonl:3: 2,045 tokens, with grpo.max_new_tokens=5 more than the "
            "model's 2,048 positions, and 1 lines more; take it out, or shorten it"
        )
