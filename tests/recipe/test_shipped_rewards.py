"""The rewards of recipes/rewards: what they pay, and that the check before a run takes them."""

from pathlib import Path

import pytest

from fp8_nemo.recipe.options.training import Data
from fp8_nemo.recipe.own.reward import load_reward, reward_problems
from fp8_nemo.recipe.problems import load_problems, working

FILE = Path(__file__).parents[2] / "recipes" / "rewards" / "right_lines.py"
NUMBERS = [38, 17, 92, 11, 20]


@pytest.mark.parametrize(
    ("answer", "paid"),
    [
        (working(NUMBERS), 1.0),
        ("178", 1.0),  # the result alone is what the task asks for
        ("38+17=55\n55+92=147\n147+11=158\n158+20=179", 0.5 * 7 / 8),
        ("38+17=54\n54+92=146\n146+11=157\n157+20=177", 0.0),
        ("38+17=55\n56+92=148\n148+11=159\n159+20=179", 0.25),  # another first number
        ("38+17=55", 0.25),  # stopping early earns less than the next right line
        ("38+17=55 so far", 0.0),
        ("", 0.0),
    ],
)
def test_a_wrong_answer_is_paid_for_its_lines_before_the_first_mistake(answer, paid):
    assert load_reward(FILE)(answer, "178") == paid


def test_right_workings_of_the_data_get_all_and_no_wrong_one_more_than_half():
    data, own = Data(name="running-sum", difficulty=5, reward=str(FILE)), load_reward(FILE)
    problems = load_problems(data, 1).validation
    assert {own(each.working, each.output) for each in problems} == {1.0}
    other = [own(each.working, str(int(each.output) + 1)) for each in problems]
    assert {*other} == {0.5 * (1 - 0.5**4)}  # four lines add five numbers
    assert not [*reward_problems(data, problems[0])]
