"""Convert a Hugging Face checkpoint to blockwise FP8, in the format that vLLM loads as it is.

What it guarantees
    The bytes and scales are those of a refit: the same `encode`, so that a policy which was trained
    here is served as it was rolled out. Shards keep their names; one is held at a time.

What it takes care of
    The result cannot be loaded before it is whole: `config.json` is written last, and taken away
    before a shard is made again. A conversion that was killed goes on after its last shard, if the
    source and the settings are the same; its KV scales are not measured again. Of another source,
    or of one that changed, it is refused: half of it, and its KV scales, would be the old one's.
    Files appear whole (`whole_files.py`), and the book keeps a digest of each shard.

What it refuses
    A checkpoint that is FP8 already, of another family than Llama, Qwen3 and Qwen3-MoE, that holds
    an empty tensor or one that is not finite, or whose index and shards disagree; and a folder with
    anything else in it.

Shapes: O out features, I in features, P = ceil(O/128), Q = ceil(I/128), E experts.
"""

from __future__ import annotations

import hashlib
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fp8_nemo.export.source import (
    INDEX,
    ConversionError,
    check_blocks,
    read_config,
    read_json,
    shards_of,
)
from fp8_nemo.export.whole_files import (
    PART,
    part_of,
    put,
    sha256_of,
    without_parts,
    write_json,
    written,
)
from fp8_nemo.glue import wire as weights
from fp8_nemo.glue.quantize import FP8, Fp8Weight, dequantize_blocks
from fp8_nemo.glue.refit import encode, pieces_of
from fp8_nemo.recipe.model_dir import damage
from fp8_nemo.recipe.options import Precision
from fp8_nemo.runs.metrics import make_folder
from fp8_nemo.runs.terminal import table

BOOK = "quantization.json"
"""Beside the shards: source, settings, KV scales, and per shard every FP8 weight's error."""
LEFT_OUT = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")

Progress = Callable[[str, int, int], None]
"""Told a shard's name, and how many of how many tensors are done."""


class WeightError(NamedTuple):
    """Hold what FP8 cost a weight or a slab: `WeightError("...q_proj.weight", 0.026, 0.0003)`."""

    name: str
    relative: float
    """Frobenius norm of the difference, over that of the weight."""
    zeroed: float
    """Share of values that became 0."""


class Calibration(NamedTuple):
    """Say how the scales of an FP8 cache are found, once a conversion needs them."""

    settings: dict[str, Any]
    """What they follow from; a conversion goes on only with the same."""
    scales: Callable[[], dict[str, float]]
    """KV scales by vLLM's names."""


def quantize_checkpoint(
    source: Path,
    target: Path,
    precision: Precision,
    *,
    calibration: Calibration | None = None,
    progress: Progress = lambda shard, done, total: None,
) -> list[WeightError]:
    """Convert a checkpoint; return the errors of every FP8 weight, in the order of the shards.

    Args:
        source: a folder in Hugging Face format, BF16 or FP32 safetensors; subfolders are left out.
        target: a folder that does not exist, is empty, or holds a part of the same conversion.
        precision: which layers stay in BF16, and the format of the scales.
        calibration: of an FP8 cache, whose scales go into the first shard; None for BF16.
        progress: told what is done.

    Raises:
        ConversionError: see the module.
    """
    config, shards = read_config(source), shards_of(source)
    for shard in shards:
        check_blocks(shard, precision, config["num_hidden_layers"])
    settings = asdict(precision) | (calibration.settings if calibration else {})
    book = _opened_book(source, target, shards, settings)
    with written(target):
        if calibration and book["kv_scales"] is None:
            book["kv_scales"] = calibration.scales()
        write_json(target / BOOK, book)
        for number, shard in enumerate(shards):
            if _is_whole(target / shard.name, book["shards"].get(shard.name)):
                continue
            (target / "config.json").unlink(missing_ok=True)
            scales = book["kv_scales"] if number == 0 else None
            extra = {name: torch.tensor([scale]) for name, scale in (scales or {}).items()}
            layers = config["num_hidden_layers"]
            made = _convert(shard, target / shard.name, precision, layers, extra, progress)
            book["shards"][shard.name] = made
            write_json(target / BOOK, book)
        tensors = _finish(source, target, book["shards"])
        write_json(target / "config.json", config | {"quantization_config": _quantization(tensors)})
    errors = (each for shard in shards for each in book["shards"][shard.name]["errors"])
    return [WeightError(*each) for each in errors]


def _finish(source: Path, target: Path, done: Mapping[str, Any]) -> dict[str, str]:
    """Write what stands beside the shards, but for `config.json`; return each tensor's shard."""
    tensors = {name: shard for shard in done for name in done[shard]["tensors"]}
    _copy_rest(source, target)
    if (source / INDEX).is_file():
        total = sum(each["bytes"] for each in done.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(tensors.items()))}
        write_json(target / INDEX, index)
    return tensors


def error_table(errors: list[WeightError]) -> Table:
    """Return one row a layer: mean and largest relative error, and which weight has it."""
    heads = ("layer", "weights", "mean", "largest", "in", "became 0")
    rows = [
        (
            str(layer), str(len(found)), f"{fmean(error.relative for error in found):.4f}",
            f"{found[0].relative:.4f}",
            found[0].name.partition(f".{layer}.")[2].removesuffix(".weight"),
            f"{max(error.zeroed for error in found):.2%}",
        )
        for layer, found in by_layer(errors).items()
    ]  # fmt: skip
    return table("relative error of FP8 weights", heads, rows)


