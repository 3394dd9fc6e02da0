"""Convert a Hugging Face checkpoint, or a local run's, to a blockwise FP8 one for vLLM.

python -m recipes.quantize_checkpoint SRC DST [--calibrate TEXTS] [precision=fp8-linear ...]

Of a local run's directory the last checkpoint becomes SRC/model-STEP first. The same line goes on
where it was stopped. Precision: a run's own, else fp8-linear; an FP8 cache needs `--calibrate`, a
file of a text a line. Prints what FP8 cost each layer; DST/quantization.json has every weight.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from fp8_nemo.local.preflight import require
from fp8_nemo.runs.process import INTERRUPTED


def main(arguments: list[str] | None = None) -> int:
    """Convert and print; 2 if SRC, DST or the settings are wrong, 130 if it was stopped."""
    options = _options(sys.argv[1:] if arguments is None else arguments)
    require()
    from fp8_nemo.export.convert import convert
    from fp8_nemo.export.fp8_checkpoint import error_table, serve_line

    try:
        with Progress(*Progress.get_default_columns(), MofNCompleteColumn()) as bar:
            task = bar.add_task("", visible=False)

            def report(what: str, done: int, total: int) -> None:
                bar.update(task, description=what, completed=done, total=total, visible=True)

            errors = convert(**vars(options), progress=report)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{options.target}: stopped; the same line goes on", file=sys.stderr)
        return INTERRUPTED
    Console(width=100, markup=False).print(error_table(errors))
    print(serve_line(options.target, fp8_cache=options.calibrate is not None))
    return 0


def _options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("recipes.quantize_checkpoint", description=__doc__)
    parser.usage = argparse.SUPPRESS  # a mistake is one line
    parser.add_argument("source", metavar="SRC", type=Path)
    parser.add_argument("target", metavar="DST", type=Path)
    parser.add_argument("settings", metavar="precision=...", nargs="*", default=[])
    parser.add_argument("--calibrate", metavar="TEXTS", type=Path)
    return parser.parse_intermixed_args(words)


if __name__ == "__main__":
    raise SystemExit(main())
