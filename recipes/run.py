"""Run a frozen plan, from where its directory stands to its last step.

python -m recipes.run RUN_DIR

RUN_DIR is one that recipes.grpo made:
outputs/tiny-llama/fp8-kv-attn-tis/s42-1a2b3c.
"""

from __future__ import annotations

import sys
from importlib import import_module

from fp8_nemo.plan.plan import Plan
from fp8_nemo.runs.metrics import RunDirError
from fp8_nemo.runs.process import INTERRUPTED
from fp8_nemo.runs.provenance import changed_versions
from fp8_nemo.runs.run_dir import read_plan
from fp8_nemo.runs.terminal import tell

from .arguments import run_dir_of

PREFLIGHT = {"local": "fp8_nemo.local.preflight", "nemo": "fp8_nemo.launch.preflight"}
DRIVER = {"local": "fp8_nemo.local.run", "nemo": "fp8_nemo.launch.driver"}


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if the run ended well, 1 after an error, 2 if the directory cannot run.

    130 is a local run that was asked to stop. One of NeMo RL that stopped early ended well: a job
    goes by its steps.
    """
    path = run_dir_of("run", __doc__, arguments)
    try:
        plan = read_plan(path)
        refuses = plan.recipe.cluster.other_versions == "refuse"
        lines = problems_with(plan) + (changed_versions(path) if refuses else [])
    except RunDirError as error:
        tell(error, sys.stderr)
        return 2
    if lines:
        tell("\n".join(lines), sys.stderr)
        return 2
    try:  # imports torch, or NeMo RL: after the plan is known to be whole
        return import_module(DRIVER[plan.backend]).run(plan, path)
    except KeyboardInterrupt:  # before the driver was there to hear it
        tell(f"{path}: stopped; the same line goes on", sys.stderr)
        return INTERRUPTED


def problems_with(plan: Plan) -> list[str]:
    """Return one line for each thing that would stop this plan after it has started."""
    return import_module(PREFLIGHT[plan.backend]).problems_with(plan)


if __name__ == "__main__":
    raise SystemExit(main())
