"""The budget on a CPU, where both sides are torch: what is zero, what is not, and what is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.numerics import dialects, mismatch_budget
from benchmarks.numerics.dialects import forward
from fp8_nemo.glue.quantize import dequantize_groups, quantize_groups
from fp8_nemo.recipe.model_dir import SHIPPED

MODELS = ("tiny-llama", "tiny-qwen3-moe")
SIZES = ["--sequences", "8", "--tokens", "32", "--prompt", "16", "--device", "cpu"]
NO_BF16_MATTER = {"gemm", "attention", "expert gemm", "lm_head", "logprob"}
"""Whose two ways differ by the order of FP32 sums alone, which two blocks of 128 do not show."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep threads from waiting for each other over operations of microseconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measured(tmp_path: Path, model: str, *words: str) -> dict:
    out = tmp_path / "budget.json"
    command = ["run", str(SHIPPED / model), "--out", str(out), *SIZES, *words]
    mismatch_budget.run(mismatch_budget.parse(command))
    return json.loads(out.read_text())


@pytest.mark.parametrize("model", MODELS)
def test_the_forward_in_bf16_is_transformers(model: str) -> None:
    tokens = torch.randint(3, 128, (4, 32), generator=torch.Generator().manual_seed(1))
    ours = dialects.load(SHIPPED / model, "cpu", fp8=False)
    trainer, engine = dialects.tables(ours.shape, "bf16", "eager")
    theirs = AutoModelForCausalLM.from_pretrained(SHIPPED / model, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(tokens).logits.flatten(0, 1).log_softmax(-1)
    for ops in (trainer, engine):
        found = forward(ours, ops, tokens).logits_TV.log_softmax(-1)
        assert (found - expected).abs().mean() < 0.03


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", ["eager", "fused"])
def test_nothing_is_left_once_all_are_replaced(tmp_path: Path, model: str, engine: str) -> None:
    found = measured(tmp_path, model, "--engine", engine)
    names = list(found["cumulative"])
    last = found["cumulative"][names[-1]]
    assert last["kl"] == 0
    assert last["equal"] == 1
    assert all(each["equal"] == 1 for each in last["streams"])
    assert found["controls"]["nothing replaced"]["kl"] > 1e-4
    assert found["controls"]["the trainer again"]["equal"] == 1
    # The first replaced of several and the last left out are the same mixture, each to its end.
    assert list(found["alone"]) == names == list(found["without"])


def test_each_operation_changes_what_it_is_called_for(tmp_path: Path) -> None:
    found = measured(tmp_path, "tiny-qwen3-moe", "--engine", "fused")
    changed = {name for name, each in found["alone"].items() if each["kl"] > 1e-7}
    assert changed == {"norm", "rope", "expert silu", "weigh", "quantize", "router"}
    differs = {row["op"] for row in found["local"]["rows"] if row["equal"] < 1}
    # `weigh` moves a number from one operation to the other; `sum` of two rows rounds once anyway.
    assert changed - {"weigh"} <= differs
    assert differs - changed <= NO_BF16_MATTER


def test_a_bf16_budget_has_no_quantizer(tmp_path: Path) -> None:
    found = measured(tmp_path, "tiny-llama", "--precision", "bf16")
    assert "quantize" not in found["alone"]
    assert found["alone"]["rope"]["kl"] > 1e-6
    assert found["alone"]["norm"]["kl"] == 0  # eager: the same rounding, and in torch the same sum


def test_an_operation_that_fails_is_an_error_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such kernel")

    whole = dialects.tables

    def tables(*arguments: object) -> tuple[dict, dict]:
        trainer, engine = whole(*arguments)  # type: ignore[arg-type]
        # Only where it is replaced alone: the engine's own forward must run.
        calls = iter(range(10**6))
        rope = engine["rope"]
        layers = 2

        def at_first(*given: object) -> object:
            # whole engine, its control, the local rows: then the replacement alone fails
            return broken() if next(calls) == 3 * layers else rope(*given)

        return trainer, engine | {"rope": at_first}

    monkeypatch.setattr(dialects, "tables", tables)
    monkeypatch.setattr(mismatch_budget, "sample_tokens", fixed_tokens)
    found = measured(tmp_path, "tiny-llama")
    assert found["alone"]["rope"] == {"error": "RuntimeError: no such kernel"}
    assert found["alone"]["quantize"]["kl"] > 0
    assert found["cumulative"]["logprob"]["kl"] == 0


def test_stacks_that_do_not_run_are_errors_and_the_budget_is_made(tmp_path: Path) -> None:
    found = measured(tmp_path, "tiny-llama", "--stacks", "both")
    for side in ("vllm", "megatron"):
        assert f"No module named '{side}" in found["stacks"][side]["error"]
    assert found["cumulative"]["logprob"]["kl"] == 0


def fixed_tokens(model: object, ops: object, N: int, S: int, *_: int) -> torch.Tensor:
    return torch.randint(3, 128, (N, S), generator=torch.Generator().manual_seed(2))


def test_a_difference_of_quantized_operands_tells_bytes_from_scales() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    ours, theirs = quantize_groups(x), dialects.quantize_vllm(x)
    found = dialects.difference(ours, theirs)
    assert found["equal"] > 0.99
    assert found["equal_scales"] < 0.95
    assert dialects.difference(ours, ours) == {
        "equal": 1.0, "mean": 0.0, "max": 0.0, "relative": 0.0, "equal_scales": 1.0,
    }  # fmt: skip
    largest = (dequantize_groups(ours) - dequantize_groups(theirs)).abs().max()
    assert found["max"] == pytest.approx(float(largest))


def test_sizes_that_no_kernel_takes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mismatch_budget.parse(["run", "x", "--out", "y", "--sequences", "3", "--tokens", "50"])
    assert "got 150; a multiple of 128" in capsys.readouterr().err


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    measured(tmp_path, "tiny-llama")
    out = tmp_path / "budget.svg"
    mismatch_budget.draw([tmp_path / "budget.json"], out)
    text = out.read_text()
    assert all(f"<!-- {name} -->" in text for name in ("rope", "quantize", "attention"))
