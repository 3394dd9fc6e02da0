"""Read what is to be quantized, a checkpoint in Hugging Face format, or refuse it in a line.

Everything that a header or an index can say is checked before a weight is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from fp8_nemo.glue import wire as weights
from fp8_nemo.recipe import plain
from fp8_nemo.recipe.model_dir import damage
from fp8_nemo.recipe.options.precision import Format, Precision

DTYPES = ("BF16", "F32")
INDEX = "model.safetensors.index.json"
LFS_POINTER = b"version https://git-lfs"


class ConversionError(ValueError):
    """Report a checkpoint that cannot be converted, or a folder that cannot take the result."""


def read_config(source: Path) -> dict[str, Any]:
    """Read the configuration of a checkpoint that can be converted.

    Raises:
        ConversionError: there is none, it is quantized already, or of an unknown family.
    """
    file = source / "config.json"
    config = read_json(file)
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise ConversionError(f"{source}: is quantized already ({method})")
    family = config.get("model_type")
    if family not in weights.FAMILIES:
        families = ", ".join(weights.FAMILIES)
        raise ConversionError(f"{file}: model_type={family}, must be one of {families}")
    if not isinstance(config.get("num_hidden_layers"), int):
        raise ConversionError(f"{file}: has no num_hidden_layers")
    return config


def read_json(file: Path) -> dict[str, Any]:
    """Read an object of JSON.

    Raises:
        ConversionError: there is no such file, or nothing like it in it.
    """
    try:
        found = plain.read_json(plain.bytes_of(file))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConversionError(
            f"{file}: {reason}; must be a checkpoint in Hugging Face format, or the directory of a "
            "local run; of a run of NeMo RL its examples/converters/convert_megatron_to_hf.py "
            "makes one"
        ) from None
    if not isinstance(found, dict):
        raise ConversionError(f"{file}: is not an object")
    return found


def places_of(source: Path) -> dict[str, Path]:
    """Return the file of each of a checkpoint's tensors, shard by shard; all were looked at.

    Raises:
        ConversionError: one is missing, damaged or of other numbers, or the index says otherwise.
    """
    names, weight_map = ["model.safetensors"], {}
    if (source / INDEX).is_file():
        weight_map = read_json(source / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConversionError(f"{source / INDEX}: has no weight_map")
        if strange := [n for n, shard in weight_map.items() if not isinstance(shard, str)]:
            raise ConversionError(f"{source / INDEX}: gives {strange[0]} no file's name")
        names = sorted(set(weight_map.values()))
    held: dict[str, str] = {}
    for name in names:
        for tensor in _tensors_of(source / name):
            if tensor in held:
                raise ConversionError(f"{tensor}: is in {held[tensor]} and in {name} ({source})")
            held[tensor] = name
    for tensor, name in weight_map.items():
        if held.get(tensor) != name:
            raise ConversionError(f"{tensor}: is not in {name}, where {source / INDEX} has it")
    if weight_map and (left := held.keys() - weight_map.keys()):
        raise ConversionError(f"{min(left)}: is in {held[min(left)]}, and not in {source / INDEX}")
    return {tensor: source / name for tensor, name in held.items()}


def _tensors_of(file: Path) -> list[str]:
    """Name what a shard holds; check that it is whole, and of numbers that can be quantized."""
    if not file.is_file():
        raise ConversionError(f"{file.parent}: lacks {file.name}; its weights must be safetensors")
    try:
        with file.open("rb") as stream:
            if stream.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ConversionError(f"{file}: is a pointer of git-lfs, not weights; git lfs pull")
        if found := damage(file):
            raise ConversionError(f"{file}: {found}")
        with safe_open(file, framework="pt") as opened:
            found = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            dtypes = {name: each.get_dtype() for name, each in found.items()}
            empty = [name for name, each in found.items() if 0 in each.get_shape()]
    except OSError as error:
        raise ConversionError(f"{file}: cannot be read ({error.strerror or error})") from None
    except SafetensorError as error:
        raise ConversionError(f"{file}: is no safetensors file ({error})") from None
    for name, dtype in dtypes.items():
        if dtype not in DTYPES or name.endswith(weights.SCALE_SUFFIX):
            raise ConversionError(f"{name}: is {dtype}, must be BF16 or F32 ({file})")
    if empty:
        raise ConversionError(f"{empty[0]}: is empty ({file})")
    return list(dtypes)


def check_sizes(file: Path, precision: Precision, layers: int) -> None:
    """Check that vLLM will take every weight of a shard in its quantized format.

    Its rules are in `validate_fp8_block_shape` and `ModelOptNvFp4W4A16LinearMethod.create_weights`.

    Raises:
        ConversionError: it names the first that it would not.
    """
    with safe_open(file, framework="pt") as opened:
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    for name, shape in shapes.items():
        if weights.is_quantized_weight(name, shape, precision, layers):
            if precision.rollout.group and ".experts." in name:
                raise ConversionError(
                    f"{name}: is an expert's, and a checkpoint in {precision.rollout.name.upper()} "
                    f"is of a dense model; choose precision=fp8-linear ({file})"
                )
            _check_size(name, shape, precision.rollout, file)


def _check_size(name: str, shape: tuple[int, ...], held: Format, file: Path) -> None:
    stacked = max(1, len(weights.slab_projections(name)))
    rows, columns = held.block or 1, held.block or held.group
    if shape[-2] % (rows * stacked) or shape[-1] % columns:
        kind = "blockwise FP8" if held.block else f"rows of {held.name.upper()}"
        raise ConversionError(
            f"{name}: is {' x '.join(map(str, shape))}, and vLLM takes {kind} in "
            f"multiples of {columns} alone; this model stays in BF16 ({file})"
        )
