"""benchmarks.speed.decode_profile: its arithmetic, its count of steps, what it asks of the engine.

That vLLM takes these arguments, and that its kernels have these names, is seen on a GPU.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.speed import decode_kernels, decode_profile, decode_watch, rollout
from benchmarks.speed.decode_kernels import Kernel, busy, class_of, summary
from benchmarks.speed.decode_watch import SETTLE, STEPS, Clock, Watch
from benchmarks.speed.rollout_engine import Point

OUT = ["--out", "x.json", "--precision"]
FA3 = (
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::Collective"
    "MainloopFwdSm90<2, cute::tuple<cute::C<1>>, cutlass::float_e4m3_t, float, cutlass::arch::Sm90>"
)
NAMES = {
    FA3: "attention",
    "void flash::FlashAttnFwdCombine<cute::tuple<cute::C<8>>>(flash::Params)": "attention",
    "flash::prepare_varlen_num_blocks_kernel(int, int, int)": "attention",
    "kernel_mha": "attention",
    "kernel_unified_attention_3d": "attention",
    "void flashinfer::BatchDecodeWithPagedKVCacheKernel<...>": "attention",
    "void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u>": "sampling",
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, unsigned char>": "rope, cache write",
    "triton_poi_fused_add_cat_index_select_mul_split_sub_3": "rope, cache write",
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 4096u>": "linear products",
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<Properties>>":
        "linear products",
    "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT": "linear products",
    "fused_moe_kernel": "linear products",
    "void vllm::moe::topkGating<8, 128>": "routing of experts",
    "void per_token_group_quant_8bit_kernel<__nv_bfloat16, c10::Float8_e4m3fn>": "quantization",
    "vllm::rms_norm_per_block_quant_kernel<c10::BFloat16>": "norm or activation, quantized",
    "triton_red_fused__to_copy_abs_add_amax_clamp_div_mean_mul_pow_rsqrt_1":
        "norm or activation, quantized",
    "void vllm::act_and_mul_kernel<c10::BFloat16>": "activation",
    "triton_poi_fused_mul_silu_split_4": "activation",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2": "norms",
    "_gumbel_sample_kernel": "sampling",
    "_topk_log_softmax_kernel": "sampling",
    "_get_num_sampled_and_rejected_kernel": "preparation",
    "_compute_slot_mappings_kernel": "preparation",
    "Memcpy DtoH (Device -> Pinned)": "copies",
    "void at::native::elementwise_kernel<128, at::native::direct_copy_kernel_cuda>": "copies",
    "an unknown one": "other",
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), NAMES.items(), ids=lambda text: text[:40])
def test_a_kernel_has_a_class_by_its_name(name, kind):
    assert class_of(name) == kind


def test_the_device_is_busy_once_while_kernels_overlap_or_lie_within_each_other():
    kernels = [Kernel("b", 30, 10), Kernel("a", 0, 20), Kernel("c", 5, 5), Kernel("d", 15, 10)]
    assert busy(kernels) == 25 + 10
    assert busy([]) == 0


def test_classes_and_gaps_make_the_span_and_what_has_no_class_is_named():
    kernels = [
        Kernel(FA3, 0, 2000), Kernel("Memcpy DtoH", 1000, 2000), Kernel("strange", 5000, 500),
        Kernel("strange", 6000, 500), Kernel("nvjet_x", 6500, 1500),
    ]  # fmt: skip
    found = summary(kernels, steps=2)
    classes = found["classes_ms"]
    assert (classes["attention"], classes["copies"], classes["linear products"]) == (1, 1, 0.75)
    assert (classes["other"], classes["gaps"], found["overlapped_ms"]) == (0.5, 1.25, 0.5)
    assert sum(classes.values()) - found["overlapped_ms"] == found["span_ms"] == 4
    assert found["busy_ms"] == 2.75 and found["kernels"] == 2.5
    assert found["unmatched"] == [{"kernel": "strange", "class": "other", "ms": 0.5, "calls": 1}]
    assert [row["ms"] for row in found["top"]] == [1, 1, 0.75, 0.5]
    assert set(classes) == {kind for kind, _ in decode_kernels.CLASSES} | {"other", "gaps"}
    with pytest.raises(ValueError, match="no kernel"):
        summary([], 2)


class Trace:
    """In the place of the profiler, which needs a device: where it began and ended."""

    def __init__(self, worker):
        self.worker, self.at = worker, []

    def start(self):
        self.at.append(self.worker.done)

    def stop(self):
        self.at.append(self.worker.done)
        return [Kernel(FA3, 0, 1000 * STEPS)]


class Worker:
    def __init__(self):
        self.done = 0

    def execute_model(self, scheduled):
        self.done += 1
        return scheduled

    def sample_tokens(self, grammar):
        return grammar


def scheduled(batch, each=1, context=100):
    made = {str(n): each for n in range(batch)}
    cached = SimpleNamespace(num_computed_tokens=[context] * batch)
    return SimpleNamespace(
        num_scheduled_tokens=made, total_num_scheduled_tokens=each * batch,
        scheduled_cached_reqs=cached,
    )  # fmt: skip


def test_full_steps_are_settled_then_timed_then_profiled_and_others_are_not_counted():
    worker = Worker()
    watch = Watch(worker, trace := Trace(worker))
    worker.execute_model(scheduled(4))  # before it is armed
    watch.arm(4)
    for other in (scheduled(3), scheduled(4, each=7)):  # not all have begun; a prefill
        worker.execute_model(other)
    for n in range(SETTLE + 2 * STEPS + 1):
        worker.execute_model(scheduled(4, context=100 + n))
        worker.sample_tokens(None)
    assert trace.at == [3 + SETTLE + STEPS, 3 + SETTLE + 2 * STEPS]
    found = watch.taken()
    assert len(found["seconds"]) == STEPS
    assert found["context"] == 100 + SETTLE + STEPS / 2
    assert found["profile"]["classes_ms"]["attention"] == 1
    assert 0 < found["worker"]["execute_model"] < sum(found["seconds"])
    watch.arm(4)
    worker.execute_model(scheduled(4))
    with pytest.raises(RuntimeError, match="1 steps of all 4 sequences, 49 are needed"):
        watch.taken()


def test_a_clock_counts_the_calls_that_began_in_a_window(monkeypatch):
    times = iter([1.0, 2.0, 5.0, 5.5, 9.0, 9.25])
    monkeypatch.setattr(decode_watch.time, "perf_counter", lambda: next(times))
    owner = SimpleNamespace(work=lambda n: n + 1)
    clock = Clock(owner, "work")
    assert [owner.work(n) for n in (1, 2, 3)] == [2, 3, 4]
    assert clock.within(1.0, 9.0) == 1.0 + 0.5


def test_only_the_shipped_graphs_that_the_points_need_are_captured():
    assert decode_profile.graph_sizes([64, 256, 32]) == [32, 64, 256]
    assert decode_profile.graph_sizes([33, 40]) == [48]


def test_the_output_outlasts_the_steps_however_the_prompts_were_spread():
    asked = decode_profile.lasting(Point(256, 1024))
    spread = 1 + 256 * 1024 // rollout.rollout_engine.CHUNK
    assert asked.output - spread > SETTLE + 2 * STEPS + 1


@pytest.mark.parametrize("precision", ["bf16", "fp8-linear", "fp8-kv-attn"])
def test_the_engine_is_asked_as_rollout_asks_it_but_for_its_graphs(precision, tmp_path):
    options = decode_profile.parse([*OUT, precision, "--caches", str(tmp_path), "--gpu", "h200"])
    recipe = rollout.plan_of(SimpleNamespace(**vars(options), nemo=False), tmp_path).recipe
    found = decode_profile.arguments_of(options, recipe.model.shape, recipe.precision, tmp_path)
    theirs = rollout.parse([*OUT, options.precision, "--points", "64x1024,256x1024"])
    usual = rollout.engine_arguments(
        recipe.model.shape, rollout.VARIANTS[options.precision], recipe.precision, tmp_path, theirs
    )
    other = {name for name in {*found, *usual} if found.get(name) != usual.get(name)}
    assert other == {"compilation_config", "max_model_len"}
    assert found["compilation_config"] == {"cudagraph_capture_sizes": [32, 64, 256]}
    assert found["max_model_len"] >= 8192 + SETTLE + 2 * STEPS
    assert decode_profile.environment_of(options)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_variants_of_the_host_side_and_of_the_engine_are_arguments(tmp_path):
    words = ["--engine", "apart", "--scheduling", "sync", "--stats", "off", "--sampling", "nemo",
             "--text", "--env", "A=b=c", "--set",
             '{"linear_backend": "auto", "compilation_config": {"custom_ops": ["+quant_fp8"]}}'
             ]  # fmt: skip
    options = decode_profile.parse([*OUT, "fp8-linear", *words])
    recipe = rollout.plan_of(SimpleNamespace(**vars(options), nemo=False), tmp_path).recipe
    found = decode_profile.arguments_of(options, recipe.model.shape, recipe.precision, tmp_path)
    assert found["linear_backend"] == "auto" and found["disable_log_stats"] is True
    assert found["async_scheduling"] is False and found["skip_tokenizer_init"] is False
    assert found["compilation_config"] == {
        "cudagraph_capture_sizes": [32, 64, 256], "custom_ops": ["+quant_fp8"]
    }  # fmt: skip
    variables = decode_profile.environment_of(options)
    assert variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1" and variables["A"] == "b=c"
    sampling = decode_profile.sampling_of(options)
    assert (sampling["logprobs"], sampling["detokenize"]) == (0, True)
    assert sampling["stop"] == [decode_profile.STOP]


def test_with_text_every_token_of_the_vocabulary_has_a_word(tmp_path):
    from transformers import AutoTokenizer

    from fp8_nemo.recipe.options.model import Shape

    decode_profile.write_model(tmp_path, Shape(vocab=300), 64, True)
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 300
    assert AutoTokenizer.from_pretrained(tmp_path).decode([0, 299, 7]).split() == [
        "w0", "w299", "w7"
    ]  # fmt: skip


def test_the_log_keeps_what_the_engine_chose_without_time_process_and_folders():
    log = (
        "(EngineCore pid=7) INFO 11-24 10:18:19 [cuda.py:310] Using FLASH_ATTN backend.\n"
        "INFO 11-24 10:18:20 [cuda.py:310] Using FLASH_ATTN backend.\n"
        "INFO 11-24 10:18:21 [utils.py:1] hello\n"
        "INFO 11-24 10:18:22 [moe.py:9] Using configuration from /x/y/E=128.json\n"
    )
    assert decode_profile.told(decode_profile.without_folders(log)) == [
        "[cuda.py:310] Using FLASH_ATTN backend.",
        "[moe.py:9] Using configuration from E=128.json",
    ]


def test_a_failed_start_tells_the_end_of_its_log(tmp_path, capfd):
    with pytest.raises(RuntimeError), decode_profile.logged(tmp_path / "log"):
        os.write(1, b"why it failed\n")
        raise RuntimeError
    os.write(1, b"after\n")
    told = capfd.readouterr()
    assert "why it failed" in told.err and told.out == "after\n"
    assert Path(tmp_path / "log").read_text() == "why it failed\n"


def test_a_row_is_the_wall_less_what_the_device_worked():
    seen = {
        "window": [10.0, 10.2], "seconds": [0.01] * STEPS, "context": 1100.0,
        "worker": {"execute_model": 0.04}, "profile": summary([Kernel(FA3, 0, 8000 * STEPS)], STEPS)
    }  # fmt: skip
    clock = SimpleNamespace(within=lambda first, last: 0.02 if (first, last) == (10.0, 10.2) else 9)
    row = decode_profile.row_of(Point(64, 1024, 80), seen, {"schedule": clock})
    assert row["wall_ms"] == pytest.approx(10) and row["gaps_ms"] == pytest.approx(2)
    assert row["host_ms"] == pytest.approx({"execute_model": 2, "schedule": 1})


def test_scales_that_reach_decode_are_told_from_those_that_a_graph_kept(monkeypatch):
    """By a layer that writes V / scale and reads it times the scale, or times the one of before."""

    class Engine:
        def __init__(self, frozen):
            self.layer = SimpleNamespace(**{f"_{n}_scale": torch.tensor(0.02) for n in "qkv"})
            vars(self.layer).update({f"_{n}_scale_float": 0.02 for n in "qkv"})
            self.frozen = 0.02 if frozen else None

        def collective_rpc(self, work, args):
            model = SimpleNamespace(modules=lambda: [self.layer])
            return [work(SimpleNamespace(get_model=lambda: model), *args)]

        def generate(self, asked, sampling, use_tqdm):
            scale = self.layer._v_scale.item()
            read = 1.0 / scale * (self.frozen or scale)
            logprobs = [{7: SimpleNamespace(logprob=-9.0)}, {8: SimpleNamespace(logprob=-read)}]
            each = SimpleNamespace(token_ids=[7, 8], logprobs=logprobs)
            return [SimpleNamespace(outputs=[each]) for _ in asked]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    live, kept = (Engine(frozen) for frozen in (False, True))
    near = pytest.approx
    assert decode_profile.scales_reach(live, 100, 4) == near({"unchanged": 0, "doubled": 0})
    assert decode_profile.scales_reach(kept, 100, 4) == near({"unchanged": 0, "doubled": 0.5})
    assert live.layer._k_scale.item() == pytest.approx(0.02)
    assert live.layer._q_scale_float == pytest.approx(0.02)


def test_a_change_is_counted_where_prefill_made_the_same_token_alone():
    before = [(1, -2.0), (2, -3.0), (3, -1.0)]
    assert decode_profile.change(before, [(1, -2.5), (9, -8.0), (3, -1.0)]) == 0.25
    assert decode_profile.change(before, [(0, -2.5), (0, -8.0), (0, -1.0)]) is None


def test_an_aligned_engine_gets_the_keys_of_its_plan_in_this_process_alone(tmp_path):
    options = decode_profile.parse([*OUT, "fp8-linear", "--align", "cheap"])
    recipe = rollout.plan_of(SimpleNamespace(**vars(options), nemo=False), tmp_path).recipe
    found = decode_profile.arguments_of(options, recipe.model.shape, recipe.precision, tmp_path)
    assert found["compilation_config"] == {
        "cudagraph_capture_sizes": [32, 64, 256],
        "pass_config": {"fuse_norm_quant": False, "fuse_act_quant": False},
    }
    order = ["vllm_c", "native"]
    assert found["ir_op_priority"] == {"rms_norm": order, "fused_add_rms_norm": order}
    with pytest.raises(SystemExit):
        decode_profile.parse([*OUT, "fp8-linear", "--align", "exact", "--engine", "apart"])


def test_an_engine_apart_decodes_as_vllm_does():
    """Our patch is of this process."""
    inside, apart = ([*OUT, "fp8-kv-attn", "--engine", each] for each in ("inside", "apart"))
    assert decode_profile.parse(inside).decode == "xqa"
    assert decode_profile.parse(apart).decode == "fa3"
