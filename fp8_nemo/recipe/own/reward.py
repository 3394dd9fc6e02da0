"""Load a user's own reward, a Python file with one function, and try it before anything is queued.

    def reward(answer: str, output: str) -> float:
        return float(output in answer)

`answer` is what the model wrote, without its end token. `output` is the problem's in the data: a
right answer, or anything else as text, such as unit tests as JSON. The value is any finite number.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fp8_nemo.recipe.mistake import Mistake
from fp8_nemo.recipe.options.training import Data
from fp8_nemo.recipe.plain import sha256_of
from fp8_nemo.recipe.problems import Problem, reward

FUNCTION = "reward"
KEY = "data.reward"
NEEDS = "must be a Python file with reward(answer, output)"
EXAMPLE = Problem("1+1", "2")
"""Stands for the first problem of data that only NeMo RL fetches."""


class RewardError(ValueError):
    """Say in one line what is wrong with a user's reward."""


def load_reward(file: Path) -> Callable[[str, str], float]:
    """Import a user's file and return its function, which then gives finite numbers or raises.

    Raises:
        RewardError: there is no such file, it cannot be imported, or has no `reward`. The function
            raises it too: for what it raises itself, and for what is no finite number.
    """
    spec = importlib.util.spec_from_file_location(f"fp8_nemo_own_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise RewardError(str(Mistake(KEY, file, "no such Python file", NEEDS)))
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's file raises
        said = f"cannot be imported ({_told(error, file)})"
        raise RewardError(str(Mistake(KEY, file, said, NEEDS))) from error
    own = getattr(module, FUNCTION, None)
    if not callable(own):
        raise RewardError(str(Mistake(KEY, file, f"has no function {FUNCTION}", NEEDS)))

    if inspect.iscoroutinefunction(own):
        raise RewardError(str(Mistake(KEY, file, f"{FUNCTION} is async", "write a plain def")))

    def checked(answer: str, output: str) -> float:
        """Return the user's reward; raise `RewardError` if it raised or is not finite."""
        try:
            value: Any = own(answer, output)
        except (Exception, SystemExit) as error:  # the same
            text = f"reward({answer!r:.60}, {output!r:.60}) raised {_told(error, file)}"
            raise RewardError(str(Mistake(KEY, file, text))) from error
        if not _is_finite(value):
            text = f"reward({answer!r:.60}, {output!r:.60}) gave {value!r:.60}"
            raise RewardError(str(Mistake(KEY, file, text, "it must be a finite number")))
        return float(value)

    return checked


def rewarder(data: Data) -> Callable[[str, Problem], float]:
    """Return what rewards the answers of a run: the user's own function, else `problems.reward`.

    Raises:
        RewardError: as `load_reward`.
    """
    if data.reward is None:
        return reward
    own = load_reward(Path(data.reward))
    return lambda answer, problem: own(answer, problem.output)


def reward_problems(data: Data, first: Problem = EXAMPLE) -> Iterator[str]:
    """Import a user's reward and call it once; yield what is wrong in one line.

    Args:
        data: of the recipe.
        first: problem of the data, whose right answer it is given.
    """
    try:
        rewarder(data)(first.working or first.output, first)
    except RewardError as error:
        yield str(error)


def reward_digest(file: Path) -> str:
    """Digest a user's file: a run that went on with another reward would be two experiments."""
    return sha256_of(file)[:12]


def _is_finite(value: Any) -> bool:
    """Return whether a value is a finite number and no text; NumPy's and torch's scalars may be."""
    try:
        return not isinstance(value, str | bytes) and math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def _told(error: BaseException, file: Path) -> str:
    """Return an error in one line, with the last line of the user's file that led to it."""
    lines = [
        at.lineno for at in traceback.extract_tb(error.__traceback__) if at.filename == str(file)
    ]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{text}, line {lines[-1]}" if lines else text
