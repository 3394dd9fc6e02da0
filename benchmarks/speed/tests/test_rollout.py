"""benchmarks.speed.rollout: what it asks the engine for, how it reads its steps, and its file.

The command itself runs here against a pretended vLLM, which decodes by a clock of its own. That a
real vLLM takes these arguments and chooses these kernels is seen on a GPU.
"""

# pyright: reportMissingImports=false
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.speed import rollout as bench
from benchmarks.speed import rollout_engine
from benchmarks.speed.rollout_engine import Point, Step, stretches

ROOT = Path(__file__).parents[3]

OUT = ["--out", "x.json"]

VLLM = '''
import sys
import time
from types import SimpleNamespace as N
import torch

attends = sys.modules["vllm.v1.attention.backends"] = N(flash_attn=N(flash_attn_varlen_func=len))

SamplingParams = N
KERNELS = {"auto": "UnquantizedLinearMethod", "cutlass": "CutlassFp8BlockScaledMMKernel"}
KERNELS["deep_gemm"] = "DeepGemmFp8BlockScaledMMKernel"

class Pool:
    def __init__(self): self.free = 5000
    def get_num_free_blocks(self): return self.free
    def get_new_blocks(self, count): self.free -= count; return [0] * count
    def free_blocks(self, blocks): self.free += len(blocks)

class LLM:
    """Prompts one step each, then a token a millisecond; preempts once where blocks lack."""
    def __init__(self, **arguments):
        self.pool, self.arguments = Pool(), arguments
        by_xqa = hasattr(attends.flash_attn.flash_attn_varlen_func, "by_xqa")
        assert by_xqa == (arguments["kv_cache_dtype"] == "fp8")
        cache = N(num_gpu_blocks=5000, block_size=16, kv_cache_size_tokens=79984)
        core = N(engine_core=N(scheduler=N(kv_cache_manager=N(block_pool=self.pool))))
        self.llm_engine = N(logger_manager=N(), vllm_config=N(cache_config=cache), engine_core=core)
        weight = torch.nn.Linear(256, 256, bias=False)
        weight.quant_method = type(KERNELS[arguments["linear_backend"]], (), {})()
        layers = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([weight])})
        self.model = torch.nn.ModuleDict({"model": layers})
    def collective_rpc(self, work): return [work(N(get_model=lambda: self.model))]
    def generate(self, prompts, sampling, use_tqdm):
        batch, output = len(prompts), sampling.max_tokens
        need = batch * (len(prompts[0]["prompt_token_ids"]) + output)
        lack = int(need > 16 * self.pool.free)
        for n in range(1, batch + output):
            time.sleep(0.0005 if batch > 1 else 0)
            tokens = min(n, batch, batch + output - n)
            made = N(num_generation_tokens=tokens, time_to_first_tokens_iter=[1.0] * (n <= batch),
                     num_preempted_reqs=lack * (n == batch))
            if hasattr(self.llm_engine.logger_manager, "steps"):
                state = N(num_running_reqs=tokens)
                self.llm_engine.logger_manager.record(
                    scheduler_stats=state, iteration_stats=made, mm_cache_stats=None
                )
        out = N(logprobs=[{1: N(logprob=-4.8)}])
        return [N(outputs=[out]) for _ in prompts]
'''


def steps_of(*tokens_and_prompts: tuple[int, int]) -> list[Step]:
    """A step every half second."""
    return [Step(n / 2, t, p, 0, t) for n, (t, p) in enumerate(tokens_and_prompts)]


def test_a_point_is_batch_times_prompt_and_its_output_outlasts_the_stretches():
    assert Point.read("64x1024") == (64, 1024, 0)
    assert Point.read("128x256+768") == (128, 256, 768)
    asked = Point(256, 1024).filled(3)
    late = 256 * 1024 // rollout_engine.CHUNK  # steps by which the last prompt comes after
    assert asked.output >= late + rollout_engine.SETTLE + 3 * rollout_engine.STRETCH
    assert Point(2, 8, 5).filled(3).output == 5


