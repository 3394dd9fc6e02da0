"""Compose, freeze and run GRPO, here or by Slurm.

python -m recipes.grpo precision=fp8-e2e correction=tis grpo.steps=50
python -m recipes.grpo -m precision=bf16,fp8-e2e model=llama31-8b

The same line again resumes what stopped; more grpo.steps train on.
"""

from __future__ import annotations

import sys

from fp8_nemo.nemo_config.checkout import host_of
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.compose import ComposeError, choices
from fp8_nemo.runs import slurm as submit
from fp8_nemo.runs.metrics import RunDirError
from fp8_nemo.runs.process import INTERRUPTED, call_verb
from fp8_nemo.runs.run_dir import Frozen, freeze
from fp8_nemo.runs.terminal import console, tell

from .arguments import answered
from .run import problems_with  # as recipes.run here, as fp8_nemo.recipes.run when frozen


def main(arguments: list[str] | None = None) -> int:
    """Run or queue every cell; 2 if the line is wrong, else the first exit code that is not 0."""
    words = sys.argv[1:] if arguments is None else arguments
    if answered(words, f"{__doc__}\n{choices()}"):
        return 0
    try:
        plans = compose_plans(words, host_of)
        if lines := [line for plan in plans for line in problems_with(plan)]:
            raise ComposeError(lines)
        jobs = submit.prepare(plans) if plans[0].recipe.cluster.kind == "slurm" else None
        cells = freeze(submit.not_queued(plans)) if jobs is None else []
        notes = [note for plan in plans for note in plan.notes] + submit.container_notes(plans)
        for note in dict.fromkeys(notes):
            tell(f"note: {note}")
        return run(cells) if jobs is None else queue(plans, jobs)
    except (ComposeError, RunDirError, submit.SubmitError) as error:
        tell(error, sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


def run(cells: list[Frozen]) -> int:
    """Every cell in a process of its own, with the frozen plan; one that is finished is left."""
    codes = list[int]()
    for each in cells:
        if each.state == "finished":
            tell(f"{each.path}: finished, {each.steps} steps; more grpo.steps go on from there")
        elif INTERRUPTED not in codes:
            tell(f"{each.path}: starts, the first step may take a minute")
            codes.append(call_verb("run", str(each.path)))
    return next(filter(None, codes), 0)


def queue(plans: list[Plan], jobs: list[submit.Job]) -> int:
    """Every cell as a Slurm job, or none; what is finished or in the queue is left."""
    console().print(submit.jobs_table(plans, jobs))
    for job in submit.submit(plans, jobs):
        tell(f"job {job.id}: {job.path}; watch it: {job.watch}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
