"""Recipe -> Plan: everything that one run will do, decided and frozen before anything starts.

A Plan holds the recipe with its open numbers filled in (but NeMo RL's `max_new_tokens`), the
backend that was chosen, what NeMo RL is handed, and notes on options without effect and on what the
host cannot do as asked. It is JSON in `plan.json`; the run reads that file and never composes
again. The name of its run directory carries a hash over backend and recipe, less what `Plan.hash6`
leaves out, so the same line finds the same directory, also with more steps.

`null` in `grpo` inherits the base configuration: the model's base YAML in NeMo RL, and on the local
backend `LOCAL_BASE`, the values of its `grpo_math_1B.yaml` (main 7ea279a).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from fp8_nemo.glue.wire import BLOCK
from fp8_nemo.nemo_config.host import MAIN, Host, gpus, host_mistakes
from fp8_nemo.nemo_config.keys import VLLM, leaves
from fp8_nemo.nemo_config.overrides import (
    PROMPT,
    PROMPT_ROOM,
    VALIDATED,
    VALIDATION_BATCH,
    environment_variables,
    micro_batch_tokens,
    native_correction,
    nemo_mistakes,
    overrides,
)
from fp8_nemo.plan.memory import HEADROOM, kv_cache_tokens, memory_per_gpu
from fp8_nemo.recipe.options import (
    SBATCH_KEYS,
    TASKS,
    Cluster,
    Data,
    Mistake,
    Recalibrate,
    Recipe,
    batch_mistakes,
    escape_interpolation,
    mistakes,
)
from fp8_nemo.recipe.problems import longest_answer

LOCAL_BASE: dict[str, Any] = {
    "prompts_per_step": 32,
    "generations_per_prompt": 16,
    "max_new_tokens": 512,
    "learning_rate": 5.0e-6,
    "updates_per_step": 1,
    "kl_penalty": 0.01,
}
SHARE = f"{VLLM}.gpu_memory_utilization"
STOCK_RECALIBRATE = Recalibrate(source="forward", margin=1.05, first_margin=1.05, history=1)
"""NeMo RL's own (conf/glue/stock.yaml)."""
NOT_IN_HASH = ("cluster", "logging", "outputs")
HELD_AGAINST = ("measurement", "max_reject")
"""Of a correction: a plan is held against them, no step is."""


class PlanError(ValueError):
    """A recipe that cannot become a run; one line per mistake."""

    def __init__(self, found: Iterable[Mistake]) -> None:
        self.mistakes = list(found)
        super().__init__("\n".join(map(str, self.mistakes)))


@dataclass(frozen=True)
class NemoPlan:
    """What a run hands to NeMo RL: `NemoPlan("main 7ea279a", "examples/...yaml", {...}, {...})`."""

    host: str
    """Which NeMo RL the plan was made for."""
    base_config: str
    """Base YAML, relative to the checkout."""
    overrides: dict[str, Any]
    """Dotted keys and their values, but those that hold folders."""
    environment: dict[str, str]


