"""NeMo RL's rounding, as the benchmarks repeat it, against ours and against its own code.

With NEMO_RL_ROOT, a checkout of NeMo RL, every byte and scale is held against its own function.
"""

import ast
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.numerics.stock_formula import stock_quantize_blocks, stock_quantize_list
from fp8_nemo.glue.quantize import quantize_blocks

STOCK = "nemo_rl/models/generation/vllm/quantization/fp8.py", "cast_tensor_to_fp8_blockwise"
RAGGED = [(1, 1), (127, 129), (128, 384), (130, 257), (200, 300), (256, 128)]


def test_stock_scale_inv_is_one_or_two_ulp_off_the_exact_one_for_25_of_the_128_mantissas():
    weight = torch.arange(128, 256).repeat_interleave(128).repeat(128, 1).bfloat16()
    exact, stock = (
        f(weight)[1].view(torch.int32) for f in (quantize_blocks, stock_quantize_blocks)
    )
    assert (exact - stock).abs().flatten().bincount().tolist() == [103, 20, 5]


def test_stock_padding_repeats_the_last_element_and_inflates_the_edge_blocks():
    weight = torch.full((130, 130), 0.5, dtype=torch.bfloat16)
    weight[-1, -1] = 64.0
    centre, edge = torch.tensor([1 / 896, 1 / 7]).tolist()
    found = stock_quantize_blocks(weight).scale_inv_PQ.tolist()
    assert found == [[centre, edge], [edge, edge]]
    with pytest.raises(ValueError, match="NeMo RL refuses it too"):
        stock_quantize_blocks(weight[None])


def test_a_list_is_each_weight_alone_and_a_stack_each_of_its_matrices():
    weight = torch.randn(2, 256, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    [stack] = stock_quantize_list([weight], nonfinite_N=torch.zeros(1, dtype=torch.bool))
    for each, fp8, scale_inv in zip(weight, *stack, strict=True):
        assert_same(stock_quantize_blocks(each), (fp8, scale_inv))


def assert_same(found, wanted):
    assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(found[1], wanted[1])


def stock_quantizer(root, pow2):
    """NeMo RL's own function, alone: its module would import vllm and ray."""
    path, name = Path(root, STOCK[0]), STOCK[1]
    body = [n for n in ast.parse(path.read_text()).body if getattr(n, "name", "") == name]
    space = {"torch": torch, "global_fp8_config": SimpleNamespace(use_weight_pow2_scale=pow2)}
    exec(compile(ast.Module(body, []), str(path), "exec"), space)
    return space[name]


@pytest.mark.skipif("NEMO_RL_ROOT" not in os.environ, reason="NEMO_RL_ROOT: no checkout of NeMo RL")
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("shape", RAGGED)
def test_stock_equals_nemo_rls_own_quantizer_in_every_byte_and_scale(shape, pow2):
    made = torch.rand(shape, generator=torch.Generator().manual_seed(0)) - 0.5
    weight = (made * torch.logspace(-3, 3, shape[1])).bfloat16()
    weight[:128, :128] = 0
    fp8, scale_inv = stock_quantizer(os.environ["NEMO_RL_ROOT"], pow2)(weight, [128, 128])
    found = stock_quantize_blocks(weight, pow2=pow2)
    assert_same(found, (fp8.contiguous(), scale_inv.squeeze(-1)))
