"""Call a verb by name: `fp8-nemo plan model=llama31-8b`, in a clone or outside of it."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

VERBS = ("plan", "grpo", "run", "compare", "measure_mismatch", "quantize_checkpoint",
         "make_model", "check_cluster")  # fmt: skip


def main() -> None:
    """Run the verb that the first word names, importing that one alone: torch takes seconds."""
    name, *words = sys.argv[1:] or ["--help"]
    if name == "--version":
        from fp8_nemo.plan.terminal import version

        print(version())
    elif name in ("-h", "--help"):
        from fp8_nemo.plan.terminal import fields

        print(f"usage: fp8-nemo VERB ...\n\n{fields(map(_about, VERBS), '  ')}")
        print("\nfp8-nemo VERB --help shows its arguments; fp8-nemo --version the version.")
    elif (verb := name.replace("-", "_")) in VERBS:
        sys.argv[1:] = words
        runpy.run_module(f"fp8_nemo.recipes.{verb}", run_name="__main__")
    else:
        print(f"fp8-nemo: {name}: no such verb; --help shows them", file=sys.stderr)
        raise SystemExit(2)


def _about(verb: str) -> tuple[str, str]:
    """Return a verb and the head of its file's docstring, without importing it."""
    head = Path(__file__).with_name(f"{verb}.py").read_text().partition('"""')[2]
    return verb.replace("_", "-"), re.split("[;:.]", head)[0]
