"""Say how NeMo RL, vLLM and Megatron share out GPUs, weights and sequences.

What `model.parallel` may say, and what stands in the way of a size that is given.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fp8_nemo.glue.wire import is_cut_along_in, is_quantized_weight, named_shapes
from fp8_nemo.nemo_config.keys import COLOCATED, MEGATRON, VLLM
from fp8_nemo.nemo_config.seams import SEAMS
from fp8_nemo.nemo_config.versions import Limit
from fp8_nemo.recipe.settled import KEEPS_OPTIMIZER, Layout, Settled


def layout_keys(settled: Settled) -> dict[str, Any]:
    """Return how each copy of the model is cut, and which GPUs train and sample."""
    recipe, parallel = settled.recipe, settled.layout
    # Megatron wants it for experts under tensor parallelism.
    by_sequence = bool(recipe.model.shape.experts) and parallel.tensor > 1
    # Of tensor ranks too, as in the base files: `sequence_parallel` may be the user's.
    multiple = (2 * parallel.context if parallel.context > 1 else 1) * parallel.tensor
    return {
        f"{MEGATRON}.tensor_model_parallel_size": parallel.tensor,
        f"{MEGATRON}.pipeline_model_parallel_size": parallel.pipeline,
        f"{MEGATRON}.context_parallel_size": parallel.context,
        f"{MEGATRON}.expert_model_parallel_size": parallel.expert,
        f"{MEGATRON}.expert_tensor_parallel_size": 1,
        f"{MEGATRON}.sequence_parallel": by_sequence,
        "policy.make_sequence_length_divisible_by": multiple,
        f"{VLLM}.tensor_parallel_size": parallel.rollout_tensor,
        f"{VLLM}.expert_parallel_size": parallel.rollout_expert,
        "cluster.num_nodes": recipe.cluster.nodes,
        "cluster.gpus_per_node": recipe.cluster.gpus_per_node,
        **_placement(settled),
    }


def _placement(settled: Settled) -> dict[str, Any]:
    """Say which GPUs sample: those that train, in turn, or some of their own, or whole nodes."""
    cluster = settled.recipe.cluster
    if settled.shares_gpus:
        kept = {KEEPS_OPTIMIZER: False} if settled.layout.keeps_optimizer else {}
        return {f"{COLOCATED}.enabled": True, **kept}
    each = cluster.rollout_gpus if cluster.nodes == 1 else cluster.gpus_per_node
    return {
        f"{COLOCATED}.enabled": False,
        f"{COLOCATED}.resources.num_nodes": cluster.rollout_gpus // each,
        f"{COLOCATED}.resources.gpus_per_node": each,
    }


def layout_limits(settled: Settled) -> Iterator[Limit]:
    """Yield the limits of how GPUs are shared out, then of how weights and updates are cut."""
    yield from _of_gpus(settled)
    yield from _of_shape(settled)


def _of_gpus(settled: Settled) -> Iterator[Limit]:
    """Yield the limits of how the GPUs are shared out."""
    recipe, cluster = settled.recipe, settled.recipe.cluster
    at, shape = settled.layout, recipe.model.shape
    train, rollout = settled.train_gpus, settled.rollout_gpus
    copy, stage = at.copy, train // at.pipeline  # in GPUs
    apart = "" if settled.shares_gpus else "cluster.rollout_gpus"
    yield Limit(
        "cluster.rollout_gpus",
        cluster.rollout_gpus,
        cluster.nodes > 1 and cluster.rollout_gpus % cluster.gpus_per_node != 0,
        f"must be whole nodes of {cluster.gpus_per_node} with cluster.nodes={cluster.nodes}",
        SEAMS["whole-nodes"].path,
        f"set {cluster.gpus_per_node} or a multiple, or cluster.nodes=1",
    )
    yield Limit(
        "model.parallel.pipeline",
        at.pipeline,
        recipe.precision.cache.is_quantized and at.pipeline != 1,
        "precision.rollout_kv=fp8 allows 1, layers are counted per stage upstream",
        SEAMS["one-stage"].path,
        "use model.parallel.tensor instead, or choose precision=fp8-linear",
    )
    yield Limit(
        " - ".join(filter(None, ("cluster.nodes x cluster.gpus_per_node", apart))),
        train,
        train % copy != 0,
        f"must be a multiple of tensor x pipeline x context = {copy}",
        SEAMS["gpus-per-copy"].path,
        "change cluster.nodes, cluster.gpus_per_node or model.parallel",
    )
    yield _divides(at, "rollout_tensor", rollout, apart or "the GPUs", SEAMS["engine-ranks"].path)
    yield Limit(
        "model.parallel.rollout_expert",
        at.rollout_expert,
        at.rollout_expert != 1
        and (
            not shape.experts
            or at.rollout_expert % at.rollout_tensor != 0
            or rollout % at.rollout_expert != 0
        ),
        f"must be 1, or a multiple of rollout_tensor={at.rollout_tensor} that divides "
        f"{apart or 'the GPUs'}, {rollout}"
        if shape.experts
        else "must be 1 without experts",
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
    """Yield the limits of how the model and an update's sequences are cut."""
    recipe, uneven = settled.recipe, _uneven_shard(settled)
    at, shape, block = settled.layout, recipe.model.shape, recipe.precision.rollout.block
    update, ranks = settled.sequences_per_update, settled.data_parallel
    yield _divides(at, "pipeline", shape.layers, "the layers", "megatron/core/transformer")
    yield _divides(at, "tensor", shape.kv_heads, "the K/V heads", "megatron/core/transformer")
    yield _divides(at, "rollout_tensor", shape.heads, "the heads", "vllm, model config")
    yield Limit(
        "model.parallel.rollout_tensor",
        at.rollout_tensor,
        max(shape.kv_heads, at.rollout_tensor) % min(shape.kv_heads, at.rollout_tensor) != 0,
        f"must divide the K/V heads, {shape.kv_heads}, or be a multiple of them",
        "vllm/model_executor/models/llama.py, LlamaAttention",
    )
    if at.rollout_expert == 1:  # else experts stay whole
        width = shape.expert_ffn if shape.experts else shape.ffn
        yield _divides(at, "rollout_tensor", width, "the MLP's width", "vllm, divide")
    yield Limit(
        "lora.rank",
        recipe.lora.rank,
        (recipe.lora.rank or 0) % at.tensor != 0,
        f"must be a multiple of model.parallel.tensor={at.tensor}, which shares it out",
        SEAMS["shares-the-rank"].path,
    )
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
        f"leaves {uneven} with a side that is no multiple of {block}",
        "vllm, validate_fp8_block_shape",
        "choose precision=bf16"
        if at.rollout_tensor == 1
        else "experts stay whole with model.parallel.rollout_expert=rollout_tensor; else lower it"
        if shape.experts
        else "",
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


def _divides(parallel: Layout, key: str, whole: int, what: str, mirrors: str) -> Limit:
    """Return the limit that `model.parallel.KEY` must divide a number of the recipe."""
    size, allowed = getattr(parallel, key), f"must divide {what}, {whole}"
    return Limit(f"model.parallel.{key}", size, whole % size != 0, allowed, mirrors)


def _uneven_shard(settled: Settled) -> str | None:
    """Return the first FP8 weight that vLLM cannot cut on block borders; None if there is none."""
    recipe, parallel, shape = settled.recipe, settled.layout, settled.recipe.model.shape
    if not recipe.precision.rollout.block:
        return None
    # The first layer in FP8, and one expert, stand for all.
    few = replace(
        shape, layers=1 + recipe.precision.first_layers_bf16, experts=min(1, shape.experts)
    )
    for name, sizes in named_shapes(few).items():
        if not is_quantized_weight(name, sizes, recipe.precision, shape.layers):
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
