"""The formats of weights that a checkpoint can have: how vLLM is told of each, and its values.

A format of `recipe/options/precision.py` (FORMATS) that has no row in `SERVED` is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fp8_nemo.glue import wire as weights
from fp8_nemo.glue.quantize import Fp8Weight, Nvfp4Weight, dequantize_blocks, dequantize_nvfp4
from fp8_nemo.nemo.marlin.layout import quantization_config
from fp8_nemo.recipe.options.precision import Precision


class Served(NamedTuple):
    """Say how a checkpoint of one format is read."""

    values: Callable[[Sequence[Tensor]], Tensor]
    """Makes FP32 values of a weight's bytes and scales, in the order of `wire.HELD`."""
    config: Callable[[Mapping[str, str], Precision, int], dict[str, Any]]
    """Makes `quantization_config` of each tensor's shard, of the precision and of the layers."""
    environment: str = ""
    """Variables that vLLM needs to serve the bytes as they are, each followed by a space."""


def _fp8_config(tensors: Mapping[str, str], precision: Precision, layers: int) -> dict[str, Any]:
    plain = (name for name in tensors if weights.scale_name(name) not in tensors)
    modules = [name.removesuffix(".weight") for name in plain if name.endswith("proj.weight")]
    routers = [name.removesuffix(".weight") for name in tensors if name.endswith(".gate.weight")]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [weights.BLOCK, weights.BLOCK],
        "modules_to_not_convert": sorted(["lm_head", *modules, *routers]),
    }


SERVED = {
    # Without the variable vLLM 0.25.1 quantizes the weights again as it loads them on a GPU with
    # DeepGEMM, to scales that are powers of two (`deepgemm_post_process_fp8_weight_block`).
    "fp8": Served(
        lambda held: dequantize_blocks(Fp8Weight(*held)), _fp8_config, "VLLM_USE_DEEP_GEMM_E8M0=0 "
    ),
    "nvfp4": Served(
        lambda held: dequantize_nvfp4(Nvfp4Weight(*held)),
        lambda tensors, precision, layers: quantization_config(precision, layers),
    ),
}
"""By the format's name."""


def values_of(tensors: Mapping[str, Tensor], precision: Precision) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the FP32 values of each weight of a checkpoint or a refit, in order.

    Args:
        tensors: by checkpoint name; a quantized weight beside its scales.
        precision: which they have.
    """
    suffixes = weights.suffixes(precision.rollout.name)
    for name, tensor in tensors.items():
        if weights.weight_of(name) != name:
            continue  # a scale
        held = [tensors[name + suffix] for suffix in suffixes if name + suffix in tensors]
        is_quantized = len(held) == len(suffixes)
        yield name, SERVED[precision.rollout.name].values(held) if is_quantized else tensor.float()
