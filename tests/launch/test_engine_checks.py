"""What vLLM's workers hold is read back through a real Ray, and compared with the plan."""

import socket

import pytest

from fp8_nemo.launch.engine_checks import EngineError, check_engine, engine_weight, planned_weights
from fp8_nemo.recipe.compose import compose


def test_workers_are_asked_through_their_actors_and_those_that_are_not_ours_or_lie_otherwise_named(
    answers_with_ray,
):
    code = """
import ray
from types import SimpleNamespace
from fp8_nemo.launch import engine_checks as engine
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)

class Engine:
    def __init__(self, workers):
        self.workers = workers

    def collective_rpc(self, question):
        return [question(worker) for worker in self.workers]

@ray.remote(num_cpus=0)
class Actor:
    def hold(self, *workers):
        self.llm = Engine(workers) if workers else None  # other tensor-parallel ranks have none

started = [Actor.remote() for _ in range(3)]

def asked(ask, *groups):
    actors = started[: len(groups)]
    ray.get([actor.hold.remote(*workers) for actor, workers in zip(actors, groups)])
    return ask(SimpleNamespace(worker_group=SimpleNamespace(workers=actors)))

ours = SimpleNamespace(rank=0, fp8_nemo_report=lambda: {"bytes": 7})
stock = SimpleNamespace(rank=1)
answers += [asked(engine.refit_reports, [ours, stock], [], [ours])]
answers += [asked(engine.check_receivers, [ours], [])]
try:
    asked(engine.check_receivers, [ours, stock], [])
except engine.EngineError as error:
    answers += [str(error)]
ours.fp8_nemo_layout_problems = list
moved = SimpleNamespace(fp8_nemo_layout_problems=lambda: ["a.weight: no such", "b.weight: no such"])
answers += [asked(engine.check_layouts, [ours], [])]
try:
    asked(engine.check_layouts, [ours, moved], [moved], [])
except engine.EngineError as error:
    answers += [str(error)]
"""
    [reports, nothing, error, nothing_moved, layout], _ = answers_with_ray(code)
    assert (
        nothing_moved is None and "as our refits expect: a.weight: no such, and 1 more; " in layout
    )
    assert reports == [{"bytes": 7}, {}, {"bytes": 7}] and nothing is None
    assert error.startswith(f"vLLM worker 1 on {socket.gethostname()}: runs NeMo RL's own receiver")


def test_an_asynchronous_worker_is_asked_by_its_own_method_and_awaits_its_engine(answers_with_ray):
    code = """
import asyncio, ray
from types import SimpleNamespace
from fp8_nemo.launch import engine_checks as engine
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)

@ray.remote(num_cpus=0)
class Actor:
    def __init__(self, *workers):
        self.workers = workers

    async def fp8_nemo_ask(self, question):
        await asyncio.sleep(0)
        return [question(worker) for worker in self.workers]

ours = SimpleNamespace(rank=0, fp8_nemo_report=lambda: {"bytes": 7}, fp8_nemo_problems=["k: never"])
actors = [Actor.remote(ours), Actor.remote()]
ray.get([actor.__ray_ready__.remote() for actor in actors])  # a start is no part of an answer
generation = SimpleNamespace(worker_group=SimpleNamespace(workers=actors))
answers += [engine.refit_reports(generation), engine.refit_problems(generation)]
answers += [engine.check_receivers(generation)]
"""
    answers, _ = answers_with_ray(code)
    assert answers == [[{"bytes": 7}], ["k: never"], None]


