"""Each source of mismatch is the real engine's, alone, and whole distributions are compared."""

import re
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import kl_div, linear

from benchmarks.numerics import sources
from benchmarks.numerics.sources import (
    ACTIVATIONS,
    ATTENTION,
    EVERYTHING,
    FP8_KV_ATTN,
    LINEAR,
    NOTHING,
    PROJECTIONS,
    WEIGHTS,
    in_bf16_but,
    measure,
)
from fp8_nemo.glue.quantize import (
    FP8,
    dequantize_blocks,
    dequantize_groups,
    quantize_blocks,
    quantize_groups,
)
from fp8_nemo.glue.recalibrate import AmaxObserver, kv_scales
from fp8_nemo.glue.refit import refit_stream
from fp8_nemo.local.chat import Chat
from fp8_nemo.local.engine import Engine
from fp8_nemo.local.modules import attention, linears
from fp8_nemo.local.policy import Policy
from fp8_nemo.recipe.model_dir import SHIPPED
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.problems import Problem, arithmetic

MODELS = ["tiny-llama", "tiny-qwen3-moe"]
PROBLEMS = arithmetic(2, 0).validation[:24]
FIRST, LAST = (replace(EVERYTHING, name=f"layer {n}", where=rf"layers\.{n}\.") for n in (0, 1))
FP8_E2E = replace(FP8_KV_ATTN, train_linear="fp8")


class Models:
    """Trainer and engines of a shipped model, as `measure` has them."""

    def __init__(self, name):
        self.policy = Policy(SHIPPED / name, FP8_KV_ATTN, 0.0, sources.CPU)
        self.batch = sources.answered(PROBLEMS, Chat.load(SHIPPED / name))
        self.fp8 = sources.engine_model(self.policy, FP8_KV_ATTN, self.batch)
        self.bf16 = sources.engine_model(self.policy, Precision(), self.batch)

    def with_source(self, source):
        return in_bf16_but(source, self.fp8, self.bf16)


@pytest.fixture(scope="module", params=MODELS)
def models(request):
    return Models(request.param)


@pytest.fixture(scope="module", params=MODELS)
def kl(request):
    """Mean KL by name of the source."""
    every = [NOTHING, WEIGHTS, ACTIVATIONS, LINEAR, ATTENTION, EVERYTHING, FIRST, LAST]
    return {each.source.name: each for each in measure(SHIPPED / request.param, PROBLEMS, every)}


def test_with_nothing_in_fp8_rollout_and_train_are_equal_to_the_last_bit(kl):
    assert kl["nothing"].kl_BR.count_nonzero() == 0


def test_with_everything_in_fp8_the_model_is_the_engine_as_the_refit_left_it(models):
    found = sources.answer_logprobs(models.with_source(EVERYTHING), models.batch, cached=True)
    assert torch.equal(found, sources.answer_logprobs(models.fp8, models.batch, cached=True))


@pytest.mark.parametrize("name", MODELS)
def test_with_everything_in_fp8_logprobs_are_those_that_an_engine_samples_with(name):
    models, chat = Models(name), Chat.load(SHIPPED / name)
    observer = AmaxObserver(2, 1)
    models.policy.logprobs(models.batch, observer)
    scales = kv_scales(observer.read(), 1.05)
    engine = Engine(models.policy.model.config, FP8_KV_ATTN, sources.CPU)
    stream = refit_stream(models.policy.named_weights(), FP8_KV_ATTN, scales, num_layers=2)
    engine.refit(stream, "bytes")
    prompts = [chat.prompt(each.input) for each in PROBLEMS]
    batch = engine.generate(prompts, chat, 4, torch.Generator().manual_seed(0))
    logprobs = sources.answer_logprobs(models.with_source(EVERYTHING), batch, cached=True)
    forced_BR = logprobs.gather(2, batch.responses_BR[..., None])[..., 0]
    apart_N = (forced_BR - batch.rollout_BR)[batch.response_mask_BR].abs()
    trained_BR = models.policy.logprobs(batch)
    mismatch_N = (trained_BR - batch.rollout_BR)[batch.response_mask_BR].abs()
    assert apart_N.mean() < 0.02 * mismatch_N.mean(), "token by token or at once: sums are rounded"


