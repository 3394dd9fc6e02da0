"""Compare a plan with the same run in another precision, or with its GPUs shared out otherwise."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from fp8_nemo.nemo_config.host import Host
from fp8_nemo.plan.layout import choose
from fp8_nemo.plan.memory import HEADROOM, MemoryByPhase, memory_per_gpu
from fp8_nemo.plan.plan import Plan, PlanError, plan_recipe
from fp8_nemo.plan.step_time import step_seconds
from fp8_nemo.recipe.checks import mistakes
from fp8_nemo.recipe.compose import read_options
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.settled import Settled

BASELINE = "bf16"
"""Precision that the others' steps are compared with."""
EXPERTS_TIMED = (
    "timed with LoRA on H200, fp8-kv-attn: 1.23x and 1.53x in two steps of a third of the layers, "
    "answers of 7.7k tokens; 0.96x with all layers and 2k, when refits took longer"
)
"""What is known of experts (real-steps-30b16-8k-h200.json, real-steps-30b-lora-2-h200.json)."""
EXACT = "fp8-e2e precision.align=exact"
"""What to type after `precision=` for FP8 without mismatch; compared beside the shipped files."""
WORTH = 1.15
"""Times as fast as BF16 that a step should be by estimate. Gains of whole models were up to 4% too
large (docs/speed.md), so a tenth is left; and what FP8 costs in accuracy is not known at 8B."""


def precisions(plan: Plan, host: Host) -> list[tuple[str, str]]:
    """Return how fast a step is in each shipped precision that fits, against BF16, as one row.

    A second row says what to take where the plan's own gains too little, or has mismatch for a gain
    that is not the largest. Of experts it says what to time, as their gains are rough.
    """
    if not plan.nemo or not (plain := in_precision(BASELINE, plan, host)):
        return []
    gains, texts, too_large = dict[str, float](), dict[str, str](), list[str]()
    for name, precision in _shipped().items():
        if name == BASELINE or precision.rollout.group:
            continue  # four bits: no step was timed
        if not (each := in_precision(name, plan, host)):
            continue
        if (room := fit(memory_per_gpu(each))) == "NO":
            too_large.append(name)
        else:
            gains[name] = times(each, plain)
            texts[name] = f"{name} {gains[name]:.2f}x" + (" TIGHT" if room == "TIGHT" else "")
    gains = dict(sorted(gains.items(), key=lambda each: -each[1]))
    experts = bool(plan.recipe.model.shape.experts)
    said = "against BF16 in its fastest layout" + (", roughly" if experts else "")
    said += f": {', '.join(texts[name] for name in gains)}"
    said += f"; too large: {', '.join(too_large)}" if too_large else ""
    said += f"; {EXPERTS_TIMED}" if experts else ""
    advice = _advice(plan, plain, gains, texts)
    return [
        ("precisions", said if texts else "no FP8 fits"),
        *([("take", advice)] if advice else []),
    ]


def _advice(plan: Plan, plain: Settled, gains: dict[str, float], texts: dict[str, str]) -> str:
    """Say what to take instead of the plan's precision, or of experts what to time, if anything.

    Args:
        plan: that was asked for.
        plain: the same in BF16.
        gains: times as fast as BF16 that each precision is, the fastest first.
        texts: each precision's gain as it is shown.
    """
    worth = [name for name, gain in gains.items() if round(gain, 2) >= WORTH]
    name, is_exact = plan.recipe.precision.name, plan.recipe.precision.is_exact
    if plan.recipe.model.shape.experts and worth and fit(memory_per_gpu(plain)) != "NO":
        tried = name if name in worth else worth[0]
        gain = gains[tried]
        return f"five steps of bf16 and of {tried}: {gain:.2f}x is an estimate of experts, so rough"
    gain = times(plan.settled, plain)
    why_not = _why_not(plan, gain)
    if EXACT in worth and name in worth[1:] and not is_exact:
        why_not = f"{name}'s {gain:.2f}x has mismatch, and is not the fastest"
    if not why_not:
        return ""
    best = f"{EXACT}, {gains[EXACT]:.2f}x without mismatch" if EXACT in worth else BASELINE
    more = ", ".join(texts[name] for name in worth if name != EXACT)
    risky = f"; by estimate, each at a risk of its own: {more}" if more else ""
    return f"precision={best}: {why_not}{risky}"


