"""Compose the same words once a process: a test that plans would wait most for Hydra, 0.2 s.

Words that are new are composed by Hydra itself, of option files that are read once.
"""

import copy
from functools import wraps
from typing import Any

from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins

from fp8_nemo.recipe.compose import option_folder
from fp8_nemo.recipe.trees import Trees

kept = dict[tuple[Any, ...], Any]()


def keep(where: type, name: str, key_of: Any) -> None:
    """Make a method return a copy of what it returned for the same key."""
    found = getattr(where, name)

    @wraps(found)
    def again(self: Any, what: Any) -> Any:
        key = name, key_of(self, what)
        if key not in kept:
            kept[key] = found(self, what)
        return copy.deepcopy(kept[key])  # a recipe is made by taking its tree apart

    setattr(where, name, again)


def state_of(path: Any) -> tuple[Any, ...]:
    """Tell one state of a file from another."""
    state = path.stat()
    return path, state.st_mtime_ns, state.st_size


def words_of(trees: Trees, words: tuple[str, ...]) -> tuple[Any, ...]:
    """Tell words apart, and the states of all option files."""
    return trees._config, words, *map(state_of, sorted(option_folder("").rglob("*.yaml")))


Plugins.instance()  # Hydra names its sources of files then
Files = SourcesRegistry.instance().types["pkg"]
keep(Files, "_read_config", lambda source, file: (source.provider, state_of(file)))
keep(Trees, "_compose", words_of)
