"""Bytes and counts of Llama 3.1 8B and Qwen3-30B-A3B, computed by hand.

The sums are written out per layer from the models' numbers. A refit with FP8 weights must send 43 %
less than one in BF16 for the first and 49 % less for the second.
"""

from pathlib import Path

import pytest
import yaml

from fp8_nemo.estimate import estimate
from fp8_nemo.schema import Precision, Shape

MODELS = Path(__file__).parents[1] / "conf" / "model"
FP8 = Precision(rollout_linear="fp8")
FP8_KV = Precision(rollout_linear="fp8", rollout_kv="fp8")

LLAMA_LINEARS = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
LLAMA_SCALES = 32 * (2 * 32 * 32 + 2 * 8 * 32 + 3 * 112 * 32)
LLAMA_BF16 = 2 * 128256 * 4096 + 65 * 4096  # embedding, head, two norms a layer, the last norm
QWEN_LINEARS = 48 * (2 * 4096 * 2048 + 2 * 512 * 2048 + 128 * 3 * 768 * 2048)
QWEN_SCALES = 48 * (2 * 32 * 16 + 2 * 4 * 16 + 128 * 3 * 6 * 16)
QWEN_BF16 = 2 * 151936 * 2048 + 97 * 2048 + 48 * (2 * 128 + 128 * 2048)  # with q, k norms, routers


def shape_of(option: str) -> Shape:
    return Shape(**yaml.safe_load((MODELS / f"{option}.yaml").read_text())["shape"])


@pytest.mark.parametrize(
    ("option", "linears", "scales", "bf16", "saved"),
    [
        ("llama31-8b", LLAMA_LINEARS, LLAMA_SCALES, LLAMA_BF16, 43),
        ("qwen3-30b-a3b", QWEN_LINEARS, QWEN_SCALES, QWEN_BF16, 49),
    ],
)
def test_refit_bytes_are_one_per_fp8_weight_four_per_scale_two_per_bf16(
    option, linears, scales, bf16, saved
):
    found = estimate(shape_of(option), FP8)
    assert found.parameters == linears + bf16
    assert found.refit_bytes == linears + 4 * scales + 2 * bf16
    assert found.refit_bytes_bf16 == 2 * (linears + bf16)
    assert round(100 * (1 - found.refit_bytes / found.refit_bytes_bf16)) == saved


def test_weights_are_counted_expert_by_expert():
    llama, qwen = estimate(shape_of("llama31-8b"), FP8), estimate(shape_of("qwen3-30b-a3b"), FP8)
    assert (llama.fp8_weights, llama.bf16_weights) == (32 * 7, 2 + 65)
    assert (qwen.fp8_weights, qwen.bf16_weights) == (48 * (4 + 3 * 128), 2 + 97 + 48 * 3)


def test_an_fp8_cache_takes_half_a_token_and_adds_three_scales_a_layer_to_the_refit():
    shape = shape_of("llama31-8b")
    assert estimate(shape, FP8).kv_bytes_per_token == 2 * 32 * 8 * 128 * 2 == 131072
    assert estimate(shape, FP8_KV).kv_bytes_per_token == 65536
    assert estimate(shape, FP8_KV).refit_bytes == estimate(shape, FP8).refit_bytes + 4 * 3 * 32


def test_bf16_refits_everything_at_two_bytes_and_nothing_in_fp8():
    found = estimate(shape_of("qwen3-30b-a3b"), Precision())
    assert found.refit_bytes == found.refit_bytes_bf16 == 2 * 30_532_122_624
    assert found.fp8_weights == 0


def test_a_layer_kept_in_bf16_costs_its_linears_once_more_and_saves_their_scales():
    kept = Precision(rollout_linear="fp8", first_layers_bf16=1, last_layers_bf16=1)
    extra = estimate(shape_of("llama31-8b"), kept).refit_bytes
    extra -= estimate(shape_of("llama31-8b"), FP8).refit_bytes
    assert extra == 2 * (LLAMA_LINEARS - 4 * LLAMA_SCALES) // 32


def test_tied_embeddings_are_sent_once():
    untied, tied = (estimate(Shape(vocab=96, hidden=256, tied=tied), FP8) for tied in (False, True))
    assert untied.parameters - tied.parameters == 96 * 256
    assert untied.refit_bytes - tied.refit_bytes == 2 * 96 * 256
