"""Show what a run would do, before a GPU is asked for. Needs no torch.

python -m recipes.plan model=llama31-8b precision=fp8-kv-attn correction=tis
"""

from __future__ import annotations

import shlex
import signal
import sys

from rich.console import Console

from fp8_nemo.nemo_config.checkout import host_of
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.describe import changes, differences, stock_command, table
from fp8_nemo.recipe.compose import ComposeError
from fp8_nemo.runs.metrics import RunDirError
from fp8_nemo.runs.run_dir import run_path
from fp8_nemo.runs.slurm import notes, sbatch_command


def main(arguments: list[str] | None = None) -> int:
    """Print the plan of every cell; 2 if one of them is impossible."""
    try:
        plans = compose_plans(sys.argv[1:] if arguments is None else arguments, host_of)
        calls = [sbatch_command(p) if p.recipe.cluster.kind == "slurm" else [] for p in plans]
    except (ComposeError, RunDirError) as error:
        print(error, file=sys.stderr)
        return 2
    console = Console(width=100, markup=False)
    for plan, call in zip(plans, calls, strict=True):
        host, path = host_of(plan.recipe), run_path(plan)
        console.print(table(plan, host, path))
        if plan.nemo:
            console.print(changes(differences(plan, host, path)))
            stock = shlex.join(stock_command(plan, host, path))
            print(f"\nThe same with NeMo RL alone, in its checkout:\n\n{stock}")
        if call:
            print(f"\nQueued by:\n\n{shlex.join(call)}")
    for note in notes(plans):
        print(f"\nnote: {note}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    raise SystemExit(main())
