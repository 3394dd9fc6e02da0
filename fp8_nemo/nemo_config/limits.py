"""Repeat, in the user's words, what NeMo RL, vLLM and Megatron forbid.

Each limit mirrors an assert between `run_grpo.py` and the first step that an option of ours can
trip, so that it is one line before a GPU is asked for. What only some versions forbid stands in
`versions.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8_nemo.glue.wire import is_cut_along_in, is_fp8_weight, named_shapes
from fp8_nemo.nemo_config.host import Host
from fp8_nemo.nemo_config.seams import ENGINE, SEAMS
from fp8_nemo.nemo_config.versions import BF16_LAYERS, Limit, defect_limits
from fp8_nemo.recipe.checks import Mistake
from fp8_nemo.recipe.options import Recipe
from fp8_nemo.recipe.settled import Layout, Settled


def host_mistakes(settled: Settled, host: Host) -> Iterator[Mistake]:
    """Every limit of the host that a recipe, with its numbers filled in, does not keep to."""
    for key, value, broken, allowed, mirrors, remedy in host_limits(settled, host):
        if broken:
            yield Mistake(key, value, f"{allowed} ({mirrors})", remedy)


def host_limits(settled: Settled, host: Host) -> Iterator[Limit]:
    """Every limit there is, kept or broken, in the order in which a user is told.

    Args:
        settled: of a recipe that is valid by itself.
        host: a limit that only a defect brings counts as kept where the host has no such defect.
    """
    yield from _of_gpus(settled)
    yield from _of_shape(settled)
    yield from _of_precision(settled.recipe)
    yield from defect_limits(settled, host.defects)


def _of_gpus(settled: Settled) -> Iterator[Limit]:
    """How the GPUs are shared out."""
    recipe, all_gpus = settled.recipe, settled.gpus
    at, shape = settled.layout, recipe.model.shape
    copy, stage = at.copy, all_gpus // at.pipeline  # in GPUs
    yield Limit(
        "model.parallel.pipeline",
        at.pipeline,
        recipe.precision.cache.is_quantized and at.pipeline != 1,
        "precision.rollout_kv=fp8 allows 1, layers are counted per stage upstream",
        SEAMS["one-stage"].path,
        "use model.parallel.tensor instead",
    )
    yield Limit(
        "cluster.nodes x cluster.gpus_per_node",
        all_gpus,
        all_gpus % copy != 0,
        f"must be a multiple of tensor x pipeline x context = {copy}",
        SEAMS["gpus-per-copy"].path,
        "change cluster.nodes, cluster.gpus_per_node or model.parallel",
    )
    yield _divides(at, "rollout_tensor", all_gpus, "the GPUs", SEAMS["engine-ranks"].path)
    yield Limit(
        "model.parallel.rollout_expert",
        at.rollout_expert,
        at.rollout_expert != 1
        and (at.rollout_expert % at.rollout_tensor != 0 or all_gpus % at.rollout_expert != 0),
        f"must be 1, or a multiple of rollout_tensor={at.rollout_tensor} that divides the GPUs, "
        f"{all_gpus}",
        SEAMS["expert-ranks"].path,
    )
    yield Limit(
        "model.parallel.expert",
        at.expert,
        stage % at.expert != 0 or (shape.experts or 1) % at.expert != 0,
        f"must divide the experts, {shape.experts or 'none here'}, and the GPUs of a pipeline "
        f"stage, {stage}",
        "megatron/core/parallel_state.py, initialize_model_parallel",
    )


def _of_shape(settled: Settled) -> Iterator[Limit]:
    """How the model and an update's sequences are cut."""
    recipe, uneven = settled.recipe, _uneven_shard(settled)
    at, shape, block = settled.layout, recipe.model.shape, recipe.precision.rollout.block
    update, ranks = settled.sequences_per_update, settled.data_parallel
    yield _divides(at, "pipeline", shape.layers, "the layers", "megatron/core/transformer")
    yield _divides(at, "tensor", shape.kv_heads, "the K/V heads", "megatron/core/transformer")
    yield _divides(at, "rollout_tensor", shape.heads, "the heads", "vllm, model config")
    yield Limit(
        "model.shape.hidden",
        shape.hidden,
        block > 0 and shape.hidden % block != 0,
        f"must be a multiple of {block} with FP8 linears",
        "vllm, per_token_group_quant_fp8",
        "choose precision=bf16",
    )
    yield Limit(
        "model.parallel.rollout_tensor",
        at.rollout_tensor,
        uneven is not None,
        f"cuts {uneven} into shards that are no multiple of {block}",
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
        on_b200 and precision.train.is_quantized and precision.scales == "fp32",
        "cluster.gpu=b200 trains blockwise FP8 with powers of two only",
        "docs/fp8.md of NeMo RL; TransformerEngine emulates block scaling there",
        "set precision.train_linear=bf16, or precision.scales=pow2 where NeMo RL's rollout can",
    )
    yield Limit(
        "precision.rollout_kv",
        precision.rollout_kv,
        on_b200 and precision.cache.is_quantized,
        "on cluster.gpu=b200 vLLM 0.25.1 takes FlashInfer, which keeps the scales of its first "
        "forward whatever a refit brings",
        "vllm/v1/attention/backends/flashinfer.py, bmm1_scale",
        "set precision.rollout_kv=bf16",
    )
    yield Limit(
        BF16_LAYERS,
        precision.bf16_layers,
        precision.rollout.is_quantized
        and precision.bf16_layers > 0
        and recipe.model.shape.experts > 0,
        "must be 0 for a mixture of experts: upstream names its slabs, vLLM its modules",
        f"{ENGINE}/quantization/fp8.py, _get_params_in_layers",
    )


def _divides(parallel: Layout, key: str, whole: int, what: str, mirrors: str) -> Limit:
    """`model.parallel.KEY` must divide a number of the recipe."""
    size, allowed = getattr(parallel, key), f"must divide {what}, {whole}"
    return Limit(f"model.parallel.{key}", size, whole % size != 0, allowed, mirrors)


def _uneven_shard(settled: Settled) -> str | None:
    """The first weight that vLLM would hold in FP8 and cannot cut on block borders."""
    recipe, parallel, shape = settled.recipe, settled.layout, settled.recipe.model.shape
    for name, sizes in named_shapes(shape).items():
        if not is_fp8_weight(name, sizes, recipe.precision, shape.layers):
            continue
        axis = int(is_cut_along_in(name.removesuffix(".weight").rpartition(".")[2]))
        ranks = parallel.rollout_tensor
        if ".experts." in name and parallel.rollout_expert > 1:
            ranks = 1  # they stay whole
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            ranks = min(ranks, shape.kv_heads)  # more ranks hold copies of a head
        if sizes[axis] % (recipe.precision.rollout.block * ranks):
            return name
    return None
