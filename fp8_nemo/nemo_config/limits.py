"""Repeat, in the user's words, what NeMo RL, vLLM and Megatron forbid.

Each limit mirrors an assert between `run_grpo.py` and the first step that an option of ours can
trip, so that it is one line before a GPU is asked for. What only some versions forbid stands in
`versions.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fp8_nemo.nemo_config.host import Host
from fp8_nemo.nemo_config.keys import COMPILATION, MEGATRON, OURS
from fp8_nemo.nemo_config.overrides import VLLM_PRECISION, keys_of
from fp8_nemo.nemo_config.own.alignment import alignment_limits
from fp8_nemo.nemo_config.own.asynchronous import asynchronous_limits
from fp8_nemo.nemo_config.own.environments import environment_limits
from fp8_nemo.nemo_config.own.four_bits import four_bit_limits
from fp8_nemo.nemo_config.own.fp16 import fp16_limits
from fp8_nemo.nemo_config.own.layouts import layout_limits
from fp8_nemo.nemo_config.seams import ENGINE, SEAMS
from fp8_nemo.nemo_config.versions import BF16_LAYERS, Limit, defect_limits
from fp8_nemo.nemo_config.vllm_arguments import argument_limits
from fp8_nemo.recipe.mistake import Mistake
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.settled import MICRO_BATCH, Settled

PACKED, DYNAMIC = "policy.sequence_packing.enabled", "policy.dynamic_batching.enabled"
MULTIPLE = "policy.make_sequence_length_divisible_by"
TENSOR = f"{MEGATRON}.tensor_model_parallel_size"
PARALLEL = "model.parallel."
FULL_GRAPHS = {
    "cudagraph_mode": ("FULL", "2"),
    "splitting_ops": ("[]",),
    "pass_config.fuse_attn_quant": ("TRUE",),
    "pass_config.enable_sp": ("TRUE",),
    "pass_config.fuse_gemm_comms": ("TRUE",),
}
"""Values of vLLM's keys that put decode steps and steps with prompts into the same graphs."""


def host_mistakes(settled: Settled, host: Host) -> Iterator[Mistake]:
    """Yield every limit of the host that a settled recipe breaks.

    A size of `model.parallel` is told once, with the sizes that can stand in its place. What only
    follows from it is not told: the rest is looked at with the nearest of these.
    """
    told, broken = set[str](), list(_broken(settled, host))
    while wrong := next(filter(_is_size, broken), None):
        told.add(wrong.key)
        sizes = _sizes_instead(settled, host, wrong)
        yield _mistake(wrong._replace(remedy=wrong.remedy or _one_of(sizes)))
        if sizes:
            away = {abs(size - wrong.value): size for size in sizes}
            settled = _with_size(settled, wrong.key, away[min(away)])
        broken = list(_broken(settled, host, told))
    yield from map(_mistake, broken)


def _broken(settled: Settled, host: Host, told: Collection[str] = ()) -> Iterator[Limit]:
    limits = host_limits(settled, host)
    return (each for each in limits if each.broken and each.key not in told)


def _is_size(limit: Limit) -> bool:
    return limit.key.startswith(PARALLEL)


def _mistake(limit: Limit) -> Mistake:
    return Mistake(limit.key, limit.value, f"{limit.allowed} ({limit.mirrors})", limit.remedy)


def _sizes_instead(settled: Settled, host: Host, wrong: Limit) -> list[int]:
    """Return the sizes that break no limit of this key, and fewest others; [] if none can be."""
    sizes = [n for n in range(1, settled.gpus + 1) if settled.gpus % n == 0]
    keys = {
        size: [each.key for each in _broken(_with_size(settled, wrong.key, size), host)]
        for size in sizes
    }
    breaks = {size: len(broken) for size, broken in keys.items() if wrong.key not in broken}
    return [size for size, count in breaks.items() if count == min(breaks.values())]


def _with_size(settled: Settled, key: str, size: int) -> Settled:
    layout = settled.layout._replace(**{key.removeprefix(PARALLEL): size})
    return replace(settled, layout=layout)


def _one_of(sizes: Sequence[int]) -> str:
    """Return `set 1, 2 or 4`; nothing for no size."""
    text = ", ".join(map(str, sizes))
    return f"set {' or '.join(text.rsplit(', ', 1))}" if sizes else ""


