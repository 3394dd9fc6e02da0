"""Plan a run: decide and freeze everything that it will do before anything starts.

    settle -> write NeMo RL's keys -> limits of the host, the user's own keys -> sizes -> notes

A Plan holds the recipe with its open numbers filled in, the backend that was chosen, what NeMo RL
is handed, and notes on options without effect and on what the host cannot do as asked. It is JSON
in `plan.json`; the run reads that file and never composes again. The name of its run directory
carries a hash over backend and recipe, less what `Plan.hash6` leaves out, so the same line finds
the same directory, also with more steps.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from fp8_nemo.nemo_config.host import MAIN, Host, base_of
from fp8_nemo.nemo_config.limits import format_mistakes, host_mistakes
from fp8_nemo.nemo_config.overrides import VALIDATION_BATCH, environment_variables, keys_of
from fp8_nemo.nemo_config.own.alignment import alignment_notes
from fp8_nemo.nemo_config.seams import SEAMS
from fp8_nemo.nemo_config.typed_keys import own_key_mistakes
from fp8_nemo.plan.layout import choose
from fp8_nemo.plan.memory import MemoryByPhase, kv_cache_tokens, memory_per_gpu
from fp8_nemo.plan.model import adapters
from fp8_nemo.plan.notes import local_notes, nemo_notes
from fp8_nemo.recipe.mistake import Mistake
from fp8_nemo.recipe.options.cluster import Cluster
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.options.training import TASKS, Algorithm, Lora, Noise, Replay
from fp8_nemo.recipe.plain import from_plain, leaves
from fp8_nemo.recipe.settled import LOCAL_BASE, PROMPT, VALIDATED, Layout, Settled, settle

NOT_IN_HASH = ("cluster", "logging", "outputs")
ONLY_CHECKED = ("measurement", "max_reject")
"""Correction keys that only a plan checks: they change no step, so the hash leaves them out."""
RETIRED = {"cluster": ("launcher",)}
"""Keys that earlier versions wrote into plan.json, which have no meaning now."""
RENAMED = {("glue", "verify"): {"ledger": "bytes", "full": "bytes"}}
"""Values that earlier versions wrote into plan.json, to the values that such a run resumes with."""
LATER_GROUPS = {
    "algorithm": asdict(Algorithm()),
    "replay": asdict(Replay()),
    "lora": asdict(Lora()),
    "noise": asdict(Noise()),
}
"""Groups that earlier versions lacked, at the values that such a run had."""
LATER_KEYS = {
    ("precision", "kv_scales"): "layer",
    ("precision", "align"): "none",
    ("glue", "decode"): "fa3",
}
"""Keys that earlier versions lacked, at the values that such a run had."""
HASHED_AS = {("glue", "verify"): {"bytes": "ledger"}}
"""Values that enter the hash by an older name, so that a run keeps its own."""


class PlanError(ValueError):
    """Say why a recipe cannot become a run; one line per mistake."""

    def __init__(self, found: Iterable[Mistake]) -> None:
        self.mistakes = list(found)
        super().__init__("\n".join(map(str, self.mistakes)))


@dataclass(frozen=True)
class NemoPlan:
    """Hold what NeMo RL is handed: `NemoPlan("main 7ea279a", "examples/...yaml", {...}, {})`."""

    host: str
    """Which NeMo RL the plan was made for."""
    base_config: str
    """Base YAML, relative to the checkout."""
    overrides: dict[str, Any]
    """Dotted keys and their values, but those that hold folders."""
    environment: dict[str, str]
    layout: dict[str, Any] | None = None
    """What `model.layout=auto` chose, as `Layout` has it; None: the recipe gives it."""


@dataclass(frozen=True)
class Plan:
    """Describe one run, frozen: `Plan("tiny-llama/fp8-linear-tis", "local", recipe)`."""

    cell: str
    """MODEL/PRECISION-CORRECTION."""
    backend: str
    recipe: Recipe
    """With every number of the backend filled in."""
    notes: tuple[str, ...] = ()
    """Options that have no effect in this cell, and what the host cannot do as asked."""
    nemo: NemoPlan | None = None
    """For `backend=nemo`."""

    @cached_property
    def settled(self) -> Settled:
        """Return the recipe with its numbers as plain, typed fields."""
        base = LOCAL_BASE if self.nemo is None else base_of(self.nemo.overrides)
        return settle(self.recipe, base, self.layout)

    @property
    def layout(self) -> Layout | None:
        """Return what the plan chose for `model.layout=auto`; None where the recipe gives it."""
        return Layout(**self.nemo.layout) if self.nemo and self.nemo.layout else None

    @cached_property
    def hash6(self) -> str:
        """Return six hex digits over the backend and most of the recipe.

        Values enter it by the names that they had first (`HASHED_AS`). Left out are keys that are
        null, `algorithm=grpo`, `replay=none`, `lora=none`, `noise=none`,
        `precision.kv_scales=layer`, `precision.align=none`, `glue.decode` where XQA cannot
        decode, cluster, logging, outputs, `grpo.steps`, `grpo.stop_when_unstable`,
        `correction.measurement` and `correction.max_reject`.
        """
        content = self.to_json()["recipe"]
        for group in NOT_IN_HASH:
            del content[group]
        for group, before in LATER_GROUPS.items():
            if content[group] == before:
                del content[group]
        if not self.recipe.decode_is_chosen:
            content["glue"]["decode"] = LATER_KEYS["glue", "decode"]
        for (group, key), before in LATER_KEYS.items():
            if content[group][key] == before:
                del content[group][key]
        for key in ("steps", "stop_when_unstable"):
            del content["grpo"][key]
        for key in ONLY_CHECKED:
            del content["correction"][key]
        shape = content["model"]["shape"]
        shape["qkv_bias"] = shape["qkv_bias"] or None  # null means no: the same hash
        content = _with_values(content, HASHED_AS)
        text = json.dumps([self.backend, _given(content)], sort_keys=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:6]

    @property
    def run_name(self) -> str:
        """Return the run's path below `outputs`: MODEL/PRECISION-CORRECTION/sSEED-HASH6."""
        return f"{self.cell}/s{self.recipe.seed}-{self.hash6}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data, the inverse of `plan_from_json`."""
        return dataclasses.asdict(self)


