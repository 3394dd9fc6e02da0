"""The engine's aligned operations: the trainer's bits, and that vLLM takes them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.numerics import aligned_ops, dialects, flash_for_te, mismatch_budget, stacks
from benchmarks.numerics.dialects import no_quantize
from benchmarks.numerics.table_forward import Shape
from fp8_nemo.recipe.model_dir import SHIPPED
from tests.nemo.test_glue_with_a_checkout import free_port, imports, libcuda, on_a_cpu  # noqa: F401

HERE = Path(__file__).parent
LLAMA = SHIPPED / "tiny-llama"
HOPPER = ("cuda", 90, 32)
kernels_run = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton comes with a CUDA build of torch"
)


def numbers(*shape: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=draw) * 3).bfloat16()


def inverse_frequencies(head: int, theta: float) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, head, 2, dtype=torch.float32) / head)


@pytest.mark.parametrize(("head", "heads", "kv_heads"), [(64, 4, 2), (128, 3, 3)])
def test_rope_of_any_positions_gives_the_trainers_bits(
    head: int, heads: int, kv_heads: int
) -> None:
    S, theta = 40, 5e5
    qkv = numbers(2 * S, head * (heads + 2 * kv_heads))
    q, k, _ = qkv.split([head * heads, head * kv_heads, head * kv_heads], dim=-1)
    per_head = [each.unflatten(-1, (-1, head)) for each in (q, k)]
    wanted = [each.flatten(-2) for each in dialects.TRAINER["rope"](*per_head, S, theta)]
    order = torch.randperm(2 * S, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(S).repeat(2)[order]
    table = aligned_ops.cos_sin_table(inverse_frequencies(head, theta), 3 * S)
    made = aligned_ops.rope(positions, q[order], k[order], table, head)
    assert all(torch.equal(a, b[order]) for a, b in zip(made, wanted, strict=True))
    engine = dialects.ENGINES["eager"]["rope"](*per_head, S, theta)
    assert not torch.equal(made[0], engine[0].flatten(-2)[order])


@pytest.mark.parametrize(
    ("by_column", "padded", "strides"),
    [(False, False, (3, 1)), (True, False, (1, 5)), (True, True, (1, 8))],
)
def test_the_quantizer_gives_the_trainers_bits_in_every_layout(
    by_column: bool, padded: bool, strides: tuple[int, int]
) -> None:
    x = numbers(5, 384)
    wanted = dialects.TRAINER["quantize"](x)
    codes, scales = aligned_ops.quantize(x, by_column, padded)
    assert torch.equal(codes.view(torch.uint8), wanted.fp8_TI.view(torch.uint8))
    assert torch.equal(scales, wanted.scale_inv_TQ)
    assert scales.stride() == strides


def test_silu_gives_the_trainers_bits() -> None:
    gate_up = numbers(64, 512)
    assert torch.equal(aligned_ops.silu(gate_up), dialects.TRAINER["silu"](gate_up))
    assert not torch.equal(aligned_ops.silu(gate_up), dialects.ENGINES["eager"]["silu"](gate_up))


@pytest.mark.parametrize("engine", ["eager", "graphs"])
@pytest.mark.parametrize("precision", ["fp8-e2e", "fp8-linear", "bf16"])
def test_an_aligned_table_differs_in_the_order_of_sums_alone(engine: str, precision: str) -> None:
    trainer, aligned = dialects.tables(Shape.read(LLAMA), precision, engine, align=True, flash=True)
    other = {op for op in trainer if trainer[op] != aligned[op]}
    linear = {"quantize"} if precision == "fp8-linear" else set()
    assert other == {"gemm", "lm_head", "logprob"} | linear
    if precision != "bf16":
        assert aligned["quantize"] is dialects.TRAINER["quantize"]
    else:
        assert aligned["quantize"] is no_quantize


def test_a_budget_of_an_aligned_engine_leaves_nothing_to_what_is_aligned(tmp_path: Path) -> None:
    words = ["--sequences", "8", "--tokens", "32", "--prompt", "16", "--device", "cpu", "--align"]
    out = tmp_path / "budget.json"
    mismatch_budget.run(mismatch_budget.parse(["run", str(LLAMA), "--out", str(out), *words]))
    found = json.loads(out.read_text())
    assert found["asked"]["align"] is True
    for op in ("norm", *dialects.ALIGNED):
        assert found["alone"][op]["kl"] == 0


@pytest.mark.parametrize(
    ("model", "engine"), [("tiny-qwen3-moe", "eager"), ("tiny-llama", "fused")]
)
def test_what_nothing_aligns_is_refused(model: str, engine: str) -> None:
    with pytest.raises(ValueError, match=r"--align: a dense model, --engine eager or graphs"):
        dialects.tables(Shape.read(SHIPPED / model), "fp8-e2e", engine, align=True)


def test_a_cache_holds_all_sequences_in_pages() -> None:
    shape = Shape.read(LLAMA)
    page = 2 * 2 * stacks.PAGE * shape.layers * shape.kv_heads * shape.head_dim
    for N, S in ((1, 16), (8, 352), (256, 40)):
        pages = max(N, 16) * -(-(S + stacks.PAGE) // stacks.PAGE)
        assert pages * page <= stacks._kv_bytes(shape, N, S) <= 4 * pages * page


@kernels_run
def test_the_kernels_give_torchs_bits() -> None:
    script = HERE / "interpreted_aligned_kernels.py"
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]


@kernels_run
def test_rope_for_hopper_has_the_trainers_two_instructions() -> None:
    assert instructions("_rope", {
        "positions": "*i64", "query": "*bf16", "key": "*bf16", "turned_query": "*bf16",
        "turned_key": "*bf16", "cos_sin": "*fp32",
    }, {"HALF": 64}, "mul.f32", "fma.rn.f32", "add.f32") == [4, 4, 0]  # fmt: skip


@kernels_run
def test_silu_and_the_quantizer_compile_for_hopper_with_exact_divisions() -> None:
    values = {"gate_up": "*bf16", "result": "*bf16"}
    assert instructions("_silu", values, {"COLUMNS": 1024}, "div.full.f32", "fma.rn.f32")[1] == 0
    values = {"x": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32", "largest": "fp32"}
    found = instructions("_quantize", values, {"ROWS": 8}, "div.rn.f32", "div.full", "fma.rn.f32")
    assert found[0] > 0
    assert found[1:] == [0, 0]


def instructions(
    name: str, types: dict[str, str], constants: dict[str, int], *of: str
) -> list[int]:
    """How often instructions stand in a kernel's PTX for Hopper."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from benchmarks.numerics import aligned_kernels

    kernel = getattr(aligned_kernels, name)
    signature = {
        n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names
    }
    constexprs = {(kernel.arg_names.index(n),): value for n, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=constexprs)
    ptx = triton.compile(source, target=GPUTarget(*HOPPER)).asm["ptx"]
    return [ptx.count(each) for each in of]


