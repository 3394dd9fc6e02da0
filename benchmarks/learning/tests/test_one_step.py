"""One step from a checkpoint: against the training loop, against many samples, against sums."""

import json
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks.learning.one_step import __main__ as one_step
from benchmarks.learning.one_step.expected import (
    expected_by_sequence,
    expected_gradients,
    mean_advantages,
    places,
)
from benchmarks.learning.one_step.judge import page_table, ratio_of, summary, told
from benchmarks.learning.one_step.measure import Bench, above, different, multiplied
from benchmarks.learning.one_step.moments import ABOVE, BELOW, Moments
from benchmarks.learning.one_step.starts import Start, Study, flat
from benchmarks.numerics.sources import answered
from fp8_nemo.correction.correct import correct
from fp8_nemo.correction.mismatch import LogprobPair, ratio
from fp8_nemo.local.grpo import GrpoLoop
from fp8_nemo.local.loss import group_advantages
from fp8_nemo.local.rollout import rewarded
from fp8_nemo.recipe.problems import reward
from fp8_nemo.report.compare import markdown_table

ROOT = Path(__file__).parents[3]
STUDY = Study("tiny-llama", 1, 1e-4, steps=(1,), repetitions=2, prompts=16)


@pytest.fixture(scope="module")
def bench():
    found = Bench(STUDY)
    found.held_out = found.held_out.of(slice(32))
    return found


@pytest.fixture(scope="module")
def start(bench):
    """After one update of BF16, so that there are moments."""
    policy = bench.policies["bf16"]
    policy.update(bench.held_out.of(slice(32)), lambda current_BR, part: -current_BR.mean() / 32)
    found = Start.of(policy)
    bench._set_scales(found, 1)
    return found


def cosine(one_N, other_N):
    return float(one_N @ other_N / (one_N.norm() * other_N.norm()))


def coarse(bench, start, factor=0.5):
    """An FP8 engine whose scales are far too small: its mismatch is that of no healthy run."""
    start.put(bench.policies["bf16"])
    before, bench.scales = bench.scales, {k: factor * v for k, v in bench.scales.items()}
    bench._refit("fp8-kv-attn")
    bench.scales = before
    return bench.engines["fp8-kv-attn"]


def wide(bench, **settings):
    """The same bench with other settings of its study."""
    other = Bench.__new__(Bench)
    other.__dict__ |= bench.__dict__ | {"study": replace(STUDY, **settings)}
    return other


def sampled(bench, engine, problems, seed):
    G = bench.settled.generations_per_prompt
    asked = [each for each in problems for _ in range(G)]
    prompts = [bench.chat.prompt(each.input) for each in asked]
    batch = engine.generate(prompts, bench.chat, 8, torch.Generator().manual_seed(seed))
    found = rewarded(batch, asked, bench.chat, bench.algorithm, 8, reward)
    return batch, found.rewards_B.view(-1, G)


@pytest.mark.parametrize("updates", [1, 4])
@pytest.mark.parametrize("correction", ["none", "mis", "seq-tis"])
def test_a_step_on_different_answers_is_the_loops_step_on_all_of_them(
    bench, start, tmp_path, updates, correction
):
    study = replace(STUDY, updates=updates)
    loop = GrpoLoop(study.plan("fp8-kv-attn", correction), tmp_path)
    batch, rewards_PG = sampled(bench, coarse(bench, start), bench.problems.train[:16], 5)
    answers = different(batch, rewards_PG, bench.algorithm)
    assert len(answers.prompt_B) < 0.8 * len(batch.tokens_BT) == 0.8 * answers.count_B1.sum()

    momentum = updates > 1
    start.put(loop.policy, momentum=momentum)
    train_BR = loop.policy.logprobs(batch)
    pair = LogprobPair(train_BR, batch.rollout_BR, batch.response_mask_BR)
    advantages = group_advantages(rewards_PG, bench.algorithm)[:, None]
    found = correct(pair, bench.corrections[correction])
    row = loop._update(batch, advantages, train_BR, None, found)

    other = wide(bench, updates=updates)
    train_BR = start.put(other.policies["bf16"]).logprobs(answers.batch)
    pair = LogprobPair(train_BR, answers.batch.rollout_BR, answers.batch.response_mask_BR)
    value_BR = correct(pair, bench.corrections[correction]).value_BT
    gradient_N = other._update(start, "bf16", answers, train_BR, value_BR)
    if updates == 1:
        assert float(gradient_N.norm()) == pytest.approx(row["train/grad_norm"], rel=1e-2)
        looped = {name: each.grad for name, each in loop.policy.masters.items()}
        assert cosine(gradient_N, flat(looped)) > 0.9999
    moved_N, looped_N = (
        flat(each.masters) - flat(start.masters) for each in (other.policies["bf16"], loop.policy)
    )
    assert cosine(moved_N, looped_N) > 0.995
    assert float(moved_N.norm()) == pytest.approx(float(looped_N.norm()), rel=2e-2)


