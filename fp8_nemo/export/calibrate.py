"""Measure the ranges of Q, K and V over texts, as the scales of an FP8 cache.

An FP8 cache needs a scale each for Q, K and V per layer; served from a checkpoint, they come from
texts that the whole model reads in BF16.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from fp8_nemo.export.quantized_checkpoint import Calibration, Progress
from fp8_nemo.glue.recalibrate import AmaxObserver, kv_scales
from fp8_nemo.local.chat import Chat
from fp8_nemo.local.engine import causal_mask, positions
from fp8_nemo.local.modules import attention
from fp8_nemo.local.modules.precision import set_train_precision
from fp8_nemo.local.policy import load_model
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.options.recipe import Recipe

LONGEST = 4096
"""Tokens of a text that are read: attention here takes memory with their square."""


def calibration_of(
    recipe: Recipe, source: Path, texts: list[str], progress: Progress
) -> Calibration:
    """Return how the scales of the recipe's FP8 cache are found, once they are needed.

    Args:
        recipe: of the conversion.
        source: the checkpoint, BF16 or FP32.
        texts: to be read by it.
        progress: told how many texts are read.
    """
    margin = recipe.glue.recalibrate.margin
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    report = partial(progress, "calibrating")
    return Calibration(
        {"texts": digest, "margin": margin},
        lambda: scales_of_texts(source, texts, margin, report),
    )


@torch.no_grad()
def scales_of_texts(
    source: Path,
    texts: list[str],
    margin: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, float]:
    """Measure KV scales by vLLM's names, with the whole model in memory in BF16.

    Args:
        source: checkpoint in Hugging Face format.
        texts: one forward each, with the tokenizer's special tokens, cut at `LONGEST` tokens: what
            a first token does to K and V is among what serving meets.
        margin: on the largest value seen.
        progress: told how many texts are read.

    Raises:
        RecalibrateError: a layer's range is zero or not finite.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, chat = load_model(source, device), Chat.load(source)
    set_train_precision(model, Precision())
    observer = AmaxObserver(model.config.num_hidden_layers, 1, device)
    for done, tokens in enumerate(_tokens(chat, texts)):
        progress(done, len(texts))
        tokens_BT = torch.tensor([tokens], device=device)
        mask_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
        for layer, module in enumerate(attention.attention_modules(model)):
            module.watch = partial(observer.observe, layer, mask_BT=mask_BT)
        model(
            input_ids=tokens_BT, attention_mask=causal_mask(mask_BT),
            position_ids=positions(mask_BT), use_cache=False, logits_to_keep=1,
        )  # fmt: skip
    return kv_scales(observer.read(), margin)


def _tokens(chat: Chat, texts: Iterable[str]) -> Iterable[list[int]]:
    return (chat.tokenizer.encode(text)[:LONGEST] for text in texts)