def test_weights_alone_multiplies_bf16_by_what_the_bytes_stand_for(models):
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    name = "model.layers.1.self_attn.o_proj"
    held = dequantize_blocks(quantize_blocks(models.policy.parameters[f"{name}.weight"].detach()))
    module = models.with_source(WEIGHTS).get_submodule(name)
    assert torch.equal(module(x), linear(x.float(), held).bfloat16())


def test_activations_alone_multiplies_their_fp8_values_by_bf16_weights(models):
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    name = "model.layers.1.self_attn.o_proj"
    value = dequantize_groups(quantize_groups(x))
    weight = models.policy.parameters[f"{name}.weight"].detach().float()
    module = models.with_source(ACTIVATIONS).get_submodule(name)
    assert torch.equal(module(x), linear(value, weight).bfloat16())


def test_experts_too_take_one_operand_in_fp8_at_a_time():
    models = Models("tiny-qwen3-moe")
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    name, slab = "model.layers.0.mlp.experts", "gate_up_proj"
    weight = models.policy.parameters[f"{name}.{slab}"][2].detach()
    value, held = dequantize_groups(quantize_groups(x)), dequantize_blocks(quantize_blocks(weight))
    for source, expected in {
        WEIGHTS: linear(x.float(), held),
        ACTIVATIONS: linear(value, weight.float()),
        LINEAR: linear(value, held),
        NOTHING: linear(x.float(), weight.float()),
    }.items():
        module = models.with_source(source).get_submodule(name)
        assert torch.equal(module.product(x, module.matrices(slab)[2]), expected.bfloat16()), (
            source.name
        )


def test_attention_in_fp8_stores_an_fp8_cache_where_the_source_says_so(models):
    cache = attention.new_cache(models.with_source(replace(ATTENTION, where=r"layers\.1\.")))
    for layer in cache.layers:
        layer.update(torch.ones(1, 2, 3, 64).bfloat16(), torch.ones(1, 2, 3, 64).bfloat16())
    assert [layer.keys.dtype for layer in cache.layers] == [torch.bfloat16, FP8]


def test_scales_of_the_cache_are_the_real_ones_of_the_trainers_forward(models):
    observer = AmaxObserver(2, 1)
    models.policy.logprobs(models.batch, observer)
    found = [m.v_scale.item() for m in attention.attention_modules(models.fp8)]
    assert found == pytest.approx((1.05 * observer.read()[0, :, 2] / 448).tolist())


@pytest.mark.parametrize("name", MODELS)
def test_one_layer_alone_is_what_the_precision_option_makes_of_it(name):
    linear_of_last = replace(LINEAR, where=r"layers\.1\.")
    [alone] = measure(SHIPPED / name, PROBLEMS, [linear_of_last])
    [option] = measure(
        SHIPPED / name, PROBLEMS, [LINEAR], replace(FP8_KV_ATTN, first_layers_bf16=1)
    )
    assert alone.mean > 0 and torch.equal(alone.kl_BR, option.kl_BR)


def test_sources_are_ordered_and_roughly_add_up(kl):
    mean = {name: each.mean for name, each in kl.items()}
    assert 1e-5 < mean["weights"] < mean["activations"] < mean["KV cache + attention"]
    both = mean["weights"] + mean["activations"]
    assert 0.5 < mean["weights + activations"] / both < 1.5
    whole = mean["weights + activations"] + mean["KV cache + attention"]
    assert 0.5 < mean["everything"] / whole < 1.5
    assert 0.5 < mean["everything"] / (mean["layer 0"] + mean["layer 1"]) < 1.5
    assert max(mean["layer 0"], mean["layer 1"]) < mean["everything"]


