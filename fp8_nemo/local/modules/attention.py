"""Compute attention of transformers' models over a cache, in 16 bits or in FP8.

In FP8 it does what vLLM's FlashAttention 3 kernel does on Hopper, without splitting the keys
(benchmarks/results/fp8-attention-h200.json, docs/research/numerics.md): Q quantized per tensor, K
and V as the cache holds them, probabilities in E4M3, tile by tile. Scales may also be each K/V
head's own, Q's by the query heads that share it. On a GPU a token's attention over its cache goes
into a kernel of `kernels.py`, BF16 attention of texts into torch's: they sum in another order, and
round elsewhere in BF16.

Shapes: B sequences, T tokens, S tokens of the cache, H heads, K key heads, G = H/K, D head
dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from fp8_nemo.glue.quantize import FP8, quantize_tensor

NAME = "fp8_nemo"
"""By which a model's `attn_implementation` asks for `attend`."""
PROBABILITY_BITS = 8  # FlashAttention 3 scales P to (0, 256], the upper range of E4M3
LOG2_E = 1.4426950408889634


@dataclass
class Room:
    """Say where a cache is written and read, for all its layers; tensors stay where they are."""

    tokens: int
    """Of a sequence, that there is room for."""
    at_N: Tensor
    """Places of the next tokens."""
    width: int
    """Places that are read, the next tokens' included; those not written yet hold zeros."""


class KvLayer(DynamicLayer):
    """Hold one layer's cache, in BF16, or in FP8 with the scales that the last refit brought.

    With a room, nothing is copied again, and a CUDA graph finds all of it where it was.
    """

    def __init__(self, scales: tuple[Tensor, Tensor] | None, room: Room | None = None) -> None:
        super().__init__()
        self.scales, self.room = scales, room
        self.stored: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append K and V `[B, K, T, D]`; returns all that is stored, as it is stored."""
        if self.scales is not None:
            key_states = quantize_tensor(key_states, self.scales[0].view(-1, 1, 1))
            value_states = quantize_tensor(value_states, self.scales[1].view(-1, 1, 1))
        if self.room is None:
            return super().update(key_states, value_states)
        states = key_states, value_states
        if not self.is_initialized:
            self.lazy_initialization(*states)
            self.stored = [x.new_zeros(*x.shape[:2], self.room.tokens, x.shape[3]) for x in states]
        for stored, new in zip(self.stored, states, strict=True):
            _write(stored, self.room.at_N, new)
        self.keys, self.values = (stored[..., : self.room.width, :] for stored in self.stored)
        return self.keys, self.values


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers asks: Q `[B, H, T, D]`, K and V `[B, K, S, D]`, a mask.

    FP8 if the cache handed over FP8 K and V. A `module.watch`, if set, is shown Q, K and V.
    """
    if module.watch is not None:
        module.watch(query, key, value)
    dtype = query.dtype
    query = query.unflatten(1, (key.shape[1], -1))
    key, value, mask = key[:, :, None], value[:, :, None], attention_mask[:, :, None]
    attend = _attend_fp8 if key.dtype == FP8 else _attend_plain
    output = attend(module, query, key, value, mask, scaling)
    return output.flatten(1, 2).transpose(1, 2).to(dtype), None


