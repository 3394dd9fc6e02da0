"""Make problems with verifiable answers, or read them from JSONL.

`{"input": "37+48", "output": "85"}` a line, as NeMo RL's ResponseDataset reads it. Free of torch,
so that a broken line is refused before anything is loaded.

`arithmetic` is answered in one number. `running-sum` is answered by written-out working, a
scratchpad (Nye et al., arXiv 2112.00114), for rollouts of several hundred tokens:

    38+17+92  ->  38+17=55
                  55+92=147

Its last result is rewarded, the one that NeMo RL's math_verify takes too (tests/nemo).
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from fp8_nemo.recipe.options.training import Data
from fp8_nemo.recipe.plain import bytes_of, to_json

HELD_OUT_PAIRS = 256
HELD_OUT_SUMS = 256
TRAIN_FILE, VALIDATION_FILE = "train.jsonl", "validation.jsonl"
MOST_PAIRS = 20_000
SUMS = 20_000
NUMBERS = range(10, 100)
"""That a running sum adds up, each at most once: the next one is found by the last one."""

RESULT = re.compile(r"(?:=|^)\s*([0-9]+)\s*$", re.MULTILINE)
"""A number that ends its line, after an equals sign or alone."""


class Problem(NamedTuple):
    """Hold one problem: `Problem("37+48", "85")`."""

    input: str
    output: str
    working: str = ""
    """The whole right answer, where it is more than the output: `"38+17=55\\n55+92=147"`."""


class Split(NamedTuple):
    """Hold problems to train on, and held-out ones that training never sees."""

    train: list[Problem]
    validation: list[Problem]


class DataError(ValueError):
    """Report data that cannot be used; name file and line."""


def load_problems(data: Data, seed: int) -> Split:
    """Load a recipe's problems: `arithmetic` and `running-sum` are made, `jsonl` is read.

    The seed orders those to train on, a file's too, as NeMo RL shuffles them (`data.shuffle`): a
    file may be sorted, and a run seldom sees all of it.

    Raises:
        DataError: a file is missing, empty or broken.
    """
    if data.is_made:
        return MAKERS[data.name](data.level, seed)
    train, validation = _read(data)
    random.Random(seed).shuffle(train)
    return Split(train, validation)


def problems_digest(data: Data, seed: int) -> str:
    """Return the digest of the problems in training order; a file's in file order.

    NeMo RL shuffles a file's problems only later.

    Raises:
        DataError: as `load_problems`.
    """
    problems = load_problems(data, seed) if data.is_made else _read(data)
    return hashlib.sha256(repr(problems).encode()).hexdigest()[:12]


def _read(data: Data) -> Split:
    folder = Path(data.path or "")
    return Split(*(read_jsonl(folder / name) for name in (TRAIN_FILE, VALIDATION_FILE)))


def arithmetic(difficulty: int, seed: int) -> Split:
    """Make sums and differences of two numbers of up to `difficulty` digits, none below zero.

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


def running_sum(difficulty: int, seed: int) -> Split:
    """Make sums of `difficulty` different two-digit numbers, a line of working an addition.

    The split is by set of numbers and the same for every seed. The seed draws the problems to train
    on, some of them twice where there are few (`difficulty` below 4).
    """
    draw, held_out = random.Random(difficulty), {}
    while len(held_out) < HELD_OUT_SUMS:
        numbers = draw.sample(NUMBERS, difficulty)
        held_out.setdefault(frozenset(numbers), numbers)
    draw, train = random.Random(seed), []
    while len(train) < SUMS:
        numbers = draw.sample(NUMBERS, difficulty)
        if frozenset(numbers) not in held_out:
            train.append(_sum_of(numbers))
    return Split(train, [_sum_of(numbers) for numbers in held_out.values()])


def working(numbers: Sequence[int], slip: Callable[[int], int] = lambda result: result) -> str:
    """Write a running sum, one line an addition, as `Problem.working` has it.

    Args:
        numbers: two or more.
        slip: what is written for a right result; the lines that follow go on from it.
    """
    total, lines = numbers[0], []
    for number in numbers[1:]:
        result = slip(total + number)
        lines.append(f"{total}+{number}={result}")
        total = result
    return "\n".join(lines)


