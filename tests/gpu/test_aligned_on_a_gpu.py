"""Ring 3: what `precision.align=exact` replaces gives the other side's bits."""

import importlib.util

import pytest
import torch

from fp8_nemo.nemo.aligned import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not here")
        for name in ("vllm", "transformer_engine")
    ),
]
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


@pytest.mark.parametrize("hidden", list(ops.NORM_WARPS))
def test_the_norm_gives_transformer_engines_bits(hidden):
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch as tex

    torch.manual_seed(0)
    weight = torch.randn(hidden, **BF16)
    for rows in (4, 60, 4096):
        x, stream = (torch.randn(rows, hidden, **BF16) * 2**n for n in (0, 3))
        for before in (None, stream):
            made, added = ops.norm(x, before, weight, 1e-5)
            held = x if before is None else x + before
            wanted = tex.rmsnorm_fwd(held, weight, 1e-5, None, None, tex.DType.kBFloat16, 0, False)
            assert torch.equal(added, held)
            assert torch.equal(made, wanted[0])


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (32, 8)])
def test_decode_over_pages_gives_the_trainers_bits(heads, kv_heads):
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    from fp8_nemo.nemo.aligned.attention import EngineAttention
    from fp8_nemo.nemo.aligned.exact import unsplit

    torch.manual_seed(1)
    lengths, page = [1, 17, 128, 129, 700, 3001], 16
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    q, k, v = (torch.randn(sum(lengths), n, 128, **BF16) for n in (heads, kv_heads, kv_heads))
    whole = EngineAttention.apply(q, k, v, starts, max(lengths))
    most = -(-max(lengths) // page)
    table = torch.arange(len(lengths) * most, device="cuda").view(len(lengths), most).int()
    pages = torch.zeros(2, table.numel(), page, kv_heads, 128, **BF16)
    for row, (start, length) in enumerate(zip(starts.tolist(), lengths, strict=False)):
        for of, x in zip(pages, (k, v), strict=True):
            of.view(len(lengths), most * page, kv_heads, 128)[row, :length] = x[start:][:length]
    ones = torch.arange(len(lengths) + 1, device="cuda").int()
    decoded = unsplit(flash_attn_varlen_func)(
        q[starts[1:] - 1], *pages, 1, ones, max(lengths), causal=True, fa_version=3,
        seqused_k=torch.tensor(lengths, device="cuda").int(), block_table=table,
    )  # fmt: skip
    assert torch.equal(decoded, whole[starts[1:] - 1])


@pytest.mark.parametrize(("vocabulary", "hidden"), [(128256, 4096), (128256, 2048), (128, 768)])
def test_a_head_gives_few_rows_the_bits_of_many(vocabulary, hidden):
    torch.manual_seed(3)
    weight = torch.randn(vocabulary, hidden, **BF16) * 0.02
    x = torch.randn(4096, hidden, **BF16)
    whole = torch.nn.functional.linear(x, weight)
    for rows in (1, 2, 3, 7, 16, 17, 40, 63, 64, 65, 100, 256, 500):
        assert torch.equal(torch.nn.functional.linear(x[:rows], weight), whole[:rows])


@pytest.mark.parametrize(
    ("out", "columns"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
)
def test_the_trainers_products_from_enough_rows_on_are_the_engines(out, columns):
    from benchmarks.numerics.table_forward import Weight
    from benchmarks.numerics.te_kernels import te_gemm, te_quantize
    from benchmarks.numerics.vllm_kernels import vllm_gemm
    from fp8_nemo.glue.quantize import Fp8Groups, quantize_blocks
    from fp8_nemo.nemo.aligned.rows import ROWS

    torch.manual_seed(4)
    weight = torch.randn(out, columns, **BF16) * 0.02
    weight = Weight(weight, *quantize_blocks(weight))
    codes = te_quantize(torch.randn(2 * ROWS, columns, **BF16))
    engine = vllm_gemm(codes, weight)
    for rows in (ROWS, ROWS + 128, 2 * ROWS):
        many = Fp8Groups(*(part[:rows].contiguous() for part in codes))
        assert torch.equal(te_gemm(many, weight), engine[:rows])
    few = Fp8Groups(*(part[:40].contiguous() for part in codes))
    assert torch.equal(vllm_gemm(few, weight), engine[:40])


def test_gradients_of_the_engines_attention_are_those_of_attention():
    from fp8_nemo.nemo.aligned.attention import EngineAttention

    torch.manual_seed(2)
    lengths = [300, 212]
    starts = torch.tensor([0, 300, 512], device="cuda").int()
    given = [torch.randn(512, n, 128, **BF16).requires_grad_() for n in (8, 2, 2)]
    gradient = torch.randn(512, 8, 128, **BF16)
    made = torch.autograd.grad(EngineAttention.apply(*given, starts, 300), given, gradient)
    parts = []
    for q, k, v in zip(*(x.float().split(lengths) for x in given), strict=True):
        parts.append(
            torch.nn.functional.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
            )[0].transpose(0, 1)
        )
    wanted = torch.autograd.grad(torch.cat(parts), given, gradient.float())
    for a, b in zip(made, wanted, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=0.05, atol=0.05)
