"""Ask vLLM's workers what the engine holds, and stop a run whose engine is not the one planned.

NeMo RL chooses the FP8 weights by substring and by module type, and reports nothing. A weight that
stays BF16, or a router gate in FP8, would only show as a slow or an unstable run. The functions
that run inside the workers are pickled by value, because this package need not be installed there.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fp8_nemo.glue.wire import fused_module, is_quantized_weight, named_shapes
from fp8_nemo.recipe.options.precision import FORMATS
from fp8_nemo.recipe.options.recipe import Recipe

MOST_WORKERS = 8
"""Of one engine."""
AFTER_AN_ERROR = 30.0
"""Seconds that an engine has to say what failed, as many as NeMo RL gives its workers to end."""
COULD_NOT = {
    "finish_generation": "go to sleep. `Memory usage increased after sleeping` in its error means "
    "that another process took memory of its GPU meanwhile: give the run GPUs of its own",
    "prepare_for_generation": "wake up, out of memory as a rule: lower model.memory.kv_cache_gib "
    "or model.memory.rollout_share",
}
"""NeMo RL's calls around a rollout, and what a colocated vLLM failed to do if one returns False."""


class EngineError(RuntimeError):
    """Say in one line why the engine is not the plan's, or can no longer be used."""


def engine_dtypes(generation: Any) -> dict[str, str]:
    """Return every parameter of the engine, `{vLLM's name: dtype}`, over all workers.

    Args:
        generation: NeMo RL's `VllmGeneration`; with its asynchronous engine, of our workers.
    """
    answers = _ask_workers(generation, _dtypes)
    return {name: dtype for answer in answers for name, dtype in answer.items()}


def refit_reports(generation: Any) -> list[dict[str, Any]]:
    """Return each vLLM worker's `RefitProof` of its last refit; empty without our receiver."""
    return _ask_workers(generation, _report)


def refit_problems(generation: Any) -> list[str]:
    """Return what failed in the last refit, each tensor once, over all of vLLM's workers.

    NeMo RL's generation actor prints a worker's error and returns False (seam engine-error), so
    the driver knows only that something failed. Engines that died or do not answer are left out: a
    tensor-parallel worker that fails leaves the others waiting for it.

    After an error vLLM may hand over a worker's older answer in place of the new one (seam
    owes-answers). One call more a worker is enough to take those away.
    """
    import ray

    found: dict[str, None] = {}
    for _ in range(MOST_WORKERS):
        asked = _asked(generation, _problems)
        ready, late = ray.wait(asked, num_returns=len(asked), timeout=AFTER_AN_ERROR)
        answers = [_texts(answer) for answer in ready]
        found |= dict.fromkeys(text for each in answers if each for text in each)
        if late:
            print(
                f"{len(late)} of {len(asked)} engines gave no answer within {AFTER_AN_ERROR:.0f} s"
            )
        if late or None not in answers:
            break
    return list(found)


def _texts(answer: Any) -> list[str] | None:
    """Return what an engine's workers say; None if it died, or if one answered an older call."""
    import ray

    with suppress(Exception):  # also of a worker that answers True
        return [text for each in ray.get(answer) for text in each]
    return None


def check_receivers(generation: Any) -> None:
    """Check that every one of vLLM's workers has our receiver.

    Raises:
        EngineError: some have not; it names their ranks and hosts.
    """
    if missing := list(filter(None, _ask_workers(generation, _stock_worker))):
        raise EngineError(
            f"vLLM worker {', '.join(missing)}: runs NeMo RL's own receiver, not ours, so it would "
            "quantize FP8 weights again; its environment does not show the entry point fp8_nemo of "
            "vllm.general_plugins: install fp8-nemo there, or add glue=stock (docs/install.md)"
        )


def check_layouts(generation: Any) -> None:
    """Check, before a step is paid for, that refits will find every tensor in vLLM's memory.

    Raises:
        EngineError: they would not; it names the first of those that lie otherwise.
    """
    asked = _ask_workers(generation, _layout_problems)
    if found := list(dict.fromkeys(problem for each in asked for problem in each)):
        raise EngineError(
            f"vLLM's memory is not laid out as our refits expect: {found[0]}"
            f"{f', and {len(found) - 1} more' if len(found) > 1 else ''}; use a NeMo RL that "
            "docs/nemo.md names, or glue.verify=off, which looks at none of it"
        )


def _ask_workers(generation: Any, question: Callable[[Any], Any]) -> list[Any]:
    """Call a function of this module in every one of vLLM's workers; return all answers.

    Args:
        generation: NeMo RL's `VllmGeneration`.
        question: called with vLLM's worker.
    """
    import ray

    return [answer for answers in ray.get(_asked(generation, question)) for answer in answers]