@dataclass(frozen=True)
class Plan:
    """Frozen description of one run: `Plan("tiny-llama/fp8-linear-tis", "local", recipe)`."""

    cell: str
    """MODEL/PRECISION-CORRECTION."""
    backend: str
    recipe: Recipe
    """With every number of the backend filled in."""
    notes: tuple[str, ...] = ()
    """Options that have no effect in this cell, and what the host cannot do as asked."""
    nemo: NemoPlan | None = None
    """For `backend=nemo`."""

    @property
    def hash6(self) -> str:
        """Six hex digits over the backend and most of the recipe.

        Left out are keys that are null, cluster, logging, outputs, `grpo.steps`,
        `grpo.stop_when_unstable`, `correction.measurement` and `correction.max_reject`.
        """
        content = self.to_json()["recipe"]
        for group in NOT_IN_HASH:
            del content[group]
        for key in ("steps", "stop_when_unstable"):
            del content["grpo"][key]
        for key in HELD_AGAINST:
            del content["correction"][key]
        text = json.dumps([self.backend, _given(content)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:6]

    @property
    def run_name(self) -> str:
        """Path of the run directory below `outputs`: MODEL/PRECISION-CORRECTION/sSEED-HASH6."""
        return f"{self.cell}/s{self.recipe.seed}-{self.hash6}"

    def to_json(self) -> dict[str, Any]:
        """Plain data, the inverse of `plan_from_json`."""
        return dataclasses.asdict(self)


def _given(content: dict[str, Any]) -> dict[str, Any]:
    """The keys that are not null: a key that a later version adds changes no run's name."""
    return {
        key: _given(value) if isinstance(value, dict) else value
        for key, value in content.items()
        if value is not None
    }


def plan_from_json(content: dict[str, Any]) -> Plan:
    """Read back what `Plan.to_json` wrote.

    Raises:
        KeyError, TypeError, omegaconf.errors.OmegaConfBaseException: the content is not a plan.
    """
    return Plan(
        content["cell"],
        content["backend"],
        recipe_from_json(content["recipe"]),
        tuple(content["notes"]),
        NemoPlan(**content["nemo"]) if content["nemo"] else None,
    )


def recipe_from_json(content: dict[str, Any]) -> Recipe:
    """A recipe from its `dataclasses.asdict`; `${` in it is a text, resolved once before.

    Raises:
        TypeError, omegaconf.errors.OmegaConfBaseException: the content is not a recipe.
    """
    given = OmegaConf.merge(OmegaConf.structured(Recipe), escape_interpolation(content))
    recipe = OmegaConf.to_object(given)
    if not isinstance(recipe, Recipe):
        raise TypeError("no recipe")
    return recipe


def backend_of(recipe: Recipe) -> str:
    """`local` or `nemo`: the model's, unless the recipe names one."""
    return recipe.model.backend if recipe.backend == "auto" else recipe.backend


def plan_recipe(recipe: Recipe, host: Host = MAIN) -> Plan:
    """Decide everything that a run of this recipe does.

    Args:
        recipe: a valid recipe.
        host: the NeMo RL that it would run in; not looked at by the local backend.

    Raises:
        PlanError: the recipe, or the backend it asks for, forbids itself.
        HostError: the host has no such base YAML.
    """
    if found := [*mistakes(recipe), *_expert_mistakes(recipe)]:
        raise PlanError(found)
    cell = f"{recipe.model.name}/{recipe.precision.name}-{recipe.correction.name}"
    if backend_of(recipe) == "nemo":
        return _nemo_plan(cell, recipe, host)
    return _local_plan(cell, recipe)


def _local_plan(cell: str, recipe: Recipe) -> Plan:
    recipe = _with_local_base(recipe)
    if found := [*batch_mistakes(recipe.grpo), *_local_mistakes(recipe)]:
        raise PlanError(found)
    return Plan(cell, "local", recipe, notes=tuple(_local_notes(recipe)))


def _nemo_plan(cell: str, recipe: Recipe, host: Host) -> Plan:
    if not recipe.model.base_config:
        text = "backend=nemo starts from a YAML of NeMo RL's"
        raise PlanError([Mistake("model.base_config", None, text)])
    recipe = _with_nemo_base(recipe, host)
    if found := [
        *batch_mistakes(recipe.grpo),
        *_container_mistakes(recipe.cluster),
        *host_mistakes(recipe, host),
        *nemo_mistakes(recipe, host),
    ]:
        raise PlanError(found)
    written = overrides(recipe, host)
    if found := [*_small_cache(recipe, written[f"{VLLM}.max_model_len"]), *_no_validation(written)]:
        raise PlanError(found)
    recipe = _with_share(recipe, written[SHARE])
    base, environment = recipe.model.base_config or "", environment_variables(recipe)
    return Plan(
        cell,
        "nemo",
        recipe,
        notes=(*_nemo_notes(recipe), *_tight_memory(recipe, micro_batch_tokens(written))),
        nemo=NemoPlan(host.name, base, written, environment),
    )


def _with_share(recipe: Recipe, share: float) -> Recipe:
    """The recipe as its own key under `nemo` has it, for the estimate and the reader."""
    memory = dataclasses.replace(recipe.model.memory, rollout_share=share)
    return dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, memory=memory))


