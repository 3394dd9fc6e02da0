"""Ring 3: the real NeMo RL on one GPU, with the tiny model that ships; five minutes."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from fp8_nemo.runs.metrics import read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif("NEMO_RL_ROOT" not in os.environ, reason="NEMO_RL_ROOT: no checkout"),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="NeMo RL's packages are not installed here (docs/install.md)",
    ),
]


def grpo(outputs, *arguments):
    command = [sys.executable, "-m", "fp8_nemo.recipes.grpo", "backend=nemo"]
    command += ["model=tiny-llama", "cluster.interpreter=system", "cluster.gpus_per_node=1"]
    command += ["+nemo.policy.generation.vllm_cfg.enforce_eager=true", f"outputs={outputs}"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize("glue", ["stock", "ours"])
def test_an_fp8_run_learns_resumes_with_more_steps_and_holds_the_plans_weights(tmp_path, glue):
    cell = [f"glue={glue}", "precision=fp8-e2e-kv-attn", "correction=geo-mis"]
    first = grpo(tmp_path, *cell, "grpo.steps=2")
    assert first.returncode == 0, first.stderr[-2000:]
    [run] = tmp_path.glob("tiny-llama/*/*")
    before = read_metrics(run)
    steps = [row for row in before if row["step"]]  # stock has no first validation under FP8 KV
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["reward/mean"] > 0 and 0 < row["mismatch/kl"] < 0.1
        assert row["refit/bytes"] == steps[0]["refit/bytes"] > 0
    assert "recalibrate/max_drift" in steps[0] and "val/accuracy" in steps[-1]
    dtypes = json.loads((run / "log" / "engine.json").read_text())
    assert dtypes["model.layers.0.self_attn.qkv_proj.weight"] == "torch.float8_e4m3fn"
    assert dtypes["lm_head.weight"] == "torch.bfloat16"

    more = grpo(tmp_path, *cell, "grpo.steps=3")
    assert more.returncode == 0, more.stderr[-2000:]
    after = read_metrics(run)
    assert after[:-1] == before and after[-1]["step"] == 3
    if glue == "ours":  # ranges measured anew would start at first_margin, and shrink by half
        drifts = [row["recalibrate/max_drift"] for row in (steps[0], after[-1])]
        assert drifts[0] > 0.3 > drifts[1]
