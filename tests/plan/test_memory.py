"""Bytes and counts of Llama 3.1 8B and Qwen3-30B-A3B, computed by hand.

The sums are written out per layer from the models' numbers. A refit with FP8 weights must send 43 %
less than one in BF16 for the first and 49 % less for the second.
"""

# pyright: reportMissingImports=false
import dataclasses
import json
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml

from benchmarks.speed import draw_decode, fit_estimate
from benchmarks.speed.capacity import decode_floor, engine_kv_bytes, kv_capacity
from benchmarks.speed.fit_estimate import (
    Measured,
    Step,
    compared,
    compared_steps,
    fitted,
    worst,
)
from fp8_nemo.nemo_config.host import MAIN
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.describe import describe
from fp8_nemo.plan.memory import memory_per_gpu
from fp8_nemo.plan.model import count
from fp8_nemo.plan.speed import (
    EXCHANGE,
    FITTED,
    GPU_SPEED,
    HOST,
    Fitted,
    decode_of_engine,
    decode_seconds,
    decode_work,
    is_fitted,
    refit_seconds,
)
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision

MODELS = Path(__file__).parents[2] / "conf" / "model"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
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
    found = count(shape_of(option), FP8)
    assert found.parameters == linears + bf16
    assert found.refit_bytes == linears + 4 * scales + 2 * bf16
    assert found.refit_bytes_bf16 == 2 * (linears + bf16)
    assert round(100 * (1 - found.refit_bytes / found.refit_bytes_bf16)) == saved


def test_weights_are_counted_expert_by_expert():
    llama, qwen = count(shape_of("llama31-8b"), FP8), count(shape_of("qwen3-30b-a3b"), FP8)
    assert (llama.fp8_weights, llama.bf16_weights) == (32 * 7, 2 + 65)
    assert (qwen.fp8_weights, qwen.bf16_weights) == (48 * (4 + 3 * 128), 2 + 97 + 48 * 3)


def test_an_fp8_cache_takes_half_a_token_and_adds_three_scales_a_layer_to_the_refit():
    shape = shape_of("llama31-8b")
    assert count(shape, FP8).kv_bytes_per_token == 2 * 32 * 8 * 128 * 2 == 131072
    assert count(shape, FP8_KV).kv_bytes_per_token == 65536
    assert count(shape, FP8_KV).refit_bytes == count(shape, FP8).refit_bytes + 4 * 3 * 32


def test_bf16_refits_everything_at_two_bytes_and_nothing_in_fp8():
    found = count(shape_of("qwen3-30b-a3b"), Precision())
    assert found.refit_bytes == found.refit_bytes_bf16 == 2 * 30_532_122_624
    assert found.fp8_weights == 0


def test_a_layer_kept_in_bf16_costs_its_linears_once_more_and_saves_their_scales():
    kept = Precision(rollout_linear="fp8", first_layers_bf16=1, last_layers_bf16=1)
    extra = count(shape_of("llama31-8b"), kept).refit_bytes
    extra -= count(shape_of("llama31-8b"), FP8).refit_bytes
    assert extra == 2 * (LLAMA_LINEARS - 4 * LLAMA_SCALES) // 32


def test_tied_embeddings_are_sent_once():
    untied, tied = (count(Shape(vocab=96, hidden=256, tied=tied), FP8) for tied in (False, True))
    assert untied.parameters - tied.parameters == 96 * 256
    assert untied.refit_bytes - tied.refit_bytes == 2 * 96 * 256


def test_a_decode_step_reads_every_weight_once_but_a_row_of_the_embedding_per_token():
    bf16 = decode_work(shape_of("llama31-8b"), Precision(), batch=64, context=1000)
    embedding = 128256 * 4096
    assert bf16.weight_bytes == 2 * (LLAMA_LINEARS + LLAMA_BF16 - embedding)
    assert bf16.kv_bytes == 64 * 1000 * 131072
    assert bf16.fp8_flops == 0
    assert bf16.bf16_flops == 2 * 64 * (LLAMA_LINEARS + embedding)  # the head is as large
    assert bf16.attention_flops == 4 * 32 * 32 * 128 * 64 * 1000

    fp8 = decode_work(shape_of("llama31-8b"), FP8_KV, batch=64, context=1000)
    saved = bf16.weight_bytes - fp8.weight_bytes
    assert saved == pytest.approx(LLAMA_LINEARS - 4 * LLAMA_SCALES)
    assert fp8.kv_bytes == bf16.kv_bytes / 2
    assert fp8.fp8_flops == 2 * 64 * LLAMA_LINEARS
    assert fp8.fp8_flops + fp8.bf16_flops == bf16.bf16_flops


