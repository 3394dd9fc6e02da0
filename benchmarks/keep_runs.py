"""Keep what a comparison reads of run directories: plan, recipe, environment and metrics.

python -m recipes.grpo -m sweep=demo seed=1,2,3 outputs=runs
python benchmarks/keep_runs.py runs benchmarks/results/runs [--commit COMMIT]

Checkpoints, logs and data stay behind. The notebooks compare what is kept. `--commit` is of the
code that ran, where that was no clone and so could not tell.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from fp8_nemo.report.runs import find_runs, read_run
from fp8_nemo.runs.run_dir import ENVIRONMENT, METRICS, PLAN, RECIPE


def main() -> None:
    """Copy every finished run's files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    for path in find_runs(options.folder):
        if read_run(path).state != "finished":
            raise SystemExit(f"{path}: is not finished; nothing after it was kept")
        kept = options.target / path.relative_to(options.folder)
        kept.mkdir(parents=True, exist_ok=True)
        for name in (PLAN, RECIPE, METRICS):
            shutil.copyfile(path / name, kept / name)
        found = json.loads((path / ENVIRONMENT).read_text())
        found["commit"] = found["commit"] or options.commit or None
        (kept / ENVIRONMENT).write_text(json.dumps(found, indent=1) + "\n")
        print(kept)


if __name__ == "__main__":
    main()
