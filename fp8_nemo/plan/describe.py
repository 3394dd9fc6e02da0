"""A plan in words and numbers, for people: what it does, what it weighs, what was looked at.

Counts are exact; memory and speed are estimates that say so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Column, Table

from fp8_nemo.nemo_config.host import Host
from fp8_nemo.nemo_config.keys import command_line
from fp8_nemo.nemo_config.overrides import path_overrides
from fp8_nemo.nemo_config.versions import OPTIMIZER_ALWAYS_MOVED
from fp8_nemo.plan.memory import GPU_GIB, HEADROOM, count, kv_cache_tokens, memory_per_gpu
from fp8_nemo.plan.plan import Plan
from fp8_nemo.plan.speed import FITTED, Decode, decode_of_engine, refit_seconds
from fp8_nemo.recipe.checks import as_typed
from fp8_nemo.recipe.options import Precision
from fp8_nemo.recipe.settled import KEEPS_OPTIMIZER, Settled

SHOWN_GPUS = ("h100", "h200")


class Difference(NamedTuple):
    """One key that a plan sets otherwise than its base: `Difference("grpo.seed", 42, 7)`."""

    key: str
    base: Any
    """The base's value; `...` if the base is not known."""
    plan: Any


def plan_table(plan: Plan, host: Host, run_dir: Path) -> Table:
    """Lay one plan out for people: the decision first, then what follows from it."""
    columns = Column(no_wrap=True), Column(overflow="fold")
    rows = Table(*columns, title=plan.cell, title_justify="left", show_header=False, box=None)
    for row in [*decision(plan), ("run directory", str(run_dir)), *describe(plan, host)]:
        rows.add_row(*row)
    return rows


def change_lines(found: list[Difference]) -> list[str]:
    """Say which keys of NeMo RL's a plan changes: `grpo.seed=7 (base: 42)`, as one would type."""
    return [
        f"{key}={value}" + ("" if base is ... else f" (base: {base})") for key, base, value in found
    ]


def decision(plan: Plan) -> list[tuple[str, str]]:
    """Say whether a run fits its GPUs, and how fast it is against BF16, as far as is known."""
    if not plan.nemo:
        return [("fits", "yes, on one device or a CPU: the local backend emulates FP8, slowly")]
    settled, gpu = plan.settled, plan.recipe.cluster.gpu
    memory = memory_per_gpu(settled)
    phase = memory.worst
    free = memory.headroom(phase)
    fits = "yes" if free >= HEADROOM else "hardly" if free >= 0 else "NO"
    needs = f"{phase} needs {memory.gpu_gib * (1 - free):.0f} of {memory.gpu_gib:.0f} GiB"
    rows = [("fits", f"{fits}: {needs} on each of {settled.gpus} {gpu}, by estimate")]
    found, plain = (_decode(settled, gpu, each) for each in (plan.recipe.precision, Precision()))
    if not found or not plain:
        return [*rows, ("speed", "not measured for this model and layout")]
    ratio = found.tokens_per_second / plain.tokens_per_second
    told = f"decode {ratio:.2f} times as fast as BF16" if ratio != 1 else "the baseline, BF16"
    return [*rows, ("speed", f"{told}, by estimate; a whole step is not estimated yet")]


def describe(plan: Plan, host: Host) -> list[tuple[str, str]]:
    """Say what a plan does, line by line; notes last."""
    recipe = plan.recipe
    counts = count(recipe.model.shape, recipe.precision)
    precision = recipe.precision
    fp8_on_wire = plan.backend == "local" or recipe.glue.sends_fp8
    sent = _size(counts.refit_bytes if fp8_on_wire else counts.refit_bytes_bf16)
    how = f", in BF16 {_size(counts.refit_bytes_bf16)}" if fp8_on_wire else ", in BF16"
    rows = {
        "backend": f"{plan.backend}, cluster {recipe.cluster.name}",
        "rollout": f"linear {precision.rollout_linear}, attention and KV {precision.rollout_kv}",
        "train": f"linear {precision.train_linear}",
        "weights": f"{counts.parameters:,} parameters in {counts.fp8_weights:,} FP8 and "
        f"{counts.bf16_weights:,} BF16 tensors",
        "refit": f"{sent}{how}; verify {recipe.glue.verify}",
        "KV cache": f"{counts.kv_bytes_per_token:,} bytes per token",
        "correction": _as_typed(recipe.correction),
        "grpo": _as_typed(recipe.grpo),
        "data": _as_typed(recipe.data),
    }
    rows |= _nemo_rows(plan, host) if plan.nemo else {}
    return [*rows.items(), *(("note", note) for note in plan.notes)]


def differences(plan: Plan, host: Host, run_dir: Path) -> list[Difference]:
    """The keys that a plan changes in its base YAML, folders included; all if it is not known."""
    if not plan.nemo:
        return []
    base = host.bases[plan.nemo.base_config] if host.bases is not None else None
    found = [
        Difference(key, ... if base is None else base.get(key), value)
        for key, value in _written(plan, host, run_dir).items()
    ]
    return [each for each in found if each.base != each.plan]


def stock_command(plan: Plan, host: Host, run_dir: Path) -> list[str]:
    """The stock NeMo RL command with the same configuration, as an argument list.

    It differs from our run in what no key can say: a correction that NeMo RL has not, our metrics.
    """
    assert plan.nemo
    return command_line(plan.nemo.base_config, _written(plan, host, run_dir), host.declared)


