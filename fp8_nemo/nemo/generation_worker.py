"""NeMo RL's vLLM workers: one starts in four bits and hands over whole tensors, one awaits.

NeMo RL writes them into a tensor one by one, 10 us each by the host: for 128 answers of 2,000
tokens 2.7 s after the last token (seam logprobs-one-by-one). In the synchronous worker vLLM keeps
each answer's logprobs as flat lists, which is also less to make and to collect in every decode
step, and each list becomes one tensor. The values are the same.
"""

# pyright: reportMissingImports=false
# NeMo RL and vLLM stand on the path of a run, not of a type check.
from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import ray
import torch
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl
from torch import Tensor

from fp8_nemo.nemo.marlin.layout import holds_four_bits, quantization
from fp8_nemo.nemo.worker_settings import ENGINE_FP8, WorkerSettings
from fp8_nemo.recipe.plain import to_json


class Fp8GenerationWorkerImpl(VllmGenerationWorkerImpl):
    """Define what a worker does differently; `Fp8GenerationWorker` is the Ray actor of it."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        """Start NeMo RL's engine, in four bits where the run's linears are in them."""
        settings = WorkerSettings.from_environment()
        if settings and holds_four_bits(settings.precision):
            asked = quantization(settings.precision, settings.shape.layers)
            asked["hf_overrides"] |= llm_kwargs["hf_overrides"]
            llm_kwargs |= asked
        tell_workers_of_fp8(settings)
        super()._create_engine(llm_kwargs)

    def _build_sampling_params(self, **options: Any) -> Any:
        """Make NeMo RL's, and let vLLM keep logprobs flat."""
        parameters = super()._build_sampling_params(**options)
        parameters.flat_logprobs = True
        return parameters

    def generate(self, data: Any, greedy: bool = False) -> Any:
        """Generate as NeMo RL does; `logprobs` [batch, length] are filled here."""
        with taken_logprobs(self.llm) as taken:
            made = super().generate(data, greedy)
        if taken:
            fill(made["logprobs"], taken, data["input_lengths"].tolist())
        return made


@ray.remote
class Fp8GenerationWorker(Fp8GenerationWorkerImpl):
    """Run the worker as a Ray actor."""


class Fp8AsyncGenerationWorkerImpl(VllmAsyncGenerationWorkerImpl):
    """Let the driver ask an asynchronous worker's engine; `generate_async` is NeMo RL's own.

    Its answers come one by one, each with its logprobs, while the engine goes on.
    """

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        """Start NeMo RL's engine, whose workers are told of FP8."""
        tell_workers_of_fp8(WorkerSettings.from_environment())
        super()._create_engine(llm_kwargs)

    async def fp8_nemo_ask(self, question: Callable[[Any], Any]) -> list[Any]:
        """Return each of vLLM's workers' answer; [] if this actor owns no engine.

        Ray's `__ray_call__` cannot: it runs on the actor's loop and awaits nothing, and
        `AsyncLLM.collective_rpc` is awaited on that loop.

        Args:
            question: a function of vLLM's worker, pickled by value on its way.
        """
        return [] if self.llm is None else await self.llm.collective_rpc(question)


@ray.remote
class Fp8AsyncGenerationWorker(Fp8AsyncGenerationWorkerImpl):
    """Run the asynchronous worker as a Ray actor."""


def tell_workers_of_fp8(settings: WorkerSettings | None) -> None:
    """Put NeMo RL's FP8 settings where `receiver.register` finds them, under Ray executor V2 alone.

    NeMo RL patches vLLM's workers itself under any other executor (seam executor-v1). Those of V2
    get a copy of this process's environment (seam executor-v2).
    """
    if settings is None or settings.precision.rollout_linear != "fp8":
        return
    from nemo_rl.models.generation.vllm.quantization import fp8
    from vllm import envs

    config = fp8.global_fp8_config
    if config and config.model_parallel_size > 1 and envs.VLLM_USE_RAY_V2_EXECUTOR_BACKEND:
        os.environ[ENGINE_FP8] = to_json(asdict(config))


@contextmanager
def taken_logprobs(llm: Any) -> Iterator[list[Sequence[float]]]:
    """Take the logprobs out of what `llm.generate` returns, answer by answer, into a list."""
    taken: list[Sequence[float]] = []
    generate = llm.generate

    def generate_and_take(*arguments: Any, **options: Any) -> Any:
        """Run vLLM's `generate`, and keep each answer's logprobs from its output."""
        outputs = generate(*arguments, **options)
        for output in outputs:
            [answer] = output.outputs
            flat, answer.logprobs = answer.logprobs, None  # with none, NeMo RL's loop is not run
            taken.append([flat.logprobs[first] for first in flat.start_indices])
        return outputs

    llm.generate = generate_and_take
    try:
        yield taken
    finally:
        del llm.generate


def fill(logprobs: Tensor, taken: Sequence[Sequence[float]], begins: Sequence[int]) -> None:
    """Write each answer's logprobs behind its prompt.

    Args:
        logprobs: [batch, length], FP32.
        taken: of each answer's sampled tokens, in order.
        begins: tokens of each prompt.
    """
    for row, values, begin in zip(logprobs, taken, begins, strict=True):
        row[begin : begin + len(values)] = torch.tensor(values)
