"""Turn a command line into valid Recipes, all or none. Hydra is known here and in `trees.py`.

Hydra collects: groups, overrides, sweeps. It writes nothing and starts nothing; its files would
hold secrets, and would exist before a mistake could be refused. Every cell is composed and
validated here, before a directory, a job or a GPU is touched, because Hydra's own sweeper composes
lazily: a file edited while job 0 runs would change job 1.

The composed tree is merged again, leaf by leaf, into the structured Recipe, so that an unknown key
is found wherever it came from: command line, `+key`, `++key`, experiment file. Only `nemo` is open.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import itertools
import math
import os
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib import resources
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fp8_nemo.recipe.checks import mistakes
from fp8_nemo.recipe.mistake import Mistake, printable
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.own.cluster import with_interpreter
from fp8_nemo.recipe.own.model import ModelError, read_shape
from fp8_nemo.recipe.plain import escape_interpolation, leaves
from fp8_nemo.recipe.secrets import secrets_of, secrets_of_line
from fp8_nemo.recipe.trees import Trees, WordError, first_line, overruled, read_word

MODULE, CONFIG = "fp8_nemo.conf", "grpo"
MULTIRUN = ("-m", "--multirun")
SET_AGAIN = "cluster"
"""The group that a line may end with: `cluster=here` takes a job's line to this machine."""
MOST_CELLS = 10_000
"""Cells of a line, and values of one of its lists; each becomes a recipe, in memory."""
OPEN = "nemo"
ADDED = "cluster.extra"
"""A list to which a line adds, where Hydra would replace the one of the site's file."""
SLURM_WORDS = ("cluster.time", "cluster.account", "cluster.partition", "cluster.qos")
WRONG_KIND = (ValueError, TypeError, AttributeError, AssertionError, RecursionError)
UNREADABLE = (*WRONG_KIND, OSError, YAMLError)
"""What Hydra raises of a file whose `defaults` is no list, that is not UTF-8, or names itself."""
UNREAD = HydraException, OmegaConfBaseException, *UNREADABLE
WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a word",
    list: "a list: [a,b]",
    dict: "keys of its own: +nemo.grpo.x=1",
}


class ComposeError(ValueError):
    """Report a command line that no run may start from; one line per distinct mistake."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = list(dict.fromkeys(map(printable, lines)))
        super().__init__("\n".join(self.lines))


class Cell(NamedTuple):
    """Pair one cell's overrides with its recipe: `Cell(["precision=bf16", "seed=1"], recipe)`."""

    words: list[str]
    recipe: Recipe
    notes: tuple[str, ...] = ()
    """What the line overrules, in a file that it chose or in itself."""


def compose(arguments: Iterable[str]) -> list[Recipe]:
    """Return every recipe that a command line asks for: one, or with `-m` one per cell.

    Args:
        arguments: Hydra overrides (`precision=fp8-linear`, `grpo.steps=50`, `+nemo.grpo.x=1`) and
            `-m` for a sweep; `sweep=NAME` names a file of cells.

    Raises:
        ComposeError: with one line per distinct mistake in any cell.
    """
    return [cell.recipe for cell in compose_cells(arguments)]


def choices(groups: Collection[str] = ()) -> str:
    """Say what a command line may hold: groups with their options, keys, sweeps.

    Args:
        groups: those to list, of a verb that makes no run; all unless given.
    """
    of_runs = () if groups else (
        "+nemo.KEY=VALUE: a key of NeMo RL's own.",
        "-m with several values, as precision=bf16,fp8-e2e: a run for each combination.",
    )  # fmt: skip
    groups = groups or group_names()
    wide = max(map(len, groups)) + 2
    options = (f"  {group:{wide}}{' '.join(option_names(group))}" for group in groups)
    indent = " " * (wide + 2)
    listed = [fill(each, 78, subsequent_indent=indent, break_on_hyphens=False) for each in options]
    return "\n".join([
        "GROUP=OPTION, of these:",
        *listed,
        f"KEY=VALUE, as {'grpo.steps=50' if of_runs else 'seed=7'}: docs/keys.md lists every key.",
        *of_runs,
    ])  # fmt: skip


def option_folder(group: str) -> Path:
    """Return where a group's options stand: `conf/GROUP` of the clone, or as it was installed."""
    return Path(str(resources.files(MODULE))) / group


def group_names() -> list[str]:
    """Return the groups of options."""
    folders = option_folder("").iterdir()
    return sorted(each.name for each in folders if any(each.glob("*.yaml")))


