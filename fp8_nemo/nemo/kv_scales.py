"""KV scales under NeMo RL: ranges seen in the workers' forward, scales kept on the driver.

`watched` sees Q, K and V in Megatron's logprob forward, where attention receives them. `KvScales`
makes scales of the ranges and keeps the current ones. NeMo RL instead runs a forward of its own
after every update (`calibrate_qkv_fp8_scales`). It hooks every module with `core_attention` in its
name, children included, counts padding, and reads three numbers a layer and micro-batch on the
host. We watch the forward that the step runs anyway: the top attention module of a layer, real
tokens only, and the host reads only when the step asks.

Sequences come packed, one after the other, in the order of the batch. Their real lengths come from
the batch, because Megatron gets the padded lengths only.

Shapes: S sequences of a micro-batch, R rows (tokens), H heads, D head dimension, L layers; the last
axis of 3 is Q, K, V.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8_nemo.glue.quantize import FP8_MAX
from fp8_nemo.glue.recalibrate import (
    AmaxObserver,
    RecalibrateError,
    change_metrics,
    check_scales,
    kv_scales,
    real_rows,
)
from fp8_nemo.glue.wire import kv_scale_names
from fp8_nemo.recipe.options.precision import Recalibrate
from fp8_nemo.recipe.plain import to_json


class KvScales:
    """Hold the KV scales of a run: the current ones, and what was seen since they were made.

    A step goes `saw_ranges` (its logprob forward), `trained`, then `take_ranges` or, with
    `source: forward`, `take_scales`; `done` opens the next one.

    Args:
        num_layers: layers of the model.
        settings: margins, and over how many steps the maximum is taken.
    """

    def __init__(self, num_layers: int, settings: Recalibrate) -> None:
        self.num_layers, self.settings = num_layers, settings
        self.history = AmaxObserver(num_layers, settings.history)
        self.in_force: dict[str, float] = {}
        """By vLLM's names; empty before the first ones."""
        self.is_observed = self.has_trained = False

    def saw_ranges(self) -> None:
        """Record that the workers hold the ranges of a forward."""
        self.is_observed = True

    def trained(self) -> None:
        """Record an update, after which the scales are measured on a whole rollout."""
        self.has_trained = True

    @property
    def needs_forward(self) -> bool:
        """Return whether a forward must run to measure: none was seen, and new scales are due."""
        return not self.is_observed and (self.has_trained or not self.in_force)

    def take_ranges(self, amax_L3: Tensor) -> dict[str, float]:
        """Make scales of the ranges that the workers saw; return metrics of the change.

        Before the first update the ranges come from prompts alone; `first_margin` allows for it.

        Raises:
            RecalibrateError: a scale is zero or not finite.
        """
        margin = self.settings.margin if self.has_trained else self.settings.first_margin
        self.history.next_step()
        self.history.amax_SL3[0] = amax_L3
        return self._put_in_force(kv_scales(self.history.read(), margin), amax_L3)

    def take_scales(self, scales: dict[str, float]) -> dict[str, float]:
        """Use the scales of NeMo RL's own forward; return metrics of the change.

        Raises:
            RecalibrateError: a scale is missing, zero or not finite.
        """
        check_scales(scales, self.num_layers)
        return self._put_in_force(scales, ranges_of(scales, self.settings.margin))

    def done(self) -> None:
        """Start the next step."""
        self.is_observed = self.has_trained = False

    def save(self, file: Path) -> None:
        """Write history and scales to a file, so that a resumed run starts with them."""
        content = {"amax_SL3": self.history.read().tolist(), "kv_scales": self.in_force}
        file.write_text(to_json(content) + "\n")

    def restore(self, file: Path) -> None:
        """Read what `save` wrote; do nothing for a checkpoint that stock NeMo RL saved.

        Raises:
            ValueError: the file is of another model, or of another history length.
        """
        if file.is_file():
            content = json.loads(file.read_text())
            self.history.load(torch.tensor(content["amax_SL3"]))
            self.in_force = content["kv_scales"]

    def _put_in_force(self, scales: dict[str, float], amax_L3: Tensor) -> dict[str, float]:
        before, self.in_force = self.in_force, scales
        return change_metrics(amax_L3, before, scales)


def ranges_of(scales: dict[str, float], margin: float) -> Tensor:
    """Return the ranges `[L, 3]` that NeMo RL's scales were computed from."""
    layers = len(scales) // 3
    held = [[scales[name] for name in kv_scale_names(layer)] for layer in range(layers)]
    return torch.tensor(held) * (FP8_MAX / margin)


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
    """Watch a batch's forwards: how many sequences each layer took, which rows are real tokens."""

    def __init__(self, observer: AmaxObserver, lengths: Tensor, cp_rank: int, cp_size: int) -> None:
        self.observer, self.cp_rank, self.cp_size = observer, cp_rank, cp_size
        self.lengths = lengths.to(observer.amax_SL3.device, non_blocking=True)
        self.seen: dict[int, int] = defaultdict(int)
        self.masks: dict[tuple[int, int], Tensor] = {}

    def before_attention(
        self, layer: int, _: nn.Module, arguments: tuple, options: dict[str, Any]
    ) -> None:
        """Observe one layer's micro-batch, Q, K and V `[R, H, D]` or `[T, S, H, D]`; a hook.

        Raises:
            RecalibrateError: it has more sequences than the batch has left.
        """
        query, packed = arguments[0], options.get("packed_seq_params")
        count = query.shape[1] if packed is None else len(_starts(packed)) - 1
        first = self.seen[layer]
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
        """Check that every layer took the whole batch.

        Raises:
            RecalibrateError: one took fewer or more sequences.
        """
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
    """Yield the global layer index and the top attention module of this rank's layers."""
    for name, module in model.named_modules():
        if name.endswith("self_attention") and hasattr(module, "core_attention"):
            yield int(module.layer_number) - 1, module.core_attention  # type: ignore[arg-type]


def _starts(packed: Any) -> Tensor:
    padded = packed.cu_seqlens_q_padded
    return packed.cu_seqlens_q if padded is None else padded