def _written(plan: Plan, host: Host, run_dir: Path) -> dict[str, Any]:
    assert plan.nemo
    root = Path(host.root) if host.root else None
    return plan.nemo.overrides | path_overrides(plan.recipe, run_dir, root)


def _nemo_rows(plan: Plan, host: Host) -> dict[str, str]:
    assert plan.nemo
    settled, parallel = plan.settled, plan.recipe.model.parallel
    environment = " ".join(f"{name}={value}" for name, value in plan.nemo.environment.items())
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return {
        "NeMo RL": f"{plan.nemo.host}; {plan.nemo.base_config}",
        "layout": f"{settled.gpus} GPUs. Train: TP {parallel.tensor}, PP {parallel.pipeline}, "
        f"CP {parallel.context}, EP {parallel.expert}, DP {settled.data_parallel}. Rollout: "
        f"{settled.gpus // parallel.rollout_tensor} engines, TP {parallel.rollout_tensor}, "
        f"EP {parallel.rollout_expert}",
        "memory": "; ".join(_memory_texts(settled, host)) + "; an estimate",
        "decode": "; ".join(_speed_texts(settled)),
        "environment": f"{environment}; hub cache {home}",
        "checked": _checked(plan, host),
    }


def _with(settled: Settled, gpu: str, precision: Precision) -> Settled:
    """Return the same run on another GPU, in another precision."""
    recipe = settled.recipe
    cluster = replace(recipe.cluster, gpu=gpu)
    return replace(settled, recipe=replace(recipe, cluster=cluster, precision=precision))


def _memory_texts(settled: Settled, host: Host) -> Iterator[str]:
    """Say the headroom on the GPUs that people have, and the parts of the worst phase here."""
    recipe = settled.recipe
    for gpu in dict.fromkeys((*SHOWN_GPUS, recipe.cluster.gpu)):
        memory = memory_per_gpu(_with(settled, gpu, recipe.precision))
        free = ", ".join(f"{phase} {memory.headroom(phase):.0%}" for phase in memory.phases)
        low = "" if memory.headroom(memory.worst) >= HEADROOM else " (TOO LITTLE)"
        yield f"{gpu} {GPU_GIB[gpu]:.0f} GiB, free in {free}{low}"
    memory = memory_per_gpu(settled)
    yield memory.text(memory.worst)
    yield f"KV cache of an engine {kv_cache_tokens(recipe, memory):,} tokens"
    if OPTIMIZER_ALWAYS_MOVED in host.defects or settled.keeps_optimizer:
        return
    kept = memory_per_gpu(replace(settled, own={KEEPS_OPTIMIZER: False}))
    if min(kept.headroom("refit"), kept.headroom("rollout")) >= HEADROOM:
        yield (
            "there is room for the optimizer, which NeMo RL moves to the host and back in every "
            "step, unless +nemo.policy.offload_optimizer_for_refit=false (docs/research/speed.md)"
        )


def _speed_texts(settled: Settled) -> Iterator[str]:
    """Say how fast decode and refit are, where this model was measured, beside BF16."""
    recipe = settled.recipe
    found = _decode(settled, recipe.cluster.gpu, recipe.precision)
    plain = _decode(settled, recipe.cluster.gpu, Precision())
    if found is None or plain is None:
        yield "not measured for this model and layout (docs/research/speed.md)"
        return
    yield (
        f"{found.running} of an engine's {_sequences(settled)} sequences of "
        f"{settled.sequence_tokens // 2:,} tokens in its cache"
    )
    for gpu in dict.fromkeys((*SHOWN_GPUS, recipe.cluster.gpu)):
        if there := _decode(settled, gpu, recipe.precision):
            yield f"{gpu} {there.tokens_per_second:,.0f} tokens/s"
    if recipe.precision.rollout.is_quantized:
        ratio = found.tokens_per_second / plain.tokens_per_second
        yield f"{ratio:.2f} times BF16 with {plain.running} in its cache"
    shape = recipe.model.shape
    wire = recipe.precision if recipe.glue.sends_fp8 else Precision()
    if (fixed := FITTED[recipe.model.name, shape.layers].refit) is not None:
        took = refit_seconds(shape, wire, recipe.cluster.gpu, fixed)
        yield f"refit {took:.1f} s of transfer"
    yield "estimates, fitted on an H200"


def _sequences(settled: Settled) -> int:
    """Return how many of a step's sequences one engine gets."""
    engines = settled.gpus // settled.recipe.model.parallel.rollout_tensor
    return -(-settled.sequences_per_step // engines)


def _decode(settled: Settled, gpu: str, precision: Precision) -> Decode | None:
    """Estimate an engine of this run on a GPU and in a precision; None if nothing was measured."""
    there, context = _with(settled, gpu, precision), settled.sequence_tokens // 2
    return decode_of_engine(there.recipe, memory_per_gpu(there), _sequences(settled), context)


def _checked(plan: Plan, host: Host) -> str:
    if host.bases is None:
        return (
            "options and the host's limits; not the keys of NeMo RL's YAML, for which NEMO_RL_ROOT "
            "must name a checkout; not the model's files"
        )
    return f"options, the host's limits, every key against the YAML in {host.root}"


def _as_typed(group: Any) -> str:
    """The fields of a group as one would type them; null inherits the base configuration."""
    pairs = [f"{key}={as_typed(value)}" for key, value in vars(group).items() if key != "name"]
    return f"{group.name}: " + " ".join(pairs)


def _size(count: float) -> str:
    """Bytes in a unit that people read: `9.1 GB`."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
