"""Give each linear, expert, norm and cache of a model its format."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from fp8_nemo.glue.wire import is_quantized_weight
from fp8_nemo.local.modules.attention import prepare_attention
from fp8_nemo.local.modules.experts import Fp8TrainExperts, PlainExperts, RolloutExperts
from fp8_nemo.local.modules.linears import Fp8TrainLinear, PlainLinear, RolloutLinear
from fp8_nemo.recipe.options.precision import Precision


def set_train_precision(model: PreTrainedModel, precision: Precision) -> None:
    """Give every linear and expert the format in which the trainer multiplies it."""
    pow2 = precision.scales == "pow2"
    for name, module in list(model.named_modules()):
        fp8 = precision.train.is_quantized and _is_fp8(model, name, precision)
        if _is_experts(name):
            _replace(model, name, (Fp8TrainExperts if fp8 else PlainExperts)(module, pow2))
        elif isinstance(module, nn.Linear):
            module.__class__ = Fp8TrainLinear if fp8 else PlainLinear
            setattr(module, "pow2", pow2)  # noqa: B010 (its class has changed)
    prepare_attention(model, scales=0)
    _fuse_norms(model)


def set_rollout_precision(model: PreTrainedModel, precision: Precision) -> None:
    """Give every linear, expert and cache the format in which the engine holds it, still empty."""
    pow2, rollout = precision.scales == "pow2", precision.rollout.name
    for name, module in list(model.named_modules()):
        quantized = _is_fp8(model, name, precision)
        if _is_experts(name) and quantized:
            _replace(model, name, RolloutExperts(module, pow2, rollout))
        elif _is_experts(name):
            _replace(model, name, PlainExperts(module, pow2))
        elif isinstance(module, nn.Linear) and quantized:
            _replace(model, name, RolloutLinear(module, pow2, rollout))
        elif isinstance(module, nn.Linear):
            module.__class__ = PlainLinear
    groups = precision.kv_groups(model.config.num_key_value_heads)
    prepare_attention(model, scales=groups if precision.cache.is_quantized else 0)
    _fuse_norms(model)


def _fuse_norms(model: PreTrainedModel) -> None:
    """Launch one kernel for a norm on a GPU, where transformers takes eight, on both sides."""
    for module in model.modules() if model.device.type == "cuda" else ():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(rms_norm, module)


def rms_norm(norm: Any, hidden: Tensor) -> Tensor:
    """Compute transformers' RMSNorm by torch's kernel, which rounds to BF16 once, at the end."""
    weight = norm.weight
    return nn.functional.rms_norm(hidden, weight.shape, weight, norm.variance_epsilon)


def _is_fp8(model: PreTrainedModel, name: str, precision: Precision) -> bool:
    """Return whether the engine holds the module's weights quantized."""
    layers = model.config.num_hidden_layers
    if _is_experts(name):
        return is_quantized_weight(f"{name}.down_proj", (1, 1, 1), precision, layers)
    return is_quantized_weight(f"{name}.weight", (1, 1), precision, layers)


def _is_experts(name: str) -> bool:
    return name.endswith(".mlp.experts")


def _replace(model: PreTrainedModel, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
