"""Run GRPO with small transformers models on one machine: the embedded backend, to be read.

It calls the same `wire`, `quantize`, `recalibrate`, `refit`, `mismatch` and `correction` as the
NeMo RL backend, so it is the executable specification of what happens inside NeMo RL's workers. It
shows learning and mismatch, not speed: FP8 values are multiplied in FP32 on a CPU.
"""
