"""A reward of one's own: loaded, tried once before anything is queued, and told in one line."""

import math

import pytest

from fp8_nemo.local.preflight import problems_with
from fp8_nemo.recipe.options.training import Data
from fp8_nemo.recipe.own.reward import (
    EXAMPLE,
    RewardError,
    load_reward,
    reward_problems,
    rewarder,
)
from fp8_nemo.recipe.problems import Problem, reward

HALF = """
def reward(answer, output):
    return 0.5 if answer.strip() == output else -1
"""


@pytest.fixture
def file(tmp_path):
    """A user's file: `file("def reward...")`."""

    def written(text):
        (tmp_path / "mine.py").write_text(text)
        return tmp_path / "mine.py"

    return written


def test_a_file_rewards_and_without_one_right_answers_do(file):
    own, problem = load_reward(file(HALF)), Problem("1+1", "2")
    assert (own(" 2", "2"), own("3", "2")) == (0.5, -1.0)
    rewards = rewarder(Data(reward=str(file(HALF))))
    assert (rewards("2", problem), rewards("3", problem)) == (0.5, -1.0)
    assert rewarder(Data()) is reward


@pytest.mark.parametrize("value", ["True", "1", "__import__('torch').tensor(1.0)"])
def test_numbers_of_any_kind_are_taken(file, value):
    own = load_reward(file(f"def reward(answer, output):\n    return {value}"))
    assert own("2", "2") == 1.0 and type(own("2", "2")) is float


WRONG = {
    "no function": ("score = 1", "has no function reward"),
    "not callable": ("reward = 1", "has no function reward"),
    "does not import": ("import no_such_package", "cannot be imported (ModuleNotFoundError: No"),
    "no Python": ("def reward(:", "cannot be imported (SyntaxError: invalid syntax"),
    "raises": (
        "def reward(a, o):\n    return 1 / 0",
        "raised ZeroDivisionError: division by",
    ),
    "leaves": ("import sys\ndef reward(a, o):\n    sys.exit(0)", "raised SystemExit: 0, line 3"),
    "leaves at once": ("raise SystemExit('no licence')", "cannot be imported (SystemExit: no lic"),
    "async": ("async def reward(a, o):\n    return 1", "reward is async; write a plain def"),
    "one argument": ("def reward(answer):\n    return 1", "raised TypeError: reward() takes 1"),
    "NaN": ("def reward(a, o):\n    return float('nan')", "gave nan; it must be a finite number"),
    "infinite": ("def reward(a, o):\n    return 10**400", "gave 1"),
    "None": ("def reward(a, o):\n    pass", "gave None; it must be a finite number"),
    "text": ("def reward(a, o):\n    return '1'", "gave '1'; it must be a finite number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_line_that_names_the_file(file, name):
    text, said = WRONG[name]
    [line] = reward_problems(Data(reward=str(file(text))), EXAMPLE)
    assert line.startswith(f"data.reward={file(text)}: ") and said in line and "\n" not in line


def test_the_line_of_the_file_is_told(file):
    with pytest.raises(RewardError, match=r"division by zero, line 4"):
        load_reward(file("\n\ndef reward(a, o):\n    return 1 / 0"))("2", "2")


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    for path in (tmp_path / "none.py", tmp_path):
        [line] = reward_problems(Data(reward=str(path)))
        assert line == (
            f"data.reward={path}: no such Python file; must be a Python file with "
            "reward(answer, output)"
        )


def test_it_is_called_once_on_the_first_problem_before_a_run_is_made(file, make_plan, tmp_path):
    seen = tmp_path / "seen"
    text = (
        f"def reward(a, o):\n    open({str(seen)!r}, 'a').write(a + ' ' + o + '\\n')\n    return 1"
    )
    plan = make_plan(f"data.reward={file(text)}")
    assert problems_with(plan) == []
    [line] = seen.read_text().splitlines()
    answer, output = line.split()
    assert answer == output and math.isfinite(float(output))
    [line] = problems_with(make_plan(f"data.reward={file('x = 1')}"))
    assert "has no function reward" in line
