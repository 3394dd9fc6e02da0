"""Our four bits are ModelOpt's, byte by byte, and vLLM reads from them the values that we do."""

import importlib.util

import pytest
import torch

from fp8_nemo.glue.quantize import dequantize_nvfp4, quantize_nvfp4

WEIGHTS = {
    "normal": torch.randn(256, 512, generator=torch.Generator().manual_seed(1)) * 0.02,
    "heavy tails": torch.randn(64, 128, generator=torch.Generator().manual_seed(2)) ** 5,
    "small groups": torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    * torch.logspace(-8, 0, 64)[:, None],
    "halves": torch.arange(-512.0, 512).view(32, 32) / 64,
}


def needs(package: str):
    found = importlib.util.find_spec(package)
    return pytest.mark.skipif(found is None, reason=f"{package} is not here")


@needs("modelopt")
@pytest.mark.parametrize("name", WEIGHTS)
def test_bytes_and_scales_are_those_of_modelopt(name):
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weight = WEIGHTS[name].bfloat16()
    found, scale, scale_2 = NVFP4QTensor.quantize(weight.clone(), 16)
    ours = quantize_nvfp4(weight, torch.tensor(False))
    assert torch.equal(ours.packed_OI, found._quantized_data)
    assert torch.equal(ours.scale_OG.view(torch.uint8), scale.view(torch.uint8))
    assert ours.scale_2.item() == scale_2.item()


@needs("vllm")
@pytest.mark.parametrize("name", WEIGHTS)
def test_vllm_reads_the_values_that_we_read(name):
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
        dequantize_to_dtype,
    )

    ours = quantize_nvfp4(WEIGHTS[name], torch.tensor(False))
    found = dequantize_to_dtype(*ours, torch.float32, 16, swizzle=False)
    assert torch.allclose(found, dequantize_nvfp4(ours), rtol=1e-6, atol=0)  # it scales the scale
