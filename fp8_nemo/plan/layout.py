"""Choose a layout: the fastest by estimate that fits, if engines of its size were timed.

Only what the recipe leaves null under `model.parallel` and `model.memory` is chosen, and nothing
without `model.layout=auto`. A layout that fits leaves `HEADROOM` of a GPU free in every phase; if
none does, the one that needs least is taken, and the plan says that it does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import NamedTuple

from fp8_nemo.nemo_config.host import Host
from fp8_nemo.nemo_config.limits import host_limits
from fp8_nemo.nemo_config.versions import OPTIMIZER_ALWAYS_MOVED
from fp8_nemo.plan.memory import GIB, GPU_GIB, HEADROOM, memory_per_gpu
from fp8_nemo.plan.model import count
from fp8_nemo.plan.step_time import StepSeconds, step_seconds
from fp8_nemo.recipe.settled import (
    KEEPS_OPTIMIZER,
    LOGITS_CHUNK,
    LOGPROB_BATCH,
    MICRO_BATCH,
    Layout,
    Settled,
)

RANKS = {
    "tensor": (1, 2, 4, 8),
    "context": (1, 2, 4, 8),
    "expert": (1, 2, 4, 8),
    "rollout_tensor": (1, 2, 4),
}
"""GPUs over which each may be spread; one node's at most."""
MOST_TOKENS = 16_384
"""Of a micro-batch: longer ones gain nothing where the device is busy."""
CHUNK = 1024
ALIKE = 1.1
"""Times as long as the fastest that a layout with smaller engines may take: estimates are hardly
finer."""
TIMED_ENGINE, TIMED_QUANTIZED = 2, 1
"""GPUs of the largest engine that plans take by its seconds alone. In BF16 rollouts of engines of
two were timed inside NeMo RL on four H100s, and on two H200s of 8B and of experts
(real-steps-8b-8k-2-h200.json and others). The one FP8 rollout of an engine of two was no faster
than of two engines of one (nemo-30b-lora-short-2-h200.json)."""


class Choice(NamedTuple):
    """Pair a layout with what it is estimated to take: `Choice(Layout(...), seconds, 0.16)`."""

    layout: Layout
    seconds: StepSeconds
    headroom: float
    """Share of a GPU that the fullest phase leaves free."""


def choose(settled: Settled, host: Host) -> list[Choice]:
    """List the layouts of a run that fit, the fastest first; else the one that needs least.

    Of those within `ALIKE` of the fastest, the ones whose engines have no more GPUs than were timed
    come first, then the ones with the fewest.

    Args:
        settled: a recipe with `model.layout=auto`.
        host: whose limits a layout must keep to.
    """
    same = replace(settled, recipe=replace(settled.recipe, seed=0, outputs=""))
    return [*_search(_Search(repr(same), host, settled))]


@dataclass(frozen=True)
class _Search:
    """Search for layouts: runs that differ by their seed or their outputs share one search."""

    key: str
    host: Host
    settled: Settled = field(compare=False)


@cache
def _search(asked: _Search) -> list[Choice]:
    settled, host = asked.settled, asked.host
    runs = [replace(settled, layout=each) for each in _candidates(settled, host)]
    left = [_headroom(each) for each in runs]
    least = min(HEADROOM, max(left, default=0.0))
    fitting = [_choice(run, room) for run, room in zip(runs, left, strict=True) if room >= least]
    if least < HEADROOM:
        return fitting[:1]
    close = ALIKE * min(each.seconds.total for each in fitting)
    quantized = settled.recipe.precision.rollout.is_quantized
    timed = TIMED_QUANTIZED if quantized else TIMED_ENGINE
    return sorted(fitting, key=lambda each: _rank(each, close, timed))


def _rank(choice: Choice, close: float, timed: int) -> tuple[float, ...]:
    """Order layouts by their seconds, those of at most `close` by engines beyond `timed` first."""
    seconds, engine = choice.seconds.total, max(timed, choice.layout.rollout_tensor)
    is_slow = seconds > close
    return is_slow, 0 if is_slow else engine, seconds, -choice.headroom


