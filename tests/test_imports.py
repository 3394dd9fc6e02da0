"""The import law of design section 4: modules import upwards only, and core is free of torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fp8_nemo"
VERBS = sorted((PACKAGE.parent / "recipes").glob("*.py"))
ORDER = (
    *("schema", "data", "weights", "estimate", "model_dir", "host", "keys", "overrides"),
    *("measurement", "plan"),
    *(
        "describe",
        "compose",
        "environment",
        "run_dir",
        "origin",
        "frozen_code",
        "submit",
        "kernels",
        "quantize",
        "recalibrate",
        "ledger",
        "refit",
        "fp8_checkpoint",
        "mismatch",
    ),
    *(
        "correction",
        "measure",
        "bounds",
        "health",
        "report",
        "twin",
        "figures",
        "page",
    ),
)
WITHOUT_TORCH = (
    *ORDER[:17],
    "health",
    "report",
    "twin",
    "page",
    "nemo.checkout",
    "nemo.preflight",
    "nemo.cluster_check",
)
HOST = {"nemo_rl", "vllm", "ray", "megatron"}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def ours(path: Path) -> set[str]:
    parts = {name.split(".")[1] for name in imported(path) if name.startswith("fp8_nemo.")}
    return parts & {*ORDER, "local", "nemo", "recipes"}


def test_every_core_module_has_a_place_in_the_order():
    assert {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"} <= set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_module_imports_only_modules_above_it(name):
    path = PACKAGE / f"{name}.py"
    if not path.exists():
        pytest.skip(f"{name}.py is not here yet")
    assert ours(path) <= set(ORDER[: ORDER.index(name)])


def test_backends_are_imported_by_recipes_alone():
    for path in PACKAGE.glob("*.py"):
        assert not ours(path) & {"local", "nemo", "recipes"}, path


def test_only_the_nemo_folder_imports_the_host():
    for path in [*PACKAGE.glob("*.py"), *(PACKAGE / "local").glob("*.py")]:
        assert not {name.split(".")[0] for name in imported(path)} & HOST, path


@pytest.mark.parametrize("verb", VERBS, ids=lambda path: path.stem)
def test_a_verb_has_60_lines_at_most(verb):
    assert len(verb.read_text().splitlines()) <= 60


def test_core_modules_and_recipes_plan_import_no_torch():
    modules = [f"fp8_nemo.{name}" for name in WITHOUT_TORCH] + [
        "fp8_nemo.recipes.plan",
        "fp8_nemo.recipes.grpo",
    ]
    code = f"import sys, {', '.join(modules)}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("False\n", "")
