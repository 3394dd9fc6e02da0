"""Compare runs: a table here, and a page with figures in the folder `report` above the runs.

python -m recipes.compare outputs/tiny-llama [--html]

`--html` adds the executed notebook, and one self-contained HTML page of it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from rich.console import Console

from fp8_nemo.report.against_bf16 import against_twins
from fp8_nemo.report.compare import compare, find_runs, read_runs
from fp8_nemo.report.page import PageError, table, write_html, write_markdown
from fp8_nemo.runs.run_dir import report_dir, short_path


def main(arguments: list[str] | None = None) -> int:
    """Print the table and write the page; 2 if there is no run, or nowhere to write."""
    words = sys.argv[1:] if arguments is None else arguments
    options = _options(words)
    found = {path: [short_path(run) for run in find_runs(path)] for path in options.paths}
    runs, lines = read_runs(dict.fromkeys(run for each in found.values() for run in each))
    lines += [f"{path}: no run directory here" for path in found if not found[path]]
    sys.stderr.writelines(f"{line}\n" for line in lines)
    if not runs:
        return 2
    comparison = compare(runs, lines)
    Console(width=100, markup=False).print(table(comparison))
    for verdict in against_twins(comparison):
        print(verdict)
    try:
        above = Path(os.path.commonpath([each.resolve() for each in found]))
        folder = report_dir(short_path(above) if above != Path(above.anchor) else Path())
        print(write_markdown(comparison, folder, f"python -m recipes.compare {shlex.join(words)}"))
        if options.html:
            print(write_html(comparison, folder, [short_path(path) for path in found]))
    except (OSError, PageError, ModuleNotFoundError) as error:
        remedy = "; pip install 'fp8-nemo[report]'" * isinstance(error, ModuleNotFoundError)
        print(f"the report cannot be written: {error}{remedy}", file=sys.stderr)
        return 2
    return 0


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("recipes.compare", description=__doc__)
    parser.usage = argparse.SUPPRESS  # a mistake is one line
    parser.add_argument("paths", metavar="PATH", nargs="+", type=Path)
    parser.add_argument("--html", action="store_true", help="add a notebook and an HTML page")
    return parser.parse_args(words)


if __name__ == "__main__":
    raise SystemExit(main())
