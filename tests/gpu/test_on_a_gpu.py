"""On a CUDA device: the bytes of a CPU, and runs that repeat themselves. `pytest -m gpu`."""

import json

import pytest
import torch

from fp8_nemo import run_dir
from fp8_nemo.local.grpo import Run
from fp8_nemo.quantize import dequantize_blocks, quantize_blocks, quantize_groups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def weight(*shape: int) -> torch.Tensor:
    random = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    random[..., :128, :128] *= 1e-30  # small blocks, where a device that flushes subnormals differs
    random[..., 128:256, :128] = 0
    return random.bfloat16()


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("formula", ["exact", "stock"])
@pytest.mark.parametrize("shape", [(512, 384), (3, 256, 256)])
def test_a_gpu_quantizes_weights_to_the_bytes_of_a_cpu(shape, formula, pow2):
    if formula == "stock" and pow2:
        pytest.skip("stock's log2 is the device's own")
    cpu = quantize_blocks(weight(*shape), pow2=pow2, formula=formula)
    gpu = quantize_blocks(weight(*shape).cuda(), pow2=pow2, formula=formula)
    assert torch.equal(cpu.fp8_OI.view(torch.uint8), gpu.fp8_OI.view(torch.uint8).cpu())
    assert torch.equal(cpu.scale_inv_PQ, gpu.scale_inv_PQ.cpu())
    assert torch.equal(dequantize_blocks(cpu), dequantize_blocks(gpu).cpu())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_quantizes_activations_to_the_bytes_of_a_cpu(dtype):
    x = weight(300, 300).to(dtype)
    cpu, gpu = quantize_groups(x), quantize_groups(x.cuda())
    assert torch.equal(cpu.fp8_TI.view(torch.uint8), gpu.fp8_TI.view(torch.uint8).cpu())
    assert torch.equal(cpu.scale_inv_TQ, gpu.scale_inv_TQ.cpu())


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3-moe"])
def test_a_run_on_a_gpu_repeats_itself(make_plan, tmp_path, model):
    curves = []
    for name in ("one", "two"):
        plan = make_plan(
            f"model={model}", "precision=fp8-e2e-kv-attn", f"outputs={tmp_path}/{name}"
        )
        [frozen] = run_dir.freeze([plan])
        torch.use_deterministic_algorithms(True)
        Run(plan, frozen.path).train(lambda row: None)
        rows = run_dir.read_metrics(frozen.path)
        curves.append([{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows])
    assert json.dumps(curves[0]) == json.dumps(curves[1])
