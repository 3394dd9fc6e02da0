"""Look at every node of a Ray cluster: can it run this plan?

python -m recipes.check_cluster RUN_DIR

Prints one table; the exit code is 1 if something is wrong. Jobs run it
before the run (`cluster.preflight`). By hand: on a node, with `RAY_ADDRESS`
set; without it, this machine is looked at.
"""

from __future__ import annotations

import sys

from fp8_nemo.runs.metrics import RunDirError
from fp8_nemo.runs.run_dir import read_plan
from fp8_nemo.runs.terminal import console, tell

from .arguments import run_dir_of


def main(arguments: list[str] | None = None) -> int:
    """Print what was found; 0 if all is well, 1 if not, 2 if there is nothing to look at."""
    path = run_dir_of("check_cluster", __doc__, arguments)
    try:
        plan = read_plan(path)
        from fp8_nemo.launch.cluster_check import check, findings_table  # needs ray

        found = check(plan, path)
    except (RunDirError, OSError, ModuleNotFoundError) as error:  # a full disk, or no Ray
        tell(error, sys.stderr)
        return 2
    console().print(findings_table(found))
    problems = [f"{each.node}: {each.check}: {each.problem}" for each in found if each.problem]
    for problem in problems:
        tell(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
