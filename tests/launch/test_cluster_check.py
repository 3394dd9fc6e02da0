"""What check_cluster says of a node, and a real Ray on this machine."""

import os
import socket
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from fp8_nemo.launch import cluster_check, environments, room
from fp8_nemo.launch.cluster_check import clock_finding, findings
from fp8_nemo.launch.environments import needed_versions
from fp8_nemo.plan.plan import plan_recipe
from fp8_nemo.recipe.compose import compose
from fp8_nemo.runs.run_dir import freeze, run_path
from fp8_nemo.runs.terminal import console
from tests.conftest import small_plan

ROOT = Path(__file__).parent.parent.parent
FREE = {"memory": 900.0, "shm": 400.0, "disk": 2000.0}
H100 = {"name": "NVIDIA H100 80GB", "driver": "580", "memory": 81559.0}


@pytest.fixture(autouse=True)
def without_a_checkout(monkeypatch):
    monkeypatch.delenv("NEMO_RL_ROOT", raising=False)


def nemo_plan(*words):
    cell = ["backend=nemo", "glue=stock", "precision=fp8-kv-attn"]
    cell += ["cluster.interpreter=system", "cluster.gpus_per_node=2"]
    given = {word.partition("=")[0] for word in words}
    kept = [word for word in cell if word.partition("=")[0] not in given]
    return plan_recipe(compose([*kept, *words])[0])


def seen(**changes):
    versions = {"torch": "2.11.0+cu130", "vllm": "0.25.1", "ray": "2.55.1", "fp8-nemo": "0.1.0"}
    environment = {"python": "3.12.3", "versions": versions, "plugins": []}
    return {
        "gpus": [H100 | {"used": 500.0}] * 2,
        "environments": {"job": environment},
        "shared": True, "model": [], "data": [], "nemo_rl": True,
        "room": FREE, "ports": {"listening": [1408, 7000], "ephemeral": [32768, 60999]},
    } | changes  # fmt: skip


def problems(plan, **changes):
    return [each.problem for each in findings(plan, "node1", seen(**changes)) if each.problem]


def test_a_node_as_it_should_be_has_no_problem():
    assert problems(nemo_plan()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus": [H100 | {"used": 1.0}]}, "cluster.gpus_per_node=2"),
        ({"gpus": [H100 | {"name": "NVIDIA H200", "used": 1.0}] * 2}, "cluster.gpu=h100"),
        ({"gpus": [H100 | {"used": n} for n in (1.0, 9000.0)]}, "GPU 1: another process"),
        ({"shared": False}, "set outputs to a folder that all nodes share"),
        ({"model": ["model.path=/m: is not there"]}, "model.path=/m: is not there"),
        ({"data": ["/d/train.jsonl: no such file"]}, "/d/train.jsonl: no such file"),
        ({"nemo_rl": False}, "no nemo_rl in it"),
        ({"room": FREE | {"shm": 0.06}}, "/dev/shm needs 2 GiB for Ray, 0.1 are free"),
        ({"environments": {"job": {"error": "python3: no such file"}}}, "no such file"),
    ],
)
def test_what_is_wrong_on_a_node_is_one_problem_with_its_remedy(changes, said):
    [problem] = problems(nemo_plan(), **changes)
    assert said in problem


@pytest.mark.parametrize(
    ("ports", "said"),
    [
        ({"listening": range(3000, 4100), "ephemeral": []}, "1100 of 3000-4999 are in use; `ss"),
        ({"listening": [], "ephemeral": [9000, 65535]}, ""),
        ({"listening": [], "ephemeral": [1024, 65535]}, "connections get ports from 1024 on, and"),
    ],
)
def test_ports_that_nemo_rl_may_not_find_free_are_told(ports, said):
    found = "; ".join(problems(nemo_plan(), ports=ports))
    assert found.startswith(said) if said else found == ""


def test_a_nodes_own_ports_are_those_that_listen():
    with socket.socket() as listening, socket.socket() as bound:
        for each in (listening, bound):
            each.bind(("127.0.0.1", 0))
        listening.listen()
        found = room.ports()["listening"]
        assert listening.getsockname()[1] in found and bound.getsockname()[1] not in found


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (100.0, ""), (104.9, ""), (95.1, ""), (109.0, ""),
        (130.0, "20 s ahead of the first node's"), (50.0, "50 s behind the first node's"),
    ],
)  # fmt: skip
def test_a_clock_is_wrong_by_no_less_than_what_asking_cannot_explain(told, said):
    remedy = ": set it, as NTP would" if said else ""
    found = clock_finding("node2", before=100.0, told=told, after=110.0)
    assert found.problem == said + remedy


def test_a_node_without_room_for_an_8b_run_is_told_what_it_needs(tmp_path):
    plan = nemo_plan("model=llama31-8b", "cluster.gpus_per_node=8", f"outputs={tmp_path}")
    small = {"gpus": [H100 | {"used": 1.0}] * 8, "room": FREE | {"memory": 100.0, "disk": 200.0}}
    [problem] = problems(plan, **small)
    memory, disk = problem.split("; outputs=")
    assert memory.startswith("a node's memory: the plan takes ") and "100 are free" in memory
    assert disk.startswith(f"{tmp_path}: checkpoints will take 314 GiB, 200 are free")
    for step in (10, 20):
        (run_path(plan) / "checkpoints" / f"step_{step}").mkdir(parents=True)
    [problem] = problems(plan, **small)
    assert "checkpoints" not in problem