def test_four_bits_read_their_scales_too_and_marlin_multiplies_after_it_has_read():
    shape, four = shape_of("llama31-8b"), Precision(rollout_linear="nvfp4")
    plain, found = (decode_work(shape, each, 64, 1000) for each in (Precision(), four))
    linears = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
    assert found.four_bit_bytes == linears * (0.5 + 1 / 16)
    assert plain.weight_bytes - found.weight_bytes == linears * 2
    assert found.bf16_flops + found.four_bit_flops == plain.bf16_flops and not found.fp8_flops
    speed = GPU_SPEED["h100"].reached()
    rest = dataclasses.replace(found, four_bit_bytes=0.0, four_bit_flops=0.0)
    marlin = found.seconds(speed, False) - rest.seconds(speed, False)
    reading, products = found.four_bit_bytes / speed.weights, found.four_bit_flops / speed.bf16
    assert marlin == pytest.approx(1.305 * reading + 1.845 * products)
    everything = found.weight_bytes + found.four_bit_bytes
    small, peak = decode_work(shape, four, 1, 1), GPU_SPEED["h100"]
    assert small.seconds(peak, False) == pytest.approx(everything / peak.weights, rel=1e-3)
    [ours, bf16] = (
        compose_plans([f"precision={each}", "model=llama31-8b", "backend=nemo"], lambda _: MAIN)[0]
        for each in ("nvfp4-w4a16", "bf16")
    )
    engines = [memory_per_gpu(each.settled).phases["rollout"]["engine"] for each in (bf16, ours)]
    assert engines[0] - engines[1] == pytest.approx(linears * 1.4375)
    assert is_fitted(ours.settled) and is_fitted(bf16.settled)
    told = dict(describe(ours, MAIN))
    assert told["decode"].endswith("estimates, fitted on an H100")


def test_a_tied_embedding_is_read_whole_as_the_head():
    tied, untied = (
        decode_work(Shape(vocab=96, hidden=256, tied=tied), FP8, 4, 10) for tied in (True, False)
    )
    assert tied.weight_bytes == untied.weight_bytes
    assert tied.bf16_flops == untied.bf16_flops


def test_a_batch_touches_the_experts_that_even_routes_would():
    shape = shape_of("qwen3-30b-a3b")
    expert = 48 * 3 * 768 * 2048
    one, two, many = (
        decode_work(shape, Precision(), batch, context=1).weight_bytes for batch in (1, 2, 10**6)
    )
    assert many - one == pytest.approx(2 * 120 * expert)  # 8 of 128, then all
    assert two - one == pytest.approx(2 * (8 - 8 * 8 / 128) * expert)
    work = decode_work(shape, FP8, batch=3, context=1)
    dense = QWEN_LINEARS - 128 * expert
    assert work.fp8_flops == pytest.approx(2 * 3 * (dense + 8 * expert))


def test_two_gpus_halve_a_step_and_exchange_in_every_layer():
    shape = shape_of("qwen3-30b-a3b")
    for precision, gpu in ((Precision(), "h100"), (FP8, "h200")):
        one, two = (decode_seconds(shape, precision, 128, 99, gpu, TRUE, n) for n in (1, 2))
        assert two == pytest.approx(one / 2 + 2 * 48 * EXCHANGE)


@pytest.mark.parametrize(("batch", "untuned"), [(127, False), (128, True)])
def test_fp8_experts_over_two_h100_lack_tuned_tiles_from_128_rows(batch, untuned):
    shape = shape_of("qwen3-30b-a3b")
    one, two = (decode_seconds(shape, FP8, batch, 99, "h100", TRUE, n) for n in (1, 2))
    assert (two > 1.2 * one / 2 + 2 * 48 * EXCHANGE) == untuned


