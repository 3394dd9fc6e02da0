"""NeMo RL as the plan sees it: which keys it has, what its base YAML says, what it forbids.

A `Host` is read from a checkout by `nemo/checkout.py`. Without one, `MAIN` stands in: the revision
that this package was proven against, of which only the few values in `KNOWN_BASES` are known.

`host_limits` repeats, in the user's words and before a GPU is asked for, every assert between
`run_grpo.py` and the first step that an option of ours can trip. Each limit names the line of NeMo
RL main 7ea279a (or of vLLM 0.25.1, Megatron Core) that it mirrors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fp8_nemo.glue.wire import BLOCK, is_fp8_weight, named_shapes
from fp8_nemo.plan.memory import keeps_optimizer
from fp8_nemo.recipe.options import Mistake, Parallel, Precision, Recipe

ROOT_VARIABLE = "NEMO_RL_ROOT"

KV_SCALES_DROPPED = "kv-scales-dropped"
"""The colocated refit drops the KV scales it was given: FP8 KV runs with 1.0 (v0.7.0)."""
BF16_LAYERS_BROKEN = "bf16-layers-broken"
"""`num_first_layers_in_bf16` appends a list to the list of names and has no effect (v0.7.0)."""
POW2_BROKEN = "pow2-broken"
"""Power-of-two activation scales cannot be patched in: `list.append` is given three things
(v0.7.0), or what replaces vLLM's function calls it by its name, and so itself (main 7ea279a)."""

OPTIMIZER_ALWAYS_MOVED = "optimizer-always-moved"
"""Before a refit Adam's state goes to the host, and no key keeps it on the GPU (v0.7.0)."""

HF_OVERRIDES_LOST = "hf-overrides-lost"
"""What FP8 brings to vLLM's configuration replaces `policy.hf_config_overrides` (v0.7.0)."""

V0_7_0_DEFECTS = frozenset(
    {
        KV_SCALES_DROPPED,
        BF16_LAYERS_BROKEN,
        POW2_BROKEN,
        OPTIMIZER_ALWAYS_MOVED,
        HF_OVERRIDES_LOST,
    }
)
MAIN_DEFECTS = frozenset({POW2_BROKEN})


class Base(NamedTuple):
    """What the plan takes from a base YAML when the recipe says null."""

    prompts_per_step: int
    generations_per_prompt: int
    sequences_per_update: int
    micro_batch: int
    sequence: int
    """Longest sequence, prompt and response, in tokens."""
    learning_rate: float
    kl_penalty: float


BASE_KEYS = {
    "prompts_per_step": "grpo.num_prompts_per_step",
    "generations_per_prompt": "grpo.num_generations_per_prompt",
    "sequences_per_update": "policy.train_global_batch_size",
    "micro_batch": "policy.train_micro_batch_size",
    "sequence": "policy.max_total_sequence_length",
    "learning_rate": "policy.megatron_cfg.optimizer.lr",
    "kl_penalty": "loss_fn.reference_policy_kl_penalty",
}

KNOWN_BASES = {
    "examples/configs/grpo_math_1B_megatron.yaml": Base(32, 16, 512, 4, 512, 5e-6, 0.01),
    "examples/configs/grpo_math_8B_megatron.yaml": Base(64, 32, 512, 1, 4096, 3e-7, 0.01),
    "examples/configs/recipes/llm/performance/grpo-qwen3-30ba3b-4n8g.yaml": Base(
        64, 32, 2048, 1, 4096, 3e-7, 0.01
    ),
}


class HostError(ValueError):
    """A checkout of NeMo RL that cannot be used; one line."""


