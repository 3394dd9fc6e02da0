"""NeMo RL as the plan sees it: which keys it has, what its base YAML says, what it forbids.

A `Host` is read from a checkout by `nemo/checkout.py`. Without one, `MAIN` stands in: the revision
that this package was proven against, of which only the few values in `KNOWN_BASES` are known.

`HOST_LIMITS` repeats, in the user's words and before a GPU is asked for, every assert between
`run_grpo.py` and the first step that an option of ours can trip. Each row names the line of NeMo RL
main 7ea279a (or of vLLM 0.25.1, Megatron Core) that it mirrors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fp8_nemo.estimate import keeps_optimizer
from fp8_nemo.schema import Mistake, Recipe
from fp8_nemo.weights import BLOCK, is_fp8_weight, named_shapes

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

V0_7_0_DEFECTS = frozenset(
    {KV_SCALES_DROPPED, BF16_LAYERS_BROKEN, POW2_BROKEN, OPTIMIZER_ALWAYS_MOVED}
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


class Limit(NamedTuple):
    """One thing that a host forbids."""

    key: str
    value: Callable[[Recipe], Any]
    holds: Callable[[Recipe], bool]
    """Whether the recipe keeps to it."""
    allowed: Callable[[Recipe], str]
    remedy: str
    mirrors: str
    """The line upstream that would stop the run, or what would go wrong."""
    defect: str | None = None
    """Only for hosts that have this defect."""


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


def _divides(key: str, mirrors: str, of: Callable[[Recipe], int], what: str) -> Limit:
    """`model.parallel.KEY` must divide a number of the recipe."""

    def value(recipe: Recipe) -> int:
        return getattr(recipe.model.parallel, key)

    return Limit(
        f"model.parallel.{key}",
        value,
        lambda recipe: of(recipe) % value(recipe) == 0,
        lambda recipe: f"must divide {what}, {of(recipe)}",
        "",
        mirrors,
    )


HOST_LIMITS = (
    Limit(
        "model.parallel.pipeline",
        lambda r: r.model.parallel.pipeline,
        lambda r: r.precision.rollout_kv != "fp8" or r.model.parallel.pipeline == 1,
        lambda r: "precision.rollout_kv=fp8 allows 1, layers are counted per stage upstream",
        "use model.parallel.tensor instead",
        "nemo_rl/algorithms/grpo.py:1338",
    ),
    Limit(
        "cluster.nodes x cluster.gpus_per_node",
        gpus,
        lambda r: (
            gpus(r) % (data_parallel(r) * _model_parallel(r)) == 0 and gpus(r) >= _model_parallel(r)
        ),
        lambda r: f"must be a multiple of tensor x pipeline x context = {_model_parallel(r)}",
        "change cluster.nodes, cluster.gpus_per_node or model.parallel",
        "nemo_rl/models/policy/lm_policy.py:226,235",
    ),
    _divides(
        "rollout_tensor", "nemo_rl/models/generation/vllm/vllm_generation.py:118", gpus, "the GPUs"
    ),
    Limit(
        "model.parallel.rollout_expert",
        lambda r: r.model.parallel.rollout_expert,
        lambda r: (
            r.model.parallel.rollout_expert == 1
            or (
                r.model.parallel.rollout_expert % r.model.parallel.rollout_tensor == 0
                and gpus(r) % r.model.parallel.rollout_expert == 0
            )
        ),
        lambda r: (
            "must be 1, or a multiple of rollout_tensor="
            f"{r.model.parallel.rollout_tensor} that divides the GPUs, {gpus(r)}"
        ),
        "",
        "nemo_rl/models/generation/vllm/vllm_generation.py:133",
    ),
    Limit(
        "model.parallel.expert",
        lambda r: r.model.parallel.expert,
        lambda r: (
            gpus(r) // r.model.parallel.pipeline % r.model.parallel.expert == 0
            and (r.model.shape.experts or 1) % r.model.parallel.expert == 0
        ),
        lambda r: (
            f"must divide the experts, {r.model.shape.experts or 'none here'}, and the GPUs "
            f"of a pipeline stage, {gpus(r) // r.model.parallel.pipeline}"
        ),
        "",
        "megatron/core/parallel_state.py, initialize_model_parallel",
    ),
    _divides("pipeline", "megatron/core/transformer", lambda r: r.model.shape.layers, "the layers"),
    _divides(
        "tensor", "megatron/core/transformer", lambda r: r.model.shape.kv_heads, "the K/V heads"
    ),
    _divides("rollout_tensor", "vllm, model config", lambda r: r.model.shape.heads, "the heads"),
    Limit(
        "model.parallel.rollout_tensor",
        lambda r: r.model.parallel.rollout_tensor,
        lambda r: not _uneven_shards(r),
        lambda r: f"cuts {_uneven_shards(r)[0]} into shards that are no multiple of {BLOCK}",
        "experts stay whole with model.parallel.rollout_expert=rollout_tensor; else lower it",
        "vllm, validate_fp8_block_shape",
    ),
    Limit(
        "grpo.updates_per_step",
        lambda r: r.grpo.updates_per_step,
        lambda r: sequences_per_update(r) % data_parallel(r) == 0,
        lambda r: (
            f"gives updates of {sequences_per_update(r)} sequences, which "
            f"{data_parallel(r)} data-parallel ranks cannot share evenly"
        ),
        "change grpo.updates_per_step, grpo.prompts_per_step or the GPUs",
        "nemo_rl/distributed/batched_data_dict.py, shard_by_batch_size",
    ),
    Limit(
        "precision.scales",
        lambda r: r.precision.scales,
        lambda r: (
            not (
                r.cluster.gpu == "b200"
                and r.precision.train_linear == "fp8"
                and r.precision.scales == "fp32"
            )
        ),
        lambda r: "cluster.gpu=b200 trains blockwise FP8 with powers of two only",
        "set precision.train_linear=bf16, or precision.scales=pow2 where NeMo RL's rollout can",
        "docs/fp8.md of NeMo RL; TransformerEngine emulates block scaling there",
    ),
    Limit(
        "precision.rollout_kv",
        lambda r: r.precision.rollout_kv,
        lambda r: r.precision.rollout_kv != "fp8" or r.cluster.gpu != "b200",
        lambda r: (
            "on cluster.gpu=b200 vLLM 0.25.1 takes FlashInfer, which keeps the scales of its "
            "first forward whatever a refit brings"
        ),
        "set precision.rollout_kv=bf16",
        "vllm/v1/attention/backends/flashinfer.py, bmm1_scale",
    ),
    Limit(
        "precision.first_layers_bf16 + precision.last_layers_bf16",
        lambda r: r.precision.first_layers_bf16 + r.precision.last_layers_bf16,
        lambda r: (
            r.precision.rollout_linear == "bf16"
            or not r.model.shape.experts
            or not (r.precision.first_layers_bf16 or r.precision.last_layers_bf16)
        ),
        lambda r: "must be 0 for a mixture of experts: upstream names its slabs, vLLM its modules",
        "",
        "nemo_rl/models/generation/vllm/quantization/fp8.py, _get_params_in_layers",
    ),
    Limit(
        "precision.rollout_kv",
        lambda r: r.precision.rollout_kv,
        lambda r: r.precision.rollout_kv != "fp8",
        lambda r: "this NeMo RL drops the KV scales on the way to the engine, which runs with 1.0",
        "use NeMo RL main 7ea279a or later, or precision.rollout_kv=bf16",
        "v0.7.0: nemo_rl/algorithms/grpo.py:1924",
        KV_SCALES_DROPPED,
    ),
    Limit(
        "precision.first_layers_bf16 + precision.last_layers_bf16",
        lambda r: r.precision.first_layers_bf16 + r.precision.last_layers_bf16,
        lambda r: (
            not (r.precision.first_layers_bf16 or r.precision.last_layers_bf16)
            or r.precision.rollout_linear == "bf16"
        ),
        lambda r: "this NeMo RL quantizes the layers that should stay BF16",
        "use NeMo RL main 7ea279a or later, or set both to 0",
        "v0.7.0: nemo_rl/models/generation/vllm/quantization/fp8.py, bf16_params.append",
        BF16_LAYERS_BROKEN,
    ),
    Limit(
        "precision.scales",
        lambda r: r.precision.scales,
        lambda r: r.precision.scales != "pow2" or r.precision.rollout_linear == "bf16",
        lambda r: "this NeMo RL's rollout stops at powers of two: a TypeError, or RecursionError",
        "set precision.scales=fp32",
        "nemo_rl/models/generation/vllm/quantization/fp8.py, v0.7.0: vllm_patches.append, "
        "main 7ea279a: per_token_group_quant_fp8",
        POW2_BROKEN,
    ),
    Limit(
        "nemo.policy.offload_optimizer_for_refit",
        lambda r: not keeps_optimizer(r),
        lambda r: not keeps_optimizer(r),
        lambda r: "this NeMo RL always moves the optimizer to the host",
        "use NeMo RL main 7ea279a or later, or leave it out",
        "v0.7.0: nemo_rl/models/policy/workers/megatron_policy_worker.py, offload_before_refit",
        OPTIMIZER_ALWAYS_MOVED,
    ),
)


def host_mistakes(recipe: Recipe, host: Host) -> Iterator[Mistake]:
    """Every limit of the host that a recipe, with its numbers filled in, does not keep to."""
    for limit in HOST_LIMITS:
        if limit.defect is not None and limit.defect not in host.defects:
            continue
        if not limit.holds(recipe):
            text = f"{limit.allowed(recipe)} ({limit.mirrors})"
            yield Mistake(limit.key, limit.value(recipe), text, limit.remedy)


def _model_parallel(recipe: Recipe) -> int:
    return math.prod(
        (
            recipe.model.parallel.tensor,
            recipe.model.parallel.pipeline,
            recipe.model.parallel.context,
        )
    )


def _uneven_shards(recipe: Recipe) -> list[str]:
    """Weights that vLLM would hold in FP8 and cannot cut on block borders."""
    parallel, shape = recipe.model.parallel, recipe.model.shape
    uneven = []
    for name, (rows, columns) in _matrices(recipe):
        if not is_fp8_weight(name, (rows, columns), recipe.precision, shape.layers):
            continue
        if ".experts." in name and parallel.rollout_expert > 1:
            continue
        by_column = name.endswith(("o_proj.weight", "down_proj.weight"))
        ranks = parallel.rollout_tensor
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            ranks = min(ranks, shape.kv_heads)  # more ranks hold copies of a head
        if (columns if by_column else rows) % (BLOCK * ranks):
            uneven.append(name)
    return uneven


def _matrices(recipe: Recipe) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, shape in named_shapes(recipe.model.shape).items():
        if len(shape) == 2:
            yield name, (shape[0], shape[1])
