"""Run FP8 reinforcement learning on NeMo RL: quantize, refit, recalibrate, correct, measure."""

__version__ = "0.1.0"
