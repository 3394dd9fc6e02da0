"""Pack what a comparison reads of run directories into one file: plan, environment, metrics.

python -m recipes.grpo -m sweep=demo seed=1,2,3 outputs=runs
python -m benchmarks.keep_runs runs benchmarks/results/runs [--commit COMMIT]

Checkpoints, logs and data stay behind. The notebooks compare what is kept: `recipes.compare` reads
`benchmarks/results/runs`, packed as `benchmarks/results/runs.jsonl.gz`, as if it were a folder.
`--commit` is of the code that ran, where that was no clone and so could not tell.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8_nemo.recipe.plain import to_json
from fp8_nemo.report.runs import ARCHIVE, find_runs, read_run
from fp8_nemo.runs.metrics import read_metrics
from fp8_nemo.runs.provenance import read_environment
from fp8_nemo.runs.run_dir import PLAN


def packed(folder: Path, commit: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield every run below a folder, as a line of the archive holds it.

    Raises:
        SystemExit: a run is not finished.
    """
    for path in find_runs(folder):
        if read_run(path).state != "finished":
            raise SystemExit(f"{path}: is not finished; nothing was kept")
        environment = read_environment(path)
        yield {
            "run": str(path.relative_to(folder)),
            "plan": json.loads((path / PLAN).read_text()),
            "environment": environment | {"commit": environment["commit"] or commit},
            "rows": read_metrics(path),
        }


def main() -> None:
    """Write the archive; the same runs give the same bytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--commit")
    options = parser.parse_args()
    lines = [to_json(run) + "\n" for run in packed(options.folder, options.commit)]
    target = options.target.with_name(options.target.name + ARCHIVE)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(gzip.compress("".join(lines).encode(), compresslevel=9, mtime=0))
    print(f"{target}: {len(lines)} runs")


if __name__ == "__main__":
    main()
