"""What would stop a run is one line each, before a directory is made."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from fp8_nemo.launch import preflight
from fp8_nemo.nemo_config import checkout
from fp8_nemo.nemo_config.host import MAIN, Host
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.model import position_mistakes
from fp8_nemo.plan.plan import plan_recipe
from fp8_nemo.recipe import model_dir
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.model_dir import SHIPPED
from fp8_nemo.recipe.settled import LOCAL_BASE, settle

NEMO = ("backend=nemo", "glue=stock")


def problems(*arguments):
    [plan] = compose_plans([*NEMO, *arguments])
    return preflight.problems_with(plan)


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


def test_a_node_finds_a_sequence_longer_than_the_models_positions(no_checkout):
    [recipe] = compose([*NEMO, "model=tiny-llama", "grpo.max_new_tokens=2000"])
    assert preflight.problems_with(plan_recipe(recipe))[1:] == [
        "grpo.max_new_tokens=2000: makes sequences of 3072 tokens, the model has 2048 positions; "
        "lower it"
    ]


def test_a_local_run_has_neither_nemo_rls_batches_nor_vllms_positions(tmp_path):
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text('{"input": "1+1", "output": "2"}\n' * 5)
    line = ["backend=local", "model=tiny-llama", "data=jsonl", f"data.path={tmp_path}"]
    [plan] = compose_plans([*line, "grpo.max_new_tokens=2000"])
    assert [*preflight.model_problems(plan), *preflight.data_problems(plan)] == []


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
    words = [*NEMO, "model=tiny-llama", f"model.hf_id={hf_id}", *line]
    code = (
        "from fp8_nemo.plan.plan import plan_recipe;"
        "from fp8_nemo.recipe.compose import compose;"
        "from fp8_nemo.launch.preflight import problems_with;"
        f"[recipe] = compose({words});"
        "print(*problems_with(plan_recipe(recipe))[1:], sep='\\n')"  # the first misses the checkout
    )
    settings = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "no_proxy": "*"} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env=os.environ | settings | {"NEMO_RL_ROOT": ""}, timeout=180,
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


def test_a_plan_says_what_its_run_would_of_positions_that_the_hubs_cache_names(tmp_path):
    cached(tmp_path, "tokenizer_config.json", "model.safetensors", max_position_embeddings=2048)
    words = [*NEMO, "model=tiny-llama", "model.hf_id=org/model", "grpo.max_new_tokens=2000"]
    for verb in ("plan", "grpo"):
        done = subprocess.run(
            [sys.executable, "-m", f"fp8_nemo.recipes.{verb}", *words],
            capture_output=True, text=True, timeout=180, cwd=tmp_path,
            env=os.environ | {"HF_HOME": str(tmp_path), "NEMO_RL_ROOT": ""},
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (
            2,
            "",
            "grpo.max_new_tokens=2000: makes sequences of 3072 tokens, the model has 2048 "
            "positions; lower it\n",
        )


HUB_IDS = {
    file.stem: name
    for file in (Path(__file__).parents[2] / "conf" / "model").glob("*.yaml")
    if (name := yaml.safe_load(file.read_text())["hf_id"])
}


@pytest.mark.parametrize("model", HUB_IDS)
def test_a_shipped_hub_models_positions_are_known_without_its_config_json(model, monkeypatch):
    most, config = model_dir.POSITIONS[HUB_IDS[model]], {}
    monkeypatch.setattr(model_dir, "cached_config", lambda name: config)

    def said(*more, answer=most - 1023):
        [recipe] = compose([f"model={model}", f"grpo.max_new_tokens={answer}", *more])
        return [str(each) for each in position_mistakes(settle(recipe, LOCAL_BASE))]

    assert said(answer=most - 1024) == []
    assert said() == [
        f"grpo.max_new_tokens={most - 1023}: makes sequences of {most + 128} tokens, the model has "
        f"{most} positions; lower it"
    ]
    assert said("model.hf_id=org/another") == said("model.path=folder") == []
    assert said(f"+nemo.policy.hf_config_overrides.max_position_embeddings={2 * most}") == []
    config["max_position_embeddings"] = 2 * most
    assert said() == []


def test_stretched_positions_are_not_held_against_a_sequence(tmp_path):
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    cached(tmp_path, "tokenizer_config.json", "model.safetensors", rope_parameters=rope)
    long = ["grpo.max_new_tokens=2000"]
    assert ask_the_hub("org/model", tmp_path, *long, HF_HUB_OFFLINE="1") == ""


@pytest.fixture
def two_h100(monkeypatch, tmp_path):
    """Let the driver's own tool show two H100."""
    driver_tool = tmp_path / "nvidia-smi"
    driver_tool.write_text("#!/bin/sh\nfor n in 0 1; do echo NVIDIA H100, 580.1, 81559, 4; done\n")
    driver_tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.mark.usefixtures("two_h100")
