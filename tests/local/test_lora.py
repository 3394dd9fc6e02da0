"""LoRA on the local backend: the adapters' gradients, what is trained, saved, sent and exported."""

import pytest
import torch
from safetensors.torch import load_file

from fp8_nemo.export.from_run import exported
from fp8_nemo.local.checkpoint import TENSORS
from fp8_nemo.local.grpo import GrpoLoop
from fp8_nemo.local.modules.lora import Adapters
from fp8_nemo.plan.memory import trained_parameters
from fp8_nemo.plan.plan import PlanError
from fp8_nemo.recipe.model_dir import SHIPPED
from fp8_nemo.recipe.options.training import Lora
from fp8_nemo.runs import metrics, run_dir

WORDS = ("precision=fp8-linear", "lora=attention", "lora.rank=4", "grpo.learning_rate=1e-2")
SHORT = ("grpo.steps=2", "grpo.checkpoint_every=1")


def run(make_plan, *words):
    plan = make_plan(*WORDS, *words)
    [frozen] = run_dir.freeze([plan])
    loop = GrpoLoop(plan, frozen.path)
    loop.train(lambda row: None)
    return plan, frozen.path, loop


def test_gradients_of_adapters_are_those_of_the_merged_product():
    torch.manual_seed(0)
    names = [f"model.layers.0.self_attn.{each}_proj.weight" for each in "qkv"]
    weights = {name: torch.nn.Parameter(torch.randn(6, 8)) for name in names}
    bases = {name: weight.detach().clone() for name, weight in weights.items()}
    adapters = Adapters(weights, Lora("one", 2, 6, ["linear_qkv"]))
    assert len(adapters.masters) == 4  # one A of all three
    for master in adapters.masters.values():
        master.copy_(torch.randn_like(master)).requires_grad_()
    adapters.merge()
    x = torch.randn(5, 8)

    def loss(linears):
        return sum((x @ linear.T).pow(2).sum() for linear in linears)

    loss(weights.values()).backward()
    adapters.take_gradients()
    found = {name: master.grad.clone() for name, master in adapters.masters.items()}
    A = adapters.masters["model.layers.0.self_attn.linear_qkv.lora_A"]
    for master in adapters.masters.values():
        master.grad = None
    loss(
        bases[name] + 3 * adapters.masters[name.replace("weight", "lora_B")] @ A for name in names
    ).backward()
    for name, master in adapters.masters.items():
        torch.testing.assert_close(found[name], master.grad, rtol=1e-5, atol=1e-4)


def test_a_run_trains_adapters_alone_and_exports_what_its_engine_holds(make_plan):
    plan, path, loop = run(make_plan, *SHORT)
    saved = load_file(run_dir.checkpoints(path)[-1] / TENSORS)
    masters = {name: each for name, each in saved.items() if name.startswith("master.")}
    assert sum(each.numel() for each in masters.values()) == trained_parameters(plan.settled)
    assert all(".lora_" in name for name in masters)
    [file] = exported(path, plan).glob("*.safetensors")
    merged, first = load_file(file), load_file(SHIPPED / "tiny-llama" / "model.safetensors")
    for name, weight in loop.policy.named_weights():
        assert torch.equal(merged[name], weight)
        moved = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"))
        assert torch.equal(merged[name], first[name]) != moved, name
    rows = metrics.read_metrics(path)
    assert rows[1]["refit/verified_weights"] == 14 and rows[1]["train/grad_norm"] > 0


def test_a_stopped_run_goes_on_with_its_adapters(make_plan, tmp_path):
    def last(*words):
        row = metrics.read_metrics(run(make_plan, *words)[1])[-1]
        return {key: value for key, value in row.items() if not key.startswith("time/")}

    whole = last("grpo.steps=3", "grpo.checkpoint_every=3")
    run(make_plan, "grpo.steps=2", "grpo.checkpoint_every=3", f"outputs={tmp_path}/two")
    assert last("grpo.steps=3", "grpo.checkpoint_every=3", f"outputs={tmp_path}/two") == whole


def test_adapters_of_experts_are_refused_and_of_attention_are_not(make_plan):
    moe = ("model=tiny-qwen3-moe", "precision=fp8-linear")
    assert make_plan(*moe, "lora=attention").backend == "local"
    with pytest.raises(PlanError, match=r"lora\.target_modules=all-linear: backend=local has no"):
        make_plan(*moe, "lora=all-linear")