def _asked(generation: Any, question: Callable[[Any], Any]) -> list[Any]:
    """Return Ray's references to the answers, one reference per generation actor.

    Our asynchronous worker awaits its engine; any other actor is called with a function.
    """
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return [
        actor.fp8_nemo_ask.remote(question)
        if hasattr(actor, "fp8_nemo_ask")
        else actor.__ray_call__.remote(_ask_own_workers, question)
        for actor in generation.worker_group.workers
    ]


def _ask_own_workers(actor: Any, question: Callable[[Any], Any]) -> list[Any]:
    """Ask the workers of one generation actor, in that actor; return [] if it owns no engine."""
    llm = getattr(actor, "llm", None)
    return [] if llm is None else llm.collective_rpc(question)


def _dtypes(worker: Any) -> dict[str, str]:
    named = worker.model_runner.model.named_parameters()
    return {name: str(parameter.dtype) for name, parameter in named}


def _report(worker: Any) -> dict[str, Any]:
    return worker.fp8_nemo_report() if hasattr(worker, "fp8_nemo_report") else {}


def _problems(worker: Any) -> list[str]:
    return list(getattr(worker, "fp8_nemo_problems", ()))


def _layout_problems(worker: Any) -> list[str]:
    return worker.fp8_nemo_layout_problems()


def _stock_worker(worker: Any) -> str:
    """Return rank and host of a worker without our receiver; empty for one with it."""
    has_ours = hasattr(worker, "fp8_nemo_report")
    return "" if has_ours else f"{worker.rank} on {socket.gethostname()}"


def stop_if_it_cannot_sleep_or_wake(generation: type) -> None:
    """Make two methods of a class raise where they return False: NeMo RL's loop ignores False.

    vLLM raises if less memory is free after going to sleep than before, although it has given its
    own back. It does not note that it sleeps, so nobody wakes it, and the next refit writes to
    memory that is gone (seam sleeps-or-wakes; vLLM's gpu_worker.py and abstract.py).

    Args:
        generation: NeMo RL's `VllmGeneration`. The class, because `setup` calls one of the methods
            before it returns an object.
    """

    def checked(call: Callable[..., bool], what: str) -> Callable[..., bool]:
        """Wrap one of NeMo RL's calls so that its False is an error, which says what failed."""

        def call_or_stop(self: Any, *arguments: Any, **named: Any) -> bool:
            """Make the call; raise `EngineError` if it returns False."""
            if not call(self, *arguments, **named):
                failed = what if self.cfg["colocated"]["enabled"] else "forget its prefixes"
                raise EngineError(f"vLLM's error is in the log: it could not {failed}")
            return True

        return call_or_stop

    for name, what in COULD_NOT.items():
        setattr(generation, name, checked(getattr(generation, name), what))


def check_engine(dtypes: dict[str, str], recipe: Recipe) -> None:
    """Compare what the engine holds in FP8 or four bits, and the type of the rest, with the plan.

    Args:
        dtypes: as `engine_dtypes` returns them.
        recipe: of the run.

    Raises:
        EngineError: a weight is FP8 in only one of them, or FP16 beside BF16; it names the weight.
    """
    plain = f"torch.{recipe.precision.plain.dtype}"
    halves = {f"torch.{each.dtype}" for each in FORMATS.values() if each.bytes == 2}
    if other := [name for name, dtype in dtypes.items() if dtype in halves - {plain}]:
        raise EngineError(
            f"{min(other)}: {dtypes[min(other)]} in the engine, {plain} by the plan, as are "
            f"{len(other) - 1} more"
        )
    held = [name for name, dtype in dtypes.items() if "float8" in dtype]
    found = {engine_weight(name.removesuffix("_scale")) for name in held}  # NVFP4: its scales
    planned = planned_weights(recipe)
    for side, extra in (("the plan", planned - found), ("the engine", found - planned)):
        if extra:
            raise EngineError(
                f"{min(extra)}: FP8 by {side} alone, as are {len(extra) - 1} more; the engine has "
                f"{len(found)} FP8 weights, the plan {len(planned)}"
            )


def planned_weights(recipe: Recipe) -> set[str]:
    """Return the weights that the engine should hold in FP8, named as by `engine_weight`."""
    shape = recipe.model.shape
    return {
        engine_weight(name)
        for name, size in named_shapes(shape).items()
        if is_quantized_weight(name, size, recipe.precision, shape.layers)
    }


def engine_weight(name: str) -> str:
    """Return one name for a checkpoint's weight and for the fused weight that vLLM holds.

    `model.layers.0.mlp.experts.7.up_proj.weight`, and vLLM's slab of all experts, become
    `model.layers.0.mlp.experts.w13`.
    """
    stem, _, rest = name.partition(".experts.")
    if rest:
        second = "down_proj" in rest or "w2" in rest
        return f"{stem}.experts.{'w2' if second else 'w13'}"
    head, _, last = re.sub(r"\.weight$", "", name).rpartition(".")
    return f"{head}.{fused_module(last)[0]}"