@pytest.mark.parametrize("name", MODELS)
def test_training_in_fp8_leaves_nothing_of_the_linears_and_all_of_the_attention(name):
    train_bf16 = measure(SHIPPED / name, PROBLEMS, [LINEAR, EVERYTHING])
    nothing, linears, everything = measure(
        SHIPPED / name, PROBLEMS, [NOTHING, LINEAR, EVERYTHING], FP8_E2E
    )
    assert linears.kl_BR.count_nonzero() == 0
    assert nothing.mean == pytest.approx(train_bf16[0].mean, rel=0.5)
    assert everything.mean > train_bf16[0].mean


def test_each_fp8_module_is_of_one_kind_of_projection(models):
    found = models.fp8.named_modules()
    names = [name for name, each in found if isinstance(each, linears.Held)]
    kinds = {
        name: [k for k, where in PROJECTIONS.items() if re.search(where, name)] for name in names
    }
    assert names and all(len(found) == 1 for found in kinds.values()), kinds


def test_kl_is_that_of_whole_distributions_and_of_the_right_direction():
    logits = torch.randn(2, 3, 4, 9, generator=torch.Generator().manual_seed(0)).double()
    train, rollout = logits.log_softmax(-1)
    expected = kl_div(train, rollout, reduction="none", log_target=True).sum(-1)
    assert torch.allclose(sources.exact_kl(train, rollout), expected, rtol=1e-12)
    assert (expected > 0).all()
    assert not torch.allclose(sources.exact_kl(rollout, train), expected)


def test_means_are_over_answer_tokens_and_errors_over_problems():
    kl_BR = torch.tensor([[1.0, 3.0], [2.0, 0.0], [3.0, 3.0]]).double()
    mask_BR = torch.tensor([[True, True], [True, False], [True, True]])
    found = sources.ExactMismatch(WEIGHTS, kl_BR, kl_BR, mask_BR)
    assert found.mean == pytest.approx(12 / 5)
    excess = [4 - 2 * 2.4, 2 - 2.4, 6 - 2 * 2.4]
    assert found.error == pytest.approx(sum(e**2 for e in excess) ** 0.5 / 5)


def test_answers_are_read_as_a_rollout_would_hold_them():
    chat = Chat.load(SHIPPED / "tiny-llama")
    batch = sources.answered([Problem("5+5", "10"), Problem("98+45", "143")], chat)
    texts = ["".join(chat.tokenizer.convert_ids_to_tokens(row)) for row in batch.tokens_BT.tolist()]
    assert texts == [
        "<pad><pad><user>5+5<assistant>10<eos><pad>",
        "<user>98+45<assistant>143<eos>",
    ]
    pad, end = batch.tokens_BT == chat.pad, batch.responses_BR == chat.end
    assert torch.equal(batch.mask_BT, ~pad)
    assert torch.equal(batch.response_mask_BR, ~pad[:, -4:]) and end.sum(1).tolist() == [1, 1]
    assert batch.rollout_BR.isnan().all(), "nothing was sampled"


def test_entropy_is_the_trainers_and_near_zero_where_an_answer_must_end(kl):
    found = kl["weights"]
    entropy_R = found.entropy_BR.sum(0) / found.mask_BR.sum(0)
    assert 0.5 < entropy_R[0] < 3 and entropy_R[3] < 0.02
    assert (found.entropy_BR[~found.mask_BR] == 0).all() and (
        found.kl_BR[~found.mask_BR] == 0
    ).all()


@pytest.mark.parametrize("name", MODELS)
def test_numbers_do_not_depend_on_chance(name):
    kls = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        kls += [each.kl_BR for each in measure(SHIPPED / name, PROBLEMS[:8], [EVERYTHING])]
    assert torch.equal(*kls)
