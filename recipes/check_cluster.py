"""Check on every node of a Ray cluster whether it can run a plan; print one table.

python -m recipes.check_cluster RUN_DIR

Jobs run it before the run (`cluster.preflight`). By hand: on a node, with
`RAY_ADDRESS` set; without it, this machine is checked.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fp8_nemo.plan.terminal import Parser, complain, say
from fp8_nemo.runs.metrics import RunDirError
from fp8_nemo.runs.run_dir import read_plan


def main(arguments: list[str] | None = None) -> int:
    """Print what was found; 0 if all is well, 1 if not, 2 if there is nothing to check."""
    parser = Parser("check_cluster", __doc__)
    parser.add_argument("path", metavar="RUN_DIR", type=Path, help="what `grpo` has frozen")
    path = parser.parse_args(sys.argv[1:] if arguments is None else arguments).path
    try:
        plan = read_plan(path)
        from fp8_nemo.launch.cluster_check import check, findings_table  # ray: in jobs alone

        found = check(plan, path)
    except (RunDirError, ConnectionError, ModuleNotFoundError) as error:
        complain(error)
        return 2
    print(findings_table(found))
    problems = [f"{each.node}: {each.check}: {each.problem}" for each in found if each.problem]
    say(*problems)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