@imports
def test_vllm_builds_the_aligned_operations_and_they_give_the_trainers_bits(
    libcuda: Path,  # noqa: F811
) -> None:
    script = str(HERE / "vllm_builds_aligned.py")
    call = [sys.executable, script, str(LLAMA), str(free_port())]
    environment = on_a_cpu(libcuda)
    run = subprocess.run(call, capture_output=True, text=True, timeout=400, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.strip().splitlines()[-1])
    assert found["before"] == ["RotaryEmbedding", "SiluAndMul", "QuantFP8", "QuantFP8"]
    assert found["after"] == ["AlignedRope", "AlignedSilu", *["AlignedQuantizer"] * 2]
    assert found["equal"] == {"rope": True, "silu": True, "codes": True, "scales": True,
                              "strides": [1, 32]}  # fmt: skip


def test_transformer_engine_finds_the_lent_flash_attention(tmp_path: Path) -> None:
    code = f"""
import sys
from importlib.metadata import version
from pathlib import Path
from benchmarks.numerics import flash_for_te
flash_for_te.lend(Path({str(tmp_path)!r}))
from flash_attn_3.flash_attn_interface import (
    _flash_attn_backward, _flash_attn_forward, flash_attn_func, flash_attn_varlen_func,
    flash_attn_with_kvcache)
print(version("flash-attn-3"))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "3.0.0", run.stderr


def test_a_trainer_that_attends_by_flash_says_so_to_its_process() -> None:
    words = ["run", "x", "--out", "y", "--attention", "flash"]
    made = stacks.environment(mismatch_budget.parse(words))
    assert made["NVTE_FUSED_ATTN"] == "0"
    assert "NVTE_FUSED_ATTN" not in stacks.environment(mismatch_budget.parse(words[:4]))
    assert flash_for_te.ENVIRONMENT.items() <= made.items()
