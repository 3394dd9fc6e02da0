"""Copy trainer weights into the engine, whole, or stop the run and name what failed.

The stream has a fixed order and fixed shapes: a sentinel, the trainer's weights in export order
(each FP8 weight followed by its `scale_inv`), the KV scales, a manifest. The receiver checks it
against its own list (`ledger.py`).

Weights are quantized in groups, one launch a group, because a mixture of experts sends 18,000 of
them. Each weight's finiteness check stays on the device. The host reads them once, just before the
manifest is sent, and a weight that is not finite is refused.
"""

# pyright: reportPrivateImportUsage=false
# torch._foreach_* is documented and public, its underscore notwithstanding.
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp8_nemo.glue import wire
from fp8_nemo.glue.digest import digests_of, placed
from fp8_nemo.glue.manifest import MANIFEST, SENTINEL, manifest
from fp8_nemo.glue.quantize import QUANTIZERS, plain_dtype
from fp8_nemo.glue.recalibrate import RecalibrateError, check_scales
from fp8_nemo.glue.wire import RefitError
from fp8_nemo.recipe.options.precision import Precision

GROUP_BYTES = 2**28
"""Trainer weights that wait for one launch: 256 MiB, 0.2% of a GPU, a layer of 8B or of experts."""


SENTINEL_BYTES = 512
"""NeMo RL's NCCL sender packs without padding: one byte would misalign all that follows it."""


class Encoded(NamedTuple):
    """Hold a group of weights as it travels, and the verdict on each."""

    tensors: list[tuple[str, Tensor]]
    names: list[str]
    nonfinite_N: Tensor
    digests_T: Tensor | None = None
    """Digest of each of `tensors`, with `verify: bytes`."""


def refit_stream(
    named_weights: Iterable[tuple[str, Tensor]],
    precision: Precision,
    kv_scales: Mapping[str, float] | None,
    *,
    num_layers: int,
    kv_groups: int = 1,
    metadata_only: bool = False,
    verify: str = "bytes",
    number: int = 0,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor that one refit sends, with its name.

    Args:
        named_weights: the trainer's weights in export order; slabs of experts allowed.
        precision: what travels: the recipe's, or BF16 linears where the receiver quantizes.
        kv_scales: `recalibrate.kv_scales`; None where the cache is BF16.
        num_layers: layers of the model.
        kv_groups: scales that a layer's Q, K or V has (`Precision.kv_groups`).
        metadata_only: NeMo RL runs the stream once at set-up for names, types and shapes, before
            any KV scale exists: NaN stands in for them.
        verify: with `bytes` the manifest carries the digest of every tensor.
        number: the refit's number. The receiver counts too, and so detects an earlier refit.

    Raises:
        RefitError: a weight is not finite, or a KV scale is missing or not finite and positive.
    """
    names: list[str] = []
    verdicts: list[Encoded] = []
    device: torch.device | None = None
    for group in in_groups(named_weights, keep_fused=precision.rollout.group > 0):
        if device is None:
            device = group[0][1].device
            yield SENTINEL, torch.zeros(SENTINEL_BYTES, dtype=torch.uint8, device=device)
        encoded = encode(group, precision, num_layers=num_layers, digests=verify == "bytes")
        group.clear()  # one group lives at a time
        verdicts.append(encoded._replace(tensors=[]))
        names += [name for name, _ in encoded.tensors]
        yield from _handed_over(encoded.tensors)
        del encoded
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)  # the groups were made on their consumer's streams
    if not metadata_only and (broken := list(_nonfinite(verdicts))):
        raise RefitError(f"{name}: holds NaN or Inf in the trainer" for name in broken)
    scales: dict[str, float] = {}
    if precision.cache.is_quantized:
        scales = _checked_kv_scales(kv_scales or {}, num_layers, kv_groups, metadata_only)
        together_N = torch.tensor([*scales.values()]).to(device)
        yield from zip(scales, together_N.split(1), strict=True)
    digests = [each.digests_T for each in verdicts if each.digests_T is not None]
    yield MANIFEST, manifest(number, names, scales, digests, device)


def with_noise(
    named_weights: Iterable[tuple[str, Tensor]],
    sigma: float,
    precision: Precision,
    *,
    num_layers: int,
    seed: int,
    trained: int,
) -> Iterator[tuple[str, Tensor]]:
    """Yield a refit's weights, with N(0, sigma^2) added to norms of the engine (QeRL's AQN).

    The trainer's tensors stay as they are, so nothing accumulates. Seed, step and name decide a
    draw: every rank, and every attempt at a step, makes the same one.

    Args:
        named_weights: the trainer's, for `refit_stream`.
        sigma: standard deviation; 0 adds nothing.
        precision: the recipe's, not that of the wire.
        num_layers: layers of the model.
        seed: the recipe's.
        trained: steps that the weights have been trained.
    """
    for name, weight in named_weights:
        if sigma and wire.takes_noise(name, precision, num_layers):
            draw = np.random.default_rng([seed, trained, *name.encode()])
            noise = torch.from_numpy(draw.normal(0, sigma, tuple(weight.shape)))
            weight = (weight.float() + noise.to(weight.device, torch.float32)).to(weight.dtype)
        yield name, weight


def encode(
    group: Sequence[tuple[str, Tensor]],
    precision: Precision,
    *,
    num_layers: int,
    digests: bool = False,
) -> Encoded:
    """Encode weights and slabs as they are sent: by checkpoint name, with scales if quantized.

    Args:
        group: at least one weight or slab, all on one device.
        precision: decides which become FP8.
        num_layers: layers of the model.
        digests: also digest what is sent.
    """
    device = group[0][1].device
    stacks = {name: _stacked(name, weight) for name, weight in group}
    shapes = {name: tuple(weight.shape) for name, weight in group}
    chosen = [
        name
        for name, shape in shapes.items()
        if wire.is_quantized_weight(name, shape, precision, num_layers)
    ]
    held, nonfinite_N = _quantized({name: stacks[name] for name in chosen}, precision, device)
    dtype = plain_dtype(precision)
    plain = {name: stack.to(dtype) for name, stack in stacks.items() if name not in held}
    held |= {name: {"": weight} for name, weight in plain.items()}
    tensors = [sent for name, shape in shapes.items() for sent in _named(name, shape, held[name])]
    # A launch of its own: made in the quantizing kernel, Triton 3.6 wrote other bytes on an H100.
    digests_T = digests_of([placed(x, x.shape) for _, x in tensors])() if digests else None
    if filled := {name: x for name, x in plain.items() if x.numel()}:  # an empty one has no norm
        # One launch and one pass over all of them, with nothing in between; it keeps NaN.
        largest_N = torch.stack(torch._foreach_norm(list(filled.values()), math.inf))
        nonfinite_N = torch.cat([nonfinite_N, ~torch.isfinite(largest_N)])
    return Encoded(tensors, [*chosen, *filled], nonfinite_N, digests_T)


def _quantized(
    stacks: Mapping[str, Tensor], precision: Precision, device: torch.device
) -> tuple[dict[str, dict[str, Tensor]], Tensor]:
    """Quantize stacks in one launch: the tensors of each by suffix, and whether one is not finite.

    Its finiteness is read later, so nothing here waits for the device.
    """
    nonfinite_N = torch.zeros(len(stacks), dtype=torch.bool, device=device)
    if not stacks:
        return {}, nonfinite_N
    found = QUANTIZERS[precision.rollout.name](
        [*stacks.values()],
        pow2=precision.scales == "pow2",
        nonfinite_N=nonfinite_N,
        together=[wire.fused_with(name) for name in stacks],
    )
    suffixes = wire.suffixes(precision.rollout.name)
    by_suffix = (dict(zip(suffixes, each, strict=True)) for each in found)
    return dict(zip(stacks, by_suffix, strict=True)), nonfinite_N


def _named(
    name: str, shape: tuple[int, ...], held: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield what is sent of a weight or a slab, by wire name and suffix."""
    parts = zip(*(_apart(name, each) for each in held.values()), strict=True)
    for one, sent in zip(wire.wire_names(name, shape), parts, strict=True):
        yield from ((one + suffix, part) for suffix, part in zip(held, sent, strict=True))