def _attend_plain(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    if _is_token(query):
        one = torch.ones(1, device=query.device)
        return _attend_token(query, key, value, mask, one * (scaling * LOG2_E), one, headroom=0)
    if query.is_cuda:
        return _attend_fused(query, key, value, mask, scaling)
    scores = (matmul_fp32(query, key.mT) * scaling).masked_fill(~mask, -torch.inf)
    sees_none = ~mask.any(-1, keepdim=True)  # a padded query; what else is NaN has diverged
    probability = scores.masked_fill(sees_none, 0.0).softmax(-1).masked_fill(sees_none, 0.0)
    return matmul_fp32(probability.to(query.dtype), value)


def _attend_fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """Attend by torch's kernel, without scores in memory, with gradients; round P as engines do.

    With scores in memory training takes 2.2 times as long (docs/research/log.md, 2026-11-22).
    """
    B, K, G, _, D = query.shape
    key, value = (x.expand(B, K, G, -1, D).flatten(1, 2) for x in (key, value))
    found = nn.functional.scaled_dot_product_attention(
        query.flatten(1, 2), key, value, attn_mask=mask[:, 0], scale=scaling
    )
    return found.unflatten(1, (K, G))


def _is_token(query: Tensor) -> bool:
    """Return whether the kernel for one token takes it."""
    is_one = query.shape[-2] == 1 and query.shape[-1].bit_count() == 1
    return query.is_cuda and is_one and not query.requires_grad


def _attend_token(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, exponent: Tensor, v_scale: Tensor,
    headroom: int,
) -> Tensor:  # fmt: skip
    from fp8_nemo.local.modules import kernels

    return kernels.attend(
        query.contiguous(), key, value, mask[:, 0, 0, 0], exponent, v_scale,
        tile=key_tiles(query, key)[0].stop, headroom=headroom,
    )  # fmt: skip


def _attend_fp8(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """Attend in FlashAttention 3's order: last tile first, a running maximum, P in (0, 256]."""
    q_scale, k_scale, v_scale = (
        x.view(-1, 1, 1, 1) for x in (module.q_scale, module.k_scale, module.v_scale)
    )
    exponent = scaling * LOG2_E * q_scale * k_scale
    query = quantize_tensor(query, q_scale)
    if _is_token(query) and exponent.numel() == 1:
        return _attend_token(query, key, value, mask, exponent, module.v_scale, PROBABILITY_BITS)
    top = torch.full((*query.shape[:-1], 1), -torch.inf, device=query.device)
    total, output = torch.zeros_like(top), torch.zeros(query.shape, device=query.device)
    for tile in reversed(key_tiles(query, key)):
        scores = matmul_fp32(query, key[..., tile, :].mT).masked_fill(~mask[..., tile], -torch.inf)
        raised = torch.maximum(top, scores.amax(-1, keepdim=True))
        origin = torch.where(raised == -torch.inf, 0.0, raised * exponent)
        probability = torch.exp2(scores * exponent - (origin - PROBABILITY_BITS))
        shrink = torch.where(raised == -torch.inf, 1.0, torch.exp2((top - raised) * exponent))
        total = total * shrink + probability.sum(-1, keepdim=True)  # of P before it is rounded
        output = output * shrink + matmul_fp32(probability.to(FP8), value[..., tile, :])
        top = raised
    return output * (v_scale / total.clamp(min=torch.finfo(total.dtype).tiny))


def matmul_fp32(left: Tensor, right: Tensor) -> Tensor:
    """Return `left @ right` of BF16 or FP8 values in FP32."""
    return left.float() @ right.float()


def key_tiles(query: Tensor, key: Tensor) -> list[slice]:
    """Return the tiles of keys in which FlashAttention 3 rounds probabilities, from key 0 on.

    128 keys for heads of 64; for heads of 128, 96 or 192 by the rows of a query tile.
    """
    width = 128
    if query.shape[-1] > 64:
        width = 96 if query.shape[-2] * query.shape[-3] <= 64 else 192
    return [slice(start, start + width) for start in range(0, key.shape[-2], width)]


def prepare_attention(model: PreTrainedModel, scales: int) -> None:
    """Set each layer's scales of Q, K and V to NaN, until a refit brings them; nobody watches.

    Args:
        model: of which nobody watches Q, K and V from here on.
        scales: of each of the three: 1, or one for each K/V head; 0: the cache has none.
    """
    for module in attention_modules(model):
        module.watch = None
        for name in ("q_scale", "k_scale", "v_scale"):
            scale = torch.full((scales,), torch.nan, device=model.device) if scales else None
            module.register_buffer(name, scale)


def attention_modules(model: PreTrainedModel) -> list[Any]:
    """Return the attention modules in layer order."""
    return [layer.self_attn for layer in model.model.layers]


def new_cache(model: PreTrainedModel, room: Room | None = None) -> Cache:
    """Return an empty cache in the model's format; without room it grows with every token."""
    return Cache(
        layers=[
            KvLayer((module.k_scale, module.v_scale) if module.k_scale is not None else None, room)
            for module in attention_modules(model)
        ]
    )


def _write(stored: Tensor, at_N: Tensor, new: Tensor) -> None:
    """Write `stored[..., at_N, :] = new`; torch copies FP8 by index as integers alone.

    Places differ, so that every order gives the same. Deterministic mode would sort them first.
    """
    if new.dtype == FP8:
        stored, new = stored.view(torch.uint8), new.view(torch.uint8)
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("default")
    try:
        stored.index_copy_(-2, at_N, new)
    finally:
        torch.set_deterministic_debug_mode(mode)


AttentionInterface.register(NAME, attend)
