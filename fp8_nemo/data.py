"""Problems with verifiable answers, made here or read from JSONL.

`{"input": "37+48", "output": "85"}` a line, as NeMo RL's ResponseDataset reads it. Free of torch,
so that a broken line is refused before anything is loaded.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import NamedTuple

from fp8_nemo.schema import Data

HELD_OUT_PAIRS = 256
TRAIN_FILE, VALIDATION_FILE = "train.jsonl", "validation.jsonl"
MOST_PAIRS = 20_000


class Problem(NamedTuple):
    """One problem: `Problem("37+48", "85")`."""

    input: str
    output: str


class Split(NamedTuple):
    """Problems to train on, and held-out ones that training never sees."""

    train: list[Problem]
    validation: list[Problem]


class DataError(ValueError):
    """Data that cannot be used; names file and line."""


def load_problems(data: Data, seed: int) -> Split:
    """The problems of a recipe: `arithmetic` is made, `jsonl` is read.

    Raises:
        DataError: a file is missing, empty or broken.
    """
    if data.name == "arithmetic":
        assert data.difficulty is not None, "the plan fills it in"
        return arithmetic(data.difficulty, seed)
    folder = Path(data.path or "")
    return Split(read_jsonl(folder / TRAIN_FILE), read_jsonl(folder / VALIDATION_FILE))


def arithmetic(difficulty: int, seed: int) -> Split:
    """Sums and differences of two numbers of up to `difficulty` digits, no result below zero.

    The split is by pair of numbers (`3+8`, `8+3` and `8-3` stay together) and the same for every
    seed: what is held out from a starting model is held out from every run that starts from it. The
    seed orders the problems to train on.
    """
    pairs = _number_pairs(difficulty)
    held_out = min(HELD_OUT_PAIRS, len(pairs) // 5)
    validation = [problem for pair in pairs[:held_out] for problem in _problems_of(*pair)]
    train = [problem for pair in pairs[held_out:] for problem in _problems_of(*pair)]
    random.Random(seed).shuffle(train)
    return Split(train, validation)


def read_jsonl(path: Path) -> list[Problem]:
    """Problems of a file.

    Raises:
        DataError: naming the file, and the line that is broken.
    """
    try:
        text = path.read_text(encoding="utf-8-sig").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if not text.strip():
        raise DataError(f"{path}: holds no problem")
    lines = enumerate(text.split("\n"), start=1)  # splitlines would split texts at U+2028 too
    return [_parse(line, f"{path}:{number}") for number, line in lines]


def write_problems(folder: Path, split: Split) -> None:
    """Write train.jsonl and validation.jsonl, as NeMo RL and `data=jsonl` read them."""
    for name, problems in zip((TRAIN_FILE, VALIDATION_FILE), split, strict=True):
        lines = [json.dumps(problem._asdict()) + "\n" for problem in problems]
        (folder / name).write_text("".join(lines), encoding="utf-8")


def reward(answer: str, problem: Problem) -> float:
    """1 if the answer is the problem's output, apart from surrounding blanks, else 0."""
    return float(answer.strip() == problem.output.strip())


def _number_pairs(difficulty: int) -> list[tuple[int, int]]:
    """Distinct pairs, the larger number first, in a fixed random order; a sample where many."""
    limit = 10**difficulty
    draw = random.Random(difficulty)
    if limit**2 <= MOST_PAIRS:
        pairs = [(large, small) for large in range(limit) for small in range(large + 1)]
        draw.shuffle(pairs)
        return pairs
    drawn = (divmod(index, limit) for index in draw.sample(range(limit**2), MOST_PAIRS))
    return list(dict.fromkeys((max(pair), min(pair)) for pair in drawn))


def _problems_of(large: int, small: int) -> list[Problem]:
    total, difference = str(large + small), str(large - small)
    sums = dict.fromkeys([f"{large}+{small}", f"{small}+{large}"])
    return [*(Problem(text, total) for text in sums), Problem(f"{large}-{small}", difference)]


def _parse(line: str, where: str) -> Problem:
    try:
        fields = json.loads(line)
        problem = Problem(fields["input"], fields["output"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f'{where}: not an object with "input" and "output" ({error!r})') from error
    if not all(isinstance(text, str) and text for text in problem):
        raise DataError(f'{where}: "input" and "output" must be texts, not empty')
    return problem