def in_groups(
    named_weights: Iterable[tuple[str, Tensor]], *, keep_fused: bool = False
) -> Iterator[list[tuple[str, Tensor]]]:
    """Group consecutive weights; a group is complete at `GROUP_BYTES`.

    Args:
        named_weights: in their order.
        keep_fused: not before all weights are there that vLLM fuses with the last one, whose scale
            they share. An export of Megatron's fused weights has them one after another.
    """
    group: list[tuple[str, Tensor]] = []
    size = 0
    for name, weight in named_weights:
        group.append((name, weight))
        size += weight.nbytes
        del weight
        if size >= GROUP_BYTES and (not keep_fused or _is_whole(group)):
            yield group  # the caller empties it
            group, size = [], 0
    if group:
        yield group


def _is_whole(group: Sequence[tuple[str, Tensor]]) -> bool:
    [*_, (last, _)] = group
    return {name for name, _ in group}.issuperset(wire.fused_with(last))


def pieces_of(name: str, weight: Tensor) -> Sequence[Tensor]:
    """Return what is sent of a weight, itself, or of a slab, a matrix `[O, I]` per wire name."""
    return _apart(name, _stacked(name, weight))


def _stacked(name: str, weight: Tensor) -> Tensor:
    """Return a weight as it is, or a slab as a stack of what is sent.

    A slab `[E, 2 O, I]` holds gate above up. They are separated, so that no block spans both.
    """
    projections = wire.slab_projections(name)
    return weight.unflatten(1, (len(projections), -1)).flatten(0, 1) if projections else weight


def _apart(name: str, tensor: Tensor) -> Sequence[Tensor]:
    return tensor.unbind() if wire.slab_projections(name) else (tensor,)


def _handed_over(tensors: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors made on the current stream so that any other stream may use them.

    NeMo RL's NCCL sender pulls from buffers' streams in turn (packed_tensor.py).
    """
    device = tensors[0][1].device
    if device.type != "cuda":
        yield from tensors
        return
    made_on = torch.cuda.current_stream(device)
    done = made_on.record_event()
    for name, tensor in tensors:
        if (taken_on := torch.cuda.current_stream(device)) != made_on:
            taken_on.wait_event(done)
            tensor.record_stream(taken_on)
        yield name, tensor


def _nonfinite(verdicts: Sequence[Encoded]) -> Iterator[str]:
    names = [name for each in verdicts for name in each.names]
    if names:
        found = torch.cat([each.nonfinite_N for each in verdicts]).tolist()
        yield from (name for name, bad in zip(names, found, strict=True) if bad)


def _checked_kv_scales(
    kv_scales: Mapping[str, float], num_layers: int, kv_groups: int, metadata_only: bool
) -> dict[str, float]:
    if metadata_only:
        names = (wire.kv_scale_names(layer, kv_groups) for layer in range(num_layers))
        return {name: math.nan for each in names for name in each}
    try:
        return check_scales(kv_scales, num_layers, kv_groups)
    except RecalibrateError as error:
        raise RefitError(error.problems) from error