def test_a_step_is_its_bytes_over_bandwidth_until_the_products_take_longer():
    shape, speed, bandwidth = shape_of("llama31-8b"), GPU_SPEED["h200"], 4.8e12
    work = decode_work(shape, FP8_KV, 16, 4096)
    bytes_alone = (work.weight_bytes + work.kv_bytes) / bandwidth
    assert decode_floor(shape, FP8_KV, 16, 4096, "h200") == pytest.approx(bytes_alone)
    real = work.weight_bytes / 0.88 / bandwidth + work.kv_bytes / 3.0e12  # the kernel's limit
    costs = Fitted(1.0, 0.5, 0.25)
    seconds = decode_seconds(shape, FP8_KV, 16, 4096, "h200", costs)
    assert seconds == pytest.approx(1.0 + 16 * 0.5 + 0.25 + real)
    plain = decode_work(shape, Precision(), 16, 4096)
    seconds = decode_seconds(shape, Precision(), 16, 4096, "h200", costs)
    read = (plain.weight_bytes / 0.88 + plain.kv_bytes / 0.94) / bandwidth
    assert seconds == pytest.approx(1.0 + 16 * 0.5 + read)  # nothing is quantized
    large = decode_work(shape, Precision(), 4096, 1)
    products = large.bf16_flops / speed.bf16
    assert products > large.weight_bytes / bandwidth
    floor = decode_floor(shape, Precision(), 4096, 1, "h200")
    assert floor == pytest.approx(products + large.kv_bytes / bandwidth)
    # and products of FP8 weights go at their own rate
    fp8 = decode_work(shape, FP8, 4096, 1)
    expected = fp8.fp8_flops / speed.fp8 + fp8.bf16_flops / speed.bf16
    assert decode_floor(shape, FP8, 4096, 1, "h200") == pytest.approx(
        expected + fp8.kv_bytes / bandwidth
    )


def test_what_unsplit_keys_cost_a_decode_step_comes_out_within_6_percent():
    starts = json.loads((RESULTS / "decode-exact-h200.json").read_text())["starts"]
    shape, exact = shape_of("llama31-8b"), dataclasses.replace(FP8, align="exact")

    def planned(precision, batch, context, gpus=1):
        costs = FITTED["llama31-8b", 32]
        return decode_seconds(shape, precision, batch, context, "h200", costs, gpus)

    def took(align, batch):
        return [
            row for start in starts for row in start["rows"]
            if (start["asked"]["precision"], start["asked"]["align"], row["batch"])
            == ("fp8-linear-deepgemm", align, batch)
        ]  # fmt: skip

    for batch in (256, 8, 1):
        aligned, without = took("exact", batch), took(None, batch)
        held = batch, aligned[0]["context"]
        ratio = sum(row["wall_ms"] for row in aligned) / sum(row["wall_ms"] for row in without)
        assert planned(exact, *held) / planned(FP8, *held) == pytest.approx(ratio, rel=0.06)
    one, two = (planned(exact, 1, 8192, n) - planned(FP8, 1, 8192, n) for n in (1, 2))
    assert two > 0.9 * one  # a head's keys stay on one GPU


@pytest.mark.parametrize("precision", ["bf16", "fp8-linear", "fp8-kv-attn"])
def test_profiled_decode_steps_of_30b_come_out_within_3_percent(precision):
    rows = draw_decode.rows_of(draw_decode.DRAWINGS["decode-30b"], precision).values()
    [recipe] = compose((f"precision={precision}", "model=qwen3-30b-a3b"))
    costs = FITTED["qwen3-30b-a3b", 48]
    assert len(rows) == 4
    for row in rows:
        held = row["batch"], row["context"], "h200", costs
        took = 1e3 * decode_seconds(recipe.model.shape, recipe.precision, *held)
        assert took == pytest.approx(row["wall_ms"], rel=0.03)


def test_an_engine_of_two_h200s_on_which_nothing_was_fitted_comes_out():
    rows = json.loads((RESULTS / "rollout-8b-two-h200.json").read_text())["rows"]
    [recipe] = compose(("precision=bf16", "model=llama31-8b"))
    assert [row["tensor"] for row in rows] == [2, 2, 2]
    for row in rows:
        held = row["batch"], row["context"], "h200", FITTED["llama31-8b", 32], 2
        device = decode_seconds(recipe.model.shape, recipe.precision, *held)
        said = max(device, HOST.step + HOST.sequence * row["batch"])
        assert -0.01 < said / row["seconds_per_step"]["median"] - 1 < 0.07


@pytest.mark.parametrize(
    ("name", "decode", "near", "points"),
    [("8b", "xqa", 0.075, 6), ("8b", "fa3", 0.09, 6), ("8b-pair", "xqa", 0.08, 4),
     ("30b", "xqa", 0.04, 4), ("30b", "fa3", 0.04, 4)],
)  # fmt: skip
def test_profiled_decode_steps_with_either_kernel_come_out(name, decode, near, points):
    content = json.loads((RESULTS / f"decode-{name}-{decode}-h200.json").read_text())
    assert content["asked"]["decode"] == decode and len(content["rows"]) == points
    model, layers = {"8b": ("llama31-8b", 32), "30b": ("qwen3-30b-a3b", 48)}[name.partition("-")[0]]
    words = f"model={model}", f"glue.decode={decode}", "cluster.gpu=h200"
    [recipe] = compose(("precision=fp8-kv-attn", *words))
    costs = FITTED[model, layers]
    for row in content["rows"]:
        held = row["batch"], row["context"], "h200", costs, 1, recipe.decodes_by_xqa
        took = 1e3 * decode_seconds(recipe.model.shape, recipe.precision, *held)
        assert took == pytest.approx(row["wall_ms"], rel=near)


