"""Every option and modifier of the correction: closed forms, and a restatement without tensors.

The restatement below walks over sequences of real tokens and follows the design's text: truncate,
normalize, mask, veto; bounds inclusive and on `train / rollout` itself. Whether a token is kept or
clipped must agree exactly; values to the last two bits of FP32, as two libraries' `exp` differ.
"""

import dataclasses
import math
from itertools import product

import numpy as np
import pytest
import torch

from fp8_nemo.correction.correct import STATISTICS, correct, correction_metrics
from fp8_nemo.correction.mismatch import LogprobPair
from fp8_nemo.recipe.options.correction import DIVERGENCES, RATIOS, Correction

OPTIONS = {
    "none": Correction(),
    "tis": Correction(level="token", truncate=2.0),
    "mis": Correction(level="token", mask="token", low=0.5, high=2.0),
    "seq-tis": Correction(level="sequence", truncate=2.0),
    "seq-mis": Correction(level="sequence", mask="sequence", low=0.5, high=2.0),
    "geo-mis": Correction(level="token", truncate=2.0, mask="geometric", low=0.99, high=1.01),
}
LEVELS = ["none", "token", "sequence", "geometric"]
BOUNDS = [(0.8, None), (None, 1.25), (0.7, 1.3)]
LOG = {r: math.log(r) for r in (0.25, 0.5, 2, 4, 8)}
CORRECTION_KEYS = ["multiplier_mean", "ess", "clipped_fraction", "masked_fraction"]


def pair_of(log_ratio_BT, mask_BT=None):
    train_BT = torch.tensor(log_ratio_BT, dtype=torch.float64)
    mask_BT = torch.ones_like(train_BT) if mask_BT is None else torch.tensor(mask_BT)
    return LogprobPair(train_BT, torch.zeros_like(train_BT), mask_BT.bool())


def values(log_ratio_BT, correction, mask_BT=None):
    return correct(pair_of(log_ratio_BT, mask_BT), correction).value_BT.tolist()


def changed(option, **fields):
    return dataclasses.replace(OPTIONS[option], **fields)


def clamped(x):
    return min(max(x, -20.0), 20.0)


def aggregate(level, sequence, t):
    """The statistic of token t of one sequence of real tokens' log ratios."""
    x = {"none": 0.0, "token": sequence[t], "sequence": math.fsum(sequence)}
    x["geometric"] = x["sequence"] / len(sequence)
    if level in x:
        return math.exp(clamped(x[level]))
    of, _, kind = level.partition("-")
    distance = {
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.expm1(x) - x,
        "error": lambda x: math.exp(abs(x)),
    }[kind]
    each = [distance(clamped(x)) for x in sequence]
    total = math.fsum(each)
    return {"token": each[t], "sum": total, "mean": total / len(each), "max": max(each)}[of]


def restated(sequences, c):
    """Per sequence and token `(multiplier, kept, clipped)`."""
    raw = [[aggregate(c.level, s, t) for t in range(len(s))] for s in sequences]
    least, most = c.truncate_low or 0.0, math.inf if c.truncate is None else c.truncate
    value = [[max(least, min(r, most)) for r in row] for row in raw]
    by_token = c.level in ("none", "token")
    samples = [v for row in value for v in (row if by_token else row[:1])]
    mean = sum(samples) / len(samples) if c.normalize and samples else 1.0
    low, high = c.low or 0.0, math.inf if c.high is None else c.high
    rows = []
    for s, raw_row, row in zip(sequences, raw, value, strict=True):
        kept = [c.mask == "none" or low <= aggregate(c.mask, s, t) <= high for t in range(len(s))]
        if c.veto is not None and any(aggregate("token", s, t) < c.veto for t in range(len(s))):
            kept = [False] * len(s)
        rows.append(
            [
                (v / mean * k, k, not least <= r <= most)
                for v, k, r in zip(row, kept, raw_row, strict=True)
            ]
        )
    return rows


