"""Read the command line of `recipes.make_model`, and make its folder, without torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from fp8_nemo.nemo_config.keys import hydra_value
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.model import count
from fp8_nemo.recipe.compose import ComposeError, compose
from fp8_nemo.recipe.mistake import Mistake, verb_line
from fp8_nemo.recipe.options.recipe import Recipe

GROUPS = ("model", "data")
TAKES = re.compile(r"\+*(model|data|seed)\b")


MOST_PARAMETERS = 3 * 10**9
"""Of a model that is made: in FP32, with gradients and Adam's moments, 48 GB."""


def read_model_line(words: list[str]) -> tuple[Path, Recipe]:
    """Return the folder to make, and the recipe whose model, data and seed make it.

    Args:
        words: the folder, then overrides of the groups `model`, `data` and `seed`.

    Raises:
        ComposeError: the folder is missing, or an override is another's or impossible.
    """
    if not words or "=" in words[0] or words[0].startswith("-"):
        raise ComposeError([f"{verb_line('make_model')}: the first argument is the folder to make"])
    others = [word for word in words[1:] if not TAKES.match(word)]
    if others:
        raise ComposeError(f"{word}: a model is made of model, data, seed" for word in others)
    # A BF16 run of the model: what the model is made for does not bind how it is made.
    run = ["backend=local", "precision=bf16", f"model.path={hydra_value(words[0])}"]
    words = [*words, *run]
    if lines := [str(each) for recipe in compose(words[1:]) for each in _too_large(recipe)]:
        raise ComposeError(lines)
    [plan] = compose_plans(words[1:])
    return Path(words[0]), plan.recipe


def new_folder(path: Path) -> Path:
    """Make a folder for a result, if it is missing.

    Raises:
        OSError: it cannot be made, something lies in it, or another cannot take its place.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"{path}: cannot be made a folder ({error.strerror}); name another one"
        raise OSError(text) from error
    if any(path.iterdir()) or path.is_mount() or path.resolve() == Path.cwd():
        raise FileExistsError(f"{path}: is not a folder that is new, or empty; name another one")
    return path


def _too_large(recipe: Recipe) -> Iterator[Mistake]:
    parameters = count(recipe.model.shape, recipe.precision).parameters
    if parameters > MOST_PARAMETERS:
        text = f"has {parameters / 1e9:.1f} billion parameters, and 3 are the most that are made"
        remedy = "choose small-llama, or set model.shape.layers lower"
        yield Mistake("model", recipe.model.name, text, remedy)
