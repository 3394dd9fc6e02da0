"""Partial credit for working: `data=running-sum data.reward=recipes/rewards/right_lines.py`.

A policy whose answers are all wrong learns nothing from a reward of 0. This one pays it for how far
it came. It sees no question: `1+1=2` is a right line of any sum, so a wrong answer gets at most
half. It grows with each line, so that stopping early never pays.
"""

import re

from fp8_nemo.recipe import problems

LINE = re.compile(r"(\d+)\+(\d+)=(\d+)")
MOST = 0.5
"""What the reward of a wrong answer comes near to; each right line takes half of the way left."""


def reward(answer: str, output: str) -> float:
    """Return 1 for the right result, else what the lines before the first mistake earn.

    A line is right if it adds up, and begins with the result of the line before.
    """
    if problems.reward(answer, problems.Problem("", output, working=answer)):
        return 1.0
    return MOST * (1 - 0.5 ** _right(answer.strip().splitlines()))


def _right(lines: list[str]) -> int:
    total = None
    for count, line in enumerate(lines):
        found = LINE.fullmatch(line.strip())
        first, second, written = map(int, found.groups()) if found else (0, 0, -1)
        if first + second != written or total not in (None, first):
            return count
        total = written
    return len(lines)
