"""What vLLM's workers hold, read back from the engine itself: which weights are FP8.

Upstream decides by substring and by module type, silently; a plan that asked for FP8 and an engine
that does not hold it, or a router gate that it does, would show up as a slow or an unstable run.
The functions that run inside the workers travel by value: their environment need not have this
package.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from fp8_nemo.glue.wire import fused_module, is_fp8_weight, named_shapes
from fp8_nemo.recipe.options import Recipe

AFTER_AN_ERROR = 30.0
"""Seconds for the engine to say what failed, as many as NeMo RL gives its workers to end."""


COULD_NOT = {
    "finish_generation": "go to sleep. `Memory usage increased after sleeping` in its error means "
    "that another process took memory of its GPU meanwhile: give the run GPUs of its own",
    "prepare_for_generation": "wake up, out of memory as a rule: lower model.memory.kv_cache_gib "
    "or model.memory.rollout_share",
}
"""NeMo RL's calls around a rollout, and what a colocated vLLM could not do if one says False."""


class EngineError(RuntimeError):
    """The engine is not the plan's, or is no longer to be trusted; one line."""


def engine_dtypes(generation: Any) -> dict[str, str]:
    """Every parameter of the engine by vLLM's name with its dtype, over all workers.

    Args:
        generation: NeMo RL's `VllmGeneration`, its synchronous engine.
    """
    answers = _ask(generation, _dtypes_of_actor)
    return {name: dtype for answer in answers for each in answer for name, dtype in each.items()}


def refit_reports(generation: Any) -> list[dict[str, Any]]:
    """Each vLLM worker's `RefitProof` of its last refit, as a dict; empty for one not ours."""
    return [answer for actor in _ask(generation, _reports_of_actor) for answer in actor]


def refit_problems(generation: Any) -> list[str]:
    """What failed in the last refit, each tensor once, over all of vLLM's workers.

    NeMo RL's generation actor prints a worker's error and answers False (seam engine-error), so
    the loop knows only that something failed. Engines that do not answer are left out, dead ones
    too: a worker that fell in a step of tensor parallel leaves the others waiting for it.
    """
    import ray

    asked = _asked(generation, _problems_of_actor)
    ready, late = ray.wait(asked, num_returns=len(asked), timeout=AFTER_AN_ERROR)
    if late:
        print(f"{len(late)} of {len(asked)} engines gave no answer within {AFTER_AN_ERROR:.0f} s")
    found: dict[str, None] = {}
    for answer in ready:
        with suppress(Exception):  # of one that died; the others may know why
            found |= dict.fromkeys(text for each in ray.get(answer) for text in each)
    return list(found)


def check_receivers(generation: Any) -> None:
    """Whether our receiver is in every one of vLLM's workers.

    Raises:
        EngineError: naming those without it.
    """
    missing = [name for actor in _ask(generation, _stock_workers_of_actor) for name in actor]
    if missing:
        raise EngineError(
            f"vLLM worker {', '.join(missing)}: runs NeMo RL's own receiver, not ours, so it would "
            "quantize FP8 weights again; its environment does not show the entry point fp8_nemo of "
            "vllm.general_plugins: install fp8-nemo there, or add glue=stock (docs/install.md)"
        )


def stop_if_it_cannot_sleep_or_wake(generation: type) -> None:
    """Let what NeMo RL prints and answers False to end the run: its loop drops the answer.

    vLLM has given its memory back when it finds less of it free than before and raises; it does not
    note that it sleeps, so it is never woken, and the next refit writes to memory that is gone
    (seam sleeps-or-wakes; vLLM's gpu_worker.py and abstract.py).

    Args:
        generation: NeMo RL's class `VllmGeneration`, two of whose methods are replaced: `setup`
            calls one of them before it gives an object.
    """

    def heeded(call: Callable[..., bool], what: str) -> Callable[..., bool]:
        """The method, with its False an error."""

        def call_or_stop(self: Any, *arguments: Any, **named: Any) -> bool:
            """NeMo RL's, or the end of the run."""
            if not call(self, *arguments, **named):
                failed = what if self.cfg["colocated"]["enabled"] else "forget its prefixes"
                raise EngineError(f"vLLM's error is in the log: it could not {failed}")
            return True

        return call_or_stop

    for name, what in COULD_NOT.items():
        setattr(generation, name, heeded(getattr(generation, name), what))


