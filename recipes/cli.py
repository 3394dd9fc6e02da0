"""Call a verb by name: `fp8-nemo plan model=llama31-8b`, in a clone or outside of it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

VERBS = (
    "plan",
    "grpo",
    "run",
    "compare",
    "measure_mismatch",
    "quantize_checkpoint",
    "make_model",
    "check_cluster",
)


def main() -> None:
    """Run the verb that the first word names, importing that one alone: torch takes seconds."""
    name, *words = sys.argv[1:] or ["--help"]
    if name == "--version":
        from fp8_nemo.plan.terminal import version

        print(version())
    elif name in ("-h", "--help"):
        print("usage: fp8-nemo VERB ...\n", *map(_about, VERBS), sep="\n")
        print("\nfp8-nemo VERB --help shows its arguments; fp8-nemo --version the version.")
    elif (verb := name.replace("-", "_")) in VERBS:
        sys.argv[1:] = words
        runpy.run_module(f"fp8_nemo.recipes.{verb}", run_name="__main__")
    else:
        raise SystemExit(f"fp8-nemo: {name}: no such verb; there are {', '.join(VERBS)}")


def _about(verb: str) -> str:
    """Return a verb and the first sentence of its file, without importing it."""
    first = Path(__file__).with_name(f"{verb}.py").read_text().partition("\n")[0]
    return f"  {verb.replace('_', '-'):20} {first.strip(chr(34)).split(';')[0].split(':')[0].rstrip('.')}"
