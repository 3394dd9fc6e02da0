"""The loop is wired as GRPO is defined: each quantity is restated here, with stock models.

An update is restated sequence by sequence, unpadded, in a stock FP32 model; recalibration in closed
form from the ranges that attention showed; rewards from the text of each row.
"""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM

from fp8_nemo.correction.correct import Multiplier, correct
from fp8_nemo.correction.mismatch import LogprobPair
from fp8_nemo.glue import wire as weights
from fp8_nemo.glue.quantize import dequantize_blocks, quantize_blocks
from fp8_nemo.glue.recalibrate import AmaxObserver
from fp8_nemo.glue.refit import refit_stream
from fp8_nemo.local import policy as policy_module
from fp8_nemo.local.chat import Chat
from fp8_nemo.local.engine import Engine
from fp8_nemo.local.grpo import GrpoLoop
from fp8_nemo.recipe.model_dir import SHIPPED
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.problems import arithmetic
from fp8_nemo.runs import run_dir


def run_of(plan) -> GrpoLoop:
    return GrpoLoop(plan, run_dir.freeze([plan])[0].path)


def spied(monkeypatch, owner, name, before):
    """Call `before` with each call's arguments, then the original."""
    original = getattr(owner, name)
    spy = lambda *args, **kwargs: (before(*args, **kwargs), original(*args, **kwargs))[1]  # noqa: E731
    monkeypatch.setattr(owner, name, spy)


def rows_of(batch):
    """Each row's real tokens, and how many of them are the response."""
    for row, tokens in enumerate(batch.tokens_BT):
        yield tokens[batch.mask_BT[row]], int(batch.response_mask_BR[row].sum())


