"""The package installs: editable from a clone, and frozen into a folder with conf and recipes."""

import os
import re
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from fp8_nemo.nemo_config.seams import VLLM

ROOT = Path(__file__).parent.parent


def test_everything_that_is_pinned_installs_on_the_oldest_python_that_the_package_takes():
    """Debian 12's Python is 3.11.2: a pin that wants 3.11.5 stops `make demo` there."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.partition("==")[0] for line in lines if "==" in line]
    wanted = {name: metadata(name).get("Requires-Python") for name in pins}
    assert not {n: w for n, w in wanted.items() if w and not SpecifierSet(w).contains("3.11.0")}


def run(code: str, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-I" if not environment else "-P", "-c", code],
        capture_output=True, text=True, check=True, cwd="/", env=os.environ | environment,
    ).stdout  # fmt: skip


def test_the_editable_install_shows_conf_and_recipes_inside_the_package():
    out = run("import fp8_nemo.conf, fp8_nemo.recipes.plan; print(fp8_nemo.conf.__path__[0])")
    assert Path(out.strip()) == ROOT / "conf"


def test_a_clone_that_hides_the_installed_package_composes_and_plans(tmp_path):
    """After `pip install .` a line typed in the clone meets the clone's own fp8_nemo first."""
    clone = tmp_path / "clone"
    subprocess.run(
        ["git", "-C", str(ROOT), "checkout-index", "-a", f"--prefix={clone}/"], check=True
    )
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in repr(f)];"
        "import fp8_nemo.slurm; from fp8_nemo.recipes import plan;"
        "print(fp8_nemo.__file__); sys.exit(plan.main(['model=tiny-llama']))"
    )
    place, said, *_ = run(code, PYTHONPATH=str(clone)).splitlines()
    assert place == str(clone / "fp8_nemo" / "__init__.py")
    assert said.startswith("tiny-llama/fp8-kv-attn-tis")


def test_the_package_installs_into_a_folder_and_composes_and_plans_from_there(tmp_path):
    target = tmp_path / "code"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
    ]
    source = tmp_path / "source"  # setuptools builds in place: a copy keeps the clone clean
    subprocess.run(
        ["git", "-C", str(ROOT), "checkout-index", "-a", f"--prefix={source}/"], check=True
    )
    subprocess.run([*command, "--target", str(target), str(source)], check=True)
    code = (
        "import fp8_nemo; from fp8_nemo.recipe.compose import compose;"
        "from fp8_nemo.recipes import run, grpo, plan;"
        "from fp8_nemo.local.preflight import problems_with;"
        "from fp8_nemo.plan.plan import plan_recipe;"
        "p = [plan_recipe(each) for each in compose(['-m', 'sweep=demo'])];"
        "assert not any(map(problems_with, p)); print(fp8_nemo.__file__, len(p))"
    )
    assert run(code, PYTHONPATH=str(target)).split() == [
        str(target / "fp8_nemo" / "__init__.py"),
        "4",
    ]


def test_nemo_rls_environment_is_pinned_whole_and_as_its_page_says():
    lines = (ROOT / "constraints-nemo.txt").read_text().splitlines()[1:]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    pins = {canonicalize_name(n): v for n, _, v in (line.partition("==") for line in lines)}
    assert len(pins) == len(lines)
    page = " ".join((ROOT / "docs/install.md").read_text().split())
    spoken = ("torch", "vLLM", "Ray", "transformers", "TransformerEngine")
    names = {"TransformerEngine": "transformer-engine"}
    assert all(f"{each} {pins[names.get(each, each.lower())]}" in page for each in spoken)
    assert f"transformer-engine-torch=={pins['transformer-engine']}" in page
    assert f"vllm {pins['vllm']}" == VLLM
