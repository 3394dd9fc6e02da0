"""Ranges of Q, K and V over texts, for a checkpoint that is served with an FP8 cache."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch

from fp8_nemo.local import layers
from fp8_nemo.local.chat import Chat
from fp8_nemo.local.policy import load_model
from fp8_nemo.local.rollout import causal_mask, positions
from fp8_nemo.recalibrate import AmaxObserver, kv_scales
from fp8_nemo.schema import Precision


@torch.no_grad()
def scales_of_texts(path: Path, texts: Iterable[str], margin: float) -> dict[str, float]:
    """KV scales by vLLM's names, from the whole model in BF16 in memory.

    Args:
        path: checkpoint in Hugging Face format.
        texts: one forward each, cut at the model's longest sequence.
        margin: on the largest value seen.

    Raises:
        RecalibrateError: a layer's range is zero or not finite.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, chat = load_model(path, device), Chat.load(path)
    layers.set_train_precision(model, Precision())
    observer = AmaxObserver(model.config.num_hidden_layers, 1, device)
    for text in texts:
        tokens = chat.encode(text)[: model.config.max_position_embeddings]
        tokens_BT = torch.tensor([tokens], device=device)
        mask_BT = torch.ones_like(tokens_BT, dtype=torch.bool)
        for layer, module in enumerate(layers.attention_modules(model)):
            module.watch = partial(observer.observe, layer, mask_BT=mask_BT)
        model(
            input_ids=tokens_BT, attention_mask=causal_mask(mask_BT),
            position_ids=positions(mask_BT), use_cache=False, logits_to_keep=1,
        )  # fmt: skip
    return kv_scales(observer.read(), margin)
