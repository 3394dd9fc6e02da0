"""A checkpoint of several files, as large models have."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from fp8_nemo.export.source import INDEX
from fp8_nemo.recipe.model_dir import SHIPPED

SHARDS = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def in_shards(model: str, folder: Path) -> Path:
    """Write a model that ships into a folder, its tensors in three files by turns."""
    shutil.copytree(SHIPPED / model, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number, shard in enumerate(SHARDS):
        some = {name: tensors[name] for name in sorted(tensors)[number::3]}
        save_file(some, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(some, shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