def _with_nemo_base(recipe: Recipe, host: Host) -> Recipe:
    """The numbers that the recipe leaves to the base YAML, filled in; but `max_new_tokens`.

    A base that is given fewer or more sequences keeps its number of updates per step.
    """
    grpo, base = recipe.grpo, host.base(recipe.model.base_config or "")
    sequences = base.prompts_per_step * base.generations_per_prompt
    inherited = {
        "prompts_per_step": base.prompts_per_step,
        "generations_per_prompt": base.generations_per_prompt,
        "learning_rate": base.learning_rate,
        "updates_per_step": max(1, sequences // base.sequences_per_update),
        "kl_penalty": base.kl_penalty,
    }
    missing = {key: value for key, value in inherited.items() if getattr(grpo, key) is None}
    return dataclasses.replace(
        recipe, grpo=dataclasses.replace(grpo, **missing), data=_with_difficulty(recipe.data)
    )


def _expert_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    shape = recipe.model.shape
    if shape.experts and shape.expert_ffn % BLOCK and recipe.precision.rollout_linear == "fp8":
        yield Mistake(
            "model.shape.expert_ffn",
            shape.expert_ffn,
            f"must be a multiple of {BLOCK} with FP8 linears: gate and up lie in one slab, whose "
            "blocks would span both",
            "choose precision=bf16, or another width",
        )


def _container_mistakes(cluster: Cluster) -> Iterator[Mistake]:
    if cluster.kind == "slurm" and cluster.interpreter == "container" and not cluster.container:
        yield Mistake(
            "cluster.container",
            None,
            "cluster.interpreter=container needs NeMo RL's image",
            "set cluster.container=IMAGE, or cluster.interpreter=system",
        )


def _nemo_notes(recipe: Recipe) -> Iterator[str]:
    precision, recalibrate = recipe.precision, recipe.glue.recalibrate
    fp8_kv, watches = precision.rollout_kv == "fp8", recalibrate.source == "logprob"
    if fp8_kv and not watches and recipe.grpo.validate_first:
        yield (
            "grpo.validate_first: no effect, NeMo RL would validate, and sample the first step, "
            "with KV scales of 1.0 (grpo.py:2744); glue.recalibrate.source=logprob has real ones"
        )
    usual = (STOCK_RECALIBRATE.history, STOCK_RECALIBRATE.first_margin)
    if fp8_kv and not watches and (recalibrate.history, recalibrate.first_margin) != usual:
        yield (
            "glue.recalibrate.history, first_margin: no effect with source=forward, NeMo RL "
            "measures with the weights that will sample"
        )
    runner_v1 = recipe.model.shape.experts or recipe.model.parallel.rollout_tensor > 1
    if fp8_kv and runner_v1 and not (recipe.glue.has_receiver or watches):
        yield (
            "glue=stock: vLLM 0.25.1 puts K and V scales of a mixture of experts, and of an engine "
            "of several GPUs, to 1.0 when its cache wakes up after a refit "
            "(gpu_model_runner.py:960); glue=ours keeps them"
        )
    if not recipe.data.is_made and recipe.grpo.max_new_tokens:
        room = leaves(recipe.nemo).get(PROMPT, PROMPT_ROOM)
        yield (
            f"nemo.{PROMPT}: NeMo RL cuts prompts of {room} tokens and more to 4, learns nothing "
            f"of them and marks them wrong; +nemo.{PROMPT}=N makes room for longer ones"
        )
    if SHARE in leaves(recipe.nemo) and recipe.model.memory.kv_cache_gib is not None:
        yield f"nemo.{SHARE}: no effect while model.memory.kv_cache_gib bounds the cache"
    if recipe.correction.name != "none" and native_correction(recipe.correction) is None:
        yield f"correction: NeMo RL has no {recipe.correction.name}, it multiplies the advantages"
    yield from _without_effect(recipe)


def _without_effect(recipe: Recipe) -> Iterator[str]:
    """Options that were set and do nothing on either backend: no mistakes, or no sweep composes."""
    precision, correction, data = recipe.precision, recipe.correction, recipe.data
    bf16 = precision.rollout_linear == "bf16"
    recalibrates = recipe.glue.recalibrate not in (Recalibrate(), STOCK_RECALIBRATE)
    rejects = correction.mask != "none" or correction.veto is not None
    yield from _notes({
        "glue.recalibrate": (
            precision.rollout_kv == "bf16" and recalibrates, "the KV cache is BF16"
        ),
        "precision.scales": (bf16 and precision.scales != "fp32", "nothing is quantized"),
        "precision.first_layers_bf16": (bf16 and precision.first_layers_bf16, "all are BF16"),
        "precision.last_layers_bf16": (bf16 and precision.last_layers_bf16, "all are BF16"),
        "correction.renormalize_denominator": (
            correction.renormalize_denominator and not rejects, "nothing is rejected"
        ),
        "data.path": (data.name != "jsonl" and data.path, f"data={data.name} reads no file"),
        "data.difficulty": (not data.is_made and data.difficulty, "problems are read"),
    })  # fmt: skip
    # No mistake: `cluster=here` may end a job's line on purpose.
    here = f"cluster={recipe.cluster.name} is this machine; cluster=slurm, or a site's own file, "
    for key in SBATCH_KEYS if recipe.cluster.kind == "here" else ():
        if getattr(recipe.cluster, key):
            yield f"cluster.{key}: no effect, {here}queues it"


def _notes(without_effect: Mapping[str, tuple[Any, str]]) -> Iterator[str]:
    for key, (is_set, reason) in without_effect.items():
        if is_set:
            yield f"{key}: no effect, {reason}"


def _tight_memory(recipe: Recipe, tokens: int) -> Iterator[str]:
    """A plan that the estimate sees run out of memory is not refused: it is an estimate."""
    memory = memory_per_gpu(recipe, gpus(recipe), tokens)
    if memory.headroom(memory.worst) < HEADROOM:
        yield (
            f"memory: {memory.worst} leaves {memory.headroom(memory.worst):.0%} of an "
            f"{recipe.cluster.gpu}'s {memory.gpu_gib} GiB free, by estimate; "
            f"{memory.text(memory.worst)}; {_room(recipe, memory.worst)}"
        )


def _room(recipe: Recipe, phase: str) -> str:
    """What would make room in a phase: shorter sequences only where they do."""
    if phase == "rollout":
        bounded = recipe.model.memory.kv_cache_gib is not None
        lower = f"model.memory.{'kv_cache_gib' if bounded else 'rollout_share'}"
        return f"lower {lower}, or raise model.parallel.rollout_tensor"
    if memory_per_gpu(recipe, gpus(recipe), tokens=1).headroom(phase) < HEADROOM:
        return "use more GPUs: sequences of one token would not fit either"
    if recipe.model.memory.recompute:
        return "use more GPUs, or lower grpo.max_new_tokens"
    return "use more GPUs, or model.memory.recompute=true"


def _small_cache(recipe: Recipe, longest: int) -> Iterator[Mistake]:
    """An engine whose cache holds less than one sequence does not start (vLLM, max_model_len)."""
    gib = recipe.model.memory.kv_cache_gib
    tokens = kv_cache_tokens(recipe, memory_per_gpu(recipe, gpus(recipe), longest))
    if gib is not None and tokens < longest:
        yield Mistake(
            "model.memory.kv_cache_gib",
            gib,
            f"holds {tokens:,} tokens, and a sequence may have {longest:,}: no engine starts",
            f"raise it, or lower grpo.max_new_tokens or nemo.{PROMPT}",
        )


def _no_validation(written: Mapping[str, Any]) -> Iterator[Mistake]:
    """NeMo RL validates whole batches alone, and calls none of them an accuracy of 0.0."""
    problems, batch = written[VALIDATED], written[VALIDATION_BATCH]
    if not 0 < batch <= problems:
        yield Mistake(
            f"nemo.{VALIDATION_BATCH}",
            batch,
            f"must be from 1 to grpo.max_val_samples={problems}: NeMo RL validates whole batches "
            "alone (grpo.py:3853), and without one reports an accuracy of 0",
        )


def _with_local_base(recipe: Recipe) -> Recipe:
    inherited = {
        key: value for key, value in LOCAL_BASE.items() if getattr(recipe.grpo, key) is None
    }
    return dataclasses.replace(
        recipe,
        grpo=dataclasses.replace(recipe.grpo, **inherited),
        data=_with_difficulty(recipe.data),
    )


def _with_difficulty(data: Data) -> Data:
    if not data.is_made or data.difficulty is not None:
        return data
    return dataclasses.replace(data, difficulty=TASKS[data.name].usual)


def _local_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    if recipe.model.path is None and not recipe.model.name.startswith("tiny-"):
        yield Mistake(
            "model.path",
            None,
            f"backend=local reads {recipe.model.name} from a folder",
            "give model.path=FOLDER, or run it with backend=nemo",
        )
    if recipe.data.is_on_hub:
        yield Mistake(
            "data",
            recipe.data.name,
            f"backend=local reads {', '.join(TASKS)} or jsonl",
            "choose data=arithmetic, or data=jsonl data.path=FOLDER",
        )
    for key in recipe.nemo:
        yield Mistake(
            f"nemo.{key}",
            recipe.nemo[key],
            "backend=local has no NeMo RL configuration",
            "drop it, or run with backend=nemo",
        )


def _local_notes(recipe: Recipe) -> Iterator[str]:
    usual, glue = Recipe(), recipe.glue
    yield from _notes({
        "logging": (recipe.logging != usual.logging, "the local backend writes metrics.jsonl"),
        "glue.quantize": (glue.quantize != "fused", "the local backend has one quantizer"),
        "glue.transfer": (glue.transfer != "fp8", "the local backend sends what it holds"),
        "model.parallel": (recipe.model.parallel != usual.model.parallel, "one device is used"),
        "cluster.nodes": (recipe.cluster.nodes > 1, "the local backend runs on the first node"),
    })  # fmt: skip
    limit = recipe.grpo.max_new_tokens or 0
    if recipe.data.is_made and limit < (needed := longest_answer(recipe.data)):
        yield (
            f"grpo.max_new_tokens: {limit} may cut right answers off, {recipe.data.name} has some "
            f"of {needed} characters, each a token of the models made here; raise it (grpo=small "
            "has 400), or lower data.difficulty"
        )
    yield from _without_effect(recipe)
