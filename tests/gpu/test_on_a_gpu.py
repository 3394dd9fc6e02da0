"""On a CUDA device: the bytes of a CPU, and runs that repeat themselves. `pytest -m gpu`."""

import json
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from fp8_nemo.recipes import make_model as recipes_make_model

from fp8_nemo.correction.mismatch import LogprobPair, mismatch_metrics
from fp8_nemo.export import make_model
from fp8_nemo.glue.quantize import (
    dequantize_blocks,
    dequantize_groups,
    quantize_blocks,
    quantize_groups,
    quantize_list,
)
from fp8_nemo.glue.refit import encode
from fp8_nemo.local import engine as rollout
from fp8_nemo.local.engine import causal_mask
from fp8_nemo.local.grpo import GrpoLoop
from fp8_nemo.local.modules import attention, linears
from fp8_nemo.local.modules.deterministic import repeat_exactly
from fp8_nemo.local.modules.experts import without_host_reads
from fp8_nemo.local.modules.precision import set_train_precision
from fp8_nemo.local.policy import load_model
from fp8_nemo.recipe.model_dir import model_path, weights_digest
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.runs import metrics, run_dir

if torch.cuda.is_available():
    from fp8_nemo.glue import kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def as_it_was():
    """Deterministic kernels are for the test that asked for them."""
    yield
    torch.use_deterministic_algorithms(False)


def unread(text, mask):
    """K or V whose places without a token hold NaN, which a kernel that reads them would tell."""
    hidden = text.float().masked_fill(~mask[:, :, 0].mT[:, :, None], torch.nan)
    return hidden.to(text.dtype)


def weight(*shape: int) -> torch.Tensor:
    random = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    random[..., :128, :128] *= 1e-30  # small blocks, where a device that flushes subnormals differs
    random[..., 128:256, :128] = 0
    return random.bfloat16()


def values(x: torch.Tensor, pow2: bool = False) -> torch.Tensor:
    return dequantize_groups(quantize_groups(x, pow2=pow2))


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("shape", [(512, 384), (3, 256, 256), (1, 1), (130, 257), (3, 200, 70)])
def test_a_gpu_quantizes_weights_to_the_bytes_of_a_cpu(shape, pow2):
    cpu = quantize_blocks(weight(*shape), pow2=pow2)
    gpu = quantize_blocks(weight(*shape).cuda(), pow2=pow2)
    assert torch.equal(cpu.fp8_OI.view(torch.uint8), gpu.fp8_OI.view(torch.uint8).cpu())
    assert torch.equal(cpu.scale_inv_PQ, gpu.scale_inv_PQ.cpu())
    assert torch.equal(dequantize_blocks(cpu), dequantize_blocks(gpu).cpu())


def test_every_bf16_number_has_its_byte():
    bits = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    finite = torch.where(torch.isfinite(bits), bits, torch.zeros_like(bits)).view(512, 128)
    for scale in (1.0, 2.0**-20):  # blocks whose largest value is not the type's
        some = torch.where(finite.abs() < 3e38 * scale, finite, torch.zeros_like(finite))
        for pow2 in (False, True):
            cpu, gpu = quantize_blocks(some, pow2=pow2), quantize_blocks(some.cuda(), pow2=pow2)
            assert same(cpu, gpu)


@pytest.mark.parametrize("pow2", [False, True])
def test_a_list_of_weights_quantizes_in_one_launch_as_each_alone(pow2):
    shapes = [(128, 128), (512, 384), (3, 256, 256), (130, 257), (1, 1), (2, 200, 70), (256, 128)]
    for some in (shapes, shapes[:3], shapes[-1:], [], shapes * 9):
        weights = [weight(*shape).cuda() for shape in some]
        nonfinite_N = torch.zeros(len(some), dtype=torch.bool, device="cuda")
        found = quantize_list(weights, pow2=pow2, nonfinite_N=nonfinite_N)
        assert not nonfinite_N.any()
        for each, one in zip(weights, found, strict=True):
            assert same(quantize_blocks(each.cpu(), pow2=pow2), one)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_gpu_names_the_weight_that_is_not_finite(value):
    weights = [weight(300, 300).cuda() for _ in range(5)]
    weights[3][299, 299] = value
    nonfinite_N = torch.zeros(5, dtype=torch.bool, device="cuda")
    quantize_list(weights, nonfinite_N=nonfinite_N)
    assert nonfinite_N.tolist() == [False, False, False, True, False]
    with pytest.raises(ValueError, match="NaN or Inf"):
        quantize_blocks(weights[3])
    named = [("model.embed_tokens.weight", weights[0]), ("model.norm.weight", weights[3][299])]
    assert encode(named, Precision(), num_layers=1).nonfinite_N.tolist() == [False, True]