def serve_line(target: Path, *, fp8_cache: bool) -> str:
    """Return the command that serves a converted checkpoint with the bytes that it has.

    Without the variable vLLM 0.25.1 quantizes the weights again as it loads them on a GPU with
    DeepGEMM, to scales that are powers of two (`deepgemm_post_process_fp8_weight_block`).
    """
    cache = " --kv-cache-dtype fp8" if fp8_cache else ""
    return f"VLLM_USE_DEEP_GEMM_E8M0=0 vllm serve {shlex.quote(str(target))}{cache}"


def by_layer(errors: list[WeightError]) -> dict[int, list[WeightError]]:
    """Group errors by layer, the largest first."""
    found: dict[int, list[WeightError]] = {}
    for error in errors:
        found.setdefault(int(error.name.split(".")[2]), []).append(error)
    return {n: sorted(found[n], key=lambda each: -each.relative) for n in sorted(found)}


def _opened_book(
    source: Path, target: Path, shards: list[Path], settings: dict[str, Any]
) -> dict[str, Any]:
    """Open the record of what a conversion into this folder has done; the folder is made.

    A source is its configuration, and size and time of each shard: the KV scales are of all of it,
    so that a shard that is another now makes it another source.
    """
    config = hashlib.sha256((source / "config.json").read_bytes()).hexdigest()
    identity = {"config.json": config, "shards": {each.name: _fingerprint(each) for each in shards}}
    begun = {"source": identity, "settings": settings}
    if target.is_dir() and _is_begun(target):
        without_parts(target)
    if (target / BOOK).is_file():
        book = read_json(target / BOOK)
        for what, value in begun.items():
            if book.get(what) != value:
                other = {
                    "source": "of another source, or of this one before it changed",
                    "settings": "with other settings",
                }[what]
                raise ConversionError(
                    f"{target}: holds a conversion {other}; delete it, or name another folder"
                )
        return book
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConversionError(f"{target}: is not empty, and holds no conversion of ours")
    try:
        make_folder(target)
    except OSError as error:
        raise ConversionError(f"{target}: cannot be made a folder ({error.strerror})") from error
    return begun | {"kv_scales": None, "shards": {}}


def _is_begun(target: Path) -> bool:
    names = {each.name for each in target.iterdir()}
    return BOOK in names or names == {PART}


def _is_whole(file: Path, booked: dict[str, Any] | None) -> bool:
    """Check that a shard is there with the bytes of the book; one of before has no digests."""
    if booked is None or not file.is_file() or damage(file):
        return False
    return booked.get("sha256") in (None, sha256_of(file))


def _fingerprint(file: Path) -> list[int]:
    return [file.stat().st_size, file.stat().st_mtime_ns]


def _convert(
    source: Path,
    target: Path,
    precision: Precision,
    layers: int,
    extra: dict[str, Tensor],
    progress: Progress,
) -> dict[str, Any]:
    """Convert one shard; return what the book keeps of it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors, errors = dict(extra), []  # in FP8 half a shard
    with safe_open(source, framework="pt") as file:
        names = list(file.keys())
        for done, name in enumerate(names):
            progress(source.name, done, len(names))
            weight = file.get_tensor(name).to(device)
            encoded = encode([(name, weight)], precision, num_layers=layers)
            if encoded.nonfinite_N.any():
                raise ConversionError(f"{name}: holds NaN or Inf ({source})")
            made = dict(encoded.tensors)
            if weights.is_fp8_weight(name, tuple(weight.shape), precision, layers):
                errors.append(_error(name, weight, made))
            tensors |= {each: tensor.cpu().contiguous() for each, tensor in made.items()}
    part = part_of(target)
    save_file(tensors, part, metadata={"format": "pt"})
    shutil.copymode(source, part)
    digest = sha256_of(part)
    put(part, target)
    progress(source.name, len(names), len(names))
    return {
        "sha256": digest,
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "tensors": {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()},
        "errors": errors,
    }


def _error(name: str, weight: Tensor, made: Mapping[str, Tensor]) -> WeightError:
    difference = norm = zeroed = 0.0
    fp8 = ((each, tensor) for each, tensor in made.items() if tensor.dtype == FP8)
    for piece_OI, (each, fp8_OI) in zip(pieces_of(name, weight), fp8, strict=True):
        real_OI = piece_OI.to(torch.bfloat16).float()
        held_OI = dequantize_blocks(Fp8Weight(fp8_OI, made[weights.scale_name(each)])).float()
        difference += (held_OI - real_OI).square().sum().item()
        norm += real_OI.square().sum().item()
        zeroed += ((held_OI == 0) & (real_OI != 0)).sum().item()
    return WeightError(name, (difference / norm) ** 0.5 if norm else 0.0, zeroed / weight.numel())


def _quantization(tensors: Mapping[str, str]) -> dict[str, Any]:
    """Return the block of `config.json` by which vLLM knows the format."""
    plain = (name for name in tensors if f"{name}{weights.SCALE_SUFFIX}" not in tensors)
    modules = [name.removesuffix(".weight") for name in plain if name.endswith("proj.weight")]
    routers = [name.removesuffix(".weight") for name in tensors if name.endswith(".gate.weight")]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [weights.BLOCK, weights.BLOCK],
        "modules_to_not_convert": sorted(["lm_head", *modules, *routers]),
    }


def _copy_rest(source: Path, target: Path) -> None:
    for file in _rest(source):
        part = part_of(target / file.name)
        shutil.copy(file, part)
        put(part, target / file.name)


def _rest(source: Path) -> Iterator[Path]:
    """Yield all files but weights and what names them: tokenizer, templates, settings."""
    for file in sorted(source.iterdir()):
        written = file.name in (BOOK, "config.json") or file.name.endswith(".index.json")
        if file.is_file() and not written and file.suffix not in LEFT_OUT:
            yield file
