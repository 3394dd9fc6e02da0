"""Compare runs: a table here, a page with figures in `report` above the runs.

python -m recipes.compare outputs/tiny-llama [--html]

`--html` adds one HTML page with everything inside, to be sent and opened
anywhere.
"""

from __future__ import annotations

import argparse
import shlex
import sys

from fp8_nemo.recipe.mistake import printable, verb_line
from fp8_nemo.report.against_bf16 import against_baselines
from fp8_nemo.report.compare import compare
from fp8_nemo.report.page import comparison_table, write_pages
from fp8_nemo.report.runs import find_runs, read_runs
from fp8_nemo.report.verdict import choices
from fp8_nemo.runs.metrics import RunDirError
from fp8_nemo.runs.terminal import console, short_path, tell

from .arguments import Parser, end_with_reader, path


def main(arguments: list[str] | None = None) -> int:
    """Print the table and write the page; 2 if there is no run, or nowhere to write."""
    words = sys.argv[1:] if arguments is None else arguments
    options = _options(words)
    try:
        found = {path: [short_path(run) for run in find_runs(path)] for path in options.paths}
    except RunDirError as error:
        tell(error, sys.stderr)
        return 2
    runs, lines = read_runs(dict.fromkeys(run for each in found.values() for run in each))
    lines += [f"{printable(str(path))}: no run directory here" for path in found if not found[path]]
    for line in lines:
        tell(line, sys.stderr)
    if not runs:
        return 2
    comparison = compare(runs, lines)
    for choice in choices(comparison):
        tell(f"{choice.headline}: {choice.why}\n")
    console().print(comparison_table(comparison))
    for verdict in against_baselines(comparison):
        tell(verdict)
    try:
        line = f"{verb_line('compare')} {shlex.join(words)}"
        for page in write_pages(comparison, found, line, with_html=options.html):
            print(page)
    except ModuleNotFoundError as error:
        remedy = "pip install 'fp8-nemo[report]'"
        tell(f"the report cannot be written: {error}; {remedy}", sys.stderr)
        return 2
    except OSError as error:
        tell(f"the report cannot be written: {error}", sys.stderr)
        return 2
    return 0


def _options(words: list[str]) -> argparse.Namespace:
    parser = Parser("compare", __doc__)
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", type=path, help="run directories, or folders of them"
    )
    parser.add_argument("--html", action="store_true", help="add an HTML page")
    return parser.parse_args(words)


if __name__ == "__main__":
    end_with_reader()
    raise SystemExit(main())
