"""The parts of the nemo backend that need no NeMo RL: logger, engine read-back, logs, preflight."""

import dataclasses
import fcntl
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from fp8_nemo.glue.wire import RefitError
from fp8_nemo.launch import driver, preflight, session
from fp8_nemo.launch import engine_checks as engine
from fp8_nemo.launch.engine_checks import EngineError, check_engine, engine_weight, planned_weights
from fp8_nemo.nemo.step_metrics import OPENED, OverheardLogger
from fp8_nemo.nemo.worker_settings import WorkerSettings
from fp8_nemo.nemo_config import checkout
from fp8_nemo.nemo_config.host import MAIN, Host
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.model_dir import SHIPPED, weights_digest
from fp8_nemo.runs.run_dir import checkpoint_step, checkpoints, conversion_dir, freeze

NEMO = ("backend=nemo", "glue=stock")


def fallen(monkeypatch, tmp_path, kept, raised):
    """What `opened` raises, with workers that kept `kept`, where `raised` comes out of the loop."""
    monkeypatch.setattr(session, "_set_up", lambda *_: SimpleNamespace(generation=None))
    monkeypatch.setattr(session, "engine_dtypes", lambda _: {})
    monkeypatch.setattr(session, "check_engine", lambda *_: None)
    monkeypatch.setattr(session, "refit_problems", kept)
    monkeypatch.setattr(session, "_shut_down", lambda _: None)
    [plan] = compose_plans([*NEMO, "precision=bf16"])
    (tmp_path / "log").mkdir()
    with (
        pytest.raises(Exception) as error,
        session.opened(plan, tmp_path, tmp_path),
    ):
        raise raised
    return error.value


def test_what_the_receivers_kept_of_a_refit_is_the_reason_of_a_run_that_fell(monkeypatch, tmp_path):
    reason = fallen(monkeypatch, tmp_path, lambda _: ["k_proj: never arrived"], ValueError("false"))
    assert isinstance(reason, RefitError) and reason.problems == ["k_proj: never arrived"]
    assert isinstance(reason.__cause__, ValueError)


def test_the_senders_own_reason_is_kept(monkeypatch, tmp_path):
    own = RefitError(["q_proj: holds NaN in the trainer"])
    assert fallen(monkeypatch, tmp_path, lambda _: ["the manifest never arrived"], own) is own


def test_an_engine_that_cannot_be_asked_hides_nothing(monkeypatch, tmp_path):
    def dead(_):
        raise ConnectionError("the actor died")

    own = ValueError("out of memory")
    assert fallen(monkeypatch, tmp_path, dead, own) is own


def test_a_worker_without_our_receiver_is_named_by_rank_and_host(monkeypatch):
    ours = SimpleNamespace(rank=0, fp8_nemo_report=dict)
    actor = SimpleNamespace(
        llm=SimpleNamespace(collective_rpc=lambda ask: [ask(ours), ask(SimpleNamespace(rank=1))])
    )
    second = SimpleNamespace(llm=None)  # an actor of another tensor-parallel rank owns no engine
    monkeypatch.setattr(engine, "_ask", lambda _, question: [question(actor), question(second)])
    with pytest.raises(EngineError, match=f"vLLM worker 1 on {socket.gethostname()}: runs NeMo"):
        engine.check_receivers(None)
    actor.llm.collective_rpc = lambda ask: [ask(ours)]
    engine.check_receivers(None)


