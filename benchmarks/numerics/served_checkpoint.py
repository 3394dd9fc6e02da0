"""vLLM serving what recipes.quantize_checkpoint made, against our local FP8 rollout model.

python -m benchmarks.numerics.served_checkpoint CHECKPOINT FOLDER --out FILE.json [--prompts 256]

Converts the checkpoint (FOLDER/fp8-linear, FOLDER/fp8-kv-attn), lets vLLM sample from the source
and from each result, and scores the same tokens with the local rollout model of that precision and
with the local BF16 one; once more with scales made powers of two, which is vLLM's default. Of every
pair of logprobs: the mismatch metrics, the standard error of the KL, and quantiles of the
difference. Needs a GPU and vLLM.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from fp8_nemo.recipes import quantize_checkpoint
from torch import Tensor
from transformers import AutoConfig

from benchmarks import record
from fp8_nemo.correction.mismatch import LogprobPair, mismatch_metrics
from fp8_nemo.export.quantized_checkpoint import BOOK
from fp8_nemo.glue.refit import refit_stream
from fp8_nemo.local.chat import Chat
from fp8_nemo.local.engine import Batch, Engine, causal_mask, pad_left, positions
from fp8_nemo.local.modules import attention
from fp8_nemo.local.policy import load_model, micro_batches
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.plain import to_json
from fp8_nemo.recipe.problems import load_problems

SHARES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
LONGEST = 128  # tokens of a response
E8M0 = "VLLM_USE_DEEP_GEMM_E8M0"
ROWS = {  # name: precision, and whether vLLM makes the scales powers of two
    "bf16": ("bf16", "0"),
    "fp8-linear": ("fp8-linear", "0"),
    "fp8-kv-attn": ("fp8-kv-attn", "0"),
    "fp8-linear, scales made powers of two": ("fp8-linear", "1"),
}


def served(
    model: Path, precision: Precision, prompts: list[list[int]], end: int
) -> list[tuple[list[int], list[float]]]:
    """Return the tokens that vLLM sampled after each prompt, and their logprobs."""
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # CUDA is up in this process
    # DeepGEMM for every batch: FlashInfer's kernel for small ones takes 100 seconds to compile.
    os.environ["VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"] = "0"
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model), skip_tokenizer_init=True, enforce_eager=True, max_model_len=512,
        gpu_memory_utilization=0.3, seed=0, enable_prefix_caching=False,
        kv_cache_dtype="fp8" if precision.rollout_kv == "fp8" else "auto",
    )  # fmt: skip
    sampling = SamplingParams(
        max_tokens=LONGEST, logprobs=0, detokenize=False, seed=0, stop_token_ids=[end]
    )
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], sampling)
    found = []
    for output in outputs:
        tokens = output.outputs[0].token_ids
        steps = zip(tokens, output.outputs[0].logprobs, strict=True)
        found.append((list(tokens), [step[token].logprob for token, step in steps]))
    llm.llm_engine.engine_core.shutdown()
    return found


def rectangle(
    prompts: list[list[int]], answers: list[tuple], chat: Chat, device: torch.device
) -> Batch:
    """Lay out what vLLM sampled as the local models score it."""
    prompt_BT, mask_BT = pad_left(prompts, chat.pad, device)
    width = max(len(tokens) for tokens, _ in answers)
    shape = len(prompts), width
    response_BR = torch.full(shape, chat.pad, device=device)
    mask_BR = torch.zeros(shape, dtype=torch.bool, device=device)
    rollout_BR = torch.zeros(shape, device=device)
    for row, (tokens, logprobs) in enumerate(answers):
        response_BR[row, : len(tokens)] = torch.tensor(tokens, device=device)
        mask_BR[row, : len(tokens)] = True
        rollout_BR[row, : len(tokens)] = torch.tensor(logprobs, device=device)
    tokens_BT = torch.cat([prompt_BT, response_BR], 1)
    return Batch(tokens_BT, torch.cat([mask_BT, mask_BR], 1), mask_BR, rollout_BR)


@torch.no_grad()
def scored(
    source: Path, precision: Precision, kv_scales: dict[str, float] | None, batch: Batch
) -> Tensor:
    """Return logprobs `[B, R]` of the local rollout model, filled by a proven refit."""
    model = load_model(source, batch.tokens_BT.device)
    config = AutoConfig.from_pretrained(source)
    engine = Engine(config, precision, batch.tokens_BT.device)
    named = ((name, weight.detach()) for name, weight in model.named_parameters())
    count = config.num_hidden_layers
    engine.refit(refit_stream(named, precision, kv_scales, num_layers=count), "bytes")
    found = []
    for part in micro_batches(batch):
        logits = engine.model(
            input_ids=part.tokens_BT,
            attention_mask=causal_mask(part.mask_BT),
            position_ids=positions(part.mask_BT),
            past_key_values=attention.new_cache(engine.model),
            use_cache=True,
            logits_to_keep=part.responses_BR.shape[1] + 1,
        ).logits
        logprobs = logits[:, :-1].float().log_softmax(-1)
        found.append(logprobs.gather(2, part.responses_BR[..., None])[..., 0])
    return torch.cat(found)


def compared(train_BR: Tensor, rollout_BR: Tensor, mask_BR: Tensor) -> dict[str, Any]:
    """Measure how far one side's logprobs lie from the other's."""
    pair = LogprobPair(train_BR, rollout_BR, mask_BR)
    shares = torch.tensor(SHARES, dtype=torch.float64, device=pair.log_ratio_N.device)
    quantiles = pair.log_ratio_N.double().quantile(shares).tolist()
    k3_N = torch.expm1(pair.log_ratio_N.double()) - pair.log_ratio_N
    error = (k3_N.std() / len(k3_N) ** 0.5).item()
    return (
        mismatch_metrics(pair)
        | {"KL, standard error": error}
        | {
            f"log ratio, quantile {share:g}": value
            for share, value in zip(SHARES, quantiles, strict=True)
        }
    )


def converted(source: Path, folder: Path, recipe: Recipe, texts: Iterable[str]) -> dict[str, Any]:
    """Convert the checkpoint to the recipe's precision; return the record of it."""
    target = folder / recipe.precision.name
    words = [str(source), str(target), f"precision={recipe.precision.name}"]
    if recipe.precision.rollout_kv == "fp8":
        (folder / "texts").write_text("\n".join(texts))
        words += ["--calibrate", str(folder / "texts")]
    if code := quantize_checkpoint.main(words):
        raise SystemExit(code)
    return json.loads((target / BOOK).read_text())


