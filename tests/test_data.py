"""Problems: seeded, split without overlap, read from JSONL with a line number for each mistake."""

import json

import pytest

from fp8_nemo.data import (
    DataError,
    Problem,
    Split,
    arithmetic,
    load_problems,
    read_jsonl,
    reward,
    write_problems,
)
from fp8_nemo.schema import Data


@pytest.mark.parametrize("difficulty", [1, 2, 3, 6])
def test_answers_are_right_and_no_held_out_problem_is_trained_on(difficulty):
    train, validation = arithmetic(difficulty, seed=3)
    assert all(
        eval(problem.input) == int(problem.output) >= 0 for problem in train[:500] + validation
    )
    assert all(
        len(number) <= difficulty
        for p in train[:500]
        for number in p.input.replace("-", "+").split("+")
    )
    numbers = [
        [frozenset(p.input.replace("-", "+").split("+")) for p in side]
        for side in (train, validation)
    ]
    assert not set(numbers[0]) & set(numbers[1])
    assert len(validation) >= (256 if difficulty > 1 else 16)
    assert len(set(train + validation)) == len(train) + len(validation)


def test_the_seed_orders_the_problems_and_does_not_move_the_split():
    one, two = arithmetic(2, seed=1), arithmetic(2, seed=2)
    assert one == arithmetic(2, seed=1)
    assert one.train != two.train and sorted(one.train) == sorted(two.train)
    assert one.validation == two.validation


def test_what_is_written_is_read_back_and_is_what_nemo_rls_response_dataset_reads(tmp_path):
    problems = [Problem("1+2", "3"), Problem('"ünï"\n', "x")]
    write_problems(tmp_path, Split(problems, problems))
    assert load_problems(Data("jsonl", str(tmp_path)), 0) == (problems, problems)
    first = (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()[0]
    assert json.loads(first) == {"input": "1+2", "output": "3"}


@pytest.mark.parametrize(
    "line",
    [
        '{"input": "1+2"}',
        '{"input": "1+2", "output": 3}',
        '{"input": "1+2", "outp',
        "[]",
        "",
        '{"input": "", "output": "3"}',
    ],
)
def test_a_broken_line_is_named_with_file_and_number(tmp_path, line):
    path = tmp_path / "train.jsonl"
    path.write_text(f'{{"input": "1+2", "output": "3"}}\n{line}\n')
    with pytest.raises(DataError, match=r"train\.jsonl:2: "):
        read_jsonl(path)


def test_a_missing_or_empty_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read"):
        read_jsonl(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match=r"empty\.jsonl: holds no problem"):
        read_jsonl(tmp_path / "empty.jsonl")


def test_reward_is_one_for_the_exact_answer_alone():
    problem = Problem("37+48", "85")
    assert [reward(text, problem) for text in ("85", " 85\n", "85.", "185", "")] == [1, 1, 0, 0, 0]
