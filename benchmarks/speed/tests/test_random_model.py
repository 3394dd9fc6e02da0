"""A checkpoint of random weights is one that transformers would have written."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.speed import random_model
from fp8_nemo.recipe.compose import compose


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3-moe", "qwen25-1_5b"])
def test_what_is_written_loads_whole_with_the_deviations_that_transformers_gives(model, tmp_path):
    [recipe] = compose([f"model={model}", "backend=nemo", "precision=bf16"])
    small = {"layers": 3, "hidden": 64, "ffn": 128, "vocab": 512, "heads": 4, "kv_heads": 2}
    shape = dataclasses.replace(recipe.model.shape, head_dim=64, **small)
    random_model.write(shape, tmp_path, k_bias=8.0)
    loaded, seen = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(seen.values()), seen
    made, loaded = dict(random_model.build(shape).named_parameters()), loaded.state_dict()
    assert loaded.keys() >= made.keys()
    for name, weight in made.items():
        deviation = 8.0 if name.endswith("k_proj.bias") else weight.float().std().item()
        assert loaded[name].dtype == torch.bfloat16 and loaded[name].shape == weight.shape
        assert loaded[name].float().std().item() == pytest.approx(deviation, rel=0.3), name
        assert loaded[name].float().mean().item() == pytest.approx(
            weight.float().mean().item(), abs=0.01 if "bias" not in name else 4.0
        )
