"""Record where the routers of a mixture of experts send tokens, or send them where others went.

Rollout routing replay (R3): the trainer takes the engine's experts, and weighs them by its own
probabilities, as Megatron's `RouterReplay` does.

Shapes: B sequences, T tokens, L layers, A experts of a token, E experts, N = B T rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fp8_nemo.correction.routing import MISSING, RouteCount, is_missing

ROUTES = torch.int16


class Routers:
    """Hold the routers of a model; while nothing is replayed, they choose as without this.

    Args:
        model: a mixture of experts of transformers'.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        gates = [gate for name, gate in model.named_modules() if name.endswith(".mlp.gate")]
        self.chosen_NA: list[Any] = [None] * len(gates)
        """What each router chose last."""
        self._replayed_NA: list[Any] = [None] * len(gates)
        self._count: tuple[RouteCount, Tensor] | None = None
        for layer, gate in enumerate(gates):
            gate.register_forward_hook(partial(self._routed, layer))

    @contextmanager
    def replaying(
        self, routes_BTLA: Tensor | None, mask_BT: Tensor, count: RouteCount | None
    ) -> Iterator[None]:
        """Send tokens where `routes_BTLA` says, inside the block; None: where the routers say.

        Args:
            routes_BTLA: of each token, `MISSING` where its router shall choose.
            mask_BT: true at real tokens, which `count` counts.
            count: is shown what each router would have chosen.
        """
        if routes_BTLA is not None:
            self._replayed_NA = list(routes_BTLA.long().flatten(0, 1).unbind(1))
            self._count = None if count is None else (count, mask_BT.flatten())
        yield
        self._replayed_NA, self._count = [None] * len(self._replayed_NA), None

    def _routed(self, layer: int, gate: nn.Module, _: Any, found: tuple[Tensor, ...]) -> Any:
        """Note what a router chose, and exchange it."""
        logits_NE, _, own_NA = found
        self.chosen_NA[layer] = own_NA
        replayed_NA = self._replayed_NA[layer]
        if replayed_NA is None:
            return None
        if self._count is not None:
            count, real_N = self._count
            count.add(own_NA, replayed_NA, real_N)
        index_NA = torch.where(is_missing(replayed_NA)[:, None], own_NA, replayed_NA)
        return logits_NE, shares(gate, logits_NE, index_NA), index_NA


def shares(gate: Any, logits_NE: Tensor, index_NA: Tensor) -> Tensor:
    """Return what each chosen expert weighs, as `Qwen3MoeTopKRouter` computes it of its own."""
    share_NA = logits_NE.softmax(-1, dtype=torch.float).gather(-1, index_NA)
    if gate.norm_topk_prob:
        share_NA = share_NA / share_NA.sum(-1, keepdim=True)
    return share_NA.to(logits_NE.dtype)


def stacked(chosen_NA: list[Tensor], B: int) -> Tensor:
    """Return one forward's routes as `[B, T, L, A]`, in a memory of their own."""
    return torch.stack(chosen_NA, dim=1).to(ROUTES).unflatten(0, (B, -1))


def with_last(routes: list[Tensor]) -> Tensor:
    """Join the routes of forwards, and of the last token, which none has seen."""
    last_B1LA = torch.full_like(routes[0][:, :1], MISSING)
    return torch.cat([*routes, last_B1LA], dim=1)
