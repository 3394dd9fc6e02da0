"""Four bits land repacked in an engine whose tensors stay where they are; what is broken is named.

The engine here is a small torch model with vLLM's names. Its method repacks by a rule of its own
into the shapes of vLLM's; tests/nemo/test_marlin_with_a_checkout.py has vLLM's own.
"""

import dataclasses

import pytest
import torch
from torch import nn

from fp8_nemo.glue.manifest import MANIFEST, SENTINEL
from fp8_nemo.glue.refit import refit_stream
from fp8_nemo.glue.wire import RefitError, named_shapes, wire_specs
from fp8_nemo.nemo import engine_memory, receiver
from fp8_nemo.nemo.engine_memory import Rank
from fp8_nemo.nemo.marlin.layout import arriving, modules, quantization, staged
from fp8_nemo.nemo.worker_settings import WorkerSettings
from fp8_nemo.recipe.options.correction import Correction
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Glue, Precision

SHAPE = Shape(layers=3, hidden=256, ffn=256, heads=2, kv_heads=1, head_dim=128, vocab=192)
BIASED = dataclasses.replace(SHAPE, qkv_bias=True)
FOUR = Precision(name="four", rollout_linear="nvfp4")
Q = "model.layers.0.self_attn.q_proj.weight"
QKV = "model.layers.0.self_attn.qkv_proj"


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(engine_memory, "rank_of", lambda model, experts_of=None: Rank())


class Method:
    """Repacks once, into the types and shapes of Marlin's, and takes a new workspace each time."""

    def process_weights_after_loading(self, layer):
        scale = layer.weight_scale_2.max()
        del layer.weight_scale_2
        K, N = layer.input_size_per_partition, layer.output_size_per_partition
        turned = layer.weight.view(torch.int32).T.reshape(K // 16, 2 * N).contiguous()
        layer.weight = nn.Parameter(turned, requires_grad=False)
        layer.weight_scale = nn.Parameter(layer.weight_scale.T.contiguous(), requires_grad=False)
        layer.weight_global_scale = nn.Parameter(scale * 2.0**119, requires_grad=False)
        if hasattr(layer, "bias"):
            layer.bias = nn.Parameter(layer.bias.flip(0), requires_grad=False)
        layer.workspace = torch.zeros(8)


class Engine(nn.Module):
    """Dummy weights, repacked as an engine starts; what is not in four bits loads by its name."""

    def __init__(self, shape, weights=None):
        super().__init__()
        self.loaded, self.plain = [], {}
        for module in modules(shape, FOUR):
            layer = self.at(module.path)
            N, K = module.shape
            layer.output_size_per_partition, layer.input_size_per_partition = N, K
            layer.logical_widths, layer.params_dtype = module.rows, torch.bfloat16
            for name, spec in staged(module, "bfloat16").items():
                held = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
                layer.register_parameter(name, nn.Parameter(held, requires_grad=False))
            for name, (parameter, rows) in arriving(module).items():
                if weights:
                    layer.get_parameter(parameter).data[rows] = weights[name]
            layer.quant_method = Method()
            layer.quant_method.process_weights_after_loading(layer)
        packed = {name for module in modules(shape, FOUR) for name in arriving(module)}
        for name, spec in wire_specs(named_shapes(shape), FOUR, shape.layers).items():
            if name not in packed:
                path, _, leaf = name.rpartition(".")
                held = nn.Parameter(torch.zeros(spec.shape).bfloat16(), requires_grad=False)
                self.at(path).register_parameter(leaf, held)

    def at(self, path):
        module = self
        for part in path.split("."):
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        return module

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


class Worker:
    """NeMo RL's extension: batches through one buffer, and at the end every weight is finished."""

    def update_weights_via_ipc_zmq(self):
        for start in range(0, len(self.wire), 5):
            batch = [(name, tensor.clone()) for name, tensor in self.wire[start : start + 5]]
            self._load_weights(batch)
            for _, tensor in batch:
                tensor.view(torch.uint8).fill_(0xFF)
        for module in self.model.modules():
            if hasattr(module, "quant_method"):
                module.quant_method.process_weights_after_loading(module)
        return True

    def prepare_refit_info(self):
        pass

    def _load_weights(self, weights):
        raise AssertionError("four bits are loaded by the receiver")


def worker_of(verify="bytes", shape=SHAPE):
    settings = WorkerSettings(FOUR, shape, Glue(verify=verify), Correction(), loss_corrects=True)
    worker = receiver.receiver(Worker, settings)()
    worker.model = Engine(shape)
    worker.model_runner = type("Runner", (), {"model": worker.model})()
    return worker


def sent(number=1, verify="bytes", shape=SHAPE):
    draw = torch.Generator().manual_seed(number)
    named = {
        name: (torch.randn(size, generator=draw) * 0.05).bfloat16()
        for name, size in named_shapes(shape).items()
    }
    return list(refit_stream(named.items(), FOUR, None, num_layers=shape.layers, verify=verify,
                             number=number))  # fmt: skip


def held(model):
    return {n: p.data.view(torch.uint8).clone() if p.ndim else p.data.clone()
            for n, p in model.named_parameters()}  # fmt: skip


def memory(model):
    spaces = {n: m.workspace for n, m in model.named_modules() if hasattr(m, "workspace")}
    tensors = {n: p.data for n, p in model.named_parameters()} | spaces
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def loaded_at_once(wire, shape):
    """What an engine holds that repacked these bytes as it started."""
    model = Engine(shape, dict(wire))
    packed = {name for module in modules(shape, FOUR) for name in arriving(module)}
    ends = (SENTINEL, MANIFEST)
    model.load_weights([(n, x) for n, x in wire if n not in packed and n not in ends])
    return held(model)


@pytest.mark.parametrize("shape", [SHAPE, BIASED], ids=["llama", "qwen2"])
@pytest.mark.parametrize("verify", ["bytes", "names", "off"])
def test_each_refit_leaves_what_loading_at_once_would_and_moves_nothing(verify, shape):
    worker = worker_of(verify, shape)
    begun = memory(worker.model)
    for number in (1, 2, 3):
        worker.wire = sent(number, verify, shape)
        assert worker.update_weights_via_ipc_zmq()
        found, wanted = held(worker.model), loaded_at_once(worker.wire, shape)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in found)
        assert memory(worker.model) == begun
        proof = worker.fp8_nemo_report()
        assert verify == "off" or proof["verified_weights"] == 7 * shape.layers
        if verify == "bytes":
            assert proof["equal_digests"] == len(found)
            assert number == 1 or proof["changed"] > 0.9 * proof["sampled"] > 0
    assert worker.fp8_nemo_layout_problems() == []


