"""Ring 3: decode steps by XQA (`glue.decode`) attend as FlashAttention 3 does."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch

from fp8_nemo.nemo.decode import attention
from fp8_nemo.nemo.decode.attention import by_xqa, is_decode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not here")
        for name in ("vllm", "flashinfer")
    ),
]
SHAPES = [
    (32, 8, 128),
    (32, 4, 128),
    (28, 4, 128),
    (24, 8, 128),
    (12, 2, 128),
    (32, 8, 64),
    (40, 8, 128),
    (16, 8, 128),
    (8, 8, 128),
]
"""Query heads, KV heads and head dimension of 8B, 30B-A3B, Qwen2.5 7B, Llama 3.2 3B, Qwen2.5 1.5B,
Llama 3.2 1B, Qwen3 14B, Qwen3 1.7B, and of no group."""
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 700, 4097, 0, 1, 129]


class Given(NamedTuple):
    """A call of FlashAttention's, and what attention in FP32 makes of it."""

    options: dict
    wanted: torch.Tensor


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile XQA for every shape at once; one after the other they take minutes."""
    from flashinfer.jit.xqa import gen_xqa_module

    kinds = {(D, A // K) for A, K, D in SHAPES}

    def build(kind):
        types = torch.bfloat16, torch.float8_e4m3fn
        gen_xqa_module(*types, 16, *kind, False, torch.bfloat16, 1).build(verbose=False)

    with ThreadPoolExecutor(len(kinds)) as pool:
        list(pool.map(build, kinds))


def given(A, K, D, lengths=LENGTHS, q_scale=0.02, k_scale=0.01, v_scale=0.03, page=16):
    torch.manual_seed(0)
    T, most = len(lengths), -(-max(lengths) // page)
    table = torch.randperm(T * most, device="cuda").view(T, most).int()
    drawn = torch.randn(T * most, 2, page, K, D, device="cuda")
    held = drawn / torch.tensor([k_scale, v_scale], device="cuda").view(1, 2, 1, 1, 1)
    cache = held.clamp(-448, 448).to(torch.float8_e4m3fn)
    q = (torch.randn(T, A, D, device="cuda") / q_scale).to(torch.float8_e4m3fn)
    scales = [torch.tensor(each, device="cuda") for each in (q_scale, k_scale, v_scale)]
    options = {
        "q": q, "k": cache[:, 0], "v": cache[:, 1],
        "out": torch.empty(T, A, D, device="cuda", dtype=torch.bfloat16),
        "cu_seqlens_q": torch.arange(T + 1, device="cuda").int(), "max_seqlen_q": 1,
        "seqused_k": torch.tensor(lengths, device="cuda").int(), "max_seqlen_k": max(lengths),
        "softmax_scale": D**-0.5, "causal": True, "block_table": table, "fa_version": 3,
        **{f"{name}_descale": scale.expand(T, K)
           for name, scale in zip("qkv", scales, strict=True)},
    }  # fmt: skip
    return Given(options, in_fp32(options))


def in_fp32(options):
    found = []
    q = options["q"].float() * options["q_descale"][0, 0]
    for row, (length, pages) in enumerate(
        zip(options["seqused_k"].tolist(), options["block_table"].long(), strict=True)
    ):
        k, v = (
            options[name][pages].flatten(0, 1)[: max(length, 1)].float()
            * options[f"{name}_descale"][0, 0]
            for name in "kv"
        )
        heads = q[row].view(k.shape[1], -1, q.shape[-1])
        weights = torch.einsum("hgd,thd->hgt", heads, k) * options["softmax_scale"]
        found.append(torch.einsum("hgt,thd->hgd", weights.softmax(-1), v).flatten(0, 1))
    return torch.stack(found)


def distance(found, wanted, rows):
    found, wanted = found[rows].float(), wanted[rows]
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_xqa_is_as_near_to_attention_as_flash_attention_3(shape):
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    options, wanted = given(*shape)
    rows = [row for row, length in enumerate(LENGTHS) if length]
    flash_attn_varlen_func(**options)
    by_flash = distance(options["out"], wanted, rows)
    options["out"].fill_(torch.nan)
    assert is_decode(**options)
    made = by_xqa(None)(**options)  # type: ignore[arg-type]  # it must not be called
    assert made is options["out"] and bool(made[rows].isfinite().all())
    assert distance(made, wanted, rows) < 1.15 * by_flash < 0.06


@pytest.mark.parametrize("spread", [1, 4, 8])
def test_few_long_sequences_that_are_cut_in_parts(monkeypatch, spread):
    monkeypatch.setattr(attention, "SPREAD", spread)
    options, wanted = given(32, 8, 128, [20_000, 3, 9_001])
    for _ in range(3):
        by_xqa(None)(**options)  # type: ignore[arg-type]
        assert distance(options["out"], wanted, [0, 1, 2]) < 0.06


def test_a_captured_graph_takes_scales_and_lengths_as_they_are_when_it_is_replayed():
    options, before = given(32, 8, 128)
    rows = [row for row, length in enumerate(LENGTHS) if length]
    attend = by_xqa(None)  # type: ignore[arg-type]
    attend(**options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(**options)
    for name, factor in (("q", 1.5), ("k", 0.5), ("v", 3.0)):
        options[f"{name}_descale"][0, 0].mul_(factor)
    options["seqused_k"].copy_(options["seqused_k"].flip(0))
    rows = [row for row, length in enumerate(options["seqused_k"].tolist()) if length]
    after = in_fp32(options)
    assert distance(before, after, rows) > 0.5
    for _ in range(2):
        options["out"].fill_(torch.nan)
        graph.replay()
        assert distance(options["out"], after, rows) < 0.06


def test_triton_prepares_what_torch_does():
    options, _ = given(32, 4, 128, v_scale=0.3)
    scales = [options[f"{name}_descale"][0, :1] for name in "qkv"]
    made = attention.prepare(options["q"], *scales, options["seqused_k"], 4, 1.25)
    on_cpu = [each.cpu() for each in (options["q"], *scales, options["seqused_k"])]
    wanted = attention.prepare(*on_cpu, 4, 1.25)
    for found, each in zip(made, wanted, strict=True):
        torch.testing.assert_close(found.cpu(), each, rtol=3e-7, atol=0)
