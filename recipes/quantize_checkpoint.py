"""Convert a Hugging Face checkpoint, or a local run's, to FP8 or NVFP4 for vLLM.

python -m recipes.quantize_checkpoint SRC DST [precision=fp8-linear]
    [--calibrate TEXTS]

Of a local run's directory the last checkpoint becomes SRC/model-STEP first.
The same line goes on where it was stopped. Precision: a run's own, else
fp8-linear; an FP8 cache needs `--calibrate`. `precision=nvfp4-w4a16` writes
four bits. Prints what they cost each layer; DST/quantization.json has every
weight.
"""

from __future__ import annotations

import argparse
import sys

from rich.progress import MofNCompleteColumn, Progress

from fp8_nemo.local.preflight import require
from fp8_nemo.runs.process import INTERRUPTED
from fp8_nemo.runs.terminal import console, tell

from .arguments import Parser, path


def main(arguments: list[str] | None = None) -> int:
    """Convert and print; 2 if SRC, DST or the settings are wrong, 130 if it was stopped."""
    options = _options(arguments)
    require()
    from fp8_nemo.export.convert import convert
    from fp8_nemo.export.quantized_checkpoint import error_table, serve_line

    columns, shown = (*Progress.get_default_columns(), MofNCompleteColumn()), console()
    try:
        with Progress(*columns, console=shown, disable=not shown.is_terminal) as bar:
            task = bar.add_task("", visible=False)

            def report(what: str, done: int, total: int) -> None:
                bar.update(task, description=what, completed=done, total=total, visible=True)

            precision, errors = convert(**vars(options), progress=report)
    except (OSError, ValueError) as error:
        tell(error, sys.stderr)
        return 2
    except KeyboardInterrupt:
        tell(f"{options.target}: stopped; the same line goes on", sys.stderr)
        return INTERRUPTED
    shown.print(error_table(errors, precision))
    print(serve_line(options.target, precision))
    return 0


def _options(words: list[str] | None) -> argparse.Namespace:
    parser = Parser("quantize_checkpoint", __doc__)
    parser.add_argument(
        "source", metavar="SRC", type=path, help="a Hugging Face folder, or a local run's directory"
    )
    parser.add_argument("target", metavar="DST", type=path, help="the folder to write")
    parser.add_argument(
        "settings",
        metavar="precision=...",
        nargs="*",
        default=[],
        help="the precision, or one of its keys, as for recipes.grpo",
    )
    parser.add_argument(
        "--calibrate", metavar="TEXTS", type=path,
        help="a file with one text a line: measure the scales of an FP8 cache on it",
    )  # fmt: skip
    return parser.parse_intermixed_args(words)


if __name__ == "__main__":
    raise SystemExit(main())
