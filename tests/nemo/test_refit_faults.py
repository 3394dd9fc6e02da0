"""Eighty ways for a refit to go wrong: the default proof stops each one, and names what failed.

An engine holds weights as vLLM's workers do, fused, stacked and cut (`engine_parts`), and those of
refit 1; refit 2 is sent. A row edits what the wire brings, how it is loaded, or the engine's memory
afterwards; without a fault the same scene passes. Sixty rows are rebuilt from what a review told of
its own sixty, of which the proof of then missed 25. Twenty are of after.
"""

import dataclasses
from functools import cache

import pytest
import torch

from fp8_nemo.glue.destination import Destination, Part
from fp8_nemo.glue.ledger import Ledger
from fp8_nemo.glue.manifest import MANIFEST, SENTINEL
from fp8_nemo.glue.quantize import quantize_blocks
from fp8_nemo.glue.refit import refit_stream
from fp8_nemo.glue.wire import (
    RefitError,
    is_quantized_weight,
    kv_scale_names,
    named_shapes,
    scale_shape,
    wire_specs,
)
from fp8_nemo.nemo.engine_memory import Rank, engine_parts
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision

DENSE = Shape(
    layers=2, hidden=256, ffn=512, heads=4, kv_heads=2, head_dim=128, vocab=192, tied=False
)
MOE = dataclasses.replace(DENSE, ffn=0, experts=4, experts_per_token=2, expert_ffn=256)
FP8_KV = Precision(rollout_linear="fp8", rollout_kv="fp8")
KV = [name for layer in range(2) for name in kv_scale_names(layer)]
WHOLE, SECOND_OF_TWO = Rank(), Rank(1, 2)
SECOND_EXPERTS = Rank(1, 2, {layer: {2: 0, 3: 1} for layer in range(2)})


def named_weights(moe, refit):
    draw = torch.Generator().manual_seed(refit)
    named = {
        name: (torch.randn(size, generator=draw) * 0.05).bfloat16()
        for name, size in named_shapes(MOE if moe else DENSE).items()
    }
    named[NORM][3] = 0.0
    return named


@cache
def stream(moe, refit):
    """What the wire brings, as pairs; tensors are shared between tests, which change none."""
    scales = {name: 0.01 * (refit + n) for n, name in enumerate(KV)}
    named = named_weights(moe, refit).items()
    return tuple(refit_stream(named, FP8_KV, scales, num_layers=2, number=refit))


