"""Compose the same words once a process: a test that plans would wait most for Hydra, 0.15 s."""

import copy
from functools import cache
from typing import Any

from fp8_nemo.recipe import compose
from fp8_nemo.recipe.trees import Trees

Files = tuple[tuple[str, int, int], ...]
composed_by_hydra = Trees._compose


def option_files() -> Files:
    """Return every option file with its time and size: a test may change one, or all."""
    found = sorted(compose.option_folder("").rglob("*.yaml"))
    return tuple((str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in found)


@cache
def composed_once(config: str, words: tuple[str, ...], files: Files) -> tuple[Any, bool]:
    """Return what Hydra makes of words while the option files stay as they are."""
    trees = Trees.__new__(Trees)
    trees._config = config
    return composed_by_hydra(trees, words)


def composed(trees: Trees, words: tuple[str, ...]) -> tuple[Any, bool]:
    """Return a copy of that, since a recipe is made by taking its tree apart."""
    return copy.deepcopy(composed_once(trees._config, words, option_files()))


Trees._compose = composed