def test_the_expected_gradient_of_bf16_is_the_same_from_probabilities_and_from_next_tokens(
    bench, start
):
    problems = bench.problems.train[:16]
    policy = start.put(bench.policies["bf16"])
    bench._refit("bf16")
    answers, *_, there = given(bench, bench.engines["bf16"], problems, 1, 3)
    none = {"none": partial(multiplied, bench.corrections["none"])}
    by_token = expected_gradients(policy, there, none)["none"]
    length = float(answers.tokens_BR.sum() / answers.count_B1.sum())
    truth_N = bench.expected_gradient(start, problems, length)
    assert cosine(by_token, truth_N) > 0.999
    assert float(by_token.norm()) == pytest.approx(float(truth_N.norm()), rel=0.01)
    # And many samples come to it: what is left is their noise.
    moments = Moments(truth_N / truth_N.norm())
    for seed in range(12):
        batch, rewards_PG = sampled(bench, bench.engines["bf16"], problems, seed)
        answers = different(batch, rewards_PG, bench.algorithm)
        train_BR = start.put(policy).logprobs(answers.batch)
        ones_BR = answers.batch.response_mask_BR.float()
        found_N = bench._update(start, "bf16", answers, train_BR, ones_BR)
        moments.add((found_N - truth_N) / truth_N.norm())
    found = moments.found()
    error = (found["noise"] / 12) ** 0.5
    assert abs(found["along"]) < 2 * error and abs(found["across"]) < error**2, (found, error)


def given(bench, engine, problems, repeats, seed):
    """Answers of an engine to problems, right ones, whose they are, their shares and places."""
    batch, rewards_PG = sampled(bench, engine, problems * repeats, seed)
    answers = different(batch, rewards_PG, bench.algorithm)
    at_B = answers.prompt_B % len(problems)
    share_B, right = bench._shares(answers) / repeats, answered(problems, bench.chat)
    pad, G = bench.chat.pad, bench.settled.generations_per_prompt
    there = places(engine.model, right, answers.batch, at_B, share_B, G, bench.algorithm, pad)
    return answers, right, at_B, share_B, there


@pytest.fixture(scope="module")
def bad(bench, start):
    """Many answers of a bad engine to eight problems."""
    return given(bench, coarse(bench, start), bench.problems.train[:8], 100, 7)


@pytest.mark.long
@pytest.mark.parametrize("correction", ["none", "tis", "mis"])
def test_many_samples_of_a_bad_engine_come_to_its_expected_gradient(bench, start, bad, correction):
    answers, *_, there = bad
    bench = wide(bench, prompts=800)
    train_BR = start.put(bench.policies["bf16"]).logprobs(answers.batch)
    pair = LogprobPair(train_BR, answers.batch.rollout_BR, answers.batch.response_mask_BR)
    value_BR = correct(pair, bench.corrections[correction]).value_BT
    kl = (-pair.log_ratio_BT * answers.tokens_BR).sum() / answers.tokens_BR.sum()
    assert kl > 0.1
    found_N = bench._update(start, "bf16", answers, train_BR, value_BR)
    policy = start.put(bench.policies["bf16"])
    by_name = {"it": partial(multiplied, bench.corrections[correction])}
    expected_N = expected_gradients(policy, there, by_name)["it"]
    assert cosine(found_N, expected_N) > 0.98
    assert float(found_N.norm() / expected_N.norm()) == pytest.approx(1, abs=0.03)


