"""Our receiver around an engine that loads as vLLM's do: what lands, what stops a run, and when.

The engine here is a small torch model with vLLM's names and a `load_weights` of its own; the real
one is held against the same class in tests/nemo/test_with_a_checkout.py and on a GPU.
"""

import dataclasses
import struct

import pytest
import torch
from torch import nn

from fp8_nemo.glue.digest import digest
from fp8_nemo.glue.manifest import KV_SUFFIXES, MANIFEST, SENTINEL, is_sent_again
from fp8_nemo.glue.quantize import FP8, FP8_MAX, Fp8Weight, quantize_blocks
from fp8_nemo.glue.refit import refit_stream
from fp8_nemo.glue.wire import RefitError, is_quantized_weight, kv_scale_names, named_shapes
from fp8_nemo.nemo import engine_memory, receiver
from fp8_nemo.nemo.engine_memory import ParameterCache, Rank
from fp8_nemo.nemo.worker_settings import VARIABLE, WorkerSettings
from fp8_nemo.recipe.options.correction import Correction
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Glue, Precision, Recalibrate

SHAPE = Shape(layers=2, hidden=256, ffn=256, heads=2, kv_heads=1, head_dim=128, vocab=192)
E2E = Precision(name="e2e", rollout_linear="fp8", rollout_kv="fp8", train_linear="bf16")
BF16 = Precision(name="bf16", rollout_linear="bf16", rollout_kv="bf16", train_linear="bf16")
KV = {n: 0.01 * (1 + i) / 3 for layer in range(2) for i, n in enumerate(kv_scale_names(layer))}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
GLUES = [
    Glue(quantize=quantize, transfer=transfer, verify=verify)
    for quantize in ("fused", "stock")
    for transfer in ("fp8", "bf16")
    for verify in ("bytes", "names", "off")
    if (quantize, transfer, verify) != ("stock", "bf16", "off")
]


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(engine_memory, "rank_of", lambda model, experts_of=None: Rank())


def told(glue=None, precision=E2E):
    return WorkerSettings(precision, SHAPE, glue or Glue(), Correction(), loss_corrects=True)


class Attention(nn.Module):
    """vLLM's: parameters that the loader fills, buffers that the kernel reads."""

    def __init__(self):
        super().__init__()
        for name in ("q", "k", "v", "prob"):
            self.register_parameter(
                f"{name}_scale", nn.Parameter(torch.ones((), dtype=torch.bfloat16), False)
            )
            self.register_buffer(f"_{name}_scale", torch.ones(()))
        self._q_scale_float = self._k_scale_float = self._v_scale_float = 1.0

    def take_scales(self):
        for name in ("q", "k", "v"):
            scale = getattr(self, f"{name}_scale")
            getattr(self, f"_{name}_scale").copy_(scale)
            setattr(self, f"_{name}_scale_float", float(scale))


FUSED = {
    "q_proj": ("qkv_proj", 0, 256),
    "k_proj": ("qkv_proj", 256, 384),
    "v_proj": ("qkv_proj", 384, 512),
    "gate_proj": ("gate_up_proj", 0, 256),
    "up_proj": ("gate_up_proj", 256, 512),
}


class Engine(nn.Module):
    """Fused weights by vLLM's names, loaded from the checkpoint's."""

    def __init__(self, precision):
        super().__init__()
        self.precision, self.loaded = precision, []
        for name, size in named_shapes(SHAPE).items():
            self._make(name, size, is_quantized_weight(name, size, precision, 2))
        self.attention = [Attention(), Attention()]
        for layer, attention in enumerate(self.attention):
            self.get_submodule(f"model.layers.{layer}.self_attn").attn = attention

    def _make(self, name, size, fp8):
        target, _, stop = self._place(name)
        rows = max(stop or size[0], len(self.tensors.get(target, ())))
        shape = (rows, *size[1:])
        self.put(target, torch.zeros(shape).to(FP8 if fp8 else torch.bfloat16))
        if fp8:
            self.put(target + "_scale_inv", torch.zeros(rows // 128, size[1] // 128))

    def put(self, name, tensor):
        """Another parameter in its place, or a new one."""
        module, (*path, leaf) = self, name.split(".")
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))

    @property
    def tensors(self):
        return {name: parameter.data for name, parameter in self.named_parameters()}

    def _place(self, name):
        for projection, (module, start, stop) in FUSED.items():
            if f".{projection}." in name:
                return name.replace(projection, module), start, stop
        return name, 0, None

    def load_weights(self, weights):
        for name, tensor in weights:
            self.loaded.append(name)
            if name in KV:
                layer, leaf = int(name.split(".")[2]), name.rpartition(".")[2]
                getattr(self.attention[layer], leaf).data.fill_(tensor.item())
                continue
            target, start, stop = self._place(name)
            scale = name.endswith("_scale_inv")
            if stop and scale:
                start, stop = start // 128, stop // 128
            held = self.tensors[target]  # KeyError as vLLM's loader for a name it does not know
            held[start:stop].copy_(tensor)