def overheard():
    """A logger as NeMo RL drives it through a first validation and one step that validates."""
    logged, rows = [], []
    inner = SimpleNamespace(
        log_metrics=lambda *arguments, **options: logged.append(arguments[2]), log_plot="plot"
    )
    seen = [{"mismatch/kl": 0.25}, {"mismatch/kl": 0.25}, {OPENED: True}]  # first: fresh engine
    logger = OverheardLogger(inner, lambda: seen.pop(0), rows.append)
    logger.log_metrics({"accuracy": 0.5, "avg_length": 3.0}, 0, prefix="validation")
    logger.log_metrics({"total_validation_time": 1.0}, 0, prefix="timing/validation")
    logger.log_metrics({"mean_gen_tokens_per_sample": 3.0}, 1, prefix="train")
    logger.log_metrics({"total_validation_time": 1.0}, 1, prefix="timing/validation")
    logger.log_metrics({"accuracy": 0.75}, 1, prefix="validation")
    logger.log_metrics({"reward": 0.5, "loss": 0.1}, 1, prefix="train")
    logger.log_metrics({"tflops": 9.0}, 1, prefix="performance")
    times = {"generation": 2.0, "policy_training": 3.0, "prepare_for_generation/total": 0.5}
    for step, more in (
        (1, {"checkpointing": 0.5, "total_step_time": 8.5}),
        (2, {"total_step_time": 6.0}),
    ):
        logger.log_metrics(
            times | more | {"other": 1.0}, step, prefix="timing/train", step_finished=True
        )
    return logged, rows, logger


def test_a_step_is_one_row_in_our_words_and_the_first_validation_is_row_0():
    _, rows, _ = overheard()
    assert rows[0] == {"step": 0, "mismatch/kl": 0.25, "val/accuracy": 0.5}
    assert rows[1] == {
        "step": 1,
        "mismatch/kl": 0.25,
        "val/accuracy": 0.75,
        "reward/mean": 0.5,
        "time/rollout": 2.0,
        "time/train": 3.0,
        "time/step": 7.0,  # without the second of validation and the half of saving
    }


def test_a_refit_is_timed_where_one_opened_the_step():
    _, rows, _ = overheard()
    assert "time/refit" not in rows[1], "the validation before it had refitted"
    assert rows[2] == {
        "step": 2, "time/rollout": 2.0, "time/train": 3.0, "time/refit": 0.5, "time/step": 6.0,
    }  # fmt: skip


def test_nemo_rls_own_log_hears_everything_and_keeps_its_other_methods():
    logged, rows, logger = overheard()
    assert len(logged) == 9 and len(rows) == 3 and logger.log_plot == "plot"


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


def test_a_bf16_run_in_an_fp8_engine_stops():
    [recipe] = compose(["model=small-qwen3-moe", "precision=bf16"])
    with pytest.raises(EngineError, match="FP8 by the engine alone, as are 23 more"):
        check_engine(engine_of(6), recipe)


def test_the_reason_is_the_line_that_names_it_not_rays_wrapper():
    text = (
        "The actor died because of an error raised in its creation task\n  File x, line 1\n"
        "\x1b[36m(W pid=1)\x1b[0m ValueError: No available memory for the cache blocks.\n"
    )
    assert (
        driver._reason(RuntimeError(text))
        == "ValueError: No available memory for the cache blocks."
    )
    assert driver._reason(KeyError("reward")) == "KeyError: 'reward'"


def test_what_is_printed_goes_to_the_log_too(tmp_path, capsys):
    with driver.copied_to(tmp_path / "log"):
        print("seen")
        print("heard", file=sys.stderr)
    assert (tmp_path / "log").read_text() == "seen\nheard\n"
    assert capsys.readouterr() == ("seen\n", "heard\n")