def format_mistakes(precision: Precision) -> Iterator[Mistake]:
    """Refuse the formats that only the local backend has; one line for each key."""
    for key in ("rollout_linear", "train_linear"):
        if (held := getattr(precision, key)) not in VLLM_PRECISION:
            remedy = "run it with backend=local, or choose another precision"
            why = "NeMo RL's engine and trainer have no such format"
            yield Mistake(f"precision.{key}", held, why, remedy)
            return  # the other key says the same


def host_limits(settled: Settled, host: Host) -> Iterator[Limit]:
    """Yield every limit, kept or broken, in the order in which users see them.

    Args:
        settled: a recipe that is valid by itself.
        host: the NeMo RL. A limit of a defect counts as kept if the host lacks the defect.
    """
    yield from layout_limits(settled)
    yield from _of_precision(settled.recipe)
    yield from defect_limits(settled, host.defects)
    recipe, base = settled.recipe, settled.recipe.model.base_config or ""
    own = {key: value for key, value in settled.own.items() if key not in OURS}  # else refused
    written = {**host.leaves(base), **keys_of(settled, host), **own}
    yield from asynchronous_limits(settled, written)
    yield from _of_batches(written)
    yield from _of_cut_sequences(settled, written)
    yield from _of_sampled_batches(written)
    yield from _of_logprobs(written)
    yield from _of_decode(recipe, written)
    yield from _of_training(recipe, written)
    yield from _of_fp8_training(recipe, written)
    yield from fp16_limits(recipe, written)
    yield from alignment_limits(recipe, written)
    yield from four_bit_limits(settled)
    yield from environment_limits(recipe.data, written)
    yield from argument_limits(settled, host.vllm)


