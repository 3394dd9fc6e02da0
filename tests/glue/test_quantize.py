"""The FP8 contract clause by clause, against a second, exact implementation.

That second one shares no code with the package: E4M3 from its definition, rounding by rational
arithmetic, blocks by slices of NumPy arrays. FP8 equality is equality of bytes; nothing here has a
tolerance.
"""

import hashlib
import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from fp8_nemo.glue import quantize
from fp8_nemo.glue.quantize import (
    E2M1,
    FP8,
    dequantize_nvfp4,
    e2m1_values,
    quantize_blocks,
    quantize_groups,
    quantize_nvfp4,
    quantize_nvfp4_list,
)

BF16_MAX, FP32_MAX = (Fraction(torch.finfo(t).max) for t in (torch.bfloat16, torch.float32))
POSITIVE_BF16 = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
ALL_BF16 = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
GOLDENS = Path(__file__).parent / "golden" / "quantize.json"
RAGGED = [(1, 1), (127, 129), (128, 384), (130, 257), (200, 300), (256, 128)]
# E4M3 by definition: bias 7, three mantissa bits, codes in the order of their magnitudes.
MAGNITUDES = np.array([(8 * (c > 7) + c % 8) * 2.0 ** (max(c // 8, 1) - 10) for c in range(127)])
MIDPOINTS = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2


def e4m3(value):
    """Bytes of finite values: saturated at 448, to nearest, ties to the even code."""
    size = np.minimum(np.abs(value.astype(np.float64)), 448)
    code = np.searchsorted(MIDPOINTS, size)
    code += (code % 2 == 1) & (MIDPOINTS[np.minimum(code, 125)] == size)
    return (code + 128 * np.signbit(value)).astype(np.uint8)


def fp32(value):
    """The FP32 number nearest to a positive rational, ties to even; infinity beyond the largest."""
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent -= value < Fraction(2) ** exponent
    quantum = Fraction(2) ** max(exponent - 23, -149)
    rounded = round(value / quantum) * quantum
    return rounded if rounded <= FP32_MAX else np.inf


def scales_by_hand(amax, pow2=False, largest=BF16_MAX):
    """Scale and scale_inv of one amax, in rational numbers."""
    if amax == 0:
        return 1.0, 1.0
    scale = fp32(448 / Fraction(float(amax)))
    scale = largest if scale == np.inf else scale
    if pow2:  # 448 / amax <= 2^k is scale_inv = 2^-k >= amax / 448
        scale = Fraction(2) ** max(k for k in range(-128, 128) if Fraction(2) ** k <= scale)
    return float(scale), float(fp32(1 / scale))


def blocks_by_hand(weight, height=128, **how):
    """Bytes and scales of a BF16 or FP32 matrix, block after block, real elements alone."""
    value = weight.float().numpy()
    codes = np.zeros(value.shape, np.uint8)
    scale_inv = np.zeros([-(-value.shape[0] // height), -(-value.shape[1] // 128)], np.float32)
    for p, q in np.ndindex(scale_inv.shape):
        at = np.s_[p * height : (p + 1) * height, q * 128 : (q + 1) * 128]
        scale, scale_inv[p, q] = scales_by_hand(np.abs(value[at]).max(), **how)
        codes[at] = e4m3(value[at] * np.float32(scale))
    return codes, scale_inv


def made(*shape, salt=0):
    """FP32 values in [-0.5, 0.5) by integer arithmetic: the same on every machine and version."""
    index = torch.arange(salt, salt + int(np.prod(shape)))
    return (((index * 2654435761) % 2**32).double() / 2**32 - 0.5).float().view(shape)


def assert_same(found, wanted):
    for found_one, wanted_one in zip(found, wanted, strict=True):
        if isinstance(wanted_one, torch.Tensor):
            wanted_one = wanted_one.view(torch.uint8).numpy()
        found_one = found_one.view(torch.uint8).numpy()
        np.testing.assert_array_equal(found_one, np.ascontiguousarray(wanted_one).view(np.uint8))


def test_the_cast_is_to_nearest_even_and_saturates_for_every_finite_bf16_value():
    finite, nan = ALL_BF16[ALL_BF16.isfinite()], ALL_BF16[ALL_BF16.isnan()]
    fp8 = quantize.quantize_tensor(finite, torch.ones(()))
    np.testing.assert_array_equal(fp8.view(torch.uint8).numpy(), e4m3(finite.float().numpy()))
    assert quantize.quantize_tensor(nan, torch.ones(())).isnan().all()


def test_blocks_and_groups_cast_every_bf16_value_up_to_448_as_the_encoder_does():
    inside = ALL_BF16[ALL_BF16.abs() <= 448]
    inside = torch.cat([inside, inside[: -len(inside) % (128 * 127)]]).view(-1, 127)
    anchored = torch.nn.functional.pad(inside, (1, 0), value=448.0)  # so every scale is 1
    for fp8, scale_inv in (quantize_blocks(anchored), quantize_groups(anchored)):
        assert (scale_inv == 1).all()
        np.testing.assert_array_equal(fp8.view(torch.uint8).numpy(), e4m3(anchored.float().numpy()))


def test_both_divisions_are_correctly_rounded_for_every_positive_finite_bf16_amax():
    wanted = torch.tensor([scales_by_hand(a) for a in POSITIVE_BF16.tolist()], dtype=torch.float32)
    found = quantize.exact_scales(POSITIVE_BF16, torch.bfloat16, pow2=False)
    assert_same(found, [*wanted.T.contiguous()])
    _, scale_inv_TQ = quantize_groups(POSITIVE_BF16.bfloat16()[:, None])
    assert torch.equal(scale_inv_TQ[:, 0], wanted[:, 1])


def test_a_reciprocal_and_a_product_would_not_pass_that_proof():
    wanted = [scales_by_hand(a) for a in range(128, 256)]  # every mantissa once
    twice_rounded = (448.0 / torch.arange(128, 256).float()).tolist()
    assert sum(a != b for a, (b, _) in zip(twice_rounded, wanted, strict=True)) == 33


def test_pow2_scale_inv_is_the_least_power_of_two_that_is_not_below_amax_over_448():
    grid = Fraction(2) ** -127
    _, scale_inv = quantize.exact_scales(POSITIVE_BF16, torch.bfloat16, True)
    for amax, found in zip(POSITIVE_BF16.tolist(), map(Fraction, scale_inv.tolist()), strict=True):
        assert math.frexp(found)[0] == 0.5, "not a power of two"
        assert Fraction(amax) / 448 <= found, "448 would saturate"
        assert found / 2 < Fraction(amax) / 448 or found == grid, "half of it would have done"


def test_pow2_scales_of_fp32_amax_are_right_up_to_the_neighbours_of_a_power_of_two():
    near = [1.75 + n * 2.0**-23 for n in (-1, 0, 1)]
    amax = torch.tensor([mantissa * 2.0**e for mantissa in near for e in range(-90, 91)])
    wanted = torch.tensor([scales_by_hand(a, pow2=True) for a in amax.tolist()])
    assert_same(quantize.exact_scales(amax, torch.float32, True), [*wanted.T.contiguous()])


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("shape", RAGGED)
def test_blocks_hold_the_bytes_and_scales_of_the_contract(shape, pow2):
    weight = (made(*shape) * 0.1).bfloat16()
    weight[-1, -1] = 3.0  # were padding to repeat it, the blocks beside it would change
    assert_same(quantize_blocks(weight, pow2=pow2), blocks_by_hand(weight, pow2=pow2))


def test_an_outlier_in_the_corner_of_a_ragged_block_changes_no_other_block():
    plain = made(200, 300).bfloat16()
    spiked = plain.clone()
    spiked[-1, -1] = 1000.0
    before, after = quantize_blocks(plain), quantize_blocks(spiked)
    changed = before.scale_inv_PQ != after.scale_inv_PQ
    assert changed.nonzero().tolist() == [[1, 2]]
    assert torch.equal(before.fp8_OI[:128].view(torch.uint8), after.fp8_OI[:128].view(torch.uint8))
    assert after.scale_inv_PQ[1, 2].item() == scales_by_hand(1000.0)[1]


@pytest.mark.parametrize("pow2", [False, True])
def test_a_block_of_zeros_has_scale_inv_one_and_bytes_of_zero(pow2):
    weight = made(256, 200).bfloat16()
    weight[128:, :128] = 0
    fp8_OI, scale_inv_PQ = quantize_blocks(weight, pow2=pow2)
    assert scale_inv_PQ[1, 0] == 1 and (scale_inv_PQ != 1).sum() == 3
    assert not fp8_OI[128:, :128].view(torch.uint8).any()
    fp8_TI, scale_inv_TQ = quantize_groups(torch.zeros(2, 3, 130), pow2=pow2)
    assert (
        scale_inv_TQ.shape == (2, 3, 2) and (scale_inv_TQ == 1).all() and not fp8_TI.float().any()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_where_448_over_amax_overflows_a_weight_takes_the_largest_finite_bf16_value(dtype):
    weight = (made(128, 128) * 2.0**-120).to(dtype)
    fp8_OI, scale_inv_PQ = quantize_blocks(weight)
    assert Fraction(scale_inv_PQ.item()) == fp32(1 / BF16_MAX)
    assert_same([fp8_OI], blocks_by_hand(weight.bfloat16())[:1])
    assert fp8_OI.float().abs().max() > 100, "the bytes are used, not lost"


@pytest.mark.parametrize(
    ("dtype", "amax", "scale"),
    [
        (torch.bfloat16, 2.0**-121, BF16_MAX),
        (torch.float32, 2.0**-121, FP32_MAX),
        (torch.float16, 2.0**-10, Fraction(448 * 2**10)),  # no FP16 amax overflows the quotient
    ],
)
def test_groups_take_their_types_largest_value_only_where_448_over_amax_overflows(
    dtype, amax, scale
):
    _, scale_inv_TQ = quantize_groups(torch.full((1, 128), amax, dtype=dtype))
    assert Fraction(scale_inv_TQ.item()) == fp32(1 / scale)


def test_an_fp32_master_gives_the_bytes_of_its_bf16_rounding():
    master = made(130, 300)
    assert_same(quantize_blocks(master), quantize_blocks(master.bfloat16()))
    unrounded_codes, _ = blocks_by_hand(master)
    assert (quantize_blocks(master).fp8_OI.view(torch.uint8).numpy() != unrounded_codes).any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 3.4e38])
def test_a_weight_that_is_not_finite_in_bf16_is_refused_or_sets_its_slot(value):
    nonfinite_N = torch.zeros(3, dtype=torch.bool)
    weight = made(130, 200)
    weight[129, 199] = value  # 3.4e38 is finite in FP32 and rounds to Inf in BF16
    with pytest.raises(ValueError, match="NaN or Inf"):
        quantize_blocks(weight)
    quantize_blocks(weight, nonfinite=nonfinite_N[1])
    quantize_blocks(made(130, 200), nonfinite=nonfinite_N[2])
    assert nonfinite_N.tolist() == [False, True, False]
    quantize_blocks(made(130, 200), nonfinite=nonfinite_N[1])
    assert nonfinite_N[1], "a slot is read once a refit: nothing may clear it before"


def test_a_list_quantizes_as_each_weight_alone():
    weights = [made(130, 200), made(256, 128).bfloat16(), made(3, 128, 256)]
    weights[1][0, 0] = float("nan")
    nonfinite_N = torch.zeros(3, dtype=torch.bool)
    found = quantize.quantize_list(weights, nonfinite_N=nonfinite_N)
    assert nonfinite_N.tolist() == [False, True, False]
    for weight, each in zip(weights[::2], found[::2], strict=True):
        assert_same(each, quantize_blocks(weight))


@pytest.mark.parametrize("shape", [(3, 256, 128), (3, 130, 200)])
def test_a_slab_of_experts_equals_each_expert_alone(shape):
    slab_EOI = made(*shape).bfloat16() * torch.tensor([1, 0, 50]).view(3, 1, 1)
    for e, expert in enumerate(zip(*quantize_blocks(slab_EOI), strict=True)):
        assert_same(expert, quantize_blocks(slab_EOI[e]))


def test_a_transposed_weight_quantizes_as_its_contiguous_copy():
    turned = made(256, 128).bfloat16().T
    assert_same(quantize_blocks(turned), quantize_blocks(turned.contiguous()))
    assert quantize_blocks(turned).fp8_OI.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(5, 128), (3, 300), (129, 1), (2, 256)])
def test_groups_run_along_the_last_axis_and_are_not_rounded_to_bf16(shape, dtype):
    x_TI = (made(*shape) * torch.arange(1, shape[0] + 1)[:, None]).to(dtype)
    for pow2 in (False, True):
        alone, pair = (quantize_groups(x, pow2=pow2) for x in (x_TI, torch.stack([x_TI, -x_TI])))
        assert_same(alone, blocks_by_hand(x_TI, height=1, pow2=pow2))
        assert_same([each[0] for each in pair], alone)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("pow2", [False, True])
def test_groups_pass_nan_and_inf_on_as_nan_and_leave_other_groups_alone(value, pow2):
    x_TI = made(2, 256)
    spoiled = x_TI.clone()
    spoiled[1, 7] = value
    found, clean = quantize_groups(spoiled, pow2=pow2), quantize_groups(x_TI, pow2=pow2)
    assert quantize.dequantize_groups(found)[1, 7].isnan()
    assert_same([found.fp8_TI[0], found.fp8_TI[1, 128:]], [clean.fp8_TI[0], clean.fp8_TI[1, 128:]])


@pytest.mark.parametrize("height", [128, 1])
@pytest.mark.parametrize("shape", [*RAGGED, (2, 130, 200)])
def test_the_inverses_multiply_each_value_by_the_scale_of_its_own_block(shape, height):
    code = e4m3(made(*shape).numpy() * 800)
    value = np.where(code > 127, -1, 1) * MAGNITUDES[code & 127].astype(np.float32)
    scale_inv = made(*shape[:-2], -(-shape[-2] // height), -(-shape[-1] // 128), salt=9)
    spread = scale_inv.numpy().repeat(128, -1).repeat(height, -2)[..., : shape[-2], : shape[-1]]
    inverse = quantize.dequantize_groups if height == 1 else quantize.dequantize_blocks
    found = inverse(quantize.Fp8Weight(torch.tensor(code).view(quantize.FP8), scale_inv))
    np.testing.assert_array_equal(found.numpy(), (value * spread).astype(np.float32))


@pytest.mark.parametrize("case", json.loads(GOLDENS.read_text()))
def test_bytes_and_scales_are_those_of_the_committed_goldens(case):
    x = made(*case["shape"], salt=case["salt"]).to(getattr(torch, case["dtype"]))
    fp8, scale_inv = getattr(quantize, case["function"])(x, **case["options"])
    assert fp8.flatten()[:8].view(torch.uint8).numpy().tobytes().hex() == case["first_bytes"]
    assert scale_inv.flatten()[:2].tolist() == case["first_scales"]
    content = b"".join(each.view(torch.uint8).numpy().tobytes() for each in (fp8, scale_inv))
    assert hashlib.sha256(content).hexdigest() == case["sha256"]


def nvfp4_by_search(weight):
    """ModelOpt's rule value by value: the nearest of 15 numbers, to the even code between two."""
    value = weight.bfloat16().float().numpy()
    whole = np.float32(np.abs(value).max() / np.float32(6 * 448))
    codes, scales = np.zeros(value.shape, np.uint8), np.zeros((len(value), value.shape[1] // 16))
    for row, column in np.ndindex(scales.shape):
        group = value[row, 16 * column : 16 * column + 16]
        scale = np.float32(np.abs(group).max() / np.float32(np.float32(6) * whole))
        scale = min(max(scale or 1.0, 2**-9), 448.0)
        scales[row, column] = scale = torch.tensor(scale).to(FP8).float().item()
        for place, each in enumerate(group):
            scaled = abs(float(each / np.float32(np.float32(scale) * whole)))
            distance = [abs(scaled - held) for held in E2M1]
            nearest = [code for code in range(8) if distance[code] == min(distance)]
            code = next((code for code in nearest if code % 2 == 0), nearest[0])
            codes[row, 16 * column + place] = code + 8 * (each < 0)
    return codes, scales, whole


@pytest.mark.parametrize("scale", [1.0, 2e-2, 1e-6, 3e4])
def test_four_bits_are_the_nearest_numbers_of_modelopts_rule(scale):
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(5)) * scale
    weight[0, :16], weight[1, :16] = 0.0, weight[1, :16] * 1e-4  # a group of zeros, a small one
    weight[2, :16] = scale * torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6] * 2)
    found = quantize_nvfp4(weight, slot := torch.tensor(False))
    codes, scales, whole = nvfp4_by_search(weight)
    assert found.packed_OI.tolist() == (codes[:, 1::2] << 4 | codes[:, ::2]).tolist()
    assert found.scale_OG.float().tolist() == scales.tolist() and not slot
    assert found.scale_2.tolist() == [whole]
    assert 0.05 < (dequantize_nvfp4(found) - weight).norm() / weight.norm() < 0.15


def test_four_bits_halfway_between_two_numbers_go_to_the_even_code():
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -1.25, -1.75, -2.5,
                           -3.5, -5, -6])  # fmt: skip
    whole = torch.cat([halves, torch.full((16,), 2688.0)])[None]  # the whole scale is 1
    packed_OI, scale_OG, scale_2 = quantize_nvfp4(whole, torch.tensor(False))
    assert scale_2 == 1 and scale_OG.tolist() == [[1.0, 448.0]]
    found = e2m1_values(packed_OI, scale_OG)[0, :16].tolist()
    assert found == [0, 1, 1, 2, 2, 4, 4, 6, 0, -1, -1, -2, -2, -4, -4, -6]


def test_values_of_four_bits_and_their_scales_are_numbers_of_16_bits():
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(6))
    packed_OI, scale_OG, _ = quantize_nvfp4(weight, torch.tensor(False))
    values = e2m1_values(packed_OI, scale_OG)
    assert torch.equal(values.bfloat16().float(), values) and values.unique().numel() > 100


def test_a_stack_gets_the_four_bits_that_each_of_its_weights_gets_alone():
    stack = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(7))
    stack[1] *= 100
    slots = torch.zeros(2, dtype=torch.bool)
    [together, zeros] = quantize_nvfp4_list([stack, torch.zeros(16, 16)], nonfinite_N=slots)
    for n, weight in enumerate(stack):
        alone = quantize_nvfp4(weight, torch.tensor(False))
        pairs = zip(together, alone, strict=True)
        assert all(torch.equal(a[n].float(), b.float()) for a, b in pairs)
    assert not dequantize_nvfp4(zeros).any() and zeros.scale_2 == 1 and not slots.any()


def test_weights_of_one_name_share_the_scale_that_they_would_have_as_one_weight():
    draw = torch.Generator().manual_seed(8)
    q, k, other = (torch.randn(rows, 64, generator=draw) * rows for rows in (32, 16, 48))
    slots = torch.zeros(3, dtype=torch.bool)
    found = quantize_nvfp4_list([q, other, k], nonfinite_N=slots, together=["qk", "other", "qk"])
    whole = quantize_nvfp4(torch.cat([q, k]), torch.tensor(False))
    alone = quantize_nvfp4(other, torch.tensor(False))
    assert found[0].scale_2 == found[2].scale_2 == whole.scale_2 != found[1].scale_2
    for n in (0, 1):
        parts = torch.cat([found[0][n].float(), found[2][n].float()])
        assert torch.equal(parts, whole[n].float())
        assert torch.equal(found[1][n].float(), alone[n].float())
    bad = [torch.full((16, 16), math.nan), torch.ones(16, 16)]
    quantize_nvfp4_list(bad, nonfinite_N=(slots := torch.zeros(2).bool()), together=["a", "a"])
    assert slots.tolist() == [True, False], "the one that is not finite is named, not its sibling"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_four_bits_of_what_is_not_finite_are_marked(bad):
    weight = torch.ones(16, 32)
    weight[3, 4] = bad
    quantize_nvfp4_list([torch.ones(16, 16), weight], nonfinite_N=(slots := torch.zeros(2).bool()))
    assert slots.tolist() == [False, True]
