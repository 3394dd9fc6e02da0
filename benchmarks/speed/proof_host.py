"""What the proof of a refit costs the host: a model's names and groups, with tensors of nothing.

python -m benchmarks.speed.proof_host --out host.json [--model llama31-8b] [--repetitions 15]

As many tensors as the model's, by its names and in its groups, each at most 256 x 256: what is left
of `benchmarks.speed.refit` is Python, and the launches that it makes. `host_ms` is CPU time of the
thread, so that neighbours on the machine count little; `more_ms` is the median over rounds of its
difference to verify=off. On a CPU the kernels are not launched: their tables are made, and digests
are all zero. Needs Triton. Times of a CPU's torch are not those of a GPU's, which ask for more.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks import record
from benchmarks.speed.refit import Refit
from fp8_nemo.glue import destination, ledger, refit
from fp8_nemo.glue.wire import named_shapes
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision

SIDE = 256
UNPROVEN = "loaded, off"


def groups_of(shape: Shape) -> list[int]:
    """Return how many weights each group of a model's refit has."""
    weights = {n: torch.empty(size, dtype=torch.bfloat16, device="meta")
               for n, size in named_shapes(shape).items()}  # fmt: skip
    return [len(group) for group in refit.in_groups(weights.items())]


def small(shape: Shape) -> Shape:
    """Return a shape with the same names, whose tensors take a device no time."""
    experts = {"expert_ffn": SIDE} if shape.experts else {}
    return replace(shape, hidden=SIDE, ffn=SIDE, heads=1, kv_heads=1, head_dim=SIDE, vocab=SIDE,
                   **experts)  # fmt: skip


def cut_like(counts: list[int]) -> Callable[[Iterable], Iterator[list]]:
    """Return an `in_groups` that makes groups of so many weights."""

    def in_groups(named_weights: Iterable[tuple[str, Tensor]], **_: bool) -> Iterator[list]:
        weights = iter(named_weights)
        for count in counts:
            yield [next(weights) for _ in range(count)]

    return in_groups


def without_a_device() -> None:
    """Take a GPU's way through the glue on a CPU, up to the launch of each kernel."""
    from fp8_nemo.glue import kernels

    class Unlaunched:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *arguments, **constants: None

    def quantize_list(
        weights: list[Tensor], *, pow2: bool, nonfinite_N: Tensor, together: list
    ) -> list:
        found = kernels.quantize_list(weights, pow2, nonfinite_N)
        for fp8_OI, scale_inv_PQ in found:
            fp8_OI.view(torch.uint8).zero_()
            scale_inv_PQ.fill_(1.0)
        return found

    kernels._digest = kernels._quantize_listed = Unlaunched()
    for module in (destination, ledger, refit):
        vars(module)["digests_of"] = kernels.digests
    refit.QUANTIZERS["fp8"] = quantize_list
    torch.cuda.device = lambda device: nullcontext()
    torch.Tensor.pin_memory = torch.Tensor.clone  # pyright: ignore


def rows(measured: Refit, repetitions: int) -> Iterator[dict[str, Any]]:
    """Yield a row of every kind of refit, timed by turns."""
    fp8: Precision = measured.precision
    kinds = {
        "sent, off": partial(measured.thrown_away, fp8, "off"),
        "sent, digests": partial(measured.thrown_away, fp8, "bytes"),
        UNPROVEN: measured.unproven,
        "loaded, names": partial(measured.loaded, "names"),
        "loaded, bytes": partial(measured.loaded, "bytes"),
    }
    rounds = [{kind: milliseconds(work) for kind, work in kinds.items()}
              for _ in range(repetitions + 1)][1:]  # fmt: skip
    for kind in kinds:
        compared = UNPROVEN if kind.startswith("loaded") else "sent, off"
        yield {
            "refit": kind, "host_ms": record.repeated([each[kind] for each in rounds]),
            "more_ms": median(each[kind] - each[compared] for each in rounds),
        }  # fmt: skip


def milliseconds(work: Callable[[], Any]) -> float:
    """Return the milliseconds of CPU that some work takes this thread."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.thread_time()
    work()
    return (time.thread_time() - start) * 1e3


def main() -> int:
    """Measure, print and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    parser.add_argument("--model", default="llama31-8b", help="an option of conf/model")
    parser.add_argument("--precision", default="fp8-kv-attn")
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    record.need("triton", device=False)
    [recipe] = compose([f"model={options.model}", f"precision={options.precision}"])
    counts = groups_of(recipe.model.shape)
    refit.in_groups = cut_like(counts)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
        without_a_device()
    measured = Refit(small(recipe.model.shape), recipe.precision, device)
    found = [*rows(measured, options.repetitions)]
    about = {"model": options.model, "tensors": len(measured.specs), "groups": len(counts)}
    record.keep(options.out, options.commit, **about, rows=found)
    record.show(f"{options.model}, {about['tensors']} tensors in {len(counts)} groups", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
