"""Memory and time of recipes.quantize_checkpoint on a checkpoint of a real model's shape.

python -m benchmarks.speed.checkpoint_memory llama31-8b FOLDER --out FILE.json [--shard-gib 4.65]

Writes random weights shard by shard (FOLDER/source, 16 GB for 8B), converts them in a process of
its own (FOLDER/fp8) and reads that process's largest resident set, mapped files counted.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks import record
from fp8_nemo.export.source import INDEX
from fp8_nemo.glue.wire import named_shapes
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.plain import to_json

DRAWN = 2**26  # random values, repeated: what they are does not matter here


def shards(shape: Shape, most: int) -> Iterator[dict[str, Tensor]]:
    """Yield the checkpoint's weights in order, in dictionaries of at most so many bytes."""
    values_N = (torch.randn(DRAWN, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    some: dict[str, Tensor] = {}
    for name, size in named_shapes(shape).items():
        count = torch.Size(size).numel()
        if some and sum(t.nbytes for t in some.values()) + 2 * count > most:
            yield some
            some = {}
        some[name] = values_N.repeat(-(-count // DRAWN))[:count].clone().reshape(size)
    yield some


def write(shape: Shape, folder: Path, most: int) -> list[int]:
    """Write a checkpoint in shards; return their sizes."""
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards(shape, most)):
        name = f"model-{number:05}.safetensors"
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
        tensors.clear()  # one shard at a time here too
    (folder / INDEX).write_text(to_json({"metadata": {}, "weight_map": weight_map}))
    config = {"model_type": "llama", "num_hidden_layers": shape.layers}
    (folder / "config.json").write_text(to_json(config))
    return [file.stat().st_size for file in sorted(folder.glob("*.safetensors"))]


def peak_of(command: Sequence[str]) -> int:
    """Run a command; return the most bytes that it held resident, as its own memory map counts.

    `ru_maxrss` of a child begins at what its parent held.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    peak = 0
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max([peak, *map(int, re.findall(r"VmHWM:\s+(\d+) kB", status))])
            time.sleep(0.01)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return peak * 1024


def main() -> None:
    """Write a checkpoint, convert it, and measure the memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    record.add_options(parser)
    parser.add_argument("--shard-gib", type=float, default=4.65)
    options = parser.parse_args()
    [recipe] = compose([f"model={options.model}", "backend=nemo", "precision=fp8-linear"])
    source, target = options.folder / "source", options.folder / "fp8"
    sizes = write(recipe.model.shape, source, int(options.shard_gib * 2**30))
    verb = [sys.executable, "-m", "fp8_nemo.recipes.quantize_checkpoint", str(source), str(target)]
    start = time.perf_counter()
    peak = peak_of(verb)
    seconds = time.perf_counter() - start
    content = {
        "shards": sizes,
        "written": [file.stat().st_size for file in sorted(target.glob("*.safetensors"))],
        "peak resident bytes": peak,
        "of the largest shard": peak / max(sizes),
        "seconds": seconds,
    }
    record.keep(options.out, options.commit, **content)
    print(content)


if __name__ == "__main__":
    main()
