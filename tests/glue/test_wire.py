"""Which weight is FP8 and what it is called on the wire; the lists are written out by hand."""

import pytest

from fp8_nemo.glue import wire as weights
from fp8_nemo.glue.wire import WireSpec
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision

FP8 = Precision(name="fp8-linear", rollout_linear="fp8")
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
    assert weights.is_quantized_weight(name, (256, 256), FP8, 3)
    assert not weights.is_quantized_weight(name, (256, 256), Precision(), 3)


@pytest.mark.parametrize("name", list(SLABS))
def test_slabs_of_experts_are_fp8(name):
    assert weights.is_quantized_weight(name, SLABS[name], FP8, 3)
    assert not weights.is_quantized_weight(name, SLABS[name], Precision(), 3)
    assert not weights.is_quantized_weight(f"{name}_bias", SLABS[name][:2], FP8, 3)


@pytest.mark.parametrize("name", list(NEVER))
def test_gates_norms_biases_embeddings_and_lm_head_are_never_fp8(name):
    assert not weights.is_quantized_weight(name, NEVER[name], FP8, 3)


def test_first_and_last_layers_stay_bf16_in_weights_and_slabs():
    precision = Precision(rollout_linear="fp8", first_layers_bf16=2, last_layers_bf16=3)
    for rest, shape in (("self_attn.q_proj.weight", (8, 8)), ("mlp.experts.down_proj", (2, 8, 8))):
        names = [f"model.layers.{layer}.{rest}" for layer in range(12)]
        fp8 = [
            layer
            for layer in range(12)
            if weights.is_quantized_weight(names[layer], shape, precision, 12)
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


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        ("model.layers.0.self_attn.k_proj.weight", ["q_proj", "k_proj", "v_proj"]),
        ("model.layers.0.self_attn.k_proj.bias", ["q_proj", "k_proj", "v_proj"]),
        ("model.layers.0.mlp.up_proj.weight", ["gate_proj", "up_proj"]),
        ("model.layers.0.mlp.down_proj.weight", ["down_proj"]),
        ("model.layers.0.mlp.experts.3.up_proj.weight", ["up_proj"]),
        ("model.layers.0.mlp.experts.gate_up_proj", ["experts"]),
        ("model.norm.weight", ["norm"]),
        ("lm_head.weight", ["lm_head"]),
    ],
)
def test_a_weight_is_fused_with_its_neighbours_and_else_with_itself(name, fused):
    stem, _, kind = name.rpartition(".")
    found = weights.fused_with(name)
    assert found == tuple(
        f"{stem.removesuffix(stem.split('.')[-1])}{each}.{kind}" for each in fused
    )
    assert name in found