def test_an_engine_that_is_dead_or_does_not_answer_holds_no_reason_back(answers_with_ray):
    code = """
import os, ray, time
from types import SimpleNamespace
from fp8_nemo.launch import engine_checks as engine
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)

@ray.remote(num_cpus=0)
class Actor:
    def hold(self, act):
        problem = lambda ask: act() or [["k_proj: never arrived"]]
        self.llm = SimpleNamespace(collective_rpc=problem)

started = [Actor.remote() for _ in range(3)]

def asked(*acts):
    actors = started[-len(acts) :]  # the first one dies
    ray.get([actor.hold.remote(act) for actor, act in zip(actors, acts)])  # no part of an answer
    return engine.refit_problems(SimpleNamespace(worker_group=SimpleNamespace(workers=actors)))

healthy = lambda: None
answers += [asked(healthy, healthy), asked(lambda: os._exit(1), lambda: 1 / 0, healthy)]
engine.AFTER_AN_ERROR = 15.0
start = time.monotonic()
answers += [asked(healthy, lambda: time.sleep(3600)), time.monotonic() - start]
"""
    answers, printed = answers_with_ray(code)
    *problems, seconds = answers
    assert problems == [["k_proj: never arrived"]] * 3 and seconds < 60
    assert "1 of 2 engines gave no answer within 15 s" in printed


def test_answers_that_vllms_executor_owes_from_a_failed_refit_hide_no_tensor(answers_with_ray):
    code = """
import ray
from collections import deque
from types import SimpleNamespace
from fp8_nemo.launch import engine_checks as engine
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)

class Llm:
    def __init__(self):
        self.workers = [SimpleNamespace(fp8_nemo_problems=[f"{i}: lost"]) for i in range(4)]
        self.queues = [deque() for _ in self.workers]

    def collective_rpc(self, call):
        # vLLM 0.25.1, MultiprocExecutor.get_response: the first error ends the reading of answers
        for worker, queue in zip(self.workers, self.queues):
            queue.append(call(worker))
        read = []
        for queue in self.queues:
            answer = queue.popleft()
            if isinstance(answer, Exception):
                raise RuntimeError(f"Worker failed with error '{answer}'")
            read.append(answer)
        return read

@ray.remote(num_cpus=0)
class Actor:
    def fail(self, failing):
        self.llm = Llm()
        try:
            self.llm.collective_rpc(
                lambda worker: ValueError("lost") if int(worker.fp8_nemo_problems[0][0]) in failing
                else True
            )
        except RuntimeError:
            pass

actor = Actor.remote()
generation = SimpleNamespace(worker_group=SimpleNamespace(workers=[actor]))
for failing in ([0], [1], [3], [0, 1, 2, 3], [1, 3]):
    ray.get(actor.fail.remote(failing))  # a start is no part of an answer
    answers += [sorted(engine.refit_problems(generation))]
"""
    answers, _ = answers_with_ray(code)
    assert answers == [[f"{rank}: lost" for rank in range(4)]] * 5