def test_parts_of_many_modules_may_be_under_way_at_once():
    worker = worker_of("off")
    worker.wire = sent(1, "off")[::-1]
    worker.update_weights_via_ipc_zmq()
    worker.wire = [*worker.wire[::2], *worker.wire[1::2]]
    worker.update_weights_via_ipc_zmq()
    found, wanted = held(worker.model), loaded_at_once(worker.wire, SHAPE)
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_one_layer_of_memory_serves_all_and_is_given_back(monkeypatch):
    worker = worker_of()
    worker.wire = sent()
    made, stock = [], receiver.Staging._made

    def counted(self, module, device):
        made.append(module.path)
        return stock(self, module, device)

    monkeypatch.setattr(receiver.Staging, "_made", counted)
    worker.update_weights_via_ipc_zmq()
    kinds = {(each.rows, each.columns) for each in modules(SHAPE, FOUR)}
    assert len(made) == len(kinds) < len(modules(SHAPE, FOUR))
    staging = worker.fp8_nemo_refit.staging
    assert not staging.free and not staging.under_way


def changed(wire, name, change):
    return [(n, change(x.clone()) if n == name else x) for n, x in wire]


def flip(tensor):
    tensor.view(torch.uint8).view(-1)[7] ^= 1
    return tensor


@pytest.mark.parametrize("name", [Q, f"{Q}_scale", f"{Q}_scale_2"])
@pytest.mark.parametrize("verify", ["bytes", "names"])
def test_a_part_of_a_weight_that_never_arrives_is_named(name, verify):
    worker = worker_of(verify)
    worker.wire = [pair for pair in sent(1, verify) if pair[0] != name]
    with pytest.raises(RefitError, match="never arrived") as caught:
        worker.update_weights_via_ipc_zmq()
    assert caught.value.problems == [f"{name}: never arrived"]


@pytest.mark.parametrize("name", [Q, f"{Q}_scale"])
def test_staged_bytes_that_are_not_the_senders_are_named(name):
    worker = worker_of()
    worker.wire = changed(sent(), name, flip)
    with pytest.raises(RefitError) as caught:
        worker.update_weights_via_ipc_zmq()
    assert caught.value.problems == [f"{name}: arrived with other bytes than were sent (digest)"]


@pytest.mark.parametrize("verify", ["bytes", "names", "off"])
def test_fused_weights_with_different_scales_of_the_whole_are_refused(verify):
    worker = worker_of(verify)
    worker.wire = changed(sent(1, verify), f"{Q}_scale_2", lambda x: x * 2)
    with pytest.raises(RefitError, match=f"{QKV}: its weights came with different weight_scale_2"):
        worker.update_weights_via_ipc_zmq()


def test_memory_that_no_longer_is_what_was_repacked_is_named():
    worker = worker_of()
    worker.wire = sent()
    load = worker._load_weights

    def load_and_spoil(batch):
        load(batch)
        if batch[-1][0] == MANIFEST:
            worker.model.get_parameter(f"{QKV}.weight").data.view(torch.uint8).view(-1)[3] ^= 1

    worker._load_weights = load_and_spoil
    with pytest.raises(RefitError) as caught:
        worker.update_weights_via_ipc_zmq()
    assert caught.value.problems == [
        f"{QKV}.weight: the engine's bytes are not the sender's (digest)"
    ]


def test_a_module_that_holds_another_form_is_refused_before_the_first_refit():
    worker = worker_of()
    layer = worker.model.get_submodule(QKV)
    layer.weight = nn.Parameter(torch.zeros(512, 128, dtype=torch.uint8), requires_grad=False)
    [problem] = worker.fp8_nemo_layout_problems()
    assert problem.startswith(f"{QKV}.weight: the engine holds uint8 [512, 128], a refit sends")


def test_layers_that_stay_in_bf16_are_neither_staged_nor_quantized():
    few = dataclasses.replace(FOUR, first_layers_bf16=1, last_layers_bf16=1)
    paths = {module.path for module in modules(SHAPE, few)}
    assert {path.split(".")[2] for path in paths} == {"1"} and len(paths) == 4
    asked = quantization(few, 3)["hf_overrides"]["quantization_config"]
    assert asked["ignore"] == ["lm_head", "model.layers.0.*", "model.layers.2.*"]
    assert not modules(SHAPE, Precision(rollout_linear="fp8"))
