"""Compose, freeze and run GRPO, here or by Slurm.

python -m recipes.grpo precision=fp8-kv-attn correction=tis grpo.steps=50
python -m recipes.grpo -m precision=bf16,fp8-kv-attn model=llama31-8b

The same line again resumes what stopped; more grpo.steps train on.
"""

from __future__ import annotations

import sys

from fp8_nemo.nemo_config.checkout import host_of
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.recipe.compose import ComposeError
from fp8_nemo.runs.metrics import RunDirError
from fp8_nemo.runs.process import INTERRUPTED, start
from fp8_nemo.runs.queue import QueueError
from fp8_nemo.runs.run_dir import layout_of
from fp8_nemo.runs.terminal import tell

from .arguments import cells_parser, read_cells
from .run import problems_with  # as recipes.run here, as fp8_nemo.recipes.run when frozen


def main(arguments: list[str] | None = None) -> int:
    """Run or queue every cell; 2 if the line is wrong, else the first exit code that is not 0."""
    _, words = read_cells(cells_parser("grpo", __doc__), arguments)
    try:
        plans = compose_plans(words, host_of, layout_of)
        if lines := [line for plan in plans for line in problems_with(plan)]:
            raise ComposeError(lines)
        return start(plans)
    except (ComposeError, RunDirError, QueueError) as error:
        tell(error, sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(main())
