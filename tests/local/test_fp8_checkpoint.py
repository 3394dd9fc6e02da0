"""A checkpoint becomes FP8 shard by shard, with a refit's bytes; what cannot be is refused.

The source is the tiny model that ships, cut into three shards; read back with safetensors alone.
"""

import json
import shutil

import pytest
import torch
from fp8_nemo.recipes import quantize_checkpoint as recipe
from safetensors.torch import load_file, save_file

from fp8_nemo import fp8_checkpoint
from fp8_nemo.fp8_checkpoint import BOOK, INDEX, by_layer, quantize_checkpoint
from fp8_nemo.ledger import MANIFEST, SENTINEL
from fp8_nemo.local.calibrate import scales_of_texts
from fp8_nemo.model_dir import SHIPPED
from fp8_nemo.refit import refit_stream
from fp8_nemo.schema import Precision

FP8 = Precision(rollout_linear="fp8")
Q = "model.layers.0.self_attn.q_proj.weight"
SHARDS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


@pytest.fixture
def source(tmp_path):
    """tiny-llama in three shards."""
    folder = tmp_path / "source"
    shutil.copytree(SHIPPED / "tiny-llama", folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, shard in enumerate(SHARDS):
        some = {name: tensors[name] for name in sorted(tensors)[number::3]}
        save_file(some, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(some, shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def tensors_of(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def stream_of(folder, precision=FP8, scales=None):
    named = tensors_of(folder).items()
    stream = dict(refit_stream(named, precision, scales, num_layers=2))
    return {name: stream[name] for name in stream.keys() - {SENTINEL, MANIFEST}}


def same(left, right):
    return left.keys() == right.keys() and all(
        torch.equal(left[n].view(torch.uint8), right[n].view(torch.uint8)) for n in left
    )


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3-moe"])
@pytest.mark.parametrize(
    "precision", [FP8, Precision(rollout_linear="fp8", scales="pow2", last_layers_bf16=1)]
)
def test_what_is_written_is_what_a_refit_sends(name, precision, tmp_path):
    quantize_checkpoint(SHIPPED / name, tmp_path / "fp8", precision)
    assert same(tensors_of(tmp_path / "fp8"), stream_of(SHIPPED / name, precision))


def test_shards_keep_their_names_and_the_index_names_every_tensor(source, tmp_path):
    seen = []
    target = tmp_path / "fp8"
    quantize_checkpoint(source, target, FP8, progress=lambda *each: seen.append(each))
    index = json.loads((target / INDEX).read_text())
    tensors = tensors_of(target)
    assert same(tensors, stream_of(source))
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    for name, shard in index["weight_map"].items():
        assert name in load_file(target / shard)
    assert index["weight_map"].keys() == tensors.keys()
    assert {shard for shard, _, _ in seen} == set(SHARDS)
    assert all((shard, 7, 7) in seen for shard in SHARDS)
    copied = {file.name for file in target.iterdir()}
    assert copied == {file.name for file in source.iterdir()} | {BOOK}


def test_the_configuration_says_what_is_not_fp8(source, tmp_path):
    quantize_checkpoint(
        source, tmp_path / "a", Precision(rollout_linear="fp8", first_layers_bf16=1)
    )
    found = json.loads((tmp_path / "a" / "config.json").read_text())
    assert found["num_hidden_layers"] == 2 and found["quantization_config"] == {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": sorted(
            ["lm_head", *(f"model.layers.0.self_attn.{n}_proj" for n in "qkvo"),
             *(f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up", "down"))]
        ),
    }  # fmt: skip
    quantize_checkpoint(SHIPPED / "tiny-qwen3-moe", tmp_path / "b", FP8)
    kept = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    routers = [f"model.layers.{n}.mlp.gate" for n in (0, 1)]
    assert kept["modules_to_not_convert"] == ["lm_head", *routers]


def test_errors_are_those_of_e4m3_in_blocks_and_stand_in_the_folder(source, tmp_path):
    errors = quantize_checkpoint(source, tmp_path / "fp8", FP8)
    assert len(errors) == 14 and all(0.02 < each.relative < 0.035 for each in errors)
    layers = by_layer(errors)
    assert [len(found) for found in layers.values()] == [7, 7]
    assert layers[0][0].relative == max(each.relative for each in layers[0])
    book = json.loads((tmp_path / "fp8" / BOOK).read_text())
    assert sum(len(done["errors"]) for done in book["shards"].values()) == 14


def test_zeros_that_fp8_makes_are_counted(source, tmp_path):
    tensors = load_file(source / SHARDS[0])
    name = next(each for each in tensors if each.endswith("proj.weight"))
    tensors[name][:] = 1e-6
    tensors[name][0, 0] = 1.0
    save_file(tensors, source / SHARDS[0])
    errors = {each.name: each for each in quantize_checkpoint(source, tmp_path / "fp8", FP8)}
    zeroed = 1 - tensors[name][128:].numel() / tensors[name].numel()
    assert 0 < errors[name].zeroed <= zeroed


def killed_in(shard):
    def progress(name, done, total):
        if (name, done) == (shard, 3):
            raise KeyboardInterrupt

    return progress


def test_a_killed_conversion_cannot_be_loaded_and_goes_on_after_its_last_shard(source, tmp_path):
    target = tmp_path / "fp8"
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, target, FP8, progress=killed_in(SHARDS[1]))
    assert not (target / "config.json").exists() and not (target / SHARDS[1]).exists()
    first, seen = (target / SHARDS[0]).stat().st_mtime_ns, []
    errors = quantize_checkpoint(source, target, FP8, progress=lambda *each: seen.append(each[0]))
    assert (target / SHARDS[0]).stat().st_mtime_ns == first and SHARDS[0] not in seen
    assert len(errors) == 14 and same(tensors_of(target), stream_of(source))


@pytest.mark.parametrize("damage", ["the source changed", "cut short", "gone"])
def test_a_shard_that_is_not_what_the_book_says_is_made_again(source, tmp_path, damage):
    target = tmp_path / "fp8"
    quantize_checkpoint(source, target, FP8)
    if damage == "the source changed":
        tensors = {name: 2 * tensor for name, tensor in load_file(source / SHARDS[1]).items()}
        save_file(tensors, source / SHARDS[1])
    elif damage == "cut short":
        whole = (target / SHARDS[1]).read_bytes()
        (target / SHARDS[1]).write_bytes(whole[:-100])
    else:
        (target / SHARDS[1]).unlink()
    seen = []
    quantize_checkpoint(source, target, FP8, progress=lambda *each: seen.append(each[0]))
    assert set(seen) == {SHARDS[1]} and same(tensors_of(target), stream_of(source))


def spoiled(source, target, fault):
    if fault == "config.json: ":
        (source / "config.json").write_text("{")
    elif "quantized already" in fault or "model_type=gemma" in fault:
        config = json.loads((source / "config.json").read_text())
        quantized = "quantized" in fault
        more = (
            {"quantization_config": {"quant_method": "fp8"}}
            if quantized
            else {"model_type": "gemma"}
        )
        (source / "config.json").write_text(json.dumps(config | more))
    elif "lacks" in fault:
        (source / SHARDS[2]).unlink()
    elif "cut short" in fault:
        (source / SHARDS[2]).write_bytes((source / SHARDS[2]).read_bytes()[:-10])
    elif "not empty" in fault:
        target.mkdir()
        (target / "precious.txt").write_text("mine")
    elif "other settings" in fault:
        quantize_checkpoint(source, target, Precision(rollout_linear="fp8", scales="pow2"))
    else:
        tensors = load_file(source / SHARDS[0])
        name = sorted(tensors)[0]
        tensors[name].view(-1)[3] = torch.inf
        save_file(tensors, source / SHARDS[0])


@pytest.mark.parametrize(
    "fault",
    [
        "config.json: ", "is quantized already (fp8)", "model_type=gemma, must be one of llama",
        f"lacks {SHARDS[2]}", "is cut short by 10 bytes", "is not empty, and holds no conversion",
        "holds a conversion with other settings; delete it", "lm_head.weight: holds NaN or Inf",
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_said_in_a_line(source, tmp_path, fault, capsys):
    target = tmp_path / "fp8"
    spoiled(source, target, fault)
    before = sorted(target.iterdir()) if target.exists() else []
    assert recipe.main([str(source), str(target)]) == 2
    error = capsys.readouterr().err
    assert fault in error and error.count("\n") == 1
    assert not (set(target.iterdir()) if target.exists() else set()) - set(before)


def test_a_cache_in_fp8_gets_scales_of_what_attention_saw_in_the_texts(source, tmp_path, capsys):
    texts, target = tmp_path / "texts", tmp_path / "fp8"
    texts.write_text("12+30=\n\n7*8=\n")
    line = [str(source), str(target), "precision=fp8-kv-attn", "--calibrate", str(texts)]
    assert recipe.main(line) == 0
    scales = scales_of_texts(source, ["12+30=", "7*8="], recipe.MARGIN)
    assert len(scales) == 6 and scales != scales_of_texts(source, ["1+1="], recipe.MARGIN)
    found = tensors_of(target)
    assert {n: found[n].item() for n in scales} == pytest.approx(scales)
    assert json.loads((target / INDEX).read_text())["weight_map"].keys() == found.keys()
    out = capsys.readouterr().out
    assert "relative error of FP8 weights" in out and str(target) in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["precision=bf16"], "precision=bf16: its weights are BF16; choose precision=fp8-linear"),
        (["precision=fp8-kv-attn"], "its FP8 cache needs scales; add --calibrate"),
        (["--calibrate", "TEXTS"], "precision=fp8-linear has a cache in BF16"),
        (["precision=fp8-kv-attn", "--calibrate", "EMPTY"], "holds no text"),
        (["precision=fp8-kv-attn", "--calibrate", "GONE"], "No such file"),
        (
            ["model=tiny-llama"],
            "model=tiny-llama: recipes.quantize_checkpoint takes precision alone",
        ),
        (["precision=fp4"], "precision=fp4"),
    ],
)
def test_a_line_that_makes_no_sense_creates_nothing(words, message, source, tmp_path, capsys):
    (tmp_path / "TEXTS").write_text("1+1=")
    (tmp_path / "EMPTY").write_text("\n")
    words = [str(tmp_path / word) if word.isupper() else word for word in words]
    assert recipe.main([str(source), str(tmp_path / "fp8"), *words]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "fp8").exists()


def test_one_shard_is_held_at_a_time(source, tmp_path, monkeypatch):
    held, save = [], fp8_checkpoint.save_file

    def watch(tensors, *arguments, **options):
        held.append(len(tensors))
        save(tensors, *arguments, **options)

    monkeypatch.setattr(fp8_checkpoint, "save_file", watch)
    quantize_checkpoint(source, tmp_path / "fp8", FP8)
    total = len(tensors_of(tmp_path / "fp8"))
    assert len(held) == 3 and sum(held) == total and max(held) < total / 2


def test_fp32_weights_are_rounded_to_bf16_first(source, tmp_path):
    for shard in SHARDS:
        tensors = load_file(source / shard)
        save_file({name: t.float() * (1 + 1e-4) for name, t in tensors.items()}, source / shard)
    quantize_checkpoint(source, tmp_path / "fp8", FP8)
    assert same(tensors_of(tmp_path / "fp8"), stream_of(source))
    assert tensors_of(tmp_path / "fp8")["lm_head.weight"].dtype == torch.bfloat16
