"""Convert a Hugging Face checkpoint to blockwise FP8 or NVFP4, as vLLM loads it.

What it guarantees
    The bytes and scales are those of a refit: the same `encode`, so that a policy which was trained
    here is served as it was rolled out. Shards keep their names; one is held at a time. In NVFP4,
    weights that vLLM fuses share a scale, also those that lie in different shards.

What it takes care of
    The result cannot be loaded before it is whole: `config.json` is written last, and taken away
    before a shard is made again. A conversion that was killed goes on after its last shard, if the
    source and the settings are the same; its KV scales are not measured again. Of another source,
    or of one that changed, it is refused: half of it, and its KV scales, would be the old one's.
    Files appear whole (`whole_files.py`), and the book keeps a digest of each shard.

What it refuses
    A checkpoint that is quantized already, of another family than Llama, Qwen2, Qwen3 and
    Qwen3-MoE, that holds an empty tensor or one that is not finite, or whose index and shards
    disagree; experts in NVFP4; and a folder with anything else in it.

Shapes: O out features, I in features.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rich.table import Table
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fp8_nemo.export.formats import SERVED, values_of
from fp8_nemo.export.source import (
    INDEX,
    ConversionError,
    check_sizes,
    places_of,
    read_config,
    read_json,
)
from fp8_nemo.export.whole_files import PART, whole, without_parts, write_json, written
from fp8_nemo.glue import wire as weights
from fp8_nemo.glue.refit import encode, pieces_of
from fp8_nemo.recipe.model_dir import damage
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.plain import sha256_of
from fp8_nemo.runs.metrics import make_folder
from fp8_nemo.runs.terminal import table

BOOK = "quantization.json"
"""Beside the shards: source, settings, KV scales, and per shard every quantized weight's error."""
LEFT_OUT = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")

Progress = Callable[[str, int, int], None]
"""Told a shard's name, and how many of how many tensors are done."""


class WeightError(NamedTuple):
    """Hold what a weight or a slab lost: `WeightError("...q_proj.weight", 0.026, 0.0003)`."""

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
    """Convert a checkpoint; return each quantized weight's error, by shard.

    Args:
        source: a folder in Hugging Face format, BF16 or FP32 safetensors; subfolders are left out.
        target: a folder that does not exist, is empty, or holds a part of the same conversion.
        precision: the format, a row of `SERVED`, and which layers stay in BF16.
        calibration: of an FP8 cache, whose scales go into the first shard; None for BF16.
        progress: told what is done.

    Raises:
        ConversionError: see the module.
    """
    config, places = read_config(source), places_of(source)
    shards = [*dict.fromkeys(places.values())]
    layers = config["num_hidden_layers"]
    for shard in shards:
        check_sizes(shard, precision, layers)
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
            made = _convert(shard, target / shard.name, places, precision, layers, extra, progress)
            book["shards"][shard.name] = made
            write_json(target / BOOK, book)
        tensors = _finish(source, target, book["shards"])
        told = SERVED[precision.rollout.name].config(tensors, precision, layers)
        write_json(target / "config.json", config | {"quantization_config": told})
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


def error_table(errors: list[WeightError], precision: Precision) -> Table:
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
    return table(f"relative error of {precision.rollout.name.upper()} weights", heads, rows)


def serve_line(target: Path, precision: Precision) -> str:
    """Return the command that serves a converted checkpoint with the bytes that it has."""
    cache = " --kv-cache-dtype fp8" if precision.cache.is_quantized else ""
    needs = SERVED[precision.rollout.name].environment
    return f"{needs}vllm serve {shlex.quote(str(target))}{cache}"


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
    stats = {each.name: each.stat() for each in shards}
    identity = {
        "config.json": sha256_of(source / "config.json"),
        "shards": {name: [each.st_size, each.st_mtime_ns] for name, each in stats.items()},
    }
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
    """Check that a shard has the bytes in the book; earlier versions' books have no digests."""
    if booked is None or not file.is_file() or damage(file):
        return False
    return booked.get("sha256") in (None, sha256_of(file))


def _convert(
    source: Path,
    target: Path,
    places: Mapping[str, Path],
    precision: Precision,
    layers: int,
    extra: dict[str, Tensor],
    progress: Progress,
) -> dict[str, Any]:
    """Convert one shard; return what the book keeps of it."""
    names = [name for name, at in places.items() if at == source]
    tensors, errors = dict(extra), []  # half a shard, or less
    with safe_open(source, framework="pt") as file:
        for done, name in enumerate(names):
            progress(source.name, done, len(names))
            if name in tensors:
                continue  # it came with one that it is fused with
            fused = weights.fused_with(name) if precision.rollout.group else (name,)
            group = dict(_read(fused, places, {source: file}))
            encoded = encode([*group.items()], precision, num_layers=layers)
            for each, is_broken in zip(encoded.names, encoded.nonfinite_N.tolist(), strict=True):
                if is_broken:
                    raise ConversionError(f"{each}: holds NaN or Inf ({places[each]})")
            for each in (own for own in group if places[own] == source):
                size = tuple(group[each].shape)
                wires = {*weights.wire_names(each, size)}
                made = {n: x for n, x in encoded.tensors if weights.weight_of(n) in wires}
                if weights.is_quantized_weight(each, size, precision, layers):
                    errors.append(_error(each, group[each], values_of(made, precision)))
                tensors |= {n: x.cpu().contiguous() for n, x in made.items()}
    with whole(target) as part:
        save_file(tensors, part, metadata={"format": "pt"})
        shutil.copymode(source, part)
        digest = sha256_of(part)
    progress(source.name, len(names), len(names))
    return {
        "sha256": digest,
        "bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "tensors": {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()},
        "errors": errors,
    }


def _read(
    names: Iterable[str], places: Mapping[str, Path], opened: Mapping[Path, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the named tensors that the checkpoint has; open a shard if it is not open."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in (each for each in names if each in places):
        at = places[name]
        shard = nullcontext(opened[at]) if at in opened else safe_open(at, framework="pt")
        with shard as file:
            yield name, file.get_tensor(name).to(device)


def _error(name: str, weight: Tensor, values: Iterator[tuple[str, Tensor]]) -> WeightError:
    """Compare a weight, or a slab, with the values that were made of each of its pieces."""
    difference = norm = zeroed = 0.0
    for piece_OI, (_, held_OI) in zip(pieces_of(name, weight), values, strict=True):
        real_OI = piece_OI.to(torch.bfloat16).float()
        difference += (held_OI - real_OI).square().sum().item()
        norm += real_OI.square().sum().item()
        zeroed += ((held_OI == 0) & (real_OI != 0)).sum().item()
    return WeightError(name, (difference / norm) ** 0.5 if norm else 0.0, zeroed / weight.numel())


def _copy_rest(source: Path, target: Path) -> None:
    for file in _rest(source):
        with whole(target / file.name) as part:
            shutil.copy(file, part)


def _rest(source: Path) -> Iterator[Path]:
    """Yield all files but weights and what names them: tokenizer, templates, settings."""
    for file in sorted(source.iterdir()):
        written = file.name in (BOOK, "config.json") or file.name.endswith(".index.json")
        if file.is_file() and not written and file.suffix not in LEFT_OUT:
            yield file
