"""Measure how far rollouts were from the policy, and what each correction would make of it.

python -m recipes.measure_mismatch RUN_DIR --reject 0.01
python -m recipes.measure_mismatch RUN_DIR --write my-geo --mask geometric

Prints the distribution, every correction's effect, and for every statistic the
bounds that reject the wanted share of tokens. Writes RUN_DIR/report/mismatch.json,
which `correction.measurement=` can name.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from fp8_nemo.correction.quantiles import token_share
from fp8_nemo.local.preflight import require
from fp8_nemo.plan.terminal import Parser, busy, complain, say
from fp8_nemo.recipe.options import DIVERGENCES, RATIOS


def main(arguments: list[str] | None = None) -> int:
    """Print, and write the measurement; 2 if there is nothing to measure, or nowhere to write."""
    options = _options(sys.argv[1:] if arguments is None else arguments)
    require(["torch"])
    with busy("loads torch"):
        from fp8_nemo.correction.measure import measure, read_pairs
        from fp8_nemo.correction.quantiles import MeasureError
        from fp8_nemo.report.mismatch_tables import mismatch_tables, write_measurement, write_option

    try:
        with busy("measures"):
            pairs = {at: pair for path in options.paths for at, pair in read_pairs(path).items()}
            measurement = measure(pairs)
            file = write_measurement(measurement, options.paths[0])
            tables = [*mismatch_tables(pairs.values(), measurement, options.reject)]
        print(*tables, sep="\n\n", end="\n\n")
        say(str(file))
        written = write_option(options.write, options.mask, options.reject, measurement, file)
        say(*map(str, written))
    except (MeasureError, OSError) as error:
        complain(error)
        return 2
    return 0


def _options(words: list[str]) -> Namespace:
    parser = Parser("measure_mismatch", __doc__)
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", type=Path,
        help="run directory, or train_data_step*.jsonl of a NeMo RL run",
    )  # fmt: skip
    parser.add_argument(
        "--reject", metavar="SHARE", type=token_share, default=0.01,
        help="share of tokens that the proposed bounds reject (0.01)",
    )  # fmt: skip
    parser.add_argument(
        "--write", metavar="my-NAME",
        help="write the bounds as conf/correction/my-NAME.yaml, for correction=my-NAME",
    )  # fmt: skip
    parser.add_argument(
        "--mask", metavar="STATISTIC", choices=[*RATIOS, *DIVERGENCES], default="geometric",
        help=f"what --write bounds (geometric): {', '.join((*RATIOS, *DIVERGENCES))}",
    )  # fmt: skip
    return parser.parse_args(words)


if __name__ == "__main__":
    raise SystemExit(main())
