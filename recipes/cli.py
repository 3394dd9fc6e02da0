"""fp8-nemo: FP8 reinforcement learning on NVIDIA NeMo RL.

    fp8-nemo VERB ...        the same as python -m recipes.VERB ... in the clone
    fp8-nemo VERB --help     what a verb takes

VERB:
"""

from __future__ import annotations

import sys
from importlib import import_module

from .arguments import end_with_reader, version

VERBS = {
    "plan": "does it fit, how fast is it, what is NeMo RL told",
    "grpo": "run or queue a recipe or a sweep; again: resume",
    "queue": "where runs stand: queue, step, why; watch or cancel",
    "compare": "which precision to take: a table, a page, figures",
    "measure_mismatch": "what each correction would clip and reject in a run",
    "quantize_checkpoint": "an FP8 or NVFP4 checkpoint for vLLM from a run or a model",
    "make_model": "train a small model to start from",
    "check_cluster": "look at every node of a Ray cluster before a run",
    "run": "run the directory of a frozen plan, as jobs do",
}
PRINTING = ("plan", "queue", "compare", "measure_mismatch")
"""Verbs that may end when nobody reads on; a run may not."""


def main(arguments: list[str] | None = None) -> int:
    """Call a verb; 2 if there is none of that name."""
    words = sys.argv[1:] if arguments is None else arguments
    verb = words[0].replace("-", "_") if words else ""
    if verb in VERBS:
        if arguments is None and verb in PRINTING:
            end_with_reader()
        return import_module(f".{verb}", __package__).main(words[1:])
    if "--version" in words:
        print(version())
        return 0
    if not words or {"-h", "--help"} & {*words}:
        lines = (f"  {name.replace('_', '-'):21}{text}" for name, text in VERBS.items())
        print(__doc__, *lines, sep="\n")
        return 0 if words else 2
    print(f"fp8-nemo {words[0]}: no such verb; fp8-nemo --help lists them", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
