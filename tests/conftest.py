"""Shared fixtures: plans of the tiny models, small enough to run in a test."""

import json
import os
import resource
import signal
import threading
import time
from pathlib import Path

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # two threads a worker on two cores wait for each other

# `make test &` in a script ignores Ctrl-C, and so would every process that a test starts.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest

from fp8_nemo.plan.plan import Plan, plan_recipe
from fp8_nemo.recipe.compose import compose

SMALL = [
    "grpo.steps=2",
    "grpo.prompts_per_step=4",
    "grpo.generations_per_prompt=4",
    "grpo.max_new_tokens=5",
    "grpo.validate_every=2",
    "grpo.validate_first=false",
    "data.difficulty=1",
]


GLUE = Path(__file__).parent / "glue"
OF_ALL_PACKAGES = ("test_kernels_compile.py", "test_readme.py")
"""The glue's tests that start processes of their own, which have every package."""
IDLE = 0.3
"""Seconds that `slowed` took on the machine for which limits of seconds were written, idle."""


def slowed() -> float:
    """Return how many times as long as on that machine Python's own work takes here and now."""
    start = time.process_time()
    tree = [{"number": number, "text": str(number) * 3} for number in range(400)]
    for _ in range(750):
        tree = json.loads(json.dumps(tree))
        sorted(map(str, tree))
    return max(1.0, (time.process_time() - start) / IDLE)


def spent() -> float:
    """Return the seconds that this process and its ended children have worked so far."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in found)


def small_plan(outputs: Path, *arguments: str) -> Plan:
    """A plan of two steps of 16 sequences; later arguments win."""
    [recipe] = compose([*SMALL, f"outputs={outputs}", *arguments])
    return plan_recipe(recipe)


def pytest_addoption(parser):
    parser.addoption("--slurm", action="store_true", help="start a Slurm here and test against it")
    parser.addoption("--container", help="a root folder that slurm/container/build.sh has built")
    parser.addoption("--long", action="store_true", help="run the tests that take minutes too")


def pytest_collection_modifyitems(config, items):
    """Skip what starts daemons or takes minutes, unless it is asked for."""
    for item in items:
        in_slurm = Path(__file__).parent / "slurm" in item.path.parents
        if in_slurm and not config.getoption("--slurm"):
            item.add_marker(pytest.mark.skip(reason="make test-slurm"))
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="make test-long"))


def pytest_ignore_collect(collection_path, config):
    """Leave the glue's tests to `test_glue_alone`, which runs them all, unless they are named."""
    named = any("glue" in word for word in config.args)
    by_it = collection_path.parent == GLUE and collection_path.name not in OF_ALL_PACKAGES
    return True if by_it and not named else None


@pytest.fixture
def make_plan(tmp_path):
    return lambda *arguments: small_plan(tmp_path / "outputs", *arguments)
