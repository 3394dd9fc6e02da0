"""Which weight is FP8, what it is called on the wire, and that transformers agrees on every name.

The lists below are written out by hand. transformers' own small models, and the checkpoints that it
saves, are the reference for names, shapes and the order of slabs.
"""

import math
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from fp8_nemo.glue import wire as weights
from fp8_nemo.glue.wire import WireSpec
from fp8_nemo.recipe.options import Precision, Shape

FP8 = Precision(name="fp8-linear", rollout_linear="fp8")
FP8_KV = Precision(name="fp8-kv-attn", rollout_linear="fp8", rollout_kv="fp8")
MODELS = Path(__file__).parents[2] / "conf" / "model"
IN_FP8 = [
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "mlp.gate_up_proj.weight",
    "mlp.experts.17.gate_proj.weight",
    "mlp.experts.17.down_proj.weight",
    "mlp.shared_expert.gate_proj.weight",
]
NEVER = {
    "model.layers.1.mlp.gate.weight": (128, 256),
    "model.layers.1.mlp.shared_expert_gate.weight": (1, 256),
    "model.layers.1.input_layernorm.weight": (256,),
    "model.layers.1.post_attention_layernorm.weight": (256,),
    "model.layers.1.self_attn.q_norm.weight": (64,),
    "model.layers.1.self_attn.k_norm.weight": (64,),
    "model.layers.1.self_attn.q_proj.bias": (256,),
    "model.layers.1.mlp.gate_proj.bias": (256,),
    "model.layers.1.self_attn.q_proj.weight_scale_inv": (2, 2),
    "model.embed_tokens.weight": (512, 256),
    "model.norm.weight": (256,),
    "lm_head.weight": (512, 256),
}
SLABS = {
    "model.layers.1.mlp.experts.gate_up_proj": (4, 512, 256),
    "model.layers.1.mlp.experts.down_proj": (4, 256, 256),
}


@pytest.mark.parametrize("rest", IN_FP8)
def test_the_linears_of_a_layer_are_fp8_and_gate_proj_is_not_taken_for_a_router_gate(rest):
    name = f"model.layers.1.{rest}"
    assert weights.is_fp8_weight(name, (256, 256), FP8, 3)
    assert not weights.is_fp8_weight(name, (256, 256), Precision(), 3)


@pytest.mark.parametrize("name", list(SLABS))
def test_slabs_of_experts_are_fp8(name):
    assert weights.is_fp8_weight(name, SLABS[name], FP8, 3)
    assert not weights.is_fp8_weight(name, SLABS[name], Precision(), 3)
    assert not weights.is_fp8_weight(f"{name}_bias", SLABS[name][:2], FP8, 3)


@pytest.mark.parametrize("name", list(NEVER))
def test_gates_norms_biases_embeddings_and_lm_head_are_never_fp8(name):
    assert not weights.is_fp8_weight(name, NEVER[name], FP8, 3)


def test_first_and_last_layers_stay_bf16_in_weights_and_slabs():
    precision = Precision(rollout_linear="fp8", first_layers_bf16=2, last_layers_bf16=3)
    for rest, shape in (("self_attn.q_proj.weight", (8, 8)), ("mlp.experts.down_proj", (2, 8, 8))):
        names = [f"model.layers.{layer}.{rest}" for layer in range(12)]
        fp8 = [
            layer
            for layer in range(12)
            if weights.is_fp8_weight(names[layer], shape, precision, 12)
        ]
        assert fp8 == [2, 3, 4, 5, 6, 7, 8]


def test_a_slab_travels_expert_by_expert_gate_before_up():
    at = "model.layers.1.mlp.experts"
    assert weights.wire_names(f"{at}.gate_up_proj", (2, 512, 256)) == (
        f"{at}.0.gate_proj.weight",
        f"{at}.0.up_proj.weight",
        f"{at}.1.gate_proj.weight",
        f"{at}.1.up_proj.weight",
    )
    assert weights.wire_names(f"{at}.down_proj", (2, 256, 256)) == (
        f"{at}.0.down_proj.weight",
        f"{at}.1.down_proj.weight",
    )
    single = "model.layers.1.mlp.gate_proj.weight"
    assert weights.wire_names(single, (256, 256)) == (single,)


