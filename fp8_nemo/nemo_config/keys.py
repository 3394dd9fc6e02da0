"""NeMo RL's keys: which a base file may lack, which are said in our words, which are not driven.

Keys are dotted, values are leaves, so that a plan can be shown as a difference, applied in struct
mode, where a misspelled key is an error, and typed as a stock command line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fp8_nemo.recipe.plain import to_json

GENERATION = "policy.generation"
COLOCATED = f"{GENERATION}.colocated"
VLLM = f"{GENERATION}.vllm_cfg"
VLLM_KWARGS = f"{GENERATION}.vllm_kwargs"
COMPILATION = f"{VLLM_KWARGS}.compilation_config"
PASSES = f"{COMPILATION}.pass_config"
MEGATRON = "policy.megatron_cfg"
PEFT = f"{MEGATRON}.peft"
ASYNC = "grpo.async_grpo"

ADDED = {
    "data.train.data_path": "str",
    "data.train.input_key": "str",
    "data.train.output_key": "str",
    "data.validation.dataset_name": "str",
    "data.validation.data_path": "str",
    "data.validation.input_key": "str",
    "data.validation.output_key": "str",
    "grpo.skip_reference_policy_logprobs_calculation": "bool",
    "policy.logprob_chunk_size": "int | None",
    "policy.offload_optimizer_for_refit": "bool",
    "policy.router_replay.enabled": "bool",
    "policy.sequence_packing.fuse_loss": "bool",
    f"{MEGATRON}.clear_memory_caches_before_refit": "bool",
    f"{MEGATRON}.defer_fp32_logits": "bool",
    **dict.fromkeys(
        (
            f"{MEGATRON}.optimizer.{name}"
            for name in ("initial_loss_scale", "loss_scale_window", "hysteresis")
        ),
        "float",
    ),
    f"{MEGATRON}.scheduler.override_opt_param_scheduler": "bool",
    f"{VLLM}.enable_prefix_caching": "bool | None",
    f"{VLLM}.quantization_ignored_layer_kws": "list",
    f"{VLLM}.pow2_weight_scaling_factors": "bool",
    f"{VLLM}.pow2_activation_scaling_factors": "bool",
}
"""Keys that NeMo RL reads, that its base files may lack, and its classes too; with their types."""
OPEN_MAPS = (
    "env",
    VLLM_KWARGS,
    f"{VLLM}.env_vars",
    f"{MEGATRON}.env_vars",
    f"{MEGATRON}.model_overrides",
    "policy.hf_config_overrides",
    "policy.tokenizer.chat_template_kwargs",
)
"""Maps whose keys are an environment's, vLLM's, Megatron's or the model's."""
ONLY_IF_KNOWN = (f"{VLLM}.logprobs_mode", f"{MEGATRON}.checkpoint.async_save")
"""Written where the host has them; v0.7.0 has processed logprobs and whole saves built in."""

OURS = {
    "grpo.max_num_steps": "grpo.steps",
    "grpo.num_prompts_per_step": "grpo.prompts_per_step",
    "grpo.num_generations_per_prompt": "grpo.generations_per_prompt",
    "grpo.val_period": "grpo.validate_every",
    "grpo.val_at_start": "grpo.validate_first",
    "grpo.seed": "seed",
    "policy.train_global_batch_size": "grpo.updates_per_step",
    "policy.model_name": "model.path or model.hf_id",
    "policy.max_total_sequence_length": "grpo.max_new_tokens",
    f"{GENERATION}.max_new_tokens": "grpo.max_new_tokens",
    f"{VLLM}.max_model_len": "grpo.max_new_tokens",
    f"{VLLM_KWARGS}.kv_cache_memory_bytes": "model.memory.kv_cache_gib",
    f"{MEGATRON}.activation_checkpointing": "model.memory.recompute",
    f"{VLLM}.precision": "precision.rollout_linear",
    f"{VLLM}.kv_cache_dtype": "precision.rollout_kv",
    f"{VLLM}.num_first_layers_in_bf16": "precision.first_layers_bf16",
    f"{VLLM}.num_last_layers_in_bf16": "precision.last_layers_bf16",
    f"{VLLM}.pow2_weight_scaling_factors": "precision.scales",
    f"{VLLM}.pow2_activation_scaling_factors": "precision.scales",
    f"{MEGATRON}.fp8_cfg.enabled": "precision.train_linear",
    **dict.fromkeys(
        ("policy.precision", f"{MEGATRON}.optimizer.bf16", f"{MEGATRON}.optimizer.fp16"),
        "precision.train_linear",
    ),
    f"{MEGATRON}.optimizer.initial_loss_scale": "precision.loss_scale",
    f"{MEGATRON}.optimizer.lr": "grpo.learning_rate",
    f"{MEGATRON}.tensor_model_parallel_size": "model.parallel.tensor",
    f"{MEGATRON}.pipeline_model_parallel_size": "model.parallel.pipeline",
    f"{MEGATRON}.context_parallel_size": "model.parallel.context",
    f"{MEGATRON}.expert_model_parallel_size": "model.parallel.expert",
    f"{VLLM}.tensor_parallel_size": "model.parallel.rollout_tensor",
    f"{VLLM}.expert_parallel_size": "model.parallel.rollout_expert",
    "cluster.num_nodes": "cluster.nodes",
    "cluster.gpus_per_node": "cluster.gpus_per_node",
    f"{COLOCATED}.enabled": "cluster.rollout_gpus",
    f"{COLOCATED}.resources.gpus_per_node": "cluster.rollout_gpus",
    f"{COLOCATED}.resources.num_nodes": "cluster.rollout_gpus",
    f"{ASYNC}.enabled": "grpo.max_sample_age",
    f"{ASYNC}.max_trajectory_age_steps": "grpo.max_sample_age",
    f"{VLLM}.async_engine": "grpo.max_sample_age",
    "loss_fn.use_importance_sampling_correction": "correction",
    "loss_fn.truncated_importance_sampling_type": "correction",
    "loss_fn.truncated_importance_sampling_ratio": "correction.truncate or correction.high",
    "loss_fn.truncated_importance_sampling_ratio_min": "correction.low",
    "loss_fn.reference_policy_kl_penalty": "grpo.kl_penalty",
    "checkpointing.save_period": "grpo.checkpoint_every",
    "checkpointing.checkpoint_dir": "outputs",
    "logger.log_dir": "outputs",
    "logger.wandb_enabled": "logging.wandb",
    "logger.tensorboard_enabled": "logging.tensorboard",
    "data.train.data_path": "data.path",
    "data.validation.data_path": "data.path",
    "policy.router_replay.enabled": "replay",
    f"{PEFT}.enabled": "lora",
    f"{PEFT}.dim": "lora.rank",
    f"{PEFT}.alpha": "lora.alpha",
    f"{PEFT}.target_modules": "lora.target_modules",
    f"{PEFT}.exclude_modules": "lora.target_modules",
}
"""NeMo RL's keys that have a word of ours: said twice, they could disagree."""
WARMUP, CLIP_GRAD = f"{MEGATRON}.scheduler.lr_warmup_iters", f"{MEGATRON}.optimizer.clip_grad"
_ESTIMATOR, _SHAPING = "grpo.adv_estimator", "grpo.reward_shaping"
SHAPES, SCALES = f"{_SHAPING}.enabled", "grpo.reward_scaling.enabled"
BUFFER, LONGEST = f"{_SHAPING}.overlong_buffer_length", f"{_SHAPING}.max_response_length"
PENALTY = f"{_SHAPING}.overlong_buffer_penalty"
STOP_COEFFICIENT = f"{_SHAPING}.stop_properly_penalty_coef"
OPTIONAL = {
    "grpo.warmup_steps": (WARMUP,),
    "grpo.max_grad_norm": (CLIP_GRAD,),
    "algorithm.estimator": (f"{_ESTIMATOR}.name",),
    "algorithm.minus_baseline": (f"{_ESTIMATOR}.minus_baseline",),
    **{
        f"algorithm.{name}": (f"grpo.{name}", f"{_ESTIMATOR}.{name}")  # the loop reads the first
        for name in ("use_leave_one_out_baseline", "normalize_rewards")
    },
    **{
        f"algorithm.{name}": (f"loss_fn.{name}",)
        for name in (
            *("ratio_clip_min", "ratio_clip_max", "ratio_clip_c", "disable_ppo_ratio"),
            *("use_cispo", "sequence_level_importance_ratios", "token_level_loss"),
            "use_kl_in_reward",
        )
    },
    **{
        f"algorithm.{name}": (f"grpo.{name}",)
        for name in (
            *("overlong_filtering", "use_dynamic_sampling", "dynamic_sampling_max_gen_batches"),
            "batch_multiplier",
        )
    },
    "algorithm.overlong_buffer_penalty": (PENALTY,),
    "algorithm.stop_properly_penalty_coef": (STOP_COEFFICIENT,),
    "algorithm.reward_target_min": ("grpo.reward_scaling.target_min",),
}
"""Options that write a key of NeMo RL's only where they are given; else the base, or the user's own
key under `nemo`, stands."""

