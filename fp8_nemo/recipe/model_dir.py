"""Look at a model's folder, in Hugging Face format, without torch: there, whole, as planned?"""

from __future__ import annotations

import hashlib
import shlex
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from fp8_nemo.recipe.mistake import Mistake, as_typed, verb_line
from fp8_nemo.recipe.options.model import Model
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.options.training import TASKS, Data
from fp8_nemo.recipe.own.model import NUMBERS, shape_of
from fp8_nemo.recipe.plain import bytes_of, leaves, read_json, sha256_of

SHIPPED = Path(__file__).parent / "models"
NEEDED = ("config.json", "tokenizer.json", "tokenizer_config.json")
NO_FOLDER = "no such folder"
POSITIONS = {
    "meta-llama/Llama-3.1-8B-Instruct": 131072,
    "meta-llama/Llama-3.2-1B-Instruct": 131072,
    "meta-llama/Llama-3.2-3B-Instruct": 131072,
    "Qwen/Qwen2.5-1.5B": 131072,
    "Qwen/Qwen2.5-7B": 131072,
    "Qwen/Qwen2.5-Math-7B": 4096,
    "Qwen/Qwen3-4B": 40960,
    "Qwen/Qwen3-8B": 40960,
    "Qwen/Qwen3-14B": 40960,
    "Qwen/Qwen3-32B": 40960,
    "Qwen/Qwen3-30B-A3B": 40960,
}
"""`max_position_embeddings` of the hub's models in `conf/model`, none of them stretched. They go by
name: another of the same shape may have more, as Qwen3-30B-A3B-Instruct-2507 has 262,144."""


def model_path(model: Model) -> Path:
    """Return the folder that a model is read from: `model.path`, else the one that ships here."""
    return Path(model.path) if model.path else SHIPPED / model.name


def weights_digest(folder: Path) -> str:
    """Return the digest of a model's weight files' names and bytes: equal for equal starts."""
    digest, paths = hashlib.sha256(), sorted(folder.glob("*.safetensors"))
    with ThreadPoolExecutor() as pool:  # one thread hashes 1.2 GB a second
        for path, found in zip(paths, pool.map(sha256_of, paths), strict=True):
            digest.update(path.name.encode() + bytes.fromhex(found))
    return digest.hexdigest()[:12]


