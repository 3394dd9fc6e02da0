"""Compose the cells of a sweep by Hydra, each choice of options once."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

from hydra import compose as hydra_compose
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from fp8_nemo.recipe.secrets import OF_ENVIRONMENT

PLAIN = (str, int, float, bool, type(None))


class Trees:
    """Compose cells as plain nested data, once for all cells that choose the same options.

    Hydra takes 70 ms to read and merge the files; of a sweep over seeds or numbers they are the
    same. A word that gives one known key a plain value is put in afterwards, which is what Hydra
    does, unless a file refers to other keys: then Hydra gets the whole cell.
    """

    def __init__(self, config: str, loader: ConfigLoader, keys: Mapping[str, bool]) -> None:
        """Begin with none.

        Args:
            config: name of the configuration.
            loader: Hydra's, for the values of words.
            keys: those that take a plain value, and whether it is a text: `12_3` is no number then.
        """
        self._config, self._keys = config, keys
        self._parser = OverridesParser.create(config_loader=loader)
        self._plain = functools.cache(self._plain_value)
        self._trees = functools.cache(self._compose)

    def of(self, cell: list[str]) -> Any:
        """Compose a cell.

        Raises:
            HydraException, OmegaConfBaseException, YAMLError, ValueError: as Hydra does.
        """
        values = {n: found for n, word in enumerate(cell) if (found := self._plain(word))}
        tree, refers = self._trees(tuple(w for n, w in enumerate(cell) if n not in values))
        tree = self._compose(tuple(cell))[0] if refers else copy.deepcopy(tree)
        for key, value in values.values():
            *groups, last = key.split(".")
            place = functools.reduce(lambda at, name: at.setdefault(name, {}), groups, tree)
            place[last] = value
        return tree

    def _compose(self, words: tuple[str, ...]) -> tuple[Any, bool]:
        """Return the tree of words, and whether a value in it refers to another key.

        What refers to the environment stays as it is written, to be refused by its key.
        """
        composed = hydra_compose(self._config, list(words))
        unread = OmegaConf.to_container(composed)
        if OF_ENVIRONMENT in str(unread):
            return unread, False
        read = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        return read, "${" in str(unread)

    def _plain_value(self, word: str) -> tuple[str, Any] | None:
        """Return key and value of a word that gives a known key a plain value; None of another."""
        override = self._parser.parse_override(word)
        if override.get_key_element() not in self._keys or "${" in word:  # `+key` is no such key
            return None
        value = override.value()
        if type(value) in (int, float) and self._keys[override.key_or_group]:
            value = word.partition("=")[2]
        return (override.key_or_group, value) if isinstance(value, PLAIN) else None