_IN_FLIGHT = "a refit is proven while its engine samples nothing"
_TEXT = "NeMo RL hands over a text, and TransformerEngine's FusedAdam wants a torch.dtype"
_FILTER = "the trainer's logprob of a token that it would have filtered out is 0"
PINNED: dict[str, tuple[Any, str]] = {
    f"{VLLM}.logprobs_mode": ("processed_logprobs", "others are not those it sampled from"),
    f"{GENERATION}.backend": ("vllm", "the only engine whose FP8 path is driven here"),
    f"{GENERATION}.top_p": (1.0, f"not supported yet, {_FILTER}"),
    f"{GENERATION}.top_k": (None, f"not supported yet, {_FILTER}"),
    f"{VLLM}.pipeline_parallel_size": (1, "not supported yet; NeMo RL wants its async engine"),
    f"{MEGATRON}.fp8_cfg.fp8_param": (
        False,
        "not supported yet: a refit would be given FP8 weights, and quantizes BF16 ones",
    ),
    f"{MEGATRON}.distributed_data_parallel_config.overlap_param_gather": (
        False,
        "a refit would send shards of before the last update: they are gathered in the next "
        "forward, and none comes between (NeMo RL main 7ea279a and v0.7.0)",
    ),
    "data_plane.enabled": (False, "not supported yet, its loop gives no metrics and correction"),
    "data.use_multiple_dataloader": (False, "not supported yet"),
    "policy.dtensor_cfg.enabled": (False, "the plan is written for Megatron"),
    f"{MEGATRON}.enabled": (True, "the plan is written for Megatron"),
    "policy.draft.enabled": (False, "not supported yet"),
    "loss_fn.force_on_policy_ratio": (False, "it drops the logprob pass that mismatch is seen in"),
    "loss_fn.sequence_level_importance_ratios": (
        False,
        "set algorithm=gspo, or correction=seq-tis for its correction alone",
    ),
    "checkpointing.enabled": (True, "a run that stops must be able to go on"),
}
"""Keys written by every plan whose other values are not driven, measured or corrected here."""
ABSENT = {
    "policy.router_replay.enabled": (False, "set replay=r3"),
    "policy.quant_cfg": (None, "precision says what is quantized"),
    f"{GENERATION}.quant_cfg": (None, "precision says what is quantized"),
    f"{GENERATION}.refit_transport": (None, "not supported yet"),
    f"{ASYNC}.in_flight_weight_updates": (False, f"not supported yet: {_IN_FLIGHT}"),
    f"{ASYNC}.max_generation_failures": (0, "a step lacks no answer in silence"),
    f"{VLLM}.is_mx": (False, "blockwise FP8 is what is driven here"),
    f"{VLLM}.refit_with_reload_api": (False, "not supported yet: it goes around our receiver"),
    f"{PEFT}.enabled": (False, "set lora=all-linear"),
    f"{PEFT}.dropout": (0.0, "it would change the loss's logprobs, and no others"),
    f"{MEGATRON}.model_overrides.tp_comm_overlap": (
        False,
        "NeMo RL initializes no user buffers for it",
    ),
    f"{MEGATRON}.model_overrides.batch_invariant_mode": (
        False,
        "NeMo RL enables no such kernels",
    ),
    f"{MEGATRON}.optimizer.exp_avg_dtype": (None, _TEXT),
    f"{MEGATRON}.optimizer.exp_avg_sq_dtype": (None, _TEXT),
}
"""The same, for keys that not every base file has."""

