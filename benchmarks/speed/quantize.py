"""Quantizing weights on one GPU: bandwidth against a copy, time against stock and verl, bytes.

python -m benchmarks.speed.quantize --out benchmarks/results/quantize-h200.json [--verl FILE]

Every time is of a captured CUDA graph that works through copies of a weight larger together than
the L2 cache, by events, so neither Python nor a warm cache counts; `eager` is the same by the
host's clock, with both. Bandwidth is bytes read plus written; `of_copy` is its ratio to
`dst.copy_(src)` of as many bytes, measured in turn with it. `stock` is NeMo RL's
`cast_tensor_to_fp8_blockwise`, with the FP32 copy that its caller makes; `verl` the Triton kernel
of the file given (verl/utils/kernel/fp8_kernel.py). Bytes are compared with TransformerEngine's
blockwise quantizer.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import record
from benchmarks.numerics.stock_formula import stock_quantize_blocks
from fp8_nemo.glue.quantize import Fp8Weight, quantize_blocks, quantize_list
from fp8_nemo.recipe.plain import to_json

REPETITIONS = 10
COLD = 512 * 2**20  # bytes that a graph works through, ten times the L2 cache
LLAMA_8B = {
    "q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096),
    "gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336),
}  # fmt: skip
QWEN3_30B = {
    "q": (4096, 2048), "k": (512, 2048), "o": (2048, 4096),
    "expert gate": (768, 2048), "expert down": (2048, 768),
}  # fmt: skip
SMALL_LLAMA = {"q": (512, 512), "k": (256, 512), "gate": (1536, 512), "down": (512, 1536)}


class Case(NamedTuple):
    """Weights that are quantized together: `Case("8B gate", [(14336, 4096)], one=True)`."""

    name: str
    shapes: list[tuple[int, ...]]
    one: bool
    """One weight or slab, by `quantize_blocks`; else a list, by `quantize_list`."""


CASES = [
    *(Case(f"8B {name}", [LLAMA_8B[name]], True) for name in ("q", "k", "gate", "down")),
    Case("8B layer, one launch", list(LLAMA_8B.values()), False),
    Case("8B stack of 8 layers, one launch", list(LLAMA_8B.values()) * 8, False),
    Case("30B slab gate and up", [(256, 768, 2048)], True),
    Case("30B slab down", [(128, 2048, 768)], True),
    Case("30B experts one by one, one launch", [(768, 2048), (2048, 768)] * 128, False),
]


def weight(*shape: int) -> Tensor:
    """Make a weight with the spread of a trained one, about 0.02, in BF16."""
    return (torch.randn(*shape, device="cuda") * 0.02).bfloat16()


def per_run(work: Callable[[], Any], runs: int) -> list[float]:
    """Return the seconds of one of the `runs` in `work`, by events around a CUDA graph's replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(REPETITIONS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / runs)
    return times[2:]


def by_the_clock(work: Callable[[], Any], runs: int) -> list[float]:
    """Return the seconds of one of the `runs` in `work`, as its caller waits for them."""
    times = []
    for _ in range(REPETITIONS + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / runs)
    return times[2:]


