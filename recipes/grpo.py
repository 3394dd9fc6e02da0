"""Compose, freeze and run GRPO: one cell, or with -m every cell of a sweep.

python -m recipes.grpo precision=fp8-linear correction=tis grpo.steps=50
python -m recipes.grpo -m sweep=demo

All cells are checked before the first one starts. The same line again resumes what stopped, with
more `grpo.steps` it goes on, and what is finished stays as it is.
"""

from __future__ import annotations

import subprocess
import sys

from fp8_nemo.compose import ComposeError, compose
from fp8_nemo.local import preflight
from fp8_nemo.plan import PlanError, plan_recipe
from fp8_nemo.run_dir import Frozen, RunDirError, freeze, python_module


def main(arguments: list[str] | None = None) -> int:
    """Run every cell; 2 if the line is wrong, else the first exit code that is not 0."""
    try:
        plans = [
            plan_recipe(each) for each in compose(sys.argv[1:] if arguments is None else arguments)
        ]
        lines = [f"{plan.cell}: needs {need}" for plan in plans for need in plan.needs]
        lines += [
            line
            for plan in plans
            if plan.backend == "local"
            for line in preflight.problems_with(plan)
        ]
        if lines:
            raise ComposeError(lines)
        frozen = freeze(plans)
    except (ComposeError, PlanError, RunDirError) as error:
        print(error, file=sys.stderr)
        return 2
    for plan in plans:
        for note in plan.notes:
            print(f"note: {note}")
    codes = [run(each) for each in frozen]
    return next((code for code in codes if code), 0)


def run(frozen: Frozen) -> int:
    """One cell in a process of its own, with the frozen plan; 0 at once if it is finished."""
    if frozen.state == "finished":
        print(f"{frozen.path}: finished, {frozen.steps} steps; more grpo.steps go on from there")
        return 0
    return subprocess.run(python_module("run", str(frozen.path)), check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