@cache
def gains_by_xqa():
    """Times as fast as BF16 that 8B decodes on one H200: measured, and what the plan says."""
    took, said = [], []
    for name, precision in (("bf16", "bf16"), ("xqa", "fp8-kv-attn")):
        [recipe] = compose(("model=llama31-8b", f"precision={precision}", "cluster.gpu=h200"))
        rows = json.loads((RESULTS / f"decode-8b-pair-{name}-h200.json").read_text())["rows"]
        took.append([row["wall_ms"] for row in rows])
        costs = FITTED["llama31-8b", 32], 1, recipe.decodes_by_xqa
        said.append([
            decode_seconds(recipe.model.shape, recipe.precision, row["batch"], row["context"],
                           "h200", *costs)
            for row in rows
        ])  # fmt: skip
    return [[plain / ours for plain, ours in zip(*each, strict=True)] for each in (took, said)]


def test_what_8b_gained_in_one_lease_over_bf16_comes_out_a_tenth_too_small_at_most():
    for took, said in zip(*gains_by_xqa(), strict=True):
        assert -0.11 < said / took - 1 < 0.03


def test_a_faster_gpu_takes_less_and_fp8_never_more():
    shape = shape_of("qwen3-30b-a3b")
    for batch, context in ((1, 128), (64, 8192), (512, 4096)):
        times = [decode_floor(shape, FP8, batch, context, gpu) for gpu in ("h100", "h200", "b200")]
        assert times == sorted(times, reverse=True)
        by_precision = [
            decode_floor(shape, each, batch, context, "h200") for each in (Precision(), FP8, FP8_KV)
        ]
        assert by_precision == sorted(by_precision, reverse=True)


def test_a_refit_reads_bf16_and_moves_the_wire_three_times():
    shape = shape_of("llama31-8b")
    wire = LLAMA_LINEARS + 4 * LLAMA_SCALES + 2 * LLAMA_BF16
    moved = 2 * (LLAMA_LINEARS + LLAMA_BF16) + 3 * wire
    seconds = refit_seconds(count(shape, FP8), "h200", fixed=0.25)
    assert seconds == pytest.approx(0.25 + moved / (4.8e12 * 0.88))


def test_a_cache_holds_whole_blocks_and_twice_the_tokens_in_fp8():
    shape = shape_of("llama31-8b")
    assert kv_capacity(shape, FP8, 16 * 131072 * 10.9) == 160
    assert kv_capacity(shape, FP8_KV, 16 * 131072 * 10) == 320
    left = engine_kv_bytes(shape, FP8_KV, "h200", share=0.9, reserve=2**30)
    weights = LLAMA_LINEARS + 4 * LLAMA_SCALES + 2 * LLAMA_BF16
    assert left == pytest.approx(140.4 * 2**30 * 0.9 - weights - 2**30)


def test_the_constant_comes_from_one_half_and_the_error_from_the_other():
    points = [Measured("a", 3.0, 1.0, True), Measured("b", 8.0, 4.0, False)]
    assert fitted(points) == 2.0
    rows = compared("m", points, 2.0)
    assert [row["error"] for row in rows] == [0.0, -0.25]
    assert worst(rows) == 0.25 and worst(rows[:1]) is None
    with pytest.raises(ValueError, match="no point to fit"):
        fitted(points[1:])
    # two points to fit: errors relative to what was measured are least
    pair = [Measured("a", 1.0, 0.5, True), Measured("b", 10.0, 7.0, True)]
    best = fitted(pair)
    loss = [
        sum(row["error"] ** 2 for row in compared("m", pair, best + d)) for d in (-0.01, 0, 0.01)
    ]
    assert min(loss) == loss[1]


def test_a_gain_is_taken_over_the_bf16_of_the_same_file():
    first = Step("h200", "bf16", 64, 1024, 3.0, 3.0, False, series="first")
    steps = [first, first._replace(precision="fp8-linear", measured=2.0),
             first._replace(measured=9.0, series="other")]  # fmt: skip
    assert [row["gain"] for row in compared_steps("m", steps, [0, 0, 0])] == [1, 1.5, 1]