PASSED = {
    **dict.fromkeys(("model", "served_model_name"), "model.path or model.hf_id"),
    **dict.fromkeys(("dtype", "quantization"), "precision.rollout_linear"),
    "kv_cache_dtype": "precision.rollout_kv",
    "tensor_parallel_size": "model.parallel.rollout_tensor",
    "enable_expert_parallel": "model.parallel.rollout_expert",
    "gpu_memory_utilization": "model.memory.rollout_share",
    "max_model_len": "grpo.max_new_tokens",
    **{
        name: f"+nemo.{VLLM}.{name}"
        for name in ("load_format", "skip_tokenizer_init", "enable_prefix_caching", "enforce_eager")
    },
    **dict.fromkeys(
        (
            *("pipeline_parallel_size", "seed", "trust_remote_code", "worker_extension_cls"),
            *("enable_sleep_mode", "disable_log_stats", "logprobs_mode"),
            "distributed_executor_backend",
        ),
        "",
    ),
}
"""Arguments of vLLM that NeMo RL writes, to the word that sets them. If the user set one too, it
would be a `TypeError`, or one of the two would be lost."""
MOVES_EXPERTS = ("enable_eplb", "enable_elastic_ep")
"""Arguments by which vLLM gives experts other places while it runs, or an expert several."""
DRAFTED = ("speculative_config", "spec_method", "spec_model", "spec_tokens")


