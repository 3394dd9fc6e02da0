"""Write a checkpoint of a real model's shape with random weights, to measure with.

python -m benchmarks.speed.random_model llama31-8b models/8b-shape --layers 8

The tokenizer is the tiny model's, which names fewer tokens than the embedding has rows. Run it with
`model=llama31-8b model.path=models/8b-shape model.shape.layers=8 data=arithmetic`.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fp8_nemo.export.make_model import make_config
from fp8_nemo.export.source import INDEX
from fp8_nemo.export.whole_files import write_json
from fp8_nemo.glue.wire import named_shapes
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.model_dir import SHIPPED
from fp8_nemo.recipe.options.model import Shape

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
DEVIATION = 0.02
"""Of every weight, as transformers makes them; norms are 1 and biases 0."""
LAYERS = re.compile(r"model\.layers\.(\d+)\.")


def config_of(shape: Shape) -> PretrainedConfig:
    """Return the configuration of a model of any family, in BF16."""
    return make_config(
        shape,
        max_position_embeddings=32768,
        dtype="bfloat16",
        architectures=[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[shape.family]],
        **({} if shape.experts else {"rope_theta": 5e5}),
    )


def build(shape: Shape) -> PreTrainedModel:
    """Build a model of any family in BF16, as transformers initializes it."""
    return AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.bfloat16)


def write(shape: Shape, folder: Path, k_bias: float = 0.0) -> None:
    """Write configuration, shards of two layers, and their index.

    Args:
        shape: of a model option; the weights need not fit one GPU, nor the host. They are others
            on a CPU.
        folder: made if it is missing.
        k_bias: deviation of K's biases, which Qwen2.5 has large: 8 gives K outliers as in verl
            #4435, where a cache in FP8 broke without scales.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(shape)
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    shapes, shards = named_shapes(shape), {}
    for name in shapes:
        found = LAYERS.match(name)
        part = f"{int(found[1]) // 2:05d}" if found else "ends"
        shards.setdefault(f"model-{part}.safetensors", []).append(name)
    devices = [f"cuda:{n}" for n in range(torch.cuda.device_count())] or ["cpu"]

    def make(number: int, file: str, names: Iterable[str]) -> None:
        generator = torch.Generator(devices[number % len(devices)]).manual_seed(number)
        made = {name: _random(name, shapes[name], generator, k_bias) for name in names}
        save_file(made, folder / file, metadata={"format": "pt"})

    with ThreadPoolExecutor(2 * len(devices)) as pool:
        list(pool.map(make, range(len(shards)), *zip(*shards.items(), strict=True)))
    index = {
        "metadata": {"total_size": 2 * sum(map(prod, shapes.values()))},
        "weight_map": {name: file for file, names in shards.items() for name in names},
    }
    write_json(folder / INDEX, index)


def _random(name: str, size: tuple[int, ...], generator: torch.Generator, k_bias: float) -> Tensor:
    made = torch.empty(size, dtype=torch.bfloat16, device=generator.device)
    if name.endswith("norm.weight"):
        made.fill_(1)
    elif name.endswith("bias"):
        made.normal_(std=k_bias if "k_proj" in name else 0.0, generator=generator)
    else:
        made.normal_(std=DEVIATION, generator=generator)
    return made.cpu()


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="an option of conf/model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="all of them unless given")
    parser.add_argument("--k-bias", type=float, default=0.0, help="deviation of K's biases")
    options = parser.parse_args()
    cell = [f"model={options.model}", "backend=nemo", "precision=bf16"]
    [recipe] = compose([*cell, *([f"model.shape.layers={n}"] if (n := options.layers) else [])])
    write(recipe.model.shape, options.folder, options.k_bias)
    tokenizer = SHIPPED / ("tiny-qwen3-moe" if recipe.model.shape.experts else "tiny-llama")
    for name in TOKENIZER:
        shutil.copy(tokenizer / name, options.folder)
    number = sum(map(prod, named_shapes(recipe.model.shape).values()))
    print(f"{options.folder}: {number:,} parameters")


if __name__ == "__main__":
    main()
