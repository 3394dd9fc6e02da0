"""Look into the environments of a run: which packages each has, and which the plan needs.

In NeMo RL's container the driver and each kind of worker have an environment of their own
(`cluster.interpreter=container`); elsewhere one interpreter is all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from fp8_nemo.launch import probe
from fp8_nemo.nemo.worker_settings import OUR_WORKERS, PLUGIN, WorkerSettings, own_folder
from fp8_nemo.nemo_config.checkout import read_host
from fp8_nemo.nemo_config.host import ROOT_VARIABLE, Host, HostError, root_of
from fp8_nemo.nemo_config.own.loss import native_correction
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.runs.frozen_code import is_clone, write_metadata

PROBE_LIMIT = 45  # seconds that an interpreter may take to say what it has
IMAGE_COMMIT = "NEMO_RL_COMMIT"
"""Variable of NeMo RL's image: the commit that it was built of (its Dockerfile)."""
MIXED = "NRL_IGNORE_VERSION_MISMATCH"
"""NeMo RL's own variable for who mixes an image and a clone on purpose."""

Seen = dict[str, Any]
"""Plain data that an interpreter, or a node, returns."""


def settings_of(recipe: Recipe) -> WorkerSettings:
    """Return what a run of this recipe tells its workers."""
    return WorkerSettings.of(recipe, loss_corrects=native_correction(recipe) is not None)


def workers_of(recipe: Recipe) -> dict[str, str]:
    """Return the full names of NeMo RL's workers whose environments a run of this recipe needs."""
    policy, engine, asynchronous = OUR_WORKERS
    return {"policy": policy, "vLLM": asynchronous if recipe.grpo.is_asynchronous else engine}


def interpreters(plan: Plan) -> dict[str, str]:
    """Return the Python of every environment of the run; the job's is the one that runs this."""
    found = {"job": sys.executable}
    root = root_of(plan.recipe)
    if plan.backend == "nemo" and plan.recipe.cluster.interpreter == "container" and root:
        venvs = Path(os.environ.get("NEMO_RL_VENV_DIR") or root / "venvs")
        workers = workers_of(plan.recipe)
        found |= {name: str(venvs / full / "bin" / "python") for name, full in workers.items()}
    return found


def probed(python: str) -> Seen:
    """Return what an interpreter has, with `PYTHONPATH` as a run's workers have it."""
    try:
        with tempfile.TemporaryDirectory() as shown:
            if is_clone():  # a run from a clone shows its workers a frozen copy, with its metadata
                write_metadata(Path(shown))
            answer = subprocess.run(
                [python, "-P", probe.__file__],
                capture_output=True,
                text=True,
                timeout=PROBE_LIMIT,
                env=os.environ | {"PYTHONPATH": workers_path(Path(shown))},
            )
        return json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return {"error": f"{python}: {error}"}


def workers_path(*folders: Path) -> str:
    """Return `PYTHONPATH` for worker environments: folders, this package, what is in it already.

    Where this package is in it already, the order stays: what stands before it hides its neighbours
    from the driver, and has to from the workers.
    """
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    own = str(own_folder() or "")
    paths = [*map(str, folders), *([own] if own not in given else []), *given]
    return os.pathsep.join(dict.fromkeys(filter(None, paths)))


def wrong_packages(plan: Plan, name: str, seen: Seen) -> Iterator[str]:
    """Yield what an environment lacks, or has in another version than the plan needs.

    Args:
        plan: of the run.
        name: of the environment, as `interpreters` has it.
        seen: what `probed` returned for it.
    """
    versions = seen["versions"]
    for package, version in needed_versions(plan, name).items():
        have = versions.get(package)
        if have is None or (version and have.split("+")[0] != version):
            yield f"{package} {version or 'any'} needed, {have or 'none'} found"
    for plugin in sorted(needed_plugins(plan, name) - set(seen["plugins"])):
        yield f"vLLM would not see our plugin {plugin}"


def needed_versions(plan: Plan, environment: str) -> dict[str, str | None]:
    """Return the packages that an environment of the run needs; a version where it matters."""
    ours = {"fp8-nemo": metadata.version("fp8-nemo")}
    if plan.backend == "local":
        return {"torch": None, "transformers": None, **ours}
    root = root_of(plan.recipe)
    try:
        vllm = read_host(root).vllm if root else None
    except HostError:
        vllm = None
    policy: dict[str, str | None] = {"torch": None}
    if plan.recipe.precision.train.is_quantized:
        policy["transformer-engine"] = None  # NeMo RL builds it from source, without -torch
    if environment == "policy":
        return policy
    if environment == "vLLM":
        return {"vllm": vllm, "torch": None}
    alone = plan.recipe.cluster.interpreter == "system"
    return {"ray": None, **ours, **({"vllm": vllm, **policy} if alone else {})}


def needed_plugins(plan: Plan, environment: str) -> set[str]:
    """Return our vLLM plugins that an environment with vLLM must show."""
    with_vllm = environment == "vLLM" or plan.recipe.cluster.interpreter == "system"
    ours = plan.backend == "nemo" and with_vllm and settings_of(plan.recipe).needs_plugin
    return {PLUGIN} if ours else set()


def worker_problems(plan: Plan) -> Iterator[str]:
    """Yield a line for each worker environment of this machine that could not run the plan.

    NeMo RL makes an environment that is missing at its first use, by uv, which takes long.
    """
    for name, python in interpreters(plan).items():
        if name == "job":  # `software_problems` has looked at the interpreter that runs this
            continue
        if not Path(python).exists():
            if shutil.which("uv") is None:
                yield (
                    f"{python}: is not there, and NeMo RL makes it by uv, which is not on PATH; "
                    "run in NeMo RL's container, or set cluster.interpreter=system"
                )
            continue
        seen = probed(python)
        wrong = [seen["error"]] if "error" in seen else list(wrong_packages(plan, name, seen))
        if wrong:
            yield (
                f"{python}: {'; '.join(wrong)}; {ROOT_VARIABLE} and the image must be of one "
                "NeMo RL (docs/install.md)"
            )


def image_problems(host: Host) -> Iterator[str]:
    """Yield a line if this image was built of another commit of NeMo RL than the clone has."""
    built, cloned = os.environ.get(IMAGE_COMMIT, ""), host.name.split()[-1]
    known = built[:1].isalnum() and len(host.name.split()) > 1  # else `<unknown>`, or no git
    if known and not built.startswith(cloned) and not os.environ.get(MIXED):
        yield (
            f"{ROOT_VARIABLE}={host.root}: is {host.name}, this image was built of {built[:7]}; "
            f"check that out, take the image of the clone's commit, or set {MIXED}=1"
        )
