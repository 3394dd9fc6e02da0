"""QeRL's noise: its schedule by the step, its norms, and a refit whose proof covers it."""

import dataclasses

import pytest
import torch

from fp8_nemo.glue.destination import Destination
from fp8_nemo.glue.ledger import Ledger
from fp8_nemo.glue.refit import refit_stream, with_noise
from fp8_nemo.glue.wire import RefitError, named_shapes, wire_specs
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.options.training import Grpo, Noise

AQN = Noise("aqn", sigma_start=1e-2, sigma_end=1e-4, stages=10, steps=100)
FP8 = Precision(rollout_linear="fp8")
UNSEEN = Grpo(steps=10**6, validate_every=10**6)
SHAPE = Shape(
    layers=2, hidden=256, ffn=256, heads=2, kv_heads=1, head_dim=128, vocab=64, qk_norm=True
)
SHAPES = named_shapes(SHAPE)
NORMS = [f"model.layers.{n}.{norm}_layernorm.weight" for n in (0, 1)
         for norm in ("input", "post_attention")]  # fmt: skip
FORMATS = pytest.mark.parametrize("held", ["fp8", "nvfp4"])


def trainer():
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw).bfloat16() for name, shape in SHAPES.items()}


def noisy(named, trained, precision=FP8, sigma=0.1, seed=42):
    stream = with_noise(named.items(), sigma, precision, num_layers=2, seed=seed, trained=trained)
    return dict(stream)


def changed(named, other):
    return [name for name in named if not torch.equal(named[name], other[name])]


@pytest.mark.parametrize(
    ("trained", "sigma"),
    [
        *((0, 0), (9, 0), (10, 1e-2), (19, 1e-2), (20, 1e-2 * 10**-0.25), (49, 1e-2 * 10**-0.75)),
        *((50, 1e-3), (59, 1e-3), (89, 1e-4 * 10**0.25), (90, 1e-4), (99, 1e-4), (250, 1e-4)),
    ],
)
def test_a_stage_has_qerls_sigma_and_the_first_has_none(trained, sigma):
    assert AQN.sigma(trained, UNSEEN) == pytest.approx(sigma)


def test_a_refit_that_a_validation_reads_has_none_and_more_steps_change_no_other():
    grpo = Grpo(steps=95, validate_every=7)
    silent = [step for step in range(10, 96) if AQN.sigma(step, grpo) == 0]
    assert silent == [*range(14, 95, 7), 95]
    longer = dataclasses.replace(grpo, steps=200)
    assert all(AQN.sigma(n, grpo) == AQN.sigma(n, longer) for n in range(95))


def test_a_layers_two_norms_get_noise_of_that_size_and_nothing_else_changes():
    named = trainer()
    before = {name: weight.clone() for name, weight in named.items()}
    found = noisy({name: weight.float() for name, weight in named.items()}, 7)
    assert changed(named, found) == NORMS and not changed(named, before)
    noise = torch.cat([found[name] - named[name] for name in NORMS])
    assert noise.std().item() == pytest.approx(0.1, rel=0.1) and abs(noise.mean()) < 0.01
    assert changed(named, noisy(named, 7)) == NORMS and not changed(named, before)


def test_seed_step_and_name_decide_a_draw_and_what_came_before_does_not():
    named = trainer()
    whole, last = noisy(named, 7), {NORMS[-1]: named[NORMS[-1]]}
    torch.manual_seed(1)
    assert torch.equal(noisy(last, 7)[NORMS[-1]], whole[NORMS[-1]])
    assert changed(whole, noisy(named, 8)) == changed(whole, noisy(named, 7, seed=1)) == NORMS
    alike = dict.fromkeys(NORMS, named[NORMS[0]])
    assert len({tuple(each.tolist()) for each in noisy(alike, 7).values()}) == len(NORMS)


def test_layers_and_engines_that_are_not_quantized_get_none():
    named = trainer()
    first = dataclasses.replace(FP8, first_layers_bf16=1)
    last = dataclasses.replace(FP8, last_layers_bf16=1)
    assert changed(named, noisy(named, 7, first)) == NORMS[2:]
    assert changed(named, noisy(named, 7, last)) == NORMS[:2]
    assert not changed(named, noisy(named, 7, Precision()))
    assert not changed(named, noisy(named, 7, sigma=0.0))


@FORMATS
def test_the_proof_is_of_the_noisy_bytes_and_refits_do_not_add_up(held):
    named, precision = trainer(), Precision(rollout_linear=held)
    specs = wire_specs(SHAPES, precision, 2)
    engine = {n: torch.zeros(s.shape).to(getattr(torch, s.dtype)) for n, s in specs.items()}

    def refit(trained, clean=None):
        ledger = Ledger(specs, Destination(engine, specs))
        sent = noisy(named, trained, precision)
        for name, tensor in refit_stream(sent.items(), precision, None, num_layers=2):
            if ledger.receive(name, tensor):
                engine[name].copy_(named[name] if name == clean else tensor)
        ledger.close()
        return sent

    for trained in (11, 12, 13):
        sent = refit(trained)
        assert not changed({name: sent[name] for name in NORMS}, engine)
    with pytest.raises(RefitError) as error:
        refit(14, clean=NORMS[1])
    assert [each.split(":")[0] for each in error.value.problems] == [NORMS[1]]