@pytest.fixture
def attempt(monkeypatch, tmp_path):
    """One attempt of the driver's at a run of texts of ours; its steps are NeMo RL's, left out."""
    for name in ("train", "validation"):
        lines = [f'{{"input": "{n}+1", "output": "{n + 1}"}}\n' for n in range(64)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    shutil.copytree(SHIPPED / "tiny-llama", tmp_path / "model")
    line = [*NEMO, "precision=bf16", "model=tiny-llama", f"model.path={tmp_path}/model"]
    line += ["data=jsonl", f"data.path={tmp_path}", f"outputs={tmp_path}/outputs"]

    def train(plan, path, _):
        (path / "checkpoints" / "step_1").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(driver, "root_of", lambda _: tmp_path)
    monkeypatch.setattr(driver, "read_host", lambda _: None)
    monkeypatch.setattr(driver, "own_ray", nullcontext)
    monkeypatch.setattr(driver, "train", train)
    monkeypatch.setattr(driver.os, "environ", dict(os.environ))
    monkeypatch.setattr(driver.signal, "signal", lambda *_: None)

    def run(*more):
        [plan] = compose_plans([*line, *more])
        [frozen] = freeze([plan])
        return driver.run(plan, frozen.path), frozen.path

    return run


@pytest.mark.parametrize("changed", ["weights", "problems"])
def test_other_weights_or_problems_than_it_began_with_are_refused_unless_allowed(
    attempt, tmp_path, changed, capsys
):
    code, path = attempt()
    began = json.loads((path / "environment.json").read_text())
    assert code == 0 and began["weights"] == weights_digest(SHIPPED / "tiny-llama")
    if changed == "problems":
        (tmp_path / "train.jsonl").open("a").write('{"input": "1+1", "output": "2"}\n')
    else:
        (tmp_path / "model" / "more.safetensors").write_bytes(b"other")
    attempts = set((path / "log").iterdir())
    assert attempt()[0] == 2 and set((path / "log").iterdir()) == attempts
    assert f"{path}: began with {changed} {began[changed]}, here are" in capsys.readouterr().err
    assert attempt("cluster.other_versions=allow")[0] == 0
    assert json.loads((path / "environment.json").read_text())[changed] == began[changed]


def test_a_conversion_under_way_is_waited_for_and_a_finished_one_is_not(tmp_path):
    started, entered = threading.Event(), threading.Event()

    def other_run():
        started.set()
        with session.one_conversion(tmp_path):
            entered.set()

    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=other_run)
        thread.start()
        assert started.wait(5) and not entered.wait(0.3)
    thread.join(5)
    assert entered.is_set()
    assert (tmp_path / ".whole").exists()
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with session.one_conversion(tmp_path):
            pass


def test_what_a_killed_conversion_has_left_is_not_taken_for_a_model(tmp_path):
    left = tmp_path / "org" / "model" / "iter_0000000"
    left.mkdir(parents=True)
    with pytest.raises(KeyboardInterrupt), session.one_conversion(tmp_path):
        assert not left.exists()
        left.mkdir()
        raise KeyboardInterrupt
    with session.one_conversion(tmp_path):
        assert not left.exists()
        left.mkdir()
    with session.one_conversion(tmp_path):
        assert left.exists()


def test_a_model_that_was_made_again_is_converted_again(tmp_path):
    source = tmp_path / "model"
    source.mkdir()
    (source / "model.safetensors").write_bytes(b"one")
    first = conversion_dir(tmp_path / "outputs", "mine", source, {})
    assert conversion_dir(tmp_path / "outputs", "mine", source, {}) == first and first.is_dir()
    assert conversion_dir(tmp_path / "outputs", "mine", source, {"rope_theta": 1e4}) != first
    (source / "model.safetensors").write_bytes(b"another")
    assert conversion_dir(tmp_path / "outputs", "mine", source, {}) != first
    hub = conversion_dir(tmp_path / "outputs", "meta-llama/Llama-3.1-8B-Instruct", None, {})
    assert hub.name.startswith("meta-llama--Llama-3.1-8B-Instruct-")


