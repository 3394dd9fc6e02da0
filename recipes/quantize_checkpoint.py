"""Convert a Hugging Face checkpoint, or a local run's, to a blockwise FP8 one for vLLM.

python -m recipes.quantize_checkpoint SRC DST
python -m recipes.quantize_checkpoint SRC DST precision=fp8-kv-attn --calibrate texts.txt

The same line goes on where it was stopped. Prints what FP8 cost each layer;
DST/quantization.json has every weight.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fp8_nemo.local.preflight import require
from fp8_nemo.plan.terminal import Parser, complain, console
from fp8_nemo.runs.process import INTERRUPTED


def main(arguments: list[str] | None = None) -> int:
    """Convert and print; 2 if SRC, DST or the settings are wrong, 130 if it was stopped."""
    options = _options(sys.argv[1:] if arguments is None else arguments)
    require()
    from fp8_nemo.export.convert import convert
    from fp8_nemo.export.fp8_checkpoint import error_table, serve_line

    screen = console()
    shown = (
        TextColumn("{task.description}"), BarColumn(10), MofNCompleteColumn(), TimeRemainingColumn()
    )  # fmt: skip
    try:
        with Progress(*shown, console=screen, disable=not screen.is_terminal) as bar:
            task = bar.add_task("", visible=False)

            def report(what: str, done: int, total: int) -> None:
                bar.update(task, description=what, completed=done, total=total, visible=True)

            errors = convert(**vars(options), progress=report)
    except (OSError, ValueError) as error:
        complain(error)
        return 2
    except KeyboardInterrupt:
        complain(f"{options.target}: stopped; the same line goes on")
        return INTERRUPTED
    print(error_table(errors))
    print(f"\n{serve_line(options.target, fp8_cache=options.calibrate is not None)}")
    return 0


def _options(words: list[str]) -> Namespace:
    parser = Parser("quantize_checkpoint", __doc__)
    parser.add_argument(
        "source", metavar="SRC", type=Path,
        help="checkpoint, or run directory: its last checkpoint becomes SRC/model-STEP first",
    )  # fmt: skip
    parser.add_argument("target", metavar="DST", type=Path, help="folder to be made")
    parser.add_argument(
        "settings", metavar="precision=...", nargs="*", default=[],
        help="option and keys of precision; else the run's own, or fp8-linear",
    )  # fmt: skip
    parser.add_argument(
        "--calibrate", metavar="TEXTS", type=Path,
        help="file of a text a line, which an FP8 cache is calibrated on",
    )  # fmt: skip
    return parser.parse_intermixed_args(words)


if __name__ == "__main__":
    raise SystemExit(main())
