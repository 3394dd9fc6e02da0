"""Name the arguments of `vllm.LLM`, by version, and what forbids a user's own among them.

An argument that is not here stops an engine at its start. They are the class's own and those of
`EngineArgs`; a test with vLLM reads both again (tests/nemo_config/test_typed_keys.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from fp8_nemo.nemo_config.keys import DRAFTED, MOVES_EXPERTS, PASSED, VLLM_KWARGS
from fp8_nemo.nemo_config.seams import SEAMS
from fp8_nemo.nemo_config.versions import Limit
from fp8_nemo.recipe.settled import Settled

_OF_0_20_0 = """
    _api_process_count _api_process_rank additional_config aggregate_engine_logging
    all2all_backend allow_deprecated_quantization allowed_local_media_path allowed_media_domains
    async_scheduling attention_backend attention_config block_size calculate_kv_scales
    chat_template code_revision collect_detailed_traces compilation_config config_format convert
    cp_kv_cache_interleave_size cpu_offload_gb cpu_offload_params cudagraph_capture_sizes
    cudagraph_metrics data_parallel_address data_parallel_backend data_parallel_external_lb
    data_parallel_hybrid_lb data_parallel_rank data_parallel_rpc_port data_parallel_size
    data_parallel_size_local data_parallel_start_rank dbo_decode_token_threshold
    dbo_prefill_token_threshold dcp_comm_backend dcp_kv_cache_interleave_size
    decode_context_parallel_size default_mm_loras disable_cascade_attn disable_chunked_mm_input
    disable_custom_all_reduce disable_hybrid_kv_cache_manager disable_log_stats
    disable_nccl_for_dp_synchronization disable_sliding_window distributed_executor_backend
    distributed_timeout_seconds download_dir dtype ec_transfer_config enable_chunked_prefill
    enable_dbo enable_elastic_ep enable_ep_weight_filter enable_eplb enable_expert_parallel
    enable_flashinfer_autotune enable_layerwise_nvtx_tracing enable_logging_iteration_details
    enable_lora enable_mamba_cache_stochastic_rounding enable_mfu_metrics enable_mm_embeds
    enable_mm_processor_stats enable_prefix_caching enable_prompt_embeds
    enable_return_routed_experts enable_sleep_mode enable_tower_connector_lora enforce_eager
    eplb_config expert_placement_strategy fail_on_environ_validation fully_sharded_loras
    gdn_prefill_backend generation_config gpu_memory_utilization hf_config_path hf_overrides
    hf_token ignore_patterns interleave_mm_strings io_processor_plugin ir_op_priority
    kernel_config kv_cache_dtype kv_cache_dtype_skip_layers kv_cache_memory_bytes
    kv_cache_metrics kv_cache_metrics_sample kv_events_config kv_offloading_backend
    kv_offloading_size kv_sharing_fast_prefill kv_transfer_config language_model_only
    limit_mm_per_prompt load_format logits_processors logprobs_mode long_prefill_token_threshold
    lora_dtype lora_target_modules mamba_backend mamba_block_size mamba_cache_dtype
    mamba_cache_mode mamba_cache_philox_rounds mamba_config mamba_ssm_cache_dtype master_addr
    master_port max_cpu_loras max_cudagraph_capture_size max_logprobs max_long_partial_prefills
    max_lora_rank max_loras max_model_len max_num_batched_tokens max_num_partial_prefills
    max_num_seqs max_parallel_loading_workers media_io_kwargs mm_encoder_attn_backend
    mm_encoder_only mm_encoder_tp_mode mm_processor_cache_gb mm_processor_cache_type
    mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc model model_impl
    model_loader_extra_config model_weights moe_backend nnodes node_rank num_gpu_blocks_override
    numa_bind numa_bind_cpus numa_bind_nodes offload_backend offload_group_size
    offload_num_in_group offload_params offload_prefetch_step optimization_level
    otlp_traces_endpoint override_attention_dtype override_generation_config performance_mode
    pipeline_parallel_size pooler_config prefill_context_parallel_size prefix_caching_hash_algo
    profiler_config pt_load_map_location quantization quantization_config ray_workers_use_nsight
    reasoning_config reasoning_parser reasoning_parser_plugin renderer_num_workers revision
    runner safetensors_load_strategy scheduler_cls scheduler_reserve_full_isl scheduling_policy
    seed served_model_name show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling
    skip_tokenizer_init specialize_active_lora speculative_config stream_interval
    structured_outputs_config swap_space tensor_parallel_size tokenizer tokenizer_mode
    tokenizer_revision tokens_only trust_remote_code ubatch_size use_tqdm_on_load
    video_pruning_rate weight_transfer_config worker_cls worker_extension_cls
