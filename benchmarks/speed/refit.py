"""What a refit and the watching of Q, K and V cost by themselves, without NeMo RL around them.

python -m benchmarks.speed.refit --out benchmarks/results/refit-h200.json [--model llama31-8b]
    [--repetitions 5] [--rows 768,8192,32768]

Weights of the model's shape lie on one device, random. `stream`: what the trainer makes of them for
one refit, thrown away; in BF16, in FP8, in FP8 with digests, and in FP8 into a copy of the engine's
tensors with each `glue.verify`: off, names, bytes; all by turns. `seconds` is by the host's clock
up to the last byte, `of_loaded` the median over rounds of its ratio to that of verify=off, and
`more_ms` of its difference, `device` the sum of the device's own work in one more run,
`allocations` how often memory was asked of the device: each starts with an empty cache, as NeMo
RL's refits do (`offload_before_refit`).
`watch`: one layer's Q, K and V in a micro-batch of so many rows: microseconds of the host and of
the device. What benchmarks/glue/compare.py measures in a real set-up has these parts. Runs on a CPU
too, to be tested.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from benchmarks import record
from fp8_nemo.glue.destination import Destination
from fp8_nemo.glue.ledger import Ledger
from fp8_nemo.glue.recalibrate import AmaxObserver
from fp8_nemo.glue.refit import refit_stream
from fp8_nemo.glue.wire import kv_scale_names, named_shapes, wire_specs
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision

CALLS = 200  # of the observer, between two looks at the clock
KV_SCALE = 0.02
UNPROVEN = "FP8, loaded, verify=off"
LOADED = "FP8, loaded"
ERRORS = Console(stderr=True)
MOST_PROFILED = 5000  # tensors of a stream: the profiler takes minutes over those of experts


class Once(NamedTuple):
    """One stream: `Once(9_082_904_960, 0.065, 5)`."""

    sent: int
    """Bytes."""
    seconds: float
    allocations: int


def wait(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def named_weights(shape: Shape, device: torch.device) -> dict[str, Tensor]:
    """Make BF16 weights with the spread of trained ones."""
    return {
        name: torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, 0.02)
        for name, size in named_shapes(shape).items()
    }


class Refit:
    """Streams of one model's weights in one precision."""

    def __init__(self, shape: Shape, precision: Precision, device: torch.device) -> None:
        self.shape, self.precision, self.device = shape, precision, device
        self.weights = named_weights(shape, device)
        names = [name for layer in range(shape.layers) for name in kv_scale_names(layer)]
        self.kv_scales = dict.fromkeys(names, KV_SCALE)
        self.specs = wire_specs(named_shapes(shape), precision, shape.layers)
        self.engine = {
            name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            for name, spec in self.specs.items()
        }
        self.destination = Destination(self.engine, self.specs)

    def stream(self, precision: Precision, verify: str) -> Iterator[tuple[str, Tensor]]:
        """Yield one refit's tensors, as the policy worker makes them."""
        return refit_stream(
            iter(self.weights.items()), precision, self.kv_scales,
            num_layers=self.shape.layers, verify=verify,
        )  # fmt: skip

    def thrown_away(self, precision: Precision, verify: str) -> int:
        """Return the bytes of a stream that nobody takes."""
        return sum(tensor.nbytes for _, tensor in self.stream(precision, verify))

    def unproven(self) -> int:
        """Return the bytes of a stream that the engine's tensors take, without a ledger."""
        sent = 0
        for name, tensor in self.stream(self.precision, "off"):
            if name in self.engine:
                self.engine[name].copy_(tensor)
                sent += tensor.nbytes
        return sent

    def loaded(self, verify: str) -> int:
        """Return the bytes of a stream that the engine's tensors take, proven."""
        ledger = Ledger(self.specs, self.destination, verify=verify)
        for name, tensor in self.stream(self.precision, verify):
            if ledger.receive(name, tensor):
                self.engine[name].copy_(tensor)
        return ledger.close().bytes

    def rows(self, repetitions: int) -> Iterator[dict[str, Any]]:
        """Yield a timed row of every kind of stream."""
        bf16 = Precision(rollout_kv=self.precision.rollout_kv)
        kinds: dict[str, Callable[[], int]] = {
            "BF16": partial(self.thrown_away, bf16, "off"),
            "FP8": partial(self.thrown_away, self.precision, "off"),
            "FP8, digests": partial(self.thrown_away, self.precision, "bytes"),
            UNPROVEN: self.unproven,
            f"{LOADED}, verify=names": partial(self.loaded, "names"),
            f"{LOADED}, verify=bytes": partial(self.loaded, "bytes"),
        }
        is_short = len(self.specs) < MOST_PROFILED
        rounds = [{kind: self._once(work) for kind, work in kinds.items()}
                  for _ in track(range(repetitions + 1), "rounds", console=ERRORS)][1:]  # fmt: skip
        for kind, work in kinds.items():
            sent, seconds, asked = zip(*(each[kind] for each in rounds), strict=True)
            loads = kind.startswith(LOADED)
            pairs = [(each[kind].seconds, each[UNPROVEN].seconds) for each in rounds]
            yield {
                "stream": kind, "bytes": sent[-1], "seconds": record.repeated(seconds),
                "of_loaded": median(one / other for one, other in pairs) if loads else None,
                "more_ms": median(one - other for one, other in pairs) * 1e3 if loads else None,
                "device": device_seconds(work, self.device) if is_short else None,
                "allocations": record.repeated(asked),
            }  # fmt: skip

    def _once(self, work: Callable[[], int]) -> Once:
        self._forget()
        before, start = allocations(self.device), time.perf_counter()
        sent = work()
        wait(self.device)
        seconds = time.perf_counter() - start
        return Once(sent, seconds, allocations(self.device) - before)

    def _forget(self) -> None:
        gc.collect()
        wait(self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def allocations(device: torch.device) -> int:
    """Return how often memory was asked of the device so far."""
    return torch.cuda.memory_stats(device)["num_device_alloc"] if device.type == "cuda" else 0


def device_seconds(work: Callable[[], Any], device: torch.device) -> float | None:
    """Return the device's own seconds in one run, kernels and copies; None on a CPU."""
    if device.type != "cuda":
        return None

    def whole() -> None:
        work()
        wait(device)

    return sum(spent for _, spent in record.kernels(whole)) / 1e3 or None


def watched(shape: Shape, rows: int, repetitions: int, device: torch.device) -> dict[str, Any]:
    """Time one layer's observation: microseconds on the host and on the device."""
    observer = AmaxObserver(shape.layers, 1, device)
    qkv = [
        torch.randn(rows, heads, shape.head_dim, device=device).bfloat16()
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    ]
    keep = torch.arange(rows, device=device) < 0.9 * rows

    def calls() -> None:
        for n in range(CALLS):
            observer.observe_rows(n % shape.layers, qkv, keep)

    host = []
    for _ in range(repetitions + 1):
        wait(device)
        start = time.perf_counter()
        calls()
        host.append((time.perf_counter() - start) / CALLS * 1e6)
    seconds = device_seconds(calls, device)
    moved = sum(x.nbytes for x in qkv) * 0.9
    return {
        "rows": rows,
        "host_us": record.repeated(host[1:]),
        "device_us": seconds and seconds / CALLS * 1e6,
        "device_gb_per_second": seconds and moved * CALLS / seconds / 1e9,
    }


def main() -> int:
    """Measure both; the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    parser.add_argument("--model", default="llama31-8b", help="an option of conf/model")
    parser.add_argument("--precision", default="fp8-kv-attn")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rows", default="768,8192,32768", help="of a micro-batch, to be watched")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cell = [f"model={options.model}", f"precision={options.precision}"]
    [recipe] = compose(cell)
    shape, found = recipe.model.shape, {"model": options.model, "stream": [], "watch": []}
    for rows in map(int, options.rows.split(",")):
        found["watch"].append(watched(shape, rows, options.repetitions, device))
        record.keep(options.out, options.commit, **found)
    record.show(f"{options.model}, watching one layer", found["watch"])
    for row in Refit(shape, recipe.precision, device).rows(options.repetitions):
        found["stream"].append(row)
        record.keep(options.out, options.commit, **found)
    record.show(f"{options.model}, one refit", found["stream"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
