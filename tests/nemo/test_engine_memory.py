"""Where a wire tensor lies in vLLM's memory, against a model that is cut and fused by hand.

The engine here loads as vLLM's loaders do, written a second time from the other side: the wire's
tensor is cut by rank, then concatenated. What `engine_parts` says must then hold the wire's bytes.
"""

import dataclasses
from itertools import product

import pytest
import torch

from fp8_nemo.glue.destination import Destination
from fp8_nemo.glue.ledger import Ledger
from fp8_nemo.glue.refit import refit_stream
from fp8_nemo.glue.wire import RefitError, is_quantized_weight, named_shapes, wire_specs
from fp8_nemo.nemo.engine_memory import Rank, engine_parts, layers_with_experts
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision

FP8 = Precision(rollout_linear="fp8", rollout_kv="bf16", train_linear="bf16")
BF16 = dataclasses.replace(FP8, rollout_linear="bf16")
DENSE = Shape(
    layers=2, hidden=256, ffn=512, heads=4, kv_heads=2, head_dim=128, vocab=300, qk_norm=True
)
MOE = dataclasses.replace(DENSE, ffn=0, experts=4, experts_per_token=2, expert_ffn=256)
TIED = dataclasses.replace(DENSE, tied=True)
QWEN25 = dataclasses.replace(DENSE, tied=True, qk_norm=False, qkv_bias=True)


def trainer(shape):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(size, generator=generator).bfloat16()
        for name, size in named_shapes(shape).items()
    }


def rows(tensor, rank):
    return tensor.chunk(rank.tensor_size, 0)[rank.tensor_rank]


def columns(tensor, rank):
    return tensor.chunk(rank.tensor_size, 1)[rank.tensor_rank]