def assert_agrees(pair, c):
    found, mask_BT = correct(pair, c), pair.mask_BT
    sequences = [x[m].tolist() for x, m in zip(pair.log_ratio_BT, mask_BT, strict=True)]
    wanted = np.array([each for row in restated(sequences, c) for each in row]).reshape(-1, 3)
    np.testing.assert_allclose(found.value_BT[mask_BT], wanted[:, 0], rtol=2**-22)
    np.testing.assert_array_equal(found.kept_BT[mask_BT], wanted[:, 1])
    np.testing.assert_array_equal(found.clipped_BT[mask_BT], wanted[:, 2])
    for padded in (found.value_BT, found.kept_BT, found.clipped_BT):
        assert not padded[~mask_BT].any()


@pytest.fixture(scope="module")
def batches():
    """Random batches with ragged and empty sequences, padding in the middle, NaN in the padding."""
    random, made = np.random.default_rng(7), []
    for spread, share in ((0.02, 0.9), (0.4, 0.6), (0.4, 0.0)):
        mask_BT = random.random((6, 9)) < share
        mask_BT[2] = False
        rollout_BT = -random.exponential(1.0, (6, 9)).astype(np.float32)
        train_BT = np.where(mask_BT, rollout_BT + random.normal(0, spread, (6, 9)), np.nan)
        made.append(LogprobPair(*map(torch.tensor, (train_BT, rollout_BT, mask_BT))))
    return made


@pytest.mark.parametrize("name", list(OPTIONS))
def test_every_option_agrees_with_the_restatement(name, batches):
    for pair, veto, renormalize in product(batches, (None, 0.6), (False, True)):
        assert_agrees(pair, changed(name, veto=veto, renormalize_denominator=renormalize))


@pytest.mark.parametrize("mask", LEVELS)
@pytest.mark.parametrize("level", LEVELS)
def test_every_combination_of_modifiers_agrees_with_the_restatement(level, mask, batches):
    bounds = [(None, None)] if mask == "none" else BOUNDS
    shapes = [(None, False)] if level == "none" else product((None, 1.1), (False, True))
    for (truncate, normalize), (low, high), veto in product(shapes, bounds, (None, 0.6)):
        fields = {"truncate": truncate, "low": low, "high": high, "veto": veto}
        for pair in batches:
            assert_agrees(pair, Correction(level=level, mask=mask, normalize=normalize, **fields))


@pytest.mark.parametrize("mask", DIVERGENCES)
@pytest.mark.parametrize("level", ["none", "token"])
def test_every_distance_agrees_with_the_restatement(level, mask, batches):
    for pair, high in product(batches, (0.02, 1.02)):
        assert_agrees(pair, Correction(level=level, mask=mask, high=high, veto=0.6))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_ratio_is_raised_to_its_lower_bound_before_the_mean_is_taken(level, batches):
    for pair, most, normalize in product(batches, (None, 1.1), (False, True)):
        bounds = {"truncate_low": 0.9, "truncate": most, "normalize": normalize}
        assert_agrees(pair, Correction(level=level, **bounds))


@pytest.mark.parametrize(
    ("mask", "wanted"),
    [
        ("token-k2", [[LOG[4] ** 2 / 2, LOG[0.5] ** 2 / 2]]),
        ("sum-k3", [[4 - 1 - LOG[4] + 0.5 - 1 - LOG[0.5]] * 2]),
        ("mean-k3", [[(4 - 1 - LOG[4] + 0.5 - 1 - LOG[0.5]) / 2] * 2]),
        ("max-k2", [[LOG[4] ** 2 / 2] * 2]),
        ("mean-error", [[(4 + 2) / 2] * 2]),
    ],
)
def test_distances_in_closed_form(mask, wanted):
    found = STATISTICS[mask](pair_of([[LOG[4], LOG[0.5]]]))
    np.testing.assert_allclose(found, wanted, rtol=1e-14)


def test_every_statistic_that_a_recipe_may_name_is_a_row_of_the_table():
    assert set(STATISTICS) == {*RATIOS, *DIVERGENCES}


