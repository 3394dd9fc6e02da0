"""List every line of NeMo RL, vLLM and Megatron that this package stands on, in one place.

Code and messages name a line by its key here; comments elsewhere name file and function. A test
with a checkout compares each line with the text that it must hold
(tests/nemo_config/test_seams.py), so that a line which moved is found there and mended here.
"""

from __future__ import annotations

from typing import NamedTuple

GRPO = "nemo_rl/algorithms/grpo.py"
POLICY = "nemo_rl/models/policy"
ENGINE = "nemo_rl/models/generation/vllm"
ENTRY = "examples/run_grpo.py"
MAIN, V0_7_0 = "7ea279a", "v0.7.0"
VLLM, MEGATRON = "vllm 0.25.1", "Megatron-LM 14346b6"
BRIDGE = "Megatron-Bridge 8c46dc4"


class Seam(NamedTuple):
    """Point at lines upstream: `Seam(MAIN, GRPO, (1338,), "pipeline_model_parallel_size")`."""

    of: str
    """A revision of NeMo RL, or another project and its version."""
    file: str
    lines: tuple[int, ...]
    text: str
    """What each of these lines holds."""
    why: str

    @property
    def path(self) -> str:
        """Return file and lines: `nemo_rl/algorithms/grpo.py:1338`."""
        return f"{self.file}:{','.join(map(str, self.lines))}"

    def __str__(self) -> str:
        """Return `path` without its folders: `grpo.py:1338`."""
        return self.path.rpartition("/")[2]


