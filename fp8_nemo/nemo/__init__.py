"""The nemo backend: the only files that import nemo_rl, vllm, ray or megatron.

`checkout` and `preflight` read files alone and run on a login node; `driver` starts NeMo RL.
"""
