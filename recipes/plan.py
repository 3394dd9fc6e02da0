"""Show what a run would do, before a GPU is asked for. Needs no torch.

python -m recipes.plan model=llama31-8b precision=fp8-kv-attn correction=tis
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from fp8_nemo.compose import ComposeError, compose_plans
from fp8_nemo.nemo.checkout import host_of
from fp8_nemo.plan import Plan, describe
from fp8_nemo.run_dir import run_path


def main(arguments: list[str] | None = None) -> int:
    """Print the plan of every cell; 2 if one of them is impossible."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        plans = compose_plans(arguments, host_of)
    except ComposeError as error:
        print(error, file=sys.stderr)
        return 2
    for plan in plans:
        Console(width=100).print(table(plan))
    return 0


def table(plan: Plan) -> Table:
    """One plan as a table of words and numbers."""
    rows = Table(title=plan.cell, title_justify="left", show_header=False, min_width=98)
    rows.add_row("run directory", str(run_path(plan)))
    for name, text in describe(plan).items():
        rows.add_row(name, text)
    for note in plan.notes:
        rows.add_row("note", note)
    for need in plan.needs:
        rows.add_row("[bold]needs[/]", need)
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