def test_checkpoints_of_both_backends_are_ordered_by_step(tmp_path):
    for name in ("step_9", "step_10", "tmp_step_11", "saving-000012"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [checkpoint_step(each) for each in checkpoints(tmp_path)] == [9, 10]


def problems(*arguments):
    [plan] = compose_plans([*NEMO, *arguments])
    return preflight.problems_with(plan)


@pytest.fixture
def no_checkout(monkeypatch):
    monkeypatch.delenv("NEMO_RL_ROOT", raising=False)


def test_no_checkout_is_one_line(no_checkout):
    [line] = problems("model=tiny-llama")
    assert line.startswith("cluster.nemo_root=null: backend=nemo runs in NeMo RL; set NEMO_RL_ROOT")


def test_a_folder_that_is_no_checkout_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("NEMO_RL_ROOT", str(tmp_path))
    [plan] = compose_plans([*NEMO, "model=tiny-llama"])
    [line] = preflight.problems_with(plan)
    assert line.startswith(f"{tmp_path}: no NeMo RL here")


def test_a_missing_model_folder_is_one_line(no_checkout, tmp_path):
    lines = problems("model=small-llama", f"model.path={tmp_path}/gone")
    assert lines[1:] == [
        f"model.path={tmp_path}/gone: no such folder; "
        f"fp8-nemo make-model {tmp_path}/gone model=small-llama makes it"
    ]


def test_a_sequence_longer_than_the_models_positions_is_one_line(no_checkout):
    lines = problems("model=tiny-llama", "grpo.max_new_tokens=2000")
    assert lines[1].startswith("grpo.max_new_tokens=2000: makes sequences of 3072 tokens, the mod")


def test_fewer_problems_than_a_batch_is_one_line(no_checkout, tmp_path):
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text('{"input": "1+1", "output": "2"}\n' * 5)
    lines = problems("model=tiny-llama", "data=jsonl", f"data.path={tmp_path}")
    assert lines[1].startswith("grpo.prompts_per_step=32: NeMo RL drops the last, unfilled batch")


class Hub(BaseHTTPRequestHandler):
    """The hub's answer to a model that this account may not see."""

    status, code = 403, "GatedRepo"

    def do_HEAD(self):
        self.send_response(self.status)
        self.send_header("X-Error-Code", self.code)
        self.send_header("X-Error-Message", "Access to model is restricted")
        self.end_headers()

    def log_message(self, *arguments):
        pass


def ask_the_hub(hf_id, tmp_path, *line, **environment):
    """What preflight says of a model, in a process of its own: its library reads settings once."""
    code = (
        "from fp8_nemo.plan.cells import compose_plans;"
        "from fp8_nemo.launch.preflight import _model;"
        f"[plan] = compose_plans({[*NEMO, 'model=tiny-llama', f'model.hf_id={hf_id}', *line]});"
        "print(*_model(plan.recipe, plan), sep='\\n')"
    )
    settings = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "no_proxy": "*"} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=os.environ | settings, timeout=60,
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("status", "code", "line"),
    [
        (403, "GatedRepo", "model.hf_id=org/gated: is gated, and this account has no access"),
        (404, "RepoNotFound", "model.hf_id=org/gated: is not on the hub, or not for this account"),
    ],
)
def test_a_gated_or_missing_model_is_one_line(tmp_path, status, code, line):
    handler = type("Answer", (Hub,), {"status": status, "code": code})
    server = HTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        assert ask_the_hub("org/gated", tmp_path, HF_ENDPOINT=address).startswith(line)
    finally:
        server.shutdown()


