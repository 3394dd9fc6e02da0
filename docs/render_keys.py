"""Render docs/keys.md from the recipe's dataclasses, and docs/options.md from the files in conf/.

python docs/render_keys.py
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from fp8_nemo.recipe.compose import option_folder, option_names
from fp8_nemo.recipe.options.recipe import Recipe

HEAD = """# Every key

Rendered by `python docs/render_keys.py`; a test holds it to the code.

Choose [an option file](options.md) by its group's name (`precision=fp8-e2e`), or set one key
(`grpo.steps=100`). `null` inherits the value of NeMo RL's base YAML. NeMo RL's own keys follow
`+nemo.`: `+nemo.policy.train_micro_batch_size=2`. Your own option is a file in `conf/GROUP/`, and
its `name` becomes part of the run directory's name.
"""

OPTIONS = """# Every option

Rendered by `python docs/render_keys.py`; a test holds it to the files in `conf/`. [Keys](keys.md)
are on their own page.
"""
FOLDER = Path(__file__).parent


def meanings(group: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass, as one line."""
    body = ast.parse(inspect.getsource(group)).body[0].body  # type: ignore[attr-defined]
    found = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            found[field.target.id] = " ".join(text.value.value.split())  # type: ignore[union-attr, attr-defined]
    return found


def allowed(field: dataclasses.Field[Any], kind: str) -> str:
    """Return what a field takes, in words: `bf16, fp8`, `1 and more`."""
    if names := field.metadata.get("one_of"):
        return ", ".join(f"`{name}`" for name in names)
    words = {"least": "from", "above": "above", "most": "to"}
    limits = [(word, field.metadata.get(key)) for key, word in words.items()]
    return " ".join([kind, *(f"{word} {limit:,g}" for word, limit in limits if limit is not None)])


def rows(group: type, prefix: str) -> Iterator[str]:
    """Render one line of the table for each key of a dataclass and of those inside it."""
    said, kinds = meanings(group), get_type_hints(group)
    passed = [name for name, text in said.items() if text == f"`sbatch --{name}`."]
    for field in dataclasses.fields(group):
        if field.name in passed:  # one row for all of them
            if field.name == passed[0]:
                names = ", ".join(f"`{name}`" for name in passed[1:])
                yield f"| `{prefix}{field.name}`, {names} | str, null | As `sbatch` has them. |"
            continue
        kind = kinds[field.name]
        if dataclasses.is_dataclass(kind):
            yield from rows(kind, f"{prefix}{field.name}.")  # type: ignore[arg-type]
            continue
        if field.name == "name" and "short_name" in field.metadata:
            continue
        text = getattr(kind, "__name__", str(kind)) if isinstance(kind, type) else str(kind)
        text = text.replace(" | None", ", null").replace("dict[str, Any]", "keys")
        yield f"| `{prefix}{field.name}` | {allowed(field, text)} | {said[field.name]} |"


def option_rows(group: str) -> Iterator[str]:
    """Render one line for each option file of a group: its name and its first comment."""
    for name in option_names(group):
        text = (option_folder(group) / f"{name}.yaml").read_text()
        said = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")]
        first = next(each for each in said if not each.startswith(("@", "python")))
        yield f"| `{name}` | {first} |"


def defaults() -> dict[str, str]:
    """Return the option of each group that a line without options takes."""
    found = yaml.safe_load((option_folder("grpo").parent / "grpo.yaml").read_text())["defaults"]
    return {key: value for each in found if isinstance(each, dict) for key, value in each.items()}


def usual(group: str, chosen: dict[str, str]) -> str:
    """Say what a line without this group takes, and what it takes with a model that says so."""
    models = dict[str, list[str]]()
    for name in option_names("model"):
        text = (option_folder("model") / f"{name}.yaml").read_text()
        for each in yaml.safe_load(text).get("defaults", []):
            option = isinstance(each, dict) and each.get(f"override /{group}@_global_.{group}")
            models.setdefault(option or "", []).append(f"`{name}`")
    others = [f"`{key}` with {', '.join(names)}" for key, names in models.items() if key]
    return "; ".join([f"Default: `{group}={chosen[group]}`", *others]) + "."


def options_page() -> str:
    """Render the page of option files: groups, experiments, sweeps."""
    chosen, lines = defaults(), [OPTIONS]
    for group in dict.fromkeys((*get_type_hints(Recipe), *chosen)):
        if group not in chosen:
            continue
        said = [usual(group, chosen), ""] if chosen[group] else []
        lines += [f"## {group}", *said, "| option | is |", "|---|---|", *option_rows(group), ""]
    return "\n".join(lines)


def page() -> str:
    """Render the page of keys."""
    lines, chosen = [HEAD], defaults()
    recipe = get_type_hints(Recipe)
    lines += ["## Of the whole recipe", "| key | takes | what it does |", "|---|---|---|"]
    said = meanings(Recipe)
    for field in dataclasses.fields(Recipe):
        if not dataclasses.is_dataclass(recipe[field.name]):
            kind = "keys" if field.name == "nemo" else recipe[field.name].__name__
            lines.append(f"| `{field.name}` | {allowed(field, kind)} | {said[field.name]} |")
    for group, kind in recipe.items():
        if not dataclasses.is_dataclass(kind):
            continue
        words = [*(kind.__doc__ or "").split(), usual(group, chosen) if group in chosen else ""]
        lines += ["", f"## {group}", " ".join(words).rstrip(), ""]
        lines += ["| key | takes | what it does |", "|---|---|---|", *rows(kind, f"{group}.")]
    return "\n".join(lines) + "\n"


def pages() -> dict[str, str]:
    """Render both: file name to text."""
    return {"keys.md": page(), "options.md": options_page()}


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
