"""A checkpoint becomes FP8 or NVFP4 shard by shard, with a refit's bytes, or is refused.

The source is the tiny model that ships, cut into three shards; read back with safetensors alone.
"""

import gc
import json
import resource
import shutil
import signal
import weakref
from types import SimpleNamespace

import pytest
import torch
from fp8_nemo.recipes import quantize_checkpoint as recipe
from safetensors.torch import load_file, save_file

from fp8_nemo.export import calibrate, quantized_checkpoint
from fp8_nemo.export.calibrate import scales_of_texts
from fp8_nemo.export.formats import values_of
from fp8_nemo.export.quantized_checkpoint import BOOK, Calibration, by_layer, quantize_checkpoint
from fp8_nemo.export.source import INDEX, ConversionError
from fp8_nemo.export.whole_files import PART
from fp8_nemo.glue.manifest import MANIFEST, SENTINEL
from fp8_nemo.glue.refit import refit_stream
from fp8_nemo.local.grpo import GrpoLoop
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.model_dir import SHIPPED, model_mistakes
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.runs import run_dir
from tests.export.shards import SHARDS, in_shards

FP8 = Precision(rollout_linear="fp8")
FOUR = Precision(rollout_linear="nvfp4")
BOTH = pytest.mark.parametrize("precision", [FP8, FOUR], ids=["fp8", "nvfp4"])
Q = "model.layers.0.self_attn.q_proj.weight"
FP8_TYPE = torch.float8_e4m3fn


@pytest.fixture
def source(tmp_path):
    """tiny-llama in three shards."""
    return in_shards("tiny-llama", tmp_path / "source")


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


@BOTH
def test_shards_keep_their_names_and_the_index_names_every_tensor(source, tmp_path, precision):
    seen = []
    target = tmp_path / "fp8"
    quantize_checkpoint(source, target, precision, progress=lambda *each: seen.append(each))
    index = json.loads((target / INDEX).read_text())
    tensors = tensors_of(target)
    assert same(tensors, stream_of(source, precision))
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


