"""Generated weights and log ratios: what quantizing and correcting promise, of any numbers.

A hundred examples of each in `make test`, two thousand in `make test-long`.
"""

import dataclasses
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8_nemo.correction.correct import correct, correction_metrics
from fp8_nemo.correction.mismatch import LogprobPair, mismatch_metrics
from fp8_nemo.glue.quantize import (
    dequantize_blocks,
    dequantize_groups,
    quantize_blocks,
    quantize_groups,
)
from fp8_nemo.recipe.compose import read_options
from tests.search.generated import few_or_many, times

BLOCK = 128
SPACING = 2.0**-9
"""Between two numbers of E4M3 around zero; in a binade it is 2^-3 of its power of two."""
MOST = 3e38
"""Above 15/16 of 2^128 a value is rounded to 2^128, which FP32 has not."""
SCALES = st.sampled_from([1e-38, 1e-30, 1e-6, 0.02, 1.0, 1e4, 1e30, MOST])


@st.composite
def weights(draw) -> torch.Tensor:
    """A weight of one to four blocks, some of them ragged, of any magnitudes, some of them zero."""
    O, I = draw(st.integers(1, 140)), draw(st.integers(1, 140))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight_OI = torch.randn(O, I, generator=noise) * draw(SCALES)
    weight_OI *= torch.rand(O, I, generator=noise) < draw(st.sampled_from([0.0, 0.01, 0.5, 1.0]))
    if draw(st.booleans()):
        weight_OI[draw(st.integers(0, O - 1)), draw(st.integers(0, I - 1))] = draw(SCALES)
    return weight_OI.nan_to_num(0.0).clamp(-MOST, MOST)


