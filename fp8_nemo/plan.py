"""Recipe -> Plan: everything that one run will do, decided and frozen before anything starts.

A Plan holds the recipe with every open number filled in, the backend that was chosen, what this
checkout cannot do yet, and notes on options without effect. It is JSON in `plan.json`; the run
reads that file and never composes again. The name of its run directory carries a hash over all of
it but steps, cluster, logging and outputs, so the same line finds the same directory, also with
more steps.

`null` in `grpo` inherits the base configuration: NeMo RL's base YAML there, and `LOCAL_BASE`, the
values of its `grpo_math_1B.yaml` (main 7ea279a), on the local backend.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from fp8_nemo.estimate import estimate
from fp8_nemo.schema import Mistake, Recipe, as_typed, mistakes

LOCAL_BASE: dict[str, Any] = {
    "prompts_per_step": 32,
    "generations_per_prompt": 16,
    "max_new_tokens": 512,
    "learning_rate": 5.0e-6,
    "updates_per_step": 1,
    "kl_penalty": 0.01,
}
DIFFICULTY = 2
NOT_IN_HASH = ("cluster", "logging", "outputs")


class PlanError(ValueError):
    """A recipe that cannot become a run; one line per mistake."""

    def __init__(self, found: Iterable[Mistake]) -> None:
        self.mistakes = list(found)
        super().__init__("\n".join(map(str, self.mistakes)))


@dataclass(frozen=True)
class Plan:
    """Frozen description of one run: `Plan("tiny-llama/fp8-linear-tis", "local", recipe)`."""

    cell: str
    """MODEL/PRECISION-CORRECTION."""
    backend: str
    recipe: Recipe
    """With every number of the backend filled in."""
    needs: tuple[str, ...] = ()
    """What a run of this plan still lacks; empty if it can start."""
    notes: tuple[str, ...] = ()
    """Options that have no effect in this cell."""

    @property
    def hash6(self) -> str:
        """Six hex digits over the plan less steps, cluster, logging and outputs."""
        content = self.to_json()["recipe"]
        for group in NOT_IN_HASH:
            del content[group]
        del content["grpo"]["steps"]
        text = json.dumps([self.backend, content], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:6]

    @property
    def run_name(self) -> str:
        """Path of the run directory below `outputs`: MODEL/PRECISION-CORRECTION/sSEED-HASH6."""
        return f"{self.cell}/s{self.recipe.seed}-{self.hash6}"

    def to_json(self) -> dict[str, Any]:
        """Plain data, the inverse of `plan_from_json`."""
        return dataclasses.asdict(self)


def plan_from_json(content: dict[str, Any]) -> Plan:
    """Read back what `Plan.to_json` wrote.

    Raises:
        KeyError, TypeError, omegaconf.errors.OmegaConfBaseException: the content is not a plan.
    """
    recipe = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Recipe), content["recipe"]))
    if not isinstance(recipe, Recipe):
        raise TypeError("no recipe")
    return Plan(
        content["cell"],
        content["backend"],
        recipe,
        tuple(content["needs"]),
        tuple(content["notes"]),
    )


def plan_recipe(recipe: Recipe, host_keys: Collection[str] | None = None) -> Plan:
    """Decide everything that a run of this recipe does.

    Args:
        recipe: a valid recipe.
        host_keys: the dotted keys of NeMo RL's base YAML, that `nemo` will be held against; not
            looked at yet.

    Raises:
        PlanError: the recipe, or the backend it asks for, forbids itself.
    """
    backend = recipe.model.backend if recipe.backend == "auto" else recipe.backend
    found = [*mistakes(recipe), *(_local_mistakes(recipe) if backend == "local" else ())]
    if found:
        raise PlanError(found)
    cell = f"{recipe.model.name}/{recipe.precision.name}-{recipe.correction.name}"
    notes = tuple(_local_notes(recipe)) if backend == "local" else ()
    recipe = _with_local_base(recipe) if backend == "local" else recipe
    return Plan(cell, backend, recipe, needs=tuple(_needs(recipe, backend)), notes=notes)


def describe(plan: Plan) -> dict[str, str]:
    """What a plan says to people, line by line; exact counts, no speeds."""
    recipe, counts = plan.recipe, estimate(plan.recipe.model.shape, plan.recipe.precision)
    precision = recipe.precision
    return {
        "backend": f"{plan.backend}, cluster {recipe.cluster.name}",
        "rollout": f"linear {precision.rollout_linear}, attention and KV {precision.rollout_kv}",
        "train": f"linear {precision.train_linear}",
        "weights": f"{counts.parameters:,} parameters in {counts.fp8_weights:,} FP8 and "
        f"{counts.bf16_weights:,} BF16 tensors",
        "refit": f"{_size(counts.refit_bytes)}, in BF16 {_size(counts.refit_bytes_bf16)}; "
        f"verify {recipe.glue.verify}",
        "KV cache": f"{counts.kv_bytes_per_token:,} bytes per token",
        "correction": _as_typed(recipe.correction),
        "grpo": _as_typed(recipe.grpo),
        "data": _as_typed(recipe.data),
    }


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


def _needs(recipe: Recipe, backend: str) -> Iterator[str]:
    if backend == "nemo":
        yield "backend=nemo, which is not here yet"
    if recipe.cluster.kind == "slurm":
        yield "cluster.kind=slurm, which is not here yet"


def _with_local_base(recipe: Recipe) -> Recipe:
    inherited = {
        key: value for key, value in LOCAL_BASE.items() if getattr(recipe.grpo, key) is None
    }
    difficulty = recipe.data.difficulty
    if recipe.data.name == "arithmetic" and difficulty is None:
        difficulty = DIFFICULTY
    return dataclasses.replace(
        recipe,
        grpo=dataclasses.replace(recipe.grpo, **inherited),
        data=dataclasses.replace(recipe.data, difficulty=difficulty),
    )


def _local_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    if recipe.model.path is None and not recipe.model.name.startswith("tiny-"):
        yield Mistake(
            "model.path",
            None,
            f"backend=local reads {recipe.model.name} from a folder",
            "give model.path=FOLDER, or run it with backend=nemo",
        )
    if recipe.data.name not in ("arithmetic", "jsonl"):
        yield Mistake(
            "data",
            recipe.data.name,
            "backend=local reads arithmetic or jsonl",
            "choose data=arithmetic, or data=jsonl data.path=FOLDER",
        )
    sequences = (recipe.grpo.prompts_per_step or LOCAL_BASE["prompts_per_step"]) * (
        recipe.grpo.generations_per_prompt or LOCAL_BASE["generations_per_prompt"]
    )
    updates = recipe.grpo.updates_per_step or LOCAL_BASE["updates_per_step"]
    if sequences % updates:
        yield Mistake(
            "grpo.updates_per_step", updates, f"must divide the step's {sequences} sequences"
        )
    for key in recipe.nemo:
        yield Mistake(
            f"nemo.{key}",
            recipe.nemo[key],
            "backend=local has no NeMo RL configuration",
            "drop it, or run with backend=nemo",
        )


def _local_notes(recipe: Recipe) -> Iterator[str]:
    """Options that were set and have no effect in this cell: no mistakes, or no sweep composes."""
    precision, correction, usual = recipe.precision, recipe.correction, Recipe()
    bf16, bf16_kv = precision.rollout_linear == "bf16", precision.rollout_kv == "bf16"
    rejects = correction.mask != "none" or correction.veto is not None
    without_effect = {
        "logging": (recipe.logging != usual.logging, "the local backend writes metrics.jsonl"),
        "glue.quantize": (recipe.glue.quantize != "fused", "the local backend has one quantizer"),
        "glue.transfer": (recipe.glue.transfer != "fp8", "the local backend sends what it holds"),
        "glue.recalibrate": (
            bf16_kv and recipe.glue.recalibrate != usual.glue.recalibrate, "the KV cache is BF16"
        ),
        "model.parallel": (recipe.model.parallel != usual.model.parallel, "one device is used"),
        "precision.scales": (bf16 and precision.scales != "fp32", "nothing is quantized"),
        "precision.first_layers_bf16": (bf16 and precision.first_layers_bf16, "all are BF16"),
        "precision.last_layers_bf16": (bf16 and precision.last_layers_bf16, "all are BF16"),
        "correction.renormalize_denominator": (
            correction.renormalize_denominator and not rejects, "nothing is rejected"
        ),
        "data.path": (recipe.data.name == "arithmetic" and recipe.data.path, "problems are made"),
        "data.difficulty": (
            recipe.data.name == "jsonl" and recipe.data.difficulty, "problems are read"
        ),
    }  # fmt: skip
    for key, (is_set, reason) in without_effect.items():
        if is_set:
            yield f"{key}: no effect, {reason}"