X = [[LOG[4], LOG[0.5]], [LOG[0.25], LOG[2]]]  # token ratios 4, 1/2; 1/4, 2: sequences 2, 1/2


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("none", [[1, 1], [1, 1]]),
        ("tis", [[2, 0.5], [0.25, 2]]),
        ("mis", [[0, 0.5], [0, 2]]),
        ("seq-tis", [[2, 2], [0.5, 0.5]]),
        ("seq-mis", [[2, 2], [0.5, 0.5]]),
        ("geo-mis", [[0, 0], [0, 0]]),
    ],
)
def test_every_option_in_closed_form(name, wanted):
    assert values(X, OPTIONS[name]) == wanted
    assert values([[0.0, 0.0]], OPTIONS[name]) == [[1.0, 1.0]]


def test_the_sequence_ratio_is_a_product_and_the_geometric_one_its_root_over_real_tokens():
    x, mask = [[LOG[2], 9.0, LOG[4]], [9.0, LOG[0.5], LOG[0.5]]], [[1, 0, 1], [0, 1, 1]]
    assert values(x, Correction(level="sequence"), mask) == [[8, 0, 8], [0, 0.25, 0.25]]
    geometric = values(x, Correction(level="geometric"), mask)
    assert geometric == [[pytest.approx(8**0.5), 0, pytest.approx(8**0.5)], [0, 0.5, 0.5]]


def test_truncation_comes_before_normalization():
    normalized = changed("tis", normalize=True)
    assert values([[LOG[4], 0.0]], normalized) == [[pytest.approx(4 / 3), pytest.approx(2 / 3)]]


def test_the_mask_sees_the_unmodified_ratio_and_leaves_the_mean_alone():
    masked = changed("tis", normalize=True, mask="token", high=2.0)
    assert values([[LOG[4], 0.0]], masked) == [[0.0, pytest.approx(2 / 3)]]


def test_a_veto_drops_the_whole_sequence_and_leaves_the_mean_alone():
    vetoed = changed("tis", normalize=True, veto=0.3)
    assert values(X, vetoed) == [[pytest.approx(2 / 1.1875), pytest.approx(0.5 / 1.1875)], [0, 0]]


