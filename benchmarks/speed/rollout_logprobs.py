"""How long a rollout's logprobs take after the last token: NeMo RL's worker against ours.

python -m benchmarks.speed.rollout_logprobs --out FILE.json [--answers 128] [--tokens 2048]

No GPU: the engine answers at once, with vLLM's own containers of logprobs already filled, so what
is timed is `generate` of either worker around it. By turns; needs NEMO_RL_ROOT and NeMo RL's
packages (docs/install.md).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import record

PROMPT = 16
CFG = {
    "top_k": None, "top_p": 1.0, "temperature": 1.0, "stop_token_ids": None, "_pad_token_id": 0,
    "vllm_cfg": {"use_tqdm": False}, "vllm_kwargs": {},
}  # fmt: skip


def outputs_of(answers: int, tokens: int, flat: bool) -> list[Any]:
    """Make what vLLM returns for requests with `logprobs=0`."""
    from vllm.logprobs import append_logprobs_for_next_position, create_sample_logprobs
    from vllm.outputs import CompletionOutput, RequestOutput

    made = []
    for number in range(answers):
        kept = create_sample_logprobs(flat)
        for token in range(tokens):
            append_logprobs_for_next_position(kept, [token], [-1.0], [None], 1, 0)
        answer = CompletionOutput(0, "", range(tokens), None, kept, finish_reason="length")
        made.append(RequestOutput(str(number), None, [1], None, [answer], finished=True))
    return made


def call_of(kind: type, flat: bool, answers: int, tokens: int) -> Callable[[], Any]:
    """Make one worker's call, with an engine that has answered."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from vllm import SamplingParams

    outputs = outputs_of(answers, tokens, flat)
    worker = object.__new__(kind)
    longest = SimpleNamespace(model_config=SimpleNamespace(max_model_len=PROMPT + tokens))
    worker.llm = SimpleNamespace(generate=lambda *_, **__: outputs, llm_engine=longest)
    worker.cfg = CFG | {"max_new_tokens": tokens}
    worker.SamplingParams, worker.routed_experts_dtype = SamplingParams, None
    lengths = torch.full((answers,), PROMPT)
    data = BatchedDataDict(
        {"input_ids": torch.ones(answers, PROMPT, dtype=torch.long), "input_lengths": lengths}
    )
    return lambda: worker.generate(data)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    record.add_options(parser)
    parser.add_argument("--answers", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    record.need("vllm", device=False)
    sys.path.insert(0, os.environ["NEMO_RL_ROOT"])
    from fp8_nemo.nemo.generation_worker import Fp8GenerationWorkerImpl

    [stock] = Fp8GenerationWorkerImpl.__bases__
    kinds = {"NeMo RL": (stock, False), "ours": (Fp8GenerationWorkerImpl, True)}
    raw: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.repetitions):
        for name, (kind, flat) in kinds.items():
            call = call_of(kind, flat, options.answers, options.tokens)
            start = time.perf_counter()
            call()
            raw[name].append(time.perf_counter() - start)
    made = options.answers * options.tokens
    rows: list[dict[str, Any]] = []
    for name, each in raw.items():
        seconds = record.repeated(each)
        rows.append({"worker": name, "us_per_token": 1e6 * seconds["median"] / made} | seconds)
    record.keep(options.out, options.commit, answers=options.answers, tokens=options.tokens,
                rows=rows)  # fmt: skip
    shown = ("worker", "median", "us_per_token")
    record.show("after the last token", [{key: row[key] for key in shown} for row in rows])


if __name__ == "__main__":
    main()
