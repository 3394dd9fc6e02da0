"""A refit lands whole or stops with the name of what did not: round trips, then every fault.

Two small models (dense, and a mixture of experts in slabs) are streamed into a dictionary that
stands for the engine. A fault is an edit of the stream, of the loader or of the engine; each test
says which name the error must carry. What was sent is compared byte by byte.
"""

import dataclasses
import pickle
import re
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8_nemo.glue import refit
from fp8_nemo.glue import wire as weights
from fp8_nemo.glue.destination import Destination, Part, Sample
from fp8_nemo.glue.ledger import Ledger
from fp8_nemo.glue.manifest import MANIFEST, SENTINEL
from fp8_nemo.glue.quantize import quantize_blocks, quantize_nvfp4
from fp8_nemo.glue.recalibrate import kv_scales
from fp8_nemo.glue.refit import refit_stream
from fp8_nemo.glue.wire import RefitError
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision

L = 2
FP8 = Precision(rollout_linear="fp8")
FP8_KV = Precision(rollout_linear="fp8", rollout_kv="fp8")
BF16_KV = Precision(rollout_kv="fp8")
PRECISIONS = [
    Precision(), FP8, FP8_KV, Precision(rollout_linear="fp8", scales="pow2", first_layers_bf16=1)
]  # fmt: skip
KV = kv_scales(torch.arange(1.0, 7.0).view(1, L, 3), 1.05)
ROUNDED = {name: torch.tensor(scale).item() for name, scale in KV.items()}
Q = "model.layers.1.self_attn.q_proj.weight"
GATE = "model.layers.0.mlp.gate.weight"
EMBED = "model.embed_tokens.weight"
SLAB = "model.layers.0.mlp.experts.gate_up_proj"
DENSE = {EMBED: (16, 200), "model.layers.0.mlp.gate_proj.weight": (130, 200), Q: (256, 200),
         "model.layers.1.input_layernorm.weight": (200,)}  # fmt: skip
MOE = {GATE: (3, 200), SLAB: (3, 260, 200), "model.layers.0.mlp.experts.down_proj": (3, 200, 130),
       Q: (256, 200), "model.norm.weight": (200,)}  # fmt: skip
SMALL = Shape(layers=1, hidden=128, ffn=128, heads=1, kv_heads=1, head_dim=128, vocab=16)
MODELS = pytest.mark.parametrize("shapes", [DENSE, MOE], ids=["dense", "moe"])


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Hundreds of small operations: on shared cores threads take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(shapes, salt=0, dtype=torch.float32):
    """Weights of these shapes by integer arithmetic."""
    named = {}
    for name, shape in shapes.items():
        index = torch.arange(salt, salt + torch.Size(shape).numel())
        named[name] = ((index * 2654435761 % 2**32).double() / 2**32 - 0.5).to(dtype).view(shape)
        salt += 1000
    return named


def stream_of(named, precision=FP8_KV, scales=KV, **how):
    return refit_stream(named.items(), precision, scales, num_layers=L, **how)


def engine_for(shapes, precision=FP8_KV):
    """What the engine must get, and its tensors, which hold something else."""
    expected = weights.wire_specs(shapes, precision, L)
    engine = {
        name: torch.full(spec.shape, 0.25, dtype=torch.float32).to(getattr(torch, spec.dtype))
        for name, spec in expected.items()
    }
    return expected, engine


def deliver(stream, expected, engine, load=lambda name: True, verify="bytes"):
    """Receive a stream as an engine does, in place; `load` says which tensors its loader takes."""
    ledger = Ledger(expected, Destination(engine, expected), verify=verify)
    for name, tensor in stream:
        if ledger.receive(name, tensor) and load(name):
            engine[name].copy_(tensor)
    return ledger.close()


@contextmanager
def fails(*names):
    """Expect the error that lists exactly these names, one problem each."""
    with pytest.raises(RefitError) as error:
        yield error
    assert [problem.split(":")[0] for problem in error.value.problems] == [*names]


