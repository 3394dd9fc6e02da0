"""Check without torch, before a directory is made, what the local backend needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.model_dir import damage, model_mistakes
from fp8_nemo.recipe.own.reward import reward_problems
from fp8_nemo.recipe.problems import DataError, load_problems
from fp8_nemo.runs.run_dir import checkpoints, run_path

NEEDED_PACKAGES = ("torch", "transformers", "safetensors", "jinja2")
"""What the extra `local` brings."""


def problems_with(plan: Plan) -> list[str]:
    """Return one line for each thing that would stop this plan after it has started."""
    here = plan.recipe.cluster.kind == "here" or "RAY_ADDRESS" in os.environ  # no login node
    lines = _not_installed(NEEDED_PACKAGES) if here else []
    lines += map(str, model_mistakes(plan.recipe, pads=True))
    lines += _checkpoint_mistakes(run_path(plan))
    try:
        problems = load_problems(plan.recipe.data, plan.recipe.seed)
    except DataError as error:
        return [*lines, str(error)]
    lines += reward_problems(plan.recipe.data, problems.train[0])
    return lines


def require(packages: Collection[str] = NEEDED_PACKAGES) -> None:
    """End the process with one line and exit code 2 if a verb's packages are not installed."""
    if lines := _not_installed(packages):
        print(*lines, file=sys.stderr)
        raise SystemExit(2)


def _not_installed(packages: Iterable[str]) -> list[str]:
    """Return one line if this Python lacks one of the packages; none is imported."""
    missing = [name for name in packages if find_spec(name) is None]
    if not missing:
        return []
    remedy = "pip install 'fp8-nemo[local]', in a clone '.[local]'"
    return [f"{', '.join(missing)}: not installed for {sys.executable}; {remedy}"]


def _checkpoint_mistakes(path: Path) -> Iterator[str]:
    """Yield what is wrong with the checkpoint that a run would go on from."""
    for saved in checkpoints(path)[-1:]:
        for file in saved.glob("*.safetensors"):
            if found := damage(file):
                yield (
                    f"{saved}: {file.name} {found}; delete this folder and the run goes on from "
                    "the checkpoint before it"
                )
