"""Read the words of a line by Hydra, and compose the cells of a sweep, each choice once.

What Hydra says of a word that it cannot read is its parser's; here it is said in our own words.
"""

from __future__ import annotations

import copy
import functools
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from fp8_nemo.recipe.mistake import as_typed
from fp8_nemo.recipe.plain import leaves
from fp8_nemo.recipe.secrets import OF_ENVIRONMENT, unparsed

PLAIN = (str, int, float, bool, type(None))
KEY = re.compile(r"[+~]{0,2}[\w$-]+([./@:][\w$-]+)*", re.ASCII)
PAIRS = {"(": ")", "[": "]", "{": "}"}
PLAIN_LETTER = re.compile(r"[\w ./:\\%@?*|+~$=,(){}'\"\[\]-]", re.ASCII)
QUOTE = "quote a value that holds = , : or brackets: \"key='a=b'\", \"key=['a=b']\""


class WordError(ValueError):
    """Report a word of a line that is no KEY=VALUE; one line."""


def read_word(
    parser: OverridesParser, text: str, options: Callable[[], Mapping[str, list[str]]]
) -> Override:
    """Read `KEY=VALUE`.

    Args:
        parser: Hydra's.
        text: the word.
        options: returns those of each group.

    Raises:
        WordError: with what is wrong, and what to write.
    """
    try:
        return parser.parse_override(text)
    except HydraException:
        raise WordError(unparsed(text, _why(text, options()))) from None


def _why(text: str, options: Mapping[str, list[str]]) -> str:
    key, equals, value = text.partition("=")
    plain = "".join(
        "-" if unicodedata.category(each) == "Pd" else unicodedata.normalize("NFKC", each)
        for each in text
    )
    function = re.fullmatch(r"(\w+)\((.*)\)", value)
    foreign = [each for each in text if not each.isascii()]
    if not equals:
        near = [f"{group}={text}" for group, names in options.items() if text in names]
        meant = near or [text.replace(":", "=", 1)] * (":" in text)
        return "it is no KEY=VALUE" + (f"; did you mean {meant[0]}?" if meant else "")
    if foreign and plain.isascii():
        return f"{foreign[0]} is not the character that it looks like; write {plain}"
    if not KEY.fullmatch(key):
        return "before = stands a key, of letters, digits, dots and underscores"
    if value.startswith("="):
        return f"it has two equals signs; write {key}={value.lstrip('=')}"
    if value.startswith("~"):
        return f'no shell puts a folder in the place of ~ there; write "{key}=$HOME{value[1:]}"'
    if any(not each.isprintable() for each in value):
        return f"it has a line break, or a character that cannot be seen; write {key}=..."
    if not value.strip(", ") or {value.strip()[0], value.strip()[-1]} & {","} or ",," in value:
        return "a value is missing beside a comma"
    if not _is_closed(value):
        return f"a quote or a bracket is not closed; {QUOTE}"
    if function and function[1] in ("range", "interval"):
        return f"{function[1]} takes numbers: {key}={function[1]}(1,4)"
    if function:
        return f"{function[1]}(...) is no list of values; write them with commas: {key}=a,b"
    odd = next((each for each in value if not PLAIN_LETTER.fullmatch(each)), "")
    if odd and "'" not in value:
        return f"{odd} can stand only in quotes: \"{key}='{value}'\""
    return QUOTE


def overruled(overrides: Iterable[Override], conf: Path, but: str) -> Iterator[str]:
    """Yield a note for each word of a line that wins over its experiment, its sweep or itself.

    Args:
        overrides: of the line, in its order.
        conf: folder of the groups.
        but: a key to which every word adds.
    """
    given: dict[str, list[str]] = {}
    for each in overrides:
        given.setdefault(each.key_or_group, []).append(each.get_value_string())
    for key, values in given.items():
        if len(values) > 1 and key != but:
            yield f"{key}: is on the line {len(values)} times; the last counts, {values[-1]}"
    for group in ("experiment", "sweep"):
        for name in given.get(group, [""])[-1].split(","):
            file = conf / group / f"{name}.yaml"
            said = _said(yaml.safe_load(file.read_text())) if file.is_file() else {}
            for key, value in said.items():
                if given.get(key, [value])[-1] != value:
                    won = f"the line wins over {group}={name}, which has {key}={value}"
                    yield f"{key}={given[key][-1]}: {won}"


