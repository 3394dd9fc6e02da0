"""Look at every node of a Ray cluster: can it run this plan? One table; 1 if something is wrong.

python -m recipes.check_cluster RUN_DIR

Jobs run it before the run (`cluster.preflight`). By hand: on a node, with `RAY_ADDRESS` set;
without it, this machine is looked at.
"""

from __future__ import annotations

import sys
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fp8_nemo.runs.metrics import RunDirError
from fp8_nemo.runs.run_dir import read_plan


def main(arguments: list[str] | None = None) -> int:
    """Print what was found; 0 if all is well, 1 if not, 2 if there is nothing to look at."""
    words = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & {*words}:
        print(__doc__, end="")
        return 0
    if len(words) != 1:
        print("recipes.check_cluster: takes one argument, a run directory", file=sys.stderr)
        return 2
    try:
        plan = read_plan(Path(words[0]))
        from fp8_nemo.launch.cluster_check import check  # needs ray, only where a job runs

        found = check(plan, Path(words[0]))
    except (RunDirError, ConnectionError, ModuleNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    Console(width=120, soft_wrap=False, markup=False).print(table(found))
    problems = [f"{each.node}: {each.check}: {each.problem}" for each in found if each.problem]
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


def table(found: list) -> Table:
    """Equal findings of several nodes in one row."""
    rows = Table(title="check_cluster", title_justify="left")
    for name in ("check", "nodes", "found", "verdict"):
        rows.add_column(name, overflow="fold")
    order = list(dict.fromkeys(each.check for each in found))
    ranked = sorted(found, key=lambda each: (order.index(each.check), *each[2:], each.node))
    for (check, text, problem), same in groupby(ranked, attrgetter("check", "found", "problem")):
        nodes = ", ".join(each.node for each in same)
        rows.add_row(check, nodes, text, Text(problem or "ok", style="red" if problem else ""))
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