def test_normalization_at_sequence_level_weighs_sequences_not_tokens():
    x, mask = [[LOG[4], 0.0, 0.0], [0.0, 5.0, 5.0], [5.0] * 3], [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    by_sequence = values(x, Correction(level="sequence", normalize=True), mask)
    assert by_sequence[0][0] == pytest.approx(4 / 2.5) and by_sequence[1][0] == pytest.approx(
        1 / 2.5
    )
    by_token = values(x, Correction(level="token", normalize=True), mask)
    assert by_token[0][0] == pytest.approx(4 / 1.75) and by_token[1][0] == pytest.approx(1 / 1.75)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_bounds_are_inclusive_and_on_train_over_rollout(level):
    x = [[0.5, -0.5]] if level != "token" else [[0.0, 0.0]]  # every aggregate is a ratio of 1
    above, below = math.nextafter(1, 2), math.nextafter(1, 0)
    for low, high, kept in [(1.0, 1.0, 1), (above, None, 0), (None, below, 0), (1.0, None, 1)]:
        multiplier = correct(pair_of(x), Correction(mask=level, low=low, high=high))
        assert multiplier.kept_BT.tolist() == [[bool(kept)] * 2]
    sides = [Correction(mask=level, low=1.5), Correction(mask=level, high=1.5)]
    kept_BT = [correct(pair_of([[LOG[2]], [LOG[0.5]]]), each).kept_BT.tolist() for each in sides]
    assert kept_BT == [[[True], [False]], [[False], [True]]]


def test_truncation_and_veto_at_their_own_bound_change_nothing():
    at_bound = correct(pair_of([[0.0]]), Correction(level="token", truncate=1.0, veto=1.0))
    assert (at_bound.kept_BT.item(), at_bound.clipped_BT.item()) == (True, False)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("level", LEVELS)
def test_ratios_at_the_clamp_do_not_overflow(level, sign):
    pair = pair_of([[sign * 1000.0] * 64] * 8)
    for normalize in (False, True):
        correction = Correction(level=level, normalize=normalize)
        multiplier = correct(pair, correction)
        found = correction_metrics(multiplier, pair, correction)
        divided = normalize and sign > 0  # exp(-20) is thrown away
        mean = 1.0 if divided or level == "none" else math.exp(sign * 20)
        assert found["correction/multiplier_mean"] == pytest.approx(mean, rel=1e-7)
        assert found["correction/ess"] == pytest.approx(1.0, rel=1e-12)


def test_multipliers_are_fp32_and_carry_no_gradient():
    train_BT = torch.zeros(2, 3, requires_grad=True)
    pair = LogprobPair(train_BT, torch.full((2, 3), -0.1), torch.ones(2, 3).bool())
    multiplier = correct(pair, changed("geo-mis", normalize=True))
    assert multiplier.value_BT.dtype == torch.float32 and not multiplier.value_BT.requires_grad


def metrics(log_ratio_BT, correction, mask_BT=None):
    pair = pair_of(log_ratio_BT, mask_BT)
    found = correction_metrics(correct(pair, correction), pair, correction)
    assert list(found) == [f"correction/{key}" for key in CORRECTION_KEYS]
    return list(found.values())


def test_metrics_at_token_level_count_real_tokens():
    x, mask = [[LOG[8], 0.0, 9.0], [0.0, LOG[0.25], 9.0]], [[1, 1, 0], [1, 1, 0]]
    masked = changed("tis", mask="token", low=0.5)
    assert metrics(x, masked, mask) == [4 / 4, 4**2 / (4 * 6), 1 / 4, 1 / 4]
    assert metrics(x, OPTIONS["none"], mask) == [1.0, 1.0, 0.0, 0.0]


def test_ess_at_sequence_level_counts_sequences_that_have_a_real_token():
    x, mask = [[LOG[2], 0.0, 0.0], [LOG[8], 9.0, 9.0], [9.0] * 3], [[1, 1, 1], [1, 0, 0], [0] * 3]
    assert metrics(x, OPTIONS["seq-mis"], mask) == [6 / 4, 0.5, 0.0, 1 / 4]
    assert metrics(x, OPTIONS["seq-tis"], mask) == [2.0, 1.0, 1 / 4, 0.0]


def test_a_batch_that_is_rejected_whole_has_multipliers_and_ess_of_zero():
    assert metrics(X, OPTIONS["geo-mis"]) == [0.0, 0.0, 1 / 4, 1.0]


@pytest.mark.parametrize("name", list(OPTIONS))
def test_a_batch_without_real_tokens_has_multipliers_of_zero_and_no_metrics(name):
    pair = pair_of([[1.0, 2.0]], [[0, 0]])
    for normalize in (False, True):
        multiplier = correct(pair, changed(name, normalize=normalize))
        assert multiplier.value_BT.tolist() == [[0.0, 0.0]] and not multiplier.kept_BT.any()
        assert correction_metrics(multiplier, pair, OPTIONS[name]) == {}


def test_a_batch_that_a_correction_has_thrown_away_gets_no_weight_back():
    """As in verl: 4 sequences of 2,000 tokens, each a little less likely to the trainer."""
    thrown = changed("seq-tis", normalize=True)
    [value, *_] = values([[-0.02] * 2000] * 4, thrown)[0]
    assert 0 < value < 1e-8
    [value, *_] = values([[-0.02] * 500] * 4, thrown)[0]
    assert value == pytest.approx(1.0), "what is small and not lost is divided by its mean"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mask", ["none", "token", "max-k2", "max-k3", "mean-k3"])
def test_a_batch_without_a_token_passes_through(level, mask):
    bounds = {} if mask == "none" else {"high": 2.0}
    correction = Correction(level=level, mask=mask, normalize=level != "none", **bounds)
    empty = torch.zeros(3, 0)
    found = correct(LogprobPair(empty, empty, empty.bool()), correction)
    assert found.value_BT.shape == found.kept_BT.shape == (3, 0)