def stock_model(model: str):
    return AutoModelForCausalLM.from_pretrained(
        SHIPPED / model, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


def stock_logprobs(stock, batch) -> list[torch.Tensor]:
    """Logprobs of each row's response tokens; rows go alone, without padding or mask."""
    found = []
    for ids, n in rows_of(batch):
        logprobs = stock(input_ids=ids[None]).logits[0, -n - 1 : -1].log_softmax(-1)
        found.append(logprobs.gather(1, ids[-n:, None])[:, 0])
    return found


def recorded_steps(run, monkeypatch) -> list[tuple[dict, dict]]:
    """Masters before each optimizer step, and the gradients that it was handed."""
    steps, held = [], run.policy.masters.items()
    record = lambda: [{n: m.clone() for n, m in held}, {n: m.grad.clone() for n, m in held}]  # noqa: E731
    spied(monkeypatch, run.policy.optimizer, "step", lambda: steps.append(record()))
    return steps


def restated_gradients(stock, batch, start, advantages, train, reference, values, counted, penalty):
    """The clipped gradient of one mini-batch, and its norm before clipping, token by token."""
    stock.zero_grad()
    losses = []
    for row, current in enumerate(stock_logprobs(stock, batch), start=start):
        for token, logprob in enumerate(current):
            ratio, advantage = (logprob - train[row, token]).exp(), advantages[row]
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            # -log(reference / current) is the score-function gradient of KL(current || reference)
            distance = (logprob - reference[row, token]).detach() * logprob
            loss = penalty * distance - values[row, token] * surrogate
            losses.append(loss * counted[row, token])
    (sum(losses) / counted[start : start + len(batch.tokens_BT)].sum()).backward()
    norm = torch.nn.utils.clip_grad_norm_(stock.parameters(), 1.0)
    return {name: weight.grad for name, weight in stock.named_parameters()}, float(norm)


@pytest.mark.parametrize("case", [*itertools.product([1, 2], [0.0, 0.5], [False, True])])
def test_the_optimizer_is_handed_the_gradient_of_the_loss_as_defined(make_plan, monkeypatch, case):
    updates, penalty, renormalize = case
    correction = ["correction=mis", f"correction.renormalize_denominator={renormalize}"]
    grpo = [f"grpo.updates_per_step={updates}", f"grpo.kl_penalty={penalty}"]
    run = run_of(make_plan("precision=bf16", *correction, *grpo))
    run._refit(0)
    problems = run._problems_of(0, run.settled.prompts_per_step)
    batch = run._sample(problems, run.progress.sampler)
    mask, size = batch.response_mask_BR, len(batch.tokens_BT) // updates
    # In FP32 throughout, gradients of micro-batches add up as those of the whole do: what is left
    # is the order of FP32 sums, 1e-6 of the norm; a wrong row or factor stands out by 1e-2.
    run.policy.model.float().set_attn_implementation("sdpa")
    monkeypatch.setattr(policy_module, "TOKENS_PER_MICRO_BATCH", 3 * batch.tokens_BT.shape[1])
    draw = torch.Generator().manual_seed(0)
    noise = torch.randn(2, *mask.shape, generator=draw)  # so large that the clip at a fifth binds
    train, reference = run.policy.logprobs(batch) + 0.4 * noise
    advantages = 3 * torch.randn(len(mask), generator=draw)
    share = torch.linspace(0.4, 0.9, len(mask))[:, None]  # the halves differ in what is kept
    kept = mask & (torch.rand(mask.shape, generator=draw) < share)
    values = (0.5 + 1.5 * torch.rand(mask.shape, generator=draw)) * kept
    steps = recorded_steps(run, monkeypatch)
    told = reference if penalty else None
    multiplier = Multiplier(values, kept, ~mask)
    row = run._update(batch, advantages[:, None], train, told, multiplier)
    stock, norms, counted = stock_model("tiny-llama"), [], (kept if renormalize else mask).float()
    known = advantages, train, reference, values, counted, penalty
    for start, (masters, grads) in zip(range(0, len(mask), size), steps, strict=True):
        stock.load_state_dict(masters)
        rows = batch.of(slice(start, start + size))
        expected, before = restated_gradients(stock, rows, start, *known)
        norms.append(before)
        error = sum((grads[name] - expected[name]).square().sum() for name in expected).sqrt()
        assert before > 1.2 and error < 1e-5  # of a clipped gradient, whose norm is 1
    assert row["train/grad_norm"] == pytest.approx(max(norms), rel=1e-5)


def test_masters_follow_adamw_in_fp32_and_the_model_is_their_rounding(make_plan, monkeypatch):
    grpo = ["grpo.prompts_per_step=8", "grpo.updates_per_step=2", "grpo.learning_rate=1.0e-3"]
    run = run_of(make_plan("precision=bf16", *grpo))
    steps = recorded_steps(run, monkeypatch)
    run.train(lambda row: None)
    assert len(steps) == 4
    restated = {name: master.clone() for name, master in steps[0][0].items()}
    vectors = [master for master in restated.values() if master.ndim == 1]
    matrices = [master for master in restated.values() if master.ndim > 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)
    for _, grads in steps:
        for name, master in restated.items():
            master.grad = grads[name]
        optimizer.step()
    # The same torch code on the same numbers: equal bits, where decay alone is 1e-5 of a weight.
    for name, master in run.policy.masters.items():
        assert torch.equal(master, restated[name]), name
        assert torch.equal(run.policy.parameters[name], master.bfloat16()), name


def test_a_step_hands_each_quantity_of_its_own_sequences_to_the_update(make_plan, monkeypatch):
    grpo = ["grpo.kl_penalty=0.1", "grpo.prompts_per_step=8", "grpo.learning_rate=1.0e-3"]
    run = run_of(make_plan("correction=tis", "precision=fp8-linear", "seed=3", *grpo))
    start = {name: weight.clone() for name, weight in run.policy.parameters.items()}
    prompts, rewarded, asked = [], set(), []

    def check(batch, advantages, train, reference, multiplier):
        assert torch.equal(train, run.policy.logprobs(batch))
        assert torch.equal(reference, run.reference.logprobs(batch))
        assert all(torch.equal(run.reference.parameters[name], start[name]) for name in start)
        pair = LogprobPair(train, batch.rollout_BR, batch.response_mask_BR)
        assert torch.equal(multiplier.value_BT, correct(pair, run.recipe.correction).value_BT)
        rewards = []
        for ids, n in rows_of(batch):
            prompt, answer = (run.chat.tokenizer.decode(part) for part in (ids[:-n], ids[-n:]))
            prompts.append(prompt.removeprefix("<user>").removesuffix("<assistant>"))
            left, right = map(int, prompts[-1].replace("-", "+-").split("+"))
            rewards.append(float(answer.removesuffix("<eos>").strip() == str(left + right)))
        for row, (reward, advantage) in enumerate(
            zip(rewards, advantages[:, 0].tolist(), strict=True)
        ):
            others = torch.tensor(rewards[row // 4 * 4 : row // 4 * 4 + 4])
            others = others[torch.arange(4) != row % 4]
            scale = others.std().item() + 1e-6 if others.std() > 0 else 1.0
            assert advantage == pytest.approx((reward - others.mean().item()) / scale, rel=1e-4)
        rewarded.update(rewards)

    spied(monkeypatch, run, "_update", check)
    spied(monkeypatch, run.engine, "generate", lambda rows, *args: asked.append(rows))
    run.train(lambda row: None)
    split = arithmetic(1, 3)
    held_out = [each.input for each in split.validation]
    assert rewarded == {0.0, 1.0} and not set(held_out) & set(prompts)
    assert prompts == [each.input for each in split.train[:16] for _ in range(4)]
    assert len(asked) == 3 and asked[2] == [run.chat.prompt(text) for text in held_out]


def test_rewarded_answers_become_likelier_and_others_less(make_plan):
    run = run_of(make_plan("precision=bf16", "grpo.prompts_per_step=8", "grpo.steps=6"))
    run._refit(0)
    problems = [each for each in run._problems_of(0, 8) for _ in range(2)]
    answered = run._answered(problems, torch.Generator().manual_seed(1))
    batch, right = answered.batch, answered.right_B == 1
    assert 5 < right.sum() < len(right) - 5
    before = run.policy.logprobs(batch).sum(1)
    run.train(lambda row: None)
    gain = run.policy.logprobs(batch).sum(1) - before
    assert gain[right].mean() > max(0.02, gain[~right].mean() + 0.1)


def test_tokens_are_drawn_as_often_as_their_logprobs_say(make_plan):
    run, draws = run_of(make_plan("precision=bf16", "grpo.max_new_tokens=1")), 20_000
    run._refit(0)
    forward, one = run.engine.model.forward, slice(1)
    shapes = ("input_ids", "attention_mask", "position_ids")

    def of_one_row(**given):
        """All rows are alike, so one is enough."""
        found = forward(**given | {name: given[name][one] for name in shapes})
        found.logits = found.logits.expand(draws, -1, -1)
        return found

    run.engine.model.forward = of_one_row
    prompts = [run.chat.prompt("38+47")] * draws
    batch = run.engine.generate(prompts, run.chat, 1, torch.Generator().manual_seed(0))
    _, index, counts = batch.responses_BR[:, 0].unique(return_inverse=True, return_counts=True)
    reported = torch.zeros(len(counts)).scatter(0, index, batch.rollout_BR[:, 0]).exp()
    sigma = (draws * reported * (1 - reported)).sqrt() + 1
    assert reported.max() < 0.9 and reported.sum() > 0.999
    assert ((counts - draws * reported).abs() < 5 * sigma).all()


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3-moe"])
@pytest.mark.parametrize("fp8", ["bf16", "fp8"])
def test_both_sides_compute_the_stock_model_of_the_weights_that_they_hold(model, fp8):
    precision, cpu = Precision(rollout_linear=fp8, train_linear=fp8), torch.device("cpu")
    policy = policy_module.Policy(SHIPPED / model, precision, 1e-4, cpu)
    engine = Engine(policy.model.config, precision, cpu)
    engine.refit(refit_stream(policy.named_weights(), precision, None, num_layers=2), "bytes")
    chat, stock = Chat.load(SHIPPED / model), stock_model(model)
    prompts = [chat.prompt(text) for text in ["12+7", "98-45", "5+5", "71-8", "33+48"] * 12]
    batch = engine.generate(prompts, chat, 6, torch.Generator().manual_seed(0))
    for name, weight in stock.named_parameters():
        if weights.is_quantized_weight(name, tuple(weight.shape), precision, 2):
            weight.data = dequantize_blocks(quantize_blocks(weight.data))
    expected = torch.cat(stock_logprobs(stock, batch)).detach()
    # What is left is the rounding of activations to BF16 (2^-9 each time, median 0.004 in all) or
    # to FP8 (0.007), and a rare token whose router was at a tie. Experts without their router
    # weights, or with gate and up swapped, are 0.3 off in the median.
    for found in (policy.logprobs(batch), batch.rollout_BR):
        difference = (found[batch.response_mask_BR] - expected).abs()
        assert difference.median() < 0.02 and difference.mean() < 0.05


@pytest.mark.parametrize("source", ["logprob", "forward"])
@pytest.mark.parametrize("history", [1, 2])
def test_kv_scales_follow_from_the_ranges_attention_showed(make_plan, monkeypatch, source, history):
    options = {"source": source, "history": history, "margin": 1.02, "first_margin": 1.03}
    arguments = [f"glue.recalibrate.{key}={value}" for key, value in options.items()]
    arguments += ["precision=fp8-e2e-kv-attn", "grpo.steps=3", "grpo.learning_rate=1.0e-3"]
    run = run_of(make_plan(*arguments))
    events, maxima, sent, rows, saturated, refit = [[]], [{}], [], [], [], run.engine.refit

    def on_observe(observer, layer, *qkv, mask_BT):
        events[-1].append("observe")
        for name, x in zip(weights.kv_scale_names(layer), qkv, strict=True):
            seen = x.transpose(1, 2)[mask_BT].abs().max().item()
            maxima[-1][name] = max(seen, maxima[-1].get(name, 0.0))

    def on_refit(stream, verify, number):
        held = list(stream)
        sent.append({name: float(scale) for name, scale in held if name in maxima[-1]})
        events.append([]), maxima.append({})
        return refit(held, verify, number)

    spied(monkeypatch, AmaxObserver, "observe", on_observe)
    spied(monkeypatch, run.policy, "update", lambda *_: events[-1].append("update"))
    monkeypatch.setattr(run.engine, "refit", on_refit)
    run.train(rows.append)
    seen = ["observe", "observe"]  # once per layer, on one side of the update
    step = [*seen, "update"] if source == "logprob" else ["update", *seen]
    assert events == [seen, step, step, step, []]
    assert sent[0] == pytest.approx({name: 1.03 * x / 448 for name, x in maxima[0].items()})
    for k in (1, 2, 3):
        past = maxima[max(0, k + 1 - history) : k + 1]
        expected = {name: 1.02 * max(each[name] for each in past) / 448 for name in maxima[0]}
        assert sent[k] == pytest.approx(expected, rel=1e-6)
        saturated.append(sum(maxima[k][name] / 448 > s for name, s in sent[k - 1].items()) / 6)
    assert [row["recalibrate/saturated_fraction"] for row in rows[1:]] == pytest.approx(saturated)
    assert max(saturated) > 0 and any(maxima[2][name] < x for name, x in maxima[1].items())


def test_the_rate_rises_from_a_tenth_as_megatrons_schedule_and_the_gradient_is_clipped(
    make_plan, monkeypatch
):
    words = ["grpo.steps=4", "grpo.warmup_steps=2", "grpo.max_grad_norm=0.125", "precision=bf16"]
    run = run_of(make_plan(*words, "grpo.learning_rate=1.0e-3", "grpo.updates_per_step=2"))
    rates, norms = [], []

    def note():
        rates.append(run.policy.optimizer.param_groups[0]["lr"])
        grads = [each.grad.norm() for each in run.policy.masters.values()]
        norms.append(torch.stack(grads).norm().item())

    spied(monkeypatch, run.policy.optimizer, "step", note)
    run.train(lambda row: None)
    assert rates == pytest.approx([1e-4] * 2 + [5.5e-4] * 2 + [1e-3] * 4)
    moved = [norm for norm in norms if norm]  # where answers differ
    assert len(moved) > 3 and moved == pytest.approx([0.125] * len(moved), rel=1e-3)
