"""The kernel before XQA on a CPU under Triton's interpreter, against torch's.

A process of its own, TRITON_INTERPRET being read when a kernel is defined.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from fp8_nemo.nemo.decode import attention, kernels


def of(T, A, K, D):
    codes = torch.randn(T, A, D).mul(100).to(torch.float8_e4m3fn)
    scales = [torch.rand(1) + 0.1 for _ in "qkv"]
    lengths = torch.arange(T, dtype=torch.int32) * 700
    made = kernels.prepare(codes, *scales, lengths, K, 1.25)
    wanted = attention.prepare(codes, *scales, lengths, K, 1.25)
    for found, each in zip(made, wanted, strict=True):
        assert found.dtype == each.dtype and found.shape == each.shape
        torch.testing.assert_close(found, each, rtol=3e-7, atol=0)


if __name__ == "__main__":
    torch.manual_seed(0)
    of(1, 4, 1, 64)
    of(13, 28, 4, 128)
