"""benchmarks.speed.refit runs here on a CPU; its seconds are of a GPU alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fp8_nemo.glue.wire import named_shapes, wire_specs
from fp8_nemo.plan.model import count
from fp8_nemo.recipe.compose import compose

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3-moe"])
def test_what_is_streamed_are_the_bytes_of_the_estimate_and_all_of_it_lands(model, tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "found.json"
    words = ["--out", str(out), "--model", model, "--repetitions", "3", "--rows", "8,16"]
    command = [sys.executable, "-m", "benchmarks.speed.refit", *words]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    content = json.loads(out.read_text())
    assert content["model"] == model and [row["rows"] for row in content["watch"]] == [8, 16]
    [recipe] = compose([f"model={model}", "precision=fp8-kv-attn"])
    weighs = count(recipe.model.shape, recipe.precision)
    specs = wire_specs(named_shapes(shape := recipe.model.shape), recipe.precision, shape.layers)
    digested = len(specs) - 3 * shape.layers
    sent = {row["stream"]: row["bytes"] for row in content["stream"]}
    loaded = [sent[f"FP8, loaded, verify={verify}"] for verify in ("off", "names", "bytes")]
    assert loaded == [weighs.refit_bytes] * 3
    assert 0 < sent["FP8"] - weighs.refit_bytes < 2e3  # sentinel and manifest
    assert sent["FP8, digests"] - sent["FP8"] == 8 * digested
    assert 0 < sent["BF16"] - weighs.refit_bytes_bf16 < 2e5
    for row in content["stream"]:
        assert len(row["seconds"]["repetitions"]) == 3 and row["seconds"]["median"] > 0
    found = {row["stream"]: (row["of_loaded"], row["more_ms"]) for row in content["stream"]}
    assert found["FP8, loaded, verify=off"] == (1, 0) and found["FP8"] == (None, None)
    assert all(isinstance(x, float) for x in found["FP8, loaded, verify=bytes"])


def test_the_hosts_part_is_timed_without_a_device_of_as_many_tensors_as_the_model_has(tmp_path):
    pytest.importorskip("triton", reason="Triton comes with a CUDA build of torch")
    words = ["--out", str(tmp_path / "found.json"), "--model", "tiny-llama", "--repetitions", "2"]
    command = [sys.executable, "-m", "benchmarks.speed.proof_host", *words]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    content = json.loads((tmp_path / "found.json").read_text())
    [recipe] = compose(["model=tiny-llama", "precision=fp8-kv-attn"])
    shape = recipe.model.shape
    specs = wire_specs(named_shapes(shape), recipe.precision, shape.layers)
    assert content["tensors"] == len(specs) and content["groups"] == 1
    found = {row["refit"]: row for row in content["rows"]}
    assert found["loaded, off"]["more_ms"] == 0 and len(found) == 5
    assert all(len(row["host_ms"]["repetitions"]) == 2 for row in found.values())
