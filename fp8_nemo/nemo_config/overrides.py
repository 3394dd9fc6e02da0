"""Recipe -> NeMo RL's configuration: every key that a cell depends on, as one flat dictionary.

The only place where our words become NeMo RL's. A cell writes all keys that an option of ours, a
limit of the host or a known defect depends on, and inherits none of them: base files differ (one
sets `force_on_policy_ratio`, and the logprob pass is gone; one has `async_save`).

Folders are added last, when it is known where a run stands (`path_overrides`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8_nemo.nemo_config.host import Host
from fp8_nemo.nemo_config.keys import (
    ABSENT,
    COMPILATION,
    GENERATION,
    MEGATRON,
    ONLY_IF_KNOWN,
    PASSES,
    PEFT,
    PINNED,
    VLLM,
    VLLM_KWARGS,
)
from fp8_nemo.nemo_config.own.alignment import alignment_keys
from fp8_nemo.nemo_config.own.asynchronous import asynchronous_keys
from fp8_nemo.nemo_config.own.environments import reward_keys, reward_paths
from fp8_nemo.nemo_config.own.fp16 import fp16_keys
from fp8_nemo.nemo_config.own.layouts import layout_keys
from fp8_nemo.nemo_config.own.loss import algorithm_keys, loss_keys
from fp8_nemo.recipe.model_dir import model_path
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.options.training import Lora
from fp8_nemo.recipe.plain import leaves
from fp8_nemo.recipe.settled import (
    GROUPED,
    KEPT_CHECKPOINTS,
    LOGITS_CHUNK,
    LOGPROB_BATCH,
    MICRO_BATCH,
    PROMPT,
    SHARE,
    VALIDATED,
    Settled,
)

GIB = 2**30
ARCHITECTURES = {"h100": "9.0", "h200": "9.0", "b200": "10.0"}
GRAPHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PROMPT_FILE = "data.default.prompt_file"
VALIDATION_BATCH = "grpo.val_batch_size"
WANDB_NAME = "logger.wandb.name"
VLLM_PRECISION = {"bf16": "bfloat16", "fp16": "float16", "fp8": "fp8", "nvfp4": "bfloat16"}
"""`vllm_cfg.precision` by the format of the engine's linear weights. To four bits our generation
worker adds what NeMo RL has no key for (`nemo/marlin/layout.py`, quantization)."""
TILES = Path(__file__).parent / "tiles"
"""Tiles of vLLM's kernel for experts, in files that vLLM names by experts, width, GPU and format:
its default's below 128 rows, from there those that it ships for an H200. On an H100 they took 0.61
to 0.74 of the default's time (benchmarks/results/experts-h100.json)."""
VLLM_CACHE = {"bf16": "auto", "fp16": "auto", "fp8": "fp8"}
"""`vllm_cfg.kv_cache_dtype` by the format of the cache."""


def keys_of(settled: Settled, host: Host) -> dict[str, Any]:
    """Return every key that a cell sets, but folders; the user's own then replace ours."""
    recipe = settled.recipe
    base = recipe.model.base_config or ""
    there = host.leaves(base)
    written = {
        **_grpo(settled),
        **asynchronous_keys(settled),
        **loss_keys(settled),
        **_rollout(settled),
        **_train(settled),
        **layout_keys(settled),
        **_lengths(settled),
        **_data(recipe),
        **reward_keys(recipe.data),
        **_records(recipe),
        **{key: value for key, (value, _) in PINNED.items()},
        **{key: value for key, (value, _) in ABSENT.items() if there.get(key, value) != value},
        **algorithm_keys(settled),
        **_replay(recipe),
        **_lora(recipe.lora),
        **alignment_keys(recipe.precision),
        **fp16_keys(recipe.precision),
        VALIDATION_BATCH: settled.validation_problems,  # one batch of all
    }
    lacking = set(ONLY_IF_KNOWN).difference(there) if host.bases is not None else ()
    return {key: value for key, value in written.items() if key not in lacking}


