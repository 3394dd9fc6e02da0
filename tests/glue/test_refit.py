"""A refit lands whole or stops with the name of what did not: round trips, then every fault.

Two small models (dense, and a mixture of experts in slabs) are streamed into a dictionary that
stands for the engine. A fault is an edit of the stream, of the loader or of the engine; each test
says which name the error must carry. What was sent is compared byte by byte.
"""

import pickle
import re
import weakref
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

from fp8_nemo.glue import refit
from fp8_nemo.glue import wire as weights
from fp8_nemo.glue.ledger import Destination, Ledger
from fp8_nemo.glue.manifest import MANIFEST, SENTINEL, checksum
from fp8_nemo.glue.quantize import quantize_blocks
from fp8_nemo.glue.recalibrate import kv_scales
from fp8_nemo.glue.refit import refit_stream
from fp8_nemo.glue.wire import RefitError
from fp8_nemo.recipe.options import Precision

L = 2
FP8 = Precision(rollout_linear="fp8")
FP8_KV = Precision(rollout_linear="fp8", rollout_kv="fp8")
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


def deliver(stream, expected, engine, load=lambda name: True, checksums=False):
    """Receive a stream as an engine does, in place; `load` says which tensors its loader takes."""
    ledger = Ledger(expected, Destination(engine, expected), checksums=checksums)
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
    proof = deliver(stream_of(named, precision, checksums=True), expected, engine, checksums=True)
    wanted = {}
    for name, weight in one_by_one(named).items():
        wanted[name] = weight.bfloat16()
        if weights.is_fp8_weight(name, tuple(weight.shape), precision, L):
            pow2 = precision.scales == "pow2"
            wanted[name], wanted[f"{name}_scale_inv"] = quantize_blocks(weight, pow2=pow2)
    if precision.rollout_kv == "fp8":
        wanted |= {name: torch.tensor([scale]) for name, scale in KV.items()}
    assert list(engine) == list(wanted)
    assert all(raw(engine[name]) == raw(wanted[name]) for name in wanted)
    assert proof.bytes == sum(map(len, map(raw, wanted.values())))
    assert proof.verified_weights == sum(name.endswith("_scale_inv") for name in wanted)
    assert proof.checksums == len(wanted)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("checksums", [False, True])
@MODELS
def test_names_types_and_shapes_are_those_of_wire_specs_in_every_refit(
    shapes, precision, checksums
):
    found = []
    for size, metadata_only in ((1, True), (1, False), (0, False)):
        named = {name: weight * size for name, weight in made(shapes).items()}
        scales = None if metadata_only else {name: scale + size for name, scale in KV.items()}
        how = {"metadata_only": metadata_only, "checksums": checksums}
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
    one_by_one = [(name, raw(tensor)) for name, tensor in stream_of(made(MOE), checksums=True)]
    monkeypatch.undo()
    assert [(n, raw(t)) for n, t in stream_of(made(MOE), checksums=True)] == one_by_one


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

    proof = deliver(
        reusing(stream_of(made(DENSE), checksums=True)), *engine_for(DENSE), checksums=True
    )
    assert proof.checksums == len(weights.wire_specs(DENSE, FP8_KV, L))


def test_without_an_engine_the_wire_alone_is_proven():
    ledger = Ledger(weights.wire_specs(MOE, FP8_KV, L))
    taken = [
        name
        for name, tensor in stream_of(made(MOE), checksums=True)
        if ledger.receive(name, tensor)
    ]
    proof = ledger.close()
    assert taken == list(ledger.expected)
    assert (proof.verified_weights, proof.checksums) == (10, 0)


def test_a_refused_tensor_is_not_handed_to_the_engine():
    ledger = Ledger(weights.wire_specs(DENSE, FP8, L))
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


def test_opening_the_ledger_poisons_block_scales_whole_and_one_element_of_the_rest():
    expected, engine = engine_for(MOE)
    Ledger(expected, Destination(engine, expected))
    for name, tensor in engine.items():
        poison = tensor.float().isnan().flatten()
        if name.endswith("_scale_inv"):
            assert poison.all()
        else:
            assert poison[0] and not poison[1:].any()
            assert (tensor.float().flatten()[1:] == 0.25).all()


@pytest.mark.parametrize("name", [Q, S, EMBED, "model.layers.1.input_layernorm.weight"])
def test_whatever_arrived_and_was_not_loaded_is_named(name):
    with fails(name) as error:
        deliver(stream_of(made(DENSE)), *engine_for(DENSE), name.__ne__)
    assert "still holds its poison" in str(error.value)


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


