"""The engine samples what it scores, stops where it should, and holds what a refit brought."""

import dataclasses

import pytest
import torch

from fp8_nemo.correction.mismatch import LogprobError, LogprobPair, mismatch_metrics
from fp8_nemo.glue import recalibrate
from fp8_nemo.glue.quantize import FP8, quantize_blocks
from fp8_nemo.glue.refit import refit_stream
from fp8_nemo.glue.wire import RefitError
from fp8_nemo.local.chat import Chat
from fp8_nemo.local.engine import Engine, causal_mask, pad_left, positions
from fp8_nemo.local.modules import attention
from fp8_nemo.local.policy import Policy
from fp8_nemo.recipe.model_dir import SHIPPED
from fp8_nemo.recipe.options.precision import Precision

CPU = torch.device("cpu")
MODELS = ["tiny-llama", "tiny-qwen3-moe"]
FP8_ALL = Precision("fp8-e2e-kv-attn", rollout_linear="fp8", rollout_kv="fp8", train_linear="fp8")
SCALES = {
    f"model.layers.{i}.self_attn.{n}": 0.05
    for i in (0, 1)
    for n in ("attn.q_scale", "k_scale", "v_scale")
}
TEXTS = ["12+7", "98-45", "5+5", "71-8"]


def pair_of(model: str, precision: Precision):
    policy = Policy(SHIPPED / model, precision, 1e-4, CPU)
    engine = Engine(policy.model.config, precision, CPU)
    scales = SCALES if precision.rollout_kv == "fp8" else None
    stream = refit_stream(policy.named_weights(), precision, scales, num_layers=2)
    return policy, engine, engine.refit(stream, "bytes")


