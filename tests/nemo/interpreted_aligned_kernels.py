"""The kernels of the aligned engine, on a CPU under Triton's interpreter, against torch's.

A process of its own, TRITON_INTERPRET being read when a kernel is defined. The interpreter rounds
between the product and the sum of an `fma`, as torch does; a GPU does not. It cuts FP32 to BF16
and E4M3 where a GPU rounds, so all write FP32 here.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from fp8_nemo.nemo.aligned import kernels, ops


def numbers(*shape):
    return (torch.randn(*shape) * torch.randn(*shape).exp()).bfloat16()


def rope_of_strided_rows(head, heads, kv_heads, T=7):
    qkv = numbers(T, head * (heads + 2 * kv_heads)).float()
    q, k, _ = qkv.split([head * heads, head * kv_heads, head * kv_heads], dim=-1)
    table = ops.cos_sin_table(0.7 ** torch.arange(head // 2).float(), 64)
    given = (torch.randint(64, (T,)), q, k, table, head)
    for made, wanted in zip(kernels.rope(*given), ops.rope(*given), strict=True):
        assert torch.equal(made, wanted)


def silu_of_any_width(F, T=3):
    gate_up = numbers(T, 2 * F).float()
    gate, up = gate_up.chunk(2, dim=-1)
    # x * sigmoid(x), Inductor's, and x / (1 + exp(-x)), torch's, differ in the last bits of FP32.
    wanted = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(kernels.silu(gate_up), wanted, rtol=1e-6, atol=0)


def quantizer_of_every_layout(T, I=384):
    x = numbers(T, I)
    x[0, :128], x[-1, 128:256] = 0.0, 2e-38
    for by_column, padded in ((False, False), (True, False), (True, True)):
        codes, wanted = ops.quantize(x, by_column, padded)
        scales = ops.empty_scales(x, by_column, padded)
        made = torch.empty(T, I)
        kernels.quantize_into(x, made, scales)
        assert torch.equal(made.to(codes.dtype).view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(scales, wanted)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for shape in ((64, 6, 2), (128, 4, 4)):
        rope_of_strided_rows(*shape)
    for width in (256, 1100):
        silu_of_any_width(width)
    for rows in (1, 13):
        quantizer_of_every_layout(rows)