def _why_not(plan: Plan, gain: float) -> str:
    """Say why a plan's precision, if it is one that fits, is not worth its risk."""
    precision, is_worth = plan.recipe.precision, round(gain, 2) >= WORTH  # as it is shown
    fits = fit(memory_per_gpu(plan.settled)) != "NO"
    if is_worth or not precision.rollout.is_quantized or not fits:
        return ""
    return f"{precision.name}'s {gain:.2f}x is too little to risk accuracy for"


def against_bf16(plan: Plan, host: Host) -> str:
    """Compare a step with BF16's, in the layout that BF16 would get on the same GPUs."""
    if plan.recipe.precision.is_bf16:
        return "the baseline, BF16"
    plain = in_precision(BASELINE, plan, host)
    if not plain:
        return "BF16: refused"
    rough = ", roughly" if plan.recipe.model.shape.experts else ""
    return f"{times(plan.settled, plain):.2f} times as fast as BF16{rough}"


def if_shared(plan: Plan, host: Host) -> str:
    """Compare a step with one in which every GPU trains and samples, in the layout it would get."""
    cluster = replace(plan.recipe.cluster, rollout_gpus=0)
    grpo = replace(plan.recipe.grpo, max_sample_age=None)
    shared = _settled(replace(plan.recipe, cluster=cluster, grpo=grpo), host)
    asynchronous = plan.recipe.grpo.is_asynchronous
    typed = "cluster.rollout_gpus=0" + (", grpo.max_sample_age=null" if asynchronous else "")
    how = f"if every GPU did both by turns ({typed})"
    if shared is None:
        return f"refused {how}"
    rooms = [fit(memory_per_gpu(each)) for each in (plan.settled, shared)]
    gain = "" if "NO" in rooms else f", {times(shared, plan.settled):.2f} times as fast"
    return f"{step_seconds(shared).total:.0f} s{gain}, {how}; fits: {rooms[1]}"


def fit(memory: MemoryByPhase) -> str:
    """Return `yes`, `TIGHT` below the headroom that a layout should have, or `NO`."""
    free = memory.headroom(memory.worst)
    return "yes" if free >= HEADROOM else "TIGHT" if free >= 0 else "NO"


def times(settled: Settled, plain: Settled) -> float:
    """Return how many times as fast a step is as another."""
    return step_seconds(plain).total / step_seconds(settled).total


def in_precision(name: str, plan: Plan, host: Host) -> Settled | None:
    """Return the same run in a shipped precision, in that one's layout; None if it cannot run.

    The baseline has its fastest layout, whatever the size of its engines: a gain is over its best.
    """
    recipe = replace(plan.recipe, precision=_shipped()[name])
    found = None if mistakes(recipe) else _settled(recipe, host)  # LoRA excludes FP8 training
    if name != BASELINE or not found or recipe.model.layout != "auto":
        return found
    best = min(choose(found, host), key=lambda choice: choice.seconds.total)
    return replace(found, layout=best.layout)


def _settled(recipe: Recipe, host: Host) -> Settled | None:
    """Settle a recipe in the layout that it gets there; None if it is refused."""
    try:
        return plan_recipe(recipe, host).settled
    except PlanError:
        return None


@cache
def _shipped() -> dict[str, Precision]:
    """Return what to type after `precision=`, with what it chooses."""
    found = read_options("precision")
    return found | {EXACT: replace(found["fp8-e2e"], align="exact")}