class Runner:
    """vLLM's model runner V1, which puts 1.0 into the scales when the cache wakes up."""

    def __init__(self, model):
        self.model = model

    def post_kv_cache_wake_up(self):
        self.init_fp8_kv_scales()

    def init_fp8_kv_scales(self):
        for attention in self.model.attention:
            for name in ("_k_scale", "_v_scale", "k_scale", "v_scale"):
                getattr(attention, name).data.fill_(1.0)


class Worker:
    """NeMo RL's extension in a vLLM worker: receives what it is given, one batch at a time."""

    def __init__(self, precision):
        self.model_runner = Runner(Engine(precision))
        self.wire, self.processes, self.as_stock, self.ended = [], True, [], 0

    def update_weights_via_ipc_zmq(self):
        self.expected = getattr(self, "state_dict_info", None)
        for start in range(0, len(self.wire), 5):
            self._load_weights(self.wire[start : start + 5])
        if self.processes:
            for attention in self.model_runner.model.attention:
                attention.take_scales()
        self.ended += 1
        return True

    update_weights_from_collective = update_weights_via_ipc_zmq

    def prepare_refit_info(self, state_dict_info):
        self.state_dict_info = state_dict_info

    def _load_weights(self, weights):
        """NeMo RL's own: quantizes what its engine holds in FP8, by a rule of its own."""
        found = []
        for name, tensor in weights:
            self.as_stock.append(name)
            if is_quantized_weight(name, tuple(tensor.shape), self.model_runner.model.precision, 2):
                fp8, scale_inv = rounded_as_stock(tensor)
                found += [(name, fp8), (name + "_scale_inv", scale_inv)]
            else:
                found.append((name, tensor))
        self.model_runner.model.load_weights(found)