def model_mistakes(recipe: Recipe, *, pads: bool) -> Iterator[Mistake]:
    """Yield what would stop a run that reads its model from its folder.

    Args:
        recipe: of the run.
        pads: whether its tokenizer must have a token to pad with. NeMo RL pads with the end where
            it has none (seam pads-with-end), as Llama 3.1's has not.
    """
    model, folder = recipe.model, model_path(recipe.model)
    if not folder.is_dir():
        line = shlex.join([str(folder), *_made_by(recipe)])
        makes = f"{verb_line('make_model')} {line} makes it"
        remedy = makes if recipe.data.is_made else "give the folder of a model"
        is_file = folder.exists()
        text, remedy = ("is a file", "give the model's folder") if is_file else (NO_FOLDER, remedy)
        yield Mistake("model.path", folder, text, remedy)
        return
    missing = [name for name in NEEDED if not (folder / name).is_file()]
    if missing:
        lacks, remedy = f"lacks {', '.join(missing)}", "it must be in Hugging Face format"
        yield Mistake("model.path", folder, lacks, remedy)
        return
    found = [*_config_mistakes(folder, model, pads)]
    yield from found
    if not (found or model.path is None):
        yield from _tokenizer_mistakes(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        yield Mistake("model.path", folder, "holds no *.safetensors")
    for file in files:
        if found := damage(file):
            yield Mistake("model.path", file, found, "copy it again")


def _made_by(recipe: Recipe) -> Iterator[str]:
    """Yield the words that make a model, where the run's problems are made."""
    yield f"model={recipe.model.name}"
    data = recipe.data
    if data.is_made and data.name != Data().name:
        yield f"data={data.name}"
    if data.is_made and data.difficulty not in (None, TASKS[data.name].usual):
        yield f"data.difficulty={data.difficulty}"


def _config_mistakes(folder: Path, model: Model, pads: bool) -> Iterator[Mistake]:
    """Check the numbers that the plan counts with, and the tokens that sampling needs."""
    try:
        config, tokens = (_read_object(folder / NEEDED[at]) for at in (0, 2))
    except ValueError as error:
        yield Mistake("model.path", folder, f"{error} is no JSON object", "copy it again")
        return
    yield from shape_mistakes(config, folder, model)
    for name in ("eos_token", "pad_token") if pads else ("eos_token",):
        if not tokens.get(name):
            yield Mistake("model.path", folder, f"its tokenizer has no {name}")
    if not (tokens.get("chat_template") or (folder / "chat_template.jinja").is_file()):
        yield Mistake("model.path", folder, "its tokenizer has no chat template")


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: it is none; names the file.
    """
    try:
        found = read_json(bytes_of(path))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(path.name)
    return found


def _tokenizer_mistakes(folder: Path) -> Iterator[Mistake]:
    """Check that the files which only transformers reads are what they are called."""
    for name in ("tokenizer.json", "generation_config.json"):
        if (folder / name).is_file():
            try:
                found = _read_object(folder / name)
            except ValueError:
                yield Mistake("model.path", folder, f"{name} is no JSON object", "copy it again")
                continue
            if name == "tokenizer.json" and not isinstance(found.get("model"), dict):
                text = "tokenizer.json is no tokenizer, it has no model"
                yield Mistake("model.path", folder, text, "copy it again")


def known_config(recipe: Recipe) -> dict[str, Any]:
    """Return the `config.json` that a run reads, from its folder or the hub's cache; else empty.

    Empty too where keys of NeMo RL's change it (`hf_config_overrides`).
    """
    if _overrides_config(recipe):
        return {}
    if recipe.model.hub_id and recipe.chosen_backend == "nemo":
        return cached_config(recipe.model.hub_id)
    try:
        return _read_object(model_path(recipe.model) / "config.json")
    except ValueError:
        return {}


def known_positions(recipe: Recipe) -> int | None:
    """Return the positions of the model that a run reads; None if they are not known here.

    Its `config.json` says it, or for one that is not here yet `POSITIONS`.
    """
    if config := known_config(recipe):
        found = config.get("max_position_embeddings")
        return found if type(found) is int else None
    return None if _overrides_config(recipe) else POSITIONS.get(recipe.model.hub_id or "")


def _overrides_config(recipe: Recipe) -> bool:
    return any(key.startswith("policy.hf_config_overrides") for key in leaves(recipe.nemo))


def cached_config(name: str) -> dict[str, Any]:
    """Return a hub model's `config.json` from the hub's cache here; empty if it has none."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ModuleNotFoundError:
        return {}
    found = try_to_load_from_cache(name, "config.json")
    return _read_object(Path(found)) if isinstance(found, str) else {}


def shape_mistakes(config: dict[str, Any], where: object, model: Model) -> Iterator[Mistake]:
    """Yield numbers of a model option that its `config.json` has otherwise.

    Args:
        config: of Hugging Face's.
        where: it is from, for the reader.
        model: the option.
    """
    try:
        found = vars(shape_of(config))
    except ValueError as error:
        yield Mistake("model.path" if model.path else "model.hf_id", where, str(error))
        return
    for key, typed in vars(model.shape).items():
        if (typed or 0) != (found[key] or 0):
            name = f"{NUMBERS[key]}=" if key in NUMBERS else ""
            yield Mistake(f"model.shape.{key}", typed, f"{where} has {name}{as_typed(found[key])}")


def tensor_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a model's tensors, by its files' headers, here or on the hub.

    Raises:
        ValueError: a file is damaged, or the hub does not give them.
    """
    folder = Path(model.path) if model.path else _snapshot(str(model.hf_id))
    if folder is None:
        return _hub_shapes(str(model.hf_id))
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if reason := damage(file):
            raise ValueError(f"{file.name} {reason}")
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = read_json(stream.read(size))
        header.pop("__metadata__", None)
        found |= {name: tuple(each["shape"]) for name, each in header.items()}
    return found


def _snapshot(name: str) -> Path | None:
    """Return where the hub's cache has all weight files of a model; None if it lacks one."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    index = folder / "model.safetensors.index.json"
    files = {"model.safetensors"}
    if index.is_file():
        files = set(read_json(index.read_bytes()).get("weight_map", {}).values())
    return folder if all((folder / each).is_file() for each in files) else None


@lru_cache
def _hub_shapes(name: str) -> dict[str, tuple[int, ...]]:
    from huggingface_hub import get_safetensors_metadata

    try:
        files = get_safetensors_metadata(name).files_metadata.values()
    except Exception as error:  # the network has many errors of its own
        raise ValueError(f"the hub does not tell its tensors ({type(error).__name__})") from error
    return {n: tuple(each.shape) for file in files for n, each in file.tensors.items()}


def damage(file: Path) -> str:
    """Return what is wrong with a safetensors file, `"is cut short by 10 bytes"`; "" if whole."""
    try:
        missing = missing_bytes(file)
    except ValueError as error:
        why = str(error) if type(error) is ValueError else "it is no JSON"
        return f"has a broken header ({why})"
    return f"is cut short by {missing} bytes" if missing else ""


LONGEST_HEADER = 100_000_000
"""Bytes that safetensors itself takes of a header."""


def missing_bytes(file: Path) -> int:
    """Return how many bytes a safetensors file lacks, by its own header; 0 if it is whole.

    Raises:
        ValueError: it has no such header.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            return 8 - len(prefix)
        (header_size,) = struct.unpack("<Q", prefix)
        if header_size > LONGEST_HEADER:
            raise ValueError(f"a header of {header_size:,} bytes")
        if 8 + header_size > size:
            return 8 + header_size - size
        header = read_json(stream.read(header_size))
    try:
        ends = [each["data_offsets"][1] for name, each in header.items() if name != "__metadata__"]
        if not ends or {*map(type, ends)} != {int}:
            raise TypeError
        return max(0, 8 + header_size + max(ends) - size)
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError("it names no tensors and offsets") from error
