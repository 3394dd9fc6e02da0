"""Say what an aligned engine (`precision.align`) needs of NeMo RL's configuration, and where not.

What was measured is vLLM 0.25.1 on a Hopper GPU beside Megatron, with dense models, inside NeMo RL
and outside (docs/research/mismatch.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fp8_nemo.nemo_config.host import Host
from fp8_nemo.nemo_config.keys import GENERATION, MEGATRON, PASSES, VLLM, VLLM_KWARGS
from fp8_nemo.nemo_config.seams import SEAMS
from fp8_nemo.nemo_config.versions import ALIGNMENT_UNTRIED, Limit
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.settled import Settled

NORMS = [f"{VLLM_KWARGS}.ir_op_priority.{name}" for name in ("rms_norm", "fused_add_rms_norm")]
FUSIONS = {
    f"{MEGATRON}.apply_rope_fusion": "megatron/core/models/common/embeddings/rope_utils.py",
    f"{MEGATRON}.bias_activation_fusion": "megatron/core/transformer/mlp.py",
}
"""Megatron's keys that choose the operations whose roundings the engine takes over."""
REMEDY = "set precision.align=none"
NOT_EXACT = "set precision.align=cheap"
HEAD = 128
EXACT_KEYS = {
    "policy.sequence_packing.enabled": True,
    f"{GENERATION}.temperature": 1.0,
    f"{VLLM}.use_deep_gemm": True,
    f"{VLLM}.quantization_ignored_layer_kws": [],
    f"{VLLM}.env_vars.VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    f"{VLLM_KWARGS}.disable_cascade_attn": True,
    f"{VLLM_KWARGS}.attention_backend": "FLASH_ATTN",
    f"{VLLM_KWARGS}.attention_config.backend": "FLASH_ATTN",
    f"{VLLM_KWARGS}.attention_config.flash_attn_version": 3,
}
"""Keys that choose a kernel or rounding of one side, and what they must be if they are set."""
PIPELINE = f"{MEGATRON}.pipeline_model_parallel_size"
MICRO_BATCH_ROWS = 2944
"""`aligned.rows.ROWS`, which workers import and a plan does not."""
HIDDEN_SIZES = (512, 768, 1024, 2048, 4096, 8192)
"""Of `aligned.ops.NORM_WARPS`, which vLLM's processes import and a plan does not."""
GAINS = {
    "exact": "made trainer and engine agree to the last bits",
    "cheap": "lowers this precision's mismatch, and cost no time where decode was timed",
}
"""What a plan says of an alignment; the first that can run."""
ONE_GPU = {
    f"{MEGATRON}.tensor_model_parallel_size": "model.parallel.tensor",
    f"{MEGATRON}.context_parallel_size": "model.parallel.context",
    f"{VLLM}.tensor_parallel_size": "model.parallel.rollout_tensor",
}


def alignment_notes(settled: Settled, host: Host) -> Iterator[str]:
    """Note that an engine could be aligned, where runs had one, or has micro-batches of few rows.

    Args:
        settled: with its layout chosen.
        host: that it would run in.
    """
    recipe, precision, layout = settled.recipe, settled.recipe.precision, settled.layout
    rows = settled.sequence_tokens * min(layout.micro_batch, layout.logprob_batch)
    if precision.is_exact and rows < MICRO_BATCH_ROWS:
        yield (
            f"precision.align=exact: micro-batches of {rows:,} tokens; with fewer than "
            f"{MICRO_BATCH_ROWS:,} two layers of 8B agreed, no other model ran (docs/precision.md)"
        )
    if (
        not precision.train.is_quantized
        or precision.is_aligned
        or precision.cache.is_quantized
        or not recipe.glue.sends_fp8
        or layout.rollout_tensor > 1
        or not settled.shares_gpus
        or ALIGNMENT_UNTRIED in host.defects
    ):
        return
    sizes = dict(zip(ONE_GPU, (layout.tensor, layout.context, 1), strict=True))
    sizes |= {PIPELINE: layout.pipeline}
    written = dict.fromkeys(FUSIONS, True) | sizes | dict(settled.own)
    for align, gain in GAINS.items():
        aligned = replace(recipe, precision=replace(precision, align=align))
        if not any(limit.broken for limit in alignment_limits(aligned, written)):
            yield f"precision.align: {align} {gain} (docs/precision.md); it begins another run"
            return


def alignment_keys(precision: Precision) -> dict[str, Any]:
    """Return what was measured: the eager engine's norm, nothing fused, Megatron's own fusions.

    vLLM's cache of compiled graphs is named by these keys among others (seam graphs-by-norm), so
    that an aligned engine does not load the graph of one that is not.
    """
    if not precision.is_aligned:
        return {}
    return {
        **{key: ["vllm_c", "native"] for key in NORMS},
        **{f"{PASSES}.{name}": False for name in ("fuse_norm_quant", "fuse_act_quant")},
        **dict.fromkeys(FUSIONS, True),
    }