def rounded_as_stock(weight):
    """Not our rule, for weights of whole blocks: NeMo RL multiplies by a rounded reciprocal."""
    blocks = weight.float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scale = FP8_MAX / blocks.abs().amax((1, 3))
    fp8 = (blocks * scale[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return Fp8Weight(fp8.view(weight.shape), torch.reciprocal(scale))


def weights_of(salt=0):
    generator = torch.Generator().manual_seed(salt)
    return {
        name: (torch.randn(size, generator=generator) * 0.05).bfloat16()
        for name, size in named_shapes(SHAPE).items()
    }


def wire_of(run, named=None, number=1):
    return list(
        refit_stream(
            (named or weights_of()).items(), run.wire_precision,
            KV if run.precision.rollout_kv == "fp8" else None, num_layers=2,
            verify=run.glue.verify, number=number,
        )
    )  # fmt: skip


def worker_of(run):
    return receiver.receiver(Worker, run)(run.precision)


def refit(worker, named=None):
    """The next refit of a worker, by the sender's count."""
    worker.wire = wire_of(worker.fp8_nemo_settings, named, worker.fp8_nemo_refits + 1)
    return worker.update_weights_via_ipc_zmq()


@pytest.mark.parametrize("glue", GLUES, ids=str)
@pytest.mark.parametrize("precision", [E2E, BF16], ids=["fp8", "bf16"])
@pytest.mark.parametrize("path", ["update_weights_via_ipc_zmq", "update_weights_from_collective"])
def test_every_switch_lands_the_same_weights_by_its_own_formula(glue, precision, path):
    run = told(glue, precision)
    worker = worker_of(run)
    for number in (1, 2):  # the second refit is held to the same as the first
        named = weights_of(number)
        worker.wire = wire_of(run, named, number)
        assert getattr(worker, path)() is True
        held = worker.model_runner.model.tensors
        rounded = quantize_blocks if glue.quantize == "fused" else rounded_as_stock
        for name, weight in named.items():
            target, start, stop = worker.model_runner.model._place(name)
            if is_quantized_weight(name, tuple(weight.shape), precision, 2):
                fp8, scale_inv = rounded(weight)
                found = held[target][start:stop].view(torch.uint8)
                assert torch.equal(found, fp8.view(torch.uint8))
                blocks = slice(start // 128, stop and stop // 128)
                assert torch.equal(held[target + "_scale_inv"][blocks], scale_inv)
            else:
                assert torch.equal(held[target][start:stop], weight)
    fp8_weights = 14 if precision is E2E else 0
    report = worker.fp8_nemo_report()
    if glue.verify == "off":
        assert report == {}
    else:
        sent = sum(t.nbytes for n, t in worker.wire if n not in (SENTINEL, MANIFEST))
        assert report["bytes"] == sent and report["verified_weights"] == fp8_weights
        others = (SENTINEL, MANIFEST, *KV_SUFFIXES)
        booked = [digest(x).item() for name, x in worker.wire if not name.endswith(others)]
        wanted = struct.pack(f"{len(booked)}q", *booked) if glue.verify == "bytes" else b""
        assert report["sent_digests"] == wanted
        digested = len(named) + fp8_weights if glue.verify == "bytes" else 0
        if glue.quantize == "stock" and precision is E2E:  # those that NeMo RL makes
            digested -= 2 * fp8_weights if digested else 0
        assert report["equal_digests"] == digested
    assert bool(worker.as_stock) == (precision is E2E and glue.quantize == "stock")
    on_wire = {tensor.dtype for name, tensor in worker.wire if name.endswith("_proj.weight")}
    fp8 = precision is E2E and glue.transfer == "fp8" and glue.quantize == "fused"
    assert on_wire == {FP8 if fp8 else torch.bfloat16}


def test_kv_scales_reach_the_kernels_buffers_and_host_copies_in_fp32():
    run = told()
    worker = worker_of(run)
    worker.wire = wire_of(run)
    worker.update_weights_via_ipc_zmq()
    attention = worker.model_runner.model.attention[1]
    wanted = torch.tensor(KV["model.layers.1.self_attn.k_scale"])
    assert attention._k_scale == wanted and attention._k_scale_float == wanted.item()


@pytest.mark.parametrize("glue", [Glue(), Glue("x", "stock", "bf16", "off")], ids=["all", "ranges"])
def test_kv_scales_survive_the_waking_of_the_cache_refit_after_refit(glue):
    run = told(glue)
    worker = worker_of(run)
    for factor in (1.0, 2.0):
        scales = {name: factor * scale for name, scale in KV.items()}
        stream = refit_stream(
            weights_of().items(), run.wire_precision, scales, num_layers=2,
            number=worker.fp8_nemo_refits + 1,
        )  # fmt: skip
        ours = glue.has_receiver
        worker.wire = [pair for pair in stream if ours or pair[0] not in (SENTINEL, MANIFEST)]
        assert worker.update_weights_via_ipc_zmq()
        worker.model_runner.post_kv_cache_wake_up()
        for layer, attention in enumerate(worker.model_runner.model.attention):
            q, k, v = (scales[name] for name in kv_scale_names(layer))
            held = (attention._q_scale, attention._k_scale, attention._v_scale)
            rough = 0.0 if ours else 2**-8  # NeMo RL's own loader keeps them in BF16
            for scale, sent in zip(held, (q, k, v), strict=True):
                assert scale.item() == pytest.approx(torch.tensor(sent).item(), rel=rough)


@pytest.mark.parametrize(("verify", "is_copied"), [("bytes", True), ("names", False)])
@pytest.mark.parametrize("transfer", ["fp8", "bf16"])
def test_a_second_refit_is_copied_to_where_the_first_was_proven_and_vllm_loads_scales(
    transfer, verify, is_copied
):
    run = told(Glue(transfer=transfer, verify=verify))
    worker = worker_of(run)
    engine = worker.model_runner.model
    worker.wire = wire_of(run)
    worker.update_weights_via_ipc_zmq()
    assert set(engine.loaded) > set(KV)
    engine.loaded.clear()
    worker.wire = wire_of(run, weights_of(7), number=2)
    worker.update_weights_via_ipc_zmq()
    assert (set(engine.loaded) == set(KV)) == is_copied
    other = worker_of(run)
    other.wire = wire_of(run, weights_of(7))
    other.update_weights_via_ipc_zmq()
    wanted = other.model_runner.model.tensors
    for name, tensor in engine.tensors.items():
        assert torch.equal(tensor.float(), wanted[name].float()), name


def test_after_a_tensor_has_moved_vllm_loads_again():
    run = told()
    worker = worker_of(run)
    worker.wire = wire_of(run)
    worker.update_weights_via_ipc_zmq()
    engine = worker.model_runner.model
    engine.put("model.norm.weight", torch.zeros(256, dtype=torch.bfloat16))
    worker.fp8_nemo_engine.destination()  # as a refit's end looks
    engine.loaded.clear()
    worker.wire = wire_of(run, number=2)
    worker.update_weights_via_ipc_zmq()
    assert Q in engine.loaded


def adapted_wire(run, named, number):
    """What a policy worker sends of merged weights: after the first refit, those with adapters."""
    adapted = run.adapted(number)
    return wire_of(run, {n: x for n, x in named.items() if is_sent_again(n, adapted)}, number)


def handshake_of(wire):
    return {name: (tensor.shape, tensor.dtype) for name, tensor in wire}


@pytest.mark.parametrize("precision", [E2E, BF16], ids=["fp8", "bf16"])
def test_with_adapters_a_second_refit_brings_what_they_change_and_proves_the_whole(precision):
    run = dataclasses.replace(told(precision=precision), resent=ATTENTION)
    worker, first, later = worker_of(run), weights_of(), weights_of(7)
    worker.wire = wire_of(run, first)
    worker.prepare_refit_info(whole := handshake_of(worker.wire))
    worker.update_weights_via_ipc_zmq()
    proof = worker.fp8_nemo_report()

    worker.wire = adapted_wire(run, later, 2)
    wanted = handshake_of(worker.wire)
    worker.update_weights_via_ipc_zmq()
    assert worker.expected == wanted and worker.state_dict_info == whole
    assert len(wanted) < len(whole)
    again = worker.fp8_nemo_report()
    for key in ("verified_weights", "equal_digests"):
        assert again[key] == proof[key]
    assert again["bytes"] < proof["bytes"] and again["changed"] > 0

    linears = (".q_proj.weight", ".k_proj.weight", ".v_proj.weight", ".o_proj.weight")
    merged = {n: later[n] if n.endswith(linears) else x for n, x in first.items()}
    other = worker_of(run)
    other.wire = wire_of(run, merged)
    other.update_weights_via_ipc_zmq()
    held = other.model_runner.model.tensors
    for name, tensor in worker.model_runner.model.tensors.items():
        assert torch.equal(tensor.float(), held[name].float()), name


def test_a_frozen_weight_that_changed_in_the_engine_stops_the_next_refit_by_its_name():
    run = dataclasses.replace(told(), resent=ATTENTION)
    worker = worker_of(run)
    worker.prepare_refit_info(handshake_of(wire_of(run)))
    worker.wire = wire_of(run)
    worker.update_weights_via_ipc_zmq()
    frozen = worker.model_runner.model.tensors["model.layers.1.mlp.down_proj.weight"]
    frozen.view(torch.uint8)[3, 5] ^= 1
    worker.wire = adapted_wire(run, weights_of(7), 2)
    with pytest.raises(RefitError) as error:
        worker.update_weights_via_ipc_zmq()
    name = "model.layers.1.mlp.down_proj.weight"
    text = "the engine's bytes are not those of the refit before (digest)"
    assert error.value.problems == [f"{name}: {text}"]


def test_adapted_weights_alone_are_refused_where_nothing_was_proven_before():
    run = dataclasses.replace(told(), resent=ATTENTION)
    worker = worker_of(run)
    worker.prepare_refit_info(handshake_of(wire_of(run)))
    worker.fp8_nemo_refits = 1
    worker.wire = adapted_wire(run, weights_of(7), 2)
    with pytest.raises(RefitError, match="none before it was proven"):
        worker.update_weights_via_ipc_zmq()
    assert not worker.model_runner.model.loaded and MANIFEST in worker.state_dict_info


@pytest.mark.parametrize("fails", [True, False])
def test_after_a_refit_that_failed_or_a_new_handshake_vllm_loads_again(fails):
    run = told()
    worker = worker_of(run)
    worker.wire = wire_of(run)
    worker.update_weights_via_ipc_zmq()
    engine = worker.model_runner.model
    if fails:
        worker.wire = wire_of(run)[:-1]
        with pytest.raises(RefitError, match="the stream was cut short"):
            worker.update_weights_via_ipc_zmq()
    else:
        worker.prepare_refit_info({})
    engine.loaded.clear()
    worker.wire = wire_of(run, number=3 if fails else 1)
    worker.update_weights_via_ipc_zmq()
    assert Q in engine.loaded


def test_scales_that_are_lost_are_named_even_if_they_have_not_changed():
    run = told()
    worker = worker_of(run)
    refit(worker)
    engine = worker.model_runner.model
    load = engine.load_weights
    engine.load_weights = lambda weights: load([p for p in weights if p[0] not in KV])
    with pytest.raises(RefitError, match=r"q_scale: the engine holds -1\.0, sent"):
        refit(worker)


def test_a_failure_is_kept_for_the_driver_to_ask_and_gone_after_the_next_refit():
    run = told()
    worker = worker_of(run)
    wire = wire_of(run)
    worker.wire = without(Q)(wire)
    with pytest.raises(RefitError):
        worker.update_weights_via_ipc_zmq()
    assert worker.fp8_nemo_problems[0] == f"{Q}: never arrived"
    refit(worker)
    assert list(worker.fp8_nemo_problems) == []


def test_the_engine_is_looked_up_again_only_where_a_parameter_has_moved():
    run = told()
    worker = worker_of(run)
    refit(worker)
    engine = worker.fp8_nemo_engine
    first = engine.destination()
    refit(worker)
    assert engine.destination() is first
    model = worker.model_runner.model
    norm = model.get_submodule("model.norm")

    def other_memory():
        norm.weight.data = norm.weight.data.clone()

    def another_parameter():
        model.put(NORM, norm.weight.data.clone())

    def another_module():
        model.model.norm = nn.Module()
        model.put(NORM, norm.weight.data.clone())

    for move in (other_memory, another_parameter, another_module):
        move()
        address = model.tensors[NORM].data_ptr()
        assert engine.destination().parts[NORM].tensor.data_ptr() == address, move
        refit(worker)
        assert worker.fp8_nemo_proof.verified_weights == 14
        move()  # and nobody has looked before the next refit, which sees another module by itself
        if move is not another_module:
            with pytest.raises(RefitError, match=f"{NORM}: its storage moved"):
                refit(worker)
        refit(worker)  # as it lies now
        assert worker.fp8_nemo_proof.verified_weights == 14


def test_a_models_parameters_are_found_by_the_names_that_it_gives_them():
    model = Engine(E2E)
    model.lm_head = model.model.embed_tokens  # tied: named once
    model.plain, model.none = nn.Parameter(torch.ones(2)), None
    model.model.register_parameter("bias", None)
    cache = ParameterCache(model)

    def walked():
        return {name: p.data_ptr() for name, p in model.named_parameters()}

    def found():
        return {name: x.data_ptr() for name, x in cache.parameters().items()}

    assert cache.are_all() and found() == walked()
    model.model.bias = nn.Parameter(torch.ones(3))
    model.put(NORM, torch.ones(256))
    assert cache.are_all() and found() == walked()
    model.put("model.layers.0.self_attn.qkv_proj.bias", torch.ones(512))
    assert not cache.are_all()
    cache = ParameterCache(model)
    del model.get_submodule("model.norm").weight
    model.put("model.norm.scale", torch.ones(256))
    assert not cache.are_all(), "as many, by another name"


@pytest.mark.parametrize(
    ("module", "where"),
    [(receiver, "Ledger"), (engine_memory, "attentions"), (engine_memory, "ParameterCache")],
)
def test_whatever_fails_before_the_stream_is_raised_after_it(module, where, monkeypatch):
    run = told()
    worker = worker_of(run)
    worker.wire = wire_of(run)
    monkeypatch.setattr(module, where, lambda *_, **__: 1 / 0)
    with pytest.raises(RefitError, match="division by zero"):
        worker.update_weights_via_ipc_zmq()
    assert worker.ended == 1 and "division by zero" in worker.fp8_nemo_problems[0]


def without(name):
    return lambda wire: [pair for pair in wire if pair[0] != name]


def changed(name, change):
    return lambda wire: [(n, change(t) if n == name else t) for n, t in wire]


Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.norm.weight"
K_SCALE = "model.layers.0.self_attn.k_scale"


@pytest.mark.parametrize(
    ("verify", "fault", "message"),
    [
        ("bytes", without(Q), rf"{Q}: never arrived"),
        ("names", without(Q + "_scale_inv"), "q_proj.weight_scale_inv: never arrived"),
        ("names", without(K_SCALE), rf"{K_SCALE}: never arrived"),
        ("names", without(SENTINEL), "sentinel: never arrived"),
        ("names", without(MANIFEST), "manifest: never arrived whole"),
        ("names", changed(MANIFEST, torch.zeros_like), "manifest: never arrived whole"),
        ("names", changed(Q, lambda t: t.view(torch.uint8)), "wrong dtype uint8"),
        ("names", changed(Q, lambda t: t[:128]), r"wrong shape \[128, 256\]"),
        ("bytes", changed(Q + "_scale_inv", lambda t: 2 * t), "bytes are not the sender's"),
        ("bytes", changed(Q, lambda t: t.flip(0)), f"{Q}: the engine's bytes are not"),
    ],
)  # fmt: skip
def test_a_fault_on_the_wire_stops_the_refit_by_name_after_the_stream_has_ended(
    verify, fault, message
):
    run = told(Glue(verify=verify))
    worker = worker_of(run)
    worker.wire = fault(wire_of(run))
    with pytest.raises(RefitError, match=message):
        worker.update_weights_via_ipc_zmq()
    assert worker.ended == 1, "the sender is answered to the end"


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.q_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("quantize", ["fused", "stock"])
def test_a_bit_that_changes_on_the_way_is_named_also_where_the_engine_quantizes(quantize, name):
    def flipped(tensor):
        changed = tensor.clone()
        changed.view(torch.uint8).view(-1)[7] ^= 1
        return changed

    worker = worker_of(run := told(Glue(transfer="bf16", quantize=quantize)))
    worker.wire = changed(name, flipped)(wire_of(run))
    with pytest.raises(RefitError) as error:
        worker.update_weights_via_ipc_zmq()
    [problem] = error.value.problems
    assert problem.startswith(f"{name}: ")


def test_a_loader_that_skips_a_weight_or_breaks_is_named_after_the_stream_has_ended():
    run = told()
    worker = worker_of(run)
    worker.wire = wire_of(run)
    engine = worker.model_runner.model
    load = engine.load_weights
    engine.load_weights = lambda weights: load([p for p in weights if p[0] != Q])
    with pytest.raises(RefitError, match=rf"{Q}: the engine's bytes are not the sender's"):
        worker.update_weights_via_ipc_zmq()

    def breaks(weights):
        raise RuntimeError("no room")

    engine.load_weights = breaks
    with pytest.raises(RefitError, match="vLLM could not load the weights: RuntimeError no room"):
        worker.update_weights_via_ipc_zmq()
    assert worker.ended == 2


def test_a_loader_that_asserts_without_a_message_is_named_by_its_line_and_its_tensors(capsys):
    worker = worker_of(run := told())
    worker.wire = wire_of(run)

    def asserts(weights):
        raise AssertionError

    worker.model_runner.model.load_weights = asserts
    with pytest.raises(RefitError) as error:
        worker.update_weights_via_ipc_zmq()
    first, *_ = error.value.problems
    assert f": AssertionError at {__file__}:" in first and "`raise AssertionError`" in first
    assert first.endswith(f"{SENTINEL} to model.layers.0.self_attn.k_proj.weight")
    assert isinstance(error.value.__cause__, AssertionError)
    assert "in asserts" in capsys.readouterr().err, "Ray may hand on no traceback"


def test_scales_that_the_kernels_do_not_read_are_named():
    run = told()
    worker = worker_of(run)
    worker.processes = False
    with pytest.raises(RefitError, match=r"q_scale: the engine holds 1\.0, sent 0\.003"):
        refit(worker)
    worker.processes = True
    refit(worker)
    attention = worker.model_runner.model.attention[0]
    attention.take_scales = lambda: (
        attention._q_scale.copy_(attention.q_scale),
        attention._k_scale.copy_(attention.k_scale),
        attention._v_scale.copy_(attention.v_scale),
        setattr(attention, "_k_scale_float", 1.0),
    )
    with pytest.raises(RefitError, match=r"layers\.0.*k_scale: the engine's host copy is 1\.0"):
        refit(worker)


@pytest.mark.parametrize("glue", [Glue(), Glue(transfer="bf16")], ids=["fp8", "bf16"])
def test_an_engine_that_holds_other_weights_in_fp8_is_refused_and_nothing_is_loaded(glue):
    run = told(glue)
    worker = worker_of(run)
    worker.wire = wire_of(run)
    engine = worker.model_runner.model
    name = "model.layers.0.input_layernorm.weight"
    engine.put(name, engine.tensors[name].to(FP8))
    with pytest.raises(RefitError, match=rf"{name}: the engine holds float8_e4m3fn"):
        worker.update_weights_via_ipc_zmq()
    assert engine.loaded == [] and worker.ended == 1


@pytest.mark.parametrize("precision", [E2E, BF16], ids=["fp8", "bf16"])
def test_the_engines_layout_is_told_before_any_refit_and_no_memory_is_read(precision):
    worker = worker_of(told(precision=precision))
    assert worker.fp8_nemo_layout_problems() == []
    engine = worker.model_runner.model
    engine.to("meta")  # as good as asleep
    for attention in engine.attention:
        attention.to("meta")
    assert worker.fp8_nemo_layout_problems() == []
    engine.put(NORM, torch.zeros(128, dtype=torch.bfloat16))
    fused = "model.layers.0.mlp.gate_up_proj.weight"
    engine.put(fused, torch.zeros(512, 256))
    problems = worker.fp8_nemo_layout_problems()
    held = "float8_e4m3fn" if precision is E2E else "bfloat16"
    assert problems == [
        f"model.layers.0.mlp.{x}_proj.weight: the engine holds float32 [256, 256], a refit sends "
        f"{held} [256, 256]"
        for x in ("gate", "up")
    ] + [f"{NORM}: the engine holds bfloat16 [128], a refit sends bfloat16 [256]"]


def test_another_name_of_vllms_is_told_as_a_layout_and_verify_off_looks_at_none():
    worker, blind = worker_of(told()), worker_of(told(Glue(verify="off")))
    for each in (worker, blind):
        layer = each.model_runner.model.get_submodule("model.layers.1.self_attn")
        layer.attention = layer.attn
        del layer.attn
    [problem] = worker.fp8_nemo_layout_problems()
    assert problem.startswith("AttributeError") and "attn" in problem
    assert blind.fp8_nemo_layout_problems() == []


def test_which_experts_are_here_is_not_asked_of_an_engine_asleep():
    module = nn.Module()
    module.w13_weight = nn.Parameter(torch.zeros(2, 4, 4))
    module.expert_map = torch.tensor([-1, -1, 0, 1])
    assert engine_memory._mapped(module, module.expert_map) == {2: 0, 3: 1}
    assert engine_memory._as_many(module, module.expert_map.to("meta")) == {0: 0, 1: 1}


def test_a_whole_refit_of_before_is_refused_and_a_handshake_begins_the_count_anew():
    worker = worker_of(told())
    refit(worker, weights_of(1))
    before = list(worker.wire)
    refit(worker, weights_of(2))
    worker.wire = before
    with pytest.raises(RefitError, match=f"{MANIFEST}: is of refit 1, this engine expects refit 3"):
        worker.update_weights_via_ipc_zmq()
    worker.prepare_refit_info({"a": 1})
    assert worker.state_dict_info == {"a": 1} and worker.update_weights_via_ipc_zmq() is True


def test_nemo_rl_3651s_argument_is_handed_on():
    class Later(Worker):
        def update_weights_from_collective(self, refit_with_reload_api=False):
            self.reloads = refit_with_reload_api
            return super().update_weights_via_ipc_zmq()

    run = told()
    worker = receiver.receiver(Later, run)(run.precision)
    worker.wire = wire_of(run)
    assert worker.update_weights_from_collective(refit_with_reload_api=False) is True
    assert worker.reloads is False and worker.fp8_nemo_proof.verified_weights == 14


def test_an_error_of_nemo_rls_own_is_told_with_what_was_lost():
    class Failing(Worker):
        def update_weights_via_ipc_zmq(self):
            super().update_weights_via_ipc_zmq()
            assert self.model_runner.model.attention[0].k_scale > 0  # as fp8.py:1332 does

    run = told()
    worker = receiver.receiver(Failing, run)(run.precision)
    worker.wire = without(K_SCALE)(wire_of(run))
    with pytest.raises(RefitError, match=rf"(?s)AssertionError.*{K_SCALE}: never arrived"):
        worker.update_weights_via_ipc_zmq()


def test_nemo_rls_own_failure_is_not_taken_for_a_landing():
    class Failing(Worker):
        def update_weights_via_ipc_zmq(self):
            return False  # as v0.7.0 does after it has printed why

    with pytest.raises(RefitError, match="its message is in the log"):
        receiver.receiver(Failing, told())(E2E).update_weights_via_ipc_zmq()


def test_with_recalibration_alone_ours_nemo_rl_receives_as_it_does():
    run = told(Glue("x", "stock", "bf16", "off"))
    worker = worker_of(run)
    worker.wire = list(weights_of().items())
    assert worker.update_weights_via_ipc_zmq() is True and worker.as_stock
    assert worker.fp8_nemo_report() == {} and not worker._weight_update_errors_are_fatal()
    assert worker_of(told())._weight_update_errors_are_fatal()


def test_settings_travel_by_one_variable_and_stock_sets_none(monkeypatch):
    for run in (told(Glue(verify="names")), told(precision=BF16)):
        run = dataclasses.replace(run, loss_corrects=False)
        for name, value in run.to_environment().items():
            monkeypatch.setenv(name, value)
        assert WorkerSettings.from_environment() == run
    monkeypatch.setenv(VARIABLE, '{"precision": {"rollout": "fp8"}}')
    with pytest.raises(TypeError, match=r"precision\.rollout: no such key"):
        WorkerSettings.from_environment()
    monkeypatch.delenv(VARIABLE)
    assert WorkerSettings.from_environment() is None
    stock = Glue("stock", "stock", "bf16", "off", Recalibrate(source="forward"), "fa3")
    assert told(stock).to_environment() == told(stock, BF16).to_environment() == {}
    watching = dataclasses.replace(stock, recalibrate=Recalibrate())
    assert told(watching).to_environment() and told(watching).observes
    assert not told(watching, BF16).observes
    aligned = told(stock, dataclasses.replace(BF16, align="cheap"))
    assert aligned.needs_plugin and aligned.to_environment()
    assert told(precision=aligned.precision).wire_precision.is_aligned
