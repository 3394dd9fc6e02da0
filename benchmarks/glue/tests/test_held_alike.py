"""Bytes that a fused matrix of the trainer's and the wire's own have in common."""

from dataclasses import replace

import pytest
import torch

from benchmarks.glue import held_alike
from fp8_nemo.glue.quantize import quantize_blocks
from fp8_nemo.recipe.compose import compose

[RECIPE] = compose(["model=small-llama"])


def fused(shape, draw):
    """Weights of one layer by wire name, and fused as Megatron holds them."""
    D, I = shape.head_dim, shape.hidden
    G = shape.heads // shape.kv_heads
    sizes = {"q_proj": shape.heads, "k_proj": shape.kv_heads, "v_proj": shape.kv_heads}
    spread = {"q_proj": 1.0, "k_proj": 3.0, "v_proj": 0.3}  # blocks of one kind have one range
    parts = {
        part: spread[part] * torch.randn(heads * D, I, generator=draw)
        for part, heads in sizes.items()
    }
    per_key = [parts["q_proj"].unflatten(0, (shape.kv_heads, G, D))]
    per_key += [parts[part].unflatten(0, (shape.kv_heads, 1, D)) for part in ("k_proj", "v_proj")]
    return parts, torch.cat(per_key, 1).flatten(0, 2)


def held(weight):
    found = quantize_blocks(weight.bfloat16())
    return found.fp8_OI.view(torch.uint8), found.scale_inv_PQ


@pytest.mark.parametrize(
    ("heads", "head_dim", "whole"), [(4, 128, "qkv"), (16, 128, "qkv"), (4, 64, ""), (8, 64, "q")]
)
def test_heads_of_128_are_quantized_alike_fused_or_not_and_narrower_ones_are_not(
    heads, head_dim, whole
):
    shape = replace(RECIPE.model.shape, heads=heads, kv_heads=4, head_dim=head_dim, hidden=256)
    parts, together = fused(shape, torch.Generator().manual_seed(0))
    name = "module.decoder.layers.3.self_attention.linear_qkv"
    found = held_alike.split_fused(name, *held(together), shape)
    assert list(found) == [f"model.layers.3.self_attn.{part}.weight" for part in parts]
    for wire, mine in found.items():
        theirs = held_alike.with_rows(*held(parts[wire.split(".")[-2]]))
        shares = held_alike.alike(mine, theirs)
        assert mine.bytes_OI.shape == theirs.bytes_OI.shape
        is_whole = wire.split(".")[-2][0] in whole
        assert shares["bytes and scales"] <= shares["bytes"]
        assert shares["bytes and scales"] == 1 if is_whole else shares["bytes and scales"] < 0.6


def test_gate_lies_above_up_and_the_rest_is_as_it_is():
    draw, shape = torch.Generator().manual_seed(0), RECIPE.model.shape
    gate, up, down = (torch.randn(*s, generator=draw) for s in ((384, 256), (384, 256), (256, 384)))
    split, held_both = held_alike.split_fused, held(torch.cat([gate, up]))
    both = split("decoder.layers.0.mlp.linear_fc1", *held_both, shape)
    one = split("decoder.layers.0.mlp.linear_fc2", *held(down), shape)
    for wire, weight in zip([*both, *one], (gate, up, down), strict=True):
        theirs = held_alike.with_rows(*held(weight))
        assert held_alike.alike((both | one)[wire], theirs) == {"bytes": 1, "bytes and scales": 1}
    altered = theirs._replace(scale_OQ=theirs.scale_OQ * 2)
    assert held_alike.alike(theirs, altered) == {"bytes": 1, "bytes and scales": 0}


def test_means_are_over_layers_and_a_strange_name_is_told():
    none = {"bytes and scales": 0.0}
    rows = [{"weight": f"layers.{n}.mlp.up_proj.weight", "bytes": n / 4} | none for n in range(3)]
    assert held_alike.mean_by_kind(rows) == {"up_proj": {"bytes": 0.25} | none}
    with pytest.raises(ValueError, match="router"):
        held_alike.split_fused("layers.0.mlp.router", *held(torch.ones(1, 1)), RECIPE.model.shape)
