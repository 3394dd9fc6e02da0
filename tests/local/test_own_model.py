"""A model with biases and a tied head, and a reward of one's own, through the local backend."""

import dataclasses
import math

import pytest
import torch
from safetensors.torch import load_file

from fp8_nemo.export.make_model import make_chat, new_model, save_model
from fp8_nemo.glue.refit import refit_stream
from fp8_nemo.glue.wire import RefitError
from fp8_nemo.local.engine import Engine
from fp8_nemo.local.grpo import GrpoLoop
from fp8_nemo.local.policy import Policy
from fp8_nemo.local.run import run
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.runs import metrics, run_dir

CPU = torch.device("cpu")
SHAPE = Shape(
    layers=2, hidden=256, ffn=256, heads=4, kv_heads=2, head_dim=64, vocab=128, tied=True,
    qkv_bias=True,
)  # fmt: skip
FP8 = Precision("fp8-linear", rollout_linear="fp8")
K_BIAS = "model.layers.1.self_attn.k_proj.bias"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Qwen2.5 with random weights and large biases of K, as the real ones have."""
    torch.manual_seed(0)
    chat, model = make_chat(), new_model(SHAPE, make_chat(), seed=0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("_proj.bias"):
                weight.normal_(std=8.0 if "k_proj" in name else 0.5)
    made = tmp_path_factory.mktemp("models") / "qwen25-tiny"
    save_model(model, chat, made)
    return made


def rows_of(plan):
    [frozen] = run_dir.freeze([plan])
    GrpoLoop(plan, frozen.path).train(lambda row: None)
    return frozen.path, metrics.read_metrics(frozen.path)


def auto(make_plan, folder, *words):
    return make_plan("model=auto", "backend=local", f"model.path={folder}", *SHORT, *words)


SHORT = ("data=arithmetic", "grpo=demo", "grpo.steps=2", "grpo.prompts_per_step=4",
         "grpo.max_new_tokens=5", "grpo.validate_first=false", "data.difficulty=1")  # fmt: skip


@pytest.mark.parametrize("precision", ["bf16", "fp8-linear", "fp8-kv-attn", "fp8-e2e-kv-attn"])
def test_it_trains_and_every_refit_is_proven(make_plan, folder, precision):
    plan = auto(make_plan, folder, f"precision={precision}")
    assert plan.recipe.model.shape == SHAPE and plan.cell.startswith("qwen25-tiny/")
    path, rows = rows_of(plan)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    weights = {"bf16": 0}.get(precision, 14)  # 7 of each layer; biases, norms and head are BF16
    assert all(row["refit/verified_weights"] == weights for row in rows)
    saved = [load_file(file) for file in (path / "checkpoints").glob("step-*/*.safetensors")]
    assert any(name.endswith(K_BIAS) for each in saved for name in each)


def engine_and_stream(folder):
    policy = Policy(folder, FP8, 1e-4, CPU)
    engine = Engine(policy.model.config, FP8, CPU)
    stream = list(refit_stream(policy.named_weights(), FP8, None, num_layers=2, number=1))
    return policy, engine, stream


def test_a_refit_brings_the_biases_and_no_head_of_its_own(folder):
    policy, engine, stream = engine_and_stream(folder)
    names = [name for name, _ in stream]
    assert K_BIAS in names and "lm_head.weight" not in names
    proof = engine.refit(stream, "bytes", 1)
    held = engine.wire_tensors()
    assert torch.equal(held[K_BIAS], policy.parameters[K_BIAS])
    assert proof.equal_digests == len(names) - 2  # all but the sentinel and the manifest


@pytest.mark.parametrize("lost", [K_BIAS, "model.embed_tokens.weight"])
def test_a_bias_that_is_lost_or_changed_on_the_way_is_named(folder, lost):
    _, engine, stream = engine_and_stream(folder)
    with pytest.raises(RefitError, match=f"{lost}: never arrived"):
        engine.refit([pair for pair in stream if pair[0] != lost], "bytes", 1)
    _, engine, stream = engine_and_stream(folder)
    changed = [(name, tensor + 1 if name == lost else tensor) for name, tensor in stream]
    with pytest.raises(RefitError, match=lost):
        engine.refit(changed, "bytes", 1)


def test_an_own_reward_is_what_a_run_learns_from(make_plan, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("def reward(answer, output):\n    return 100 * len(answer)\n")
    plan = make_plan(f"data.reward={mine}", "precision=bf16")
    _, rows = rows_of(plan)
    for row in rows[1:]:  # characters are tokens, and an answer's end is no character
        length = row["rollout/mean_length"]
        assert 100 * (length - 1) <= row["reward/mean"] <= 100 * length
    plain = make_plan("precision=bf16")
    assert plain.run_name != plan.run_name
    assert dataclasses.replace(plan.recipe.data, reward=None) == plain.recipe.data


def test_a_reward_that_breaks_stops_the_run_in_one_line_and_a_changed_one_is_refused(
    make_plan, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("signal.signal", lambda *_: None)
    mine = tmp_path / "mine.py"
    mine.write_text("def reward(answer, output):\n    return 1 / 0\n")
    plan = make_plan(f"data.reward={mine}", "precision=bf16")
    [frozen] = run_dir.freeze([plan])
    assert run(plan, frozen.path) == 1
    assert "raised ZeroDivisionError: division by zero, line 2" in capsys.readouterr().err
    mine.write_text("def reward(answer, output):\n    return len(answer)\n")
    assert run(plan, frozen.path) == 0  # nothing was saved, so it began with this one
    mine.write_text("def reward(answer, output):\n    return -len(answer)\n")
    assert run(make_plan(f"data.reward={mine}", "precision=bf16", "grpo.steps=3"), frozen.path) == 2
    assert "began with reward " in capsys.readouterr().err
