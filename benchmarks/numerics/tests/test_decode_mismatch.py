"""The KL of benchmarks.numerics.decode_mismatch, of samples whose KL is known."""

import math
import random

import pytest

from benchmarks.numerics.decode_mismatch import distances


def test_the_kl_of_tokens_is_that_of_the_distributions_they_came_from():
    sampler, judge = [0.7, 0.2, 0.1], [0.5, 0.25, 0.25]
    draw = random.Random(0)
    tokens = draw.choices(range(3), sampler, k=100_000)
    found = distances([math.log(judge[each] / sampler[each]) for each in tokens])
    true = sum(p * math.log(p / q) for p, q in zip(sampler, judge, strict=True))
    assert found["kl"] == pytest.approx(true, abs=4 * found["standard_error"])
    assert found["standard_error"] < 0.02 * true
    assert found["largest"] == pytest.approx(math.log(2.5)) and found["tokens"] == 100_000


def test_nothing_apart_is_a_kl_of_nothing():
    assert distances([0.0, 0.0])["kl"] == distances([0.0, 0.0])["mean_absolute"] == 0
