"""Watching Q, K and V in Megatron's logprob forward, where attention receives them.

NeMo RL measures them with a forward of its own after every update, hooks whatever has
`core_attention` in its name, children included, counts padding, and reads three numbers a layer and
micro-batch on the host (megatron_policy_worker.py:3474). Here the forward that the step runs anyway
is watched: the top attention module of a layer, real tokens only, nothing read until the step asks.

Sequences come packed, one after the other, in the order of the batch; how long each really is, is
known from the batch alone: Megatron is told the padded lengths only.

Shapes: S sequences of a micro-batch, R rows (tokens), H heads, D head dimension.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp8_nemo.glue.recalibrate import AmaxObserver, RecalibrateError, real_rows


@contextmanager
def watched(
    model: nn.Module,
    observer: AmaxObserver,
    lengths: Tensor,
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
) -> Iterator[None]:
    """Let the observer see every attention of the forwards inside.

    Args:
        model: Megatron's.
        observer: on the model's device.
        lengths: real tokens of each sequence, in the order in which forwards take them.
        cp_rank: this rank's place in its context-parallel group.
        cp_size: ranks that share a sequence.

    Raises:
        RecalibrateError: a forward took more sequences than were given, or fewer.
    """
    watch = _Watch(observer, lengths, cp_rank, cp_size)
    hooks = [
        attention.register_forward_pre_hook(
            partial(watch.before_attention, layer), with_kwargs=True
        )
        for layer, attention in attentions(model)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    watch.close()


class _Watch:
    """One batch's forwards: how many sequences each layer took, and which rows are real tokens."""

    def __init__(self, observer: AmaxObserver, lengths: Tensor, cp_rank: int, cp_size: int) -> None:
        self.observer, self.cp_rank, self.cp_size = observer, cp_rank, cp_size
        self.lengths = lengths.to(observer.amax_SL3.device, non_blocking=True)
        self.seen: dict[int, int] = defaultdict(int)
        self.masks: dict[tuple[int, int], Tensor] = {}

    def before_attention(
        self, layer: int, _: nn.Module, arguments: tuple, options: dict[str, Any]
    ) -> None:
        """The hook: Q, K and V of one layer's micro-batch, `[R, H, D]`, or `[T, S, H, D]`."""
        query, packed = arguments[0], options.get("packed_seq_params")
        first, count = self.seen[layer], query.shape[1] if packed is None else _sequences(packed)
        self.seen[layer] += count
        if self.seen[layer] > len(self.lengths):
            raise RecalibrateError(
                f"layer {layer}: a forward took {self.seen[layer]} sequences, the batch has "
                f"{len(self.lengths)}: their padding cannot be told; set "
                "glue.recalibrate.source=forward"
            )
        if (key := (first, query.shape[0])) not in self.masks:
            own = self.lengths[first : first + count]
            self.masks = {key: self._real(own, query.shape[0], packed)}  # for every layer in turn
        qkv = [x if x.ndim == 3 else x.flatten(0, 1) for x in arguments[:3]]
        self.observer.observe_rows(layer, qkv, self.masks[key])

    def close(self) -> None:
        """See that every layer took the whole batch."""
        for layer, count in self.seen.items():
            if count != len(self.lengths):
                raise RecalibrateError(
                    f"layer {layer}: forwards took {count} of the batch's {len(self.lengths)} "
                    "sequences"
                )

    def _real(self, lengths: Tensor, rows: int, packed: Any) -> Tensor:
        if packed is None:  # [T, S, H, D]: each sequence padded to the longest
            within = torch.arange(rows, device=lengths.device)[:, None]
            return (within < lengths).flatten()
        return real_rows(_starts(packed), lengths, rows, cp_rank=self.cp_rank, cp_size=self.cp_size)


def attentions(model: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Global layer index and top attention module of each of this rank's layers."""
    for name, module in model.named_modules():
        if name.endswith("self_attention") and hasattr(module, "core_attention"):
            yield int(module.layer_number) - 1, module.core_attention  # type: ignore[arg-type]


def _sequences(packed: Any) -> int:
    return len(_starts(packed)) - 1


def _starts(packed: Any) -> Tensor:
    padded = packed.cu_seqlens_q_padded
    return packed.cu_seqlens_q if padded is None else padded
