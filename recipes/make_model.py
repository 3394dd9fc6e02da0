"""Train a small starting checkpoint, with tokenizer and chat template, in Hugging Face format.

python -m recipes.make_model fp8_nemo/recipe/models/tiny-llama model=tiny-llama
python -m recipes.make_model models/small-llama-sum model=small-llama data=running-sum

Takes the groups `model`, `data`, `seed`; the folder is new or empty until the model is whole.
"""

from __future__ import annotations

import sys

from fp8_nemo.export.model_line import read_model_line
from fp8_nemo.local.preflight import require
from fp8_nemo.recipe.compose import ComposeError
from fp8_nemo.recipe.problems import DataError, load_problems
from fp8_nemo.runs.run_dir import new_folder


def main(arguments: list[str] | None = None) -> int:
    """Write the checkpoint into the folder named first; 2 if the line is wrong."""
    try:
        folder, recipe = read_model_line(sys.argv[1:] if arguments is None else arguments)
        require()
        problems = load_problems(recipe.data, recipe.seed)
        new_folder(folder)
    except (ComposeError, DataError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    from fp8_nemo.export.make_model import make

    make(folder, recipe, problems)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