def test_a_layout_chosen_for_another_gpu_than_this_machines_is_one_line(monkeypatch):
    def told(*words):
        [recipe] = compose(words)
        return [str(each) for each in preflight.gpu_mistakes(recipe)]

    large = ("model=llama31-8b", "cluster.gpu=h200")
    line = "cluster.gpu=h200: this machine shows NVIDIA H100; set cluster.gpu=h100"
    assert told(*large) == [line]
    assert not told("model=llama31-8b")
    assert not told("model=small-llama", "backend=nemo", "cluster.gpu=h200")  # its layout is given
    assert not told(*large, "cluster=slurm")  # recipes.check_cluster looks at each node
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert not told(*large)


@pytest.mark.usefixtures("two_h100")
def test_nodes_and_gpus_that_this_machine_has_not_are_one_line_each(monkeypatch):
    cluster = compose(["model=llama31-8b", "cluster.nodes=4", "cluster.gpus_per_node=8"])[0].cluster
    nodes, gpus = map(str, preflight.machine_mistakes(cluster))
    assert nodes.startswith("cluster.nodes=4: cluster.kind=here is one machine; set RAY_ADDRESS")
    assert gpus.startswith("cluster.gpus_per_node=8: this machine shows 2; set cluster.gpus_per")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert list(preflight.machine_mistakes(cluster)) == []


@pytest.mark.skipif(bool(importlib.util.find_spec("megatron")), reason="Megatron is installed here")
def test_a_checkout_without_megatron_is_told_before_the_first_attempt_not_by_the_second(tmp_path):
    [recipe] = compose(["model=qwen3-8b", "cluster=slurm"])
    source = tmp_path / "nemo_rl" / "utils" / "checkpoint.py"
    source.parent.mkdir(parents=True)
    source.write_text("torch.load(common)")  # as v0.7.0 has it
    assert list(preflight.resume_problems(recipe.cluster, tmp_path)) == []
    source.write_text("from megatron.core.dist_checkpointing import load_common_state_dict")
    [line] = preflight.resume_problems(recipe.cluster, tmp_path)
    command = f"git -C {tmp_path} submodule update --init --recursive {preflight.BRIDGE}"
    assert line.startswith(f"NEMO_RL_ROOT={tmp_path}: has no Megatron-LM") and command in line
    [system] = compose(["model=qwen3-8b", "cluster=slurm", "cluster.interpreter=system"])
    assert list(preflight.resume_problems(system.cluster, tmp_path)) == []
    megatron = tmp_path / preflight.BRIDGE / "3rdparty" / "Megatron-LM" / "megatron" / "core"
    megatron.mkdir(parents=True)
    assert list(preflight.resume_problems(recipe.cluster, tmp_path)) == []


@pytest.mark.parametrize(
    ("found", "same"),
    [("0.8.0 7ea279a", True), ("0.8.0", True), ("0.8.0 81aa43d", False), ("0.7.0 7ea279a", False)],
)
def test_a_checkout_whose_commit_cannot_be_asked_is_held_by_its_version(found, same):
    [plan] = compose_plans([*NEMO, "model=qwen3-8b"])
    planned = dataclasses.replace(plan.nemo, host="0.8.0 7ea279a")
    host = Host(found, root="/rl")
    lines = list(preflight.host_problems(dataclasses.replace(plan, nemo=planned), host))
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


def test_a_login_node_needs_nothing_of_what_the_job_needs(monkeypatch):
    monkeypatch.setattr(preflight, "NEEDED_PYTHON", (99, 0))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    [plan] = compose_plans(["model=qwen3-8b", "cluster=slurm", "cluster.interpreter=system"])
    assert list(preflight.software_problems(plan, MAIN)) == []
    monkeypatch.setenv("RAY_ADDRESS", "head:1200")  # in the job
    [line] = preflight.software_problems(plan, MAIN)
    assert "NeMo RL needs 3.12" in line
