"""Train a small starting checkpoint, in Hugging Face format.

python -m recipes.make_model FOLDER model=small-llama data=running-sum seed=7

FOLDER is new or empty until the model is whole.
"""

from __future__ import annotations

import sys

from fp8_nemo.export.model_line import GROUPS, new_folder, read_model_line
from fp8_nemo.local.preflight import require
from fp8_nemo.recipe.compose import ComposeError, choices
from fp8_nemo.recipe.problems import DataError, load_problems
from fp8_nemo.runs.terminal import tell

from .arguments import Parser


def main(arguments: list[str] | None = None) -> int:
    """Write the checkpoint into the folder named first; 2 if the line is wrong."""
    parser = Parser("make_model", __doc__, choices(GROUPS))
    text = "where the model goes; it is made, or empty"
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help=text)
    text = "of the groups model and data, and seed=N"
    parser.add_argument("words", metavar="KEY=VALUE", nargs="*", help=text)
    known, others = parser.parse_known_args(arguments)
    try:
        folder, recipe = read_model_line([*filter(None, [known.folder]), *known.words, *others])
        require()
        problems = load_problems(recipe.data, recipe.seed)
        new_folder(folder)
    except (ComposeError, DataError, OSError) as error:
        tell(error, sys.stderr)
        return 2
    from fp8_nemo.export.make_model import make

    try:
        make(folder, recipe, problems)
    except OSError as error:
        tell(error, sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
