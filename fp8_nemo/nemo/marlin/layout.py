"""Which modules of an engine hold four bits, how vLLM is told so, and what they then hold.

vLLM 0.25.1 repacks such a module once, after it has loaded it, for its Marlin kernel
(marlin_utils_fp4.py). The shapes here are of a module that Marlin need not pad.

Shapes: N out features of the fused module, K in features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fp8_nemo.glue.wire import (
    HELD,
    WireSpec,
    fused_module,
    fused_with,
    is_quantized_weight,
    named_shapes,
)
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import FORMATS, Precision

NVFP4 = FORMATS["nvfp4"]


class Module(NamedTuple):
    """Describe a linear of vLLM's, and the checkpoint's weights of which it is fused."""

    path: str
    """`model.layers.0.self_attn.qkv_proj`."""
    weights: tuple[str, ...]
    """Checkpoint names, in the order of their rows."""
    rows: tuple[int, ...]
    """Out features of each."""
    columns: int
    has_bias: bool

    @property
    def shape(self) -> tuple[int, int]:
        """Return `(N, K)`."""
        return sum(self.rows), self.columns


def holds_four_bits(precision: Precision) -> bool:
    """Return whether an engine of this precision has modules for Marlin."""
    return precision.rollout == NVFP4


def quantization(precision: Precision, layers: int) -> dict[str, Any]:
    """Return what vLLM is started with: arguments of its engine, beside a model's own.

    Args:
        precision: of the recipe, in four bits.
        layers: of the model.
    """
    overrides = {"quantization_config": quantization_config(precision, layers)}
    return {"quantization": "modelopt_fp4", "hf_overrides": overrides}


def quantization_config(precision: Precision, layers: int) -> dict[str, Any]:
    """Return what a model's `config.json` says of its four bits, to vLLM and as ModelOpt writes it.

    The algorithm `W4A16_NVFP4` is vLLM's own method for weights of four bits and activations of 16.
    Its only kernel is Marlin (modelopt.py, ModelOptNvFp4W4A16LinearMethod).

    Args:
        precision: of the recipe, in four bits.
        layers: of the model.
    """
    first, last = precision.first_layers_bf16, layers - precision.last_layers_bf16
    plain = [f"model.layers.{layer}.*" for layer in (*range(first), *range(last, layers))]
    return {
        "quant_method": "modelopt",
        "quant_algo": "W4A16_NVFP4",
        "group_size": NVFP4.group,
        "ignore": ["lm_head", *plain],
    }


def modules(shape: Shape, precision: Precision) -> list[Module]:
    """List the modules that hold four bits, in the order of the checkpoint; none in FP8 or BF16."""
    if not holds_four_bits(precision):
        return []
    named, found = named_shapes(shape), dict[str, Module]()
    for name, size in named.items():
        if is_quantized_weight(name, size, precision, shape.layers):
            stem, _, projection = name.removesuffix(".weight").rpartition(".")
            path = f"{stem}.{fused_module(projection)[0]}"
            weights = fused_with(name)
            rows = tuple(named[each][0] for each in weights)
            has_bias = _bias_of(weights[0]) in named
            found.setdefault(path, Module(path, weights, rows, size[1], has_bias))
    return [*found.values()]


def arriving(module: Module) -> dict[str, tuple[str, slice]]:
    """Return every wire name of a module with the parameter, and the rows of it, that it fills."""
    found, start = dict[str, tuple[str, slice]](), 0
    for number, (name, rows) in enumerate(zip(module.weights, module.rows, strict=True)):
        for suffix, spec in HELD[NVFP4.name](rows, module.columns).items():
            whole = spec.shape == (1,)
            here = slice(number, number + 1) if whole else slice(start, start + rows)
            found[name + suffix] = f"weight{suffix}", here
        if module.has_bias:
            found[_bias_of(name)] = "bias", slice(start, start + rows)
        start += rows
    return found


def staged(module: Module, plain: str) -> dict[str, WireSpec]:
    """Return a module's parameters as vLLM makes them before it repacks: checkpoint layout.

    Args:
        module: one of `modules`.
        plain: type of a bias.
    """
    N, K = module.shape
    found = {f"weight{suffix}": spec for suffix, spec in HELD[NVFP4.name](N, K).items()}
    found["weight_scale_2"] = WireSpec("float32", (len(module.weights),))
    return found | _bias(module, plain)


def repacked(module: Module, plain: str) -> dict[str, WireSpec]:
    """Return a module's parameters as Marlin reads them: of the weight, tiles of 16 rows of K."""
    N, K = module.shape
    return {
        "weight": WireSpec("int32", (K // 16, 2 * N)),
        "weight_scale": WireSpec("float8_e4m3fn", (K // NVFP4.group, N)),
        "weight_global_scale": WireSpec("float32", (1,)),
    } | _bias(module, plain)


def _bias(module: Module, plain: str) -> dict[str, WireSpec]:
    return {"bias": WireSpec(plain, (module.shape[0],))} if module.has_bias else {}


def _bias_of(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"
