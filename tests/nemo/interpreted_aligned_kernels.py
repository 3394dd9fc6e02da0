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


def tuned_norm(stream, weight, eps, warps):
    """TransformerEngine's `rmsnorm_fwd_tuned_kernel` in torch, lane by lane."""
    T, H = stream.shape
    vectors_T_IWLE = stream.reshape(T, -1, warps, 32, 8)
    lanes_NTWL = vectors_T_IWLE.permute(1, 4, 0, 2, 3).flatten(0, 1)
    N = len(lanes_NTWL)

    def by_halves(numbers):
        for _ in range(5):
            numbers = numbers[..., ::2] + numbers[..., 1::2]
        return numbers[..., 0]

    total = torch.zeros(T, warps, 32)
    for each in lanes_NTWL:
        total = total + each
    mean_TW = by_halves(total) * torch.tensor(1 / (32 * N), dtype=torch.float32)
    squares = torch.zeros(T, warps, 32)
    for each in lanes_NTWL:
        away = each - mean_TW[..., None]
        squares = squares + away * away
    square_TW, count = by_halves(squares), 32 * N
    while (W := mean_TW.shape[1]) > 1:
        a, b = mean_TW[:, : W // 2], mean_TW[:, W // 2 :]
        joined = square_TW[:, : W // 2] + square_TW[:, W // 2 :]
        square_TW = (a - b) * (a - b) * (count * count) * (0.5 / count) + joined
        mean_TW = (a * count + b * count) * (0.5 / count)
        count *= 2
    mean, square = mean_TW[:, 0], square_TW[:, 0]
    inverse = torch.rsqrt(mean * mean + square * torch.tensor(1 / H, dtype=torch.float32) + eps)
    return weight * (stream * inverse[:, None])


def norm_in_the_trainers_order(H, T=3):
    x, stream, weight = (numbers(*shape).float() for shape in ((T, H), (T, H), (H,)))
    for before in (None, stream):
        made, added = kernels.norm(x, before, weight, 1e-5)
        held = x if before is None else x + before
        assert torch.equal(added, held)
        wanted = tuned_norm(held, weight, 1e-5, ops.NORM_WARPS[H])
        torch.testing.assert_close(made, wanted, rtol=3e-7, atol=0)
        assert (made == wanted).float().mean() > 0.9
        torch.testing.assert_close(made, ops.norm(x, before, weight, 1e-5)[0], rtol=1e-5, atol=0)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for hidden in ops.NORM_WARPS:
        norm_in_the_trainers_order(hidden)
    for shape in ((64, 6, 2), (128, 4, 4)):
        rope_of_strided_rows(*shape)
    for width in (256, 1100):
        silu_of_any_width(width)
    for rows in (1, 13):
        quantizer_of_every_layout(rows)
