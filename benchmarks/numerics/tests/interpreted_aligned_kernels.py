"""The kernels of the aligned engine, on a CPU under Triton's interpreter, against torch's.

A process of its own, TRITON_INTERPRET being read when a kernel is defined. The interpreter rounds
between the product and the sum of an `fma`, as torch does; a GPU does not.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from benchmarks.numerics import aligned_kernels, aligned_ops


def numbers(*shape):
    return (torch.randn(*shape) * torch.randn(*shape).exp()).bfloat16()


def rope_of_strided_rows(head, heads, kv_heads, T=7):
    qkv = numbers(T, head * (heads + 2 * kv_heads))
    q, k, _ = qkv.split([head * heads, head * kv_heads, head * kv_heads], dim=-1)
    table = aligned_ops.cos_sin_table(0.7 ** torch.arange(head // 2).float(), 64)
    given = (torch.randint(64, (T,)), q, k, table, head)
    for made, wanted in zip(aligned_kernels.rope(*given), aligned_ops.rope(*given), strict=True):
        assert torch.equal(made, wanted)


def silu_of_any_width(F, T=3):
    made, wanted = (each.silu(h) for h in [numbers(T, 2 * F)]
                    for each in (aligned_kernels, aligned_ops))  # fmt: skip
    # x * sigmoid(x), Inductor's, and x / (1 + exp(-x)), torch's, differ in the last bit of FP32.
    assert (made == wanted).float().mean() > 0.999
    torch.testing.assert_close(made, wanted, rtol=2**-7, atol=0)


def quantizer_of_every_layout(T, I=384):
    x = numbers(T, I)
    x[0, :128], x[-1, 128:256] = 0.0, 1e-38
    for by_column, padded in ((False, False), (True, False), (True, True)):
        codes, wanted = aligned_ops.quantize(x, by_column, padded)
        scales = aligned_ops.empty_scales(x, by_column, padded)
        made = aligned_kernels.quantize(x, scales)
        assert torch.equal(made.view(torch.uint8), codes.view(torch.uint8))
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
