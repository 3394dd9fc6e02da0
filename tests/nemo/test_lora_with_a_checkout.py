"""LoRA inside NeMo RL: what Megatron-Bridge exports with adapters is the merged weights, whole.

Set NEMO_RL_ROOT to a checkout, in an environment that holds NeMo RL's packages (docs/install.md).
Megatron builds the models on a CPU with its own layers instead of TransformerEngine's, and experts
one by one; an adapter that all experts of a GPU share needs a GPU to be built.
"""

# pyright: reportMissingImports=false
import importlib.util
import os
from dataclasses import replace

import pytest
import torch
import transformers

from fp8_nemo.glue.destination import Destination
from fp8_nemo.glue.ledger import Ledger
from fp8_nemo.glue.manifest import is_sent_again, sent_again
from fp8_nemo.glue.quantize import quantize_blocks
from fp8_nemo.glue.refit import refit_stream
from fp8_nemo.glue.wire import RefitError, named_shapes, wire_specs
from fp8_nemo.nemo.worker_settings import WorkerSettings
from fp8_nemo.nemo_config.keys import PEFT
from fp8_nemo.plan.model import adapters
from fp8_nemo.plan.plan import plan_recipe
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.options.training import LORA_MODULES, Lora

pytestmark = pytest.mark.skipif(
    not os.environ.get("NEMO_RL_ROOT") or importlib.util.find_spec("megatron") is None,
    reason="NEMO_RL_ROOT: no checkout of NeMo RL, or not its packages",
)
FP8 = Precision(rollout_linear="fp8")
SIZES = {"layers": 2, "hidden": 256, "ffn": 512, "heads": 4, "kv_heads": 2, "head_dim": 64}
SHAPES = {
    "Llama": Shape(**SIZES, vocab=128),
    "Qwen2": Shape(**SIZES, vocab=128, qkv_bias=True),
    "Qwen3": Shape(**SIZES, vocab=128, qk_norm=True),
    "Qwen3Moe": Shape(
        **SIZES, vocab=128, qk_norm=True, experts=4, experts_per_token=2, expert_ffn=128
    ),
}
RANK, ALPHA = 8, 32


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    """Megatron's groups, of one process."""
    from megatron.core import parallel_state

    store = tmp_path_factory.mktemp("store") / "file"
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def megatron_model(family, folder):
    """A small model of the family in Megatron, and the bridge that loaded it."""
    from megatron.bridge import AutoBridge
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    shape = SHAPES[family]
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    config = getattr(transformers, f"{family}Config")(
        num_hidden_layers=2, hidden_size=256, intermediate_size=512, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, vocab_size=128, tie_word_embeddings=False,
        **(moe if shape.experts else {}),
    )  # fmt: skip
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForCausalLM")(config).bfloat16().save_pretrained(folder)
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    provider = bridge.to_megatron_provider(load_weights=False)
    on_a_cpu = {
        "transformer_layer_spec": get_gpt_layer_local_spec(
            num_experts=shape.experts or None, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
        ),
        "use_cpu_initialization": True, "perform_initialization": True,
        "gradient_accumulation_fusion": False, "bias_activation_fusion": False,
        "bias_dropout_fusion": False, "masked_softmax_fusion": False, "apply_rope_fusion": False,
        "persist_layer_norm": False, "moe_permute_fusion": False, "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "allgather", "params_dtype": torch.bfloat16, "bf16": True,
    }  # fmt: skip
    for key, value in on_a_cpu.items():
        setattr(provider, key, value)
    provider.finalize()
    model = [provider.provide(pre_process=True, post_process=True)]
    bridge.load_hf_weights(model)
    return bridge, model


def adapted(model, **other):
    """The model with the adapters of a plan, made as NeMo RL's setup makes them."""
    from megatron.bridge.peft.lora import LoRA

    words = ["model=small-llama", "backend=nemo", "precision=fp8-linear", "lora=all-linear"]
    [recipe] = compose([*words, f"lora.rank={RANK}", f"lora.alpha={ALPHA}"])
    keys = plan_recipe(recipe).nemo.overrides
    given = {key.removeprefix(f"{PEFT}."): keys[key] for key in keys if key.startswith(PEFT)}
    assert given.pop("enabled")
    return LoRA(**given | other)(model, training=True)


def exported(bridge, model):
    """What a refit sends, as `_iter_params_with_optional_kv_scales` asks for it."""
    tasks = [task for task in bridge.get_conversion_tasks(model) if task is not None]
    stream = bridge.export_hf_weights(model, show_progress=False, conversion_tasks=tasks)
    return {name: weight.detach().clone().bfloat16() for name, weight in stream}


def merge_by_hand(model):
    """Add each adapter to its weight in FP32, and round once."""
    for module in model[0].modules():
        if hasattr(module, "to_wrap"):
            delta = (
                module.adapter.linear_out.weight.float() @ module.adapter.linear_in.weight.float()
            )
            weight = module.to_wrap.weight
            weight.data = (weight.float() + ALPHA / RANK * delta).bfloat16()
            torch.nn.init.zeros_(module.adapter.linear_out.weight)


@pytest.mark.parametrize("family", SHAPES)
def test_a_refit_sends_the_merged_weights_by_the_names_and_shapes_of_a_full_run(family, tmp_path):
    bridge, model = megatron_model(family, tmp_path)
    base = exported(bridge, model)
    model = adapted(model)
    first = exported(bridge, model)
    assert {name: tuple(each.shape) for name, each in first.items()} == named_shapes(SHAPES[family])
    assert all(torch.equal(first[name], base[name]) for name in base)  # B is 0

    for name, weight in model[0].named_parameters():
        if ".adapter." in name:
            torch.nn.init.normal_(weight.data, std=0.05)
    sent = exported(bridge, model)
    linears = tuple(f".{each}.weight" for names in LORA_MODULES.values() for each in names)
    for name in base:
        assert torch.equal(sent[name], base[name]) != name.endswith(linears), name
    merge_by_hand(model)
    for name, weight in exported(bridge, model).items():
        torch.testing.assert_close(sent[name], weight, rtol=2**-8, atol=1e-6)


