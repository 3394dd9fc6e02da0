"""What the benchmark of four-bit refits compares an engine with, and how it hands bytes over."""

import dataclasses

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.glue import marlin_refit
from benchmarks.speed import random_model
from fp8_nemo.export.formats import values_of
from fp8_nemo.glue.refit import refit_stream
from fp8_nemo.recipe.compose import compose

CPU = torch.device("cpu")
[RECIPE] = compose(["model=tiny-llama", "precision=nvfp4-w4a16"])
SHAPE = dataclasses.replace(RECIPE.model.shape, layers=1)


@pytest.fixture(scope="module")
def model():
    return random_model.build(SHAPE).float().eval()


def wire_of(weights):
    return list(refit_stream(weights.items(), RECIPE.precision, None, num_layers=1, number=1))


def test_the_reference_scores_tokens_with_the_values_of_the_bytes_that_were_sent(model):
    weights = marlin_refit.weights_of(model, 1, CPU)
    values = dict(values_of(marlin_refit.sent(wire_of(weights)), RECIPE.precision))
    assert values.keys() == weights.keys()
    for name, weight in weights.items():
        off = (values[name] - weight.float()).norm() / weight.float().norm()
        assert (0.05 < off < 0.15) if "_proj" in name else off == 0
    tokens = torch.randint(SHAPE.vocab, (2, 12), generator=torch.Generator().manual_seed(1))
    found = marlin_refit.scored(model, values, tokens, 5)
    logits = model(tokens).logits.log_softmax(-1)
    wanted = [[logits[b, t - 1, tokens[b, t]].item() for t in range(5, 12)] for b in range(2)]
    assert torch.allclose(found, torch.tensor(wanted), atol=1e-6)
    exact = marlin_refit.scored(model, {n: x.float() for n, x in weights.items()}, tokens, 5)
    assert (exact - found).abs().mean() > 1e-3


@pytest.mark.parametrize("size", [2**8, 2**16, 2**26])
def test_batches_hold_all_that_is_sent_and_nothing_once_the_next_one_is_asked(
    model, monkeypatch, size
):
    monkeypatch.setattr(marlin_refit, "BUFFER", size)
    wire = wire_of(marlin_refit.weights_of(model, 1, CPU))
    left, kept, seen, batches = [], [], [], 0
    for batch in marlin_refit.through_a_buffer(wire, CPU):
        used = [x.view(torch.uint8).flatten() for x in left]
        assert not any(torch.equal(x, old) for x, old in zip(used, kept, strict=True))
        kept = [x.view(torch.uint8).flatten().clone() for _, x in batch]
        seen += [(name, x.clone()) for name, x in batch]
        left, batches = [x for _, x in batch], batches + 1
    assert (batches > 1) == (size < 2**26)
    assert [name for name, _ in seen] == [name for name, _ in wire]
    pairs = zip(seen, wire, strict=True)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for (_, a), (_, b) in pairs)


def test_what_is_shipped_is_held_against_the_refit(model, tmp_path):
    weights = marlin_refit.weights_of(model, 1, CPU)
    model.config.save_pretrained(tmp_path / "bf16")
    save_file(weights, tmp_path / "bf16" / "model.safetensors")
    wire = wire_of(weights)
    q, scale = (f"model.layers.0.self_attn.q_proj.weight{end}" for end in ("", "_scale_2"))
    changed = [pair for pair in marlin_refit.flipped(wire, q) if pair[0] != scale]
    for number, (stream, unlike) in enumerate([(wire, []), (changed, [q, scale])]):
        target = tmp_path / str(number)
        found = marlin_refit.not_shipped(tmp_path / "bf16", target, stream, RECIPE.precision)
        assert found == unlike


def test_a_flipped_bit_is_in_one_tensor_alone(model):
    wire = wire_of(marlin_refit.weights_of(model, 1, CPU))
    name = "model.layers.0.self_attn.q_proj.weight"
    changed = dict(marlin_refit.flipped(wire, name))
    differ = [
        n for n, x in wire if not torch.equal(x.view(torch.uint8), changed[n].view(torch.uint8))
    ]
    assert differ == [name]