def longest_answer(data: Data) -> int:
    """Return the characters of the longest right answer of made problems, its end included."""
    if data.name == "arithmetic":
        return data.level + 2
    return len(working(sorted(NUMBERS, reverse=True)[: data.level])) + 1


MAKERS: dict[str, Callable[[int, int], Split]] = {
    "arithmetic": arithmetic,
    "running-sum": running_sum,
}


def read_jsonl(path: Path) -> list[Problem]:
    """Read problems, an object on each line; raises as `read_numbered`."""
    return [*read_numbered(path).values()]


def read_numbered(path: Path) -> dict[int, Problem]:
    """Read problems by number of line; blank lines are passed over, as NeMo RL does.

    Raises:
        DataError: naming the file, and the line that is broken.
    """
    try:
        text = bytes_of(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        why = f"byte {error.start + 1} is no text in UTF-8"
        raise DataError(f"{path}: cannot be read, {why}; save it as UTF-8") from error
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); data.path must be a folder with "
            f"{TRAIN_FILE} and {VALIDATION_FILE}"
        ) from error
    lines = enumerate(text.split("\n"), start=1)  # splitlines would split texts at U+2028 too
    found = {
        number: _parse(line, f"{path}:{number}") for number, line in lines if line.strip(" \t\r")
    }
    if not found:
        raise DataError(f"{path}: holds no problem")
    return found


def write_problems(folder: Path, split: Split) -> None:
    """Write train.jsonl and validation.jsonl, as NeMo RL and `data=jsonl` read them."""
    for name, problems in zip((TRAIN_FILE, VALIDATION_FILE), split, strict=True):
        lines = [
            to_json({"input": problem.input, "output": problem.output}) + "\n"
            for problem in problems
        ]
        (folder / name).write_text("".join(lines), encoding="utf-8")


def reward(answer: str, problem: Problem) -> float:
    """Return 1 if the answer is right, else 0.

    It is right if it is the problem's output, apart from surrounding blanks. Of working, the last
    result counts alone; what stops early ends in another one.
    """
    if not problem.working:
        return float(answer.strip() == problem.output.strip())
    results = RESULT.findall(answer)
    return float(bool(results) and results[-1].lstrip("0") == problem.output)


def _number_pairs(difficulty: int) -> list[tuple[int, int]]:
    """Return distinct pairs, the larger first, in a fixed random order; a sample where many."""
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


def _sum_of(numbers: Sequence[int]) -> Problem:
    return Problem("+".join(map(str, numbers)), str(sum(numbers)), working(numbers))


def _parse(line: str, where: str) -> Problem:
    try:
        fields = json.loads(line, object_pairs_hook=_once)
    except _TwiceError as error:
        raise DataError(f'{where}: has "{error}" twice; leave one') from None
    except (ValueError, RecursionError):
        why = "is cut short, or no JSON"
        raise DataError(f'{where}: {why}; a line is {{"input": "1+2", "output": "3"}}') from None
    if not isinstance(fields, dict):
        why = "is no object"
        raise DataError(f'{where}: {why}; a line is {{"input": "1+2", "output": "3"}}')
    if lacking := [name for name in ("input", "output") if name not in fields]:
        has = ", ".join(fields) or "nothing"
        raise DataError(f'{where}: lacks "{lacking[0]}", has {has}')
    problem = Problem(fields["input"], fields["output"])
    if not all(_is_text(each) for each in (problem.input, problem.output)):
        raise DataError(f'{where}: "input" and "output" must be texts in UTF-8, not blank')
    return problem


class _TwiceError(ValueError):
    """Name a key that an object has twice: some readers take the first, some the last."""


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object whose keys differ."""
    for key, times in Counter(key for key, _ in pairs).items():
        if times > 1:
            raise _TwiceError(key)
    return dict(pairs)


def shared_problems(data: Data) -> tuple[int, int]:
    """Count the validation problems that stand among those to train on, of how many.

    Returns:
        0 of 0 for files that cannot be read, which is refused elsewhere.
    """
    try:
        train, validation = _read(data)
    except DataError:
        return 0, 0
    known = {problem.input for problem in train}
    return sum(problem.input in known for problem in validation), len(validation)


def _is_text(value: object) -> bool:
    """Return whether UTF-8 takes a text: JSON can escape half of a character."""
    if not isinstance(value, str) or not value.strip():
        return False
    return not any("\ud800" <= character <= "\udfff" for character in value)
