"""A worker's environment that could not run the plan is one line before anything starts."""

import venv
from pathlib import Path

import pytest

from fp8_nemo.launch import environments
from fp8_nemo.launch.environments import image_problems, worker_problems
from fp8_nemo.nemo.worker_settings import OUR_WORKERS
from fp8_nemo.nemo_config.host import Host
from fp8_nemo.plan.plan import plan_recipe
from fp8_nemo.recipe.compose import compose
from tests.conftest import slowed, spent

MAIN = Host("0.8.0 7ea279a", "/opt/nemo-rl", vllm="0.25.1")


@pytest.fixture
def image(tmp_path, monkeypatch):
    """NeMo RL's folder of environments, each a real one in which packages are installed by name."""
    monkeypatch.setenv("NEMO_RL_VENV_DIR", str(tmp_path))
    monkeypatch.setattr(environments, "read_host", lambda root: MAIN)
    monkeypatch.delenv("PYTHONPATH", raising=False)

    def install(worker: str, **packages: str) -> str:
        folder = tmp_path / dict(zip(("policy", "vLLM"), OUR_WORKERS, strict=False))[worker]
        venv.create(folder, symlinks=True)
        [site] = folder.glob("lib/python*/site-packages")
        for name, version in packages.items():
            info = site / f"{name}-{version}.dist-info"
            info.mkdir()
            text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
            (info / "METADATA").write_text(text)
        return str(folder / "bin" / "python")

    return install


def plan(*words):
    return plan_recipe(compose(["backend=nemo", "cluster.nemo_root=/opt/nemo-rl", *words])[0])


def test_a_clone_of_main_in_an_older_image_is_told_on_one_node_too(image):
    image("policy", torch="2.11.0")
    old = image("vLLM", vllm="0.20.0", torch="2.11.0")
    [line] = worker_problems(plan("precision=fp8-linear"))
    assert line.startswith(f"{old}: vllm 0.25.1 needed, 0.20.0 found; NEMO_RL_ROOT and the image")


def test_both_environments_as_they_should_be_are_looked_at_in_two_seconds_of_work(image):
    image("policy", torch="2.11.0", transformer_engine="2.12.0")
    image("vLLM", vllm="0.25.1", torch="2.11.0+cu130")
    whole = plan("precision=fp8-e2e")
    before = spent()
    assert list(worker_problems(whole)) == []
    assert spent() - before < 2 * slowed()


def test_training_in_fp8_needs_transformer_engine_in_the_policys_environment(image):
    policy = image("policy", torch="2.11.0")
    image("vLLM", vllm="0.25.1", torch="2.11.0")
    [line] = worker_problems(plan("precision=fp8-e2e"))
    assert line.startswith(f"{policy}: transformer-engine any needed, none found")


def test_an_environment_that_nobody_can_make_is_told(image, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    lines = list(worker_problems(plan()))
    assert len(lines) == 2 and all("by uv, which is not on PATH" in line for line in lines)
    (tmp_path / "uv").touch(0o755)
    assert list(worker_problems(plan())) == []


@pytest.mark.parametrize(
    ("built", "mixed", "told"),
    [
        ("81aa43d0123456789", "", True),
        ("81aa43d0123456789", "1", False),
        ("7ea279a0123456789", "", False),
        ("<unknown>", "", False),
        ("", "", False),
    ],
)
def test_an_image_of_another_commit_than_the_clones_is_told(built, mixed, told, monkeypatch):
    monkeypatch.setenv("NEMO_RL_COMMIT", built)
    monkeypatch.setenv("NRL_IGNORE_VERSION_MISMATCH", mixed)
    lines = list(image_problems(MAIN))
    assert [line.startswith("NEMO_RL_ROOT=/opt/nemo-rl: is 0.8.0 7ea279a") for line in lines] == (
        [True] if told else []
    )


@pytest.mark.parametrize(
    ("given", "path"),
    [("/other", ["/root", "{own}", "/other"]), ("/over:{own}", ["/root", "/over", "{own}"])],
)
def test_workers_find_packages_in_the_drivers_order(given, path, monkeypatch):
    own = str(environments.own_folder())
    monkeypatch.setenv("PYTHONPATH", given.format(own=own))
    assert environments.workers_path(Path("/root")).split(":") == [p.format(own=own) for p in path]
