"""A plan in words and numbers, for people: what it does, what it weighs, what was looked at.

Counts are exact; memory and speed are estimates that say so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.table import Column, Table

from fp8_nemo.nemo_config.host import Host
from fp8_nemo.nemo_config.keys import command_line
from fp8_nemo.nemo_config.overrides import path_overrides
from fp8_nemo.nemo_config.versions import OPTIMIZER_ALWAYS_MOVED
from fp8_nemo.plan.layout import Choice, choose
from fp8_nemo.plan.memory import (
    HEADROOM,
    checkpoint_gib,
    host_gib,
    kv_cache_tokens,
    memory_per_gpu,
    node_gib,
    trained_parameters,
)
from fp8_nemo.plan.model import Counts, count
from fp8_nemo.plan.own.other_ways import (
    BASELINE,
    against_bf16,
    fit,
    if_shared,
    in_precision,
    precisions,
    times,
)
from fp8_nemo.plan.plan import Plan
from fp8_nemo.plan.speed import decode_of_engine, is_fitted
from fp8_nemo.plan.step_time import mean_context, step_seconds, usual_lengths
from fp8_nemo.recipe.mistake import as_typed
from fp8_nemo.recipe.options.cluster import Cluster
from fp8_nemo.recipe.options.precision import FORMATS, Precision
from fp8_nemo.recipe.settled import KEPT_CHECKPOINTS, Layout, Settled

LARGER_ENGINES = "; not taken, as larger engines must gain more than 10%"
"""Of a layout that is estimated faster than the chosen one (`layout.ALIKE`)."""


class Difference(NamedTuple):
    """Name a key that a plan sets otherwise than its base: `Difference("grpo.seed", 42, 7)`."""

    key: str
    base: Any
    """The base's value; `...` if the base is not known."""
    plan: Any


class Shown(NamedTuple):
    """Name a plan, the NeMo RL that it would run in, and where it would write."""

    plan: Plan
    host: Host
    run_dir: Path


def plan_tables(shown: Sequence[Shown]) -> tuple[list[Table], list[Table]]:
    """Return what stands before all plans, and a table of each: its decision, and what follows.

    One plan is compared with other precisions and layouts, and nothing stands before it. Before
    several stand their decisions, one row each, and what they all say.
    """
    alone = len(shown) == 1
    said = [_rows(*each, alone=alone) for each in shown]
    shared = [] if alone else [row for row in said[0] if all(row in rows for rows in said)]
    tables = [
        _table(plan.cell, [row for row in rows if row not in shared])
        for (plan, _, _), rows in zip(shown, said, strict=True)
    ]
    if alone:
        return [], tables
    decisions = overview((plan, host) for plan, host, _ in shown)
    return [decisions, _table(f"all {len(shown)} runs", shared)], tables


def _rows(plan: Plan, host: Host, run_dir: Path, *, alone: bool) -> list[tuple[str, str]]:
    others = precisions(plan, host) if alone else []
    where = ("run directory", str(run_dir))
    return [*decision(plan, host), *others, where, *describe(plan, host, alone=alone)]


