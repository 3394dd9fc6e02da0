"""The bench's tables of an aligned engine, and what its stacks are given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.numerics import dialects, flash_for_te, mismatch_budget, stacks
from benchmarks.numerics.dialects import no_quantize
from benchmarks.numerics.table_forward import Shape
from fp8_nemo.recipe.model_dir import SHIPPED

LLAMA = SHIPPED / "tiny-llama"


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


def test_lent_too_late_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, flash_for_te.LOOKS, sys)
    with pytest.raises(RuntimeError, match="lend before it"):
        flash_for_te.lend(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_megatron_side_lends_before_megatron_is_imported(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core", reason="needs Megatron-LM on PYTHONPATH")
    code = f"""
from argparse import Namespace
from pathlib import Path
from benchmarks.numerics import flash_for_te, stacks
try:
    stacks.megatron_side(Namespace(attention="flash", folder=Path({str(tmp_path)!r})))
finally:
    import transformer_engine.pytorch.attention.dot_product_attention.utils as utils
    print("found", utils.FlashAttentionUtils.v3_is_installed)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "found True" in run.stdout, run.stderr  # it ends where it takes its GPU


def test_a_trainer_that_attends_by_flash_says_so_to_its_process() -> None:
    words = ["run", "x", "--out", "y", "--attention", "flash"]
    made = stacks.environment(mismatch_budget.parse(words))
    assert made["NVTE_FUSED_ATTN"] == "0"
    assert "NVTE_FUSED_ATTN" not in stacks.environment(mismatch_budget.parse(words[:4]))
    assert flash_for_te.ENVIRONMENT.items() <= made.items()