TRUE = Fitted(0.0015, 12e-6, 0.0005)


def test_halves_alternate_across_precisions_and_a_true_constant_is_found(tmp_path, monkeypatch):
    rows, engines = [], []
    for variant, precision in (("bf16", Precision()), ("fp8-linear-deepgemm", FP8)):
        shape = shape_of("llama31-8b")
        for batch, prompt in ((64, 1024), (256, 1024), (16, 4096), (64, 4096)):
            context = prompt + 100.0
            seconds = decode_seconds(shape, precision, batch, context, "h200", TRUE)
            rows.append(
                {"model": "llama31-8b", "precision": variant, "engine": "vLLM", "batch": batch,
                 "prompt": prompt, "regime": "resident", "context": context,
                 "seconds_per_step": {"median": seconds}}
            )  # fmt: skip
        room = engine_kv_bytes(shape, precision, "h200", 0.9, reserve=3 * 2**30)
        engines.append({"model": "llama31-8b", "precision": variant, "engine": "vLLM",
                        "kv_tokens": kv_capacity(shape, precision, room)})  # fmt: skip
    rows.append({"model": "llama31-8b", "precision": "bf16", "engine": "vLLM", "regime": "failed"})
    rows.append(rows[0] | {"precision": "fp8-linear-cutlass"})  # no plan asks for it
    file = tmp_path / "rollout.json"
    file.write_text(json.dumps({"gpu": "h200", "share": 0.9, "rows": rows, "engines": engines}))
    glue = RESULTS / "glue-8b-h200.json"
    words = ["fit_estimate.py", str(file), "--refit", str(glue), "--out", str(tmp_path / "e.json")]
    monkeypatch.setattr(sys, "argv", words)
    fit_estimate.main()
    content = json.loads((tmp_path / "e.json").read_text())
    found = content["constants"][0]
    assert [found[name] for name in ("decode", "sequence", "quantize")] == pytest.approx(TRUE[:3])
    assert content["constants"][0]["reserve_gib"] == pytest.approx(3, rel=1e-3)
    halves = [row["half"] for row in content["decode"]]
    assert halves == ["fitted", "tested"] * 2 + ["tested", "fitted"] * 2
    assert [row["half"] for row in content["capacity"]] == ["fitted", "tested"]
    gates = {gate["what"]: gate for gate in content["gates"]}
    assert gates["llama31-8b: decode"]["worst error"] < 1e-9
    assert gates["llama31-8b: gain over BF16"]["worst error"] < 1e-9
    assert gates["llama31-8b: KV capacity"]["holds"]
    assert gates["llama31-8b: refit"]["limit"] == 0.2


def test_the_constants_are_those_of_the_results_file_and_its_gates_hold():
    file = Path(__file__).parents[2] / "benchmarks" / "results" / "estimate-h200.json"
    content = json.loads(file.read_text())
    for (model, _), constants in FITTED.items():
        rows = [row for row in content["constants"] if row["model"] == model]
        found = {key: value for row in rows for key, value in row.items()}
        for name in ("decode", "sequence", "quantize"):
            assert getattr(constants, name) == pytest.approx(found[name], rel=0.02)
        gates = {gate["what"]: gate["holds"] for gate in content["gates"]}
        assert gates[f"{model}: decode"] and gates[f"{model}: KV capacity"]
        assert gates[f"{model}: gain over BF16"]
        assert ("refit_seconds" in found) == (constants.refit is not None)
        if constants.refit is not None:
            assert constants.refit == pytest.approx(found["refit_seconds"], rel=0.02)
            assert gates[f"{model}: refit"]


def test_a_small_model_decodes_at_the_hosts_pace():
    words = ["backend=nemo", "grpo.prompts_per_step=16", "grpo.generations_per_prompt=8"]
    found = {}
    for layers in (2, 32):
        cell = ["model=llama31-8b", f"model.shape.layers={layers}", *words]
        cell += ["precision=fp8-kv-attn", "cluster.gpus_per_node=1", "cluster.gpu=h200"]
        [made] = compose_plans(cell)
        found[layers] = decode_of_engine(made.settled, 1024)
    running = found[2].running
    host = HOST.step + HOST.sequence * running
    assert found[2].tokens_per_second == pytest.approx(running / host)
    assert found[32].tokens_per_second < found[32].running / (HOST.step + HOST.sequence * 128)
