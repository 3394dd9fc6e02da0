"""Ranges of Q, K and V, observed where attention receives them, and the scales that follow.

The trainer watches its own forwards (after QK-norm and RoPE, padding masked) and keeps the largest
absolute value per layer on its device; the host reads once per step. `scale = margin * amax / 448`
over the last S steps. With `source: logprob` the ranges come from the forward that the step runs
anyway, so they are one update old: hence the margin and the history. A missing layer, a zero or a
value that is not finite is an error; nothing falls back to 1.0, as NeMo RL's colocated path
silently did for months (#3225).

Shapes: B sequences, T tokens, R rows (tokens of all sequences), H heads, D head dimension, L
layers, S history steps; the last axis of 3 is Q, K, V. Scales may be of groups of heads, one group
for each K/V head: then that axis has the ranges of Q's groups, of K's and of V's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fp8_nemo.glue.quantize import FP8_MAX
from fp8_nemo.glue.wire import kv_scale_names


class RecalibrateError(ValueError):
    """Report ranges or scales that FP8 cannot use; `problems` names each."""

    def __init__(self, *problems: str) -> None:
        self.problems = list(problems)
        more = len(problems) - 1
        super().__init__(problems[0] + (f"; and {more} more" if more else ""))


class AmaxObserver:
    """Keep running maxima `amax_SL3` of the last S steps; row 0 is the current step.

    Args:
        num_layers: layers of the model, counted globally.
        history: S, the number of steps that are kept, the current one included.
        device: where the maxima live; observing never leaves it.
        groups: groups of heads with ranges of their own; one: a layer's heads together.
    """

    def __init__(
        self,
        num_layers: int,
        history: int,
        device: torch.device | str = "cpu",
        groups: int = 1,
    ) -> None:
        self.amax_SL3 = torch.zeros(history, num_layers, 3 * groups, device=device)
        self.groups = groups

    def observe(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask_BT: Tensor
    ) -> None:
        """Add one forward's Q, K and V, each `[B, H, T, D]`, to the current step's maxima.

        Args:
            layer: global layer index.
            query: as attention receives it, after norm and RoPE.
            key: likewise.
            value: likewise.
            mask_BT: true at real tokens.
        """
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
        self.observe_rows(layer, rows, mask_BT.flatten())

    @torch.no_grad()
    def observe_rows(self, layer: int, qkv_RHD: Sequence[Tensor], keep_R: Tensor) -> None:
        """Add packed Q, K and V, each `[R, H, D]`, to the current step's maxima.

        Args:
            layer: global layer index.
            qkv_RHD: Q, K and V, of any number of heads that the groups divide.
            keep_R: true at real tokens.
        """
        amax_3 = self.amax_SL3[0, layer]
        taken = all(x_RHD.is_cuda and x_RHD.dtype == torch.bfloat16 for x_RHD in qkv_RHD)
        if taken and self.groups == 1:
            from fp8_nemo.glue import kernels

            kernels.amax_rows([x_RHD.detach() for x_RHD in qkv_RHD], keep_R, amax_3)
            return
        kept_R11 = keep_R[:, None, None]
        kept = (x_RHD.abs().masked_fill(~kept_R11, 0) for x_RHD in qkv_RHD)
        largest = [x.unflatten(1, (self.groups, -1)).amax((0, 2, 3)) for x in kept]
        torch.maximum(amax_3, torch.cat(largest).to(amax_3.dtype), out=amax_3)

    def next_step(self) -> None:
        """Start a new step and drop the oldest one."""
        self.amax_SL3 = self.amax_SL3.roll(1, dims=0)
        self.amax_SL3[0] = 0

    def read(self) -> Tensor:
        """Return the maxima `amax_SL3` on the host; the only read of a step."""
        return self.amax_SL3.cpu()

    def load(self, amax_SL3: Tensor) -> None:
        """Go on from a checkpoint's maxima: a resumed run starts with the scales it stopped with.

        Raises:
            ValueError: they are of another model or another history.
        """
        if amax_SL3.shape != self.amax_SL3.shape:
            raise ValueError(
                f"Q/K/V ranges {list(amax_SL3.shape)}, expected {list(self.amax_SL3.shape)}"
            )
        self.amax_SL3.copy_(amax_SL3)


def real_rows(
    starts_S: Tensor, lengths: Tensor, rows: int, *, cp_rank: int = 0, cp_size: int = 1
) -> Tensor:
    """Return which rows of packed sequences are real tokens, `[rows]` booleans, on the device.

    Under context parallelism a rank holds, of every sequence, chunks `rank` and `2 * size - 1 -
    rank` of `2 * size` equal ones (Megatron's load balancing).

    Args:
        starts_S: where each packed sequence starts, padding included, and after the last one the
            end (`cu_seqlens_padded`), in tokens over all context-parallel ranks.
        lengths: real tokens of each sequence, one fewer than `starts_S` has.
        rows: rows that this rank holds.
        cp_rank: this rank's place among those that share a sequence.
        cp_size: how many share one.
    """
    row = torch.arange(rows, device=starts_S.device)
    local_S = starts_S.long() // cp_size
    sequence = (torch.searchsorted(local_S, row, right=True) - 1).clamp(max=len(lengths) - 1)
    within = row - local_S[sequence]
    if cp_size > 1:
        chunk = (starts_S.diff().long() // (2 * cp_size))[sequence]
        second = (2 * cp_size - 1 - cp_rank) * chunk + within - chunk
        within = torch.where(within < chunk, cp_rank * chunk + within, second)
    return within < lengths.to(row.device)[sequence]


def kv_scales(amax_SL3: Tensor, margin: float) -> dict[str, float]:
    """Return KV scales by vLLM's names from maxima `[S, L, 3]`: `margin * amax / 448`.

    Example: `{"model.layers.0.self_attn.attn.q_scale": 0.021, "model.layers.0.self_attn.k_scale":
    0.018, ...}`.

    Raises:
        RecalibrateError: a layer was never seen, or its range is not finite.
    """
    maxima_L3, groups = amax_SL3.amax(dim=0).tolist(), amax_SL3.shape[-1] // 3
    scales = {
        name: margin * amax / FP8_MAX
        for layer, maxima in enumerate(maxima_L3)
        for name, amax in zip(kv_scale_names(layer, groups), maxima, strict=True)
    }
    check_scales(scales, len(maxima_L3), groups)
    return scales


def check_scales(scales: Mapping[str, float], num_layers: int, groups: int = 1) -> dict[str, float]:
    """Validate KV scales and return them as they are sent: FP32, in the order of layers.

    Args:
        scales: by vLLM's names.
        num_layers: layers of the model.
        groups: of heads, each with scales of its own.

    Raises:
        RecalibrateError: naming every scale that is missing, or not finite and above 0 in FP32:
            attention would divide by zero, or run with vLLM's 1.0.
    """
    names = [name for layer in range(num_layers) for name in kv_scale_names(layer, groups)]
    rounded = torch.tensor([scales.get(name, math.nan) for name in names]).tolist()
    found = dict(zip(names, rounded, strict=True))
    problems = [
        f"{name}: KV scale {scales.get(name)} must be finite and above 0 in FP32 (missing or zero: "
        "no forward reached the layer; NaN or Inf: the policy diverged)"
        for name, scale in found.items()
        if not 0 < scale < math.inf
    ]
    if problems:
        raise RecalibrateError(*problems)
    return found


def change_metrics(
    amax_L3: Tensor, before: dict[str, float], after: dict[str, float]
) -> dict[str, float]:
    """Return the `recalibrate/` keys of docs/metrics.md; none before the first scales."""
    if not before:
        return {}
    return {
        "recalibrate/saturated_fraction": saturated_fraction(amax_L3, before),
        "recalibrate/max_drift": max_drift(before, after),
    }


def saturated_fraction(amax_L3: Tensor, scales: dict[str, float]) -> float:
    """Return the share of the `3L` ranges, or `3GL`, that exceeded `448 * scale` in force."""
    groups = amax_L3.shape[-1] // 3
    names = [kv_scale_names(layer, groups) for layer in range(len(amax_L3))]
    scales_L3 = torch.tensor(
        [[scales[name] for name in each] for each in names], dtype=torch.float64
    )
    return (amax_L3.double() / FP8_MAX > scales_L3).double().mean().item()


def max_drift(before: dict[str, float], after: dict[str, float]) -> float:
    """Return the largest relative change of a scale from one refit to the next."""
    return max(abs(after[name] / before[name] - 1) for name in before)
