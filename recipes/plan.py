"""Show what a run would do, before a GPU is asked for: does it fit, how fast, and how. No torch.

python -m recipes.plan model=llama31-8b precision=fp8-kv-attn correction=tis
python -m recipes.plan model=llama31-8b precision=fp8-kv-attn --keys
"""

from __future__ import annotations

import signal
import sys

from fp8_nemo.nemo_config.checkout import host_of
from fp8_nemo.plan.cells import compose_plans, line_parser, read_line
from fp8_nemo.plan.describe import changes, decision, describe, differences, stock_command
from fp8_nemo.plan.terminal import complain, fields, say, shell
from fp8_nemo.recipe.compose import ComposeError
from fp8_nemo.runs.metrics import RunDirError
from fp8_nemo.runs.run_dir import run_path
from fp8_nemo.runs.slurm import node_notes, sbatch_command


def main(arguments: list[str] | None = None) -> int:
    """Print the plan of every cell; 2 if one of them is impossible."""
    parser = line_parser("plan", __doc__)
    text = "print NeMo RL's keys too, and the same run as a stock NeMo RL command"
    parser.add_argument("--keys", action="store_true", help=text)
    options, words = read_line(parser, sys.argv[1:] if arguments is None else arguments)
    try:
        plans = compose_plans(words, host_of)
        calls = [sbatch_command(p) if p.recipe.cluster.kind == "slurm" else [] for p in plans]
    except (ComposeError, RunDirError) as error:
        complain(error)
        return 2
    for plan, call in zip(plans, calls, strict=True):
        host, path = host_of(plan.recipe), run_path(plan)
        print(plan.cell)
        say(*decision(plan))
        print(f"\n{fields([('run directory', str(path)), *describe(plan, host)])}\n")
        if plan.nemo and options.keys:
            print(f"{changes(differences(plan, host, path))}\n")
            print("The same with NeMo RL alone, in its checkout:\n")
            print(f"{shell(stock_command(plan, host, path))}\n")
        elif plan.nemo:
            say("--keys shows NeMo RL's keys, and this run as a stock NeMo RL command.", "")
        if call:
            print(f"Queued by:\n\n{shell(call)}\n")
    say(*(f"note: {note}" for note in node_notes(plans)))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a traceback
    raise SystemExit(main())