def _with_values(
    recipe: Mapping[str, Any], table: Mapping[tuple[str, str], Mapping[str, str]]
) -> dict[str, Any]:
    """Return a recipe's plain data with values replaced by a table."""
    changed = dict(recipe)
    for (group, key), names in table.items():
        if (held := changed.get(group, {}).get(key)) in names:
            changed[group] = {**changed[group], key: names[held]}
    return changed


def _with_later_keys(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's plain data with the keys that its version lacked, as its run had them."""
    whole = dict(recipe)
    for (group, key), before in LATER_KEYS.items():
        whole[group] = {key: before, **whole.get(group, {})}
    return whole


def _given(content: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that are not null: a key that a later version adds changes no run's hash."""
    return {
        key: _given(value) if isinstance(value, dict) else value
        for key, value in content.items()
        if value is not None
    }


def plan_from_json(content: dict[str, Any]) -> Plan:
    """Read what `Plan.to_json` wrote, in this version or an earlier one.

    Raises:
        KeyError, TypeError: the content is not a plan.
    """
    recipe = {
        group: {key: value for key, value in keys.items() if key not in RETIRED[group]}
        if group in RETIRED
        else keys
        for group, keys in content["recipe"].items()
    }
    return Plan(
        content["cell"],
        content["backend"],
        from_plain(Recipe, _with_later_keys(_with_values(recipe, RENAMED))),
        tuple(content["notes"]),
        NemoPlan(**content["nemo"]) if content["nemo"] else None,
    )


def plan_recipe(recipe: Recipe, host: Host = MAIN, layout: Layout | None = None) -> Plan:
    """Decide everything that a run of this recipe does.

    Args:
        recipe: valid by itself (`checks.mistakes`).
        host: the NeMo RL that it would run in; the local backend does not look at it.
        layout: of an earlier submission of the run, which it keeps.

    Raises:
        PlanError: the backend or the host forbids it.
        HostError: the host has no such base YAML.
    """
    if recipe.chosen_backend == "local":
        return _local_plan(recipe)
    return _nemo_plan(recipe, host, layout)


def _local_plan(recipe: Recipe) -> Plan:
    settled = settle(recipe, LOCAL_BASE)
    _refuse([*_batch_mistakes(settled), *_local_mistakes(settled.recipe)])
    return Plan(_cell(recipe), "local", settled.recipe, notes=tuple(local_notes(settled)))


def _nemo_plan(recipe: Recipe, host: Host, layout: Layout | None) -> Plan:
    base = recipe.model.base_config
    if not base:
        text = "backend=nemo starts from a YAML of NeMo RL's"
        raise PlanError([Mistake("model.base_config", None, text)])
    _refuse(format_mistakes(recipe.precision))
    settled = settle(recipe, host.base(base), layout)
    chooses = recipe.model.layout == "auto"
    if chooses and layout is None and (choices := choose(settled, host)):
        settled = dataclasses.replace(settled, layout=choices[0].layout)
    ours = keys_of(settled, host)
    written = ours | dict(settled.own)
    _refuse([
        *_batch_mistakes(settled),
        *_container_mistakes(recipe.cluster),
        *host_mistakes(settled, host),
        *own_key_mistakes(settled, ours, host),
    ])  # fmt: skip
    memory = memory_per_gpu(settled)
    _refuse([*_small_cache(settled, memory), *_no_validation(written)])
    return Plan(
        _cell(recipe),
        "nemo",
        settled.recipe,
        notes=(*host.notes, *nemo_notes(settled, memory), *alignment_notes(settled, host)),
        nemo=NemoPlan(
            host.name,
            base,
            written,
            environment_variables(settled),
            settled.layout._asdict() if chooses else None,
        ),
    )


def _refuse(found: Iterable[Mistake]) -> None:
    if found := list(found):
        raise PlanError(found)


def _cell(recipe: Recipe) -> str:
    return f"{recipe.model.name}/{recipe.precision.name}-{recipe.correction.name}"


def _batch_mistakes(settled: Settled) -> Iterator[Mistake]:
    if settled.sequences_per_step % settled.updates_per_step:
        yield Mistake(
            "grpo.updates_per_step",
            settled.updates_per_step,
            f"must divide the step's {settled.sequences_per_step} sequences",
        )


def _container_mistakes(cluster: Cluster) -> Iterator[Mistake]:
    if cluster.kind == "slurm" and cluster.interpreter == "container" and not cluster.container:
        yield Mistake(
            "cluster.container",
            None,
            "cluster.interpreter=container needs NeMo RL's image",
            "set cluster.container=IMAGE, or cluster.interpreter=system",
        )


def _small_cache(settled: Settled, memory: MemoryByPhase) -> Iterator[Mistake]:
    """Refuse a cache that holds less than one sequence: vLLM does not start (`max_model_len`)."""
    gib, longest = settled.layout.kv_cache_gib, settled.sequence_tokens
    tokens = kv_cache_tokens(settled, memory)
    if gib is not None and tokens < longest:
        yield Mistake(
            "model.memory.kv_cache_gib",
            gib,
            f"holds {tokens:,} tokens, and a sequence may have {longest:,}: no engine starts",
            f"raise it, or lower grpo.max_new_tokens or nemo.{PROMPT}",
        )


def _no_validation(written: Mapping[str, Any]) -> Iterator[Mistake]:
    """Refuse a validation without a whole batch: NeMo RL would report an accuracy of 0.0."""
    problems, batch = written[VALIDATED], written[VALIDATION_BATCH]
    if not 0 < batch <= problems:
        yield Mistake(
            f"nemo.{VALIDATION_BATCH}",
            batch,
            f"must be from 1 to grpo.max_val_samples={problems}: NeMo RL validates whole batches "
            f"alone ({SEAMS['whole-batches']}), and without one reports an accuracy of 0",
        )


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
    if any(each.in_experts for each in adapters(recipe.model.shape, recipe.lora)):
        yield Mistake(
            "lora.target_modules",
            recipe.lora.name,
            "backend=local has no adapters of experts",
            "choose lora=attention, or run it with backend=nemo",
        )
    if recipe.cluster.rollout_gpus:
        text = "backend=local trains and samples on one device"
        yield Mistake("cluster.rollout_gpus", recipe.cluster.rollout_gpus, text, "set 0")
    if recipe.grpo.is_asynchronous:
        text = "backend=local samples and trains by turns"
        yield Mistake("grpo.max_sample_age", recipe.grpo.max_sample_age, text, "set null")
    for key, value in leaves(recipe.nemo).items():
        yield Mistake(
            f"nemo.{key}",
            value,
            "backend=local has no NeMo RL configuration",
            "drop it, or run with backend=nemo",
        )
