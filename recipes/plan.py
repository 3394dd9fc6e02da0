"""Show whether a run fits and what it would do, before a GPU is asked for.

python -m recipes.plan model=llama31-8b precision=fp8-kv-attn

Needs no torch.
"""

from __future__ import annotations

import sys

from fp8_nemo.nemo_config.checkout import host_of
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.describe import Shown, change_lines, differences, plan_tables, stock_command
from fp8_nemo.recipe.compose import ComposeError
from fp8_nemo.runs.metrics import RunDirError
from fp8_nemo.runs.run_dir import layout_of, run_path
from fp8_nemo.runs.sbatch import container_notes
from fp8_nemo.runs.slurm import calls
from fp8_nemo.runs.terminal import command, console, tell

# As recipes here, as fp8_nemo.recipes when frozen.
from .arguments import cells_parser, end_with_reader, read_cells


def main(arguments: list[str] | None = None) -> int:
    """Print the plan of every cell; 2 if one of them is impossible."""
    parser = cells_parser("plan", __doc__)
    text = "show NeMo RL's keys that change, and the stock command that sets the same"
    parser.add_argument("--keys", action="store_true", help=text)
    options, words = read_cells(parser, arguments)
    try:
        plans = compose_plans(words, host_of, layout_of)
        queued_by = calls(plans) if plans[0].recipe.cluster.kind == "slurm" else []
    except (ComposeError, RunDirError) as error:
        tell(error, sys.stderr)
        return 2
    shown = [Shown(each, host_of(each.recipe), run_path(each)) for each in plans]
    before, tables = plan_tables(shown)
    for table in before:
        console().print(table, "")
    for (plan, host, path), table in zip(shown, tables, strict=True):
        console().print(table)
        if plan.nemo and options.keys:
            changed = differences(plan, host, path)
            tell("\n".join(["", f"{plan.nemo.base_config}, with", *change_lines(changed)]))
            stock = command(stock_command(plan, host, path))
            print(f"\nThe same with NeMo RL alone, in its checkout:\n\n{stock}")
    for call in queued_by:
        print(f"\nQueued by:\n\n{command(call)}")
    for note in container_notes(plans):
        tell(f"\nnote: {note}")
    return 0


if __name__ == "__main__":
    end_with_reader()
    raise SystemExit(main())