def test_stretches_are_of_full_steps_alone_and_without_the_first(monkeypatch):
    monkeypatch.setattr(rollout_engine, "SETTLE", 2)
    mixed = [(1, 8), (2, 8), (3, 8), (4, 8)]
    steps = steps_of(*mixed, *[(4, 0)] * 7, (3, 0), (1, 0))
    found = stretches(steps, 4, 2)
    # (1 + 2 + 3 + 4)/4 tokens each when all have begun, two more settle, then the stretch's middle
    assert found == [(0.5, 2.5 + 2 + 1), (0.5, 2.5 + 4 + 1)]


def test_a_stretch_does_not_reach_over_a_step_that_lost_a_sequence(monkeypatch):
    monkeypatch.setattr(rollout_engine, "SETTLE", 1)
    steps = steps_of((2, 8), *[(2, 0)] * 3, (1, 0), *[(2, 0)] * 5)
    assert [made for _, made in stretches(steps, 2, 4)] == [1 + 3 + 0.5 + 1 + 2]
    assert stretches(steps, 2, 5) == []


def test_prompt_rates_are_of_steps_full_of_prompts_without_the_first_and_the_last(monkeypatch):
    monkeypatch.setattr(rollout_engine, "CHUNK", 32)
    # (tokens made, of them first ones): two prompts of 16 a step, beside those that go on
    steps = [Step(at, made, begun, 0, made) for at, made, begun in
             [(5, 2, 2), (6, 4, 2), (8, 6, 2), (20, 7, 1), (21, 7, 0)]]  # fmt: skip
    assert rollout_engine.prompt_rates(steps) == [32 - 2, (32 - 4) / 2]
    assert rollout_engine.prompt_rates(steps[-2:]) == []


def test_prompts_never_hold_the_padding_and_differ_between_repetitions():
    one, other = (rollout_engine.prompts_of(Point(3, 50), 4, seed) for seed in (1, 2))
    assert {len(prompt) for prompt in one} == {50}
    assert {token for prompt in one for token in prompt} == {0, 1, 2}
    assert one != other and one == rollout_engine.prompts_of(Point(3, 50), 4, 1)


def test_every_precision_asks_for_its_kernel_twice_and_no_other():
    for name, variant in bench.VARIANTS.items():
        variables = bench.environment_variables(variant, Path("c"))
        deep = "deepgemm" in name or name == "fp8-kv-attn"
        assert variables["VLLM_USE_DEEP_GEMM"] == str(int(deep)), name
        plain = {"bf16": "auto", bench.FOUR_BITS: "auto"}
        linear = plain.get(name, "deep_gemm" if deep else "cutlass")
        assert variant.linear == linear
        assert variables["VLLM_USE_DEEP_GEMM_E8M0"] == "0"


@pytest.mark.parametrize("model", ["llama31-8b", "qwen3-30b-a3b"])
def test_the_engine_gets_what_nemo_rl_gives_it(model):
    found = {}
    for name in bench.VARIANTS.keys() - {bench.FOUR_BITS}:
        options = bench.parse([*OUT, "--model", model, "--precision", name])
        recipe = bench.plan_of(options, Path("folder")).recipe
        found[name] = bench.engine_arguments(
            recipe.model.shape, bench.VARIANTS[name], recipe.precision, Path("f"), options
        )
    assert "quantization" not in found["bf16"]
    asked = found["fp8-kv-attn"]["hf_overrides"]["quantization_config"]
    assert asked["weight_block_size"] == [128, 128] and asked["quant_method"] == "fp8"
    routers = [f"model.layers.{n}.mlp.gate" for n in range(48)] if "qwen" in model else []
    assert asked["ignored_layers"] == routers
    cached = {name: each["kv_cache_dtype"] for name, each in found.items()}
    assert {name for name, dtype in cached.items() if dtype == "fp8"} == {
        "fp8-kv-attn",
        "fp8-kv-attn-cutlass",
    }
    backends = {name: each.get("moe_backend") for name, each in found.items()}
    experts = backends.pop("fp8-linear-deepgemm-experts")
    assert (experts, set(backends.values())) == (
        ("deep_gemm", {"triton"}) if "qwen" in model else (None, {None})
    )
    same = [{**each, "linear_backend": "", "kv_cache_dtype": ""} for each in found.values()]
    keys = ("gpu_memory_utilization", "max_model_len", "compilation_config", "enforce_eager")
    assert len({json.dumps([each[key] for key in keys]) for each in same}) == 1


