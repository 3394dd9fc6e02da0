"""Where the device's time of a decode step goes: its kernels by class, and the gaps between them.

Imports nothing: it also runs in the process of vLLM's engine, and in tests without a GPU.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

CLASSES = (
    ("copies", r"^Mem(cpy|set) "),
    ("preparation", r"_prepare_|slot_mapping|block_tables?_kernel|_post_update|_apply_write_kernel"
                    r"|_combine_sampled|_num_sampled_and_rejected|expand_idx"),
    ("rope, cache write", r"reshape_and_cache|concat_and_cache|rotary|\brope|_rope|rope_"),
    ("attention", r"flash(?!infer)|fmha|kernel_mha|xqa|PagedKV|PrefillWithKV|attention|attn"
                  r"|reduce_segments|MergeStates|prepare_varlen"),
    ("norm or activation, quantized", r"(norm|silu|act_and_mul).*quant"
                                      r"|triton_(red|per|poi).*(abs|amax|float8|quant)"),
    ("quantization", r"quant"),
    ("routing of experts", r"moe_align|moe_sum|topk_?gating|topk_?softmax|count_and_sort_expert"),
    ("linear products", r"gemm|nvjet|gemv|cutlass|xmma|cublas|splitk|fused_moe|dot_kernel"),
    ("activation", r"silu|act_and_mul|sigmoid"),
    ("norms", r"norm|triton_(red|per).*(rsqrt|mean|pow)"),
    ("sampling", r"gumbel|softmax|argmax|topk|sampl|penalt|min_p|temperature|_ranks_kernel|logprob"
                 r"|exponential|distribution|multinomial|radixsort|devicescan|devicesegmentedsort"
                 r"|count_greater|logit"),
    ("rope, cache write", r"triton_poi.*(cat|index|split|unsqueeze|sub)"),
    ("copies", r"copy|CatArray|FillFunctor"),
)  # fmt: skip
"""Class of a kernel by its name, the first that fits, whatever the case; a class may come twice."""
OTHER, GAPS = "other", "gaps"
TOP = 15
MICRO = 1e3  # microseconds of a millisecond
RANGES = ("##", "Profiler", "nccl:")
"""How the names of ranges begin, which a profile has beside the kernels in them."""


class Kernel(NamedTuple):
    """One kernel or copy, on the device's clock."""

    name: str
    start: float
    """Microseconds."""
    duration: float
    """Microseconds."""


def class_of(name: str) -> str:
    """Return what a kernel does, by its name: `attention`, `linear products`, ..., or `other`."""
    return next((kind for kind, part in CLASSES if re.search(part, name, re.I)), OTHER)


def busy(kernels: Iterable[Kernel]) -> float:
    """Return the microseconds in which at least one kernel ran; streams overlap."""
    total, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda each: each.start):
        end = kernel.start + kernel.duration
        total += max(0.0, end - max(until, kernel.start))
        until = max(until, end)
    return total


def span(kernels: Sequence[Kernel]) -> float:
    """Return the microseconds from the first kernel's start to the last one's end."""
    first = min(each.start for each in kernels)
    return max(each.start + each.duration for each in kernels) - first


def summary(kernels: Sequence[Kernel], steps: int) -> dict[str, Any]:
    """Return milliseconds a step: by class, busy, the gaps between kernels, and by kernel.

    Classes are sums of kernels' own times, so `overlapped` counts twice what two streams did at
    once: classes + gaps - overlapped = span. `unmatched` names every kernel of the class `other`.

    Raises:
        ValueError: there is no kernel, so the profiler saw nothing.
    """
    if not kernels:
        raise ValueError("the profiler saw no kernel; is CUPTI taken by another tool?")
    per_step = MICRO * steps
    spent: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for kernel in kernels:
        spent[kernel.name] += kernel.duration / per_step
        count[kernel.name] += 1
    classes = dict.fromkeys((*(kind for kind, _ in CLASSES), OTHER), 0.0)
    for name, each in spent.items():
        classes[class_of(name)] += each
    rows = [
        {"kernel": name, "class": class_of(name), "ms": each, "calls": count[name] / steps}
        for name, each in sorted(spent.items(), key=lambda pair: -pair[1])
    ]
    worked, lasted = busy(kernels) / per_step, span(kernels) / per_step
    return {
        "span_ms": lasted,
        "busy_ms": worked,
        "classes_ms": classes | {GAPS: lasted - worked},
        "overlapped_ms": sum(spent.values()) - worked,
        "kernels": len(kernels) / steps,
        "top": rows[:TOP],
        "unmatched": [row for row in rows if row["class"] == OTHER],
    }
