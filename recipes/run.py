"""Run a frozen plan, from where its directory stands to its last step.

python -m recipes.run outputs/tiny-llama/fp8-kv-attn-tis/s42-1a2b3c
"""

from __future__ import annotations

import sys
from pathlib import Path

from fp8_nemo.local.preflight import problems_with
from fp8_nemo.run_dir import RunDirError, read_plan


def main(arguments: list[str] | None = None) -> int:
    """0 when the last step is done, 2 if the directory cannot be run, 1 if a proof failed."""
    paths = sys.argv[1:] if arguments is None else arguments
    if len(paths) != 1:
        print("recipes.run: takes one argument, a run directory", file=sys.stderr)
        return 2
    path = Path(paths[0])
    try:
        plan = read_plan(path)
    except RunDirError as error:
        print(error, file=sys.stderr)
        return 2
    if lines := problems_with(plan):
        print(*lines, sep="\n", file=sys.stderr)
        return 2
    from fp8_nemo.local.run import run  # imports torch: after the plan is known to be whole

    return run(plan, path)


if __name__ == "__main__":
    raise SystemExit(main())