def test_an_engine_of_four_bits_is_started_as_our_worker_starts_it():
    options = bench.parse([*OUT, "--precision", bench.FOUR_BITS])
    recipe = bench.plan_of(options, Path("f")).recipe
    variant = bench.VARIANTS[bench.FOUR_BITS]
    shape = recipe.model.shape
    given = bench.engine_arguments(shape, variant, recipe.precision, Path("f"), options)
    assert given["quantization"] == "modelopt_fp4"
    assert given["hf_overrides"]["quantization_config"]["quant_algo"] == "W4A16_NVFP4"
    with pytest.raises(SystemExit):
        bench.parse([*OUT, "--precision", bench.FOUR_BITS, "--nemo"])


def test_four_bits_are_filled_with_codes_and_scales_that_marlin_reads_as_the_spread():
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")

    def held(kind, *size):
        return torch.nn.Parameter(torch.zeros(*size).to(kind), requires_grad=False)

    layer = torch.nn.Module()
    layer.weight, layer.weight_scale = held(torch.int32, 8, 64), held(torch.float8_e4m3fn, 8, 64)
    layer.weight_global_scale, layer.params_dtype = held(torch.float32, 1), torch.bfloat16
    model = torch.nn.ModuleDict({"linear": layer})
    assert rollout_engine.fill(SimpleNamespace(get_model=lambda: model)) == []
    assert len(layer.weight.unique()) > 500 and layer.weight.min() < 0 < layer.weight.max()
    # S0E5M3: five bits of exponent and three of fraction, less the 2**7 that the layout adds
    code = layer.weight_scale.view(torch.uint8).unique().item()
    scale = 2.0 ** ((code >> 3) - 15 - 7) * (1 + (code & 7) / 8)
    whole = layer.weight_global_scale.item() * 2.0 ** -(126 - 7)
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert codes.square().mean().sqrt().item() * scale * whole == pytest.approx(0.02, rel=0.01)


def test_an_engine_over_several_gpus_is_asked_for_and_its_rows_are_its_own():
    words = [*OUT, "--precision", "bf16", "--points", "8x64", "--limited", "none"]
    two, one = bench.parse([*words, "--tensor", "2"]), bench.parse(words)
    assert (two.decode, one.decode) == ("fa3", "xqa")
    plan = bench.plan_of(one, Path("f"))
    shape, precision, variant = plan.recipe.model.shape, plan.recipe.precision, bench.VARIANTS
    given = [bench.engine_arguments(shape, variant["bf16"], precision, Path("f"), each)
             for each in (one, two)]  # fmt: skip
    unfused = {"pass_config": {"fuse_allreduce_rms": False}}
    compiled = given[0]["compilation_config"] | unfused
    assert given[1] == given[0] | {"tensor_parallel_size": 2, "compilation_config": compiled}
    rows = [bench.Bench(each, plan).names | {"batch": 8, "prompt": 64} for each in (one, two)]
    assert not bench.twins(*rows) and bench.twins(rows[1], rows[1])
    with pytest.raises(SystemExit):
        bench.parse([*OUT, "--tensor", "2"])


def test_the_longest_sequence_fits_and_every_batch_has_its_graph():
    options = bench.parse([*OUT, "--points", "40x8192,300x64", "--limited", "4x64+9000"])
    assert bench.longest(options) == 9072 and bench.longest(options) % 16 == 0
    assert {40, 300} <= set(bench.graph_sizes(options))
    eager = bench.parse([*OUT, "--eager"])
    recipe = bench.plan_of(bench.parse([*OUT, "--precision", "bf16"]), Path("f")).recipe
    given = bench.engine_arguments(
        recipe.model.shape, bench.VARIANTS["bf16"], recipe.precision, Path("f"), eager
    )
    assert given["enforce_eager"] and "compilation_config" not in given


