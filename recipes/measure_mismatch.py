"""Measure how far rollouts were from the policy, and what corrections would do.

python -m recipes.measure_mismatch RUN_DIR --reject 0.02 --write my-bounds

Prints the distribution, every correction's effect, and for every statistic
the bounds that reject the wanted share of tokens. Writes
RUN_DIR/report/mismatch.json, which `correction.measurement=` can name.
"""

from __future__ import annotations

import argparse
import sys

from fp8_nemo.correction.quantiles import token_share
from fp8_nemo.local.preflight import require
from fp8_nemo.recipe.options.correction import DIVERGENCES, RATIOS
from fp8_nemo.runs.terminal import console, tell

from .arguments import Parser, end_with_reader, path


def main(arguments: list[str] | None = None) -> int:
    """Print and write the measurement; return 2 if nothing can be measured, or written."""
    options = _options(arguments)
    require(["torch"])
    from fp8_nemo.correction.measure import measure, read_pairs
    from fp8_nemo.correction.quantiles import MeasureError
    from fp8_nemo.report.mismatch_tables import mismatch_tables, write_measurement, write_option

    try:
        pairs = {at: pair for path in options.paths for at, pair in read_pairs(path).items()}
        measurement = measure(pairs)
        file = write_measurement(measurement, options.paths[0])
        for table in mismatch_tables(pairs.values(), measurement, options.reject):
            console().print(table)
        print(file)
        for option in write_option(options.write, options.mask, options.reject, measurement, file):
            print(option)
    except (MeasureError, OSError) as error:
        tell(error, sys.stderr)
        return 2
    return 0


def _options(words: list[str] | None) -> argparse.Namespace:
    parser = Parser("measure_mismatch", __doc__)
    parser.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        type=path,
        help="run directories, or NeMo RL's own train_data_step*.jsonl",
    )
    parser.add_argument(
        "--reject",
        metavar="SHARE",
        type=token_share,
        default=0.01,
        help="share of tokens that the proposed bounds reject; 0.01 unless given",
    )
    parser.add_argument(
        "--write", metavar="my-NAME", help="make the option correction=my-NAME with those bounds"
    )
    parser.add_argument(
        "--mask", metavar="STATISTIC", choices=[*RATIOS, *DIVERGENCES], default="geometric",
        help="what --write bounds: %(choices)s; geometric unless given",
    )  # fmt: skip
    return parser.parse_args(words)


if __name__ == "__main__":
    end_with_reader()
    raise SystemExit(main())