def test_versions_are_held_against_what_the_plan_needs():
    environment = seen()["environments"]["job"]
    old = {"job": environment | {"versions": environment["versions"] | {"fp8-nemo": "0.0.1"}}}
    [problem] = problems(nemo_plan(), environments=old)
    assert problem == "fp8-nemo 0.1.0 needed, 0.0.1 found"
    end_to_end = nemo_plan("precision=fp8-e2e")
    [problem] = problems(end_to_end)
    assert problem == "transformer-engine any needed, none found"
    assert needed_versions(end_to_end, "vLLM") == {"vllm": None, "torch": None}
    assert list(needed_versions(end_to_end, "policy")) == ["torch", "transformer-engine"]


def test_a_workers_environment_that_is_not_made_yet_is_no_problem():
    environments = seen()["environments"] | {"vLLM": {"error": "no such file"}}
    assert problems(nemo_plan(), environments=environments) == []


def test_a_workers_interpreter_sees_this_package_without_a_path_of_the_shells(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    venv.create(tmp_path / "bare")
    found = environments.probed(str(tmp_path / "bare" / "bin" / "python"))
    assert found["versions"]["fp8-nemo"] == "0.1.0" and found["plugins"] == ["fp8_nemo"]


def test_each_worker_of_nemo_rls_container_has_its_interpreter(monkeypatch):
    monkeypatch.setenv("NEMO_RL_VENV_DIR", "/opt/ray_venvs")
    cell = ["backend=nemo", "glue=stock", "cluster.nemo_root=/opt/nemo-rl"]
    found = environments.interpreters(plan_recipe(compose(cell)[0]))
    assert found["job"] == sys.executable
    assert found["vLLM"].startswith("/opt/ray_venvs/nemo_rl.models.generation.vllm.vllm_worker.")
    assert found["policy"].endswith("MegatronPolicyWorker/bin/python")
    monkeypatch.delenv("NEMO_RL_VENV_DIR")
    assert environments.interpreters(plan_recipe(compose(cell)[0])) == {"job": sys.executable}


def test_a_real_ray_on_this_machine_is_checked_and_a_wrong_plan_is_refused(tmp_path):
    [frozen] = freeze([small_plan(tmp_path / "o")])
    call = [sys.executable, "-m", "recipes.check_cluster"]
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 32}
    done = subprocess.run(
        [*call, str(frozen.path)], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for check in ("a task", "GPUs", "packages, job", "outputs", "model", "free", "all-reduce"):
        assert f"\n{check} " in done.stdout
    assert socket.gethostname() in done.stdout and not [*frozen.path.glob(".canary*")]

    none = subprocess.run([*call, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert none.returncode == 2 and "no run directory" in none.stderr


def test_a_run_directory_that_takes_no_file_is_told_in_one_line(tmp_path):
    [frozen] = freeze([small_plan(tmp_path / "o")])
    taken = f"mkdir {frozen.path}/.canary-$$; exec {sys.executable} -m recipes.check_cluster"
    done = subprocess.run(
        ["sh", "-c", f"{taken} {frozen.path}"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert f"Is a directory: '{frozen.path}/.canary-" in done.stderr


def test_where_only_the_watching_is_ours_its_plugin_is_asked_for_too():
    words = ["precision=fp8-kv-attn", "glue.recalibrate.source=logprob"]
    assert environments.needed_plugins(nemo_plan(*words), "job") == {"fp8_nemo"}
    assert environments.needed_plugins(nemo_plan(*words[:1]), "job") == set()


def test_a_problem_is_shown_as_it_is_brackets_included(capsys):
    said = "[/pytorch/gloo/pair.cc:547] Connection closed [rank0]: gone"
    found = [cluster_check.Finding("node1", "all-reduce", "2 nodes", said)]
    console().print(cluster_check.findings_table(found))
    shown = capsys.readouterr().out
    assert "[/pytorch/gloo/pair.cc:547]" in shown and "[rank0]:" in shown


def test_ranks_that_do_not_meet_are_a_finding_with_what_to_look_at(answers_with_ray):
    code = """
from fp8_nemo.launch import cluster_check as check
from fp8_nemo.launch.ray_cluster import connect, node_names
connect(45)
check.REDUCE_LIMIT = 0
answers += [check._all_reduce(node_names())]
check.IMPORT_LIMIT = 0
answers += [check._all_reduce(node_names())]
"""
    [(*_, hangs), (*_, slow)], _ = answers_with_ray(code)
    assert hangs.startswith("no sum within 0 s; see NCCL_SOCKET_IFNAME")
    assert slow.startswith("import torch takes more than 0 s; put it on the nodes' own disks")
