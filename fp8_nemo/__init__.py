"""Run FP8 reinforcement learning on NeMo RL: quantize, refit, recalibrate, correct, measure."""

from pathlib import Path as _Path

__version__ = "0.1.0"

_CLONE = _Path(__file__).parents[1]
if (_CLONE / "conf" / "grpo.yaml").exists():  # conf, recipes and slurm stand at a clone's top
    __path__.append(str(_CLONE))