def environment_variables(settled: Settled) -> dict[str, str]:
    """Return those of the driver's process, which its workers inherit; never a secret."""
    recipe = settled.recipe
    found = {
        "TORCH_CUDA_ARCH_LIST": ARCHITECTURES[recipe.cluster.gpu],  # seam architectures
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # as measured; it would be compiled at the first step
    }
    if recipe.precision.rollout_linear == "fp8":
        # Else vLLM takes FlashInfer below 32 rows and DeepGEMM above, which quantize differently;
        # what was measured here is DeepGEMM alone.
        found["VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"] = "0"
        # It would compile for every row count; capturing the graphs compiles for those in use.
        found["VLLM_DEEP_GEMM_WARMUP"] = "skip"
    if recipe.cluster.interpreter == "system":
        found |= {"NEMO_RL_PY_EXECUTABLES_SYSTEM": "1", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    if settled.layout.rollout_tensor > 1:
        # Runner V2 of 0.25.1, a dense model's own, read foreign memory in its second step on two
        # H200s, in two runs of four; why, by reading, docs/research/log.md.
        found["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if not (recipe.model.hub_id or recipe.data.is_on_hub):
        found |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # nothing is on the hub
    return found


def path_variables(recipe: Recipe) -> dict[str, str]:
    """Return the environment variables that name folders of this package, where it runs."""
    experts = recipe.precision.rollout_linear == "fp8" and recipe.model.shape.experts
    needs_tiles = experts and recipe.cluster.gpu == "h100"  # for an H200 vLLM has its own
    return {"VLLM_TUNED_CONFIG_FOLDER": str(TILES)} if needs_tiles else {}


def path_overrides(recipe: Recipe, run_dir: Path, root: Path | None) -> dict[str, Any]:
    """Return the keys that name the run's folders, absolute: NeMo RL's are relative to its start.

    Args:
        recipe: of the plan.
        run_dir: where the run keeps everything.
        root: NeMo RL's checkout; None shows its name in the environment instead.
    """
    here = run_dir.absolute()
    found: dict[str, Any] = {
        "policy.model_name": recipe.model.hub_id or str(model_path(recipe.model).absolute()),
        "logger.log_dir": str(here / "log" / "nemo"),
        "checkpointing.checkpoint_dir": str(here / "checkpoints"),
    }
    if WANDB_NAME not in leaves(recipe.nemo):
        found[WANDB_NAME] = "-".join(here.parts[-3:])  # model, cell, seed and hash
    if recipe.data.name == "openmath-2" and PROMPT_FILE not in leaves(recipe.nemo):
        found[PROMPT_FILE] = str((root or Path()) / "examples" / "prompts" / "cot.txt")
    found |= reward_paths(recipe.data)
    if not recipe.data.is_on_hub:
        given = None if recipe.data.is_made else recipe.data.path
        folder = Path(given).absolute() if given else here / "data"
        found["data.train.data_path"] = str(folder / "train.jsonl")
        found["data.validation.data_path"] = str(folder / "validation.jsonl")
    return found


def _grpo(settled: Settled) -> dict[str, Any]:
    recipe, grpo = settled.recipe, settled.recipe.grpo
    return {
        "grpo.max_num_steps": grpo.steps,
        "grpo.max_num_epochs": 1_000_000,  # steps end a run, not the end of the data
        "grpo.num_prompts_per_step": settled.prompts_per_step,
        "grpo.num_generations_per_prompt": settled.generations_per_prompt,
        "grpo.val_period": grpo.validate_every,
        "grpo.val_at_start": grpo.validate_first and _has_first_scales(recipe),
        "grpo.val_at_end": True,
        VALIDATED: settled.validation_problems,
        "grpo.seed": recipe.seed,
        "grpo.skip_reference_policy_logprobs_calculation": settled.kl_penalty == 0,
        "policy.train_global_batch_size": settled.sequences_per_update,
    }


def _has_first_scales(recipe: Recipe) -> bool:
    """Return whether KV scales are there before a first validation; NeMo RL's own come later."""
    return not recipe.precision.cache.is_quantized or recipe.glue.recalibrate.source == "logprob"


def _replay(recipe: Recipe) -> dict[str, Any]:
    """Replay routes; with prefix cache and chunked prefill vLLM loses some (NeMo RL's recipe)."""
    if not recipe.replay.is_on:
        return {}
    return {
        "policy.router_replay.enabled": True,
        f"{VLLM}.enable_prefix_caching": False,
        f"{VLLM_KWARGS}.enable_chunked_prefill": False,
    }


def _lora(lora: Lora) -> dict[str, Any]:
    """Write every key that NeMo RL reads of LoRA: a base may lack them, or name other linears.

    Without `target_modules` its `LoRA` takes `lm_head`, too (seam adapts-the-head).
    """
    if not lora.is_on:
        return {}
    return {
        f"{PEFT}.enabled": True,
        f"{PEFT}.target_modules": list(lora.target_modules),
        f"{PEFT}.exclude_modules": [],
        f"{PEFT}.dim": lora.rank,
        f"{PEFT}.alpha": lora.alpha,
        f"{PEFT}.dropout": 0.0,
        f"{PEFT}.dropout_position": "pre",
        f"{PEFT}.lora_A_init_method": "xavier",
        f"{PEFT}.lora_B_init_method": "zero",
        f"{PEFT}.a2a_experimental": False,
        f"{PEFT}.lora_dtype": None,  # the base's None is a text
    }


def _rollout(settled: Settled) -> dict[str, Any]:
    recipe, precision, layout = settled.recipe, settled.recipe.precision, settled.layout
    fp8 = precision.rollout_linear == "fp8"
    found: dict[str, Any] = {
        f"{VLLM}.precision": VLLM_PRECISION[precision.rollout_linear],
        f"{VLLM}.kv_cache_dtype": VLLM_CACHE[precision.rollout_kv],
        f"{VLLM}.use_deep_gemm": fp8,
        f"{VLLM}.num_first_layers_in_bf16": precision.first_layers_bf16 if fp8 else 0,
        f"{VLLM}.num_last_layers_in_bf16": precision.last_layers_bf16 if fp8 else 0,
        SHARE: recipe.model.memory.rollout_share,
        f"{VLLM}.enforce_eager": False,
        f"{COMPILATION}.cudagraph_capture_sizes": graph_sizes(settled),
    }
    if fp8 and precision.scales == "pow2":
        found[f"{VLLM}.pow2_weight_scaling_factors"] = True
        found[f"{VLLM}.pow2_activation_scaling_factors"] = True
    if fp8 and recipe.model.shape.experts:
        # A substring, which is why dense models must not have it: it would take mlp.gate_proj.
        found[f"{VLLM}.quantization_ignored_layer_kws"] = ["mlp.gate"]
    if recipe.model.shape.experts:
        found[f"{VLLM_KWARGS}.moe_backend"] = "triton"  # others relayout at a refit
    if layout.kv_cache_gib is not None:
        found[f"{VLLM_KWARGS}.kv_cache_memory_bytes"] = int(layout.kv_cache_gib * GIB)
    if layout.rollout_tensor > 1:
        # Its kernels want NVLink multicast. Without it an engine dies, or decodes ten times as
        # slowly (vLLM #48071, #48075); and its workspaces took four minutes of a start
        # (nemo-30b-lora-again-2-h200.json).
        found[f"{PASSES}.fuse_allreduce_rms"] = False
    if fp8 and layout.rollout_tensor > 1 and not recipe.glue.has_receiver:
        # NeMo RL patches vLLM's workers for FP8 through Ray executor V1 only (seam executor-v1).
        # Our engine's are patched under V2 too, vLLM's default, which schedules asynchronously
        # (generation_worker.tell_workers_of_fp8).
        found[f"{VLLM}.env_vars.VLLM_USE_RAY_V2_EXECUTOR_BACKEND"] = "0"
    return found


def graph_sizes(settled: Settled) -> list[int]:
    """Return the batch sizes that vLLM captures as CUDA graphs, enough for an engine's sequences.

    vLLM's own list has 51 sizes, and DeepGEMM compiles kernels for each: three minutes of a first
    start. A batch between two sizes runs as the larger one, and reads no more weights or cache.
    """
    sequences = settled.sequences_per_engine
    return [size for before, size in zip((0, *GRAPHS), GRAPHS, strict=False) if before < sequences]


def _train(settled: Settled) -> dict[str, Any]:
    recipe, precision = settled.recipe, settled.recipe.precision
    fp8 = precision.train.is_quantized
    found: dict[str, Any] = {
        f"{MEGATRON}.fp8_cfg.enabled": fp8,
        f"{MEGATRON}.fp8_cfg.fp8": "e4m3",
        f"{MEGATRON}.fp8_cfg.fp8_recipe": "blockwise",
        f"{MEGATRON}.optimizer.use_precision_aware_optimizer": not precision.keeps_masters,
        f"{MEGATRON}.optimizer.lr": settled.learning_rate,
        f"{MEGATRON}.optimizer.min_lr": settled.learning_rate,
        f"{MEGATRON}.scheduler.lr_warmup_init": settled.learning_rate / 10,
        # A run that goes on with more steps has another schedule than its checkpoint.
        f"{MEGATRON}.scheduler.override_opt_param_scheduler": True,
        f"{MEGATRON}.activation_checkpointing": settled.layout.recompute,
        f"{MEGATRON}.checkpoint.async_save": False,
        # Position tables of each length seen stay, in segments that weights and gradients leave.
        f"{MEGATRON}.clear_memory_caches_before_refit": True,
    }
    if recipe.model.shape.experts:
        found[f"{MEGATRON}.moe_router_dtype"] = "fp32"  # as upstream's FP8 MoE recipes
    if settled.groups_experts:
        found[GROUPED] = "1"
    if fp8:
        scales = "1" if precision.scales == "fp32" else "0"
        found[f"{MEGATRON}.env_vars.NVTE_FP8_BLOCK_SCALING_FP32_SCALES"] = scales
    if fp8 and precision.bf16_layers:
        at = f"{MEGATRON}.model_overrides"
        found[f"{at}.first_last_layers_bf16"] = True
        found[f"{at}.num_layers_at_start_in_bf16"] = precision.first_layers_bf16
        found[f"{at}.num_layers_at_end_in_bf16"] = precision.last_layers_bf16
    return found


def _lengths(settled: Settled) -> dict[str, Any]:
    return {
        "policy.max_total_sequence_length": settled.sequence_tokens,
        f"{GENERATION}.max_new_tokens": settled.response_tokens,
        f"{VLLM}.max_model_len": settled.sequence_tokens,
        PROMPT: settled.prompt_tokens,
        MICRO_BATCH: settled.layout.micro_batch,
        LOGPROB_BATCH: settled.layout.logprob_batch,
        "policy.sequence_packing.enabled": True,
        # One loss for all sequences of a micro-batch, as upstream's 30B recipe has it: without it
        # every sequence's backward fills a gradient of all logits.
        "policy.sequence_packing.fuse_loss": True,
        f"{MEGATRON}.defer_fp32_logits": True,  # the loss makes them FP32 itself, by chunks
        LOGITS_CHUNK: settled.layout.logits_chunk or None,
        "policy.dynamic_batching.enabled": False,
    }


def _data(recipe: Recipe) -> dict[str, Any]:
    usual = {
        PROMPT_FILE: None,
        "data.default.system_prompt_file": None,
        "data.default.processor": "math_hf_data_processor",
        "data.default.env_name": "math",
        "env.math.math_verify_impl": "hf_math_verify",
    }
    match recipe.data.name:
        case "openmath-2":
            return usual | {"data.train.dataset_name": "OpenMathInstruct-2"}
        case "dapo-math-17k":
            return usual | {
                "data.train.dataset_name": "DAPOMath17K",
                "data.train.split_validation_size": 0,
                "data.validation.dataset_name": "DAPOMathAIME2024",
                "env.math.math_verify_impl": "dapo_math_verify",
            }
        case _:
            of_split = {
                "dataset_name": "ResponseDataset",
                "input_key": "input",
                "output_key": "output",
            }
            files = leaves({"data.train": of_split, "data.validation": of_split})
            return usual | files | {"data.train.split_validation_size": 0}


def _records(recipe: Recipe) -> dict[str, Any]:
    return {
        "logger.tensorboard_enabled": recipe.logging.tensorboard,
        "logger.wandb_enabled": recipe.logging.wandb,
        "logger.wandb.project": "fp8-nemo",
        WANDB_NAME: "-".join(
            (recipe.model.name, recipe.precision.name, recipe.correction.name, f"s{recipe.seed}")
        ),
        "logger.mlflow_enabled": False,
        "logger.swanlab_enabled": False,
        "logger.monitor_gpus": False,
        "checkpointing.save_period": recipe.grpo.checkpoint_every,
        "checkpointing.metric_name": None,  # the latest are kept, not the best
        "checkpointing.keep_top_k": KEPT_CHECKPOINTS,
        "checkpointing.checkpoint_must_save_by": None,
    }
