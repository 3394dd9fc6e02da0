"""A NeMo RL whose seams moved is refused by the plan; one that nobody ran is called untested.

The checkout is a skeleton of what is called; with NEMO_RL_ROOT a real one is asked too.
"""

import ast
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from fp8_nemo.nemo_config.checkout import read_host
from fp8_nemo.nemo_config.host import Host, HostError
from fp8_nemo.nemo_config.seams import GRPO
from fp8_nemo.nemo_config.versions import (
    CONFIG,
    ENTRY,
    NEEDED,
    POLICY,
    SETUP_GIVES,
    TRAIN_TAKES,
    Source,
)
from fp8_nemo.plan.plan import PlanError, plan_recipe
from fp8_nemo.recipe.compose import compose

ROOT = os.environ.get("NEMO_RL_ROOT")
SOURCES = Path(__file__).parents[2] / "fp8_nemo"
CONFIGS = Path(__file__).parent / "data" / "nemo_rl-main-7ea279a.json"
BASES = json.loads(CONFIGS.read_text())["configs"]
NAMES = [(each.file, name) for each in NEEDED for name in each.names]
MOVED = [
    "_load_weights", "update_weights_via_ipc_zmq", "_iter_params_with_optional_kv_scales",
    "finish_generation", "prepare_for_generation", "create_local_venv_on_each_node",
    "use_importance_sampling_correction",
]  # fmt: skip
"""The seven that a review renamed, and that were accepted."""


def skeleton(root):
    """As little of a checkout as can be driven."""
    things = ", ".join(f"t{n}" for n in range(SETUP_GIVES))
    files = {
        ENTRY: f"{things} = setup(config)\n",
        GRPO: "def setup(config, policy_factory): ...\n"
        f"def grpo_train({', '.join(TRAIN_TAKES)}): ...\n",
        CONFIG: "",
        "nemo_rl/package_info.py": "MAJOR = 0\nMINOR = 8\nPATCH = 0\n",
        "pyproject.toml": "vllm==0.28.0",
    }
    for file, of, names in NEEDED:
        lines = [f"def {name}(self): ..." for name in names]
        if names == ("use_importance_sampling_correction",):
            lines = [f"def __init__(self, cfg): self.{names[0]} = cfg"]
        body = [f"class {of}:", *(f"    {line}" for line in lines)] if of else lines
        files[file] = files.get(file, "") + "\n".join(body) + "\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def copied(root):
    """What is looked at of a real checkout."""
    for name in {ENTRY, GRPO, CONFIG, POLICY, "nemo_rl/package_info.py", *(f for f, _ in NAMES)}:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(ROOT) / name, root / name)
    return root


@pytest.fixture(params=[skeleton, copied], ids=["skeleton", "checkout"])
def checkout(request, tmp_path):
    if request.param is copied and not ROOT:
        pytest.skip("NEMO_RL_ROOT: no checkout of NeMo RL")
    return request.param(tmp_path)


def test_the_seven_that_a_review_renamed_are_looked_at():
    assert {*MOVED} <= {name for _, name in NAMES}


def of_nemo_rl():
    """What our code imports of NeMo RL by name, and calls of the classes that it overrides."""
    for file in sorted((SOURCES / "nemo").rglob("*.py")) + sorted(
        (SOURCES / "launch").glob("*.py")
    ):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nemo_rl."):
                yield from (each.name for each in node.names)
            inner = node.value if isinstance(node, ast.Attribute) else None
            if isinstance(inner, ast.Call) and getattr(inner.func, "id", "") == "super":
                yield node.attr


def test_all_that_our_code_names_of_nemo_rl_is_looked_at():
    known = {name for _, name in NAMES} | {each.of for each in NEEDED}
    # whose names stand above
    modules = {"grpo", "dataloader", "fp8", "vllm_generation", "vllm_backend", "data"}
    drive = {"setup", "grpo_train"}
    found = {*of_nemo_rl()} - modules - drive - {"__init__", "__call__"}
    assert found and found <= known, found - known


@pytest.mark.parametrize(("file", "name"), NAMES, ids=lambda each: each.rpartition("/")[2])
def test_a_name_that_moved_is_refused_by_the_plan_in_one_line(checkout, file, name):
    assert list(Source(checkout).missing_seams()) == []
    source = checkout / file
    source.write_text(re.sub(rf"\b{name}\b", f"{name}_moved", source.read_text()))
    with pytest.raises(HostError, match=rf"{file}: \w+ has no {name}; main 7ea279a and") as error:
        read_host(checkout)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "tested"),
    [("0.6.0 7ea279a", True), ("0.7.0 81aa43d", True), ("0.7.0", True), ("0.8.0 1234567", False),
     ("0.6.0 abcdef0", False), ("0.8.0", False)],
)  # fmt: skip
def test_a_version_that_nobody_ran_is_called_untested(name, tested):
    [recipe] = compose(["model=llama31-8b", "precision=fp8-linear"])
    found = [n for n in plan_recipe(recipe, Host(name, root="/rl", bases=BASES)).notes if name in n]
    assert not found if tested else found == [
        f"NeMo RL {name}: untested: what our code calls is there; "
        "tested are main 7ea279a and v0.7.0"
    ]  # fmt: skip


def test_what_stands_in_for_a_checkout_is_not_called_untested():
    [recipe] = compose(["model=llama31-8b", "precision=fp8-linear"])
    assert not [note for note in plan_recipe(recipe).notes if "untested" in note]


def test_a_skeleton_of_0_8_0_is_read_as_untested(tmp_path):
    host = read_host(skeleton(tmp_path))
    assert host.name.startswith("0.8.0") and "untested" in host.notes[0]


def test_reloading_around_our_receiver_is_switched_off_and_refused():
    key = "policy.generation.vllm_cfg.refit_with_reload_api"
    [recipe] = compose(["model=llama31-8b", "precision=fp8-linear"])
    base = recipe.model.base_config
    for there, written in ({}, False), ({key: False}, False), ({key: True}, True):
        host = Host("later", bases={base: BASES[base] | there})
        assert (plan_recipe(recipe, host).nemo.overrides.get(key) is False) is written
    [recipe] = compose(["model=llama31-8b", "precision=fp8-linear", f"+nemo.{key}=true"])
    with pytest.raises(PlanError, match=r"refit_with_reload_api=true: .*goes around our receiver"):
        plan_recipe(recipe, Host("later", bases={base: BASES[base] | {key: False}}))