def alignment_limits(recipe: Recipe, written: Mapping[str, Any]) -> Iterator[Limit]:
    """Yield the limits of models, GPUs and keys: of what the kernels cannot do, or never did."""
    aligned, shape = recipe.precision.is_aligned, recipe.model.shape
    head = shape.head_dim
    for broken, why, mirrors in (
        (
            shape.experts > 0,
            "is for dense models: vLLM calls the experts' SiLU and quantizer as kernels, which "
            "nothing replaces",
            SEAMS["experts-quantizer"].path,
        ),
        (
            head & (head - 1) > 0,
            f"needs heads of a power of two, got model.shape.head_dim={head}",
            "fp8_nemo/nemo/aligned/kernels.py, tl.arange",
        ),
        (
            recipe.precision.plain.scales_loss,
            "rounds to BF16: its kernels were not written for precision=fp16",
            "fp8_nemo/nemo/aligned/ops.py",
        ),
        (
            recipe.precision.rollout.group > 0,
            "was not tried with linears in four bits",
            "benchmarks/numerics/mismatch_budget.py",
        ),
        (
            recipe.cluster.gpu == "b200",
            "was not tried on cluster.gpu=b200: its kernels have Hopper's instructions",
            "fp8_nemo/nemo/aligned/kernels.py",
        ),
    ):
        yield Limit(
            "precision.align", recipe.precision.align, aligned and broken, why, mirrors, REMEDY
        )
    yield from _exact_limits(recipe, written)
    for key, mirrors in FUSIONS.items():
        yield Limit(
            f"nemo.{key}",
            written.get(key),
            aligned and not written.get(key),
            f"must be true with precision.align={recipe.precision.align}, which has its roundings",
            mirrors,
            f"leave it out, or {REMEDY}",
        )


def _exact_limits(recipe: Recipe, written: Mapping[str, Any]) -> Iterator[Limit]:
    """Yield what equality needs, bit for bit: each operation that no kernel of ours replaces."""
    exact = recipe.precision.is_exact
    needs = (*_exact_formats(recipe), *_exact_shapes(recipe.model.shape), *_exact_sizes(written))
    for broken, why, mirrors, remedy in needs:
        yield Limit("precision.align", "exact", exact and broken, why, mirrors, remedy)
    for key, wanted in EXACT_KEYS.items():
        held = written.get(key)
        yield Limit(
            f"nemo.{key}",
            held,
            exact and held is not None and held != wanted,
            f"must be {wanted} with precision.align=exact",
            f"{key}, another kernel or rounding",
            f"leave it out, or {NOT_EXACT}",
        )


def _exact_formats(recipe: Recipe) -> Iterator[tuple[bool, str, str, str]]:
    """Yield what both sides must hold: whether it is broken, why, what that mirrors, a remedy."""
    precision = recipe.precision
    blocks = precision.rollout.is_quantized and precision.train.is_quantized
    yield (
        not blocks or precision.bf16_layers > 0,
        "needs every linear in FP8 on both sides: in BF16 a product depends on the batch",
        "benchmarks/results/mismatch-aligned-llama-d128-flash-bf16-h200.json",
        "choose precision=fp8-e2e",
    )
    yield (
        precision.cache.is_quantized,
        "needs a cache in BF16: the trainer attends in BF16",
        "transformer_engine/common/recipe/__init__.py, Float8BlockScaling",
        "choose precision=fp8-e2e",
    )
    yield (
        not recipe.glue.sends_fp8,
        "needs weights quantized by our glue, whose bytes are the trainer's",
        "nemo_rl/models/generation/vllm/quantization/fp8.py, cast_tensor_to_fp8_blockwise",
        "choose glue=ours",
    )
    yield (
        precision.scales != "fp32",
        "needs block scales in FP32: vLLM rounds activations to powers of two by itself",
        "fp8_nemo/nemo/aligned/engine.py, AlignedQuantizer",
        "set precision.scales=fp32",
    )
    yield (
        recipe.noise.is_on,
        "is undone by noise, which the engine's weights alone get",
        "fp8_nemo/glue/refit.py, with_noise",
        "set noise=none",
    )
    yield (
        recipe.lora.is_on,
        "serves merged weights, where the trainer adds LoRA's product",
        "megatron/bridge/peft/lora_layers.py",
        NOT_EXACT,
    )


def _exact_shapes(shape: Shape) -> Iterator[tuple[bool, str, str, str]]:
    """Yield what a model's operations must be, likewise."""
    yield (
        shape.head_dim != HEAD,
        f"needs heads of {HEAD}, got model.shape.head_dim={shape.head_dim}: the trainer rounds "
        "Q, K and V together in blocks of 128 rows, vLLM each apart",
        "megatron/core/transformer/attention.py, linear_qkv",
        NOT_EXACT,
    )
    yield (
        shape.hidden not in HIDDEN_SIZES,
        f"needs model.shape.hidden to be one of {', '.join(map(str, HIDDEN_SIZES))}, got "
        f"{shape.hidden}: of these TransformerEngine has norms that ours repeats",
        "transformer_engine/common/normalization/rmsnorm/rmsnorm_fwd_cuda_kernel.cu",
        NOT_EXACT,
    )
    yield (
        shape.qk_norm or bool(shape.qkv_bias),
        "repeats no norm and no bias of Q and K",
        "megatron/core/transformer/attention.py, q_layernorm",
        NOT_EXACT,
    )


def _exact_sizes(written: Mapping[str, Any]) -> Iterator[tuple[bool, str, str, str]]:
    """Yield that no sum may be shared by GPUs, and no micro-batch be short, likewise."""
    for key, option in ONE_GPU.items():
        yield (
            written.get(key, 1) != 1,
            f"needs {option}=1, got {written.get(key)}: more GPUs add in another order",
            key,
            f"set {option}=1",
        )
    yield (
        written.get(PIPELINE, 1) != 1,
        f"needs model.parallel.pipeline=1, got {written.get(PIPELINE)}: micro-batches of a "
        "pipeline have one length, which may be short",
        PIPELINE,
        "set model.parallel.pipeline=1",
    )