def key_or_value(tensor, rank, shape, unit):
    """K and V heads are shared by several ranks where there are fewer heads than ranks."""
    heads = tensor.split(tensor.shape[0] // shape.kv_heads)
    if shape.kv_heads >= rank.tensor_size:
        return rows(tensor, rank)
    return heads[rank.tensor_rank // (rank.tensor_size // shape.kv_heads)]


def engine(wire, shape, rank, prefix):
    """What a vLLM worker would hold of the wire's tensors, by vLLM's names."""
    held = {}
    for suffix in ("weight", "weight_scale_inv", "bias"):
        for layer in range(shape.layers):
            at = f"model.layers.{layer}"
            if f"{at}.self_attn.q_proj.{suffix}" not in wire:
                continue
            query, key, value = (wire[f"{at}.self_attn.{x}_proj.{suffix}"] for x in "qkv")
            fused = [rows(query, rank)]
            fused += [key_or_value(x, rank, shape, suffix) for x in (key, value)]
            held[f"{at}.self_attn.qkv_proj.{suffix}"] = torch.cat(fused)
            if suffix == "bias":
                continue
            name = f"{at}.self_attn.o_proj.{suffix}"
            held[name] = columns(wire[name], rank)
            if not shape.experts:
                pair = [rows(wire[f"{at}.mlp.{x}_proj.{suffix}"], rank) for x in ("gate", "up")]
                held[f"{at}.mlp.gate_up_proj.{suffix}"] = torch.cat(pair)
                name = f"{at}.mlp.down_proj.{suffix}"
                held[name] = columns(wire[name], rank)
                continue
            here = range(shape.experts) if rank.experts is None else rank.experts[layer]
            cut = rank if rank.experts is None else Rank()
            stem = f"{at}.mlp.experts"
            w13 = [
                torch.cat(
                    [rows(wire[f"{stem}.{e}.{x}_proj.{suffix}"], cut) for x in ("gate", "up")]
                )
                for e in here
            ]
            w2 = [columns(wire[f"{stem}.{e}.down_proj.{suffix}"], cut) for e in here]
            held[f"{stem}{prefix}.w13_{suffix}"] = torch.stack(w13)
            held[f"{stem}{prefix}.w2_{suffix}"] = torch.stack(w2)
    for name, tensor in wire.items():
        if name.endswith(("norm.weight", "mlp.gate.weight")):
            held[name] = tensor
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            side = 64 * rank.tensor_size  # the last of four ranks holds padding alone
            height = -(-len(tensor) // side) * side
            padded = torch.zeros(height, tensor.shape[1], dtype=tensor.dtype)
            padded[: len(tensor)] = tensor
            held[name] = rows(padded, rank)
    return {name: tensor.contiguous().clone() for name, tensor in held.items()}


def ranks(shape):
    yield Rank()
    yield from (Rank(rank, 2) for rank in range(2))
    if not shape.experts:
        yield from (Rank(rank, 4) for rank in range(4))  # more ranks than K/V heads
    else:
        for rank in range(2):
            here = {2 * rank: 0, 2 * rank + 1: 1}
            yield Rank(rank, 2, dict.fromkeys(range(shape.layers), here))


CASES = [
    (shape, precision, rank, prefix)
    for shape, precision in product((DENSE, MOE, TIED, QWEN25), (FP8, BF16))
    for rank in ranks(shape)
    for prefix in ((".routed_experts", "") if shape.experts else ("",))
]


def of_stream(shape, precision):
    stream = refit_stream(trainer(shape).items(), precision, None, num_layers=shape.layers)
    return list(stream)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_part_holds_the_bytes_of_its_place_on_the_wire(case):
    shape, precision, rank, prefix = case
    wire = dict(of_stream(shape, precision)[1:-1])
    parts = engine_parts(engine(wire, shape, rank, prefix), shape, precision, rank)
    assert parts.keys() == {name for name in wire if rank.holds(name)}
    for name, part in parts.items():
        there = wire[name][part.of_wire]
        assert there.shape == part.tensor.shape, name
        assert torch.equal(there.view(torch.uint8), part.tensor.contiguous().view(torch.uint8))


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_a_refit_of_a_part_is_proven_and_names_what_did_not_land(case):
    shape, precision, rank, prefix = case
    pairs = list(refit_stream(trainer(shape).items(), precision, None, num_layers=shape.layers))
    specs = wire_specs(named_shapes(shape), precision, shape.layers)
    held = {name: spec for name, spec in specs.items() if rank.holds(name)}

    def refit(lost=""):
        wire = {n: torch.full_like(t.float(), 0.25).to(t.dtype) for n, t in pairs[1:-1]}
        parts = engine_parts(engine(wire, shape, rank, prefix), shape, precision, rank)
        ledger = Ledger(specs, Destination(parts, held))
        for name, tensor in pairs:
            if ledger.receive(name, tensor):
                ledger.arrived([(name, tensor)])
                if name in parts and name != lost:
                    parts[name].tensor.copy_(tensor[parts[name].of_wire])
        return ledger.close()

    proof = refit()
    empty = {"model.embed_tokens.weight", "lm_head.weight"}  # on the last of four ranks
    assert proof.equal_digests == len(held.keys() - (empty if rank == Rank(3, 4) else ()))
    fp8 = [n for n, s in named_shapes(shape).items() if is_quantized_weight(n, s, precision, 2)]
    assert proof.verified_weights == len([n for n in fp8 if rank.holds(n)])
    for lost in [n for n in held if n not in empty][:: max(1, len(held) // 5)]:
        with pytest.raises(RefitError, match=lost.replace(".", r"\.")):
            refit(lost)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("model.layers.1.self_attn.o_proj.weight"), "o_proj.*no such tensor"),
        (
            lambda p: p.update(
                {"model.layers.0.mlp.gate_up_proj.weight": torch.zeros(1, 256).bfloat16()}
            ),
            r"gate_proj\.weight: the engine holds bfloat16 \[1, 256\], a refit sends float8",
        ),
        (lambda p: p.update({"model.extra.weight": torch.zeros(2)}), "model.extra.weight: the eng"),
        (
            lambda p: p.update(
                {"model.layers.0.input_layernorm.weight": torch.zeros(256, dtype=torch.float32)}
            ),
            "layers.0.input_layernorm.weight: the engine holds float32",
        ),
    ],
)
def test_an_engine_that_lies_otherwise_is_refused_by_name(change, message):
    wire = dict(of_stream(DENSE, FP8)[1:-1])
    parameters = engine(wire, DENSE, Rank(), "")
    change(parameters)
    parts = engine_parts(parameters, DENSE, FP8, Rank())
    with pytest.raises(RefitError, match=message):
        Destination(parts, wire_specs(named_shapes(DENSE), FP8, 2))


def test_a_second_name_for_a_scale_is_no_weight_and_a_copy_of_it_is():
    wire = dict(of_stream(DENSE, FP8)[1:-1])
    parameters = engine(wire, DENSE, Rank(), "")
    stem = "model.layers.0.self_attn.qkv_proj.weight_scale"
    parameters[stem] = parameters[f"{stem}_inv"]  # as NeMo RL v0.7.0 registers it
    assert engine_parts(parameters, DENSE, FP8, Rank()).keys() == wire.keys()
    parameters[stem] = parameters[stem].clone()
    assert engine_parts(parameters, DENSE, FP8, Rank()).keys() == {*wire, stem}


def test_vllms_own_kv_scales_are_no_weights():
    wire = dict(of_stream(DENSE, BF16)[1:-1])
    parameters = engine(wire, DENSE, Rank(), "")
    parameters |= {f"model.layers.0.self_attn.attn.{x}_scale": torch.ones(()) for x in "qkv"}
    parameters["model.layers.0.self_attn.attn.prob_scale"] = torch.ones(())
    assert engine_parts(parameters, DENSE, BF16, Rank()).keys() == wire.keys()


@pytest.mark.parametrize("inner", [[], ["routed_experts"]])
def test_modules_that_hold_experts_are_found_in_both_versions_of_vllm(inner):
    names = ["model", "model.layers.3.mlp.gate", "model.layers.3.mlp.experts"]
    names += [f"model.layers.3.mlp.experts.{name}" for name in inner]
    assert list(layers_with_experts(dict.fromkeys(names))) == [(3, names[-1])]