@dataclass(frozen=True)
class Host:
    """One NeMo RL: `Host("v0.7.0", root="/opt/nemo-rl", bases={...}, defects=V0_7_0_DEFECTS)`."""

    name: str
    root: str | None = None
    """Folder of the checkout; None if there is none."""
    bases: Mapping[str, Mapping[str, Any]] | None = None
    """Base YAML, relative to `root`, to `{dotted key: value}` of its leaves; None if not known."""
    defects: frozenset[str] = frozenset()
    vllm: str | None = None
    """Version of vLLM that its lock file pins."""

    def base(self, path: str) -> Base:
        """What the plan takes from a base YAML.

        Raises:
            HostError: there is no such file, or no checkout to read it from.
        """
        if self.bases is None:
            if path not in KNOWN_BASES:
                known = ", ".join(KNOWN_BASES)
                raise HostError(
                    f"model.base_config={path}: not known without a checkout, only {known}; "
                    "set NEMO_RL_ROOT"
                )
            return KNOWN_BASES[path]
        keys = self.bases[path]
        if missing := [key for key in BASE_KEYS.values() if keys.get(key) is None]:
            raise HostError(
                f"model.base_config={path}: has no {missing[0]}; "
                "choose a GRPO configuration of the Megatron backend"
            )
        return Base(**{name: keys[key] for name, key in BASE_KEYS.items()})

    def has(self, path: str, key: str) -> bool:
        """Whether a base YAML has a leaf; taken as given without a checkout."""
        return self.bases is None or key in self.bases[path]


def root_of(recipe: Recipe) -> Path | None:
    """The checkout that a recipe names, else the environment's; None if there is none."""
    named = recipe.cluster.nemo_root or os.environ.get(ROOT_VARIABLE)
    return Path(named).absolute() if named else None


MAIN = Host("main 7ea279a, assumed: no checkout", vllm="0.25.1", defects=MAIN_DEFECTS)
ENGINE = "nemo_rl/models/generation/vllm"
BF16_LAYERS = "precision.first_layers_bf16 + precision.last_layers_bf16"


def gpus(recipe: Recipe) -> int:
    """GPUs of the whole run."""
    return recipe.cluster.nodes * recipe.cluster.gpus_per_node