def memory(shape, rank):
    """A worker's parameters by vLLM's names, holding nothing."""
    tp, ep = rank.tensor_size, rank.experts is not None
    width, side = shape.hidden, shape.head_dim
    experts, expert_tp = (len(rank.experts[0]), 1) if ep else (shape.experts, tp)
    found = {}

    def put(name, *size):
        fp8 = not name.startswith(("model.embed", "lm_head")) and "norm" not in name
        fp8 = fp8 and not name.endswith("mlp.gate.weight")
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        found[name] = torch.zeros(size).to(dtype)
        if fp8:
            found[f"{name}_scale_inv"] = torch.zeros(scale_shape(size))

    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        put(name, shape.vocab // tp, width)
    for layer in range(2):
        at = f"model.layers.{layer}"
        put(
            f"{at}.self_attn.qkv_proj.weight",
            (shape.heads + 2 * shape.kv_heads) * side // tp,
            width,
        )
        put(f"{at}.self_attn.o_proj.weight", width, shape.heads * side // tp)
        if shape.experts:
            put(f"{at}.mlp.gate.weight", shape.experts, width)
            stem = f"{at}.mlp.experts.routed_experts"
            put(f"{stem}.w13_weight", experts, 2 * shape.expert_ffn // expert_tp, width)
            put(f"{stem}.w2_weight", experts, width, shape.expert_ffn // expert_tp)
        else:
            put(f"{at}.mlp.gate_up_proj.weight", 2 * shape.ffn // tp, width)
            put(f"{at}.mlp.down_proj.weight", width, shape.ffn // tp)
        put(f"{at}.input_layernorm.weight", width)
        put(f"{at}.post_attention_layernorm.weight", width)
    put("model.norm.weight", width)
    return found


class Scene:
    """One worker that holds refit 1, before refit 2."""

    def __init__(self, moe, rank):
        self.moe, shape = moe, MOE if moe else DENSE
        specs = wire_specs(named_shapes(shape), FP8_KV, 2)
        self.specs, held = specs, {n: s for n, s in specs.items() if rank.holds(n)}
        self.parts = engine_parts(memory(shape, rank), shape, FP8_KV, rank)
        self.parts |= {name: Part(torch.ones(1)) for name in KV}
        self.held = held
        self.pairs, self.before = list(stream(moe, 2)), dict(stream(moe, 1))
        for name, tensor in self.before.items():
            self.load(name, tensor)

    def load(self, name, tensor):
        """As vLLM's loaders: the part of a tensor that is here, if any."""
        if name in self.parts:
            part, of_wire = self.parts[name]
            part.copy_(tensor[of_wire or ...])

    def refit(self, fault):
        destination = Destination(self.parts, self.held)
        ledger = Ledger(self.specs, destination, number=2)
        pairs = fault.wire(self, self.pairs) if fault.wire else self.pairs
        for start in range(0, len(pairs), 5):
            ours = [pair for pair in pairs[start : start + 5] if ledger.receive(*pair)]
            ledger.arrived(ours)
            for name, tensor in ours:
                if fault.load is None or not fault.load(self, name, tensor):
                    self.load(name, tensor)
        if fault.after:
            fault.after(self)
        return ledger.close(lambda: Destination(self.parts, self.held))


@dataclasses.dataclass(frozen=True)
class Fault:
    """A row of the table."""

    title: str
    names: object
    """Those that the error must carry, no other."""
    wire: object = None
    load: object = None
    after: object = None
    moe: bool = False
    rank: Rank = WHOLE


L0, L1 = "model.layers.0", "model.layers.1"
Q, K, V, O = (f"{L1}.self_attn.{x}_proj.weight" for x in "qkvo")
Q0 = f"{L0}.self_attn.q_proj.weight"
GATE, UP, DOWN = (f"{L1}.mlp.{x}_proj.weight" for x in ("gate", "up", "down"))
S, S0 = f"{Q}_scale_inv", f"{Q0}_scale_inv"
NORM, NORM0, FINAL = (
    f"{L1}.input_layernorm.weight",
    f"{L0}.input_layernorm.weight",
    "model.norm.weight",
)
EMBED, HEAD, KV1 = "model.embed_tokens.weight", "lm_head.weight", KV[4]
UP2, UP3 = (f"{L1}.mlp.experts.{n}.up_proj.weight" for n in (2, 3))
DOWN2 = f"{L1}.mlp.experts.2.down_proj.weight"


def wire(*edits):
    """Edits of what arrives: pairs (name, function of its tensor to a list of pairs)."""
    table = dict(edits)
    return lambda scene, pairs: [
        new for n, t in pairs for new in (table[n](t) if n in table else [(n, t)])
    ]


def lost(*names):
    return wire(*((name, lambda t: []) for name in names))


def twice(name):
    return wire((name, lambda t: [(name, t), (name, t)]))


def as_other(name, change):
    """The tensor of a name changed, a copy of it."""
    return wire((name, lambda t: [(name, change(t.clone()))]))


def exchanged(*pairs_of_names):
    other = {a: b for pair in pairs_of_names for a, b in (pair, pair[::-1])}
    return lambda scene, pairs: [(n, dict(pairs)[other.get(n, n)]) for n, _ in pairs]


def stale(*names):
    return lambda scene, pairs: [(n, scene.before[n] if n in names else t) for n, t in pairs]


def bytes_of(tensor):
    return tensor.view(torch.uint8)


def with_bytes(change):
    """A change of a tensor's bytes in place."""

    def changed(tensor):
        change(bytes_of(tensor))
        return tensor

    return changed


def bit(raw):
    raw.view(-1)[raw.numel() // 2] ^= 1


def three_neighbours(raw):
    """+1, -2, +1: any sum that is linear in bytes and in their places stays as it was."""
    some = raw.view(-1)
    at = next(
        n
        for n in range(2, len(some) - 3)
        if some[n] < 250 and some[n + 1] > 5 and some[n + 2] < 250
    )
    some[at] += 1
    some[at + 1] -= 2
    some[at + 2] += 1


def nan_in_the_middle(tensor):
    flat = bytes_of(tensor).view(-1)
    if tensor.dtype == torch.float8_e4m3fn:
        flat[len(flat) // 2] = 0x7F
    else:
        tensor.view(-1)[tensor.numel() // 2] = torch.nan
    return tensor


def half_of_zeros(tensor):
    raw = bytes_of(tensor).view(-1)
    raw[len(raw) // 2 :] = 0
    return tensor


def skip(*names):
    return lambda scene, name, tensor: name in names


def first_half(name):
    def load(scene, loaded, tensor):
        if loaded == name:
            rows = len(tensor) // 2
            scene.parts[name].tensor[:rows].copy_(tensor[:rows])
        return loaded == name

    return load


def into_each_other(*names):
    """A loader that takes fused rows, or experts, for one another."""
    other = dict(zip(names, (*names[1:], names[0]), strict=True))

    def load(scene, loaded, tensor):
        for suffix in ("", "_scale_inv"):
            name = loaded.removesuffix("_scale_inv")
            if name in other and loaded == name + suffix:
                scene.load(other[name] + suffix, tensor)
                return True
        return False

    return load


def overwritten(name):
    """By what came into its buffer before it was copied."""

    def load(scene, loaded, tensor):
        if loaded == name:
            scene.parts[name].tensor.copy_(tensor.flip(0))
        return loaded == name

    return load


def shared(one, other):
    """Two names of one memory, since the engine was made."""

    def make(scene, pairs):
        scene.parts[other] = scene.parts[one]
        return pairs

    return make


def after(name, change):
    return lambda scene: change(scene.parts[name].tensor)


def moved(scene):
    scene.parts[NORM] = Part(scene.parts[NORM].tensor.clone(), scene.parts[NORM].of_wire)


def columns_of_the_other_rank(scene, loaded, tensor):
    if loaded == DOWN:
        scene.parts[DOWN].tensor.copy_(tensor[:, :256])
    return loaded == DOWN


def rows_of_the_other_rank(scene, loaded, tensor):
    if loaded == Q:
        scene.parts[Q].tensor.copy_(tensor[:256])
    return loaded == Q


def heads_of_the_other_rank(scene, loaded, tensor):
    if loaded == K:
        scene.parts[K].tensor.copy_(tensor[:128])
    return loaded == K


def a_column_too_far(scene, loaded, tensor):
    if loaded == DOWN:
        scene.parts[DOWN].tensor.copy_(tensor[:, 255:511])
    return loaded == DOWN


def added(scene, loaded, tensor):
    if loaded == NORM:
        scene.parts[NORM].tensor.add_(tensor)
    return loaded == NORM


def with_minus_zero(scene, loaded, tensor):
    if loaded == NORM:  # of a trainer whose value there is 0.0, as the engine's would be
        scene.parts[NORM].tensor.copy_(tensor)
        scene.parts[NORM].tensor[3] = -0.0
    return loaded == NORM


def permuted_blocks(tensor):
    blocks = bytes_of(tensor)
    blocks[:128], blocks[128:256] = blocks[128:256].clone(), blocks[:128].clone()
    return tensor


def swapped_rows(tensor):
    raw = bytes_of(tensor)
    raw[[0, 5]] = raw[[5, 0]]
    return tensor


def all_of(refit):
    return lambda scene, pairs: list(stream(scene.moe, refit))


def with_the_manifest_of(refit):
    return lambda scene, pairs: [*pairs[:-1], stream(scene.moe, refit)[-1]]


def all_of_before_but_the_manifest(scene, pairs):
    return [*stream(scene.moe, 1)[:-1], pairs[-1]]


def everything(scene):
    return set(scene.specs)


def cut_short(scene, pairs):
    return pairs[:9]


def all_after(scene):
    return {name for name, _ in scene.pairs[9:]}


def in_another_order(scene, pairs):
    at = [n for n, _ in pairs].index(O)
    return [*pairs[:at], pairs[at + 2], pairs[at + 3], pairs[at], pairs[at + 1], *pairs[at + 4 :]]


def quantized_otherwise(**how):
    """By another rule, or of other numbers: a weight and its scales, both plausible."""

    def edit(scene, pairs):
        weight = named_weights(scene.moe, 2)[Q].float() * how.get("factor", 1.0)
        fp8, scale_inv = quantize_blocks(weight, pow2=how.get("pow2", False))
        return [(n, {Q: fp8, S: scale_inv}.get(n, t)) for n, t in pairs]

    return edit


FAULTS = [
    # What the wire brings, or does not.
    Fault("a weight is lost", {Q}, lost(Q)),
    Fault("a scale is lost", {S}, lost(S)),
    Fault("a weight and its scale are lost", {Q, S}, lost(Q, S)),
    Fault("a norm is lost", {NORM}, lost(NORM)),
    Fault("the embedding is lost", {EMBED}, lost(EMBED)),
    Fault("a KV scale is lost", {KV1}, lost(KV1)),
    Fault("all KV scales are lost", set(KV), lost(*KV)),
    Fault("a weight comes twice", {Q}, twice(Q)),
    Fault("a scale comes twice", {S}, twice(S)),
    Fault("a KV scale comes twice", {KV1}, twice(KV1)),
    Fault("an unknown name", {"model.x"}, wire((Q, lambda t: [(Q, t), ("model.x", t)]))),
    Fault("no sentinel", {SENTINEL}, lost(SENTINEL)),
    Fault("no manifest", {MANIFEST}, lost(MANIFEST)),
    Fault("half a manifest", {MANIFEST}, as_other(MANIFEST, lambda t: t[: len(t) // 2])),
    Fault("a manifest of zeros", {MANIFEST}, as_other(MANIFEST, torch.zeros_like)),
    Fault("the stream is cut short", all_after, cut_short),
    Fault("FP8 as plain bytes", {Q}, as_other(Q, lambda t: t.view(torch.uint8))),
    Fault("BF16 for FP8", {Q}, as_other(Q, lambda t: t.bfloat16())),
    Fault("a scale in FP64", {S}, as_other(S, lambda t: t.double())),
    Fault("a weight transposed", {Q}, as_other(Q, lambda t: t.T)),
    Fault("a weight without its last rows", {Q}, as_other(Q, lambda t: t[:-128])),
    Fault("a scale without its last row", {S}, as_other(S, lambda t: t[:-1])),
    Fault("two weights exchanged", {Q, Q0}, exchanged((Q, Q0))),
    Fault("two weights exchanged with their scales", {Q, Q0, S, S0}, exchanged((Q, Q0), (S, S0))),
    Fault("two norms exchanged", {NORM, NORM0}, exchanged((NORM, NORM0))),
    Fault("a stale weight", {Q}, stale(Q)),
    Fault("a stale scale", {S}, stale(S)),
    Fault("a stale weight and its scale", {Q, S}, stale(Q, S)),
    Fault("a stale norm", {NORM}, stale(NORM)),
    Fault("a stale embedding", {EMBED}, stale(EMBED)),
    Fault("a square turned over", {K}, as_other(K, lambda t: t.T.contiguous())),
    Fault("the scale of another weight", {S, S0}, exchanged((S, S0))),
    Fault("zeros in the second half, FP8", {Q}, as_other(Q, half_of_zeros)),
    Fault("zeros in the second half, BF16", {EMBED}, as_other(EMBED, half_of_zeros)),
    Fault("one bit of FP8", {Q}, as_other(Q, with_bytes(bit))),
    Fault("one bit of BF16", {NORM}, as_other(NORM, with_bytes(bit))),
    Fault("one bit of a scale", {S}, as_other(S, with_bytes(bit))),
    Fault("NaN in the middle of FP8", {Q}, as_other(Q, nan_in_the_middle)),
    Fault("NaN in the middle of BF16", {EMBED}, as_other(EMBED, nan_in_the_middle)),
    Fault("a scale doubled on the way", {S}, as_other(S, lambda t: 2 * t)),
    Fault("a KV scale doubled on the way", {KV1}, as_other(KV1, lambda t: 2 * t)),
    # What the engine makes of it.
    Fault("a weight is not loaded", {Q}, load=skip(Q)),
    Fault("a scale is not loaded", {S}, load=skip(S)),
    Fault("a norm is not loaded", {NORM}, load=skip(NORM)),
    Fault("a KV scale is not loaded", {KV1}, load=skip(KV1)),
    Fault("the first half alone is copied, FP8", {Q}, load=first_half(Q)),
    Fault("the first half alone is copied, BF16", {EMBED}, load=first_half(EMBED)),
    Fault("a buffer is used again before the copy", {Q}, load=overwritten(Q)),
    Fault("two layers share memory", {Q0}, shared(Q, Q0)),
    Fault("two scales share memory", {S0}, shared(S, S0)),
    Fault("K and V the other way round", {K, V, f"{K}_scale_inv", f"{V}_scale_inv"},
          load=into_each_other(K, V)),
    Fault("gate and up the other way round", {GATE, UP, f"{GATE}_scale_inv", f"{UP}_scale_inv"},
          load=into_each_other(GATE, UP)),
    Fault("a scale doubled afterwards", {S}, after=after(S, lambda t: t.mul_(2))),
    Fault("rows zeroed afterwards", {Q}, after=after(Q, lambda t: bytes_of(t)[3:9].zero_())),
    Fault("blocks permuted afterwards", {Q}, after=after(Q, permuted_blocks)),
    Fault("NaN written into a weight afterwards", {Q}, after=after(Q, nan_in_the_middle)),
    Fault("NaN written into a norm afterwards", {FINAL}, after=after(FINAL, nan_in_the_middle)),
    Fault("the other rank's rows", {Q}, load=rows_of_the_other_rank, rank=SECOND_OF_TWO),
    Fault("memory that moved", {NORM}, after=moved),
    Fault("the whole of the last refit", {MANIFEST}, all_of(1)),
    # Of after the review.
    Fault("three bytes that a linear sum does not see", {Q},
          as_other(Q, with_bytes(three_neighbours))),
    Fault("two rows exchanged", {EMBED}, after=after(EMBED, swapped_rows)),
    Fault("the two halves exchanged", {Q}, after=after(Q, lambda t: t.copy_(t.roll(256, 0)))),
    Fault("a row shifted by one byte", {O},
          after=after(O, lambda t: bytes_of(t)[7].copy_(bytes_of(t)[7].roll(1)))),
    Fault("two scales of like size exchanged", {S},
          after=after(S, lambda t: t.copy_(t.flip(0)))),
    Fault("a minus before a zero", {NORM}, load=with_minus_zero),
    Fault("one unit in the last place", {FINAL},
          as_other(FINAL, with_bytes(lambda raw: raw[0].add_(1)))),
    Fault("scales that are powers of two", {Q, S}, quantized_otherwise(pow2=True)),
    Fault("weights of another learning rate", {Q, S}, quantized_otherwise(factor=1.01)),
    Fault("tensors in another order", {MANIFEST}, in_another_order),
    Fault("the last manifest with these tensors", {MANIFEST}, with_the_manifest_of(1)),
    Fault("this manifest with the last tensors", everything, all_of_before_but_the_manifest),
    Fault("a refit that this engine has missed", {MANIFEST}, all_of(3)),
    Fault("a weight added to what was there", {NORM}, load=added),
    Fault("the other rank's columns", {DOWN}, load=columns_of_the_other_rank, rank=SECOND_OF_TWO),
    Fault("columns off by one", {DOWN}, load=a_column_too_far, rank=SECOND_OF_TWO),
    Fault("the other rank's heads", {K}, load=heads_of_the_other_rank, rank=SECOND_OF_TWO),
    Fault("one bit on the way to a rank that does not hold it", {Q},
          as_other(Q, with_bytes(lambda raw: raw[0, 0].bitwise_xor_(1))), rank=SECOND_OF_TWO),
    Fault("two experts exchanged", {UP2, UP3, f"{UP2}_scale_inv", f"{UP3}_scale_inv"},
          load=into_each_other(UP2, UP3), moe=True, rank=SECOND_EXPERTS),
    Fault("an expert of the last refit", {DOWN2}, load=skip(DOWN2), moe=True, rank=SECOND_EXPERTS),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.title)
def test_a_fault_stops_the_refit_by_name(fault):
    scene = Scene(fault.moe, fault.rank)
    with pytest.raises(RefitError) as error:
        scene.refit(fault)
    wanted = fault.names(scene) if callable(fault.names) else fault.names
    assert {problem.split(":")[0] for problem in error.value.problems} == wanted


@pytest.mark.parametrize("rank", [Rank(), SECOND_OF_TWO, SECOND_EXPERTS], ids=["1", "tp", "ep"])
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_the_same_scene_without_a_fault_is_proven(moe, rank):
    proof = (scene := Scene(moe, rank)).refit(Fault("none", set()))
    assert proof.equal_digests == len(scene.held) - len(KV)
    named = named_shapes(MOE if moe else DENSE)
    fp8 = [n for n, s in named.items() if is_quantized_weight(n, s, FP8_KV, 2)]
    assert proof.verified_weights == sum(map(rank.holds, fp8))


def test_the_table_holds_eighty():
    assert len(FAULTS) == len({fault.title for fault in FAULTS}) == 80