@few_or_many(100, 2000)
def test_a_weight_is_held_within_half_a_spacing(number):
    """Held within half a spacing of E4M3, each block by itself; nothing overflows."""

    @times(number)
    @given(weights(), st.booleans())
    def each(weight_OI, pow2):
        fp8_OI, scale_inv_PQ = found = quantize_blocks(weight_OI, pow2=pow2)
        O, I = weight_OI.shape
        assert scale_inv_PQ.shape == (-(-O // BLOCK), -(-I // BLOCK))
        assert scale_inv_PQ.min() > 0 and scale_inv_PQ.max() < math.inf
        assert fp8_OI.float().abs().max() < math.inf
        rounded_OI, held_OI = weight_OI.bfloat16().double(), dequantize_blocks(found).double()
        for p in range(scale_inv_PQ.shape[0]):
            for q in range(scale_inv_PQ.shape[1]):
                at = slice(p * BLOCK, (p + 1) * BLOCK), slice(q * BLOCK, (q + 1) * BLOCK)
                block, scale_inv = rounded_OI[at], scale_inv_PQ[p, q].double()
                alone = quantize_blocks(weight_OI[at].clone(), pow2=pow2)
                bytes_OI = fp8_OI[at].contiguous().view(torch.uint8)
                assert torch.equal(alone.fp8_OI.view(torch.uint8), bytes_OI)
                assert torch.equal(alone.scale_inv_PQ.flatten(), scale_inv_PQ[p, q].reshape(1))
                bound = torch.maximum(block.abs() / 16, scale_inv * SPACING / 2) * (1 + 1e-6)
                beyond = ((held_OI[at] - block).abs() - bound).max()
                assert beyond <= 1e-44, (p, q, scale_inv)
                if not block.any():
                    assert scale_inv == 1
                if pow2:
                    assert math.frexp(scale_inv.item())[0] == 0.5

    each()


@few_or_many(100, 2000)
def test_a_group_is_held_as_if_it_were_alone(number):
    """A row of a group is what it is alone, and its largest value is not clipped."""

    @times(number)
    @given(weights(), st.booleans())
    def each(weight_TI, pow2):
        found = quantize_groups(weight_TI, pow2=pow2)
        held_TI = dequantize_groups(found)
        alone = dequantize_groups(quantize_groups(weight_TI[:1], pow2=pow2))
        assert torch.equal(alone, held_TI[:1])
        assert held_TI.abs().max() < math.inf
        largest = weight_TI.abs().amax()
        assert (held_TI.abs().amax() - largest).abs() <= largest / 16 + 1e-44

    each()


@st.composite
def pairs(draw) -> LogprobPair:
    """A batch of one to four sequences, with padding, near or far from on-policy."""
    B, T = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    number = st.floats(-60, 0, width=32)
    near = st.floats(-1e-7, 1e-7)
    train_BT = torch.tensor(draw(st.lists(number, min_size=B * T, max_size=B * T))).view(B, T)
    if draw(st.booleans()):
        rollout_BT = torch.tensor(draw(st.lists(number, min_size=B * T, max_size=B * T)))
        rollout_BT = rollout_BT.view(B, T)
    else:
        rollout_BT = train_BT.double() + torch.tensor(
            draw(st.lists(near, min_size=B * T, max_size=B * T)), dtype=torch.float64
        ).view(B, T)
    lengths = draw(st.lists(st.integers(0, T), min_size=B, max_size=B))
    mask_BT = torch.arange(T) < torch.tensor(lengths)[:, None]
    return LogprobPair(train_BT, rollout_BT, mask_BT)


CORRECTIONS = read_options("correction")
NORMALIZED = {
    name: dataclasses.replace(each, normalize=True)
    for name, each in CORRECTIONS.items()
    if each.level != "none"
}


@few_or_many(100, 2000)
def test_a_batch_is_corrected_within_bounds(number):
    """In bounds, zero where rejected or padded; padding and the order of sequences say nothing."""

    @times(number)
    @given(pairs(), st.sampled_from(sorted(CORRECTIONS)), st.booleans())
    def each(pair, name, normalize):
        correction = (NORMALIZED if normalize and name in NORMALIZED else CORRECTIONS)[name]
        found, mask_BT = correct(pair, correction), pair.mask_BT
        value_BT, kept_BT = found.value_BT, found.kept_BT
        assert value_BT.min() >= 0 and value_BT.max() < math.inf
        assert not value_BT[~kept_BT].any()
        assert not (kept_BT & ~mask_BT).any()
        assert not (found.clipped_BT & ~mask_BT).any()
        if correction.truncate is not None and not correction.normalize:
            assert value_BT.max() <= correction.truncate + 1e-6
        if correction.mask == "none" and correction.veto is None:
            assert torch.equal(kept_BT, mask_BT)
        train_BT = pair.train_BT.masked_fill(~mask_BT, torch.nan)
        padded = LogprobPair(train_BT, pair.rollout_BT.masked_fill(~mask_BT, 7.0), mask_BT)
        assert torch.equal(correct(padded, correction).value_BT, value_BT)
        turned = LogprobPair(pair.train_BT.flip(0), pair.rollout_BT.flip(0), mask_BT.flip(0))
        torch.testing.assert_close(correct(turned, correction).value_BT.flip(0), value_BT)
        same = LogprobPair(pair.train_BT, pair.train_BT, mask_BT)
        on_policy = correct(same, correction)
        if correction.low is None or correction.low <= 1:
            assert torch.equal(on_policy.kept_BT, mask_BT), "on-policy tokens are rejected"
            assert torch.equal(on_policy.value_BT, mask_BT.float())
        said = correction_metrics(found, pair, correction)
        assert bool(said) == bool(mask_BT.any()) == bool(mismatch_metrics(pair))
        for key in ("ess", "clipped_fraction", "masked_fraction"):
            assert 0 <= said.get(f"correction/{key}", 0) <= 1 + 1e-9, key
        if said:
            assert mismatch_metrics(pair)["mismatch/kl"] >= 0

    each()


NEAR = ["token-k2", "token-k3", "mean-k3", "max-k3", "sum-k3"]


@few_or_many(100, 2000)
def test_nothing_near_is_rejected(number):
    """A distance is never below zero, by rounding either: its lower bound is 0."""

    @times(number)
    @given(pairs(), st.sampled_from(NEAR))
    def each(pair, mask):
        correction = dataclasses.replace(CORRECTIONS["none"], mask=mask, high=1e12)
        assert torch.equal(correct(pair, correction).kept_BT, pair.mask_BT)

    each()
