"""Words, files and numbers that a user could give, drawn by Hypothesis."""

import dataclasses
import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import NamedTuple

import pytest
import yaml
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fp8_nemo.recipe.compose import option_names
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.plain import leaves

QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
GROUPS = ("model", "precision", "correction", "data", "grpo", "glue", "cluster", "experiment")
KEYS = sorted(leaves(dataclasses.asdict(Recipe())))
HARMLESS = st.characters(codec="utf-8", exclude_characters="\0")
TEXT = st.text(HARMLESS, max_size=12)
SYNTAX = st.text("${}[](),:='\"\\~+*@ \n\t-.a1", max_size=10)
NUMBERS = st.one_of(
    st.integers(-3, 200), st.integers(), st.floats(), st.sampled_from([0, 1, 2, 2**31, 10**30])
)


def few_or_many(few: int, many: int) -> pytest.MarkDecorator:
    """Give a test its `number` of examples: `few` in `make test`, `many` in `make test-long`."""
    return pytest.mark.parametrize("number", [few, pytest.param(many, marks=pytest.mark.long)])


def times(number: int) -> settings:
    """Draw so many examples: always the same ones in `make test`, where nobody looks for luck."""
    return settings(
        max_examples=number, deadline=None, database=None, derandomize=number <= 200,
        suppress_health_check=QUIET,
    )  # fmt: skip


def _option() -> st.SearchStrategy[str]:
    """A group's choice, right or nearly."""
    right = [f"{group}={name}" for group in GROUPS for name in option_names(group)]
    return st.sampled_from([*right, *(word[:-1] for word in right), "model/x=y"])


def _values() -> st.SearchStrategy[str]:
    return st.one_of(
        NUMBERS.map(str), TEXT, SYNTAX,
        st.sampled_from(["null", "true", "none", "", "[]", "{}", "[1,2]", "1,2", "range(1,4)",
                         "glob(*)", "choice(a,b)", "interval(1,2)", "${seed}", "${nowhere}",
                         "${oc.env:HOME}", "'a b'", "nan", "inf", "1e999", "0x10", "1_0", "~/x"]),
    )  # fmt: skip


OTHER_KEYS = ["nemo.grpo.x", "hydra.run.dir", "nemo", "defaults", "grpo", "model.shape"]
NEAR_KEYS = [f"{key}x" for key in KEYS]


def _setting() -> st.SearchStrategy[str]:
    known = st.sampled_from(KEYS)
    keys = st.one_of(
        known, known, st.sampled_from(NEAR_KEYS), st.sampled_from(OTHER_KEYS), TEXT, SYNTAX
    )
    prefix = st.sampled_from(["", "", "", "", "+", "++", "~"])
    return st.builds("{}{}={}".format, prefix, keys, _values())


FLAGS = st.sampled_from(["-m", "--keys", "-x", "--"])
WORDS = st.lists(st.one_of(_option(), _setting(), _setting(), FLAGS, TEXT), min_size=1, max_size=4)
"""Of a command line."""

INSIDE = TEXT.filter(lambda text: "/" not in text and not text.startswith((".", "~")))
OF_A_VERB = st.sampled_from(
    [
        "--html",
        "--cancel",
        "--reject",
        "0.02",
        "2",
        "--write",
        "my-bounds",
        "--mask",
        "mean-k3",
        "--calibrate",
        "--version",
        "-x",
        "--",
    ]
)
PATHS = st.one_of(st.sampled_from(["none", "none/there", "", "full"]), INSIDE)
VERB_WORDS = st.lists(st.one_of(PATHS, PATHS, OF_A_VERB, _option(), _setting()), max_size=5)
"""Of the verbs that take paths, none of them of a run or a model."""

TREES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT, st.dates()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(
                st.sampled_from([*KEYS, *(key.rpartition(".")[2] for key in KEYS), *GROUPS,
                                 "defaults", "name", "kind", "_self_", "<<"]),
                TEXT, st.integers(0, 3),
            ), inner, max_size=4,
        ),
    ), max_leaves=8,
)  # fmt: skip


def _dumped(tree: object) -> bytes:
    return yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass")


FILES = st.one_of(
    TREES.map(_dumped),
    TREES.map(lambda tree: b"# @package _global_\n" + _dumped(tree)),
    st.text("{}[]:-#&*!|>'\"%@ \n\tab1~?,", max_size=40).map(str.encode),
    st.binary(max_size=20),
    st.sampled_from([b"!!python/object/apply:os.getcwd []", b"a: &a [*a]", b"a: 1\na: 2", b"%TAG"]),
)
"""Of YAML, some of them none."""
OBJECTS = st.one_of(
    TREES.filter(lambda tree: "date" not in type(tree).__name__).map(
        lambda tree: json.dumps(tree, default=str, skipkeys=True).encode()
    ),
    st.binary(max_size=20),
)
"""Of JSON, some of them none."""


class Told(NamedTuple):
    """What a verb answered."""

    code: int | str | None
    out: str
    error: str


def call(main, words: list[str]) -> Told:
    """Call a verb's main in this process."""
    out, error = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(error):
        try:
            code = main(words)
        except SystemExit as stopped:  # as argparse ends it
            code = stopped.code
    return Told(code, out.getvalue(), error.getvalue())


def wrong_in(told: Told) -> str:
    """Say what is wrong with a refusal, which must be lines for people; nothing if it is right."""
    *lines, last = told.error.split("\n")
    found = {
        "its exit code": told.code != 2,
        "no end of a line": last != "",
        "no line, or an empty one": not (lines and all(lines)),
        "a character that no terminal shows": not "".join(lines).isprintable(),
        "a traceback": "Traceback" in told.error,
    }
    return ", ".join(name for name, wrong in found.items() if wrong)
