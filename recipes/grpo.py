"""Compose, freeze and run GRPO, here or by Slurm; the same line again resumes what stopped.

python -m recipes.grpo precision=fp8-linear correction=tis grpo.steps=50
python -m recipes.grpo -m sweep=precision-x-correction model=llama31-8b cluster=mysite  # every cell
"""

from __future__ import annotations

import sys

from rich.console import Console

from fp8_nemo.nemo_config.checkout import host_of
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.compose import ComposeError
from fp8_nemo.runs import slurm as submit
from fp8_nemo.runs.metrics import RunDirError
from fp8_nemo.runs.process import INTERRUPTED, call_verb
from fp8_nemo.runs.run_dir import Frozen, freeze

from .run import problems_with  # as recipes.run here, as fp8_nemo.recipes.run when frozen


def main(arguments: list[str] | None = None) -> int:
    """Run or queue every cell; 2 if the line is wrong, else the first exit code that is not 0."""
    try:
        plans = compose_plans(sys.argv[1:] if arguments is None else arguments, host_of)
        if lines := [line for plan in plans for line in problems_with(plan)]:
            raise ComposeError(lines)
        jobs = submit.prepare(plans) if plans[0].recipe.cluster.kind == "slurm" else None
        cells = freeze(submit.not_queued(plans)) if jobs is None else []
        for note in dict.fromkeys([*(n for p in plans for n in p.notes), *submit.notes(plans)]):
            print(f"note: {note}")
        return run(cells) if jobs is None else queue(plans, jobs)
    except (ComposeError, RunDirError, submit.SubmitError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


def run(cells: list[Frozen]) -> int:
    """Every cell in a process of its own, with the frozen plan; one that is finished is left."""
    codes = list[int]()
    for each in cells:
        if each.state == "finished":
            print(f"{each.path}: finished, {each.steps} steps; more grpo.steps go on from there")
        elif INTERRUPTED not in codes:
            codes.append(call_verb("run", str(each.path)))
    return next(filter(None, codes), 0)


def queue(plans: list[Plan], jobs: list[submit.Job]) -> int:
    """Every cell as a Slurm job, or none; what is finished or in the queue is left."""
    Console(width=120, markup=False).print(submit.table(plans, jobs))
    for job in submit.submit(plans, jobs):
        print(f"job {job.id}: {job.path}; watch it: {job.watch}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
