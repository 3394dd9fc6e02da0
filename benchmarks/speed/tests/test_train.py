"""What benchmarks/speed/train.py counts and sorts: operations, rates, kernels, padding, cases."""

import math

import pytest

from benchmarks.speed import train as bench_train
from benchmarks.speed.nemo_stack import Case
from fp8_nemo.glue.wire import named_shapes
from fp8_nemo.recipe.compose import compose


def shape_of(model, **changes):
    [recipe] = compose([f"model={model}", "backend=nemo", "precision=bf16"])
    for name, value in changes.items():
        setattr(recipe.model.shape, name, value)
    return recipe.model.shape


def linear_weights(shape):
    """Weights that multiply a token in one layer, by the checkpoint's own shapes."""
    total = 0
    for name, size in named_shapes(shape).items():
        if ".layers.0." not in name or "norm" in name or name.endswith("mlp.gate.weight"):
            continue
        share = shape.experts_per_token / shape.experts if ".experts." in name else 1
        total += math.prod(size) * share
    return total


@pytest.mark.parametrize("model", ["llama31-8b", "qwen3-8b", "qwen3-30b-a3b"])
def test_linear_operations_are_two_per_token_and_weight_that_it_meets(model):
    shape = shape_of(model)
    linear, _ = bench_train.layer_flops(shape, [1000, 24])
    assert linear == pytest.approx(2 * 1024 * linear_weights(shape), rel=1e-12)


def test_attention_operations_are_those_of_the_causal_half():
    shape = shape_of("llama31-8b")
    _, attention = bench_train.layer_flops(shape, [6])
    pairs = 6 * 6 / 2  # token and key, the diagonal halved
    assert attention == 2 * 2 * pairs * shape.heads * shape.head_dim


def test_packed_sequences_do_not_attend_to_each_other():
    shape = shape_of("llama31-8b")
    linear, attention = bench_train.layer_flops(shape, [4096] * 2)
    whole = bench_train.layer_flops(shape, [8192])
    assert (linear, 2 * attention) == whole


def test_a_stack_at_its_peak_is_at_one_and_fp8_is_held_back_by_attention():
    shape = shape_of("llama31-8b", layers=8)
    linear, attention = (24 * each for each in bench_train.layer_flops(shape, [8192]))
    seconds = (linear + attention) / 989e12
    found = bench_train.rates(shape, [8192], "bf16", seconds)
    assert found["of_peak"] == pytest.approx(1) and found["of_roofline"] == pytest.approx(1)
    assert found["tflops"] == pytest.approx(989) and found["tokens_per_second"] == 8192 / seconds
    floor = linear / 1979e12 + attention / 989e12
    found = bench_train.rates(shape, [8192], "fp8", floor)
    assert found["of_roofline"] == pytest.approx(1) and 0.8 < found["of_peak"] < 1


def test_a_gpu_of_two_does_half_of_the_work():
    shape = shape_of("llama31-8b", layers=8)
    alone = bench_train.rates(shape, [4096], "fp8", 1.0)
    shared = bench_train.rates(shape, [4096], "fp8", 1.0, tensor=2)
    assert shared == pytest.approx({name: rate / 2 for name, rate in alone.items()})


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void transformer_engine::(anonymous namespace)::block_scaled_cast_transpose_kernel<true>",
         "cast weights"),
        ("void transformer_engine::(anonymous namespace)::block_scaled_1d_cast_transpose_kernel<",
         "cast activations"),
        ("void transformer_engine::(anonymous namespace)::multi_unpadding_kernel<256>", "pad"),
        ("_permute_kernel", "permute"),
        ("_sort_chunks_by_map_kernel", "permute"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_128x64x128",
         "attention"),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<", "attention"),
        ("nvjet_qqtst_128x256_128x4_2x1_v_bz_coopB_NNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "matmul"),
        ("transformer_engine::norm_RMSNorm_Forward_tuned_4096_bf16_bf16_bf16_fp32", "norm"),
        ("void transformer_engine::fused_rope_forward_kernel<__nv_bfloat16>", "rope"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add", "other"),
    ],
)  # fmt: skip
def test_kernels_are_known_by_their_names(kernel, kind):
    assert bench_train.kind_of(kernel) == kind


def test_time_is_added_by_kind_and_what_nobody_knows_is_named():
    kernels = [("nvjet_a", 2.0), ("nvjet_b", 3.0), ("fill", 0.5), ("fill", 0.25)]
    kinds, others = bench_train.by_kind(kernels)
    assert kinds == {"matmul": 5.0, "other": 0.75}
    assert others == {"fill": 0.75}


def test_only_the_longest_of_the_others_are_named():
    _, others = bench_train.by_kind([(f"fill{n}", 1.0 + n) for n in range(30)])
    assert list(others) == [f"fill{n}" for n in range(29, 19, -1)]


def test_padding_counts_rows_added_to_each_expert():
    assert bench_train.padding([16, 32, 0]) == 0
    assert bench_train.padding([1, 15, 17]) == pytest.approx((15 + 1 + 15) / 33)
    assert bench_train.padding([0, 0]) == 0


def test_a_dense_model_has_no_case_of_padding_and_bf16_comes_before_fp8():
    names = ["fp8-router-pads", "fp8", "bf16"]
    dense = bench_train.cases(names, experts=0)
    assert dense[0] == Case("bf16", False) and dense[1] == Case("fp8", False)
    assert all(case.variant != "fp8-router-pads" for case in dense)
    assert Case("fp8-router-pads", False) in bench_train.cases(names, experts=128)
    for case in dense:  # a speedup needs its BF16 twin first
        twin = case._replace(variant="bf16")
        assert dense.index(twin) <= dense.index(case)


def test_an_unknown_case_is_named():
    with pytest.raises(SystemExit, match="no fp7, only bf16, fp8"):
        bench_train.cases(["fp7"], experts=0)


def row(variant, forward, backward, **changes):
    usual = {"part": "stack", "tokens": 8192, "sequences": 1, "recompute": False}
    times = {"forward": {"median": forward}, "backward": {"median": backward}}
    return {"variant": variant} | usual | times | changes


def test_a_speedup_is_against_the_same_micro_batch_in_bf16():
    rows = [
        row("bf16", 10.0, 20.0),
        row("bf16", 1.0, 2.0, tokens=4096),
        row("bf16", 1.0, 2.0, recompute=True),
        row("bf16", 1.0, 2.0, part="ends"),
        {"variant": "bf16", "recompute": False, "ends": False, "error": "OutOfMemoryError"},
    ]
    assert bench_train.speedup(row("fp8", 5.0, 20.0), rows) == 30 / 25
    assert bench_train.speedup(row("fp8", 5.0, 20.0, tokens=2048), rows) is None
