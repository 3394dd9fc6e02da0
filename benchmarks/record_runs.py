"""Keep what run directories hold as one results file: curves, settings, versions, hardware.

python -m benchmarks.record_runs outputs/tiny-llama --command "make demo" --out FILE.json

Times of the local backend are left out: it shows learning and mismatch, not speed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fp8_nemo.recipe.plain import to_json
from fp8_nemo.report.runs import FinishedRun, find_runs, read_run


def record(run: FinishedRun) -> dict[str, Any]:
    """Record one run: what it was, what it ran on, every step's metrics."""
    rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in run.rows]
    return {
        "cell": run.plan.cell,
        "seed": run.recipe.seed,
        "settings": run.settings,
        "environment": run.environment,
        "state": run.state,
        "rows": rows,
    }


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--command", required=True, help="the line that made the runs")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    runs = [record(read_run(path)) for path in find_runs(options.folder)]
    content = {"command": options.command, "runs": runs}
    options.out.write_text(to_json(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
