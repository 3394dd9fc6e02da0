"""The names, shapes and slabs of `glue/wire.py`, held against transformers and our model options.

transformers' own small models, and the checkpoints that it saves, are the reference.
"""

import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from fp8_nemo.glue import wire as weights
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision

FP8_KV = Precision(name="fp8-kv-attn", rollout_linear="fp8", rollout_kv="fp8")
MODELS = Path(__file__).parents[2] / "conf" / "model"


def tiny(family: str, tied: bool) -> tuple[transformers.PreTrainedModel, Shape]:
    """A small model of transformers' own and the numbers that should describe it."""
    shape = Shape(
        layers=2, hidden=48, ffn=80, heads=4, kv_heads=2, head_dim=16, vocab=32, tied=tied,
        qk_norm=family.startswith("Qwen3"), qkv_bias=family == "Qwen2",
    )  # fmt: skip
    moe = {}
    if family == "Qwen3Moe":
        shape.experts, shape.experts_per_token, shape.expert_ffn = 3, 2, 24
        moe = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    if family == "Qwen2":  # whose heads share out the hidden size
        shape.head_dim = 12
    config = getattr(transformers, f"{family}Config")(
        num_hidden_layers=2, hidden_size=48, intermediate_size=80, num_attention_heads=4,
        num_key_value_heads=2, head_dim=shape.head_dim, vocab_size=32,
        tie_word_embeddings=tied, **moe,
    )  # fmt: skip
    return getattr(transformers, f"{family}ForCausalLM")(config), shape


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Qwen3Moe"])
def test_names_and_shapes_are_those_of_transformers_own_models(family, tied):
    model, shape = tiny(family, tied)
    found = {name: tuple(each.shape) for name, each in model.named_parameters()}
    specs = weights.wire_specs(found, Precision(), shape.layers)
    assert {name: spec.shape for name, spec in specs.items()} == weights.named_shapes(shape)


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_wire_names_are_those_of_the_saved_checkpoint_and_cut_slabs_as_it_does(family, tmp_path):
    model, _ = tiny(family, tied=False)
    model.save_pretrained(tmp_path)
    checkpoint = load_file(tmp_path / "model.safetensors")
    wired = {}
    for name, weight in model.named_parameters():
        wires = weights.wire_names(name, tuple(weight.shape))
        if weights.slab_projections(name):
            weight = weight.reshape(len(wires), -1, weight.shape[-1])
        else:
            weight = weight[None]
        wired |= dict(zip(wires, weight, strict=True))
    assert wired.keys() == checkpoint.keys()
    assert all(torch.equal(wired[name], checkpoint[name]) for name in wired)


@pytest.mark.parametrize(
    ("option", "parameters"),
    [
        ("llama31-8b", 8_030_261_248),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_parameters_of_the_real_models_are_those_of_their_model_cards(option, parameters):
    shape = Shape(**yaml.safe_load((MODELS / f"{option}.yaml").read_text())["shape"])
    assert sum(map(math.prod, weights.named_shapes(shape).values())) == parameters


OPTIONS = sorted(path.stem for path in MODELS.glob("*.yaml"))


@pytest.mark.parametrize("option", [each for each in OPTIONS if each != "auto"])
def test_every_fp8_dimension_of_every_model_option_is_a_multiple_of_128(option):
    shape = Shape(**yaml.safe_load((MODELS / f"{option}.yaml").read_text())["shape"])
    named = weights.named_shapes(shape)
    fp8 = [
        each for name, each in named.items() if weights.is_quantized_weight(name, each, FP8_KV, 99)
    ]
    assert fp8 and not [each for each in fp8 if each[0] % 128 or each[1] % 128]


BRIDGES = {
    "llama": ("llama.llama_bridge", "LlamaBridge", {}),
    "qwen2": ("qwen.qwen2_bridge", "Qwen2Bridge", {"qkv_bias": True}),
    "qwen3": ("qwen.qwen3_bridge", "Qwen3Bridge", {"qk_norm": True}),
    "qwen3_moe": ("qwen.qwen3_moe_bridge", "Qwen3MoEBridge", {"qk_norm": True, "experts": 2}),
}


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="Megatron-Bridge is not installed here"
)
@pytest.mark.parametrize("family", weights.FAMILIES)
def test_megatron_bridge_exports_the_names_of_the_table(family):
    """`linear_qkv.bias` of Megatron's becomes three biases; what a tied model has is one less."""
    module, name, more = BRIDGES[family]
    bridge = getattr(importlib.import_module(f"megatron.bridge.models.{module}"), name)
    pairs = [(each.megatron_param, each.hf_param) for each in bridge().mapping_registry()]
    exported = {
        name: megatron
        for megatron, found in pairs
        for name in (found.values() if isinstance(found, dict) else [found])
        if not megatron.startswith("mtp.")
    }
    named = {re.sub(r"\.\d+\.", ".*.", name) for name in weights.named_shapes(Shape(**more))}
    assert exported.keys() == named
    biases = {megatron for name, megatron in exported.items() if name.endswith(".bias")}
    assert biases == (
        {"decoder.layers.*.self_attention.linear_qkv.bias"} if more.get("qkv_bias") else set()
    )