def _of_precision(recipe: Recipe) -> Iterator[Limit]:
    """Yield the limits of the GPU, and of how upstream names its weights."""
    precision, on_b200 = recipe.precision, recipe.cluster.gpu == "b200"
    yield Limit(
        "precision.scales",
        precision.scales,
        on_b200 and precision.train.is_quantized and precision.scales == "fp32",
        "cluster.gpu=b200 trains blockwise FP8 with powers of two only",
        "docs/fp8.md of NeMo RL; TransformerEngine emulates block scaling there",
        "choose precision=fp8-linear, or precision.scales=pow2 where NeMo RL's rollout can",
    )
    yield Limit(
        "precision.rollout_kv",
        precision.rollout_kv,
        on_b200 and precision.cache.is_quantized,
        "on cluster.gpu=b200 vLLM 0.25.1 takes FlashInfer, which keeps the scales of its first "
        "forward whatever a refit brings",
        "vllm/v1/attention/backends/flashinfer.py, bmm1_scale",
        "choose precision=fp8-linear (rollout_kv=bf16)",
    )
    yield Limit(
        "precision.kv_scales",
        precision.kv_scales,
        precision.cache.is_quantized and precision.kv_scales != "layer",
        "vLLM 0.25.1 takes scales of heads from checkpoints of compressed-tensors alone, and NeMo "
        "RL's FP8 engine is none",
        SEAMS["scales-of-heads"].path,
        "set precision.kv_scales=layer, or run it with backend=local",
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


def _of_batches(written: Mapping[str, Any]) -> Iterator[Limit]:
    """Yield the limits of how sequences become batches, from every key that NeMo RL gets."""
    tensor, stages = written[TENSOR], written[f"{MEGATRON}.pipeline_model_parallel_size"]
    context = written[f"{MEGATRON}.context_parallel_size"]
    packed, dynamic = written[PACKED], written[DYNAMIC]
    logprobs, micro = written["policy.logprob_batch_size"], written[MICRO_BATCH]
    yield Limit(
        "nemo.policy.logprob_batch_size",
        logprobs,
        tensor >= 4 and logprobs != micro,
        f"must be the micro-batch, {micro}, with model.parallel.tensor={tensor}",
        SEAMS["equal-micro-batches"].path,
        "leave it out, or set model.parallel.tensor=2",
    )
    yield Limit(
        f"nemo.{DYNAMIC}",
        dynamic,
        dynamic and packed,
        "excludes packed sequences, which a plan turns on",
        SEAMS["dynamic-or-packed"].path,
        f"leave it out, or add +nemo.{PACKED}=false",
    )
    yield Limit(
        f"nemo.{DYNAMIC}",
        dynamic,
        dynamic and stages > 1,
        f"wants one pipeline stage, got model.parallel.pipeline={stages}",
        SEAMS["dynamic-stages"].path,
        "leave it out, or set model.parallel.pipeline=1",
    )
    yield Limit(
        f"nemo.{PACKED}",
        packed,
        context > 1 and not packed,
        f"must be true with model.parallel.context={context}",
        SEAMS["packed-context"].path,
        "leave it out, or set model.parallel.context=1",
    )


def _of_cut_sequences(settled: Settled, written: Mapping[str, Any]) -> Iterator[Limit]:
    """Yield the limits of sequences that context and sequence parallelism cut in parts."""
    tensor, context = written[TENSOR], written[f"{MEGATRON}.context_parallel_size"]
    packed, multiple = written[PACKED], written[MULTIPLE]
    longest = written["policy.max_total_sequence_length"]
    cut = (2 * context if context > 1 else 1) * (
        tensor if written[f"{MEGATRON}.sequence_parallel"] else 1
    )
    given, each = MULTIPLE in settled.own, int(_number(multiple)) or cut
    uneven, asked = longest % each != 0, "must "
    if cut > 1:
        asked += f"be a multiple of {cut}, which context and sequence parallelism ask for, and "
    yield Limit(
        f"nemo.{MULTIPLE}",
        multiple,
        packed and given and (each % cut != 0 or uneven),
        f"{asked}divide the longest sequence, {longest}",
        SEAMS["cut-evenly"].path,
        "leave it out",
    )
    name = "context" if context > 1 else "tensor"
    yield Limit(
        f"{PARALLEL}{name}",
        getattr(settled.layout, name),
        packed and not given and uneven,
        f"cuts sequences in {each} parts, and the longest has {longest} tokens",
        SEAMS["cut-evenly"].path,
    )


def _of_sampled_batches(written: Mapping[str, Any]) -> Iterator[Limit]:
    """Yield the limit of how many prompts are sampled at a time."""
    more, dynamic_sampling = "grpo.batch_multiplier", "grpo.use_dynamic_sampling"
    yield Limit(
        f"nemo.{more}",
        written.get(more),
        written.get(more, 1) != 1 and not written.get(dynamic_sampling),
        f"must be 1 without {dynamic_sampling}",
        SEAMS["batch-multiplier"].path,
        f"leave it out, or add +nemo.{dynamic_sampling}=true",
    )


def _of_logprobs(written: Mapping[str, Any]) -> Iterator[Limit]:
    """Yield the limits of how logits become logprobs, from every key that NeMo RL gets."""
    chunk, deferred = "policy.logprob_chunk_size", f"{MEGATRON}.defer_fp32_logits"
    yield Limit(
        f"nemo.{chunk}",
        written.get(chunk),
        _number(written.get(chunk)) > 0 and not written.get(deferred),
        f"needs {deferred}",
        SEAMS["chunked-logprobs"].path,
        f"add +nemo.{deferred}=true",
    )
    fused = f"{MEGATRON}.use_fused_linear_logprobs"
    yield Limit(
        f"nemo.{fused}",
        written.get(fused),
        bool(written.get(fused)) and written[PACKED],
        "excludes packed sequences, which a plan turns on",
        SEAMS["fused-logprobs"].path,
        f"leave it out, or add +nemo.{PACKED}=false",
    )


def _of_decode(recipe: Recipe, written: Mapping[str, Any]) -> Iterator[Limit]:
    """Yield the limits of XQA: no graph that holds it may serve steps with prompts too.

    With each of these values vLLM's mode becomes FULL (`vllm/config/compilation.py`), whose graphs
    its second model runner captures with one token a sequence.
    """
    for key, full in FULL_GRAPHS.items():
        value = written.get(f"{COMPILATION}.{key}")
        yield Limit(
            f"nemo.{COMPILATION}.{key}",
            value,
            recipe.decodes_by_xqa and str(value).upper() in full,
            "replays a decode step's graph for prompts, which glue.decode=xqa cannot attend to",
            f"vllm/v1/worker/gpu/cudagraph_utils.py, mixed_mode, by {key}",
            "leave it out, or set glue.decode=fa3",
        )


def _of_training(recipe: Recipe, written: Mapping[str, Any]) -> Iterator[Limit]:
    """Yield the limits of Megatron's layers and schedule, from every key that it gets."""
    at, tensor = f"nemo.{MEGATRON}", written[TENSOR]
    graphs = written.get(f"{MEGATRON}.cuda_graph_impl", "none")
    whole = written.get(f"{MEGATRON}.recompute_granularity", "full") == "full"
    yield Limit(
        f"{at}.cuda_graph_impl",
        graphs,
        graphs not in ("none", "full_iteration")
        and whole
        and written[f"{MEGATRON}.activation_checkpointing"],
        "excludes recomputing whole layers",
        SEAMS["graphs-of-recompute"].path,
        f"set model.memory.recompute=false, or add +{at}.recompute_granularity=selective",
    )
    deepep, dispatcher = f"{MEGATRON}.moe_enable_deepep", f"{MEGATRON}.moe_token_dispatcher_type"
    yield Limit(
        f"nemo.{deepep}",
        written.get(deepep),
        bool(written.get(deepep)) and written.get(dispatcher) != "flex",
        f"needs {dispatcher}=flex",
        SEAMS["deepep-dispatcher"].path,
        f"add +nemo.{dispatcher}=flex",
    )
    by_sequence = written[f"{MEGATRON}.sequence_parallel"]
    yield Limit(
        f"{at}.sequence_parallel",
        by_sequence,
        recipe.model.shape.experts > 0 and tensor > 1 and not by_sequence,
        f"must be true for experts with model.parallel.tensor={tensor}",
        SEAMS["experts-by-sequence"].path,
        "leave it out, or set model.parallel.tensor=1",
    )
    decay = written.get(f"{MEGATRON}.scheduler.lr_decay_iters")
    longest = recipe.grpo.steps if decay is None else decay
    warmup = recipe.grpo.warmup_steps
    yield Limit(
        "grpo.warmup_steps",
        warmup,
        warmup is not None and warmup >= _number(longest),
        f"must be below the schedule's {longest} steps, or Megatron shortens it",
        SEAMS["short-schedule"].path,
        "lower it",
    )
    fusion = f"{MEGATRON}.model_overrides.moe_router_fusion"
    yield Limit(
        f"nemo.{fusion}",
        written.get(fusion),
        recipe.replay.is_on and bool(written.get(fusion)),
        f"must be false with replay={recipe.replay.name}: the fused top-k asks no replay",
        SEAMS["fused-router"].path,
        "leave it out, or set replay=none",
    )


def _of_fp8_training(recipe: Recipe, written: Mapping[str, Any]) -> Iterator[Limit]:
    """Yield the limits of TransformerEngine's FP8, from every key that it gets."""
    in_fp8 = recipe.precision.train.is_quantized
    scaling = written[f"{MEGATRON}.fp8_cfg.fp8_recipe"]
    yield Limit(
        f"nemo.{MEGATRON}.fp8_cfg.fp8_recipe",
        scaling,
        in_fp8 and scaling != "blockwise",
        "must be blockwise, the rollout's format; mxfp8 is Blackwell's",
        "transformer_engine, check_mxfp8_support",
        "leave it out",
    )
    multiple = written[MULTIPLE]
    tokens = 8 * (written[TENSOR] if written[f"{MEGATRON}.sequence_parallel"] else 1)
    yield Limit(
        f"nemo.{PACKED}",
        written[PACKED],
        in_fp8 and not written[PACKED] and _number(multiple) % tokens != 0,
        f"must be true with precision.train_linear=fp8, or sequences multiples of {tokens} tokens",
        "transformer_engine, assert_dim_for_fp8_exec",
        "leave it out, or add +nemo.policy.make_sequence_length_divisible_by=128",
    )


def _number(value: Any) -> float:
    """Return a user's own number; 0 for none, or for another type, which is refused elsewhere."""
    return value if type(value) in (int, float) else 0