@pytest.mark.parametrize("model", ["llama31-8b", "qwen3-8b", "qwen25-7b", "qwen3-30b-a3b"])
def test_transformers_reads_the_shape_back_from_the_config(model, tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = bench.plan_of(
        bench.parse([*OUT, "--model", model, "--precision", "bf16"]), Path("f")
    ).recipe.model.shape
    bench.write_config(tmp_path, shape, 8192)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    read = config.hidden_size, config.num_hidden_layers, config.num_key_value_heads
    assert read == (shape.hidden, shape.layers, shape.kv_heads)
    assert config.model_type == shape.family and config.max_position_embeddings == 8192
    assert config.vocab_size == shape.vocab and config.bos_token_id is None
    if shape.experts:
        assert (config.num_experts, config.moe_intermediate_size) == (128, 768)
    else:
        assert config.intermediate_size == shape.ffn


def test_weights_are_spread_alike_in_both_formats_and_every_scale_is_set():
    torch = pytest.importorskip("torch")
    model = torch.nn.Module()
    weight = torch.nn.Parameter(torch.zeros(512, 256).to(torch.float8_e4m3fn), requires_grad=False)
    layer = torch.nn.Module()
    layer.register_parameter("weight", weight)
    layer.weight_scale_inv = torch.nn.Parameter(-torch.ones(4, 2), requires_grad=False)
    model.linear, model.plain = layer, torch.nn.Linear(256, 512, bias=False)
    model.norm = torch.nn.LayerNorm(8, bias=False)
    attention = torch.nn.Module()
    for letter in "qkv":
        attention.register_buffer(f"_{letter}_scale", torch.tensor(-1.0))
    attention.kv_cache_dtype = "fp8"
    model.attention = attention
    model.norm.weight.data.fill_(1e-3)
    worker = SimpleNamespace(worker=SimpleNamespace(get_model=lambda: model))
    assert rollout_engine.fill(worker) == []
    fp8 = weight.float() * layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(
        128, 1
    )
    for values in (fp8, model.plain.weight):
        assert values.std().item() == pytest.approx(rollout_engine.SPREAD, rel=0.05)
    assert (weight.float() == 0).float().mean() < 0.05 and weight.float().abs().max() <= 448
    assert (model.norm.weight == 1).all()
    kept = [getattr(attention, f"_{letter}_scale").item() for letter in "qkv"]
    assert kept == [pytest.approx(rollout_engine.KV_SCALE)] * 3
    assert attention._v_scale_float == rollout_engine.KV_SCALE


def test_experts_whose_kernel_multiplies_with_other_scales_are_named():
    torch = pytest.importorskip("torch")
    experts = torch.nn.Module()
    for name in ("w13_weight", "w2_weight"):
        experts.register_parameter(name, torch.nn.Parameter(torch.zeros(2, 128, 128)))
        scale = torch.nn.Parameter(torch.ones(2, 1, 1), requires_grad=False)
        experts.register_parameter(f"{name}_scale_inv", scale)
    used = SimpleNamespace(w1_scale=experts.w13_weight_scale_inv, w2_scale=torch.ones(2, 1, 1))
    experts.quant_method = SimpleNamespace(moe_quant_config=used)
    model = torch.nn.ModuleDict({"experts": experts})
    worker = SimpleNamespace(get_model=lambda: model)
    assert rollout_engine.fill(worker) == ["experts"]
    used.w2_scale = experts.w2_weight_scale_inv
    assert rollout_engine.fill(worker) == []


def test_a_row_replaces_its_twin_and_the_failure_of_its_point(tmp_path):
    words = ["--out", str(tmp_path / "r.json"), "--caches", str(tmp_path / "caches")]
    options = bench.parse(words)
    row = {"model": "m", "precision": "bf16", "engine": "vLLM", "batch": 1, "prompt": 2}
    for regime, number in (("failed", 0), ("resident", 1), ("limited", 2), ("resident", 3)):
        bench.keep(options, "rows", row | {"regime": regime, "number": number})
    bench.keep(options, "rows", row | {"precision": "fp8", "regime": "resident", "number": 4})
    kept = json.loads((tmp_path / "r.json").read_text())
    assert [each["number"] for each in kept["rows"]] == [2, 3, 4]


def test_rows_are_shown_point_by_point_and_against_bf16_of_their_own_engine():
    def row(precision, prompt, rate, engine="vLLM"):
        rates = {} if rate is None else {"tokens_per_second": {"median": rate}}
        return {"model": "m", "regime": "resident", "prompt": prompt, "batch": 2, "engine": engine,
                "precision": precision} | rates  # fmt: skip

    rows = [row("fp8", 8192, 30.0), row("bf16", 8192, 20.0), row("fp8", 1024, 5.0)]
    rows += [row("bf16", 1024, 10.0), row("bf16", 16384, None), row("fp8", 8192, 3.0, "NeMo RL")]
    shown = bench.against_bf16(rows)
    found = [(each["prompt"], each["engine"], each["precision"], each["of_bf16"]) for each in shown]
    assert found == [
        (1024, "vLLM", "fp8", 0.5),
        (1024, "vLLM", "bf16", 1.0),
        (8192, "NeMo RL", "fp8", None),
        (8192, "vLLM", "fp8", 1.5),
        (8192, "vLLM", "bf16", 1.0),
        (16384, "vLLM", "bf16", None),
    ]


def ran_in(folder, *words):
    """The command against the pretended vLLM: what ran, and its file."""
    words = ["--small", "--out", "found.json", "--model", "tiny-llama", *words]
    words += ["--limited", "16x64+64", "--commit", "abc", "--limit", "120"]
    command = [sys.executable, "-m", "benchmarks.speed.rollout", *words]
    path = f"{folder}:{ROOT}"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return ran, json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize(
    ("wrong", "right", "regimes"),
    [
        ("DeepGemmFp8BlockScaledMMKernel", "MarlinKernel", {"resident", "limited"}),
        ("tokens = min(n, ", "tokens = min(n % 9, ", {"failed", "limited"}),
    ],
    ids=["another kernel", "no whole stretch"],
)
def test_a_measurement_of_something_else_fails_and_keeps_its_rows(tmp_path, wrong, right, regimes):
    pytest.importorskip("torch")
    (tmp_path / "vllm.py").write_text(VLLM.replace(wrong, right))
    ran, content = ran_in(tmp_path, "--precisions", "fp8-kv-attn", "--points", "8x64")
    assert ran.returncode == 1 and {row["regime"] for row in content["rows"]} == regimes
    assert content["engines"][0]["kernel_as_asked"] == ("failed" in regimes)


def test_the_command_measures_every_precision_side_by_side_into_one_file(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "vllm.py").write_text(VLLM)
    ran, content = ran_in(
        tmp_path, "--precisions", "bf16,fp8-linear-cutlass,fp8-kv-attn", "--gpus", "0,1",
        "--points", "4x32,2x64",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = {(r["precision"], r["regime"], r["batch"]): r for r in content["rows"]}
    assert len(content["rows"]) == len(rows) == 9 and len(content["engines"]) == 3
    assert "--precision " not in content["command"]
    assert "failed" not in {regime for _, regime, _ in rows}
    resident = rows["bf16", "resident", 4]
    assert len(resident["seconds_per_step"]["repetitions"]) == 3
    assert resident["seconds_per_step"]["median"] >= 0.0005
    rate = resident["tokens_per_second"]["median"]
    assert rate == pytest.approx(4 / resident["seconds_per_step"]["median"])
    assert 32 + 64 < resident["context"] < 32 + 200
    limited = {name: rows[name, "limited", 16] for name in ("bf16", "fp8-kv-attn")}
    assert [each.get("decode") for each in limited.values()] == [None, "xqa"]
    assert limited["bf16"]["kv_bytes"] == limited["fp8-kv-attn"]["kv_bytes"]
    assert limited["bf16"]["preemptions"]["median"] == 1
    assert limited["fp8-kv-attn"]["preemptions"]["median"] == 0
    assert limited["fp8-kv-attn"]["kv_tokens"] == pytest.approx(
        2 * limited["bf16"]["kv_tokens"], abs=16
    )