def test_scale_shapes_count_ragged_blocks_and_keep_leading_axes():
    assert weights.scale_shape((128, 129)) == (1, 2)
    assert weights.scale_shape((1, 384)) == (1, 3)
    assert weights.scale_shape((5, 127, 257)) == (5, 1, 3)


def test_wire_specs_list_every_tensor_of_a_refit_in_the_order_of_the_stream():
    named = {
        "model.embed_tokens.weight": (16, 200),
        "model.layers.0.mlp.gate.weight": (2, 200),
        "model.layers.0.mlp.experts.gate_up_proj": (2, 260, 200),
        "model.layers.0.input_layernorm.weight": (200,),
        "model.layers.1.mlp.down_proj.weight": (200, 300),
    }
    precision = Precision(rollout_linear="fp8", rollout_kv="fp8", last_layers_bf16=1)
    expert, layer, scale = "model.layers.0.mlp.experts", "model.layers", WireSpec("float32", (2, 2))
    assert list(weights.wire_specs(named, precision, 2).items()) == [
        ("model.embed_tokens.weight", WireSpec("bfloat16", (16, 200))),
        ("model.layers.0.mlp.gate.weight", WireSpec("bfloat16", (2, 200))),
        (f"{expert}.0.gate_proj.weight", WireSpec("float8_e4m3fn", (130, 200))),
        (f"{expert}.0.gate_proj.weight_scale_inv", scale),
        (f"{expert}.0.up_proj.weight", WireSpec("float8_e4m3fn", (130, 200))),
        (f"{expert}.0.up_proj.weight_scale_inv", scale),
        (f"{expert}.1.gate_proj.weight", WireSpec("float8_e4m3fn", (130, 200))),
        (f"{expert}.1.gate_proj.weight_scale_inv", scale),
        (f"{expert}.1.up_proj.weight", WireSpec("float8_e4m3fn", (130, 200))),
        (f"{expert}.1.up_proj.weight_scale_inv", scale),
        ("model.layers.0.input_layernorm.weight", WireSpec("bfloat16", (200,))),
        ("model.layers.1.mlp.down_proj.weight", WireSpec("bfloat16", (200, 300))),
        *(
            (f"{layer}.0.self_attn.{x}_scale", WireSpec("float32", (1,)))
            for x in ("attn.q", "k", "v")
        ),
        *(
            (f"{layer}.1.self_attn.{x}_scale", WireSpec("float32", (1,)))
            for x in ("attn.q", "k", "v")
        ),
    ]


def test_a_bf16_recipe_sends_nothing_but_its_weights_in_bf16():
    shapes = weights.named_shapes(Shape(layers=2, qk_norm=True))
    expected = {name: WireSpec("bfloat16", shape) for name, shape in shapes.items()}
    assert weights.wire_specs(shapes, Precision(), 2) == expected


def tiny(family: str, tied: bool) -> tuple[transformers.PreTrainedModel, Shape]:
    """A small model of transformers' own and the numbers that should describe it."""
    shape = Shape(
        layers=2, hidden=48, ffn=80, heads=4, kv_heads=2, head_dim=16, vocab=32, tied=tied,
        qk_norm=family != "Llama",
    )  # fmt: skip
    moe = {}
    if family == "Qwen3Moe":
        shape.experts, shape.experts_per_token, shape.expert_ffn = 3, 2, 24
        moe = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = getattr(transformers, f"{family}Config")(
        num_hidden_layers=2, hidden_size=48, intermediate_size=80, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=32, tie_word_embeddings=tied, **moe,
    )  # fmt: skip
    return getattr(transformers, f"{family}ForCausalLM")(config), shape


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Qwen3Moe"])
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


@pytest.mark.parametrize("option", [path.stem for path in sorted(MODELS.glob("*.yaml"))])
def test_every_fp8_dimension_of_every_model_option_is_a_multiple_of_128(option):
    shape = Shape(**yaml.safe_load((MODELS / f"{option}.yaml").read_text())["shape"])
    named = weights.named_shapes(shape)
    fp8 = [each for name, each in named.items() if weights.is_fp8_weight(name, each, FP8_KV, 99)]
    assert fp8 and not [each for each in fp8 if each[0] % 128 or each[1] % 128]
