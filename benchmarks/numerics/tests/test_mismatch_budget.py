"""The budget on a CPU, where both sides are torch: what is zero, what is not, and what is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.numerics import dialects, mismatch_budget, stacks
from benchmarks.numerics.table_forward import forward, load
from fp8_nemo.glue.quantize import dequantize_groups, quantize_groups
from fp8_nemo.recipe.model_dir import SHIPPED

ROOT = Path(__file__).parents[3]

MODELS = ("tiny-llama", "tiny-qwen3-moe")
SIZES = ["--sequences", "8", "--tokens", "32", "--prompt", "16", "--device", "cpu"]
ORDER_ALONE = {"gemm", "attention", "expert gemm", "lm_head", "logprob"}
"""Whose two ways differ by the order of FP32 sums alone, which two blocks of 128 hardly show."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep threads from waiting for each other over operations of microseconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def budget(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Measure a model in a precision and an engine once, for every test that asks."""

    @cache
    def measured(model: str, precision: str, engine: str) -> Path:
        out = tmp_path_factory.mktemp("budget") / "budget.json"
        words = ["--out", str(out), "--precision", precision, "--engine", engine, *SIZES]
        mismatch_budget.run(mismatch_budget.parse(["run", str(SHIPPED / model), *words]))
        return out

    return measured