@pytest.mark.parametrize(
    ("name", "spelled"),
    [
        ("model.layers.3.self_attn.k_proj.weight", "model.layers.3.self_attn.qkv_proj"),
        ("model.layers.3.self_attn.qkv_proj.weight", "model.layers.3.self_attn.qkv_proj"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj"),
        ("model.layers.0.mlp.experts.7.up_proj.weight", "model.layers.0.mlp.experts.w13"),
        ("model.layers.0.mlp.experts.7.down_proj.weight", "model.layers.0.mlp.experts.w2"),
        (
            "model.layers.0.mlp.experts.routed_experts.w13_weight",
            "model.layers.0.mlp.experts.w13",
        ),
        ("model.layers.0.mlp.experts.w2_weight", "model.layers.0.mlp.experts.w2"),
    ],
)
def test_a_checkpoints_weight_and_vllms_fused_one_have_one_spelling(name, spelled):
    assert engine_weight(name) == spelled


def engine_of(layers):
    """Dtypes as vLLM 0.25.1 answered for small-qwen3-moe in FP8 on an H200."""
    fp8, bf16 = "torch.float8_e4m3fn", "torch.bfloat16"
    dtypes = {"model.embed_tokens.weight": bf16, "lm_head.weight": bf16}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        dtypes |= {
            f"{at}.self_attn.qkv_proj.weight": fp8,
            f"{at}.self_attn.qkv_proj.weight_scale_inv": "torch.float32",
            f"{at}.self_attn.o_proj.weight": fp8,
            f"{at}.self_attn.q_norm.weight": bf16,
            f"{at}.mlp.gate.weight": bf16,
            f"{at}.mlp.experts.routed_experts.w13_weight": fp8,
            f"{at}.mlp.experts.routed_experts.w2_weight": fp8,
        }
    return dtypes


def test_an_engine_that_holds_the_plans_fp8_weights_passes():
    [recipe] = compose(["model=small-qwen3-moe", "precision=fp8-linear"])
    check_engine(engine_of(6), recipe)
    fp8 = {engine_weight(name) for name, dtype in engine_of(6).items() if "float8" in dtype}
    assert planned_weights(recipe) == fp8 and len(fp8) == 24


@pytest.mark.parametrize(
    ("name", "dtype", "side"),
    [
        ("model.layers.2.mlp.gate.weight", "torch.float8_e4m3fn", "the engine"),
        ("model.layers.2.self_attn.o_proj.weight", "torch.bfloat16", "the plan"),
        ("model.layers.5.mlp.experts.routed_experts.w2_weight", "torch.bfloat16", "the plan"),
    ],
)
def test_a_weight_that_is_fp8_on_one_side_alone_stops_the_run_by_name(name, dtype, side):
    [recipe] = compose(["model=small-qwen3-moe", "precision=fp8-linear"])
    with pytest.raises(EngineError) as caught:
        check_engine(engine_of(6) | {name: dtype}, recipe)
    assert str(caught.value).startswith(f"{engine_weight(name)}: FP8 by {side} alone")


def test_an_fp16_run_in_a_bf16_engine_stops_and_in_an_fp16_engine_goes_on():
    [recipe] = compose(["model=small-qwen3-moe", "precision=fp16"])
    names = [name for name, dtype in engine_of(6).items() if "float8" not in dtype]
    dtypes = dict.fromkeys(names, "torch.float16")
    check_engine(dtypes, recipe)
    one = min(names)
    with pytest.raises(EngineError, match=f"{one}: torch.bfloat16 in the engine, torch.float16 by"):
        check_engine(dtypes | {one: "torch.bfloat16"}, recipe)


def four_bits_of(layers, packed=("self_attn.qkv_proj", "self_attn.o_proj", "mlp.down_proj")):
    """Dtypes of a Llama in four bits, as vLLM 0.25.1 repacks it for Marlin."""
    bf16 = "torch.bfloat16"
    dtypes = {"model.embed_tokens.weight": bf16, "lm_head.weight": bf16}
    for layer in range(layers):
        for module in (*packed, "mlp.gate_up_proj"):
            at = f"model.layers.{layer}.{module}"
            dtypes |= {
                f"{at}.weight": "torch.int32",
                f"{at}.weight_scale": "torch.float8_e4m3fn",
                f"{at}.weight_global_scale": "torch.float32",
            }
    return dtypes


def test_an_engine_in_four_bits_is_known_by_its_scales():
    [recipe] = compose(["model=small-llama", "precision=nvfp4-w4a16"])
    check_engine(four_bits_of(12), recipe)
    plain = {"model.layers.3.mlp.gate_up_proj.weight": "torch.bfloat16"}
    fewer = {n: d for n, d in four_bits_of(12).items() if not n.startswith("model.layers.3.mlp.g")}
    with pytest.raises(EngineError, match=r"layers.3.mlp.gate_up_proj: FP8 by the plan alone"):
        check_engine(fewer | plain, recipe)


def test_a_bf16_run_in_an_fp8_engine_stops():
    [recipe] = compose(["model=small-qwen3-moe", "precision=bf16"])
    with pytest.raises(EngineError, match="FP8 by the engine alone, as are 23 more"):
        check_engine(engine_of(6), recipe)
