"""A Hugging Face checkpoint as a blockwise FP8 one, which vLLM serves as it is.

What it guarantees
    The bytes and scales are those of a refit: the same `encode`, so that a policy which was trained
    here is served as it was rolled out. Shards keep their names; one is held at a time.

What it takes care of
    The result cannot be loaded before it is whole: `config.json` is written last. A conversion that
    was killed goes on after its last shard, if the source and the settings are the same.

What it refuses
    A checkpoint that is FP8 already, of another family than Llama, Qwen3 and Qwen3-MoE, or that
    holds a weight which is not finite.

Shapes: O out features, I in features, P = ceil(O/128), Q = ceil(I/128), E experts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fp8_nemo import weights
from fp8_nemo.model_dir import missing_bytes
from fp8_nemo.quantize import FP8, Fp8Weight, dequantize_blocks
from fp8_nemo.refit import encode, pieces_of
from fp8_nemo.schema import Precision

FAMILIES = ("llama", "qwen3", "qwen3_moe")
INDEX = "model.safetensors.index.json"
BOOK = "quantization.json"
"""Beside the shards: source, settings, and per shard every FP8 weight's error."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


class CheckpointError(ValueError):
    """A checkpoint that cannot be converted, or a folder that cannot take the result."""


class WeightError(NamedTuple):
    """What FP8 cost a weight or a slab: `WeightError("...q_proj.weight", 0.026, 0.0003)`."""

    name: str
    relative: float
    """Frobenius norm of the difference, over that of the weight."""
    zeroed: float
    """Share of values that became 0."""


def quantize_checkpoint(
    source: Path,
    target: Path,
    precision: Precision,
    *,
    kv_scales: Mapping[str, float] | None = None,
    progress: Callable[[str, int, int], None] = lambda shard, done, total: None,
) -> list[WeightError]:
    """Convert; errors of every FP8 weight, in the order of the shards.

    Args:
        source: a folder in Hugging Face format, BF16 or FP32 safetensors.
        target: a folder that does not exist, is empty, or holds a part of the same conversion.
        precision: which layers stay in BF16, and the format of the scales.
        kv_scales: by vLLM's names, to go into the first shard; None for a cache in BF16.
        progress: told each shard's name, and how many of how many tensors are done.

    Raises:
        CheckpointError: see the module.
    """
    config = _config(source)
    shards = _shards(source)
    settings = {"precision": asdict(precision), "kv_scales": dict(kv_scales or {})}
    book = _opened_book(target, settings)
    layers = config["num_hidden_layers"]
    for number, shard in enumerate(shards):
        if not _is_done(book["shards"].get(shard.name), shard, target):
            extra = _kv_tensors(kv_scales or {}) if number == 0 else {}
            found = _convert(shard, target / shard.name, precision, layers, extra, progress)
            book["shards"][shard.name] = found
            _write_json(target / BOOK, book)
    tensors = {name: shard for shard, done in book["shards"].items() for name in done["tensors"]}
    _copy_rest(source, target)
    if (source / INDEX).is_file():
        total = sum(done["bytes"] for done in book["shards"].values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(tensors.items()))}
        _write_json(target / INDEX, index)
    _write_json(target / "config.json", config | {"quantization_config": _quantization(tensors)})
    errors = (each for done in book["shards"].values() for each in done["errors"])
    return [WeightError(*each) for each in errors]


def by_layer(errors: list[WeightError]) -> dict[int, list[WeightError]]:
    """Errors of each layer, the largest first."""
    found: dict[int, list[WeightError]] = {}
    for error in errors:
        found.setdefault(int(error.name.split(".")[2]), []).append(error)
    return {n: sorted(found[n], key=lambda each: -each.relative) for n in sorted(found)}


def _config(source: Path) -> dict[str, Any]:
    try:
        config = json.loads((source / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{source}/config.json: {error}; SRC is no checkpoint") from None
    if "quantization_config" in config:
        raise CheckpointError(
            f"{source}: is quantized already ({config['quantization_config'].get('quant_method')})"
        )
    if config.get("model_type") not in FAMILIES:
        raise CheckpointError(
            f"{source}: model_type={config.get('model_type')}, must be one of {', '.join(FAMILIES)}"
        )
    return config


def _shards(source: Path) -> list[Path]:
    index = source / INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    for name in names:
        if not (source / name).is_file():
            raise CheckpointError(f"{source}: lacks {name}; its weights must be safetensors")
        if missing := missing_bytes(source / name):
            raise CheckpointError(f"{source / name}: is cut short by {missing} bytes")
    return [source / name for name in names]


def _opened_book(target: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What a conversion into this folder has done so far."""
    target.mkdir(parents=True, exist_ok=True)
    if (target / BOOK).is_file():
        book = json.loads((target / BOOK).read_text())
        if book["settings"] != settings:
            raise CheckpointError(f"{target}: holds a conversion with other settings; delete it")
        return book
    if any(target.iterdir()):
        raise CheckpointError(f"{target}: is not empty, and holds no conversion of ours")
    return {"settings": settings, "shards": {}}


def _is_done(done: dict[str, Any] | None, shard: Path, target: Path) -> bool:
    file = target / shard.name
    return (
        done is not None
        and done["source"] == _fingerprint(shard)
        and file.is_file()
        and not missing_bytes(file)
    )


def _fingerprint(file: Path) -> list[int]:
    return [file.stat().st_size, file.stat().st_mtime_ns]


def _convert(
    source: Path,
    target: Path,
    precision: Precision,
    layers: int,
    extra: dict[str, Tensor],
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """One shard; what the book keeps of it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors, errors = dict(extra), []  # in FP8 half a shard
    with safe_open(source, framework="pt") as file:
        names = list(file.keys())
        for done, name in enumerate(names):
            progress(source.name, done, len(names))
            weight = file.get_tensor(name).to(device)
            encoded = encode([(name, weight)], precision, num_layers=layers)
            if encoded.nonfinite_N.any():
                raise CheckpointError(f"{name}: holds NaN or Inf ({source})")
            made = dict(encoded.tensors)
            if weights.is_fp8_weight(name, tuple(weight.shape), precision, layers):
                errors.append(_error(name, weight, made))
            tensors |= {each: tensor.cpu().contiguous() for each, tensor in made.items()}
    whole = target.with_suffix(".part")
    save_file(tensors, whole, metadata={"format": "pt"})
    shutil.copymode(source, whole)
    whole.rename(target)
    progress(source.name, len(names), len(names))
    return {
        "source": _fingerprint(source),
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


def _kv_tensors(kv_scales: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor([scale]) for name, scale in kv_scales.items()}


def _quantization(tensors: Mapping[str, str]) -> dict[str, Any]:
    """The block of `config.json` by which vLLM and transformers know the format."""
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
        shutil.copy(file, target / file.name)


def _rest(source: Path) -> Iterator[Path]:
    """Tokenizer, templates, generation settings: everything but weights and what names them."""
    for file in sorted(source.iterdir()):
        written = file.name in (BOOK, INDEX, "config.json")
        if file.is_file() and not written and file.suffix not in WEIGHTS:
            yield file


def _write_json(file: Path, content: Any) -> None:
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.rename(file)
