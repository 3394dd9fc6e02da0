"""Compose, freeze and run GRPO: one cell, or with -m every cell of a sweep.

python -m recipes.grpo precision=fp8-linear correction=tis grpo.steps=50
python -m recipes.grpo -m sweep=demo

All cells are checked before the first one starts. The same line again resumes what stopped.
"""

from __future__ import annotations

import sys

from fp8_nemo.compose import ComposeError, compose_plans
from fp8_nemo.nemo.checkout import host_of
from fp8_nemo.plan import Plan
from fp8_nemo.run_dir import INTERRUPTED, Frozen, RunDirError, call_verb, freeze

from .run import problems_with  # as recipes.run here, as fp8_nemo.recipes.run when frozen


def main(arguments: list[str] | None = None) -> int:
    """Run every cell; 2 if the line is wrong, else the first exit code that is not 0."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        plans = compose_plans(arguments, host_of)
        if lines := [line for plan in plans for line in obstacles(plan)]:
            raise ComposeError(lines)
        frozen = freeze(plans)
    except (ComposeError, RunDirError) as error:
        print(error, file=sys.stderr)
        return 2
    for note in dict.fromkeys(note for plan in plans for note in plan.notes):
        print(f"note: {note}")
    worst = 0
    for each in frozen:
        code = run(each)
        worst = worst or code
        if code == INTERRUPTED:
            break
    return worst


def obstacles(plan: Plan) -> list[str]:
    """One line for each thing that would stop this plan later."""
    if plan.needs:
        return [f"{plan.cell}: needs {need}" for need in plan.needs]
    return problems_with(plan)


def run(frozen: Frozen) -> int:
    """One cell in a process of its own, with the frozen plan; 0 at once if it is finished."""
    if frozen.state == "finished":
        print(f"{frozen.path}: finished, {frozen.steps} steps; more grpo.steps go on from there")
        return 0
    return call_verb("run", str(frozen.path))


if __name__ == "__main__":
    raise SystemExit(main())