def test_quantizing_waits_for_nothing_and_lives_in_a_cuda_graph():
    source, slot = weight(3, 256, 256).cuda(), torch.zeros((), dtype=torch.bool, device="cuda")
    quantize_blocks(source, nonfinite=slot)
    torch.cuda.set_sync_debug_mode("error")
    try:
        quantize_list([source, source], nonfinite_N=slot.repeat(2))
        quantize_blocks(source, nonfinite=slot)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantize_blocks(source, nonfinite=slot)
    source.mul_(3)
    graph.replay()
    assert same(quantize_blocks(source.cpu()), captured)


def same(cpu, gpu):
    """Whether bytes and scales are equal."""
    return torch.equal(
        cpu.fp8_OI.view(torch.uint8), gpu.fp8_OI.view(torch.uint8).cpu()
    ) and torch.equal(cpu.scale_inv_PQ, gpu.scale_inv_PQ.cpu())


@pytest.mark.parametrize("rows", [1, 37, 4096])
def test_ranges_of_kept_rows_on_a_gpu_are_those_of_a_cpu(rows):
    mixed = torch.randn(rows, 24, 128, device="cuda").bfloat16()
    keep = torch.rand(rows, device="cuda") > 0.3
    keep[0] = True
    mixed[~keep] = 1e4
    qkv = mixed[:, :16].contiguous(), 2 * mixed[:, 16:20], mixed[:, 20:]  # V: a slice, as it comes
    amax_3 = torch.zeros(3, device="cuda")
    kernels.amax_rows(qkv, keep, amax_3)
    kernels.amax_rows([x * 0.5 for x in qkv], keep, amax_3)  # a running maximum
    assert amax_3.tolist() == [x[keep].abs().amax().item() for x in qkv]
    mixed[0, 20, 0] = float("nan")
    kernels.amax_rows(qkv, keep, amax_3)
    assert amax_3.isnan().tolist() == [False, False, True]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_tensor_need_not_lie_on_the_current_device():
    there = torch.device("cuda", (torch.cuda.current_device() + 1) % torch.cuda.device_count())
    cpu = quantize_blocks(weight(256, 384))
    assert same(cpu, quantize_blocks(weight(256, 384).to(there)))
    slots = torch.zeros(1, dtype=torch.bool, device=there)
    assert same(cpu, quantize_list([weight(256, 384).to(there)], nonfinite_N=slots)[0])
    x = weight(64, 384)
    assert torch.equal(values(x), values(x.to(there)).cpu())
    amax_3, rows = torch.zeros(3, device=there), torch.full((5, 2, 64), -2.0).bfloat16().to(there)
    kernels.amax_rows([rows] * 3, torch.ones(5, dtype=torch.bool, device=there), amax_3)
    assert amax_3.tolist() == [2.0] * 3