def measure(case: Case, others: dict[str, Callable[[Tensor], Any]]) -> dict[str, Any]:
    """Return times, bandwidths and ratios of one case."""
    size = sum(2 * torch.Size(shape).numel() for shape in case.shapes)
    sets = max(1, -(-COLD // size))
    weights = [[weight(*shape) for shape in case.shapes] for _ in range(sets)]
    slots = torch.zeros(len(case.shapes), dtype=torch.bool, device="cuda")
    flat = torch.empty(size * 3 // 4 // 8, dtype=torch.int64, device="cuda")
    copies = [(flat.clone(), flat.clone()) for _ in range(sets)]

    def ours() -> list[Any]:
        if case.one:
            return [quantize_blocks(each[0], nonfinite=slots[0]) for each in weights]
        return [quantize_list(each, nonfinite_N=slots) for each in weights]

    def copy() -> None:
        for target, source in copies:
            target.copy_(source)

    found: dict[str, Any] = {"case": case.name, "mib": size / 2**20, "seconds": {}}
    found["seconds"]["ours"] = per_run(ours, sets)
    found["seconds"]["copy"] = per_run(copy, sets)
    found["seconds"]["ours eager"] = by_the_clock(ours, sets)
    for name, other in others.items():
        work = _each(other, weights)
        found["seconds"][name] = per_run(work, sets)
        found["seconds"][f"{name} eager"] = by_the_clock(work, sets)
    middle = {name: median(times) for name, times in found["seconds"].items()}
    moved = size * 3 / 2  # the scales are 1/8192 of that
    found["gb_per_second"] = {"ours": moved / middle["ours"] / 1e9}
    found["gb_per_second"]["copy"] = moved / middle["copy"] / 1e9
    found["of_copy"] = middle["copy"] / middle["ours"]
    found["times_ours"] = {name: middle[name] / middle["ours"] for name in others}
    return found


def _each(other: Callable[[Tensor], Any], weights: list[list[Tensor]]) -> Callable[[], None]:
    def work() -> None:
        for each in weights:
            for one in each:
                for matrix in one.flatten(0, -3) if one.ndim > 2 else [one]:
                    other(matrix)

    return work


def stock() -> Callable[[Tensor], Any]:
    """Return NeMo RL's quantizer as `load_weights` calls it; its checkout must be on the path."""
    from nemo_rl.models.generation.vllm.quantization import fp8

    fp8.global_fp8_config = fp8.FP8Config()
    return lambda matrix: fp8.cast_tensor_to_fp8_blockwise(matrix.to(torch.float), [128, 128])


def verl(path: Path) -> Callable[[Tensor], Any]:
    """Return verl's Triton kernel, from its file."""
    spec = importlib.util.spec_from_file_location("verl_fp8_kernel", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda matrix: module.blockwise_cast_to_fp8_triton(matrix, [128, 128])


def transformer_engine() -> Callable[[Tensor], Fp8Weight]:
    """Return TransformerEngine's 128x128 quantizer with FP32 scales."""
    import transformer_engine.pytorch  # noqa: F401  # loads the library that the extension needs
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    quantizer = Float8BlockQuantizer(
        fp8_dtype=tex.DType.kFloat8E4M3, rowwise=True, columnwise=False,
        amax_epsilon=0.0, force_pow_2_scales=False, block_scaling_dim=2,
    )  # fmt: skip

    def quantize(matrix: Tensor) -> Fp8Weight:
        found = quantizer(matrix)
        Q = -(-matrix.shape[1] // 128)
        fp8 = found._rowwise_data.view(torch.float8_e4m3fn)
        return Fp8Weight(fp8, found._rowwise_scale_inv[:, :Q])

    return quantize


def same(one: Fp8Weight, other: Fp8Weight) -> dict[str, float]:
    """Return the shares of bytes and of scales that are equal."""
    bytes_equal = one.fp8_OI.view(torch.uint8) == other.fp8_OI.view(torch.uint8)
    return {
        "bytes": bytes_equal.double().mean().item(),
        "scales": (one.scale_inv_PQ == other.scale_inv_PQ).double().mean().item(),
    }


def bytes_of(others: dict[str, Callable[[Tensor], Fp8Weight]]) -> Iterator[dict[str, Any]]:
    """Yield how much of ours each other quantizer holds, and what stock and TE share."""
    models = {"8B": LLAMA_8B, "30B": QWEN3_30B, "small-llama": SMALL_LLAMA}
    for model, shapes in models.items():
        for name, shape in shapes.items():
            for spread, matrix in (("normal", weight(*shape)), ("heavy", heavy(*shape))):
                exact = quantize_blocks(matrix)
                like_stock = stock_quantize_blocks(matrix)
                row: dict[str, Any] = {"weight": f"{model} {name}", "values": spread}
                theirs = {other: quantize(matrix) for other, quantize in others.items()}
                for other, found in theirs.items():
                    row[f"exact = {other}"] = same(exact, found)
                    row[f"stock formula = {other}"] = same(like_stock, found)
                row["triton = torch on the cpu"] = same(
                    Fp8Weight(*(each.cpu() for each in exact)), quantize_blocks(matrix.cpu())
                )
                yield row


def heavy(*shape: int) -> Tensor:
    """Make values over many orders of magnitude, with zeros and a block of zeros."""
    size = torch.exp(torch.randn(*shape, device="cuda") * 8)
    values = torch.randn(*shape, device="cuda") * size
    values[torch.rand(*shape, device="cuda") < 0.1] = 0
    values[:128, :128] = 0
    return values.clamp(-1e37, 1e37).bfloat16()


def main() -> None:
    """Measure the quantizers, print the table, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    parser.add_argument("--verl", type=Path, help="verl/utils/kernel/fp8_kernel.py")
    parser.add_argument("--warps", type=int, nargs="*", default=[], help="also try these")
    options = parser.parse_args()
    record.need("triton", "vllm", "nemo_rl", "transformer_engine")
    torch.manual_seed(0)
    others: dict[str, Callable[[Tensor], Any]] = {"stock": stock()}
    if options.verl:
        others["verl"] = verl(options.verl)
    content: dict[str, Any] = {"repetitions": REPETITIONS, "bytes": [], "cases": [], "warps": {}}
    pairs: dict[str, Callable[[Tensor], Fp8Weight]] = {}
    pairs["stock NeMo RL"] = lambda matrix: _stock_pair(others["stock"](matrix))
    pairs["TransformerEngine"] = transformer_engine()
    for row in bytes_of(pairs):
        content["bytes"].append(row)
        print(to_json(row), flush=True)
    shown = []
    for case in CASES:
        content["cases"].append(found := measure(case, others))
        record.keep(options.out, options.commit, **content)
        rate = {"case": case.name, "gb_per_second": found["gb_per_second"]["ours"]}
        shown.append(rate | {"of_copy": found["of_copy"]} | found["times_ours"])
        torch.cuda.empty_cache()
    record.show("quantizing: bandwidth, share of a copy's, and how many times slower others", shown)
    for warps in options.warps:
        from fp8_nemo.glue import kernels

        kernels.WARPS = warps
        content["warps"][warps] = {case.name: measure(case, {})["of_copy"] for case in CASES}
        record.keep(options.out, options.commit, **content)


def _stock_pair(found: tuple[Tensor, Tensor]) -> Fp8Weight:
    return Fp8Weight(found[0], found[1].squeeze(-1))


if __name__ == "__main__":
    main()