"""
_SINCE = """
    cpu_distributed_timeout_seconds data_parallel_multi_port_external_lb device_ids
    diffusion_config enable_cumem_allocator enable_mixed_moe_lora_format jit_monitor_mode
    jit_monitor_verbose linear_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
    mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_ipc_gpu_memory_gb
    model_class_overrides prefill_schedule_interval safetensors_prefetch_block_size
    safetensors_prefetch_num_threads spec_method spec_model spec_tokens use_fp64_gumbel
    watermark
"""
VLLM_ARGUMENTS = {
    "0.20.0": frozenset(_OF_0_20_0.split()),
    "0.25.1": frozenset(_OF_0_20_0.split() + _SINCE.split()),
}
"""By the versions that v0.7.0 and main 7ea279a of NeMo RL pin."""


def argument_limits(settled: Settled, version: str | None) -> Iterator[Limit]:
    """Yield the limits of vLLM's arguments beside those that NeMo RL writes.

    Args:
        settled: the run, with the user's own keys.
        version: vLLM's version. Names are checked if its argument names are known.
    """
    given = {
        key.removeprefix(f"{VLLM_KWARGS}.").partition(".")[0]: value
        for key, value in settled.own.items()
        if key.startswith(f"{VLLM_KWARGS}.")
    }
    taken = VLLM_ARGUMENTS.get(version or "", given.keys())

    def limit(bad: Iterable[str], allowed: str, mirrors: str, remedy: str = "") -> Limit:
        """Refuse the first of the arguments that are wrong; with none, nothing."""
        name = next(iter(bad), "")
        key = ".".join(filter(None, (f"nemo.{VLLM_KWARGS}", name)))
        return Limit(key, given.get(name), bool(name), allowed, mirrors, remedy)

    twice = [name for name in given if name in PASSED]
    word = PASSED[twice[0]] if twice else ""
    yield limit(
        twice,
        "is written by NeMo RL: two values stop the engine, or one is lost",
        SEAMS["engine-arguments"].path,
        f"set {word} instead" if word else "leave it out",
    )
    unknown = [name for name in given if name not in taken]
    near = difflib.get_close_matches(unknown[0], taken, n=1) if unknown else []
    yield limit(
        unknown,
        f"vLLM {version} has no such argument",
        SEAMS["engine-names"].path,
        f"did you mean {near[0]}?" if near else "leave it out",
    )
    yield limit(
        [name for name in DRAFTED if given.get(name) is not None],
        "not supported yet: logprobs of drafted tokens were not compared with the trainer's",
        "vllm/v1/sample/rejection_sampler.py",
        "leave it out",
    )
    moving = [name for name in MOVES_EXPERTS if given.get(name)]
    yield limit(
        moving if settled.recipe.glue.has_receiver else (),
        "must be false: a refit would miss experts that vLLM moves or repeats",
        "vllm/model_executor/layers/fused_moe/routed_experts.py",
        "leave it out",
    )
    measures = given.get("calculate_kv_scales")
    yield limit(
        ["calculate_kv_scales"] * bool(measures and settled.recipe.precision.cache.is_quantized),
        "must be false: the engine's first forward would overwrite the scales of a refit",
        SEAMS["first-forward-scales"].path,
        "leave it out",
    )
