"""NeMo RL's vLLM worker, which starts in four bits, and hands over logprobs as whole tensors.

NeMo RL writes them into a tensor one by one, 10 us each by the host: for 128 answers of 2,000
tokens 2.7 s after the last token (seam logprobs-one-by-one). Here vLLM keeps each answer's logprobs
as flat lists, which is also less to make and to collect in every decode step, and each list becomes
one tensor. The values are the same.
"""

# pyright: reportMissingImports=false
# NeMo RL and vLLM stand on the path of a run, not of a type check.
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import torch
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl
from torch import Tensor

from fp8_nemo.nemo.marlin.layout import holds_four_bits, quantization
from fp8_nemo.nemo.worker_settings import WorkerSettings


class Fp8GenerationWorkerImpl(VllmGenerationWorkerImpl):
    """What a worker does differently; `Fp8GenerationWorker` is the Ray actor of it."""

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        """Start NeMo RL's engine, in four bits where the run's linears are in them."""
        settings = WorkerSettings.from_environment()
        if settings and holds_four_bits(settings.precision):
            asked = quantization(settings.precision, settings.shape.layers)
            asked["hf_overrides"] |= llm_kwargs["hf_overrides"]
            llm_kwargs |= asked
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
    """The actor."""


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