def test_an_unreachable_hub_and_an_offline_cache_are_one_line_each(tmp_path):
    line = ask_the_hub("org/model", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert line.startswith("model.hf_id=org/model: the hub cannot be asked (")
    line = ask_the_hub("org/model", tmp_path, HF_HUB_OFFLINE="1")
    assert "is not in the cache" in line and "HF_HUB_OFFLINE is set" in line


def cached(tmp_path, *more, **config):
    """A hub's cache with a model's configuration, and other files of it."""
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    shipped = json.loads((SHIPPED / "tiny-llama" / "config.json").read_text())
    (snapshot / "config.json").write_text(json.dumps(shipped | config))
    (tmp_path / "hub" / "models--org--model" / "refs").mkdir()
    (tmp_path / "hub" / "models--org--model" / "refs" / "main").write_text("abc")
    for name in more:
        (snapshot / name).write_text("{}")
    return snapshot


def test_the_cache_of_the_hub_is_enough(tmp_path):
    snapshot = cached(tmp_path)
    for name in ("tokenizer_config.json", "model.safetensors.index.json"):
        said = ask_the_hub("org/model", tmp_path, HF_HUB_OFFLINE="1")
        assert name.replace(".index.json", "") in said
        (snapshot / name).write_text("{}")
    assert ask_the_hub("org/model", tmp_path, HF_HUB_OFFLINE="1") == ""


def test_a_hubs_model_of_another_shape_or_of_fewer_positions_is_one_line_each(tmp_path):
    cached(
        tmp_path, "tokenizer_config.json", "model.safetensors",
        max_position_embeddings=2048, num_hidden_layers=16,
    )  # fmt: skip
    said = ask_the_hub("org/model", tmp_path, "grpo.max_new_tokens=2000", HF_HUB_OFFLINE="1")
    assert said.splitlines() == [
        "model.shape.layers=2: org/model has num_hidden_layers=16",
        "grpo.max_new_tokens=2000: makes sequences of 3072 tokens, the model has 2048 positions; "
        "lower it",
    ]
    more = ["grpo.max_new_tokens=2000", "+nemo.policy.hf_config_overrides.num_hidden_layers=2"]
    assert ask_the_hub("org/model", tmp_path, *more, HF_HUB_OFFLINE="1") == ""


def test_stretched_positions_are_not_held_against_a_sequence(tmp_path):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    cached(tmp_path, "tokenizer_config.json", "model.safetensors", rope_parameters=rope)
    long = ["grpo.max_new_tokens=2000"]
    assert ask_the_hub("org/model", tmp_path, *long, HF_HUB_OFFLINE="1") == ""


def answers_with_ray(code, tmp_path):
    """What `code` puts into the list `answers`, and what it prints, in a process of its own.

    Answers come by a file: Ray's thread prints between a program's lines, and into them.
    """
    file = tmp_path / "answers.json"
    code = f"import json\nanswers = []\n{code}\njson.dump(answers, open({str(file)!r}, 'w'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text()), done.stdout


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed here")
def test_a_cluster_gives_a_run_its_gpus_by_their_own_numbers(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    code = """
import os, ray
from fp8_nemo.launch.ray_cluster import hold_others
ray.init(address="local", num_gpus=3, num_cpus=2, include_dashboard=False, log_to_driver=False)
held = hold_others(["1"])

@ray.remote(num_gpus=1, num_cpus=0)
class Worker:
    def gpu(self):
        return ray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES")

keep = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
worker = Worker.options(runtime_env={"env_vars": keep}).remote()
answers += [len(held), *ray.get(worker.gpu.remote(), timeout=60)]
"""
    assert answers_with_ray(code, tmp_path)[0] == [2, [1], None]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed here")
def test_an_engine_that_is_dead_or_does_not_answer_holds_no_reason_back(tmp_path):
    code = """
import os, ray, time
from types import SimpleNamespace
from fp8_nemo.launch import engine_checks as engine
from fp8_nemo.launch import session
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)

@ray.remote(num_cpus=0)
class Actor:
    def __init__(self, act):
        problem = lambda ask: act() or [["k_proj: never arrived"]]
        self.llm = SimpleNamespace(collective_rpc=problem)

def asked(*acts):
    actors = [Actor.remote(act) for act in acts]
    ray.get([actor.__ray_ready__.remote() for actor in actors])  # a start is no part of an answer
    return session._problems(SimpleNamespace(worker_group=SimpleNamespace(workers=actors)))

healthy = lambda: None
answers += [asked(healthy, healthy), asked(lambda: os._exit(1), lambda: 1 / 0, healthy)]
engine.AFTER_AN_ERROR = 15.0
start = time.monotonic()
answers += [asked(healthy, lambda: time.sleep(3600)), time.monotonic() - start]
"""
    answers, printed = answers_with_ray(code, tmp_path)
    *problems, seconds = answers
    assert problems == [["k_proj: never arrived"]] * 3 and seconds < 60
    assert "1 of 2 engines gave no answer within 15 s" in printed


def test_workers_inherit_the_plan_and_a_variable_of_the_users_own_is_kept_and_told(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(os, "environ", {**os.environ, "VLLM_NO_USAGE_STATS": "0"})
    [plan] = compose_plans([*NEMO, "model=tiny-llama", "glue=ours", f"outputs={tmp_path}/outputs"])
    driver.prepare(plan, tmp_path)
    told = "VLLM_NO_USAGE_STATS=0: as the environment has it, the plan says 1\n"
    assert capsys.readouterr().out == told and os.environ["VLLM_NO_USAGE_STATS"] == "0"
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == "9.0"
    sent = WorkerSettings.from_environment()
    assert sent == WorkerSettings.of(plan.recipe, loss_corrects=True)
    assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)
    assert os.environ["NRL_MEGATRON_CHECKPOINT_DIR"].startswith(f"{tmp_path}/outputs/.megatron")


def test_a_gpu_that_another_run_is_on_is_not_taken_twice(tmp_path):
    from fp8_nemo.launch.ray_cluster import take, wrong_numbers

    here = str(tmp_path)
    assert take("0", here) and take("1", here) and not take("0", here)
    before = os.umask(0o077)
    try:
        assert take("2", here)
    finally:
        os.umask(before)
    assert (tmp_path / "fp8-nemo-gpu-2.lock").stat().st_mode & 0o777 == 0o444, "for any user"
    assert wrong_numbers(["0", "3"], 4) == ""
    assert "must be numbers below 2" in wrong_numbers(["GPU-8f"], 2)
    assert "must be numbers below 2" in wrong_numbers(["2"], 2)


def test_a_cluster_that_does_not_start_says_so_and_not_that_a_pipe_is_broken(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(driver.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="Ray did not start"), driver.own_ray():
        pass


def test_an_interrupt_stays_an_interrupt_when_the_cluster_is_gone(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    short_lived = tmp_path / "cluster"
    short_lived.write_text("#!/bin/sh\necho 127.0.0.1:1\n")
    short_lived.chmod(0o755)
    monkeypatch.setattr(driver.sys, "executable", str(short_lived))
    with pytest.raises(KeyboardInterrupt), driver.own_ray():
        raise KeyboardInterrupt


def test_nodes_and_gpus_that_this_machine_has_not_are_one_line_each(monkeypatch):
    [plan] = compose_plans([*NEMO, "model=llama31-8b", "cluster.nodes=4"])
    monkeypatch.setattr(preflight, "visible_gpus", lambda: 2)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    nodes, gpus = map(str, preflight._machine(plan.recipe))
    assert nodes.startswith("cluster.nodes=4: cluster.kind=here is one machine; set RAY_ADDRESS")
    assert gpus.startswith("cluster.gpus_per_node=8: this machine shows 2; set cluster.gpus_per")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert list(preflight._machine(plan.recipe)) == []


def test_a_checkout_without_megatron_is_told_before_the_first_attempt_not_by_the_second(
    monkeypatch, tmp_path
):
    [recipe] = compose(["model=qwen3-8b", "cluster=slurm"])
    source = tmp_path / "nemo_rl" / "utils" / "checkpoint.py"
    source.parent.mkdir(parents=True)
    source.write_text("torch.load(common)")  # as v0.7.0 has it
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    assert list(preflight._resume(recipe, tmp_path)) == []
    source.write_text("from megatron.core.dist_checkpointing import load_common_state_dict")
    [line] = preflight._resume(recipe, tmp_path)
    command = f"git -C {tmp_path} submodule update --init --recursive {preflight.BRIDGE}"
    assert line.startswith(f"NEMO_RL_ROOT={tmp_path}: has no Megatron-LM") and command in line
    [system] = compose(["model=qwen3-8b", "cluster=slurm", "cluster.interpreter=system"])
    assert list(preflight._resume(system, tmp_path)) == []
    megatron = tmp_path / preflight.BRIDGE / "3rdparty" / "Megatron-LM" / "megatron" / "core"
    megatron.mkdir(parents=True)
    assert list(preflight._resume(recipe, tmp_path)) == []


@pytest.mark.parametrize(
    ("found", "same"),
    [("0.8.0 7ea279a", True), ("0.8.0", True), ("0.8.0 81aa43d", False), ("0.7.0 7ea279a", False)],
)
def test_a_checkout_whose_commit_cannot_be_asked_is_held_by_its_version(found, same):
    [plan] = compose_plans([*NEMO, "model=qwen3-8b"])
    planned = dataclasses.replace(plan.nemo, host="0.8.0 7ea279a")
    host = Host(found, root="/rl")
    lines = list(preflight._frozen_for(dataclasses.replace(plan, nemo=planned), host))
    assert not lines if same else f"/rl: is {found}, the plan was made for 0.8.0" in lines[0]


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_the_commit_of_somebody_elses_checkout_is_read_too(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    commit = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-mx"]
    for words in (["init", "-q"], commit):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    said = ["git", "-C", str(tmp_path), "rev-parse", "--short=7", "HEAD"]
    head = subprocess.run(said, capture_output=True, text=True, check=True).stdout.strip()
    for file in (tmp_path, tmp_path / ".git"):
        os.chown(file, 12345, 12345)
    refused = subprocess.run(said, capture_output=True, text=True)
    assert "dubious ownership" in refused.stderr
    assert checkout.Source(tmp_path).name == f"?.?.? {head}"


@pytest.mark.parametrize(
    ("line", "saved_by"),
    [([], None), (["+nemo.checkpointing.checkpoint_must_save_by=00:03:30:00"], "00:03:30:00")],
)
def test_when_to_save_by_is_the_jobs_end_or_what_a_line_says(monkeypatch, tmp_path, line, saved_by):
    [plan] = compose_plans([*NEMO, "model=qwen3-8b", *line])
    given = {driver.SAVE_BY: saved_by or "00:01:00:00 of a base file"}
    parts = SimpleNamespace(
        config=SimpleNamespace(checkpointing=given), logger=None, policy=SimpleNamespace(take_row=0)
    )
    monkeypatch.setattr(driver.session, "opened", lambda *_: nullcontext(parts))
    monkeypatch.setattr(driver.session, "run_grpo", lambda *_: None)
    monkeypatch.delenv("FP8_NEMO_JOB_END", raising=False)
    driver.train(plan, tmp_path, tmp_path)
    assert parts.config.checkpointing[driver.SAVE_BY] == saved_by
    end = time.time() + 7200 + plan.recipe.cluster.save_before_end
    monkeypatch.setenv("FP8_NEMO_JOB_END", str(end))
    driver.train(plan, tmp_path, tmp_path)
    assert parts.config.checkpointing[driver.SAVE_BY] in (saved_by or "00:01:59:59", "00:02:00:00")


def test_a_login_node_needs_nothing_of_what_the_job_needs(monkeypatch):
    monkeypatch.setattr(preflight, "NEEDED_PYTHON", (99, 0))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    [recipe] = compose(["model=qwen3-8b", "cluster=slurm", "cluster.interpreter=system"])
    assert list(preflight._software(recipe, MAIN)) == []
    monkeypatch.setenv("RAY_ADDRESS", "head:1200")  # in the job
    [line] = preflight._software(recipe, MAIN)
    assert "NeMo RL needs 3.12" in line
