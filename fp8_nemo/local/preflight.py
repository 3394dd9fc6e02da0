"""What the local backend needs on disk, checked without torch before a directory is made."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from fp8_nemo.local.data import DataError, load_problems
from fp8_nemo.plan import Plan
from fp8_nemo.schema import Mistake, Model

SHIPPED = Path(__file__).parent / "models"
NEEDED = ("config.json", "tokenizer.json")


def model_path(model: Model) -> Path:
    """The folder that a model is read from: `model.path`, else the one that ships here."""
    return Path(model.path) if model.path else SHIPPED / model.name


def problems_with(plan: Plan) -> list[str]:
    """One line for each thing that would stop this plan after it has started."""
    lines = [str(mistake) for mistake in _model_mistakes(plan.recipe.model)]
    try:
        load_problems(plan.recipe.data, plan.recipe.seed)
    except DataError as error:
        lines.append(str(error))
    return lines


def _model_mistakes(model: Model) -> Iterator[Mistake]:
    folder = model_path(model)
    if not folder.is_dir():
        yield Mistake(
            "model.path",
            folder,
            "no such folder",
            f"python -m recipes.make_model {folder} model={model.name} makes it",
        )
        return
    for name in NEEDED:
        if not (folder / name).is_file():
            yield Mistake(
                "model.path", folder, f"lacks {name}", "it must be in Hugging Face format"
            )
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        yield Mistake("model.path", folder, "holds no *.safetensors")
    for file in files:
        if missing := missing_bytes(file):
            yield Mistake("model.path", file, f"is cut short by {missing} bytes", "copy it again")


def missing_bytes(file: Path) -> int:
    """How many bytes a safetensors file lacks, by its own header; 0 if it is whole."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            return 8 - len(prefix)
        (header_size,) = struct.unpack("<Q", prefix)
        if 8 + header_size > size:
            return 8 + header_size - size
        header = json.loads(stream.read(header_size))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return max(0, 8 + header_size + max(ends, default=0) - size)