def _table(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    columns = Column(no_wrap=True), Column(overflow="fold")
    table = Table(*columns, title=title, title_justify="left", show_header=False, box=None)
    for row in rows:
        table.add_row(*row)
    return table


def overview(cells: Iterable[tuple[Plan, Host]]) -> Table:
    """Return the decisions of a sweep, one row a cell, named as its run directory."""
    heads = ("run", "fits", "GiB a GPU", "s a step", "vs BF16")
    columns = [Column(head, overflow="fold") for head in heads]
    rows = Table(*columns, box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for plan, host in cells:
        rows.add_row(plan.run_name, *(_in_short(plan, host) if plan.nemo else ("yes", *"---")))
    return rows


def _in_short(plan: Plan, host: Host) -> tuple[str, str, str, str]:
    """Return whether a run fits, what its worst phase needs, and how fast a step is."""
    memory, seconds = memory_per_gpu(plan.settled), step_seconds(plan.settled).total
    room = fit(memory)
    needed = f"{memory.needed_gib(memory.worst):.0f} of {memory.gpu_gib:.0f}"
    plain = None if room == "NO" else in_precision(BASELINE, plan, host)
    is_bf16 = plan.recipe.precision.is_bf16
    gain = "1.00x" if is_bf16 else f"{times(plan.settled, plain):.2f}x" if plain else "-"
    return room, needed, f"{seconds:.0f}", gain


def change_lines(found: list[Difference]) -> list[str]:
    """Return the keys of NeMo RL that a plan changes, as typed: `grpo.seed=7 (base: 42)`."""
    return [
        f"{key}={value}" + ("" if base is ... else f" (base: {base})") for key, base, value in found
    ]


def decision(plan: Plan, host: Host) -> list[tuple[str, str]]:
    """Return whether a run fits its GPUs, and its speed against BF16 as far as it is known."""
    if not plan.nemo:
        return [("fits", "yes, on one device or a CPU: the local backend emulates FP8, slowly")]
    settled, gpu = plan.settled, plan.recipe.cluster.gpu
    memory = memory_per_gpu(settled)
    phase = memory.worst
    needs = f"{phase} needs {memory.needed_gib(phase):.0f} of {memory.gpu_gib:.0f} GiB"
    many = settled.rollout_gpus if phase == "rollout" else settled.train_gpus
    gpus = f"each of {many} {gpu}" if many > 1 else f"one {gpu}"
    here = step_seconds(settled)
    phases = ", ".join(f"{name} {each:.0f}" for name, each in here._asdict().items() if each >= 1)
    seconds = f"{here.total:.0f} s by estimate" + (f": {phases}" if phases else "")
    if plan.recipe.grpo.is_asynchronous:
        seconds += ", the longer of rollout and the others, then the refit; no such step was timed"
    room = fit(memory)
    speed = seconds if room == "NO" else f"{seconds}; {against_bf16(plan, host)}"
    return [
        ("fits", f"{room}: {needs} on {gpus}, by estimate"),
        ("step", speed),
        *([] if settled.shares_gpus else [("shared", if_shared(plan, host))]),
    ]


def describe(plan: Plan, host: Host, *, alone: bool = True) -> list[tuple[str, str]]:
    """Return what a plan does, line by line, with the notes last; `alone`, other layouts too."""
    recipe, precision = plan.recipe, plan.recipe.precision
    counts = count(recipe.model.shape, precision)
    fp8_on_wire = plan.backend == "local" or recipe.glue.sends_fp8
    sent = _size(counts.refit_bytes if fp8_on_wire else counts.refit_bytes_bf16)
    half = precision.plain.name.upper()
    how = f", {_size(counts.refit_bytes_bf16)} in {half}" if fp8_on_wire else f", in {half}"
    rows = {
        "backend": f"{plan.backend}, cluster {recipe.cluster.name}",
        "rollout": f"linear {precision.rollout_linear}, attention and KV {precision.rollout_kv}"
        + (", decode by XQA" if recipe.decodes_by_xqa else "")
        + (_alignment(precision) if plan.nemo else ""),
        "train": f"linear {precision.train_linear}",
        "weights": f"{counts.parameters:,} parameters in {_tensors(counts, precision)} tensors",
        "refit": f"{sent}{how}; glue.verify={recipe.glue.verify}",
        "KV cache": f"{counts.kv_bytes_per_token:,} bytes per token",
        "correction": _as_typed(recipe.correction),
        "grpo": _as_typed(recipe.grpo),
        "data": _as_typed(recipe.data),
    }
    if recipe.algorithm.changes:
        rows["algorithm"] = _as_typed(recipe.algorithm)
    if recipe.replay.is_on:
        rows["replay"] = f"{recipe.replay.name}: the trainer's tokens go where the engine's went"
    if recipe.lora.is_on:
        trained = trained_parameters(plan.settled)
        rows["lora"] = (
            f"{trained:,} parameters are trained, {trained / counts.parameters:.2%} of all; "
            f"{_as_typed(recipe.lora)}; {_merged(plan)}"
        )
    if recipe.noise.is_on:
        rows["noise"] = f"{_as_typed(recipe.noise)}; none in a validation and the rollout after it"
    if plan.nemo:
        answer, both = plan.settled.response_tokens, plan.settled.sequence_tokens
        mean = usual_lengths(plan.settled).answer
        rows["answers"] = (
            f"up to {answer:,} tokens, with the prompt up to {both:,}; estimates are for a mean of "
            f"{mean:,.0f}"
        )
        rows |= _nemo_rows(plan, host, alone=alone)
    return [*rows.items(), *(("note", note) for note in plan.notes)]


def _alignment(precision: Precision) -> str:
    if not precision.is_aligned:
        return ""
    quantizer = ", FP8 quantizer" if precision.rollout.is_quantized else ""
    cache = " (not tried with an FP8 cache)" if precision.cache.is_quantized else ""
    norm, attention = (", norm", ", one attention for both") if precision.is_exact else ("", "")
    return f"; RoPE, SiLU{norm}{quantizer} by the trainer's formulas{cache}{attention}"


def _merged(plan: Plan) -> str:
    """Say what refits send of a model with adapters."""
    recipe = plan.recipe
    if not recipe.resent:
        return "a refit sends merged weights, as many bytes as without"
    wire = recipe.precision if recipe.glue.sends_fp8 else Precision()
    later = count(recipe.model.shape, wire, recipe.resent)
    return (
        f"refits after the first send {_size(later.refit_bytes)}, the weights with adapters, merged"
    )


def _tensors(counts: Counts, precision: Precision) -> str:
    held = precision.rollout if precision.rollout.is_quantized else FORMATS["fp8"]
    plain = f"{counts.bf16_weights:,} {precision.plain.name.upper()}"
    return f"{counts.fp8_weights:,} {held.name.upper()} and {plain}"


def differences(plan: Plan, host: Host, run_dir: Path) -> list[Difference]:
    """Return the keys that a plan changes in its base YAML, folders too; all without a base."""
    if not plan.nemo:
        return []
    base = host.bases[plan.nemo.base_config] if host.bases is not None else None
    found = [
        Difference(key, ... if base is None else base.get(key), value)
        for key, value in _written(plan, host, run_dir).items()
    ]
    return [each for each in found if each.base != each.plan]


def stock_command(plan: Plan, host: Host, run_dir: Path) -> list[str]:
    """Return the stock NeMo RL command with the same configuration, as an argument list.

    It lacks what no key can set: a correction that NeMo RL does not have, our metrics, and an
    environment that our driver registers (`env_cls`).
    """
    assert plan.nemo
    return command_line(plan.nemo.base_config, _written(plan, host, run_dir), host.declared)


def _written(plan: Plan, host: Host, run_dir: Path) -> dict[str, Any]:
    assert plan.nemo
    root = Path(host.root) if host.root else None
    return plan.nemo.overrides | path_overrides(plan.recipe, run_dir, root)


def _nemo_rows(plan: Plan, host: Host, *, alone: bool) -> dict[str, str]:
    assert plan.nemo
    settled = plan.settled
    environment = " ".join(f"{name}={value}" for name, value in plan.nemo.environment.items())
    return {
        "NeMo RL": f"{plan.nemo.host}; {plan.nemo.base_config}",
        "layout": _layout_text(settled, settled.layout),
        **(_others(settled, host) if alone else {}),
        "memory": "; ".join(_memory_texts(settled, host)) + "; an estimate",
        "decode": "; ".join(_speed_texts(settled)),
        "environment": f"{environment}; hub cache {_hub_cache(plan.recipe.cluster)}",
        "checked": _checked(plan, host),
    }


def _hub_cache(cluster: Cluster) -> str:
    """Return the folder of the hub's files in a run: the job's, or that of who submits."""
    set_there = dict(each.split("=", 1) for each in cluster.env if "=" in each)
    return set_there.get("HF_HOME") or os.environ.get("HF_HOME") or "~/.cache/huggingface"


def _layout_text(settled: Settled, layout: Layout) -> str:
    """Return how the GPUs are used, training first, as one text."""
    settled = replace(settled, layout=layout)
    gpus = f"{settled.gpus} GPU" if settled.gpus == 1 else f"{settled.gpus} GPUs"
    if not settled.shares_gpus:
        gpus += f", {settled.train_gpus} to train, {settled.rollout_gpus} to sample"
    engines = "1 engine" if settled.engines == 1 else f"{settled.engines} engines"
    kept = f"optimizer {'kept on the GPU' if layout.keeps_optimizer else 'moved to the host'}"
    again = "recompute" if layout.recompute else "no recompute"
    cache = "" if layout.kv_cache_gib is None else f", KV cache {layout.kv_cache_gib:.0f} GiB"
    return (
        f"{gpus}. Train: TP {layout.tensor}, PP {layout.pipeline}, "
        f"CP {layout.context}, EP {layout.expert}, DP {settled.data_parallel}, micro-batches of "
        f"{layout.micro_batch * settled.sequence_tokens:,} tokens, logprobs of "
        f"{layout.logprob_batch * settled.sequence_tokens:,}, {again}, {kept}. Rollout: "
        f"{engines}, TP {layout.rollout_tensor}, "
        f"EP {layout.rollout_expert}{cache}"
    )


def _others(settled: Settled, host: Host) -> dict[str, str]:
    """Return the fastest other layouts if the plan chooses the layout; else nothing."""
    if settled.recipe.model.layout != "auto":
        return {}
    best: dict[tuple[int, int, int, int, bool], Choice] = {}
    choices = choose(settled, host)
    for each in sorted(choices, key=lambda choice: choice.seconds.total):
        best.setdefault(_kind(each.layout), each)
    best.pop(_kind(settled.layout), None)
    return {
        f"layout {n}": f"{each.seconds.total:.0f} s: {_layout_text(settled, each.layout)}"
        + LARGER_ENGINES * _is_passed_over(each, choices[0], settled.layout)
        for n, each in enumerate([*best.values()][:2], 2)
    }


def _is_passed_over(choice: Choice, first: Choice, layout: Layout) -> bool:
    """Return whether a faster layout was not chosen; a run's own may be of its first submission."""
    return layout == first.layout and choice.seconds.total < first.seconds.total


def _kind(layout: Layout) -> tuple[int, int, int, int, bool]:
    """Return what makes a layout another: not its batches, chunks of logits or optimizer alone."""
    spread = layout.tensor, layout.context, layout.expert, layout.rollout_tensor
    return *spread, layout.recompute


def _memory_texts(settled: Settled, host: Host) -> Iterator[str]:
    """Yield a GPU's headroom in each phase, the parts of the worst, and what the host holds."""
    memory = memory_per_gpu(settled)
    free = ", ".join(f"{phase} {max(0.0, memory.headroom(phase)):.0%}" for phase in memory.phases)
    yield f"of {memory.gpu_gib:.0f} GiB free in {free}"
    yield memory.text(memory.worst)
    yield f"KV cache of an engine {kv_cache_tokens(settled, memory):,} tokens"
    locked = host_gib(settled)
    yield f"host memory {node_gib(settled):,.0f} GiB a node, of these {locked:,.0f} page-locked"
    saved = checkpoint_gib(settled)
    yield f"a checkpoint {saved:,.0f} GiB, {KEPT_CHECKPOINTS} kept while one is written"
    if OPTIMIZER_ALWAYS_MOVED in host.defects or settled.layout.keeps_optimizer:
        return
    kept = memory_per_gpu(replace(settled, layout=settled.layout._replace(keeps_optimizer=True)))
    if min(kept.headroom("refit"), kept.headroom("rollout")) >= HEADROOM:
        yield (
            "there is room for the optimizer, which NeMo RL moves to the host and back in every "
            "step, unless +nemo.policy.offload_optimizer_for_refit=false (docs/research/speed.md)"
        )


def _speed_texts(settled: Settled) -> Iterator[str]:
    """Yield decode's speed, and its ratio to BF16's."""
    recipe = settled.recipe
    lengths = usual_lengths(settled)
    context = mean_context(settled, lengths)
    found = decode_of_engine(settled, context)
    in_bf16 = replace(settled, recipe=replace(recipe, precision=Precision()))
    plain = decode_of_engine(in_bf16, context)
    yield (
        f"{found.running} of an engine's {settled.sequences_per_engine} sequences fit its cache, "
        f"at a mean of {context:,.0f} tokens while they grow"
    )
    yield f"{found.tokens_per_second:,.0f} tokens/s an engine on {recipe.cluster.gpu}"
    if recipe.precision.rollout.is_quantized:
        ratio = found.tokens_per_second / plain.tokens_per_second
        yield f"{ratio:.2f} times BF16's in this layout, where BF16's cache holds {plain.running}"
    if is_fitted(settled):
        gpu = "H100" if settled.recipe.precision.rollout.group else "H200"
        yield f"estimates, fitted on an {gpu}"
    else:
        yield "estimates, of a model or layout that was not measured (docs/research/speed.md)"


def _checked(plan: Plan, host: Host) -> str:
    if host.bases is None:
        return (
            "options and NeMo RL's limits; not its YAML's keys (set NEMO_RL_ROOT to a clone), nor "
            "the model's files"
        )
    return f"options, NeMo RL's limits, every key against the YAML in {host.root}"


def _as_typed(group: Any) -> str:
    """Return the fields of a group as a user types them, less null, which is the base's value."""
    fields = {key: value for key, value in vars(group).items() if key != "name"}
    pairs = [f"{key}={as_typed(value)}" for key, value in fields.items() if value is not None]
    return f"{group.name}: {' '.join(pairs)}" if pairs else group.name


def _size(count: float) -> str:
    """Write a number of bytes with its unit: `9.1 GB`."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