def raw(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def one_by_one(named):
    """The same weights with experts unstacked, as the checkpoint holds them."""
    alone = {}
    for name, weight in named.items():
        wires = weights.wire_names(name, tuple(weight.shape))
        parts = weight.reshape(len(wires), -1, weight.shape[-1]) if len(wires) > 1 else [weight]
        alone |= dict(zip(wires, parts, strict=True))
    return alone


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@MODELS
def test_a_whole_refit_lands_byte_by_byte(shapes, dtype, precision):
    named = made(shapes, dtype=dtype)
    expected, engine = engine_for(shapes, precision)
    proof = deliver(stream_of(named, precision), expected, engine)
    wanted = {}
    for name, weight in one_by_one(named).items():
        wanted[name] = weight.bfloat16()
        if weights.is_quantized_weight(name, tuple(weight.shape), precision, L):
            pow2 = precision.scales == "pow2"
            wanted[name], wanted[f"{name}_scale_inv"] = quantize_blocks(weight, pow2=pow2)
    if precision.rollout_kv == "fp8":
        wanted |= {name: torch.tensor([scale]) for name, scale in KV.items()}
    assert list(engine) == list(wanted)
    assert all(raw(engine[name]) == raw(wanted[name]) for name in wanted)
    assert proof.bytes == sum(map(len, map(raw, wanted.values())))
    assert proof.verified_weights == sum(name.endswith("_scale_inv") for name in wanted)
    assert proof.equal_digests == len(wanted.keys() - KV.keys())


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("verify", ["names", "bytes"])
@MODELS
def test_names_types_and_shapes_are_those_of_wire_specs_in_every_refit(shapes, precision, verify):
    found = []
    for size, metadata_only in ((1, True), (1, False), (0, False)):
        named = {name: weight * size for name, weight in made(shapes).items()}
        scales = None if metadata_only else {name: scale + size for name, scale in KV.items()}
        how = {"metadata_only": metadata_only, "verify": verify}
        stream = stream_of(named, precision, scales, **how)
        found.append([(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in stream])
    assert found[0] == found[1] == found[2], "the manifest's shape included"
    specs = weights.wire_specs(shapes, precision, L).items()
    assert found[0][0][0] == SENTINEL and found[0][-1][0] == MANIFEST
    assert found[0][1:-1] == [(name, spec.dtype, spec.shape) for name, spec in specs]


def test_metadata_needs_no_scales_and_is_never_taken_for_a_refit():
    stream = list(stream_of(made(DENSE), scales=None, metadata_only=True))
    assert all(tensor.isnan().all() for name, tensor in stream if name in KV)
    with fails(*KV):
        deliver(stream, *engine_for(DENSE))


@pytest.mark.parametrize("at_once", [1, 3])
def test_the_stream_takes_one_group_at_a_time_and_holds_none_of_those_before(monkeypatch, at_once):
    monkeypatch.setattr(refit, "GROUP_BYTES", at_once * 128 * 128 * 4)
    made_so_far = []

    def trainer():
        for layer in range(12):
            weight = torch.ones(128, 128)
            made_so_far.append(weakref.ref(weight))
            yield f"model.layers.{layer}.self_attn.q_proj.weight", weight
            del weight

    stream = refit_stream(trainer(), FP8, None, num_layers=12)
    assert next(stream)[0] == SENTINEL and len(made_so_far) == at_once
    for count in range(1, 13):
        name, tensor = next(stream)
        assert name == f"model.layers.{count - 1}.self_attn.q_proj.weight"
        assert next(stream)[0] == name + "_scale_inv"
        assert len(made_so_far) == -(-count // at_once) * at_once
        assert sum(each() is not None for each in made_so_far) <= 1, "the trainer holds its last"
        del tensor


def test_a_group_ends_at_its_size_whatever_it_holds(monkeypatch):
    monkeypatch.setattr(refit, "GROUP_BYTES", 1)
    one_by_one = [(name, raw(tensor)) for name, tensor in stream_of(made(MOE))]
    monkeypatch.undo()
    assert [(n, raw(t)) for n, t in stream_of(made(MOE))] == one_by_one


def edited(name, edit):
    """A fault: what arrives instead of `name`, a list of pairs made from its tensor."""
    return lambda pairs: [new for n, t in pairs for new in (edit(t) if n == name else [(n, t)])]


def without(name):
    return edited(name, lambda t: [])


def resent(name, change):
    return edited(name, lambda t: [(name, change(t))])


def twice(name):
    return edited(name, lambda t: [(name, t)] * 2)


def gate_as_fp8(gate):
    return [(GATE, gate.to(torch.float8_e4m3fn)), (f"{GATE}_scale_inv", torch.ones(1, 2))]


def flipped(tensor, bit=0):
    changed = tensor.clone()
    changed.view(torch.uint8).view(-1)[changed.nbytes // 2] ^= 1 << bit
    return changed


S, K1 = f"{Q}_scale_inv", "model.layers.1.self_attn.k_scale"
FAULTS = [
    (without(Q), f"{Q}: never arrived"),
    (without(S), f"{S}: never arrived"),
    (without(K1), f"{K1}: never arrived"),
    (twice(Q), f"{Q}: sent twice"),
    (twice(K1), f"{K1}: sent twice"),
    (resent(S, lambda t: t[:1]), f"{S}: wrong shape [1, 2], expected [2, 2]"),
    (resent(Q, lambda t: t.T), f"{Q}: wrong shape [200, 256], expected [256, 200]"),
    (resent(Q, torch.Tensor.bfloat16), f"{Q}: wrong dtype bfloat16, expected float8_e4m3fn"),
    (edited(Q, lambda t: [(Q, t), ("lm_head.weight", t)]), "lm_head.weight: unknown name"),
    (
        edited(GATE, gate_as_fp8),
        f"{GATE}: wrong dtype float8_e4m3fn, expected bfloat16",
        f"{GATE}_scale_inv: unknown name",
    ),
    (
        edited(K1, lambda t: [(K1, 2 * t)]),
        f"{K1}: the engine holds {2 * ROUNDED[K1]}, sent {ROUNDED[K1]}",
    ),
    (without(MANIFEST), f"{MANIFEST}: never arrived whole, so the stream was cut short"),
    (without(SENTINEL), f"{SENTINEL}: never arrived, so this stream is not ours"),
    (lambda pairs: without(Q)(twice(GATE)(pairs)), f"{GATE}: sent twice", f"{Q}: never arrived"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[-1].replace("model.layers.", ""))
def test_a_fault_on_the_wire_is_named(fault):
    edit, *problems = fault
    pairs = edit(list(stream_of(made(MOE))))
    with pytest.raises(RefitError) as error:
        deliver(pairs, *engine_for(MOE))
    assert error.value.problems == problems
    assert all(problem in str(error.value) for problem in problems)


def test_a_buffer_that_the_wire_uses_again_spoils_no_proof():
    def reusing(stream):
        for name, tensor in stream:
            buffer = tensor.clone()
            yield name, buffer
            buffer.view(torch.uint8).fill_(0)

    proof = deliver(reusing(stream_of(made(DENSE))), *engine_for(DENSE))
    assert proof.equal_digests == len(weights.wire_specs(DENSE, FP8_KV, L).keys() - KV.keys())


def test_whatever_nobody_digested_on_arrival_is_named_and_not_believed():
    held, engine = engine_for(DENSE, FP8)
    ledger = Ledger(weights.wire_specs(DENSE, Precision(), L), Destination(engine, held))
    for name, tensor in stream_of(made(DENSE), Precision(), None):
        if ledger.receive(name, tensor) and held[name].dtype == "bfloat16":
            engine[name].copy_(tensor)
    with fails(*(name for name, spec in held.items() if spec.dtype == "float8_e4m3fn")) as error:
        ledger.close()
    assert "was not digested on arrival" in str(error.value)


@pytest.mark.parametrize("engine_quantizes", [False, True])
def test_what_is_quantized_here_must_be_digested_before_it_is_loaded(engine_quantizes):
    """Else its bytes are compared with nothing; an engine that quantizes by itself says so."""
    held, engine = engine_for(DENSE, FP8)
    expected, destination = weights.wire_specs(DENSE, Precision(), L), Destination(engine, held)
    ledger = Ledger(expected, destination, engine_quantizes=engine_quantizes)
    for name, tensor in stream_of(made(DENSE), Precision(), None):
        if ledger.receive(name, tensor):
            ledger.arrived([(name, tensor)])
            loaded = dict(refit.encode([(name, tensor)], FP8, num_layers=L).tensors)
            for each, x in loaded.items():
                engine[each].copy_(x)
    quantized = [name for name, spec in held.items() if expected.get(name) != spec]
    if engine_quantizes:
        proof = ledger.close()
        assert proof.equal_digests == len(held) - len(quantized)
        return
    with fails(*quantized) as error:
        ledger.close()
    assert "was not digested before it was loaded" in str(error.value)


def test_a_refused_tensor_is_not_handed_to_the_engine():
    expected, engine = engine_for(DENSE, FP8)
    ledger = Ledger(expected, Destination(engine, expected))
    fp8_OI, scale_inv_PQ = quantize_blocks(made(DENSE)[Q])
    taken = [
        (Q, fp8_OI),
        (Q, fp8_OI),
        (f"{Q}_scale_inv", scale_inv_PQ.double()),
        ("lm_head", fp8_OI),
    ]
    assert [ledger.receive(*each) for each in taken] == [True, False, False, False]


def test_a_sender_with_other_weights_than_the_engine_is_found_by_the_manifest():
    other = {**DENSE, EMBED: (16, 200), "model.norm.weight": (200,)}
    pairs = without("model.norm.weight")(stream_of(made(other)))
    with fails(MANIFEST) as error:
        deliver(pairs, *engine_for(DENSE))
    assert "lists other tensors than this engine expects" in str(error.value)


@pytest.mark.parametrize("name", list(MOE))
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 3.4e38])
def test_a_weight_that_bf16_cannot_hold_is_refused_by_name_before_the_manifest(name, value):
    named, sent = made(MOE), []
    named[name].view(-1)[-1] = value  # 3.4e38 would travel as Inf
    with fails(name):
        sent += (wire for wire, _ in stream_of(named))
    assert MANIFEST not in sent and not KV.keys() & set(sent)


@pytest.mark.parametrize("scale", [None, 0.0, -1.0, float("nan"), float("inf"), 1e-50])
def test_a_kv_scale_that_is_missing_or_not_positive_and_finite_in_fp32_is_refused(scale):
    scales = {**KV, K1: scale}
    if scale is None:
        del scales[K1]
    with fails(K1) as error:
        list(stream_of(made(DENSE), scales=scales))
    assert f"KV scale {scale} must be finite and above 0 in FP32" in str(error.value)
    with fails(*KV) as error:
        list(stream_of(made(DENSE), scales=None))
    assert str(error.value).count("KV scale None") == len(KV)


def test_opening_a_ledger_of_names_poisons_block_scales_and_both_ends_of_the_rest():
    expected, engine = engine_for(MOE)
    Ledger(expected, Destination(engine, expected), verify="names")
    for name, tensor in engine.items():
        poison = tensor.float().isnan().flatten()
        if name.endswith("_scale_inv"):
            assert poison.all()
        else:
            assert poison[0] and poison[-1] and not poison[1:-1].any()
            assert (tensor.float().flatten()[1:-1] == 0.25).all()


FOUR = Precision(rollout_linear="nvfp4")
EVEN = {"dense": {EMBED: (16, 192), Q: (256, 192), "model.norm.weight": (192,)},
        "moe": {GATE: (3, 192), SLAB: (3, 256, 192), "model.layers.0.mlp.experts.down_proj":
                (3, 192, 128), "model.norm.weight": (192,)}}  # fmt: skip


@pytest.mark.parametrize("shapes", EVEN.values(), ids=EVEN)
@pytest.mark.parametrize("verify", ["names", "bytes"])
def test_four_bits_land_byte_by_byte_with_both_their_scales(shapes, verify):
    named = made(shapes)
    expected, engine = engine_for(shapes, FOUR)
    proof = deliver(stream_of(named, FOUR, verify=verify), expected, engine, verify=verify)
    wanted = {}
    for name, weight in one_by_one(named).items():
        wanted[name] = weight.bfloat16()
        if weights.is_linear(name, tuple(weight.shape)):
            held = quantize_nvfp4(weight, torch.tensor(False))
            suffixes = ("", "_scale", "_scale_2")
            wanted |= {name + end: x for end, x in zip(suffixes, held, strict=True)}
    assert list(engine) == list(wanted)
    assert all(raw(engine[name]) == raw(wanted[name]) for name in wanted)
    assert proof.verified_weights == (1 if Q in named else 9)
    assert proof.bytes == sum(map(len, map(raw, wanted.values())))


FUSED = {
    **{f"model.layers.0.self_attn.{each}_proj.weight": (64, 192) for each in "qkv"},
    **{f"model.layers.0.mlp.{each}_proj.weight": (64, 192) for each in ("gate", "up")},
    "model.layers.0.mlp.down_proj.weight": (192, 64),
}


@pytest.mark.parametrize("size", [1, 64 * 192 * 4 * 2, 2**28])
def test_what_vllm_fuses_shares_one_scale_whatever_size_a_group_has(monkeypatch, size):
    monkeypatch.setattr(refit, "GROUP_BYTES", size)
    named = {name: weight * (1 + n) for n, (name, weight) in enumerate(made(FUSED).items())}
    scales = [x.item() for n, x in stream_of(named, FOUR) if n.endswith("_scale_2")]
    (q, k, v), (gate, up), (down,) = scales[:3], scales[3:5], scales[5:]
    assert q == k == v and gate == up and len({q, gate, down}) == 3
    largest = named["model.layers.0.self_attn.v_proj.weight"].bfloat16().abs().max()
    assert v == (largest.float() / torch.tensor(2688.0)).item()


@pytest.mark.parametrize("end", ["", "_scale", "_scale_2"])
@pytest.mark.parametrize("verify", ["names", "bytes"])
def test_four_bits_or_a_scale_of_theirs_that_do_not_arrive_or_load_are_named(end, verify):
    expected, engine = engine_for(EVEN["dense"], FOUR)
    sent = list(stream_of(made(EVEN["dense"]), FOUR, verify=verify))
    with fails(Q + end) as error:
        deliver([each for each in sent if each[0] != Q + end], expected, engine, verify=verify)
    assert "never arrived" in str(error.value)
    if (end, verify) == ("", "names"):
        return  # packed bytes have no NaN to poison them with: `bytes` alone notices
    with fails(Q + end):
        deliver(sent, expected, engine, load=lambda name: name != Q + end, verify=verify)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("verify", ["names", "bytes"])
@MODELS
def test_a_proof_counts_the_bytes_of_linears_that_a_refit_changed(shapes, precision, verify):
    expected, engine = engine_for(shapes, precision)

    def refit(named):
        return deliver(stream_of(named, precision, verify=verify), expected, engine, verify=verify)

    named = made(shapes)
    refit(named)
    assert (proof := refit(named)).changed == 0 and proof.sampled > 0
    before = {name: raw(tensor) for name, tensor in engine.items()}
    others = [name for name in named if not weights.is_linear(name, named[name].shape)]
    moved = made(shapes, salt=7)
    assert refit(named | {name: moved[name] for name in others}).changed == 0
    proof = refit(named | {Q: moved[Q]})
    bytes_of = {name: len(raw(x)) for name, x in engine.items()}
    linears = [n for n in bytes_of if n.endswith(("proj.weight", "proj.weight_scale_inv"))]
    assert proof.sampled == sum(bytes_of[name] for name in linears)
    differ = (a != b for n in linears for a, b in zip(before[n], raw(engine[n]), strict=True))
    assert proof.changed == sum(differ) > 1000


def test_of_many_values_those_at_equal_distances_are_compared(monkeypatch):
    """Phase goes on from tensor to tensor: a scale has its share of the sample, and no more."""
    monkeypatch.setattr("fp8_nemo.glue.destination.SAMPLED", 1000)
    shorts_12672, float_1 = torch.zeros(99, 128).bfloat16(), torch.zeros(1)
    tensors = [shorts_12672, float_1, torch.zeros(8, 64, dtype=torch.int8)]
    sample = Sample([*tensors, torch.zeros(4, 4).T[:2]])
    before = sample.read()
    step = 15  # 13,185 values over 1,000, and odd
    places = torch.arange(13185).split([12672, 1, 512])
    taken = [(part % step == 0).sum().item() for part in places]
    assert sample.bytes == 2 * taken[0] + 4 * taken[1] + taken[2] == sum(map(len, before))
    for tensor in tensors:
        tensor.add_(1)
    assert sample.changed(before).tolist() == [taken[0] * 2 + taken[1] * 2 + taken[2]]


class Counted(TorchDispatchMode):
    """How many operations torch is asked for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.count += 1
        return function(*arguments, **(options or {}))


def test_the_proof_takes_as_many_operations_for_many_tensors_as_for_few(monkeypatch):
    """Digests aside, which take a GPU one launch; of 8B's KV scales each once took two."""
    monkeypatch.setattr("fp8_nemo.glue.digest._in_torch", lambda part: 0)
    counts = set()
    for layers in (1, 3):
        shape = dataclasses.replace(SMALL, layers=layers)
        expected = weights.wire_specs(weights.named_shapes(shape), FP8_KV, layers)
        engine = {n: torch.ones(s.shape).to(getattr(torch, s.dtype)) for n, s in expected.items()}
        named = {n: torch.ones(s).bfloat16() for n, s in weights.named_shapes(shape).items()}
        scales = {n: 1.0 for layer in range(layers) for n in weights.kv_scale_names(layer)}
        sent = list(refit_stream(named.items(), FP8_KV, scales, num_layers=layers))
        destination = Destination(engine, expected)
        assert destination.sample.bytes  # made once an engine, with views of every linear
        with Counted() as counted:
            ledger = Ledger(expected, destination)
            for name, tensor in sent:
                ledger.receive(name, tensor)
            ledger.close()
        counts.add(counted.count)
    assert len(counts) == 1


def test_what_is_watched_of_a_tensor_is_dense_so_that_a_list_of_them_takes_one_launch():
    expected, engine = engine_for(MOE)
    watched = Destination(engine, expected).watched
    assert watched.keys() == expected.keys()
    assert all(view.is_contiguous() for _, views in watched.values() for view in views)


def test_opening_a_ledger_of_bytes_poisons_only_what_the_engine_makes_for_itself():
    expected, engine = engine_for(MOE)
    Ledger(expected, Destination(engine, expected))
    assert not any(tensor.float().isnan().any() for tensor in engine.values())
    Ledger(weights.wire_specs(MOE, BF16_KV, L), Destination(engine, expected))
    poisoned = {name for name, tensor in engine.items() if tensor.float().isnan().any()}
    fp8 = {name for name, spec in expected.items() if spec.dtype == "float8_e4m3fn"}
    assert poisoned == fp8 | {f"{name}_scale_inv" for name in fp8}


@pytest.mark.parametrize("name", [Q, S, EMBED, "model.layers.1.input_layernorm.weight"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_names_tells_what_arrived_and_was_not_loaded_or_half(name, share):
    expected, engine = engine_for(DENSE)
    stream = stream_of(made(DENSE), verify="names")
    ledger = Ledger(expected, Destination(engine, expected), verify="names")
    for each, tensor in stream:
        if ledger.receive(each, tensor):
            count = int(tensor.numel() * (share if each == name else 1))
            engine[each].flatten()[:count].copy_(tensor.flatten()[:count])
    with fails(name) as error:
        ledger.close()
    assert "still holds its poison" in str(error.value)


@pytest.mark.parametrize("name", [Q, S, EMBED, "model.layers.1.input_layernorm.weight"])
def test_whatever_arrived_and_was_not_loaded_is_named(name):
    with fails(name) as error:
        deliver(stream_of(made(DENSE)), *engine_for(DENSE), name.__ne__)
    assert "the engine's bytes are not the sender's (digest)" in str(error.value)


def test_an_engine_with_other_tensors_is_refused_and_left_untouched():
    expected, engine = engine_for(MOE)
    del engine[Q]
    engine[GATE] = engine[GATE].to(torch.float8_e4m3fn)  # vLLM's choice, were it not told otherwise
    engine[f"{GATE}_scale_inv"] = torch.ones(1, 2)
    engine["model.norm.weight"] = torch.ones(100, dtype=torch.bfloat16)
    with fails(GATE, f"{GATE}_scale_inv", Q, "model.norm.weight") as error:
        Ledger(expected, Destination(engine, expected))
    assert re.search(r"float8_e4m3fn \[3, 200\], a refit sends bfloat16 \[3", str(error.value))
    assert all(
        tensor.isfinite().all() for tensor in engine.values() if tensor.dtype == torch.float32
    )


def test_a_kv_scale_that_the_engine_did_not_take_is_named():
    with fails(K1) as error:
        deliver(stream_of(made(DENSE)), *engine_for(DENSE), K1.__ne__)
    assert "the engine holds 0.25, sent " in str(error.value)


@pytest.mark.parametrize("name", [Q, S, EMBED, "model.layers.1.input_layernorm.weight"])
def test_what_is_stale_but_plausible_is_seen_by_bytes_and_not_by_names(name):
    before = {each: 3 * weight for each, weight in made(DENSE, salt=5).items()}
    stale = edited(name, lambda t: [(name, dict(stream_of(before))[name])])
    by_names = deliver(stale(stream_of(made(DENSE))), *engine_for(DENSE), verify="names")
    assert by_names.equal_digests == 0
    with fails(name) as error:
        deliver(stale(stream_of(made(DENSE))), *engine_for(DENSE))
    assert "digest" in str(error.value)


@pytest.mark.parametrize("verify", ["names", "bytes"])
def test_a_whole_refit_of_before_is_told_by_its_number(verify):
    before = list(stream_of(made(DENSE), verify=verify, number=1))
    expected, engine = engine_for(DENSE)
    for number in (1, 2):
        ledger = Ledger(expected, Destination(engine, expected), verify=verify, number=number)
        for name, tensor in before:
            if ledger.receive(name, tensor):
                engine[name].copy_(tensor)
        if number == 1:
            ledger.close()
    with fails(MANIFEST) as error:
        ledger.close()
    assert "is of refit 1, this engine expects refit 2" in str(error.value)


@pytest.mark.parametrize("name", [Q, S, EMBED, K1])
@pytest.mark.parametrize("how", ["replaced", "set_"])
def test_storage_that_moved_is_named(name, how):
    expected, engine = engine_for(DENSE)
    ledger = Ledger(expected, Destination(engine, expected))
    for wire, tensor in stream_of(made(DENSE)):
        if ledger.receive(wire, tensor):
            engine[wire].copy_(tensor)
    if how == "set_":
        engine[name].set_(engine[name].clone())
    else:
        engine[name] = engine[name].clone()  # as a loader that makes a new parameter
    with fails(name) as error:
        ledger.close(lambda: Destination(engine, expected))
    assert "storage moved" in str(error.value)


def test_a_manifest_that_cannot_be_read_or_lacks_digests_is_named():
    expected, engine = engine_for(DENSE)

    def problem(sent, **how):
        ledger = Ledger(expected, Destination(engine, expected), **how)
        for name, tensor in sent:
            if ledger.receive(name, tensor):
                engine[name].copy_(tensor)
            elif name == MANIFEST:
                tensor.zero_()  # its buffer is used again
        with fails(MANIFEST) as error:
            ledger.close()
        return str(error.value)

    def stream(**how):
        return [(name, tensor.clone()) for name, tensor in stream_of(made(DENSE), **how)]

    assert "lacks digests, which verify=bytes needs" in problem(stream(verify="names"))
    for edit in (
        torch.zeros_like,
        torch.ones_like,  # what follows a stream that the sender refused
        lambda whole: whole[1:],
        lambda whole: whole[:16],
        lambda whole: whole[:0],
        lambda whole: whole.flip(0),
    ):
        for verify in ("names", "bytes"):
            sent = resent(MANIFEST, lambda t, edit=edit: edit(t).clone())(stream(verify=verify))
            assert "never arrived whole" in problem(sent, verify=verify)
    for verify in ("names", "bytes"):
        gone_astray = stream(verify=verify)
        gone_astray[1], gone_astray[2] = gone_astray[2], gone_astray[1]
        assert "lists other tensors" in problem(gone_astray, verify=verify)
    for short in (8, 16):
        sent = resent(MANIFEST, lambda t, short=short: t[:-short])(stream())
        assert "lacks digests" in problem(sent)


def test_every_bit_of_a_manifest_counts_but_those_that_no_kv_scale_has():
    expected, engine = engine_for(DENSE)
    pairs = list(stream_of(made(DENSE), number=7))
    missed = []
    for bit in range(0, 8 * len(pairs[-1][1])):
        sent = dict(pairs)
        sent[MANIFEST] = pairs[-1][1].clone()
        sent[MANIFEST][bit // 8] ^= 1 << bit % 8
        try:
            ledger = Ledger(expected, Destination(engine, expected), number=7)
            for name, tensor in sent.items():
                if ledger.receive(name, tensor):
                    engine[name].copy_(tensor)
            ledger.close()
        except RefitError as error:
            [problem] = error.problems
            assert problem.split(":")[0] in {MANIFEST, *expected}
        else:
            missed.append(bit)
    upper = [64 * (3 + n) + 32 + bit for n in range(len(KV)) for bit in range(32)]
    assert missed == upper, "a scale is FP32: the upper half of its number says nothing"


def test_tensors_that_loading_put_in_place_of_others_are_seen_when_looked_up_again():
    expected, engine = engine_for(DENSE)
    ledger = Ledger(expected, Destination(engine, expected))
    for name, tensor in stream_of(made(DENSE)):
        if ledger.receive(name, tensor):
            engine[name].copy_(tensor)
    name = "model.embed_tokens.weight"
    with fails(name) as error:
        ledger.close(lambda: Destination(engine | {name: engine[name].clone()}, expected))
    assert "its storage moved" in str(error.value)


def test_what_never_arrived_is_named_though_the_engine_has_become_another():
    expected, engine = engine_for(DENSE)
    ledger = Ledger(expected, Destination(engine, expected))
    for name, tensor in stream_of(made(DENSE)):
        if name != Q and ledger.receive(name, tensor):
            engine[name].copy_(tensor)
    with fails(Q) as error:
        ledger.close(lambda: Destination({EMBED: torch.zeros(2, 4)}, expected))
    assert "never arrived" in str(error.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_ranks_parts_are_filled_from_whole_tensors_and_nothing_beside_them_is_touched(rank):
    specs = weights.wire_specs(
        {"a.weight": (4, 8), "b.weight": (6, 8), "c.weight": (8,)}, BF16_KV, L
    )
    held = {n: spec for n, spec in specs.items() if n.endswith(".weight")}
    held["s"] = weights.WireSpec("float32", (2, 4))
    rows, columns = slice(2 * rank, 2 * rank + 2), slice(4 * rank, 4 * rank + 4)
    fused = torch.full((5, 8), torch.nan, dtype=torch.bfloat16)  # a last row that is not filled
    slab = torch.full((2, 6, 4), torch.nan, dtype=torch.bfloat16)
    norm, scales = torch.full((8,), torch.nan, dtype=torch.bfloat16), torch.zeros(4, 2).T
    place = Destination(
        {
            "a.weight": Part(fused[1:3], (rows, slice(0, 8))),
            "b.weight": Part(slab[1], (slice(0, 6), columns)),
            "c.weight": norm, "s": scales,
        },
        held,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(rank)
    sent = {
        name: torch.randn(spec.shape, generator=draw).to(getattr(torch, spec.dtype))
        for name, spec in held.items()
    }
    place.fill(sent.items())
    assert torch.equal(fused[1:3], sent["a.weight"][rows]) and fused[[0, 3, 4]].isnan().all()
    assert torch.equal(slab[1], sent["b.weight"][:, columns]) and slab[0].isnan().all()
    assert torch.equal(norm, sent["c.weight"]) and torch.equal(scales, sent["s"])
    place.fill([])


def test_an_error_crosses_processes_with_its_names():
    error = RefitError(["a: lost", "b: lost"])
    again = pickle.loads(pickle.dumps(error))
    assert again.problems == error.problems and str(again) == str(error)
