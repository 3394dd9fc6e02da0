"""Read which keys NeMo RL's configuration classes declare, and hold the user's own against them.

A base YAML is an example and lacks keys that NeMo RL reads; its TypedDicts and pydantic models are
the declaration. They are read by `ast`, so that nothing is imported. Types are written as NeMo RL
writes them: `int | None`, `'full' | 'selective'`. Without a checkout the keys of the plan and of
`keys.py` stand in.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from fp8_nemo.nemo_config.host import Host
from fp8_nemo.nemo_config.keys import ABSENT, OURS, PINNED, may_be_added
from fp8_nemo.nemo_config.own.loss import given_options
from fp8_nemo.nemo_config.seams import ENGINE, GRPO
from fp8_nemo.nemo_config.versions import Source
from fp8_nemo.recipe.checks import limit_mistakes
from fp8_nemo.recipe.mistake import Mistake
from fp8_nemo.recipe.options.model import Memory
from fp8_nemo.recipe.plain import to_json
from fp8_nemo.recipe.settled import LOGPROB_BATCH, MICRO_BATCH, SHARE, Settled

ROOTS = {"": (GRPO, "MasterConfig"), "policy.generation.": (f"{ENGINE}/config.py", "VllmConfig")}
"""Where the declaration begins: `MasterConfig` names the base class of every engine alone."""
KINDS = {
    **{name: name for name in ("int", "float", "bool", "str", "list", "dict", "Any")},
    **{"PositiveInt": "int", "NonNegativeInt": "int", "PositiveFloat": "float"},
}
"""What a name in an annotation means; another class is read, anything else is `Any`."""
OPTIONS = {each.name: each for each in fields(Memory)}
IN_PLACE_OF = {
    SHARE: OPTIONS["rollout_share"],
    MICRO_BATCH: OPTIONS["micro_batch"],
    LOGPROB_BATCH: OPTIONS["logprob_batch"],
}
"""Keys that a plan counts with as with an option of ours, whose limits are theirs too."""


def declared_keys(source: Source) -> dict[str, str]:
    """List the keys that a checkout declares: `{"policy.refit_buffer_size_gb": "float | int"}`."""
    found: dict[str, dict[str, None]] = {}
    for prefix, (file, name) in ROOTS.items():
        for key, kind in _of_class(source, file, source.named_class(file, name), prefix):
            found.setdefault(key, {})[kind] = None
    return {key: " | ".join(kinds) for key, kinds in found.items()}


def own_key_mistakes(settled: Settled, ours: Mapping[str, Any], host: Host) -> Iterator[Mistake]:
    """List what is wrong with the user's own keys of NeMo RL.

    Args:
        settled: the run's recipe, with the user's own keys.
        ours: every key that the plan writes, `{dotted key: value}`.
        host: the NeMo RL that declares the keys.
    """
    base, refused = settled.recipe.model.base_config or "", PINNED | ABSENT
    there = {**ours, **host.leaves(base)}
    known = {*host.declared, *OURS, *refused, *there}
    options = given_options(settled.recipe)
    for key, value in settled.own.items():
        named, kinds = f"nemo.{key}", host.declared.get(key)
        if option := OURS.get(key) or options.get(key, ("",))[0]:
            yield Mistake(named, value, f"is written by {option}", "set that instead")
        elif key in refused and value != refused[key][0]:
            allowed, reason = refused[key]
            yield Mistake(named, value, f"must be {to_json(allowed)}: {reason}")
        elif key not in known and not may_be_added(key, host.declared):
            near = difflib.get_close_matches(key, known, n=1)
            where = (
                f"no such key in {base}, and NeMo RL declares none"
                if host.bases is not None
                else "not one of the keys that are known without a checkout; set NEMO_RL_ROOT"
            )
            yield Mistake(named, value, where, f"did you mean nemo.{near[0]}?" if near else "")
        elif kinds and not fits(value, kinds):
            allowed = kinds.replace("None", "null").replace(" | ", " or ")
            yield Mistake(named, value, f"must be {allowed}, as NeMo RL declares it")
        elif not kinds and not _is_like(value, there.get(key)):
            kind = type(there[key]).__name__
            yield Mistake(named, value, f"must be of type {kind}, as {there[key]!r} is")
        elif key in IN_PLACE_OF:
            yield from limit_mistakes(named, value, IN_PLACE_OF[key].metadata)


def fits(value: Any, kinds: str) -> bool:
    """Return whether NeMo RL's models take a value: `fits(0.5, "int | None")` is false."""
    return any(_is_of(value, kind) for kind in kinds.split(" | "))


