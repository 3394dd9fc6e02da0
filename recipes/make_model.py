"""Train a small starting checkpoint, with tokenizer and chat template, in Hugging Face format.

python -m recipes.make_model models/tiny-llama model=tiny-llama
python -m recipes.make_model models/small-llama-sum model=small-llama data=running-sum
"""

from __future__ import annotations

import sys

from fp8_nemo.export.model_line import GROUPS, read_model_line
from fp8_nemo.local.preflight import require
from fp8_nemo.plan.terminal import Parser, columns, complain
from fp8_nemo.recipe.compose import ComposeError, choices
from fp8_nemo.recipe.problems import DataError, load_problems
from fp8_nemo.runs.run_dir import new_folder


def main(arguments: list[str] | None = None) -> int:
    """Write the checkpoint into the folder named first; 2 if the line is wrong."""
    parser = Parser("make_model", __doc__, choices(columns(), GROUPS))
    parser.add_argument(
        "folder", metavar="FOLDER", nargs="?", help="to be made: new or empty until it is whole"
    )
    parser.add_argument(
        "words", metavar="KEY=VALUE", nargs="*", help="of the groups model and data, and seed=N"
    )
    known, others = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    try:
        folder, recipe = read_model_line([*filter(None, [known.folder]), *known.words, *others])
        require()
        problems = load_problems(recipe.data, recipe.seed)
        new_folder(folder)
    except (ComposeError, DataError, OSError) as error:
        complain(error)
        return 2
    from fp8_nemo.export.make_model import make

    make(folder, recipe, problems)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