def main() -> None:
    """Convert a checkpoint, serve it, score the answers, compare both sides, and write it all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=256)
    record.add_options(parser)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    chat, rows = Chat.load(options.source), {}
    bf16, device = Precision(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, (option, power_of_two) in ROWS.items():
        os.environ[E8M0] = power_of_two
        [plan] = compose_plans(["model=small-llama", "backend=local", f"precision={option}"])
        recipe = plan.recipe
        problems = load_problems(recipe.data, recipe.seed)
        asked = [problem.input for problem in problems.validation[: options.prompts]]
        prompts, book, folder = [chat.prompt(text) for text in asked], {}, options.source
        if recipe.precision.rollout_linear == "fp8":
            known = problems.train[: options.prompts]
            texts = [chat.prompt(each.input) + chat.answer(each.output) for each in known]
            book = converted(
                options.source, options.folder, recipe, map(chat.tokenizer.decode, texts)
            )
            folder = options.folder / option
        answers = served(folder, recipe.precision, prompts, chat.end)
        batch = rectangle(prompts, answers, chat, device)
        local = scored(options.source, recipe.precision, book.get("kv_scales"), batch)
        plain = scored(options.source, bf16, None, batch)
        mask = batch.response_mask_BR
        rows[name] = {
            "vLLM, local of the same precision": compared(local, batch.rollout_BR, mask),
            "vLLM, local in BF16": compared(plain, batch.rollout_BR, mask),
            "local of the same precision, local in BF16": compared(plain, local, mask),
            "tokens": int(mask.sum()),
        }
        print(name, to_json(rows[name], indent=1), flush=True)
        record.keep(options.out, options.commit, pairs=rows)


if __name__ == "__main__":
    main()
