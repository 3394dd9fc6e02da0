"""How fast a mixture's experts are in vLLM's Triton kernel: default tiles, another GPU's, BF16's.

python -m benchmarks.speed.experts --out FILE.json [--width 768] [--rows 16,64,256,1024]

Qwen3-30B-A3B: 128 experts, 8 a token, hidden 2048; `--width 384` is what each of two GPUs of an
engine holds. vLLM ships tiles that were tuned for some GPUs: `tuned` are those that it ships for an
H200, which an H100 does not find under its own name. Random weights and routes; CUDA events.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import record

EXPERTS, TAKEN, HIDDEN = 128, 8, 2048
BLOCK = [128, 128]
WARM, ROUNDS, CALLS = 5, 5, 20


def tuned_tiles(dtype: str | None, width: int) -> dict[int, dict[str, int]]:
    """Return the tiles by rows that vLLM ships for an H200; empty if it has none."""
    import vllm.model_executor.layers.fused_moe as fused_moe

    kind = f",dtype={dtype},block_shape={BLOCK}".replace(" ", "") if dtype else ""
    name = f"E={EXPERTS},N={width},device_name=NVIDIA_H200{kind}.json"
    file = Path(fused_moe.__file__).parent / "configs" / name
    content = json.loads(file.read_text()) if file.is_file() else {}
    return {int(rows): tiles for rows, tiles in content.items() if rows.isdigit()}


def clocked(call: Callable[[], Any]) -> list[float]:
    """Return the milliseconds of a call, by rounds of several."""
    for _ in range(WARM):
        call()
    found = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(CALLS):
            call()
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


def measured(width: int, rows: list[int]) -> Iterator[dict[str, Any]]:
    """Yield a row per format, number of tokens and choice of tiles."""
    from vllm.model_executor.layers.fused_moe import override_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    for quantized in (False, True):
        up, down, config = weights(width, quantized)
        tiles = tuned_tiles("fp8_w8a8" if quantized else None, width)
        for count in rows:
            hidden = torch.randn(count, HIDDEN, device="cuda", dtype=torch.bfloat16)
            ids = torch.rand(count, EXPERTS, device="cuda").topk(TAKEN).indices.int()
            shares = torch.full((count, TAKEN), 1 / TAKEN, device="cuda")
            call = partial(fused_experts, hidden, up, down, shares, ids, quant_config=config)
            found = {"default": record.repeated(clocked(call))}
            if tiles:
                with override_config(tiles[min(tiles, key=lambda n, m=count: abs(n - m))]):
                    found["tuned"] = record.repeated(clocked(call))
            yield {"format": "fp8" if quantized else "bf16", "rows": count, "milliseconds": found}


def main() -> None:
    """Measure the experts' kernels, print the rows, and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    record.add_options(parser)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rows", default="1,8,16,32,64,128,256,512,1024,4096")
    options = parser.parse_args()
    record.need("vllm")
    rows: list[dict[str, Any]] = []
    torch.manual_seed(0)
    for row in measured(options.width, [int(each) for each in options.rows.split(",")]):
        rows.append(row)
        record.keep(options.out, options.commit, width=options.width, rows=rows)
    record.show(f"milliseconds of experts of {options.width}", [
        {"format": row["format"], "rows": row["rows"]}
        | {tiles: each["median"] for tiles, each in row["milliseconds"].items()}
        for row in rows
    ])  # fmt: skip


if __name__ == "__main__":
    main()