@pytest.mark.long
def test_truncated_sequence_ratios_are_halves_where_all_are_above_a_half(bench, start):
    start.put(bench.policies["bf16"])
    bench._refit("fp8-kv-attn")
    engine = bench.engines["fp8-kv-attn"]
    answers, right, at_B, share_B, there = given(bench, engine, bench.problems.train[:8], 40, 7)
    policy = start.put(bench.policies["bf16"])
    half_N, whole_N = (
        expected_by_sequence(policy, right, there, answers.batch, at_B, share_B, most)
        for most in (0.5, 2.0)
    )
    assert cosine(half_N, whole_N) > 0.9
    assert float(half_N.norm() / whole_N.norm()) == pytest.approx(0.5, abs=0.07)


def test_what_mis_drops_is_what_tis_has_below_and_above_its_bounds(bench, start):
    *_, there = given(bench, coarse(bench, start), bench.problems.train[:16], 1, 5)
    tis = bench.corrections["tis"]
    multipliers = {name: partial(multiplied, bench.corrections[name]) for name in ("tis", "mis")}
    multipliers[ABOVE] = partial(above, tis)
    multipliers[BELOW] = lambda pair: multiplied(tis, pair) * (ratio(pair.log_ratio_BT) < 0.5)
    found = expected_gradients(start.put(bench.policies["bf16"]), there, multipliers)
    less_N = found["tis"] - found["mis"]
    assert min(float(found[side].norm() / less_N.norm()) for side in (BELOW, ABOVE)) > 0.01
    assert cosine(less_N, found[BELOW] + found[ABOVE]) > 0.999


def test_mean_advantages_are_those_over_all_that_the_others_may_earn(bench):
    p_P = torch.tensor([0.05, 0.5, 0.9])
    for at, p in enumerate(p_P.tolist()):
        for first, found in zip((1.0, 0.0), mean_advantages(p_P, 4, bench.algorithm), strict=True):
            expected = 0.0
            for others in product((0.0, 1.0), repeat=3):
                chance = torch.tensor([p if each else 1 - p for each in others]).prod()
                rewards_PG = torch.tensor([[first, *others]])
                expected += float(chance * group_advantages(rewards_PG, bench.algorithm)[0])
            assert float(found[at]) == pytest.approx(expected, rel=1e-5)


def test_a_squared_bias_is_free_of_noise_and_told_apart_along_and_across():
    draw, bias = torch.Generator().manual_seed(1), torch.tensor([0.3, 0.4, 0.0, 0.0])
    across, along, noise = [], [], []
    for _ in range(4000):
        moments = Moments(torch.tensor([1.0, 0.0, 0.0, 0.0]))
        for _ in range(3):
            moments.add(bias + torch.randn(4, generator=draw))
        found = moments.found()
        across.append(found["across"]), along.append(found["along"]), noise.append(found["noise"])
    mean = [float(torch.tensor(each).mean()) for each in (across, along, noise)]
    assert mean == pytest.approx([0.16, 0.3, 4.0], abs=0.05)


@pytest.fixture(scope="module")
def checkpoint(bench, start):
    return bench.checkpoint(start, 1)


