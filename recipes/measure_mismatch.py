"""Measure how far rollouts were from the policy, and what each correction would make of it.

python -m recipes.measure_mismatch RUN_DIR [RUN_DIR or train_data_step*.jsonl ...]
    [--reject 0.01] [--write my-NAME --mask geometric]

Prints the distribution, every correction's effect, and for every statistic the bounds that reject
the wanted share of tokens; writes RUN_DIR/report/mismatch.json, which `correction.measurement=` can
name. `--write` puts bounds into conf/correction/my-NAME.yaml, for `correction=my-NAME`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from fp8_nemo.correction.quantiles import token_share
from fp8_nemo.local.preflight import require
from fp8_nemo.recipe.options import DIVERGENCES, RATIOS


def main(arguments: list[str] | None = None) -> int:
    """Print, and write the measurement; 2 if there is nothing to measure, or nowhere to write."""
    options = _options(sys.argv[1:] if arguments is None else arguments)
    require(["torch"])
    from fp8_nemo.correction.measure import measure, read_pairs
    from fp8_nemo.correction.quantiles import MeasureError
    from fp8_nemo.report.mismatch_tables import mismatch_tables, write_measurement, write_option

    try:
        pairs = {at: pair for path in options.paths for at, pair in read_pairs(path).items()}
        measurement = measure(pairs)
        file = write_measurement(measurement, options.paths[0])
        for table in mismatch_tables(pairs.values(), measurement, options.reject):
            Console(width=100, markup=False).print(table)
        print(file)
        for option in write_option(options.write, options.mask, options.reject, measurement, file):
            print(option)
    except (MeasureError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("recipes.measure_mismatch", description=__doc__)
    parser.usage = argparse.SUPPRESS  # a mistake is one line
    parser.add_argument("paths", metavar="PATH", nargs="+", type=Path)
    parser.add_argument("--reject", type=token_share, default=0.01)
    parser.add_argument("--write", metavar="my-NAME")
    parser.add_argument("--mask", choices=[*RATIOS, *DIVERGENCES], default="geometric")
    return parser.parse_args(words)


if __name__ == "__main__":
    raise SystemExit(main())
