"""Train a small starting checkpoint, with tokenizer and chat template, in Hugging Face format.

python -m recipes.make_model fp8_nemo/local/models/tiny-llama model=tiny-llama
python -m recipes.make_model models/small-llama-sum model=small-llama data=running-sum

Takes the groups `model`, `data`, `seed`; the folder is new or empty until the model is whole.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fp8_nemo.compose import ComposeError, compose_plans
from fp8_nemo.data import DataError, Problem, load_problems
from fp8_nemo.run_dir import new_folder
from fp8_nemo.schema import Recipe


def main(arguments: list[str] | None = None) -> int:
    """Write the checkpoint into the folder named first; 2 if the line is wrong."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if not words or "=" in words[0]:
            raise ComposeError(["recipes.make_model: the first argument is the folder to make"])
        [plan] = compose_plans([*words[1:], "backend=local", f"model.path={words[0]}"])
        recipe = plan.recipe
        problems = load_problems(recipe.data, recipe.seed).train
        folder = new_folder(Path(words[0]))
    except (ComposeError, DataError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    make(folder, recipe, problems)
    return 0


def make(folder: Path, recipe: Recipe, problems: list[Problem]) -> None:
    """Train with a progress bar, and save."""
    import torch
    from rich.progress import Progress

    from fp8_nemo.local import make_model

    chat = make_model.make_chat()
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = make_model.new_model(recipe.model.shape, chat, recipe.seed)
    how = make_model.teaching_for(problems)
    with Progress() as bar:
        task = bar.add_task(recipe.model.name, total=how.steps)

        def report(step: int, loss: float) -> None:
            bar.update(task, completed=step, description=f"{recipe.model.name} loss {loss:.3f}")

        make_model.train_model(model, chat, problems, teaching=how, seed=recipe.seed, report=report)
    make_model.save_model(model, chat, folder)
    print(f"{folder}: {recipe.model.name}, {model.num_parameters():,} parameters")


if __name__ == "__main__":
    raise SystemExit(main())
