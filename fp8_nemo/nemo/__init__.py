"""Our code inside NeMo RL's processes, by public seams of NeMo RL, vLLM and Megatron (README.md).

- `policy_worker`: on the trainer's GPUs: quantizes, sends, watches Q, K and V
- `receiver`: in vLLM's workers: loads what is sent, proves it, names what failed
- `engine_memory`: where each tensor lies in vLLM's memory
- `marlin`: how an engine starts in four bits, and how a refit fills what vLLM repacked
- `generation_worker`: NeMo RL's vLLM worker, which starts in four bits; quick logprobs
- `policy`: on the driver: corrections, metrics, checkpoints
- `kv_scales`, `host_memory`, `step_metrics`, `worker_settings`, `own`: what these share
"""
