"""In vLLM's worker: times the decode steps of a full batch, then profiles as many.

It hears each step where the worker is asked for it, so that an engine in this process and one in a
process of its own are measured at the same place. It travels into that process by name.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import time
from typing import Any

from benchmarks.speed.decode_kernels import RANGES, Kernel, summary

SETTLE, STEPS = 8, 20  # decode steps before the first that counts; and those of either part


class Clock:
    """In the place of a method: the seconds of each call by the machine's monotonic clock."""

    def __init__(self, owner: Any, name: str) -> None:
        self.call, self.spans = getattr(owner, name), []
        setattr(owner, name, self)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call the method, and time it."""
        start = time.perf_counter()
        try:
            return self.call(*given, **named)
        finally:
            self.spans.append((start, time.perf_counter()))

    def within(self, first: float, last: float) -> float:
        """Return the seconds of the calls that began in a window."""
        return sum(end - start for start, end in self.spans if first <= start < last)


class CudaTrace:
    """The kernels between `start` and `stop`, each of which waits for the device."""

    def start(self) -> None:
        """Start the profiler, with an idle device."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize()
        self.profiler = profile(activities=[ProfilerActivity.CUDA])
        self.profiler.start()

    def stop(self) -> list[Kernel]:
        """Stop the profiler once the device is idle; return kernels and copies, without ranges."""
        import torch

        torch.cuda.synchronize()
        self.profiler.stop()
        inner = self.profiler.profiler
        assert inner is not None and inner.kineto_results is not None
        return [
            Kernel(event.name(), event.start_ns() / 1e3, event.duration_ns() / 1e3)
            for event in inner.kineto_results.events()
            if event.device_type() == torch.autograd.DeviceType.CUDA
            and not event.is_user_annotation()
            and not event.name().startswith(RANGES)
        ]


class Watch:
    """Counts the steps in which each of `batch` sequences gets one token.

    After `SETTLE` of them come `STEPS` by the host's clock, then `STEPS` under the profiler.
    """

    def __init__(self, worker: Any, trace: Any) -> None:
        self.trace, self.clocks = trace, {}
        for name in ("execute_model", "sample_tokens"):
            self.clocks[name] = Clock(worker, name)
        self.inner, worker.execute_model = worker.execute_model, self.execute_model
        self.arm(0)

    def arm(self, batch: int) -> None:
        """Forget what was seen and wait for this batch."""
        self.batch, self.seen = batch, 0
        self.times: list[float] = []
        self.contexts: list[float] = []
        self.kernels: list[Kernel] = []

    def execute_model(self, scheduled: Any) -> Any:
        """Note the step, and let the worker do it."""
        made = scheduled.num_scheduled_tokens
        if self.batch and len(made) == self.batch == scheduled.total_num_scheduled_tokens:
            self.note(scheduled.scheduled_cached_reqs.num_computed_tokens)
        return self.inner(scheduled)

    def note(self, computed: list[int]) -> None:
        """Note the clock at the start of a full step, or start or stop the profiler there."""
        number, self.seen = self.seen - SETTLE, self.seen + 1
        if 0 <= number <= STEPS:
            self.times.append(time.perf_counter())
            self.contexts.append(sum(computed) / max(1, len(computed)))
        if number == STEPS:
            self.trace.start()
        if number == 2 * STEPS:
            self.kernels = self.trace.stop()

    def taken(self) -> dict[str, Any]:
        """Return the seconds of the timed steps, the worker's part, and the profile of the others.

        Raises:
            RuntimeError: the batch was not full for long enough, as when a request is preempted.
        """
        if not self.kernels:
            need = SETTLE + 2 * STEPS + 1
            raise RuntimeError(
                f"{self.seen} steps of all {self.batch} sequences, {need} are needed; "
                "does the cache hold them, and has the profiler a device?"
            )
        first, last = self.times[0], self.times[-1]
        return {
            "window": [first, last],
            "seconds": [b - a for a, b in zip(self.times, self.times[1:], strict=False)],
            "context": sum(self.contexts) / len(self.contexts),
            "worker": {name: clock.within(first, last) for name, clock in self.clocks.items()},
            "profile": summary(self.kernels, STEPS),
        }


def arm(worker: Any, batch: int) -> None:
    """Make a vLLM worker wait for this batch; the first call puts the watch there."""
    inner = getattr(worker, "worker", worker)
    if "fp8_watch" not in vars(inner):
        inner.fp8_watch = Watch(inner, CudaTrace())
    inner.fp8_watch.arm(batch)


def taken(worker: Any) -> dict[str, Any]:
    """Return what the watch of a vLLM worker saw since it was armed."""
    return getattr(worker, "worker", worker).fp8_watch.taken()


def settings(worker: Any) -> dict[str, str]:
    """Return a vLLM worker's configuration as it was resolved, part by part, as text."""
    inner = getattr(worker, "worker", worker)
    config = inner.vllm_config
    parts = ("scheduler_config", "cache_config", "compilation_config", "attention_config",
             "kernel_config", "model_config", "parallel_config")  # fmt: skip
    found = {name: str(getattr(config, name)) for name in parts if hasattr(config, name)}
    return found | {
        "optimization_level": str(config.optimization_level),
        "model_runner": f"{type(inner.model_runner).__module__}",
    }


def rescale(worker: Any, factor: float) -> None:
    """In vLLM's worker: the scales of Q, K and V times a factor, with their copies on the host."""
    for module in getattr(worker, "worker", worker).get_model().modules():
        if hasattr(module, "_k_scale"):
            for name in ("_q_scale", "_k_scale", "_v_scale"):
                getattr(module, name).mul_(factor)
                setattr(module, f"{name}_float", getattr(module, f"{name}_float") * factor)