@pytest.mark.parametrize("checksums", [False, True])
def test_a_scale_that_the_engine_did_not_load_keeps_its_poison_and_is_named(checksums):
    with pytest.raises(RefitError, match=f"{S}: arrived, and was not loaded"):
        deliver(
            stream_of(made(DENSE), checksums=checksums),
            *engine_for(DENSE),
            S.__ne__,
            checksums,
        )


def test_a_kv_scale_that_the_engine_did_not_take_is_named():
    with fails(K1) as error:
        deliver(stream_of(made(DENSE)), *engine_for(DENSE), K1.__ne__)
    assert "the engine holds nan, sent " in str(error.value)


@pytest.mark.parametrize("name", [Q, S, EMBED, "model.layers.1.input_layernorm.weight"])
def test_what_is_stale_but_plausible_is_seen_by_full_and_only_by_full(name):
    before = {each: 3 * weight for each, weight in made(DENSE, salt=5).items()}
    stale = edited(name, lambda t: [(name, dict(stream_of(before))[name])])
    assert deliver(stale(stream_of(made(DENSE))), *engine_for(DENSE)).checksums == 0
    with fails(name) as error:
        deliver(stale(stream_of(made(DENSE), checksums=True)), *engine_for(DENSE), checksums=True)
    assert "checksum" in str(error.value)


@pytest.mark.parametrize("name", [Q, S, EMBED, K1])
@pytest.mark.parametrize("how", ["replaced", "set_"])
def test_storage_that_moved_is_named(name, how):
    expected, engine = engine_for(DENSE)
    ledger = Ledger(expected, Destination(engine, expected))
    for wire, tensor in stream_of(made(DENSE), checksums=True):
        if ledger.receive(wire, tensor):
            engine[wire].copy_(tensor)
    if how == "set_":
        engine[name].set_(engine[name].clone())
    else:
        engine[name] = engine[name].clone()  # as a loader that makes a new parameter
    with fails(name) as error:
        ledger.close(lambda: Destination(engine, expected))
    assert "storage moved" in str(error.value)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_checksum_weighs_byte_i_by_one_plus_i_mod_65521(dtype):
    tensor = (torch.arange(300 * 257).view(300, 257) % 251).to(dtype)
    wanted = sum(byte * (1 + i % 65521) for i, byte in enumerate(raw(tensor)))
    assert checksum(tensor).item() == checksum(tensor.T.contiguous().T).item() == wanted


def test_checksum_sees_any_neighbouring_blocks_swapped_and_rows_shifted():
    fp8_OI = quantize_blocks(made({Q: (384, 256)})[Q]).fp8_OI.view(torch.uint8)
    blocks = [(slice(r, r + 128), slice(c, c + 128)) for r in (0, 128, 256) for c in (0, 128)]
    sums = [checksum(fp8_OI).item()]
    for one, other in pairwise(blocks):
        swapped = fp8_OI.clone()
        swapped[one], swapped[other] = fp8_OI[other], fp8_OI[one]
        sums.append(checksum(swapped).item())
    sums += [checksum(fp8_OI.roll(rows, 0)).item() for rows in (1, 128, 255)]
    assert len(set(sums)) == len(sums) == 1 + 5 + 3


def test_a_manifest_that_cannot_be_read_or_lacks_checksums_is_named():
    expected, engine = engine_for(DENSE)
    stream = list(stream_of(made(DENSE)))

    def received(*manifests):
        ledger = Ledger(expected, Destination(engine, expected), checksums=True)
        for name, tensor in [*stream, *((MANIFEST, each) for each in manifests)]:
            if ledger.receive(name, tensor):
                engine[name].copy_(tensor)
            elif name == MANIFEST and manifests:
                tensor.zero_()  # its buffer is used again
        return ledger

    with fails(MANIFEST) as error:
        received().close()
    assert "lacks checksums, which verify=full needs" in str(error.value)
    whole = stream[-1][1].clone()
    with fails(MANIFEST) as error:
        received(whole).close()
    assert "lacks checksums, which verify=full needs" in str(error.value)
    broken = (
        "\0",
        "[]",
        '{"names": [], "sums": []}',
        '{"names": [3], "sums": [], "kv_scales": ""}',
        '{"names": ["a.k_scale"], "sums": [], "kv_scales": "00"}',
        '{"names": [], "sums": ["x"], "kv_scales": ""}',
    )
    for text in broken:
        sent = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        with fails(MANIFEST) as error:
            received(sent).close()
        assert "never arrived whole" in str(error.value)


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


def test_an_error_crosses_processes_with_its_names():
    error = RefitError(["a: lost", "b: lost"])
    again = pickle.loads(pickle.dumps(error))
    assert again.problems == error.problems and str(again) == str(error)