@pytest.mark.parametrize("model", MODELS)
def test_the_forward_in_bf16_is_transformers(model: str) -> None:
    tokens = torch.randint(3, 128, (4, 32), generator=torch.Generator().manual_seed(1))
    ours = load(SHIPPED / model, "cpu", fp8=False)
    theirs = AutoModelForCausalLM.from_pretrained(SHIPPED / model, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(tokens).logits.flatten(0, 1).log_softmax(-1)
    for ops in dialects.tables(ours.shape, "bf16", "eager"):
        found = forward(ours, ops, tokens).logits_TV.log_softmax(-1)
        assert (found - expected).abs().mean() < 0.03


@pytest.mark.parametrize(
    ("model", "precision", "engine"),
    [
        ("tiny-llama", "fp8-e2e", "eager"),
        ("tiny-llama", "bf16", "eager"),
        ("tiny-qwen3-moe", "fp8-e2e", "fused"),
    ],
)
def test_nothing_is_left_once_all_are_replaced(
    budget: Callable[..., Path], model: str, precision: str, engine: str
) -> None:
    found = json.loads(budget(model, precision, engine).read_text())
    last = list(found["cumulative"].values())[-1]
    assert last["kl"] == 0
    assert last["equal"] == 1
    assert all(each["equal"] == 1 for each in last["streams"])
    assert found["controls"]["nothing replaced"]["kl"] > 1e-6


def test_each_operation_changes_what_it_is_called_for(budget: Callable[..., Path]) -> None:
    found = json.loads(budget("tiny-qwen3-moe", "fp8-e2e", "fused").read_text())
    changed = {name for name, each in found["alone"].items() if each["kl"] > 1e-7}
    assert changed == {"norm", "rope", "expert silu", "weigh", "quantize", "router"}
    differs = {row["op"] for row in found["local"]["rows"] if row["equal"] < 1}
    # `weigh` moves a number from one operation to the other; `sum` of two rows rounds once anyway.
    assert changed - {"weigh"} <= differs <= changed | ORDER_ALONE


def test_a_bf16_budget_has_no_quantizer(budget: Callable[..., Path]) -> None:
    found = json.loads(budget("tiny-llama", "bf16", "eager").read_text())
    assert "quantize" not in found["alone"]
    assert found["alone"]["rope"]["kl"] > 1e-6
    assert found["alone"]["norm"]["kl"] == 0  # eager: the same rounding, and in torch the same sum


def test_only_a_norm_before_a_linear_is_fused_with_its_quantizer() -> None:
    generator = torch.Generator().manual_seed(0)
    stream, delta, weight = (torch.randn(4, 256, generator=generator).bfloat16() for _ in range(3))
    apart, _ = dialects.norm_unrounded(delta, stream, weight, 1e-5, False)
    for to_linear, equal in ((False, True), (True, False)):
        made, kept = dialects.norm_fused(delta, stream, weight, 1e-5, to_linear)
        assert torch.equal(made, apart) == equal
        assert torch.equal(kept, (delta.float() + stream.float()).bfloat16())


def test_an_operation_that_fails_is_an_error_and_the_rest_goes_on(tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("no such kernel")

    kept = mismatch_budget.Budget(tmp_path / "budget.json", "", {})
    kept.add("alone", "rope", broken)
    kept.add("alone", "norm", lambda: {"kl": 0.5})
    found = json.loads((tmp_path / "budget.json").read_text())["alone"]
    assert found == {"rope": {"error": "RuntimeError: no such kernel"}, "norm": {"kl": 0.5}}


def test_a_stack_that_does_not_run_says_why(tmp_path: Path) -> None:
    asked = dict.fromkeys(stacks.PASSED, 1)
    asked |= {"precision": "bf16", "engine": "eager", "attention": "auto"}
    options = SimpleNamespace(model=SHIPPED / "tiny-llama", env=[], align=True, **asked)
    with pytest.raises(RuntimeError, match=r"exit code 1; .*No module named 'vllm'"):
        stacks.ask("vllm", options, tmp_path)  # type: ignore[arg-type]


def test_a_difference_of_quantized_operands_tells_bytes_from_scales() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    ours, theirs = quantize_groups(x), dialects.quantize_vllm(x)
    found = dialects.difference(ours, theirs)
    assert found["equal"] > 0.99
    assert found["equal_scales"] < 0.95
    largest = (dequantize_groups(ours) - dequantize_groups(theirs)).abs().max()
    assert found["max"] == pytest.approx(float(largest))


def test_sizes_that_no_kernel_takes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mismatch_budget.parse(["run", "x", "--out", "y", "--sequences", "3", "--tokens", "50"])
    assert "got 150; a multiple of 128" in capsys.readouterr().err


def test_the_figure_names_each_operation(budget: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "budget.svg"
    mismatch_budget.draw([budget("tiny-llama", "fp8-e2e", "eager")], out)
    text = out.read_text()
    assert all(f"<!-- {name} -->" in text for name in ("rope", "quantize", "attention"))


def test_the_page_says_what_the_files_hold() -> None:
    page = (ROOT / "docs" / "research" / "mismatch.md").read_text()
    tiny, wide, moe = "tiny-llama", "llama-d128", "tiny-qwen3-moe"

    def file(model: str, precision: str, engine: str) -> dict[str, Any]:
        name = f"mismatch-budget-{model}-{precision}-{engine}-h200.json"
        return json.loads((ROOT / "benchmarks" / "results" / name).read_text())

    def said(kl: float) -> str:
        return f"{kl:.{0 if kl < 1e-7 else 1}e}".replace("e-0", "e-") if kl else "0"

    def row(name: str, *parts: tuple[str, str]) -> str:
        cells = (", ".join(said(each[p][n]["kl"]) for p, n in parts) for each in budgets)
        return " | ".join([f"| {name}", *cells]) + " |"

    asked = [(tiny, "fp8-e2e", "eager"), (wide, "fp8-e2e", "eager"), (wide, "fp8-e2e", "fused"),
             (wide, "bf16", "fused"), (moe, "fp8-e2e", "eager")]  # fmt: skip
    budgets = [file(*each) for each in asked]
    assert row("nothing replaced", ("controls", "nothing replaced")) in page
    ops = {"norm and residual": "norm", "RoPE cos/sin": "rope", "attention": "attention"}
    for name, op in ops.items():
        assert row(name, ("alone", op), ("cumulative", op)) in page
    beside = ("decode, engine's table", "megatron, trainer's table", "decode, megatron",
              "decode, prefill")  # fmt: skip
    stacks_ran = [(tiny, "bf16", "eager"), asked[0], (moe, "bf16", "eager"), asked[4],
                  asked[3], asked[2]]  # fmt: skip
    for model, precision, engine in stacks_ran:
        real = file(model, precision, engine)["real"]
        named = f"{'113M Llama' if model == wide else model} `{precision}`, "
        named += "compiled" if engine == "fused" else engine
        cells = [said(real[name]["k3"]) for name in beside]
        assert " | ".join([f"| {named}", *cells]) + " |" in page