def _is_of(value: Any, kind: str) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match kind:
        case "Any":
            return True
        case "int":
            return is_number and float(value).is_integer()
        case "float":
            return is_number
        case "bool" | "str" | "list" | "dict":
            return type(value).__name__ == kind
        case _:
            return repr(value) == kind


def _is_like(value: Any, usual: Any) -> bool:
    """Return whether a value has the type of the YAML's own value; any two numbers match."""
    if usual is None or (isinstance(usual, str) and isinstance(value, str | None)):
        return True
    if isinstance(usual, bool) or isinstance(value, bool):
        return isinstance(usual, bool) and isinstance(value, bool)
    if isinstance(usual, int | float):
        return isinstance(value, int | float)
    return isinstance(value, type(usual)) or value is None


def _of_class(source: Source, file: str, node: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield each key below a configuration class, with one kind of value that it takes."""
    for base in getattr(node, "bases", ()):
        if isinstance(base, ast.Name):
            where, found = _defined(source, file, base.id)
            yield from _of_class(source, where, found, prefix)
    for field in getattr(node, "body", ()):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if field.target.id.startswith("_"):  # NeMo RL's own, not for users
            continue
        key = prefix + field.target.id
        for where, kind in _kinds(source, file, field.annotation):
            if isinstance(kind, str):
                yield key, kind
            else:
                yield from _of_class(source, where, kind, f"{key}.")


def _kinds(
    source: Source, file: str, annotation: ast.AST
) -> Iterator[tuple[str, str | ast.ClassDef]]:
    """Yield what an annotation allows: the name of a kind, a literal, or a class and its file."""

    def each_of(*nodes: ast.AST) -> Iterator[tuple[str, str | ast.ClassDef]]:
        for node in nodes:
            yield from _kinds(source, file, node)

    match annotation:
        case ast.Constant(value=str() as text):
            yield from each_of(ast.parse(text, mode="eval").body)
        case ast.Constant(value=None):
            yield file, "None"
        case ast.BinOp(left=left, right=right):
            yield from each_of(left, right)
        case ast.Subscript(value=ast.Name(id="NotRequired" | "Union"), slice=ast.Tuple(elts=parts)):
            yield from each_of(*parts)
        case ast.Subscript(value=ast.Name(id="NotRequired"), slice=inner):
            yield from each_of(inner)
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[inner, *_])):
            yield from each_of(inner)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            yield from each_of(inner, ast.Constant(None))
        case ast.Subscript(value=ast.Name(id="Literal"), slice=inner):
            for each in inner.elts if isinstance(inner, ast.Tuple) else [inner]:
                text = ast.unparse(each)
                yield file, "bool" if text in ("True", "False") else text
        case ast.Subscript(value=ast.Name() as name) | (ast.Name() as name):
            if name.id in KINDS:
                yield file, KINDS[name.id]
                return
            where, found = _defined(source, file, name.id)
            if isinstance(found, ast.ClassDef):
                yield where, found
            else:
                yield from _kinds(source, where, found)
        case _:
            yield file, "Any"


def _defined(source: Source, file: str, name: str) -> tuple[str, ast.AST]:
    """Find a class, or what a name stands for, and its file; an empty tree if NeMo RL has none."""
    for node in source.tree(file).body:
        match node:
            case ast.ClassDef(name=found) if found == name:
                return file, node
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                return file, value
            case ast.ImportFrom(module=str() as module, names=names) if any(
                name == (each.asname or each.name) for each in names
            ):
                original = next(each.name for each in names if name == (each.asname or each.name))
                path = module.replace(".", "/")
                is_file = (source.root / f"{path}.py").is_file()
                return _defined(
                    source, f"{path}.py" if is_file else f"{path}/__init__.py", original
                )
    return file, ast.Module([], [])