SEAMS = {
    "needs-correction": Seam(
        MAIN, GRPO, (1321,), '["precision"] == "fp8"',
        "an FP8 rollout must ask for the importance-sampling correction",
    ),
    "one-stage": Seam(
        MAIN, GRPO, (1338,), 'pipeline_model_parallel_size"] == 1',
        "FP8 KV: layers are counted by stage",
    ),
    "async-cache": Seam(
        MAIN, GRPO, (1335,), "assert not should_use_async_rollouts(",
        "FP8 KV has no asynchronous engine",
    ),
    "async-correction": Seam(
        MAIN, GRPO, (4127,), "assert master_config.loss_fn.use_importance_sampling_correction",
        "asynchronous steps ask for the importance-sampling correction",
    ),
    "async-age": Seam(
        MAIN, GRPO, (4144,), "max_trajectory_age_steps > 1",
        "without in-flight updates older samples make nothing faster",
    ),
    "async-apart": Seam(
        MAIN, GRPO, (4177,), "assert (not colocated_inference)",
        "asynchronous steps want engines on GPUs of their own",
    ),
    "async-first-refit": Seam(
        MAIN, GRPO, (4328,), "Policy generation refit failed",
        "a first refit that fails is printed, and the loop returns as if it had finished",
    ),
    "async-algorithms": Seam(
        MAIN, ENTRY, (186, 190, 194), "if config.grpo.",
        "asynchronous steps exclude dynamic sampling, scaled and shaped rewards",
    ),
    "async-prefixes": Seam(
        MAIN, "nemo_rl/algorithms/async_utils/trajectory_collector.py", (676,),
        "self.async_config.recompute_kv_cache_after_weight_updates",
        "a refit of asynchronous engines keeps cached prefixes unless it is told to drop them",
    ),
    "async-experts": Seam(
        MAIN, f"{ENGINE}/vllm_generation.py", (141,), 'assert not self.cfg["vllm_cfg"]["async',
        "an asynchronous engine spreads experts over its tensor-parallel GPUs alone",
    ),
    "first-validation": Seam(
        MAIN, GRPO, (2744,), "validation with kv scales",
        "the first validation samples with KV scales of 1.0",
    ),
    "logged-step": Seam(
        MAIN, GRPO, (3645,), "log_data",
        "a step's logprobs as `recipes.measure_mismatch` reads them",
    ),
    "whole-batches": Seam(
        MAIN, GRPO, (3853,), "grpo.val_batch_size",
        "validation takes whole batches alone",
    ),
    "drops-kv-scales": Seam(
        V0_7_0, GRPO, (1924,), "stream_weights_via_ipc_zmq(",
        "the colocated refit is given no KV scales",
    ),
    "pads-with-end": Seam(
        MAIN, "nemo_rl/algorithms/utils.py", (373,), "tokenizer.pad_token is None",
        "a tokenizer without a padding token pads with its end",
    ),
    "cuts-prompts": Seam(
        MAIN, "nemo_rl/data/processors.py", (427,), "length >= max_seq_length",
        "a prompt that is too long is cut to four tokens",
    ),
    "architectures": Seam(
        MAIN, f"{POLICY}/lm_policy.py", (149,), "TORCH_CUDA_ARCH_LIST",
        "the driver must be told the GPU's architecture",
    ),
    "equal-micro-batches": Seam(
        MAIN, f"{POLICY}/lm_policy.py", (212,), '== config["logprob_batch_size"]',
        "one micro-batch size for both passes at TP 4 and more",
    ),
    "whole-nodes": Seam(
        MAIN, GRPO, (904,), 'inference_gpus_per_node == cluster_config["gpus_per_node"]',
        "with several nodes, engines apart from the trainer take whole nodes",
    ),
    "gpus-per-copy": Seam(
        MAIN, f"{POLICY}/lm_policy.py", (226, 235), "raise ValueError(",
        "tensor x pipeline x context must divide the GPUs",
    ),
    "socket-per-gpu": Seam(
        MAIN, f"{POLICY}/workers/base_policy_worker.py", (137,), "ipc:///tmp/",
        "a refit has one socket per GPU of a machine",
    ),
    "gpu-by-number": Seam(
        MAIN, f"{POLICY}/workers/megatron_policy_worker.py", (439,), "local_rank = int(gpu_ids[0])",
        "Ray's GPU id is taken for a device's number",
    ),
    "calibrates": Seam(
        MAIN, f"{POLICY}/workers/megatron_policy_worker.py", (3474,), "calibrate_qkv_fp8_scales",
        "NeMo RL's own measuring of Q, K and V",
    ),
    "converted-model": Seam(
        MAIN, "nemo_rl/models/megatron/setup.py", (578,), "pt_checkpoint_exists",
        "any folder of a conversion is taken for a finished one",
    ),
    "engine-port": Seam(
        MAIN, f"{ENGINE}/vllm_worker.py", (219,), "VLLM_PORT",
        "engines that start together may take the same port",
    ),
    "engine-error": Seam(
        MAIN, f"{ENGINE}/vllm_worker.py", (1184,), "except Exception as e",
        "a worker's error is printed and answered with False",
    ),
    "hf-overrides": Seam(
        V0_7_0, f"{ENGINE}/vllm_worker.py", (355,), "vllm_kwargs.update(fp8_kwargs)",
        "FP8 replaces hf_config_overrides",
    ),
    "engine-ranks": Seam(
        MAIN, f"{ENGINE}/vllm_generation.py", (121,), "cluster.world_size() %",
        "rollout_tensor must divide the GPUs",
    ),
    "expert-ranks": Seam(
        MAIN, f"{ENGINE}/vllm_generation.py", (135,), "self.ep_size % self.tp_size == 0",
        "rollout_expert must be a multiple of rollout_tensor",
    ),
    "sleeps-or-wakes": Seam(
        MAIN, f"{ENGINE}/vllm_generation.py", (1001, 1028), "Error during policy preparation",
        "an engine that cannot sleep or wake up is printed and answered with False",
    ),
    "sleeps-or-wakes-v0.7.0": Seam(
        V0_7_0, f"{ENGINE}/vllm_generation.py", (873, 900), "Error during policy preparation",
        "the same",
    ),
    "owes-answers": Seam(
        VLLM, "vllm/v1/executor/multiproc_executor.py", (390,),
        "if status != WorkerProc.ResponseStatus.SUCCESS",
        "a worker's error leaves the answers of those behind it to the next call",
    ),
    "executor-v2": Seam(
        VLLM, "vllm/v1/executor/ray_executor_v2.py", (155,), "os.environ.setdefault(key, value)",
        "workers of Ray executor V2 get the environment of the process that starts the engine",
    ),
    "executor-v1": Seam(
        MAIN, f"{ENGINE}/quantization/fp8.py", (95,), "monkey_patch_vllm_ray_executor",
        "vLLM's workers are patched for FP8 through Ray executor V1 only",
    ),
    "scale-names": Seam(
        MAIN, f"{ENGINE}/quantization/fp8_train_utils.py", (45,), "self_attn.attn.q_scale",
        "vLLM's names of KV scales",
    ),
    "scale-alias": Seam(
        V0_7_0, f"{ENGINE}/quantization/fp8.py", (509,), 'hasattr(layer, "weight_scale")',
        "a second name for weight_scale_inv",
    ),
    "wakes-with-ones": Seam(
        VLLM, "vllm/v1/worker/gpu_model_runner.py", (960,), "def post_kv_cache_wake_up",
        "model runner V1 fills KV scales with 1.0 when the cache wakes up",
    ),
    "gradients-of-masters": Seam(
        MEGATRON, "megatron/core/optimizer/distrib_optimizer.py", (2782,),
        "shard_model_grad.float()",
        "gradients in FP32 beside the masters in an update",
    ),
    "batch-multiplier": Seam(
        MAIN, GRPO, (571,), "assert batch_multiplier == 1",
        "more prompts than a step's need dynamic sampling",
    ),
    "fused-logprobs": Seam(
        MAIN, GRPO, (672,), 'assert not policy_config["sequence_packing"]["enabled"]',
        "fused logprobs would mix packed sequences",
    ),
    "dynamic-stages": Seam(
        MAIN, f"{POLICY}/lm_policy.py", (313,), "assert pp_size == 1",
        "dynamic batches have one pipeline stage",
    ),
    "dynamic-or-packed": Seam(
        MAIN, f"{POLICY}/lm_policy.py", (325,), 'assert not config["sequence_packing"]["enabled"]',
        "batches are dynamic or packed",
    ),
    "packed-context": Seam(
        MAIN, "nemo_rl/models/megatron/setup.py", (880,),
        'assert config["sequence_packing"]["enabled"]',
        "context parallelism takes packed sequences alone",
    ),
    "chunked-logprobs": Seam(
        MAIN, "nemo_rl/models/megatron/setup.py", (1245,),
        'assert config["megatron_cfg"]["defer_fp32_logits"]',
        "chunks of logprobs want logits in BF16",
    ),
    "environment": Seam(
        MAIN, "nemo_rl/data/utils.py", (159,), "env_configs[env_name]",
        "an environment that a data set names is configured",
    ),
    "registered-environments": Seam(
        MAIN, "nemo_rl/environments/utils.py", (107,), "assert env_name in ENV_REGISTRY",
        "an environment's name is registered",
    ),
    "gym-engine": Seam(
        MAIN, "nemo_rl/environments/nemo_gym.py", (90,), "assert should_use_async_rollouts(",
        "NeMo Gym wants the asynchronous engine",
    ),
    "engine-arguments": Seam(
        MAIN, f"{ENGINE}/vllm_worker.py", (596,), "**vllm_kwargs,",
        "what vLLM is given, once: a second value is a TypeError",
    ),
    "engine-worker": Seam(
        MAIN, f"{ENGINE}/vllm_generation.py", (205,), "resolve_generation_worker_cls(",
        "the name of the actor that holds an engine",
    ),
    "logprobs-one-by-one": Seam(
        MAIN, f"{ENGINE}/vllm_worker.py", (983,), "full_logprobs[sequence_length + idx]",
        "a rollout's logprobs are written one by one, after its last token",
    ),
    "engine-names": Seam(
        VLLM, "vllm/engine/arg_utils.py", (414,), "class EngineArgs",
        "what vLLM takes",
    ),
    "scales-of-heads": Seam(
        VLLM, "vllm/model_executor/layers/attention/attention.py", (293,),
        'kv_cache_scheme.get("strategy") == "attn_head"',
        "only a checkpoint's kv_cache_scheme makes scales of heads",
    ),
    "finishes-weights": Seam(
        MAIN, f"{ENGINE}/vllm_backend.py", (622,), "process_weights_after_loading(",
        "each refit ends with vLLM's finishing of every weight",
    ),
    "repacks-anew": Seam(
        VLLM, "vllm/model_executor/layers/quantization/utils/marlin_utils_fp4.py", (243,),
        "layer.workspace = marlin_make_workspace_new(device)",
        "each repacking makes another workspace, and CUDA graphs read the first",
    ),
    "one-scale": Seam(
        VLLM, "vllm/model_executor/layers/quantization/modelopt.py", (1376,),
        "layer.weight_scale_2.max()",
        "a fused weight of four bits has one scale of the whole",
    ),
    "builds-another-class": Seam(
        VLLM, "vllm/model_executor/custom_op.py", (122,), "op_registry_oot[op_name]",
        "an operation is built of the class that was registered in its place",
    ),
    "experts-quantizer": Seam(
        VLLM, "vllm/model_executor/layers/fused_moe/utils.py", (148,),
        "per_token_group_quant_fp8(A, block_k)",
        "experts quantize by a kernel, which no registered class replaces",
    ),
    "experts-silu": Seam(
        VLLM, "vllm/model_executor/layers/fused_moe/activation.py", (144,),
        "silu_and_mul(output, input)",
        "nor their SiLU",
    ),
    "splits-keys": Seam(
        VLLM, "vllm/v1/attention/backends/flash_attn.py", (470, 480), "max_num_splits =",
        "attention over a sequence's keys is split by rules that depend on the batch",
    ),
    "padded-lengths": Seam(
        MAIN, "nemo_rl/models/megatron/data.py", (1129, 1131), "=cu_seqlens_padded",
        "Megatron attends over packed sequences with their padding, which ends each",
    ),
    "micro-batches-by-ranks": Seam(
        MAIN, "nemo_rl/distributed/batched_data_dict.py", (603,), "bin_count_multiple=shards",
        "every rank gets as many micro-batches, if need be of one short answer",
    ),
    "graphs-by-norm": Seam(
        VLLM, "vllm/config/kernel.py", (254,), 'factors["ir_op_priority"]',
        "a compiled graph is kept by the norm's implementation among others",
    ),
    "first-forward-scales": Seam(
        VLLM, "vllm/model_executor/layers/attention/attention.py", (505,),
        "if self.calculate_kv_scales",
        "the first forward overwrites the scales of a cache",
    ),
    "fp16-overflow": Seam(
        MAIN, "nemo_rl/models/megatron/setup.py", (1423,), "check_for_nan_in_grad=True",
        "the first overflow of an FP16 gradient would end a run before its scaler skips the step",
    ),
    "fp16-skipped-step": Seam(
        MAIN, f"{POLICY}/workers/megatron_policy_worker.py", (1070,), "torch.tensor([grad_norm])",
        "a skipped step has no norm, and torch.tensor([None]) is an error",
    ),
    "fp16-unscaled": Seam(
        MEGATRON, "megatron/core/optimizer/distrib_optimizer.py", (2780,),
        "shard_main_param.decoupled_grad = shard_model_grad",
        "the precision-aware optimizer takes the scale off gradients in FP16, which loses them",
    ),
    "fp16-scaler-each": Seam(
        MEGATRON, "megatron/core/optimizer/optimizer.py", (1522,),
        "return self.chained_optimizers[0].get_loss_scale()",
        "the loss takes the first optimizer's scale; experts have an optimizer and scaler of their "
        "own",
    ),
    "fp16-other-losses": Seam(
        MAIN, f"{POLICY}/workers/megatron_policy_worker.py", (891,),
        "self._set_moe_grad_scale_func(",
        "an auxiliary loss is given another scale than the loss",
    ),
    "graphs-of-recompute": Seam(
        MEGATRON, "megatron/core/transformer/transformer_config.py", (2590,),
        "full recompute is only supported with full iteration CUDA graph",
        "layers in CUDA graphs cannot be recomputed whole",
    ),
    "deepep-dispatcher": Seam(
        MEGATRON, "megatron/core/transformer/transformer_config.py", (1649,),
        "only supported with flex token dispatcher",
        "DeepEP is the flex dispatcher's",
    ),
    "short-schedule": Seam(
        MEGATRON, "megatron/core/optimizer_param_scheduler.py", (160,),
        "assert self.lr_warmup_steps < self.lr_decay_steps",
        "a warm-up as long as its schedule is cut short",
    ),
    "fused-router": Seam(
        MEGATRON, "megatron/core/transformer/moe/moe_utils.py", (838,),
        "return fused_topk_with_score_function(",
        "the fused top-k returns before a router could replay",
    ),
    "experts-by-sequence": Seam(
        MEGATRON, "megatron/core/transformer/moe/moe_layer.py", (636,),
        "not self.config.sequence_parallel",
        "experts under tensor parallelism train with sequence parallelism",
    ),
    "cut-evenly": Seam(
        MAIN, "nemo_rl/models/megatron/data.py", (1290,),
        "assert pad_individual_seqs_to_multiple_of % minimum_pad_factor == 0",
        "context and sequence parallelism cut each packed sequence into equal parts",
    ),
    "makes-adapters": Seam(
        MAIN, "nemo_rl/models/megatron/setup.py", (1782,), "peft = LoRA(",
        "every key of `peft` is read, without a default",
    ),
    "exports-merged": Seam(
        MAIN, f"{POLICY}/workers/megatron_policy_worker.py", (2350,),
        "base_iter = self.megatron_bridge.export_hf_weights(",
        "a refit exports by Megatron-Bridge, and does not say `merge_adapter_weights`",
    ),
    "moves-buffers": Seam(
        MAIN, f"{POLICY}/workers/megatron_policy_worker.py", (3204,),
        "for buffers in [model.buffers, model.expert_parallel_buffers]:",
        "before a rollout the buffers of trained weights go to the host, and nothing else",
    ),
    "copies-before-pinning": Seam(
        MEGATRON, "megatron/core/distributed/param_and_grad_buffer.py", (1637,),
        "self.param_data_cpu = self.param_data.cpu().pin_memory()",
        "a buffer of weights is copied to the host, and the copy copied again to be page-locked",
    ),
    "stages-checkpoints": Seam(
        MEGATRON, "megatron/core/dist_checkpointing/strategies/filesystem_async.py", (243,),
        'tensor_list.append((item, tensor.to("cpu", non_blocking=non_blocking)))',
        "what is saved is copied to the host first; so copied, it is page-locked",
    ),
    "reference-on-host": Seam(
        MAIN, "nemo_rl/models/megatron/setup.py", (2163,),
        'device="cpu", non_blocking=True, copy=True',
        "the reference policy's weights are kept on the host; so copied, they are page-locked",
    ),
    "swaps-with-reference": Seam(
        MAIN, f"{POLICY}/workers/megatron_policy_worker.py", (1988,),
        'item = item.detach().to(device="cpu", non_blocking=True, copy=True)',
        "while the reference policy scores, the trained weights are copied to the host",
    ),
    "frozen-without-buffer": Seam(
        MEGATRON, "megatron/core/distributed/distributed_data_parallel.py", (115,),
        "if not param.requires_grad:",
        "a frozen weight has no buffer",
    ),
    "merges": Seam(
        BRIDGE, "megatron/bridge/models/conversion/auto_bridge.py", (710,),
        "merge_adapter_weights: bool = True",
        "an export adds adapters to their weights",
    ),
    "merges-in-fp32": Seam(
        BRIDGE, "megatron/bridge/models/conversion/peft_bridge.py", (1372,),
        "return merged.to(orig_dtype)",
        "FP32 sum of weight and adapter, rounded once to the weight's type",
    ),
    "adapts-the-head": Seam(
        BRIDGE, "megatron/bridge/peft/module_matcher.py", (148,),
        "linear_types = [ColumnParallelLinear, RowParallelLinear, nn.Linear]",
        "without `target_modules` every linear has an adapter, `lm_head` too",
    ),
    "shares-the-rank": Seam(
        BRIDGE, "megatron/bridge/peft/utils.py", (1046,),
        "self.linear_in = ColumnParallelLinear(",
        "tensor parallelism shares out an adapter's rank",
    ),
    "shares-an-adapter": Seam(
        BRIDGE, "megatron/bridge/peft/lora.py", (114,),
        "share_expert_adapters: bool = True",
        "the experts of a rank share one adapter",
    ),
    "saves-adapters": Seam(
        BRIDGE, "megatron/bridge/training/checkpointing.py", (1287,),
        "apply_peft_adapter_filter_to_state_dict(",
        "a checkpoint holds adapters alone",
    ),
}  # fmt: skip
