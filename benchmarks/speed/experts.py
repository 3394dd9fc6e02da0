"""How fast a mixture's experts are in vLLM's Triton kernel: its default tiles, others, BF16's.

python -m benchmarks.speed.experts --out FILE.json [--width 768] [--rows 16,64,256] [--search 200]

Qwen3-30B-A3B: 128 experts, 8 a token, hidden 2048; `--width 384` is what each of two GPUs of an
engine holds. vLLM ships tiles that were tuned for some GPUs: `h200` are those for an H200, which an
H100 does not find under its own name; `shipped` are those that a plan gives an H100, in
`nemo_config/tiles`.
`--search` tries others, for at most so many seconds, and `--tiles` writes the fastest as vLLM reads
them. Random weights and routes; a CUDA graph of calls, timed by events, so that no launch is
measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import record
from fp8_nemo.nemo_config.overrides import TILES
from fp8_nemo.recipe.plain import to_json

EXPERTS, TAKEN, HIDDEN = 128, 8, 2048
BLOCK = [128, 128]
WARM, ROUNDS, CALLS = 3, 5, 20
Tiles = dict[str, int]


def tiles_by_rows(folder: Path, gpu: str, dtype: str | None, width: int) -> dict[int, Tiles]:
    """Return the tiles by rows of a file that is named as vLLM names it; empty if there is none."""
    kind = f",dtype={dtype},block_shape={BLOCK}".replace(" ", "") if dtype else ""
    file = folder / f"E={EXPERTS},N={width},device_name={gpu}{kind}.json"
    content = json.loads(file.read_text()) if file.is_file() else {}
    return {int(rows): tiles for rows, tiles in content.items() if rows.isdigit()}


def candidates() -> Iterator[Tiles]:
    """Yield tiles whose blocks fit those of the scales, narrow ones first."""
    names = (
        "BLOCK_SIZE_M",
        "BLOCK_SIZE_N",
        "BLOCK_SIZE_K",
        "GROUP_SIZE_M",
        "num_warps",
        "num_stages",
    )
    narrow = product((16, 32, 64), (128, 64), (128,), (1, 16), (4,), (3, 4, 5))
    wide = product((64,), (128,), (128,), (1, 16), (8,), (3, 4))
    for numbers in (*narrow, *wide):
        yield dict(zip(names, numbers, strict=True))


def clocked(call: Callable[[], Any]) -> list[float]:
    """Return the milliseconds of a call on the device, by rounds of a graph of several."""
    for _ in range(WARM):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    found = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / CALLS)
    return found


def weights(width: int, quantized: bool) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Make both slabs of a layer's experts, and what vLLM wants to know of them."""
    from vllm.model_executor.layers.fused_moe.config import (
        FUSED_MOE_UNQUANTIZED_CONFIG,
        fp8_w8a8_moe_quant_config,
    )

    up = torch.randn(EXPERTS, 2 * width, HIDDEN, device="cuda", dtype=torch.bfloat16) / 50
    down = torch.randn(EXPERTS, HIDDEN, width, device="cuda", dtype=torch.bfloat16) / 50
    if not quantized:
        return up, down, FUSED_MOE_UNQUANTIZED_CONFIG
    scales = [
        torch.full((EXPERTS, each.shape[1] // 128, each.shape[2] // 128), 1e-4, device="cuda")
        for each in (up, down)
    ]
    config = fp8_w8a8_moe_quant_config(*scales, block_shape=BLOCK)
    return (up * 1e4).to(torch.float8_e4m3fn), (down * 1e4).to(torch.float8_e4m3fn), config


class Experts:
    """A layer's experts of one format, called with some rows and tiles."""

    def __init__(self, width: int, quantized: bool) -> None:
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

        up, down, config = weights(width, quantized)
        self.apply = partial(fused_experts, w1=up, w2=down, quant_config=config)

    def milliseconds(self, rows: int, tiles: Tiles | None) -> list[float]:
        """Time them with random routes; `None` takes vLLM's default tiles."""
        from vllm.model_executor.layers.fused_moe import override_config

        torch.manual_seed(rows)
        hidden = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        ids = torch.rand(rows, EXPERTS, device="cuda").topk(TAKEN).indices.int()
        shares = torch.full((rows, TAKEN), 1 / TAKEN, device="cuda")
        call = partial(self.apply, hidden, topk_weights=shares, topk_ids=ids)
        if tiles is None:
            return clocked(call)
        with override_config(tiles):
            return clocked(call)


def measured(width: int, rows: list[int]) -> Iterator[dict[str, Any]]:
    """Yield a row per format, number of tokens and choice of tiles."""
    import vllm.model_executor.layers.fused_moe as fused_moe

    folder = Path(fused_moe.__file__).parent / "configs"
    for quantized in (False, True):
        experts, dtype = Experts(width, quantized), "fp8_w8a8" if quantized else None
        named = {
            "h200": tiles_by_rows(folder, "NVIDIA_H200", dtype, width),
            "shipped": tiles_by_rows(TILES, "NVIDIA_H100_80GB_HBM3", dtype, width),
        }
        for count in rows:
            found = {"default": record.repeated(experts.milliseconds(count, None))}
            for name, tiles in named.items():
                if tiles:
                    nearest = tiles[min(tiles, key=lambda n, m=count: abs(n - m))]
                    found[name] = record.repeated(experts.milliseconds(count, nearest))
            yield {"format": "fp8" if quantized else "bf16", "rows": count, "milliseconds": found}


def searched(width: int, rows: list[int], seconds: float) -> Iterator[dict[str, Any]]:
    """Yield each candidate's milliseconds by rows, in FP8, until the time is over."""
    experts, end = Experts(width, quantized=True), time.monotonic() + seconds
    for tiles in candidates():
        if time.monotonic() > end:
            print("--search: the time is over, the other candidates were not tried", flush=True)
            return
        try:
            took = {count: experts.milliseconds(count, tiles) for count in rows}
        except Exception as error:  # Triton's: too many registers, too much shared memory
            yield {"tiles": tiles, "error": str(error).splitlines()[0]}
            continue
        yield {
            "tiles": tiles,
            "milliseconds": {n: record.repeated(each) for n, each in took.items()},
        }


def fastest(tried: list[dict[str, Any]], rows: list[int]) -> dict[int, Tiles]:
    """Return the tiles of the smallest median for each number of rows."""
    timed = [each for each in tried if "milliseconds" in each]
    return {
        count: min(timed, key=lambda each, n=count: each["milliseconds"][n]["median"])["tiles"]
        for count in rows
        if timed
    }


def main() -> None:
    """Measure the experts' kernels, print the rows, and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    record.add_options(parser)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rows", default="1,8,16,32,64,128,192,256,512")
    parser.add_argument("--search", type=float, default=0.0, help="seconds")
    parser.add_argument("--tiles", type=Path, help="the file for what --search found")
    options = parser.parse_args()
    record.need("vllm")
    counts = [int(each) for each in options.rows.split(",")]
    rows: list[dict[str, Any]] = []
    tried: list[dict[str, Any]] = []
    keep = partial(record.keep, options.out, options.commit, width=options.width)
    for row in measured(options.width, counts):
        rows.append(row)
        keep(rows=rows)
    for each in searched(options.width, counts, options.search) if options.search else ():
        tried.append(each)
        keep(rows=rows, tried=tried)
    if options.tiles and tried:
        options.tiles.write_text(to_json(fastest(tried, counts), indent=1) + "\n")
    record.show(f"milliseconds of experts of {options.width}", [
        {"format": row["format"], "rows": row["rows"]}
        | {tiles: each["median"] for tiles, each in row["milliseconds"].items()}
        for row in rows
    ])  # fmt: skip


if __name__ == "__main__":
    main()