def option_names(group: str) -> list[str]:
    """Return the options of a group, a site's own included."""
    return sorted(path.stem for path in option_folder(group).glob("*.yaml"))


def read_options(group: str) -> dict[str, Any]:
    """Read each option of a group by itself, with the files that it builds on.

    One that cannot be read, a site's own perhaps, is left out: who chooses it is told.
    """
    names, found = option_names(group), dict[str, Any]()
    with initialize_config_module(MODULE, version_base="1.3"):
        with suppress(*UNREAD):
            return _together(group, names)
        for name in names:
            with suppress(*UNREAD):
                found |= _together(group, [name])
    return found


def _together(group: str, names: list[str]) -> dict[str, Any]:
    """Read options in one composition, which takes Hydra as long as that of one."""
    tree = hydra_compose(overrides=[f"+{group}@_{n}={name}" for n, name in enumerate(names)])
    held = [OmegaConf.merge(_structured()[group], tree[f"_{n}"]) for n in range(len(names))]
    return dict(zip(names, map(OmegaConf.to_object, held), strict=True))


def compose_cells(arguments: Iterable[str]) -> list[Cell]:
    """Compose every cell of a command line; raises as `compose`."""
    arguments = list(arguments)
    if found := [*secrets_of_line(arguments)]:
        raise ComposeError(found)
    flags = [each for each in arguments if each.startswith("-")]
    if unknown := [flag for flag in flags if flag not in MULTIRUN]:
        raise ComposeError(f"{flag}: unknown flag; --help lists them" for flag in unknown)
    texts = [each for each in arguments if each not in flags]
    with initialize_config_module(MODULE, version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        overrides = _parse(texts, loader)
        _refuse_repeated(overrides, multirun=bool(flags))
        swept = _sweep_of(overrides, loader)
        cells = _cells(overrides + swept, multirun=bool(flags or swept))
        trees = Trees(CONFIG, option_folder(""), loader, _plain_keys())
        composed = [_recipe_of(cell, trees) for cell in cells]
    refuse_cells(cells, [found for _, found in composed])
    notes = (*overruled(overrides, option_folder(""), but=ADDED),)
    both = zip(cells, composed, strict=True)
    return [Cell(cell, recipe, notes) for cell, (recipe, _) in both if recipe]


def _parse(texts: list[str], loader: ConfigLoader) -> list[Override]:
    parser = OverridesParser.create(config_loader=loader)

    def options() -> dict[str, list[str]]:
        return {group: option_names(group) for group in group_names()}

    overrides, lines = list[Override](), list[str]()
    for text in texts:
        try:
            override = read_word(parser, text, options)
        except WordError as error:
            lines.append(str(error))
            continue
        override.config_loader = loader  # `glob` asks it for the options
        overrides.append(override)
        lines += [str(mistake) for mistake in _override_mistakes(override)]
    if lines:
        raise ComposeError(lines)
    return [each for each in overrides if not _chooses_nothing(each)]


def _chooses_nothing(override: Override) -> bool:
    """Return whether a word is `experiment=null`, the default; Hydra takes no null for a group."""
    chosen = override.key_or_group in ("experiment", "sweep") and not override.is_sweep_override()
    return chosen and override.value() is None


def _refuse_repeated(overrides: list[Override], *, multirun: bool) -> None:
    """Refuse two options of a group: an axis is meant, or a slip; Hydra would take the last."""
    by_key: dict[str, list[str]] = {}
    groups = {*group_names()} - {SET_AGAIN}
    for each in overrides:
        if each.key_or_group in groups:
            by_key.setdefault(each.key_or_group, []).append(each.get_value_string())
    lines = [
        f"{key}={values[-1]}: is on the line {len(values)} times; "
        + (f"write {key}={','.join(values)}" if multirun else "leave one")
        for key, values in by_key.items()
        if len(values) > 1
    ]
    if lines:
        raise ComposeError(lines)


def _override_mistakes(override: Override) -> Iterator[Mistake]:
    """Yield what Hydra says less clearly, or only of the first mistake, or not at all."""
    key, typed = override.key_or_group, override.get_key_element()
    if override.is_delete():
        yield Mistake(typed, "", "nothing can be deleted, every key has a value")
        return
    value, adds = override.get_value_string(), override.is_add() or override.is_force_add()
    groups = group_names()
    if key in groups:
        if adds:
            yield Mistake(typed, value, f"{key} is always there", f"write {key}=...")
        yield from _option_mistakes(override)
    elif key.split(".")[0] == "hydra":
        yield Mistake(typed, value, "Hydra only composes here", "set outputs=FOLDER")
    elif key not in _fields() and not key.startswith(OPEN + "."):
        yield _unknown_key(typed, value, [*_fields(), *groups])
    elif key.startswith(OPEN + ".") and not adds:
        yield Mistake(key, value, "nemo starts empty", f"write +{key}=...")


def _option_mistakes(override: Override) -> Iterator[Mistake]:
    group = override.key_or_group
    if override.is_sweep_override() and not override.is_discrete_sweep():
        return  # an interval, which `_cells` refuses
    options = option_names(group)
    values = _swept(override) if override.is_sweep_override() else [override.value()]
    for value in values:
        if value is None and group in ("experiment", "sweep"):
            continue
        if str(value) not in options:
            near = difflib.get_close_matches(str(value).lower(), options, n=1)
            site = f"describe yours in conf/cluster/{value}.yaml (docs/cluster.md, step 2)"
            remedy = f"did you mean {near[0]}?" if near else site if group == "cluster" else ""
            yield Mistake(group, value, "must be one of " + ", ".join(options), remedy)


def _sweep_of(overrides: list[Override], loader: ConfigLoader) -> list[Override]:
    """Return the axes of the chosen sweep file, less those that the command line sets itself."""
    chosen = [str(each.input_line) for each in overrides if each.key_or_group == "sweep"]
    if not chosen:
        return []
    if len(chosen) > 1 or "," in chosen[0]:
        raise ComposeError([f"{', '.join(chosen)}: one sweep at a time"])
    try:
        found = hydra_compose(CONFIG, chosen, return_hydra_config=True)
    except UNREAD as error:
        raise ComposeError([f"{chosen[0]}: {first_line(error)}"]) from error
    params = found.hydra.sweeper.params or {}
    typed = {each.key_or_group for each in overrides}
    return _parse([f"{key}={value}" for key, value in params.items() if key not in typed], loader)


def _swept(override: Override) -> list[str]:
    values = [*itertools.islice(override.sweep_string_iterator(), MOST_CELLS + 1)]
    if len(values) > MOST_CELLS:
        raise ComposeError([f"{override.input_line}: more than {MOST_CELLS} values"])
    return values


def _cells(overrides: list[Override], multirun: bool) -> list[list[str]]:
    axes: list[list[str]] = []
    for override in overrides:
        if not override.is_sweep_override():
            axes.append([str(override.input_line)])
        elif not override.is_discrete_sweep():
            text = "an interval has no list of values; name them"
            raise ComposeError([f"{override.input_line}: {text}"])
        elif not multirun:
            text = "several values; add -m to sweep over them"
            raise ComposeError([f"{override.input_line}: {text}"])
        else:
            key = override.get_key_element()
            axes.append([f"{key}={value}" for value in _swept(override)])
    if (count := math.prod(map(len, axes))) > MOST_CELLS:
        swept = [str(each.input_line) for each in overrides if each.is_sweep_override()]
        raise ComposeError([f"{', '.join(swept)}: {count} cells, at most {MOST_CELLS}"])
    cells = [list(cell) for cell in itertools.product(*axes)]
    if not cells:
        empty = [each.input_line for each in overrides if each.is_sweep_override()]
        raise ComposeError([f"{', '.join(map(str, empty))}: no cell matches"])
    return cells


def _recipe_of(cell: list[str], trees: Trees) -> tuple[Recipe | None, list[str]]:
    beside = "of_the_line"
    try:
        if found := [*secrets_of_line(cell)]:
            return None, found
        tree = trees.of([_renamed(word, ADDED, f"+{beside}_{n}") for n, word in enumerate(cell)])
        if found := [*secrets_of(leaves(tree))]:
            return None, found
    except (HydraException, OmegaConfBaseException) as error:
        return None, [first_line(error)]
    except YAMLError as error:  # in a site's own file, which it names with line and column
        return None, [" ".join(str(error).split())]
    except UNREADABLE as error:
        return None, [f"{' '.join(cell)}: cannot be composed, {first_line(error)}"]
    group, _, key = ADDED.partition(".")
    for name in (f"{beside}_{n}" for n in range(len(cell)) if f"{beside}_{n}" in tree):
        own, more = tree[group][key], tree.pop(name)
        tree[group][key] = own + more if isinstance(own, list) and isinstance(more, list) else more
    config = copy.deepcopy(_structured())
    values = leaves(tree | {OPEN: {}}) | {OPEN: tree[OPEN]}
    found = [str(each) for key, value in values.items() if (each := _put(config, key, value))]
    found += map(str, _unquoted(values, cell))
    if found:
        return None, found
    recipe = OmegaConf.to_object(config)
    assert isinstance(recipe, Recipe)
    try:
        cluster = with_interpreter(recipe.cluster, os.environ)
        recipe = dataclasses.replace(recipe, cluster=cluster, model=read_shape(recipe.model, cell))
    except ModelError as error:
        return None, [str(error)]
    return recipe, [str(each) for each in mistakes(recipe)]


def _renamed(word: str, key: str, other: str) -> str:
    """Turn a word that sets a key into one that adds another key; leave any other as it is."""
    name, equals, value = word.partition("=")
    return f"{other}{equals}{value}" if name.lstrip("+") == key else word


def _unquoted(values: Mapping[str, Any], cell: list[str]) -> Iterator[Mistake]:
    """Yield Slurm's words that a file has unquoted: YAML reads 30:00 as 1800, 0123 as 83."""
    typed = {word.partition("=")[0].lstrip("+") for word in cell}
    for key in SLURM_WORDS:
        value = values.get(key)
        if value is not None and not isinstance(value, str) and key not in typed:
            text = "is what YAML makes of a text without quotes in the site's file"
            yield Mistake(key, value, text, f'write {key.partition(".")[2]}: "..." there')


def _put(config: Any, key: str, value: Any) -> Mistake | None:
    """Set one leaf of the structured Recipe, or say why it cannot be."""
    held = _defaults()
    if key in held and (type(held[key]), held[key]) == (type(value), value):
        return None  # it is set
    try:
        OmegaConf.update(config, key, escape_interpolation(value), force_add=key.startswith(OPEN))
    except OmegaConfBaseException:
        if key not in _fields():  # or a map was given for a number
            return _unknown_key(key, value, _fields())
        return Mistake(key, value, f"must be {_type_word(key)}")
    return None


def refuse_cells(cells: list[list[str]], found: list[list[str]]) -> None:
    """Raise every cell's mistakes; name the cell of one that not every cell makes.

    Args:
        cells: overrides of each cell.
        found: lines on each.

    Raises:
        ComposeError: there is a line.
    """
    shared = set(found[0]).intersection(*found[1:])
    lines = [
        line if line in shared else f"{line} (cell {' '.join(cell)})"
        for cell, each in zip(cells, found, strict=True)
        for line in each
    ]
    if lines:
        raise ComposeError(lines)


def _unknown_key(key: str, value: Any, known: Collection[str]) -> Mistake:
    bare = key.lstrip("+")
    near = difflib.get_close_matches(bare, known, n=1) or [
        each for each in known if each.rpartition(".")[2] == bare.rpartition(".")[2]
    ]
    text = "conf/grpo.yaml and its groups' files have all keys; NeMo RL's own go under nemo"
    return Mistake(key, value, "no such key", f"did you mean {near[0]}?" if near else text)


def _plain_keys() -> dict[str, bool]:
    """Name the keys that are neither groups nor open, and say whether each is a text."""
    texts = (str, str | None)
    plain = {key: hint for key, hint in _fields().items() if not dataclasses.is_dataclass(hint)}
    return {key: hint in texts for key, hint in plain.items() if key != OPEN}


def _type_word(key: str) -> str:
    hint = _fields()[key]
    optional = type(None) in typing.get_args(hint)
    kind = typing.get_args(hint)[0] if optional else hint
    if dataclasses.is_dataclass(kind):
        return "a group of keys"
    return WORDS[typing.get_origin(kind) or kind] + (" or null" if optional else "")


@cache
def _structured() -> Any:
    """Return the Recipe as OmegaConf has it, with its defaults."""
    return OmegaConf.structured(Recipe)


@cache
def _defaults() -> dict[str, Any]:
    """Return the Recipe's defaults by dotted key."""
    plain: Any = OmegaConf.to_container(_structured())
    return leaves(plain)


@cache
def _fields(group: type = Recipe, prefix: str = "") -> dict[str, Any]:
    """Return every dotted key of the Recipe with its type."""
    known: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(group).items():
        known[prefix + name] = hint
        if dataclasses.is_dataclass(hint):
            known |= _fields(typing.cast(type, hint), f"{prefix}{name}.")
    return known