def data_parallel(recipe: Recipe) -> int:
    """Copies of the policy that train side by side; at least 1."""
    parallel = recipe.model.parallel
    return max(1, gpus(recipe) // (parallel.tensor * parallel.pipeline * parallel.context))


def sequences_per_update(recipe: Recipe) -> int:
    """Sequences of one optimizer step; the plan has filled in all three numbers."""
    grpo = recipe.grpo
    assert grpo.prompts_per_step and grpo.generations_per_prompt and grpo.updates_per_step
    return grpo.prompts_per_step * grpo.generations_per_prompt // grpo.updates_per_step


class Limit(NamedTuple):
    """One thing that a host forbids, and what a recipe makes of it."""

    key: str
    value: Any
    broken: bool
    allowed: str
    mirrors: str
    """The line upstream that would stop the run, or what would go wrong."""
    remedy: str = ""


def host_mistakes(recipe: Recipe, host: Host) -> Iterator[Mistake]:
    """Every limit of the host that a recipe, with its numbers filled in, does not keep to."""
    for key, value, broken, allowed, mirrors, remedy in host_limits(recipe, host):
        if broken:
            yield Mistake(key, value, f"{allowed} ({mirrors})", remedy)


def host_limits(recipe: Recipe, host: Host) -> Iterator[Limit]:
    """Every limit there is, kept or broken, in the order in which a user is told.

    Args:
        recipe: valid by itself, with its numbers filled in.
        host: a limit that only a defect brings counts as kept where the host has no such defect.
    """
    yield from _of_gpus(recipe)
    yield from _of_shape(recipe)
    yield from _of_precision(recipe)
    yield from _of_defects(recipe, host.defects)


def _of_gpus(recipe: Recipe) -> Iterator[Limit]:
    """How the GPUs are shared out."""
    at, shape, all_gpus = recipe.model.parallel, recipe.model.shape, gpus(recipe)
    copy, stage = at.tensor * at.pipeline * at.context, all_gpus // at.pipeline  # in GPUs
    yield Limit(
        "model.parallel.pipeline",
        at.pipeline,
        recipe.precision.rollout_kv == "fp8" and at.pipeline != 1,
        "precision.rollout_kv=fp8 allows 1, layers are counted per stage upstream",
        "nemo_rl/algorithms/grpo.py:1338",
        "use model.parallel.tensor instead",
    )
    yield Limit(
        "cluster.nodes x cluster.gpus_per_node",
        all_gpus,
        all_gpus % copy != 0,
        f"must be a multiple of tensor x pipeline x context = {copy}",
        "nemo_rl/models/policy/lm_policy.py:226,235",
        "change cluster.nodes, cluster.gpus_per_node or model.parallel",
    )
    yield _divides(at, "rollout_tensor", all_gpus, "the GPUs", f"{ENGINE}/vllm_generation.py:118")
    yield Limit(
        "model.parallel.rollout_expert",
        at.rollout_expert,
        at.rollout_expert != 1
        and (at.rollout_expert % at.rollout_tensor != 0 or all_gpus % at.rollout_expert != 0),
        f"must be 1, or a multiple of rollout_tensor={at.rollout_tensor} that divides the GPUs, "
        f"{all_gpus}",
        f"{ENGINE}/vllm_generation.py:133",
    )
    yield Limit(
        "model.parallel.expert",
        at.expert,
        stage % at.expert != 0 or (shape.experts or 1) % at.expert != 0,
        f"must divide the experts, {shape.experts or 'none here'}, and the GPUs of a pipeline "
        f"stage, {stage}",
        "megatron/core/parallel_state.py, initialize_model_parallel",
    )


def _of_shape(recipe: Recipe) -> Iterator[Limit]:
    """How the model and an update's sequences are cut."""
    at, shape, uneven = recipe.model.parallel, recipe.model.shape, _uneven_shard(recipe)
    update, ranks = sequences_per_update(recipe), data_parallel(recipe)
    yield _divides(at, "pipeline", shape.layers, "the layers", "megatron/core/transformer")
    yield _divides(at, "tensor", shape.kv_heads, "the K/V heads", "megatron/core/transformer")
    yield _divides(at, "rollout_tensor", shape.heads, "the heads", "vllm, model config")
    yield Limit(
        "model.shape.hidden",
        shape.hidden,
        recipe.precision.rollout_linear == "fp8" and shape.hidden % BLOCK != 0,
        f"must be a multiple of {BLOCK} with FP8 linears",
        "vllm, per_token_group_quant_fp8",
        "choose precision=bf16",
    )
    yield Limit(
        "model.parallel.rollout_tensor",
        at.rollout_tensor,
        uneven is not None,
        f"cuts {uneven} into shards that are no multiple of {BLOCK}",
        "vllm, validate_fp8_block_shape",
        "experts stay whole with model.parallel.rollout_expert=rollout_tensor; else lower it"
        if shape.experts
        else "lower it",
    )
    yield Limit(
        "grpo.updates_per_step",
        recipe.grpo.updates_per_step,
        update % ranks != 0,
        f"gives updates of {update} sequences, which {ranks} data-parallel ranks cannot share "
        "evenly",
        "nemo_rl/distributed/batched_data_dict.py, shard_by_batch_size",
        "change grpo.updates_per_step, grpo.prompts_per_step or the GPUs",
    )


def _of_precision(recipe: Recipe) -> Iterator[Limit]:
    """What a GPU, or the way upstream names its weights, rules out."""
    precision, on_b200 = recipe.precision, recipe.cluster.gpu == "b200"
    yield Limit(
        "precision.scales",
        precision.scales,
        on_b200 and precision.train_linear == "fp8" and precision.scales == "fp32",
        "cluster.gpu=b200 trains blockwise FP8 with powers of two only",
        "docs/fp8.md of NeMo RL; TransformerEngine emulates block scaling there",
        "set precision.train_linear=bf16, or precision.scales=pow2 where NeMo RL's rollout can",
    )
    yield Limit(
        "precision.rollout_kv",
        precision.rollout_kv,
        on_b200 and precision.rollout_kv == "fp8",
        "on cluster.gpu=b200 vLLM 0.25.1 takes FlashInfer, which keeps the scales of its first "
        "forward whatever a refit brings",
        "vllm/v1/attention/backends/flashinfer.py, bmm1_scale",
        "set precision.rollout_kv=bf16",
    )
    yield Limit(
        BF16_LAYERS,
        _bf16_layers(precision),
        _keeps_bf16_layers(precision) and recipe.model.shape.experts > 0,
        "must be 0 for a mixture of experts: upstream names its slabs, vLLM its modules",
        f"{ENGINE}/quantization/fp8.py, _get_params_in_layers",
    )


def _of_defects(recipe: Recipe, defects: frozenset[str]) -> Iterator[Limit]:
    """What some versions get wrong."""
    precision, keeps = recipe.precision, keeps_optimizer(recipe)
    yield Limit(
        "precision.rollout_kv",
        precision.rollout_kv,
        KV_SCALES_DROPPED in defects and precision.rollout_kv == "fp8",
        "this NeMo RL drops the KV scales on the way to the engine, which runs with 1.0",
        "v0.7.0: nemo_rl/algorithms/grpo.py:1924",
        "use NeMo RL main 7ea279a or later, or precision.rollout_kv=bf16",
    )
    yield Limit(
        BF16_LAYERS,
        _bf16_layers(precision),
        BF16_LAYERS_BROKEN in defects and _keeps_bf16_layers(precision),
        "this NeMo RL quantizes the layers that should stay BF16",
        f"v0.7.0: {ENGINE}/quantization/fp8.py, bf16_params.append",
        "use NeMo RL main 7ea279a or later, or set both to 0",
    )
    yield Limit(
        "precision.scales",
        precision.scales,
        POW2_BROKEN in defects and precision.rollout_linear == "fp8" and precision.scales == "pow2",
        "this NeMo RL's rollout stops at powers of two: a TypeError, or RecursionError",
        f"{ENGINE}/quantization/fp8.py, v0.7.0: vllm_patches.append, "
        "main 7ea279a: per_token_group_quant_fp8",
        "set precision.scales=fp32",
    )
    yield Limit(
        "nemo.policy.offload_optimizer_for_refit",
        not keeps,
        OPTIMIZER_ALWAYS_MOVED in defects and keeps,
        "this NeMo RL always moves the optimizer to the host",
        "v0.7.0: nemo_rl/models/policy/workers/megatron_policy_worker.py, offload_before_refit",
        "use NeMo RL main 7ea279a or later, or leave it out",
    )

    policy = recipe.nemo.get("policy")
    given = policy.get("hf_config_overrides") if isinstance(policy, dict) else None
    yield Limit(
        "nemo.policy.hf_config_overrides",
        given,
        HF_OVERRIDES_LOST in defects and bool(given) and precision.rollout_linear == "fp8",
        "this NeMo RL's FP8 rollout goes without them, the trainer with them",
        f"v0.7.0: {ENGINE}/vllm_worker.py:355, vllm_kwargs.update(fp8_kwargs)",
        "use NeMo RL main 7ea279a or later, or write them into a copy of the model's config.json",
    )


def _bf16_layers(precision: Precision) -> int:
    return precision.first_layers_bf16 + precision.last_layers_bf16


def _keeps_bf16_layers(precision: Precision) -> bool:
    """Whether an FP8 rollout is to leave layers in BF16."""
    return precision.rollout_linear == "fp8" and _bf16_layers(precision) > 0


def _divides(parallel: Parallel, key: str, whole: int, what: str, mirrors: str) -> Limit:
    """`model.parallel.KEY` must divide a number of the recipe."""
    size, allowed = getattr(parallel, key), f"must divide {what}, {whole}"
    return Limit(f"model.parallel.{key}", size, whole % size != 0, allowed, mirrors)


def _uneven_shard(recipe: Recipe) -> str | None:
    """The first weight that vLLM would hold in FP8 and cannot cut on block borders."""
    parallel, shape = recipe.model.parallel, recipe.model.shape
    for name, sizes in named_shapes(shape).items():
        if not is_fp8_weight(name, sizes, recipe.precision, shape.layers):
            continue
        axis = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        ranks = parallel.rollout_tensor
        if ".experts." in name and parallel.rollout_expert > 1:
            ranks = 1  # they stay whole
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            ranks = min(ranks, shape.kv_heads)  # more ranks hold copies of a head
        if sizes[axis] % (BLOCK * ranks):
            return name
    return None
