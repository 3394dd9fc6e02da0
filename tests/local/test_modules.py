"""Linears, experts, attention and cache do the arithmetic that their docstrings state."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import Qwen3MoeConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from fp8_nemo.glue.quantize import (
    FP8,
    dequantize_blocks,
    dequantize_groups,
    dequantize_nvfp4,
    quantize_blocks,
    quantize_groups,
    quantize_nvfp4,
)
from fp8_nemo.local.engine import causal_mask
from fp8_nemo.local.modules import attention, linears
from fp8_nemo.local.modules.experts import PlainExperts, RolloutExperts, without_host_reads
from fp8_nemo.local.modules.precision import rms_norm


def values(x):
    return dequantize_groups(quantize_groups(x))


class Module:
    watch = None

    def __init__(self, q_scale=1.0, k_scale=1.0, v_scale=1.0):
        self.q_scale, self.k_scale, self.v_scale = (
            torch.tensor([s]) for s in (q_scale, k_scale, v_scale)
        )


def random(*shape, scale=1.0):
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale
    ).bfloat16()


def test_a_bf16_linear_rounds_its_result_and_nothing_else():
    x, weight = random(5, 256), random(128, 256)
    expected = (x.double() @ weight.double().T).float()
    found = linears.linear_plain(x, weight)
    assert found.dtype == torch.bfloat16
    assert ((found.float() - expected).abs() <= expected.abs() * 2**-8 + 1e-6).all()


def test_an_fp8_linear_multiplies_what_the_bytes_stand_for():
    x, weight = random(5, 256), quantize_blocks(random(384, 256))
    expected = linear(values(x), dequantize_blocks(weight)).bfloat16()
    assert torch.equal(linears.linear_fp8(x, linears.operand(weight), False), expected)


@pytest.mark.parametrize("pow2", [False, True])
def test_training_in_fp8_quantizes_both_operands_of_all_three_products(pow2):
    x, weight, dy = random(3, 50, 256), random(384, 256), random(3, 50, 384)
    x.requires_grad_(), weight.requires_grad_()
    y = linears.Fp8Product.apply(x, weight, pow2)
    y.backward(dy)

    def grouped(t):
        return dequantize_groups(quantize_groups(t, pow2=pow2))

    held = dequantize_blocks(quantize_blocks(weight.detach(), pow2=pow2))
    flat_x, flat_dy = x.detach().flatten(0, 1), dy.flatten(0, 1)
    assert torch.equal(y, linear(grouped(x.detach()), held).bfloat16())
    assert torch.equal(x.grad, (grouped(flat_dy) @ held).view_as(x).bfloat16())
    assert torch.equal(weight.grad, (grouped(flat_dy.T) @ grouped(flat_x.T).T).bfloat16())
    exact = flat_dy.float().T @ flat_x.float()
    assert torch.cosine_similarity(weight.grad.float().flatten(), exact.flatten(), 0) > 0.998


def test_bf16_attention_is_softmax_attention_with_grouped_heads():
    query, key, value = random(2, 4, 7, 64), random(2, 2, 7, 64), random(2, 2, 7, 64)
    mask = torch.ones(2, 1, 7, 7).bool().tril()
    found, _ = attention.attend(Module(), query, key, value, mask, 0.125)
    expected = scaled_dot_product_attention(
        query.float(),
        key.float().repeat_interleave(2, 1),
        value.float().repeat_interleave(2, 1),
        mask,
    )
    assert torch.allclose(found.float(), expected.transpose(1, 2), atol=0.02)
    assert found.shape == (2, 7, 4, 64)


def test_padded_queries_that_see_no_key_give_zeros_not_nan():
    query = key = value = random(1, 2, 3, 64)
    mask = torch.zeros(1, 1, 3, 3).bool()
    fp8 = [x.to(FP8) for x in (key, value)]
    for pair in ((key, value), fp8):
        found, _ = attention.attend(Module(), query, *pair, mask, 0.125)
        assert torch.equal(found, torch.zeros_like(found))


def e4m3(x):
    """Round to E4M3 by hand: 3 mantissa bits, exponents from -6, ties to even, 448 at most."""
    exponent = np.floor(np.log2(np.maximum(np.abs(x), 2.0**-9)))
    step = 2.0 ** (np.maximum(exponent, -6) - 3)
    return np.clip(np.round(x / step) * step, -448, 448)


@pytest.mark.parametrize(
    ("head", "keys", "queries"), [(64, 20, 3), (64, 300, 2), (128, 200, 2), (128, 200, 80)]
)
def test_fp8_attention_is_flash_attention_threes_arithmetic_tile_by_tile(head, keys, queries):
    scales = (0.011, 0.013, 0.017)
    query, key, value = (
        random(1, 1, queries, head),
        random(1, 1, keys, head),
        random(1, 1, keys, head),
    )
    k8, v8 = (
        attention.quantize_tensor(x, torch.tensor([s]))
        for x, s in ((key, scales[1]), (value, scales[2]))
    )
    mask = torch.ones(1, 1, queries, keys).bool()
    found, _ = attention.attend(Module(*scales), query, k8, v8, mask, head**-0.5)
    q = e4m3(query[0, 0].float().numpy().astype(np.float64) / np.float32(scales[0]))
    k, v = k8[0, 0].double().numpy(), v8[0, 0].double().numpy()
    scores = q @ k.T * (scales[0] * scales[1] * head**-0.5)
    width = 128 if head == 64 else 96 if queries <= 64 else 192
    top, total, output = np.full((queries, 1), -np.inf), 0.0, 0.0
    for start in reversed(range(0, keys, width)):
        tile = scores[:, start : start + width]
        raised = np.maximum(top, tile.max(1, keepdims=True))
        weight = np.exp(tile - raised) * 256
        total = total * np.exp(top - raised) + weight.sum(1, keepdims=True)
        output = output * np.exp(top - raised) + e4m3(weight) @ v[start : start + width]
        top = raised
    expected = output / total * scales[2]
    error = np.linalg.norm(found[0, :, 0].double().numpy() - expected) / np.linalg.norm(expected)
    exact = np.exp(scores - scores.max(1, keepdims=True))
    unrounded = exact @ v / exact.sum(1, keepdims=True) * scales[2]
    without = np.linalg.norm(unrounded - expected) / np.linalg.norm(expected)
    assert error < 0.004 < without  # BF16 results; a P that is not rounded would be seen


def test_the_fp8_cache_stores_bytes_and_saturates():
    cache = attention.KvLayer((torch.tensor([0.5]), torch.tensor([0.25])))
    key = torch.full((1, 1, 2, 64), 300.0).bfloat16()
    cache.update(key, key)
    keys, stored = cache.update(key[:, :, :1], key[:, :, :1])
    assert keys.dtype == stored.dtype == FP8 and keys.shape == (1, 1, 3, 64)
    assert cache.keys.element_size() == 1 and cache.get_seq_length() == 3
    assert keys.float().unique().tolist() == [448.0]
    half = attention.KvLayer((torch.tensor([2.0]), torch.tensor([2.0])))
    assert half.update(key, key)[0].float().unique().tolist() == [144.0]  # 150 rounded to E4M3


def test_the_bf16_cache_stores_what_it_is_given():
    key = random(1, 2, 3, 64)
    keys, _ = attention.KvLayer(None).update(key, key)
    assert torch.equal(keys, key)


@pytest.mark.parametrize("tokens", [7, 9])
@pytest.mark.parametrize("scales", [None, (torch.tensor([0.5]), torch.tensor([0.25]))])
def test_a_cache_holds_the_same_with_room_taken_at_once_and_token_by_token(tokens, scales):
    key, value = random(2, 2, 7, 64), random(2, 3, 7, 64)[:, :2]
    room = attention.Room(tokens, torch.arange(4), 4)
    cache, growing = attention.KvLayer(scales, room), attention.KvLayer(scales)
    at = set()
    for start, stop in ((0, 4), (4, 5), (5, 7)):
        new = key[:, :, start:stop], value[:, :, start:stop]
        room.at_N, room.width = torch.arange(start, stop), stop
        grown = growing.update(*new)
        for found, expected in zip(cache.update(*new), grown, strict=True):
            assert torch.equal(found.float(), expected.float())
        at.add(cache.keys.data_ptr())
    assert len(at) == 1  # where a CUDA graph looks
    room.width = tokens
    for found, expected in zip(cache.update(*new), grown, strict=True):
        assert torch.equal(found[:, :, :7].float(), expected.float())
        assert not found[:, :, 7:].float().any()  # 0 times what is not written must be 0


def made_experts():
    config = Qwen3MoeConfig(
        hidden_size=256, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2
    )
    experts, draw = Qwen3MoeExperts(config), torch.Generator().manual_seed(0)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.1, generator=draw)
    return experts.bfloat16()


def in_fp8(experts):
    fp8 = RolloutExperts(experts, False, "fp8")
    for name, slab in experts.named_parameters():
        held = quantize_blocks(slab.detach())
        getattr(fp8, name).copy_(held.fp8_OI)
        getattr(fp8, f"{name}_scale_inv").copy_(held.scale_inv_PQ)
    return fp8


CHOSEN_TA = torch.tensor([[0, 3], [7, 3], [3, 1], [1, 0], [2, 3]])


def in_four_bits(experts):
    four = RolloutExperts(experts, False, "nvfp4")
    for name, slab in experts.named_parameters():
        stacked = slab.detach().unflatten(1, (four.projections(name), -1))  # each has its own scale
        held = quantize_nvfp4(stacked.flatten(0, 1), torch.tensor(False))
        for end, tensor in zip(("", "_scale", "_scale_2"), held, strict=True):
            buffer = getattr(four, name + end)
            buffer.copy_(tensor.view(buffer.shape))
    return four


def test_a_linear_in_four_bits_multiplies_16_bit_activations_with_what_its_bytes_stand_for():
    x, four = random(5, 256), linears.RolloutLinear(torch.nn.Linear(256, 128), False, "nvfp4")
    assert four.weight_scale.float().isnan().all() and four.weight_scale_2.isnan().all()
    held = quantize_nvfp4(random(128, 256), torch.tensor(False))
    for end, tensor in zip(("", "_scale", "_scale_2"), held, strict=True):
        getattr(four, f"weight{end}").copy_(tensor)
    expected = (x.double() @ dequantize_nvfp4(held).double().T + four.bias.double()).float()
    found = four(x)
    assert ((found.float() - expected).abs() <= expected.abs() * 2**-7 + 1e-3).all()


def test_experts_in_four_bits_scale_gate_and_up_by_what_is_each_ones_own():
    made = made_experts()
    with torch.no_grad():
        made.gate_up_proj[:, made.gate_up_proj.shape[1] // 2 :] *= 64  # up: other scales than gate
    four = in_four_bits(made)
    hidden_TI, share_TA = random(5, 256), torch.full((5, 2), 0.5).bfloat16()
    with torch.no_grad():
        exact_TI, chosen_TI = (each(hidden_TI, CHOSEN_TA, share_TA) for each in (made, four))
        with without_host_reads():
            all_TI = four(hidden_TI, CHOSEN_TA, share_TA)
    error = (chosen_TI - exact_TI).float().norm() / exact_TI.float().norm()
    assert 0.05 < error < 0.25
    assert (all_TI - chosen_TI).float().norm() < 0.01 * exact_TI.float().norm()


@pytest.mark.parametrize("held", [lambda experts: PlainExperts(experts, False), in_fp8])
def test_experts_that_take_every_token_give_what_the_chosen_ones_give(held):
    made = made_experts()
    experts, hidden_TI, share_TA = held(made), random(5, 256), torch.linspace(0.1, 1, 10).view(5, 2)
    share_TA = share_TA.bfloat16()
    with torch.no_grad():
        chosen_TI = experts(hidden_TI, CHOSEN_TA, share_TA)
        transformers_TI = made(hidden_TI, CHOSEN_TA, share_TA)
        with without_host_reads():
            all_TI = experts(hidden_TI, CHOSEN_TA, share_TA)
            experts.down_proj[5] = torch.nan  # which nobody chose
            assert torch.equal(experts(hidden_TI, CHOSEN_TA, share_TA), all_TI)
    torch.testing.assert_close(all_TI, chosen_TI, rtol=1e-2, atol=1e-2)
    assert chosen_TI.abs().max() > 0.1
    error_TI = chosen_TI.float() - transformers_TI.float()
    assert error_TI.norm() < 0.1 * transformers_TI.float().norm()


def test_experts_hand_back_the_gradients_that_a_sum_over_all_of_them_has():
    made = made_experts().float()
    experts, index_TA = PlainExperts(made, False), CHOSEN_TA
    weigh_TI = random(5, 256).float()

    def gradients(mixed):
        hidden_TI = random(5, 256).float().requires_grad_()
        share_TA = torch.linspace(0.1, 1, 10).view(5, 2).requires_grad_()
        asked = [hidden_TI, share_TA, *made.parameters()]
        return torch.autograd.grad((mixed(hidden_TI, share_TA) * weigh_TI).sum(), asked)

    def plainly(hidden_TI, share_TA):
        gate, up = torch.einsum("ti,eoi->teo", hidden_TI, made.gate_up_proj).chunk(2, -1)
        output_TEI = torch.einsum("tef,eif->tei", made.act_fn(gate) * up, made.down_proj)
        chosen_TAI = output_TEI[torch.arange(5)[:, None], index_TA]
        return (chosen_TAI * share_TA[..., None]).sum(1)

    found = gradients(lambda hidden_TI, share_TA: experts(hidden_TI, index_TA, share_TA))
    for gradient, expected in zip(found, gradients(plainly), strict=True):
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


def test_values_of_a_weight_are_worked_out_once_inside_and_anew_outside():
    linear = linears.RolloutLinear(torch.nn.Linear(256, 128, bias=False), False, "fp8")
    held = quantize_blocks(random(128, 256))
    x = random(3, 256)

    def refit(sign):
        linear.weight.copy_((held.fp8_OI.float() * sign).to(FP8))
        linear.weight_scale_inv.copy_(held.scale_inv_PQ)

    refit(1)
    before = linear(x)
    with linears.values_once(linear):
        assert torch.equal(linear(x), before)
        refit(-1)
        assert torch.equal(linear(x), before)  # which is why no refit may come in between
    assert torch.equal(linear(x), -before)
    assert torch.equal(before, linears.linear_fp8(x, linears.operand(held), False))


def test_an_input_is_quantized_once_while_it_lives_and_is_as_it_was(monkeypatch):
    seen = []

    def quantize(x, *, pow2):
        seen.append(pow2)
        return x.double()

    monkeypatch.setattr(linears, "quantize_groups", quantize)
    monkeypatch.setattr(linears, "operand", lambda held: held)
    last, x = linears.LastInput(), torch.ones(2, 128)
    assert last.grouped(x, False) is last.grouped(x, False) and seen == [False]
    last.grouped(x, True)
    x.add_(1)
    assert torch.equal(last.grouped(x, True), x.double()) and seen == [False, True, True]
    last.grouped(torch.ones(2, 128), True)  # gone at once, and its value with it
    assert len(seen) == 4 and last.held is None
    last.grouped(x, True)
    del x
    assert last.held is None


@pytest.mark.parametrize("groups", [1, 4])
def test_fused_attention_and_its_gradients_are_the_plain_ones_but_for_rounding(groups):
    draw = torch.Generator().manual_seed(0)
    shapes = (3, 2, groups, 40, 64), (3, 2, 1, 40, 64), (3, 2, 1, 40, 64)
    texts = [torch.randn(*shape, generator=draw).bfloat16() for shape in shapes]
    real = torch.ones(3, 40).bool()
    real[0, :9] = False  # padded queries see no key
    mask = causal_mask(real)[:, :, None]
    weigh = torch.randn(3, 2, groups, 40, 64, generator=draw) * real[:, None, None, :, None]

    def attended(attend):
        given = [x.clone().requires_grad_() for x in texts]
        found = attend(*given, mask, 0.125).float()
        (found * weigh).sum().backward()
        return [found.detach(), *(x.grad.float() for x in given)]

    fused = attended(attention._attend_fused)
    plain = attended(partial(attention._attend_plain, None))
    assert not torch.equal(fused[0], plain[0])
    for found, expected in zip(fused, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_attention_over_numbers_that_are_none_is_none_and_a_padded_query_gets_zeros():
    query, key, value = torch.ones(3, 1, 1, 1, 4, 8, dtype=torch.float16)
    query[0, 0, 0, 3] = torch.inf
    mask = causal_mask(torch.tensor([[False, True, True, True]]))[:, :, None]
    found = attention._attend_plain(None, query, key, value, mask, 1.0)[0, 0, 0]
    assert found[3].isnan().all() and (found[1:3] == 1).all() and (found[0] == 0).all()


@pytest.mark.parametrize("shape", [(5, 768), (2, 7, 4, 64)])
def test_a_norm_in_one_launch_is_transformers_but_for_one_rounding(shape):
    draw = torch.Generator().manual_seed(0)
    norm = LlamaRMSNorm(shape[-1], eps=1e-5).bfloat16()
    norm.weight.data.normal_(1.0, 0.2, generator=draw)
    x = (3 * torch.randn(shape, generator=draw)).bfloat16()
    found, expected = rms_norm(norm, x), norm(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)


def test_a_head_with_outliers_costs_the_others_nothing_if_scales_are_of_heads():
    """K of head 0 is 2^16 times larger, and its Q as much smaller: the same attention."""
    query, key, value = random(2, 4, 5, 64), random(2, 2, 5, 64), random(2, 2, 5, 64)
    mask = causal_mask(torch.ones(2, 5, dtype=torch.bool))
    exact, _ = attention.attend(Module(), query, key, value, mask, 0.125)
    planted_q, planted_k = query.clone(), key.clone()
    planted_q[:, :2] /= 2**16
    planted_k[:, 0] *= 2**16

    def error(groups):
        """Of FP8 attention, with scales of so many groups of heads."""
        module = Module()
        module.q_scale, module.k_scale, module.v_scale = (
            x.float().abs().unflatten(1, (groups, -1)).amax((0, 2, 3, 4)) / 448
            for x in (planted_q, planted_k, value)
        )
        held = attention.KvLayer((module.k_scale, module.v_scale)).update(planted_k, value)
        found, _ = attention.attend(module, planted_q, *held, mask, 0.125)
        return ((found - exact).float().norm() / exact.float().norm()).item()

    assert error(2) < 0.06 < 2 * error(2) < error(1)