def sample(engine, model, texts=TEXTS, limit=8, seed=0):
    chat = Chat.load(SHIPPED / model)
    prompts = [chat.prompt(text) for text in texts]
    return engine.generate(prompts, chat, limit, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("model", MODELS)
def test_in_bf16_rollout_and_train_logprobs_agree(model):
    policy, engine, _ = pair_of(model, Precision())
    batch = sample(engine, model, TEXTS * 8)
    pair = LogprobPair(policy.logprobs(batch), batch.rollout_BR, batch.response_mask_BR)
    assert mismatch_metrics(pair)["mismatch/kl"] < 2e-4


@pytest.mark.parametrize("model", MODELS)
def test_fp8_rollouts_differ_from_bf16_training_and_less_so_from_fp8_training(model):
    kl = {}
    for name, precision in {
        "rollout": Precision("fp8-linear", rollout_linear="fp8"),
        "both": Precision("fp8-e2e", rollout_linear="fp8", train_linear="fp8"),
    }.items():
        policy, engine, _ = pair_of(model, precision)
        batch = sample(engine, model, TEXTS * 16)
        pair = LogprobPair(policy.logprobs(batch), batch.rollout_BR, batch.response_mask_BR)
        kl[name] = mismatch_metrics(pair)["mismatch/kl"]
    assert kl["rollout"] > 1e-4 and kl["both"] < kl["rollout"] / 2


def test_an_engine_without_probabilities_says_that_it_has_diverged():
    _, engine, _ = pair_of("tiny-llama", Precision())
    engine.model.lm_head.weight.data[:, 0] = torch.inf
    with pytest.raises(LogprobError, match="the engine has diverged"):
        sample(engine, "tiny-llama")


def test_logprobs_are_those_of_the_sampled_tokens_and_stop_at_the_end():
    _, engine, _ = pair_of("tiny-llama", Precision())
    chat = Chat.load(SHIPPED / "tiny-llama")
    batch = sample(engine, "tiny-llama", TEXTS * 8)
    ends = batch.responses_BR == chat.end
    for row, mask in zip(ends, batch.response_mask_BR, strict=True):
        length = int(mask.sum())
        assert mask[:length].all() and not mask[length:].any()
        assert not row[: length - 1].any() and (row[length - 1] or length == 8)
    assert (batch.rollout_BR[batch.response_mask_BR] < 0).all()
    assert (batch.rollout_BR[~batch.response_mask_BR] == 0).all()
    assert torch.equal(batch.mask_BT[:, -batch.response_mask_BR.shape[1] :], batch.response_mask_BR)


def test_a_prompt_is_answered_alike_alone_and_padded_among_longer_ones():
    policy, engine, _ = pair_of("tiny-llama", Precision())
    chat = Chat.load(SHIPPED / "tiny-llama")
    batch = sample(engine, "tiny-llama", ["5+5", "98-45"])
    alone = batch.of(slice(1))
    alone = dataclasses.replace(
        alone, tokens_BT=alone.tokens_BT[:, 2:], mask_BT=alone.mask_BT[:, 2:]
    )
    assert (batch.tokens_BT[0, :2] == chat.pad).all()
    difference = policy.logprobs(alone) - policy.logprobs(batch)[:1]
    assert difference.abs().max() < 0.02


@pytest.mark.parametrize("model", MODELS)
def test_a_refit_fills_fp8_weights_with_the_trainers_quantized_bytes(model):
    policy, engine, proof = pair_of(model, FP8_ALL)
    assert proof.equal_digests == len(engine.wire_tensors().keys() - SCALES.keys())
    name = "model.layers.1.self_attn.q_proj.weight"
    held = quantize_blocks(policy.parameters[name].detach())
    assert engine.wire_tensors()[name].dtype == FP8
    assert torch.equal(engine.wire_tensors()[name].view(torch.uint8), held.fp8_OI.view(torch.uint8))
    assert torch.equal(engine.wire_tensors()[name + "_scale_inv"], held.scale_inv_PQ)
    fp8 = sum(tensor.dtype == FP8 for tensor in engine.wire_tensors().values())
    assert proof.verified_weights == fp8 == (14 if model == "tiny-llama" else 2 * (4 + 3 * 4))
    assert not any(
        t.dtype == FP8
        for n, t in engine.wire_tensors().items()
        if "embed" in n or "lm_head" in n or "mlp.gate." in n
    )


def test_the_kv_cache_really_stores_fp8_with_the_scales_of_the_refit(monkeypatch):
    _, engine, _ = pair_of("tiny-llama", FP8_ALL)
    seen = []
    original = attention.new_cache
    monkeypatch.setattr(
        attention, "new_cache", lambda *given: seen.append(original(*given)) or seen[-1]
    )
    sample(engine, "tiny-llama")
    assert all(layer.keys.dtype == layer.values.dtype == FP8 for layer in seen[-1].layers)
    assert seen[-1].layers[0].scales[0].item() == pytest.approx(0.05)


def test_kv_scales_matter_to_what_is_sampled():
    _, engine, _ = pair_of("tiny-llama", FP8_ALL)
    before = sample(engine, "tiny-llama").rollout_BR
    engine.wire_tensors()["model.layers.0.self_attn.v_scale"].mul_(0.01)
    after = sample(engine, "tiny-llama").rollout_BR
    assert before.shape != after.shape or not torch.equal(before, after)


def test_an_engine_that_was_not_refitted_whole_is_not_used():
    policy, engine, _ = pair_of("tiny-llama", FP8_ALL)
    stream = refit_stream(policy.named_weights(), FP8_ALL, SCALES, num_layers=2)
    missing = "model.layers.0.mlp.down_proj.weight_scale_inv"
    with pytest.raises(RefitError, match=missing):
        engine.refit((item for item in stream if item[0] != missing), "names")


def test_ranges_are_observed_on_real_tokens_in_every_layer():
    policy, engine, _ = pair_of("tiny-qwen3-moe", Precision())
    batch = sample(engine, "tiny-qwen3-moe")
    observer = recalibrate.AmaxObserver(2, 1)
    policy.logprobs(batch, observer)
    garbage = dataclasses.replace(batch, tokens_BT=batch.tokens_BT.masked_fill(~batch.mask_BT, 77))
    padded = recalibrate.AmaxObserver(2, 1)
    policy.logprobs(garbage, padded)
    assert (observer.amax_SL3 > 0).all()
    assert torch.equal(observer.amax_SL3, padded.amax_SL3)
    assert all(
        module.watch is None for module in (layer.self_attn for layer in policy.model.model.layers)
    )


def test_left_padding_aligns_the_ends():
    tokens, mask = pad_left([[1, 2], [3]], 0, CPU)
    assert tokens.tolist() == [[1, 2], [0, 3]] and mask.tolist() == [[True, True], [False, True]]


def test_the_chat_template_wraps_a_problem():
    chat = Chat.load(SHIPPED / "tiny-llama")
    assert chat.tokenizer.decode(chat.prompt("1+2")) == "<user>1+2<assistant>"
    assert chat.tokenizer.decode(chat.answer("3")) == "3<eos>"


def test_special_tokens_inside_an_answer_stay_visible_and_cost_the_reward():
    chat = Chat.load(SHIPPED / "tiny-llama")
    rows = [[*chat.encode("8<user>5"), chat.end], chat.answer("85"), [*chat.encode("85"), chat.pad]]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [chat.pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    assert chat.texts(tokens, mask) == ["8<user>5", "85", "85<pad>"]


def test_the_mask_of_the_last_queries_is_the_end_of_the_whole():
    mask_BT = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()
    for queries in (1, 3, 5):
        assert torch.equal(causal_mask(mask_BT, queries), causal_mask(mask_BT)[:, :, -queries:])


def plainly(engine, chat, prompts, limit, seed):
    """`Engine.generate` as it was: the whole mask, a growing cache, weights at every token."""
    tokens_BT, mask_BT = pad_left(prompts, chat.pad, CPU)
    cache, generator = attention.new_cache(engine.model), torch.Generator().manual_seed(seed)
    ended_B, new_BT, logprobs = torch.zeros(len(prompts)).bool(), tokens_BT, []
    while len(logprobs) < limit and not ended_B.all():
        output = engine.model(
            input_ids=new_BT,
            attention_mask=causal_mask(mask_BT)[:, :, -new_BT.shape[1] :],
            position_ids=positions(mask_BT)[:, -new_BT.shape[1] :],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logprob_BV = output.logits[:, -1].float().log_softmax(-1)
        new_BT = torch.multinomial(logprob_BV.exp(), 1, generator=generator)
        new_BT = new_BT.masked_fill(ended_B[:, None], chat.pad)
        logprobs.append(logprob_BV.gather(1, new_BT).masked_fill(ended_B[:, None], 0.0))
        tokens_BT = torch.cat([tokens_BT, new_BT], dim=1)
        mask_BT = torch.cat([mask_BT, ~ended_B[:, None]], dim=1)
        ended_B = ended_B | (new_BT[:, 0] == chat.end)
    return tokens_BT, torch.cat(logprobs, dim=1)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "precision",
    [Precision(), Precision("fp8-linear", rollout_linear="fp8"), FP8_ALL],
    ids=lambda precision: precision.name,
)
@torch.no_grad()
def test_what_is_done_once_a_rollout_changes_no_token_and_no_logprob(model, precision):
    _, engine, _ = pair_of(model, precision)
    chat = Chat.load(SHIPPED / model)
    chat.end = chat.encode("7")[0]  # answers of many lengths
    prompts = [chat.prompt(text) for text in ["12+7", "98-45+11+23", "5", "71-8"] * 4]
    batch = engine.generate(prompts, chat, 118, torch.Generator().manual_seed(3))
    tokens_BT, rollout_BR = plainly(engine, chat, prompts, 118, 3)
    assert batch.tokens_BT.shape[1] > 128, "more than one tile of keys"
    assert torch.equal(batch.tokens_BT, tokens_BT) and torch.equal(batch.rollout_BR, rollout_BR)