@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 128), (33, 256), (5, 130), (2, 7, 384), (300, 1)])
def test_a_gpu_gives_activations_the_values_of_a_cpu(shape, dtype, pow2):
    for scale in (1e-3, 1.0, 1e30, 1e-42):
        x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * scale).to(dtype)
        x[0] = 0
        for each in (x, x.mT) if x.ndim == 2 else (x,):
            there = each.cuda() if each.is_contiguous() else x.cuda().mT
            assert torch.equal(values(each, pow2), values(there, pow2).cpu())
    for bad in (float("nan"), float("inf"), float("-inf")):
        x = torch.randn(3, 256).to(dtype)
        x[1, 5] = bad
        cpu, gpu = values(x), values(x.cuda()).cpu()
        assert torch.equal(cpu.isnan(), gpu.isnan()) and gpu.isnan().sum() == 128
        assert torch.equal(cpu.nan_to_num(), gpu.nan_to_num())


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
        repeat_exactly()
        GrpoLoop(plan, frozen.path).train(lambda row: None)
        rows = metrics.read_metrics(frozen.path)
        curves.append([{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows])
    assert json.dumps(curves[0]) == json.dumps(curves[1])


@pytest.mark.parametrize("model", ["small-llama", "small-qwen3-moe"])
def test_a_starting_model_is_the_same_whenever_it_is_made(monkeypatch, tmp_path, model):
    few = make_model.WORKING._replace(steps=30, batch=16, warm_up=1)
    monkeypatch.setattr(make_model, "WORKING", few)
    for name in ("one", "two"):
        words = [str(tmp_path / name), f"model={model}", "data=running-sum"]
        assert recipes_make_model.main(words) == 0
    assert weights_digest(tmp_path / "one") == weights_digest(tmp_path / "two")


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3-moe"])
@pytest.mark.parametrize("precision", ["bf16", "fp8-kv-attn"])
def test_a_replayed_step_gives_what_a_launched_one_gives(make_plan, monkeypatch, model, precision):
    [frozen] = run_dir.freeze([plan := make_plan(f"model={model}", f"precision={precision}")])
    run = GrpoLoop(plan, frozen.path)
    run.progress.kv_scales = run._scales_of_prompts() if run.fp8_kv else {}
    run._refit(0)
    run.chat.end = -1  # nothing ends before the second width
    prompts = [run.chat.prompt(each.input) for each in run.problems.validation[:8]]

    def sample():
        generator = torch.Generator("cuda").manual_seed(0)
        return run.engine.generate(prompts, run.chat, rollout.WIDTH + 20, generator)

    def launched(decoder):
        width = rollout.WIDTH * -(-decoder.written // rollout.WIDTH)
        decoder.room.width = min(decoder.room.tokens, width)
        with without_host_reads():
            return decoder._forward(decoder.token_B1)

    replayed = sample()
    scored_BR = run.policy.logprobs(replayed)
    pair = LogprobPair(scored_BR, replayed.rollout_BR, replayed.response_mask_BR)
    assert mismatch_metrics(pair)["mismatch/kl"] < (2e-4 if precision == "bf16" else 0.02)
    monkeypatch.setattr(rollout.Decoder, "_replayed", launched)
    expected = sample()
    assert torch.equal(replayed.tokens_BT, expected.tokens_BT)
    torch.testing.assert_close(replayed.rollout_BR, expected.rollout_BR)


@pytest.mark.parametrize(("groups", "places", "D"), [(1, 256, 64), (4, 512, 64), (2, 129, 128)])
def test_attention_of_a_token_over_a_bf16_cache_is_that_of_a_cpu(groups, places, D):
    draw = torch.Generator().manual_seed(0)
    room = [torch.randn(3, 2, places + 7, D, generator=draw).bfloat16() for _ in "kv"]
    key, value = (x[:, :, None, :places] for x in room)
    query = torch.randn(3, 2, groups, 1, D, generator=draw).bfloat16()
    mask = torch.rand(3, 1, 1, 1, places, generator=draw) > 0.3
    mask[0], mask[1, ..., : places // 2] = False, False
    hidden = (query, unread(key, mask), unread(value, mask), mask)
    found = attention._attend_plain(None, *(x.cuda() for x in hidden), D**-0.5).cpu().float()
    expected = attention._attend_plain(None, query, key, value, mask, D**-0.5)
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=5e-3)


@pytest.mark.parametrize(("groups", "T", "D"), [(1, 70, 64), (4, 33, 64), (2, 129, 128)])
def test_attention_of_texts_and_its_gradients_are_those_of_a_cpu(groups, T, D):
    draw = torch.Generator().manual_seed(0)
    real = torch.ones(3, T).bool()
    real[0, : T // 2], real[1, :9] = False, False
    mask = causal_mask(real)[:, :, None]
    read = real[:, None, None, :, None]  # padded queries see no key: torch's kernel takes them all
    shapes = ((3, 2, groups, T, D), (3, 2, 1, T, D), (3, 2, 1, T, D))
    texts = [torch.randn(*shape, generator=draw).bfloat16() for shape in shapes]
    weigh = torch.randn(3, 2, groups, T, D, generator=draw) * read

    def attended(device):
        given = [x.to(device).requires_grad_() for x in texts]
        found = attention._attend_plain(None, *given, mask.to(device), D**-0.5).float()
        (found * weigh.to(device)).sum().backward()
        assert found.isfinite().all()  # a NaN would go into the sums of the next layer
        found = found.detach().cpu() * read
        return [found, *(each.grad.cpu().float() for each in given)]

    for gpu, cpu in zip(attended("cuda"), attended("cpu"), strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3-moe"])
def test_a_model_with_fused_norms_says_what_transformers_says(make_plan, model):
    plan = make_plan(f"model={model}", "precision=bf16")
    fused = load_model(model_path(plan.recipe.model), torch.device("cuda"))
    plain = deepcopy(fused)
    set_train_precision(fused, plan.recipe.precision)
    set_train_precision(plain, plan.recipe.precision)
    for module in plain.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = type(module).forward.__get__(module)
    tokens = torch.arange(3, 35, device="cuda")[None] % plan.recipe.model.shape.vocab
    mask = causal_mask(torch.ones_like(tokens, dtype=torch.bool))
    both = [each(tokens, attention_mask=mask).logits.float() for each in (fused, plain)]
    assert not torch.equal(*both)  # they round elsewhere
    near = torch.isclose(*(x.log_softmax(-1) for x in both), rtol=0.05, atol=0.1)
    assert near.float().mean() > 0.98  # a token that rounds to another expert differs by 0.3


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3-moe"])
def test_texts_are_scored_the_same_with_gradients_and_without(make_plan, model):
    [frozen] = run_dir.freeze([plan := make_plan(f"model={model}", "precision=fp8-e2e")])
    run = GrpoLoop(plan, frozen.path)
    run._refit(0)
    batch = run._sample(run.problems.validation[:8], torch.Generator("cuda").manual_seed(0))
    assert torch.equal(run.policy.logprobs(batch), run.policy._score(batch).detach())


@pytest.mark.parametrize(
    ("groups", "places", "D"), [(1, 300, 64), (4, 5, 64), (4, 200, 128), (2, 129, 64)]
)
def test_attention_of_a_token_over_an_fp8_cache_is_that_of_a_cpu(groups, places, D):
    draw = torch.Generator().manual_seed(0)
    room = [torch.randn(3, 2, places + 7, D, generator=draw) / 0.03 for _ in "kv"]
    key, value = (x.clamp(-448, 448).to(torch.float8_e4m3fn)[:, :, None, :places] for x in room)
    query = torch.randn(3, 2, groups, 1, D, generator=draw).bfloat16()
    mask = torch.rand(3, 1, 1, 1, places, generator=draw) > 0.3
    mask[0], mask[1, ..., : places // 2] = False, False

    def attended(device, *texts):
        scales = {n: torch.tensor([0.02], device=device) for n in ("q_scale", "k_scale", "v_scale")}
        module, given = SimpleNamespace(**scales), (x.to(device) for x in (query, *texts, mask))
        return attention._attend_fp8(module, *given, D**-0.5).cpu()

    found = attended("cuda", unread(key, mask), unread(value, mask))
    torch.testing.assert_close(found, attended("cpu", key, value), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sizes", [(5, 7, 130), (1, 128, 128), (200, 300, 384), (70, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_in_fp8_are_those_of_the_values_that_the_bytes_stand_for(sizes, dtype):
    T, O, K = sizes
    draw = torch.Generator().manual_seed(0)
    x, w, y = (torch.randn(*s, generator=draw).cuda() for s in ((T, K), (O, K), (K, O)))
    groups, other, block = quantize_groups(x), quantize_groups(w), quantize_blocks(w)
    across = quantize_blocks(y)  # of a weight that is taken the other way round, as dx does
    for right, value in (
        (other, dequantize_groups(other)),
        (block, dequantize_blocks(block)),
        (tuple(each.T for each in across), dequantize_blocks(across).T),
    ):
        found = linears.scaled_mm(groups, right, dtype)
        expected = (dequantize_groups(groups).double() @ value.double().T).to(dtype)
        assert found.dtype == dtype
        rtol = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-4)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("sizes", [(5, 7, 130), (256, 1024, 512)])
def test_products_with_a_slab_are_those_of_its_matrices(shared, sizes):
    T, O, K = sizes
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1 if shared else 16, T, K, generator=draw).cuda().bfloat16()
    slab = quantize_blocks(torch.randn(16, O, K, generator=draw).cuda().bfloat16())
    groups = quantize_groups(x)
    found = linears.scaled_mm(groups, slab, torch.bfloat16)
    for n, one in enumerate(found):
        left = tuple(each[0 if shared else n] for each in groups)
        matrix = slab.fp8_OI[n], slab.scale_inv_PQ[n]
        assert torch.equal(one, linears.scaled_mm(left, matrix, torch.bfloat16)), n