def test_our_stream_and_proof_take_them(tmp_path):
    bridge, model = megatron_model("Llama", tmp_path)
    model = adapted(model)
    for name, weight in model[0].named_parameters():
        if ".adapter.linear_out" in name:
            torch.nn.init.normal_(weight.data, std=0.05)
    sent = exported(bridge, model)
    specs = wire_specs(named_shapes(SHAPES["Llama"]), FP8, num_layers=2)
    engine = {name: torch.zeros(s.shape).to(getattr(torch, s.dtype)) for name, s in specs.items()}
    ledger = Ledger(specs, Destination(engine, specs))
    for name, tensor in refit_stream(sent.items(), FP8, None, num_layers=2):
        if ledger.receive(name, tensor):
            engine[name].copy_(tensor)
    assert ledger.close().verified_weights == 14
    name = "model.layers.1.mlp.up_proj.weight"
    merged = quantize_blocks(sent[name])
    assert torch.equal(engine[name].view(torch.uint8), merged.fp8_OI.view(torch.uint8))


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("lora", ["attention", "all-linear"])
def test_our_worker_sends_everything_once_and_then_what_adapters_change(
    family, lora, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(os.environ["NEMO_RL_ROOT"])
    from fp8_nemo.nemo.policy_worker import Fp8PolicyWorkerImpl

    words = ["model=small-llama", "backend=nemo", "precision=fp8-linear", f"lora={lora}"]
    [recipe] = compose([*words, f"lora.rank={RANK}", f"lora.alpha={ALPHA}"])
    recipe = replace(recipe, model=replace(recipe.model, shape=SHAPES[family]))
    settings = WorkerSettings.of(recipe, loss_corrects=True)
    for name, value in settings.to_environment().items():
        monkeypatch.setenv(name, value)
    bridge, model = megatron_model(family, tmp_path)
    model = adapted(model, target_modules=recipe.lora.target_modules)
    worker = Fp8PolicyWorkerImpl.__new__(Fp8PolicyWorkerImpl)
    worker.megatron_bridge, worker.model, worker.draft_model = bridge, model[0], None
    worker.refit_conversion_tasks = [t for t in bridge.get_conversion_tasks(model) if t is not None]
    worker.cfg = {"generation": None}

    specs = wire_specs(named_shapes(SHAPES[family]), FP8, num_layers=2)
    engine = {name: torch.zeros(s.shape).to(getattr(torch, s.dtype)) for name, s in specs.items()}

    def refit(number, expected, kept=None):
        ledger = Ledger(expected, Destination(engine, specs), number=number, kept=kept)
        sent = {}
        for name, tensor in worker._iter_params_with_optional_kv_scales():
            sent[name] = (tensor.shape, tensor.dtype)
            if ledger.receive(name, tensor):
                engine[name].copy_(tensor)
        return ledger, ledger.close(), sent

    stream = worker._iter_params_with_optional_kv_scales()
    worker.fp8_nemo_wire = {name: (tensor.shape, tensor.dtype) for name, tensor in stream}
    first, proof, sent = refit(1, specs)
    assert sent == worker.fp8_nemo_wire

    for name, weight in model[0].named_parameters():
        if ".adapter.linear_out" in name:
            torch.nn.init.normal_(weight.data, std=0.05)
    projections = settings.adapted(2)
    some = {name: x for name, x in specs.items() if is_sent_again(name, projections)}
    kept = {name: x for name, x in first.digests.items() if name not in some}
    _, again, sent = refit(2, some, kept)
    assert sent == sent_again(worker.fp8_nemo_wire, projections)
    assert again.equal_digests == proof.equal_digests and again.bytes < proof.bytes
    assert again.changed > 0
    for name, tensor in refit_stream(exported(bridge, model).items(), FP8, None, num_layers=2):
        if name in specs:
            assert torch.equal(engine[name].view(torch.uint8), tensor.view(torch.uint8)), name

    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda shape, device: ones(shape))
    worker.refit_conversion_tasks = []  # of a Bridge with other names
    lost = list(worker._iter_params_with_optional_kv_scales())
    assert {n: (x.shape, x.dtype) for n, x in lost} == sent_again(worker.fp8_nemo_wire, projections)
    with pytest.raises(RefitError, match="names no weight with an adapter"):
        worker.fp8_nemo_raise_refused()


def test_adapters_alone_are_trained_and_as_many_as_the_plan_counts(tmp_path):
    _, model = megatron_model("Qwen3", tmp_path)
    model = adapted(model)
    trained = {n: w.numel() for n, w in model[0].named_parameters() if w.requires_grad}
    assert all(".adapter." in name for name in trained)
    counted = adapters(SHAPES["Qwen3"], Lora("all-linear", RANK, ALPHA, [*LORA_MODULES]))
    assert sum(trained.values()) == 2 * RANK * sum(each.out + each.into for each in counted)


def test_without_target_modules_the_head_would_be_adapted_too(tmp_path):
    _, model = megatron_model("Llama", tmp_path)
    names = [name for name, _ in adapted(model, target_modules=[])[0].named_parameters()]
    assert "output_layer.adapter.linear_in.weight" in names