def may_be_added(key: str, declared: Mapping[str, str] = ADDED) -> bool:
    """Return whether a base file may lack a key: NeMo RL declares it, or its map is open."""
    above = [key[: dot.start()] for dot in re.finditer(r"\.", key)]
    return key in declared or any(
        each in OPEN_MAPS or "dict" in declared.get(each, "").split(" | ") for each in above
    )


def command_line(
    base_config: str, written: Mapping[str, Any], declared: Mapping[str, str] = ADDED
) -> list[str]:
    """Return the stock command that sets the same configuration, as an argument list.

    Args:
        base_config: relative to NeMo RL's checkout.
        written: all overrides, folders included. Keys that a base may lack get Hydra's `++`.
        declared: keys of the host, with their types.
    """
    words = [
        f"{'++' if may_be_added(key, declared) else ''}{key}={hydra_value(value)}"
        for key, value in written.items()
    ]
    return ["python", "examples/run_grpo.py", "--config", base_config, *words]


def hydra_value(value: Any) -> str:
    """Write a value for Hydra's command line: texts quoted, the rest as in JSON."""
    if isinstance(value, str):
        # Hydra takes a backslash for one, but before a quote.
        doubled = re.sub(r"\\+(?='|$)", lambda run: run[0] * 2, value)
        return "'" + doubled.replace("'", "\\'") + "'"
    if isinstance(value, list):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{hydra_value(each)}" for key, each in value.items()) + "}"
    return to_json(value)