def _said(file: Any) -> dict[str, str]:
    """Return what a file of options chooses: groups, keys, and a sweep's axes."""
    chosen = [each for each in (file or {}).get("defaults", []) if isinstance(each, dict)]
    groups = {key.removeprefix("override /"): name for each in chosen for key, name in each.items()}
    keys = leaves({key: value for key, value in (file or {}).items() if key != "defaults"})
    found = {key.removeprefix("hydra.sweeper.params."): value for key, value in keys.items()}
    return {key: as_typed(value) for key, value in (groups | found).items()}


def _is_closed(text: str) -> bool:
    """Tell whether each quote and bracket has its end, one inside the other."""
    bare, awaited = re.sub(r"'(\\.|[^'])*'|\"(\\.|[^\"])*\"", "", text), []
    for each in bare:
        if each in PAIRS:
            awaited.append(PAIRS[each])
        elif each in PAIRS.values() and (not awaited or awaited.pop() != each):
            return False
    return not awaited and "'" not in bare and '"' not in bare


class Trees:
    """Compose cells as plain nested data, once a process for all that choose the same options.

    Hydra takes 70 ms to read and merge the files; of a sweep over seeds or numbers, and of the
    lines that a plan or a comparison looks at, they are the same. A word that gives one known key
    a plain value is put in afterwards, which is what Hydra does, unless a file refers to other
    keys: then Hydra gets the whole cell.
    """

    def __init__(
        self, config: str, folder: Path, loader: ConfigLoader, keys: Mapping[str, bool]
    ) -> None:
        """Look at the files; what was composed of them as they are is known.

        Args:
            config: name of the configuration.
            folder: of its files.
            loader: Hydra's, for the values of words.
            keys: those that take a plain value, and whether it is a text: `12_3` is no number then.
        """
        self._keys = keys
        self._parser = OverridesParser.create(config_loader=loader)
        self._plain = functools.cache(self._plain_value)
        there = (path for path in sorted(folder.glob("**/*.yaml")) if path.exists())
        files = ((path, path.stat()) for path in there)
        seen = tuple((path, found.st_mtime_ns, found.st_size) for path, found in files)
        self._compose = functools.partial(_composed, config, seen)

    def of(self, cell: list[str]) -> Any:
        """Compose a cell.

        Raises:
            HydraException, OmegaConfBaseException, YAMLError, ValueError: as Hydra does.
        """
        values = {n: found for n, word in enumerate(cell) if (found := self._plain(word))}
        tree, refers = self._compose(tuple(w for n, w in enumerate(cell) if n not in values))
        tree = copy.deepcopy(self._compose(tuple(cell))[0] if refers else tree)
        for key, value in values.values():
            *groups, last = key.split(".")
            place = functools.reduce(lambda at, name: at.setdefault(name, {}), groups, tree)
            place[last] = value
        return tree

    def _plain_value(self, word: str) -> tuple[str, Any] | None:
        """Return key and value if a word gives a known key a plain value, else None."""
        override = self._parser.parse_override(word)
        if override.get_key_element() not in self._keys or "${" in word:  # `+key` is no such key
            return None
        value = override.value()
        if type(value) in (int, float) and self._keys[override.key_or_group]:
            value = word.partition("=")[2]
        return (override.key_or_group, value) if isinstance(value, PLAIN) else None


@functools.lru_cache(maxsize=1024)
def _composed(config: str, files: tuple[Any, ...], words: tuple[str, ...]) -> tuple[Any, bool]:
    """Return the tree of words, and whether a value in it refers to another key.

    What refers to the environment stays as it is written, to be refused by its key.

    Args:
        config: name of the configuration.
        files: each with its time and size, as they are now.
        words: of the line.
    """
    composed = hydra_compose(config, list(words))
    unread = OmegaConf.to_container(composed)
    if OF_ENVIRONMENT in str(unread):
        return unread, False
    read = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    return read, "${" in str(unread)


def first_line(error: Exception) -> str:
    """Say what Hydra or OmegaConf found, on one line; an interpolation in our own words."""
    said = " ".join(" ".join(str(error).split("\n")[:2]).split())
    said = said or f"a file of options cannot be read ({type(error).__name__})"
    if not (named := re.match(r"Interpolation key '(.*)' not found", said)):
        return said
    key = getattr(error, "full_key", "") or "a key"
    return (
        f"{key}: refers to {named[1]}, which is no key; for a shell's variable write $NAME, or "
        "\\${NAME}"
    )
