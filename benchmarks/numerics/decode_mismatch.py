"""How far tokens decoded over an FP8 cache are from a BF16 cache's, by the kernel of decode steps.

python -m benchmarks.numerics.decode_mismatch sample FOLDER xqa|fa3|bf16 --model MODEL   (each)
python -m benchmarks.numerics.decode_mismatch judge FOLDER --model MODEL --out FILE.json

`sample` decodes answers at temperature 1 in a process of its own, `judge` scores all of them by one
prefill of an engine with a BF16 cache, and waits for what is still being sampled. Linears are BF16
throughout, so what differs is the cache and attention over it: `kl` is the mean over tokens of
`r - 1 - log r`, where r is the judge's probability over the sampler's (docs/correction.md, k3).
Needs a GPU and vLLM; MODEL is a checkpoint, as benchmarks.speed.random_model writes it.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from benchmarks import record
from fp8_nemo.export.whole_files import write_json

SEQUENCES, PROMPT, ANSWER = 64, 1000, 200
WAYS = ("xqa", "fa3", "bf16")


def engine(model: Path, cache: str) -> Any:
    """Start vLLM in this process, without graphs, its cache in `fp8` or `auto`."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    return LLM(
        model=str(model), kv_cache_dtype=cache, enforce_eager=True, skip_tokenizer_init=True,
        max_model_len=PROMPT + ANSWER + 16, gpu_memory_utilization=0.2, seed=0,
        kv_cache_memory_bytes=6 * 2**30, enable_prefix_caching=False, max_num_seqs=SEQUENCES,
    )  # fmt: skip


def sample(folder: Path, way: str, model: Path) -> None:
    """Write the tokens and logprobs of answers that an engine decodes."""
    from vllm import SamplingParams

    if way == "xqa":
        from fp8_nemo.nemo import decode

        decode.register()
    llm = engine(model, "auto" if way == "bf16" else "fp8")
    draw = random.Random(0)
    vocab = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    prompts = [[draw.randrange(vocab) for _ in range(PROMPT)] for _ in range(SEQUENCES)]
    sampling = SamplingParams(
        max_tokens=ANSWER, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False
    )
    asked = [{"prompt_token_ids": each} for each in prompts]
    outputs = [each.outputs[0] for each in llm.generate(asked, sampling, use_tqdm=False)]
    rows = [
        {"prompt": prompt, "answer": list(each.token_ids),
         "logprobs": [at[token].logprob
                      for at, token in zip(each.logprobs, each.token_ids, strict=True)]}
        for prompt, each in zip(prompts, outputs, strict=True)
    ]  # fmt: skip
    write_json(folder / f"{way}.json", rows)


def judge(folder: Path, model: Path) -> list[dict[str, Any]]:
    """Return the KL of each way's answers, by one engine with a BF16 cache."""
    from vllm import SamplingParams

    llm = engine(model, "auto")
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    found = []
    for way in WAYS:
        while not (file := folder / f"{way}.json").exists():
            time.sleep(0.5)
        rows = json.loads(file.read_text())
        asked = [{"prompt_token_ids": row["prompt"] + row["answer"]} for row in rows]
        apart = []
        for row, each in zip(rows, llm.generate(asked, sampling, use_tqdm=False), strict=True):
            scored = each.prompt_logprobs[len(row["prompt"]) :]
            scores = [at[token].logprob for at, token in zip(scored, row["answer"], strict=True)]
            # the first token is a prefill's
            apart += [a - b for a, b in zip(scores[1:], row["logprobs"][1:], strict=True)]
        found.append({"way": way} | distances(apart))
    return found


def distances(apart: Sequence[float]) -> dict[str, float]:
    """Return how far tokens' probabilities are apart, by their log ratios: judge over sampler."""
    k3 = [math.exp(each) - 1 - each for each in apart]
    return {
        "tokens": len(k3),
        "kl": fmean(k3),
        "standard_error": pstdev(k3) / math.sqrt(len(k3)),
        "mean_absolute": fmean(map(abs, apart)),
        "largest": max(map(abs, apart)),
    }


def main() -> None:
    """Sample, or judge what was sampled."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    sampler, judging = kinds.add_parser("sample"), kinds.add_parser("judge")
    for each in (sampler, judging):
        each.add_argument("folder", type=Path)
        each.add_argument("--model", type=Path, required=True)
    sampler.add_argument("way", choices=WAYS)
    record.add_options(judging)
    options = parser.parse_args()
    record.need("vllm")
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.kind == "sample":
        sample(options.folder, options.way, options.model)
        return
    rows = judge(options.folder, options.model)
    record.keep(options.out, options.commit, rows=rows, sequences=SEQUENCES, prompt=PROMPT,
                answer=ANSWER)  # fmt: skip
    record.show("KL against a BF16 cache, nats a token", rows)


if __name__ == "__main__":
    main()