def check_engine(dtypes: dict[str, str], recipe: Recipe) -> None:
    """Compare the engine's FP8 weights with the plan's.

    Raises:
        EngineError: naming a weight that is FP8 on one side alone.
    """
    found = {engine_weight(name) for name, dtype in dtypes.items() if "float8" in dtype}
    planned = planned_weights(recipe)
    for side, extra in (("the plan", planned - found), ("the engine", found - planned)):
        if extra:
            raise EngineError(
                f"{min(extra)}: FP8 by {side} alone, as are {len(extra) - 1} more; the engine has "
                f"{len(found)} FP8 weights, the plan {len(planned)}"
            )


def planned_weights(recipe: Recipe) -> set[str]:
    """Names, as `engine_weight` gives them, of what the engine should hold in FP8."""
    shape = recipe.model.shape
    return {
        engine_weight(name)
        for name, size in named_shapes(shape).items()
        if is_fp8_weight(name, size, recipe.precision, shape.layers)
    }


def engine_weight(name: str) -> str:
    """One spelling for a weight of a checkpoint and the fused one that vLLM holds it in.

    `model.layers.0.mlp.experts.7.up_proj.weight`, and vLLM's slab of it, become
    `model.layers.0.mlp.experts.w13`.
    """
    stem, _, rest = name.partition(".experts.")
    if rest:
        second = "down_proj" in rest or "w2" in rest
        return f"{stem}.experts.{'w2' if second else 'w13'}"
    module = re.sub(r"\.weight$", "", name)
    head, _, last = module.rpartition(".")
    return f"{head}.{fused_module(last)[0]}"


def _dtypes_of_actor(actor: Any) -> list[dict[str, str]]:
    """In NeMo RL's generation actor: ask each of vLLM's workers."""
    llm = getattr(actor, "llm", None)
    return llm.collective_rpc(_dtypes_of_worker) if llm is not None else []


def _dtypes_of_worker(worker: Any) -> dict[str, str]:
    """In a worker of vLLM."""
    named: Iterable[tuple[str, Any]] = worker.model_runner.model.named_parameters()
    return {name: str(parameter.dtype) for name, parameter in named}


def _ask(generation: Any, question: Callable[[Any], list[Any]]) -> list[list[Any]]:
    """Answers of all generation actors, which ask their vLLM's workers."""
    import ray

    return ray.get(_asked(generation, question))


def _asked(generation: Any, question: Callable[[Any], list[Any]]) -> list[Any]:
    """Ray's references to the answers, one an actor."""
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    actors = generation.worker_group.workers
    return [actor.__ray_call__.remote(question) for actor in actors]


def _reports_of_actor(actor: Any) -> list[dict[str, Any]]:
    llm = getattr(actor, "llm", None)
    return llm.collective_rpc(_report_of_worker) if llm is not None else []


def _report_of_worker(worker: Any) -> dict[str, Any]:
    report = getattr(worker, "fp8_nemo_report", None)
    return report() if report is not None else {}


def _problems_of_actor(actor: Any) -> list[list[str]]:
    llm = getattr(actor, "llm", None)
    return llm.collective_rpc(_problems_of_worker) if llm is not None else []


def _problems_of_worker(worker: Any) -> list[str]:
    return list(getattr(worker, "fp8_nemo_problems", ()))


def _stock_workers_of_actor(actor: Any) -> list[str]:
    llm = getattr(actor, "llm", None)
    return [n for n in llm.collective_rpc(_stock_worker) if n] if llm is not None else []


def _stock_worker(worker: Any) -> str:
    """Rank and host of a worker without our receiver; empty for one with it."""
    import socket

    if hasattr(worker, "fp8_nemo_report"):
        return ""
    return f"{worker.rank} on {socket.gethostname()}"
