"""Train a small starting checkpoint, with tokenizer and chat template, in Hugging Face format.

python -m recipes.make_model fp8_nemo/recipe/models/tiny-llama model=tiny-llama
python -m recipes.make_model models/small-llama-sum model=small-llama data=running-sum

Takes the groups `model`, `data`, `seed`; the folder is new or empty until the model is whole.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fp8_nemo.local.preflight import NEEDED_PACKAGES, require
from fp8_nemo.nemo_config.keys import hydra_value
from fp8_nemo.plan.cells import HELP, compose_plans
from fp8_nemo.recipe.compose import ComposeError
from fp8_nemo.recipe.problems import DataError, load_problems
from fp8_nemo.runs.run_dir import new_folder

TAKES = re.compile(r"\+*(model|data|seed)\b")


def main(arguments: list[str] | None = None) -> int:
    """Write the checkpoint into the folder named first; 2 if the line is wrong."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if asked := [word for word in words if word in HELP]:
            compose_plans(asked)  # tells, and ends
        if not words or "=" in words[0] or words[0].startswith("-"):
            raise ComposeError(["recipes.make_model: the first argument is the folder to make"])
        if others := [word for word in words[1:] if not TAKES.match(word)]:
            raise ComposeError(f"{word}: a model is made of model, data, seed" for word in others)
        # What a model is made for does not bind it: its recipe is that of a BF16 run of it.
        run = ["backend=local", "precision=bf16", f"model.path={hydra_value(words[0])}"]
        [plan] = compose_plans([*words[1:], *run])
        require(*NEEDED_PACKAGES)
        recipe = plan.recipe
        problems = load_problems(recipe.data, recipe.seed)
        folder = new_folder(Path(words[0]))
    except (ComposeError, DataError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    from fp8_nemo.export.make_model import make

    make(folder, recipe, problems)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