def test_a_checkpoint_has_every_cell_and_fp8_on_both_sides_has_no_mismatch(checkpoint):
    cells = {tuple(each["cell"]): each for each in checkpoint["cells"]}
    assert len(cells) == 12 + 4
    accuracy = checkpoint["accuracy"]
    assert accuracy["bf16"] == pytest.approx(accuracy["trainer"], abs=0.01)
    assert abs(accuracy["fp8-kv-attn"] - accuracy["trainer"]) > 0.01
    same = [cells["fp8-e2e", name]["repetitions"] for name in ("none", "tis")]
    assert same[0][0]["norm"] == same[1][0]["norm"]
    linear, unified = (cells[name, "none"]["repetitions"][0] for name in ("fp8-linear", "fp8-e2e"))
    assert linear["kl"] > 1e-4 > 1e-8 > unified["kl"]
    assert cells["bf16", "none"]["expected from BF16"]["along"] == 0


def test_a_summary_compares_cells_at_the_same_checkpoint(checkpoint):
    def moved(by, step):
        """The checkpoint, all accuracies and gains higher by some points: a better step for all."""
        cells = json.loads(json.dumps(checkpoint["cells"]))
        for cell in cells:
            for each in cell["repetitions"]:
                each |= {
                    name: each[name] + by
                    for name in ("in BF16", "in its own engine")
                    if name in each
                }
        return {"study": "s", "step": step, "cells": cells}

    rows = {each["cell"]: each for each in summary([moved(0, 1), moved(9, 2), moved(-9, 3)])}
    kv, base = rows["fp8-kv-attn-mis"], rows["bf16-none"]
    assert base["in BF16, from BF16"] == {"mean": 0, "error": 0} == base["along"]
    assert base["expected gain"]["mean"] == 0 != kv["expected gain"]["mean"]
    assert kv["in BF16, from BF16"]["error"] == pytest.approx(0, abs=1e-9)
    assert rows[f"fp8-kv-attn-{ABOVE}"].keys().isdisjoint({"cosine", "in BF16, from BF16"})


def test_a_ratio_of_sums_has_the_jackknifes_error():
    found = ratio_of([2.0, 4.0, 9.0], [1.0, 2.0, 3.0])
    without = [13 / 5, 11 / 4, 6 / 3]
    mean = sum(without) / 3
    expected = (2 / 3 * sum((each - mean) ** 2 for each in without)) ** 0.5
    assert found == (pytest.approx(2.5), pytest.approx(expected))


def test_a_mean_advantage_is_one_of_tokens_and_not_of_steps():
    steps = [{"masked share": 0.03, "masked advantage": -1.0}, {"masked share": 0.0}]
    steps += [{"masked share": 0.01, "masked advantage": 2.0}]
    found = told([{"repetitions": steps[:2]}, {"repetitions": steps[2:]}])
    assert found["masked share"].mean == pytest.approx(100 * (0.015 + 0.01) / 2)
    assert found["masked advantage"].mean == pytest.approx(-0.25) and "clipped share" not in found


def test_the_page_shows_the_table_of_the_results():
    rows = json.loads((ROOT / "benchmarks/results/one-step-cpu.json").read_text())["summary"]
    page = (ROOT / "docs/research/one-step.md").read_text()
    assert markdown_table(page_table(rows)) in page


def test_a_bench_that_was_stopped_goes_on_behind_its_last_checkpoint(
    monkeypatch, tmp_path, checkpoint
):
    study = replace(STUDY, steps=(2, 1))
    done, out = list[int](), tmp_path / "found.json"

    def once(self, start, number):
        if done == [2]:
            done.append(0)
            raise KeyboardInterrupt
        done.append(number)
        return checkpoint

    monkeypatch.setattr(one_step, "STUDIES", {"s": study})
    monkeypatch.setattr(Bench, "checkpoint", once)
    words = ["one_step", "--folder", str(tmp_path / "runs"), "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(KeyboardInterrupt):
        one_step.main()
    assert [each["step"] for each in json.loads(out.read_text())["checkpoints"]] == [2]
    one_step.main()
    assert done == [2, 0, 1]
    found = json.loads(out.read_text())
    assert [each["step"] for each in found["checkpoints"]] == [2, 1] and found["summary"]
    assert found["started"] <= found["ended"] and found["checkpoints"][0]["sources"]["one_step"]
