"""Compare runs: tables here, and a page with figures in the folder `report` above the runs.

python -m recipes.compare outputs/tiny-llama --html
"""

from __future__ import annotations

import shlex
import sys
from argparse import Namespace
from pathlib import Path

from fp8_nemo.plan.terminal import Parser, busy, complain, say
from fp8_nemo.recipe.checks import verb_line
from fp8_nemo.report.against_bf16 import comparison_texts
from fp8_nemo.report.compare import compare
from fp8_nemo.report.page import PageError, write_pages
from fp8_nemo.report.runs import find_runs, read_runs
from fp8_nemo.runs.run_dir import short_path


def main(arguments: list[str] | None = None) -> int:
    """Print the tables and write the page; 2 if there is no run, or nowhere to write."""
    words = sys.argv[1:] if arguments is None else arguments
    options = _options(words)
    found = {path: [short_path(run) for run in find_runs(path)] for path in options.paths}
    runs, lines = read_runs(dict.fromkeys(run for each in found.values() for run in each))
    lines += [f"{path}: no run directory here" for path in found if not found[path]]
    complain(*lines)
    if not runs:
        return 2
    comparison = compare(runs, lines)
    for text in comparison_texts(comparison):
        print(f"{text}\n")
    try:
        line = f"{verb_line('compare')} {shlex.join(words)}"
        with busy("writes the report"):
            pages = [*write_pages(comparison, found, line, with_html=options.html)]
        say(*map(str, pages))
    except ModuleNotFoundError as error:
        remedy = "pip install 'fp8-nemo[report]'"
        complain(f"the report cannot be written: {error}; {remedy}")
        return 2
    except (OSError, PageError) as error:
        complain(f"the report cannot be written: {error}")
        return 2
    return 0


def _options(words: list[str]) -> Namespace:
    parser = Parser("compare", __doc__)
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", type=Path, help="run directory, or folder of them"
    )
    text = "add the executed notebook, and one self-contained HTML page of it"
    parser.add_argument("--html", action="store_true", help=text)
    return parser.parse_args(words)


if __name__ == "__main__":
    raise SystemExit(main())