@pytest.mark.parametrize("kept", [0, 1])
def test_four_bits_have_modelopts_configuration(source, tmp_path, kept):
    few = Precision(rollout_linear="nvfp4", last_layers_bf16=kept)
    quantize_checkpoint(source, tmp_path / "nvfp4", few)
    config = json.loads((tmp_path / "nvfp4" / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16,
        "ignore": ["lm_head", "model.layers.1.*"][: 1 + kept],
    }  # fmt: skip
    assert same(tensors_of(tmp_path / "nvfp4"), stream_of(source, few))


def read_by_hand(tensors, name):
    """FP32 values of an NVFP4 weight, from the description of E2M1 and ModelOpt's names."""
    packed = tensors[name].long()
    codes = torch.stack([packed % 16, packed // 16], -1).flatten(1)
    sign, exponent, fraction = 1 - 2 * (codes // 8), codes // 2 % 4, codes % 2
    small, normal = fraction / 2, (1 + fraction / 2) * 2.0 ** (exponent - 1)
    value = sign * torch.where(exponent == 0, small, normal)
    groups = value.unflatten(1, (-1, 16)) * tensors[f"{name}_scale"].float()[..., None]
    return groups.flatten(1) * tensors[f"{name}_scale_2"]


def test_four_bits_read_back_are_the_weights_but_for_what_the_book_says(source, tmp_path):
    target, real = tmp_path / "nvfp4", tensors_of(source)
    errors = {each.name: each for each in quantize_checkpoint(source, target, FOUR)}
    tensors = tensors_of(target)
    found = dict(values_of(tensors, FOUR))
    assert found.keys() == real.keys() and len(errors) == 14
    for name, weight in real.items():
        if name not in errors:
            assert torch.equal(found[name], weight.float())
            continue
        assert tensors[name].dtype == torch.uint8 and tensors[f"{name}_scale"].dtype == FP8_TYPE
        assert torch.allclose(found[name], read_by_hand(tensors, name), rtol=1e-6, atol=0)
        off = (found[name].double() - weight.double()).norm() / weight.double().norm()
        assert errors[name].relative == pytest.approx(off.item(), rel=1e-5) and 0.08 < off < 0.11
        zeroed = ((found[name] == 0) & (weight != 0)).float().mean()
        assert errors[name].zeroed == pytest.approx(zeroed.item()) and 0.01 < zeroed < 0.2


def test_fused_weights_share_their_scale_across_shards(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "nvfp4", FOUR)
    index = json.loads((tmp_path / "nvfp4" / INDEX).read_text())["weight_map"]
    tensors, real = tensors_of(tmp_path / "nvfp4"), tensors_of(source)
    for layer in ("model.layers.0", "model.layers.1"):
        for fused in (("q", "k", "v"), ("gate", "up"), ("o",), ("down",)):
            block = "mlp" if fused[0] in ("gate", "down") else "self_attn"
            names = [f"{layer}.{block}.{each}_proj.weight" for each in fused]
            [scale] = {tensors[f"{each}_scale_2"].item() for each in names}
            largest = max(real[each].abs().max().item() for each in names)
            assert scale == pytest.approx(largest / (6 * 448))
            assert len(fused) == 1 or len({index[each] for each in names}) > 1


def test_a_weight_that_is_not_finite_is_named_by_its_own_shard(source, tmp_path):
    tensors = load_file(source / SHARDS[1])
    name = next(each for each in tensors if each.endswith("k_proj.weight"))
    save_file(tensors | {name: infinite(tensors[name])}, source / SHARDS[1])
    with pytest.raises(ConversionError) as caught:
        quantize_checkpoint(source, tmp_path / "nvfp4", FOUR)
    assert str(caught.value) == f"{name}: holds NaN or Inf ({source / SHARDS[1]})"
    assert [file.name for file in (tmp_path / "nvfp4").iterdir()] == [BOOK]


def test_experts_in_four_bits_are_refused(tmp_path, capsys):
    line = [str(SHIPPED / "tiny-qwen3-moe"), str(tmp_path / "nvfp4"), "precision=nvfp4-w4a16"]
    assert recipe.main(line) == 2
    said = capsys.readouterr().err
    assert ".mlp.experts." in said and "is of a dense model; choose precision=fp8-linear" in said
    assert not (tmp_path / "nvfp4").exists()


@pytest.mark.parametrize("columns", [24, 128])
def test_rows_that_groups_of_16_do_not_fill_are_refused(tmp_path, columns):
    shutil.copytree(SHIPPED / "tiny-llama", tmp_path / "source")
    file, name = tmp_path / "source" / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    save_file(load_file(file) | {name: torch.ones(7, columns).bfloat16()}, file)
    if columns % 16:
        with pytest.raises(ConversionError, match=f"{name}: is 7 x 24, and vLLM takes rows of NV"):
            quantize_checkpoint(tmp_path / "source", tmp_path / "nvfp4", FOUR)
        assert not (tmp_path / "nvfp4").exists()
    else:
        quantize_checkpoint(tmp_path / "source", tmp_path / "nvfp4", FOUR)
        assert tensors_of(tmp_path / "nvfp4")[name].shape == (7, columns // 2)


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
    tensors[name][0, 0] = 1.0  # in its block of 128 by 128 all else is lost
    save_file(tensors, source / SHARDS[0])
    errors = {each.name: each for each in quantize_checkpoint(source, tmp_path / "fp8", FP8)}
    assert errors[name].zeroed == (128 * 128 - 1) / tensors[name].numel()


def killed_in(shard):
    def progress(name, done, total):
        if (name, done) == (shard, 3):
            raise KeyboardInterrupt

    return progress


@BOTH
def test_a_killed_conversion_cannot_be_loaded_and_goes_on_after_its_last_shard(
    source, tmp_path, precision
):
    target = tmp_path / "fp8"
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, target, precision, progress=killed_in(SHARDS[1]))
    assert not (target / "config.json").exists() and not (target / SHARDS[1]).exists()
    first, seen = (target / SHARDS[0]).stat().st_mtime_ns, []
    errors = quantize_checkpoint(
        source, target, precision, progress=lambda *each: seen.append(each[0])
    )
    assert (target / SHARDS[0]).stat().st_mtime_ns == first and SHARDS[0] not in seen
    assert len(errors) == 14 and same(tensors_of(target), stream_of(source, precision))


def test_a_conversion_killed_while_it_writes_its_first_shard_goes_on(
    source, tmp_path, monkeypatch, capsys
):
    def killed(tensors, file, **_):
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    line = [str(source), str(tmp_path / "fp8")]
    with monkeypatch.context() as patched:
        patched.setattr(quantized_checkpoint, "save_file", killed)
        assert recipe.main(line) == 130
    assert capsys.readouterr().err == f"{line[1]}: stopped; the same line goes on\n"
    assert recipe.main(line) == 0
    assert same(tensors_of(tmp_path / "fp8"), stream_of(source))
    assert not list((tmp_path / "fp8").glob("*.part"))
    assert not (tmp_path / "fp8" / PART).exists()


@pytest.mark.parametrize("after", ["nothing", "a shard"])
def test_a_full_disk_is_one_line_and_the_same_line_goes_on(source, tmp_path, after, capsys):
    """A limit on the size of files stands for it; libraries meet it as they do a full disk."""
    line = [str(source), str(tmp_path / "fp8")]
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = 2000 if after == "nothing" else 250_000
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most[1]))
    try:
        assert recipe.main(line) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
        signal.signal(signal.SIGXFSZ, previous)
    [said] = capsys.readouterr().err.splitlines()
    assert "cannot be written" in said and "make room, and the same line goes on" in said
    assert not (tmp_path / "fp8" / "config.json").exists()
    assert recipe.main(line) == 0
    assert same(tensors_of(tmp_path / "fp8"), stream_of(source))
    assert {file.name for file in (tmp_path / "fp8").iterdir()} == names_of(source)


def names_of(source):
    return {file.name for file in source.iterdir()} | {BOOK}


def test_a_source_that_changed_is_refused_and_what_was_made_of_it_stays(source, tmp_path):
    target = tmp_path / "fp8"
    quantize_checkpoint(source, target, FP8)
    before = {file: file.read_bytes() for file in target.iterdir()}
    save_file({n: 2 * x for n, x in load_file(source / SHARDS[1]).items()}, source / SHARDS[1])
    with pytest.raises(ConversionError, match="or of this one before it changed; delete it"):
        quantize_checkpoint(source, target, FP8)
    assert {file: file.read_bytes() for file in target.iterdir()} == before


def test_another_source_in_the_same_folder_is_refused(source, tmp_path):
    target, twin = tmp_path / "fp8", tmp_path / "twin"
    quantize_checkpoint(SHIPPED / "tiny-llama", target, FP8)
    shutil.copytree(SHIPPED / "tiny-llama", twin)  # another seed of a run: its weights alone differ
    with_tensor(twin / "model.safetensors", lambda tensor: 2 * tensor)
    for other in (source, twin, SHIPPED / "tiny-qwen3-moe"):
        with pytest.raises(ConversionError, match="a conversion of another source, or of"):
            quantize_checkpoint(other, target, FP8)


def test_a_conversion_to_the_other_format_in_the_same_folder_is_refused(source, tmp_path):
    quantize_checkpoint(source, tmp_path / "fp8", FP8)
    with pytest.raises(ConversionError, match="holds a conversion with other settings"):
        quantize_checkpoint(source, tmp_path / "fp8", FOUR)


@pytest.mark.parametrize("damage", ["cut short", "gone", "one bit", "a tail of zeros"])
def test_a_shard_that_is_not_what_the_book_says_is_made_again(source, tmp_path, damage):
    target = tmp_path / "fp8"
    quantize_checkpoint(source, target, FP8)
    if damage == "cut short":
        whole = (target / SHARDS[1]).read_bytes()
        (target / SHARDS[1]).write_bytes(whole[:-100])
    elif damage == "one bit":
        bits = bytearray((target / SHARDS[1]).read_bytes())
        bits[-1000] ^= 1
        (target / SHARDS[1]).write_bytes(bits)
    elif damage == "a tail of zeros":
        whole = (target / SHARDS[1]).read_bytes()
        (target / SHARDS[1]).write_bytes(whole[:-4096] + bytes(4096))
    else:
        (target / SHARDS[1]).unlink()
    seen = []
    quantize_checkpoint(source, target, FP8, progress=lambda *each: seen.append(each[0]))
    assert set(seen) == {SHARDS[1]} and same(tensors_of(target), stream_of(source))


def edited(file, **changes):
    content = json.loads(file.read_text())
    kept = {key: value for key, value in (content | changes).items() if value is not ...}
    file.write_text(json.dumps(kept))


def indexed(folder, more):
    content = json.loads((folder / INDEX).read_text())
    edited(folder / INDEX, weight_map=content["weight_map"] | more)


def with_tensor(file, change):
    tensors = load_file(file)
    name = sorted(tensors)[0]
    save_file(tensors | {name: change(tensors[name])}, file)


def infinite(tensor):
    tensor.view(-1)[3] = torch.inf
    return tensor


FAULTS = {
    "config.json: No such file or directory": lambda s, t: (s / "config.json").unlink(),
    "config.json: Expecting": lambda s, t: (s / "config.json").write_text("{"),
    "config.json: nested too deeply": lambda s, t: (s / "config.json").write_text("[" * 100_000),
    "config.json: is not an object": lambda s, t: (s / "config.json").write_text("[]"),
    "config.json: has no num_hidden_layers": lambda s, t: edited(
        s / "config.json", num_hidden_layers=...
    ),
    "is quantized already (fp8)": lambda s, t: edited(
        s / "config.json", quantization_config={"quant_method": "fp8"}
    ),
    "model_type=gemma, must be one of llama": lambda s, t: edited(
        s / "config.json", model_type="gemma"
    ),
    "index.json: has no weight_map": lambda s, t: edited(s / INDEX, weight_map=...),
    "index.json: Expecting value": lambda s, t: (s / INDEX).write_text(""),
    f"lacks {SHARDS[2]}": lambda s, t: (s / SHARDS[2]).unlink(),
    "is cut short by 10 bytes": lambda s, t: (s / SHARDS[2]).write_bytes(
        (s / SHARDS[2]).read_bytes()[:-10]
    ),
    "has a broken header": lambda s, t: (s / SHARDS[2]).write_bytes(
        (9).to_bytes(8, "little") + b"{broken}}"
    ),
    "gives lm_head.weight no file's name": lambda s, t: indexed(s, {"lm_head.weight": 3}),
    f"ghost.weight: is not in {SHARDS[1]}, where": lambda s, t: indexed(
        s, {"ghost.weight": SHARDS[1]}
    ),
    f"is in {SHARDS[0]} and in {SHARDS[2]}": lambda s, t: save_file(
        load_file(s / SHARDS[2]) | dict([*load_file(s / SHARDS[0]).items()][:1]), s / SHARDS[2]
    ),
    "model.extra.weight: is empty": lambda s, t: save_file(
        load_file(s / SHARDS[2]) | {"model.extra.weight": torch.empty(0, 4).bfloat16()},
        s / SHARDS[2],
    ),
    f"model.extra.weight: is in {SHARDS[2]}, and not in": lambda s, t: save_file(
        load_file(s / SHARDS[2]) | {"model.extra.weight": torch.ones(4, 4).bfloat16()},
        s / SHARDS[2],
    ),
    "is a pointer of git-lfs, not weights": lambda s, t: (s / SHARDS[2]).write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    ),
    f"{SHARDS[2]}: cannot be read (Input/output error)": lambda s, t: (
        (s / SHARDS[2]).unlink(), (s / SHARDS[2]).symlink_to("/proc/self/mem")
    ),
    "is I8, must be BF16 or F32": lambda s, t: with_tensor(s / SHARDS[2], torch.Tensor.char),
    "is F8_E4M3, must be BF16 or F32": lambda s, t: with_tensor(
        s / SHARDS[2], lambda x: x.to(torch.float8_e4m3fn)
    ),
    "is not empty, and holds no conversion": lambda s, t: (
        t.mkdir(), (t / "precious.txt").write_text("mine")
    ),
    "is not empty, and holds no conversion of ours": lambda s, t: t.write_text("mine"),
    "holds a conversion with other settings; delete it": lambda s, t: quantize_checkpoint(
        s, t, Precision(rollout_linear="fp8", scales="pow2")
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_converted_is_said_in_a_line(source, tmp_path, fault, capsys):
    target = tmp_path / "fp8"
    FAULTS[fault](source, target)
    before = sorted(tmp_path.rglob("*"))
    assert recipe.main([str(source), str(target)]) == 2
    error = capsys.readouterr().err
    assert fault in error and error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_weight_that_is_not_finite_is_named_and_nothing_can_be_loaded(source, tmp_path, capsys):
    with_tensor(source / SHARDS[0], infinite)
    assert recipe.main([str(source), str(tmp_path / "fp8")]) == 2
    assert "lm_head.weight: holds NaN or Inf" in capsys.readouterr().err
    assert [file.name for file in (tmp_path / "fp8").iterdir()] == [BOOK]


def test_a_null_where_a_quantization_might_be_is_none(source, tmp_path):
    edited(source / "config.json", quantization_config=None)
    quantize_checkpoint(source, tmp_path / "fp8", FP8)
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fp8"


@pytest.mark.parametrize(("count", "code"), [(4, 0), (2, 2)])
def test_layers_in_bf16_are_held_against_the_sources_own(source, tmp_path, count, code, capsys):
    edited(source / "config.json", num_hidden_layers=count)
    words = ["precision.first_layers_bf16=1", "precision.last_layers_bf16=1"]
    assert recipe.main([str(source), str(tmp_path / "fp8"), *words]) == code
    if code:
        assert "leaves none of the model's 2 layers in FP8" in capsys.readouterr().err


def test_a_cache_in_fp8_gets_scales_of_what_attention_saw_in_the_texts(source, tmp_path, capsys):
    texts, target = tmp_path / "texts", tmp_path / "fp8"
    texts.write_text("12+30=\n\n7*8=\n")
    line = [str(source), str(target), "precision=fp8-kv-attn", "--calibrate", str(texts)]
    assert recipe.main(line) == 0
    scales = scales_of_texts(source, ["12+30=", "7*8="], 1.05)
    assert len(scales) == 6 and scales != scales_of_texts(source, ["1+1="], 1.05)
    found = tensors_of(target)
    assert {n: found[n].item() for n in scales} == pytest.approx(scales)
    assert json.loads((target / INDEX).read_text())["weight_map"].keys() == found.keys()
    out = capsys.readouterr().out
    assert "relative error of FP8 weights" in out
    assert out.splitlines()[-1] == (
        f"VLLM_USE_DEEP_GEMM_E8M0=0 vllm serve {target} --kv-cache-dtype fp8"
    )


def test_the_order_of_overrides_says_nothing(source, tmp_path):
    words = ["precision.scales=pow2", "precision=fp8-linear"]
    for name, each in (("one", words), ("other", words[::-1])):
        assert recipe.main([str(source), str(tmp_path / name), *each]) == 0
    one, other = (json.loads((tmp_path / name / BOOK).read_text()) for name in ("one", "other"))
    assert one["settings"] == other["settings"] and one["settings"]["scales"] == "pow2"


def test_scales_are_measured_after_everything_is_checked_and_once(source, tmp_path):
    target, measured = tmp_path / "fp8", []

    def scales():
        measured.append(1)
        return {"model.layers.0.self_attn.k_scale": 0.5}

    def go(progress=lambda *_: None, **settings):
        quantize_checkpoint(
            source, target, FP8, calibration=Calibration(settings, scales), progress=progress
        )

    target.mkdir()
    (target / "precious.txt").write_text("mine")
    with pytest.raises(ConversionError, match="not empty"):
        go(texts="a")
    assert not measured
    (target / "precious.txt").unlink()
    with pytest.raises(KeyboardInterrupt):
        go(killed_in(SHARDS[0]), texts="a")
    go(texts="a")
    assert len(measured) == 1
    assert tensors_of(target)["model.layers.0.self_attn.k_scale"].item() == 0.5
    with pytest.raises(ConversionError, match="other settings"):
        go(texts="b")


@pytest.mark.parametrize("shape", [(192, 256), (256, 192), (2, 384, 256), (2, 256, 64)])
def test_blocks_that_vllm_would_refuse_are_refused_before_anything_is_written(tmp_path, shape):
    file = "mlp.experts.gate_up_proj" if len(shape) == 3 else "mlp.up_proj.weight"
    name = f"model.layers.1.{file}"
    shutil.copytree(SHIPPED / "tiny-llama", tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    weight = torch.zeros(shape, dtype=torch.bfloat16)
    save_file(tensors | {name: weight}, tmp_path / "source" / "model.safetensors")
    with pytest.raises(
        ConversionError, match=f"{name}: is {' x '.join(map(str, shape))}, and vLLM"
    ):
        quantized_checkpoint.quantize_checkpoint(tmp_path / "source", tmp_path / "fp8", FP8)
    assert not (tmp_path / "fp8").exists()


def test_a_file_that_nobody_may_write_is_copied_again(source, tmp_path, monkeypatch):
    copy = shutil.copy

    def as_another_user(file, target):
        """Who may not open a read-only file to write it; root may."""
        assert not target.exists()
        return copy(file, target)

    monkeypatch.setattr(quantized_checkpoint.shutil, "copy", as_another_user)
    for _ in range(2):
        quantized_checkpoint.quantize_checkpoint(source, tmp_path / "fp8", FP8)
    assert (tmp_path / "fp8" / "tokenizer.json").read_bytes()


def test_texts_are_read_with_their_first_token_and_cut(monkeypatch):
    seen = []
    chat = SimpleNamespace(
        tokenizer=SimpleNamespace(encode=lambda text: seen.append(text) or [1, 3, 4, 5])
    )
    monkeypatch.setattr(calibrate, "LONGEST", 3)
    assert list(calibrate._tokens(chat, ["one", "two"])) == [[1, 3, 4]] * 2
    assert seen == ["one", "two"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["precision=bf16"], "precision=bf16: its weights are BF16; choose precision=fp8-linear"),
        (["precision=fp8-kv-attn"], "its FP8 cache needs scales; add --calibrate"),
        (["--calibrate", "TEXTS"], "precision=fp8-linear has a cache in BF16"),
        (
            ["precision=nvfp4-w4a16", "--calibrate", "TEXTS"],
            "precision=nvfp4-w4a16 has a cache in BF16; choose fp8-kv-attn",
        ),
        (
            ["precision=nvfp4-w4a16", "precision.rollout_kv=fp8"],
            "precision.rollout_kv=fp8: needs precision.rollout_linear=fp8, got nvfp4",
        ),
        (["precision=fp8-kv-attn", "--calibrate", "EMPTY"], "holds no text"),
        (["precision=fp8-kv-attn", "--calibrate", "GONE"], "GONE: cannot be read (No such file"),
        (
            ["model=tiny-llama"],
            "model=tiny-llama: quantize_checkpoint takes precision alone",
        ),
        (["precision=fp4"], "precision=fp4"),
        (["precision=fp8-kv-attn", "--calibrate", "LATIN"], "LATIN: is not UTF-8"),
    ],
)
def test_a_line_that_makes_no_sense_creates_nothing(words, message, source, tmp_path, capsys):
    (tmp_path / "TEXTS").write_text("1+1=")
    (tmp_path / "EMPTY").write_text("\n")
    (tmp_path / "LATIN").write_bytes(b"\xff\xfe")
    words = [str(tmp_path / word) if word.isupper() else word for word in words]
    assert recipe.main([str(source), str(tmp_path / "fp8"), *words]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "fp8").exists()


def test_a_local_runs_last_checkpoint_is_exported_and_converted(make_plan, tmp_path, capsys):
    plan = make_plan("precision=fp8-linear", "grpo.learning_rate=1e-2")
    [frozen] = run_dir.freeze([plan])
    assert recipe.main([str(frozen.path), str(tmp_path / "early")]) == 2
    assert "has no checkpoint; the run saves one at its end" in capsys.readouterr().err
    run = GrpoLoop(plan, frozen.path)
    run.train(lambda row: None)
    assert recipe.main([str(frozen.path), str(tmp_path / "fp8")]) == 0
    plain = frozen.path / "model-2"
    trained = {name: x.bfloat16() for name, x in run.policy.masters.items()}
    assert same(tensors_of(plain), trained)
    assert not same(tensors_of(SHIPPED / "tiny-llama"), trained)
    assert same(tensors_of(tmp_path / "fp8"), stream_of(plain))
    made = (plain / "config.json").stat().st_mtime_ns
    assert recipe.main([str(frozen.path), str(tmp_path / "again")]) == 0
    assert (plain / "config.json").stat().st_mtime_ns == made
    [*_, saved] = run_dir.checkpoints(frozen.path)
    state = load_file(saved / "state.safetensors")
    save_file({name: 2 * x for name, x in state.items()}, saved / "state.safetensors")
    assert recipe.main([str(frozen.path), str(tmp_path / "later")]) == 0
    doubled = {name: (2 * x).bfloat16() for name, x in run.policy.masters.items()}
    assert same(tensors_of(plain), doubled)
    save_file(
        {**state, "master.lm_head.weight": state["rng.sampler"].clone()},
        saved / "state.safetensors",
    )
    assert recipe.main([str(frozen.path), str(tmp_path / "other")]) == 2
    assert "cannot be read into its model" in capsys.readouterr().err
    [asked] = compose(["model=tiny-llama", f"model.path={plain}"])
    assert not list(model_mistakes(asked, pads=True))


def test_a_run_in_fp16_is_exported_in_bf16_rounded_once(make_plan, tmp_path):
    plan = make_plan("precision=fp16", "grpo.learning_rate=1e-2")
    [frozen] = run_dir.freeze([plan])
    run = GrpoLoop(plan, frozen.path)
    run.train(lambda row: None)
    assert recipe.main([str(frozen.path), str(tmp_path / "fp8"), "precision=fp8-linear"]) == 0
    trained = {name: x.bfloat16() for name, x in run.policy.masters.items()}
    twice = {name: x.half().bfloat16() for name, x in run.policy.masters.items()}
    assert not same(trained, twice)
    assert same(tensors_of(frozen.path / "model-2"), trained)


def test_a_run_is_converted_to_what_it_was_rolled_out_in(make_plan, tmp_path, capsys):
    plan = make_plan("precision=fp8-e2e-kv-attn", "precision.last_layers_bf16=1")
    [frozen] = run_dir.freeze([plan])
    GrpoLoop(plan, frozen.path).train(lambda row: None)
    line, texts = [str(frozen.path), str(tmp_path / "fp8")], tmp_path / "texts"
    assert recipe.main(line) == 2
    error = capsys.readouterr().err
    assert "precision=fp8-e2e-kv-attn: its FP8 cache needs scales; add --calibrate" in error
    assert error.strip().endswith("or precision.rollout_kv=bf16")
    assert recipe.main([*line, "precision.rollout_kv=fp16"]) == 2
    assert not list(frozen.path.glob("model-*")), "written, and then a mistake was told"
    capsys.readouterr()
    assert recipe.main([line[0], str(tmp_path / "bf16-kv"), "precision.rollout_kv=bf16"]) == 0
    made = tensors_of(tmp_path / "bf16-kv")
    assert f"{Q}_scale_inv" in made and not [name for name in made if name.endswith("k_scale")]
    assert not [name for name in made if "layers.1" in name and name.endswith("_scale_inv")]
    texts.write_text("12+30=\n")
    assert recipe.main([*line, "--calibrate", str(texts)]) == 0
    found = tensors_of(tmp_path / "fp8")
    assert "model.layers.0.self_attn.k_scale" in found and f"{Q}_scale_inv" in found
    assert not [name for name in found if "layers.1" in name and name.endswith("_scale_inv")]
    assert recipe.main([line[0], str(tmp_path / "plain"), "precision=fp8-linear"]) == 0
    found = tensors_of(tmp_path / "plain")
    assert same(found, stream_of(frozen.path / "model-2"))
    modes = {file.stat().st_mode for file in (frozen.path / "model-2").iterdir()}
    assert len(modes) == 1, "weights that another account cannot read"


def test_a_run_in_four_bits_is_shipped_in_the_bytes_that_its_engine_held(
    make_plan, tmp_path, capsys
):
    plan = make_plan("precision=nvfp4-w4a16", "precision.first_layers_bf16=1")
    [frozen] = run_dir.freeze([plan])
    GrpoLoop(plan, frozen.path).train(lambda row: None)
    assert recipe.main([str(frozen.path), str(tmp_path / "nvfp4")]) == 0
    out = capsys.readouterr().out
    assert "relative error of NVFP4 weights" in out
    assert out.splitlines()[-1] == f"vllm serve {tmp_path / 'nvfp4'}"
    made = tensors_of(tmp_path / "nvfp4")
    assert same(made, stream_of(frozen.path / "model-2", plan.recipe.precision))
    assert made["model.layers.1.self_attn.q_proj.weight"].dtype == torch.uint8
    assert made[Q].dtype == torch.bfloat16


def test_a_policy_that_was_rolled_out_with_noise_is_shipped_without(make_plan, tmp_path):
    words = ("noise=aqn", "noise.sigma_end=0.1", "noise.stages=3", "noise.steps=3")
    plan = make_plan("precision=fp8-linear", *words, "grpo.steps=5", "grpo.validate_every=5")
    [frozen] = run_dir.freeze([plan])
    run = GrpoLoop(plan, frozen.path)
    run.train(lambda row: None, stop=lambda: run.progress.step == 2)  # 5 is validated, without
    assert recipe.main([str(frozen.path), str(tmp_path / "fp8")]) == 0
    made, held = tensors_of(tmp_path / "fp8"), run.engine.wire_tensors()
    assert same(made, stream_of(frozen.path / "model-2")), "a refit's bytes, but for its noise"
    noisy = {name for name in made if not torch.equal(made[name], held[name])}
    assert noisy == {name for name in made if name.endswith("layernorm.weight")}


def test_a_damaged_checkpoint_or_a_run_of_nemo_rl_is_no_source(make_plan, tmp_path, capsys):
    plan = make_plan()
    [frozen] = run_dir.freeze([plan])
    GrpoLoop(plan, frozen.path).train(lambda row: None)
    [*_, last] = run_dir.checkpoints(frozen.path)
    (last / "state.safetensors").write_bytes(b"cut")
    line = [str(frozen.path), str(tmp_path / "fp8"), "precision.rollout_kv=bf16"]
    assert recipe.main(line) == 2
    assert "state.safetensors: cannot be read into its model" in capsys.readouterr().err
    assert not list(frozen.path.glob("model-*")) and not list(frozen.path.glob(".saving-*"))
    [other] = run_dir.freeze([make_plan("backend=nemo")])
    assert recipe.main([str(other.path), str(tmp_path / "fp8")]) == 2
    assert "a run of NeMo RL, whose examples/converters/" in capsys.readouterr().err


def test_one_shard_is_held_at_a_time(source, tmp_path, monkeypatch):
    alive, save = [], quantized_checkpoint.save_file

    def watch(tensors, *arguments, **options):
        gc.collect()
        assert not [each for each in alive if each() is not None], "an earlier shard is still held"
        save(tensors, *arguments, **options)
        alive.extend(weakref.ref(tensor) for tensor in tensors.values())

    monkeypatch.setattr(quantized_checkpoint, "save_file", watch)
    quantize_checkpoint(source, tmp_path / "fp8", FP8)
    assert len(alive) == len(tensors_of(tmp_path / "fp8"))


def test_fp32_weights_are_rounded_to_bf16_first(source, tmp_path):
    expected = stream_of(source)
    for shard in SHARDS:
        tensors = load_file(source / shard)
        save_file({name: t.float() * (1 + 1e-4) for name, t in tensors.items()}, source / shard)
    quantize_checkpoint(source, tmp_path / "fp8", FP8)
    assert same(tensors_of(tmp_path / "fp8"), expected)
