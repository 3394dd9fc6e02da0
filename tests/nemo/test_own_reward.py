"""A user's own reward inside NeMo RL, on a CPU: registered, made by Ray, asked, and shut down.

Set NEMO_RL_ROOT to a checkout and run in an environment that holds its packages (docs/install.md).
"""

import ast
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from fp8_nemo.nemo_config.overrides import path_overrides
from fp8_nemo.nemo_config.own.environments import REGISTERED, REWARD, REWARD_CLASS
from fp8_nemo.plan.cells import compose_plans

ROOT = os.environ.get("NEMO_RL_ROOT")
pytestmark = pytest.mark.skipif(not ROOT, reason="NEMO_RL_ROOT: no checkout of NeMo RL")
imports = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None or sys.version_info < (3, 12),
    reason="NeMo RL's packages are not installed here (docs/install.md)",
)
MINE = """
def reward(answer, output):
    if answer == "fails":
        raise KeyError(answer)
    return 0.25 * (output in answer)
"""
SEVERAL_TURNS = """
import ray, torch
from nemo_rl.environments.interfaces import EnvironmentReturn

@ray.remote
class Guessing:
    def __init__(self, cfg):
        self.turns = cfg["turns"]

    def step(self, logs, metadata):
        turns = torch.tensor([sum(m["role"] == "assistant" for m in log) for log in logs])
        said = [{"role": "environment", "content": "again"}] * len(logs)
        done = turns == self.turns
        return EnvironmentReturn(said, metadata, [None] * len(logs), done.float(), done, None)
"""


def test_nemo_rls_own_environments_are_those_of_the_table():
    source = (Path(ROOT or "") / "nemo_rl/environments/utils.py").read_text()
    [registry] = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ENV_REGISTRY"
    ]
    assert isinstance(registry, ast.Dict)
    assert {ast.literal_eval(key) for key in registry.keys if key} == REGISTERED.keys()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Ray on this machine, and a folder on its workers' path."""
    import ray

    folder = tmp_path_factory.mktemp("mine")
    path = os.pathsep.join([str(folder), ROOT or "", *sys.path])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.syspath_prepend(ROOT)
        patch.syspath_prepend(str(folder))
        how = {"runtime_env": {"env_vars": {"PYTHONPATH": path}}}
        ray.init(num_cpus=2, include_dashboard=False, **how)
        yield folder
        ray.shutdown()


def registered(env):
    from nemo_rl.environments.utils import create_env

    from fp8_nemo.launch.session import _register_environments

    _register_environments(env)
    _register_environments(env)  # a second run of the process finds it there
    [(name, keys)] = env.items()
    return create_env(name, keys)


def logs(*answers):
    return [
        [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": each}]
        for each in answers
    ]


@imports
def test_the_plans_keys_make_an_environment_that_asks_the_users_function(cluster, tmp_path):
    import ray
    import torch
    from nemo_rl.experience.rollouts import calculate_rewards

    file = tmp_path / "mine.py"
    file.write_text(MINE)
    [plan] = compose_plans(["backend=nemo", "precision=bf16", f"data.reward={file}"])
    written = plan.nemo.overrides | path_overrides(plan.recipe, tmp_path, None)
    assert written["data.default.env_name"] == REWARD
    at = f"env.{REWARD}."
    keys = {key.removeprefix(at): value for key, value in written.items() if key.startswith(at)}
    assert keys == {"env_cls": REWARD_CLASS, "num_workers": 8, "file": str(file)}
    environment = registered({REWARD: keys | {"num_workers": 2}})
    answers = [f"it is {n}" for n in (2, 3, 22, 4, 2)]
    batch = {
        "message_log": logs(*answers),
        "task_name": ["mine"] * 5,
        "extra_env_info": [{"ground_truth": "2"}] * 5,
    }
    found = calculate_rewards(batch, {"mine": environment})
    assert found.rewards.tolist() == [0.25, 0.0, 0.25, 0.0, 0.25]
    assert found.terminateds.all() and len(found.observations) == 5
    extracted = environment.step.remote(logs("2"), [{"ground_truth": "2"}], True)
    assert ray.get(extracted).answers == ["2"]
    counted = {
        "rewards": found.rewards,
        "is_end": torch.ones(5),
        "text": torch.arange(5)[:, None],
        "generation_lengths": torch.full((5,), 7),
        "prompt_lengths": torch.full((5,), 3),
    }
    _, metrics = ray.get(environment.global_post_process_and_metrics.remote(counted))
    assert metrics["accuracy"] == pytest.approx(0.15)
    with pytest.raises(ray.exceptions.RayTaskError, match=r"mine\.py: reward\('fails', '2'\) rai"):
        ray.get(environment.step.remote(logs("fails"), [{"ground_truth": "2"}]))
    ray.get(environment.shutdown.remote())


@imports
def test_an_environment_of_several_turns_is_found_by_its_class(cluster):
    import ray

    (cluster / "guessing_game.py").write_text(SEVERAL_TURNS)
    environment = registered({"guessing": {"env_cls": "guessing_game.Guessing", "turns": 2}})
    first, second = logs("a"), [logs("a")[0] + logs("b")[0]]
    for log, done in ((first, False), (second, True)):
        assert ray.get(environment.step.remote(log, [{}])).terminateds.tolist() == [done]