def _headroom(settled: Settled) -> float:
    memory = memory_per_gpu(settled)
    return memory.headroom(memory.worst)


def _choice(settled: Settled, headroom: float) -> Choice:
    return Choice(settled.layout, step_seconds(settled), headroom)


def _candidates(settled: Settled, host: Host) -> Iterator[Layout]:
    """Yield every way to spread the model that NeMo RL takes, with its best batches and cache."""
    recipe, given = settled.recipe, settled.layout
    typed = vars(recipe.model.parallel) | vars(recipe.model.memory)
    open_keys = {key for key, value in typed.items() if value is None}
    ranks = [each if key in open_keys else (getattr(given, key),) for key, each in RANKS.items()]
    own, kept = settled.own, recipe.model.memory.optimizer
    keeps = [given.keeps_optimizer]
    is_open = settled.shares_gpus and kept is None
    if is_open and KEEPS_OPTIMIZER not in own and OPTIMIZER_ALWAYS_MOVED not in host.defects:
        keeps = [True, False]
    recompute = [False, True] if "recompute" in open_keys else [given.recompute]
    chunks = [given.logits_chunk] if LOGITS_CHUNK in own else [0, CHUNK]
    for each in product(*ranks):
        spread = given._replace(**dict(zip(RANKS, each, strict=True)))
        if any(each.broken for each in host_limits(replace(settled, layout=spread), host)):
            continue
        for keep, again, chunk in product(keeps, recompute, chunks):
            each = spread._replace(keeps_optimizer=keep, recompute=again, logits_chunk=chunk)
            yield from _with_batches(replace(settled, layout=each))


def _with_batches(settled: Settled) -> Iterator[Layout]:
    """Yield a layout with each training micro-batch that fits, and the largest logprob batch."""
    given, own, memory = settled.layout, settled.own, settled.recipe.model.memory
    sizes = [n for n in (16, 8, 4, 2, 1) if n == 1 or n * settled.sequence_tokens <= MOST_TOKENS]
    trains = [given.micro_batch] if MICRO_BATCH in own or memory.micro_batch else sizes
    scores = [given.logprob_batch] if LOGPROB_BATCH in own or memory.logprob_batch else sizes
    for size in trains:
        trained = replace(settled, layout=given._replace(micro_batch=size))
        if size > 1 and _free(trained, "train") < HEADROOM:
            continue
        # NeMo RL wants one size for both at TP 4 and more (seam equal-micro-batches).
        alike = [size] if given.tensor >= 4 else scores
        scored = (
            replace(trained, layout=trained.layout._replace(logprob_batch=each)) for each in alike
        )
        fits = next((each for each in scored if _free(each, "logprob") >= HEADROOM), trained)
        yield _with_cache(fits)


def _with_cache(settled: Settled) -> Layout:
    """Return a layout with the largest KV cache that fits, or that its sequences can fill."""
    layout, memory = settled.layout, settled.recipe.model.memory
    if memory.kv_cache_gib is not None:
        return layout
    empty = memory_per_gpu(replace(settled, layout=layout._replace(kv_cache_gib=0.0)))
    room = GPU_GIB[settled.recipe.cluster.gpu] * (empty.headroom("rollout") - HEADROOM)
    shape, precision = settled.recipe.model.shape, settled.recipe.precision
    shards = min(layout.rollout_tensor, shape.kv_heads)
    one = settled.sequence_tokens * count(shape, precision).kv_bytes_per_token / shards / GIB
    useful = min(room, math.ceil(one * settled.sequences_per_engine))
    return layout._replace(kv_cache_gib=float(max(math.ceil(one), math.floor(useful))))


def _free(settled: Settled, phase: str) -> float:
    return memory_per_gpu(settled).headroom(phase)
