"""NeMo RL's container layout on a real Slurm, without a GPU: `make test-container`.

The root folder is slurm/container/build.sh's. A job goes through it until it asks for a GPU.
"""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from fp8_nemo.nemo.worker_settings import OUR_WORKERS
from fp8_nemo.runs.frozen_code import freeze_code
from tests.slurm.conftest import ROOT, Job

ENTER = ROOT / "slurm" / "container" / "enter.sh"
CLONE = "/opt/nemo-rl"
PYTHONS = {"driver": "python3"} | {
    name: f"/opt/ray_venvs/{full}/bin/python"
    for name, full in zip(("policy", "vLLM"), OUR_WORKERS, strict=False)
}
CELL = ["backend=nemo", "model=tiny-llama", "precision=fp8-linear", "data=arithmetic"]


@pytest.fixture(scope="module")
def image(pytestconfig) -> Path:
    folder = pytestconfig.getoption("--container")
    if folder is None:
        pytest.skip("make test-container")
    if "NEMO_RL_ROOT" not in os.environ:
        pytest.skip("NEMO_RL_ROOT names the clone that the root was built of")
    return Path(folder).absolute()


@pytest.fixture
def inside(image, tmp_path):
    """Run a program under one of the root's Pythons, with a job's copy of this package."""
    code = freeze_code(tmp_path)

    def run(python: str, program: str) -> list[str]:
        paths = os.pathsep.join((CLONE, str(code)))
        words = [ENTER, image, f"{tmp_path}:{tmp_path}", tmp_path, "env", f"PYTHONPATH={paths}"]
        done = subprocess.run(
            [*words, PYTHONS[python], "-P", "-W", "ignore", "-c", program],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_the_driver_imports_all_that_a_session_calls(inside):
    program = """
import fp8_nemo.launch.driver, fp8_nemo.nemo.policy
from nemo_rl.algorithms.grpo import MasterConfig, grpo_train, setup
from nemo_rl.models.generation.vllm import VllmGeneration
import importlib.util, sys
print(fp8_nemo.__file__, sys.prefix, importlib.util.find_spec("vllm"))
"""
    file, prefix, vllm = inside("driver", program)[-1].split()
    assert "/.code/" in file and prefix == "/opt/nemo_rl_venv" and vllm == "None"


def test_the_policy_workers_environment_imports_our_worker_and_transformer_engine(inside):
    program = """
import fp8_nemo.nemo.policy_worker as ours, megatron.bridge, transformer_engine.pytorch
import importlib.util
print(ours.__file__, megatron.bridge.__file__, importlib.util.find_spec("vllm"))
"""
    worker, bridge, vllm = inside("policy", program)[-1].split()
    assert "/.code/" in worker and bridge.startswith(CLONE) and vllm == "None"


def test_vllm_loads_our_receiver_by_its_entry_point_in_its_own_environment(inside):
    program = """
from vllm.plugins import load_general_plugins
load_general_plugins()
import fp8_nemo.nemo.receiver as ours, nemo_rl.models.generation.vllm.vllm_backend as stock
import importlib.util
print(ours.__file__, importlib.util.find_spec("megatron.bridge"))
"""
    receiver, bridge = inside("vLLM", program)[-1].split()
    assert "/.code/" in receiver and bridge == "None"


def test_a_run_on_one_node_from_a_clone_gets_as_far_as_asking_for_a_gpu(image, tmp_path):
    clone = tmp_path / "clone"
    subprocess.run(["git", "-C", ROOT, "checkout-index", "-a", f"--prefix={clone}/"], check=True)
    words = [
        "python",
        "-m",
        "recipes.grpo",
        *CELL,
        "cluster.gpus_per_node=1",
        f"outputs={tmp_path}/o",
    ]
    command = f"pip install -q --no-deps --no-build-isolation -e . && exec {shlex.join(words)}"
    variables = [f"NEMO_RL_ROOT={CLONE}", "NRL_VIRTUAL_CLUSTER_MAX_RETRIES=1"]
    done = subprocess.run(
        [ENTER, image, f"{tmp_path}:{tmp_path}", clone, "env", *variables, "bash", "-c", command],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and "ResourceInsufficientError: " in done.stderr, done.stderr


@pytest.fixture
def line(image, tmp_path) -> list[str]:
    enter = ",".join(f"'{word}'" for word in (ENTER, "{image}", "{mounts}", "{folder}"))
    return [
        *CELL,
        *("cluster=slurm", "cluster.nodes=2", "cluster.gpus_per_node=1", f"outputs={tmp_path}/o"),
        *(f"cluster.container={image}", f"cluster.enter=[{enter}]"),
    ]


def failed(job: Job) -> str:
    job.wait(600)
    assert job.state["JobState"] == "FAILED", job.log
    return job.log


def test_nodes_in_the_container_meet_and_lack_nothing_but_gpus(slurm, line):
    [job] = slurm.submit(*line)
    log = failed(job)
    assert "Ray: 2 of 2 nodes: node1, node2" in log
    problems = [row for row in log.splitlines() if row.startswith(("node1: ", "node2: ", "all: "))]
    assert sorted(row for row in problems if "failed with code" not in row) == [
        f"{node}: GPUs: cluster.gpus_per_node=1" for node in ("node1", "node2")
    ]


def test_a_job_in_the_container_gets_as_far_as_asking_for_a_gpu(slurm, line):
    once = "cluster.env=['NRL_VIRTUAL_CLUSTER_MAX_RETRIES=1']"
    [job] = slurm.submit(*line, "cluster.preflight=false", once)
    log = failed(job)
    assert "ResourceInsufficientError: " in log, log
    assert "\x1b[36m(" not in log and log.count("%|") <= 4, log
