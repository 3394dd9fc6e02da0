"""Problems: seeded, split without overlap, read from JSONL with a line number for each mistake."""

import hashlib
import json
import re

import pytest

from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.recipe.options.training import Data
from fp8_nemo.recipe.problems import (
    DataError,
    Problem,
    Split,
    arithmetic,
    load_problems,
    longest_answer,
    problems_digest,
    read_jsonl,
    reward,
    running_sum,
    working,
    write_problems,
)


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
    read = load_problems(Data("jsonl", str(tmp_path)), 0)
    assert (sorted(read.train), read.validation) == (sorted(problems), problems)
    first = (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()[0]
    assert json.loads(first) == {"input": "1+2", "output": "3"}


def test_a_file_that_is_sorted_is_not_learned_in_its_order(tmp_path):
    write_problems(tmp_path, Split(*2 * [[Problem(str(n), str(n)) for n in range(100)]]))
    one, two = (load_problems(Data("jsonl", str(tmp_path)), seed) for seed in (1, 2))
    assert one == load_problems(Data("jsonl", str(tmp_path)), 1)
    assert one.train != two.train and one.train != one.validation
    assert sorted(one.train) == sorted(two.train) == sorted(one.validation)
    assert one.validation == two.validation == read_jsonl(tmp_path / "validation.jsonl")
    digests = {problems_digest(Data("jsonl", str(tmp_path)), seed) for seed in (1, 2)}
    assert len(digests) == 1  # of the files, which NeMo RL reads and shuffles itself
    write_problems(tmp_path, one)
    assert problems_digest(Data("jsonl", str(tmp_path)), 1) not in digests


@pytest.mark.parametrize(
    "line",
    [
        '{"input": "1+2"}',
        '{"input": "1+2", "output": 3}',
        '{"input": "1+2", "outp',
        "[]",
        '{"input": "", "output": "3"}',
        '{"input": "1+2", "output": "  "}',
        r'{"input": "1+\ud800", "output": "3"}',
    ],
)
def test_a_broken_line_is_named_with_file_and_number(tmp_path, line):
    path = tmp_path / "train.jsonl"
    path.write_text(f'{{"input": "1+2", "output": "3"}}\n{line}\n')
    with pytest.raises(DataError, match=r"train\.jsonl:2: "):
        read_jsonl(path)


def test_blank_lines_are_passed_over_as_nemo_rl_does(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('\n{"input": "1+2", "output": "3"}\n \n{"input": "2+2", "output": "4"}\n\n')
    assert [problem.input for problem in read_jsonl(path)] == ["1+2", "2+2"]
    path.write_text("\n \n")
    with pytest.raises(DataError, match="holds no problem"):
        read_jsonl(path)


def test_a_missing_or_empty_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read \(No such file") as error:
        read_jsonl(tmp_path / "none.jsonl")
    assert "data.path must be a folder with train.jsonl and" in str(error.value)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(DataError, match=r"empty\.jsonl: holds no problem"):
        read_jsonl(tmp_path / "empty.jsonl")


def test_reward_is_one_for_the_exact_answer_alone():
    problem = Problem("37+48", "85")
    assert [reward(text, problem) for text in ("85", " 85\n", "85.", "185", "")] == [1, 1, 0, 0, 0]


@pytest.mark.parametrize("difficulty", [2, 3, 5, 30, 60])
def test_a_running_sum_is_worked_out_line_by_line_from_numbers_that_differ(difficulty):
    train, validation = running_sum(difficulty, seed=3)
    assert len(train) == 20_000 and len(validation) == 256
    for problem in train[:200] + validation:
        numbers = [int(number) for number in problem.input.split("+")]
        assert len(set(numbers)) == len(numbers) == difficulty and min(numbers) > 9
        assert int(problem.output) == sum(numbers)
        lines = [line.replace("=", "+").split("+") for line in problem.working.split("\n")]
        assert [int(number) for _, number, _ in lines] == numbers[1:]
        assert all(int(total) + int(number) == int(result) for total, number, result in lines)
        assert [total for total, _, _ in lines[1:]] == [result for _, _, result in lines[:-1]]
        assert lines[0][0] == str(numbers[0]) and lines[-1][2] == problem.output
    assert len({problem.input for problem in validation}) == 256


@pytest.mark.parametrize("difficulty", [2, 4, 30])
def test_no_seed_trains_on_the_numbers_of_a_held_out_sum(difficulty):
    splits = [running_sum(difficulty, seed) for seed in (1, 2, 3)]
    held_out = {frozenset(each.input.split("+")) for each in splits[0].validation}
    assert all(split.validation == splits[0].validation for split in splits)
    for split in splits:
        assert not held_out & {frozenset(each.input.split("+")) for each in split.train}
    assert splits[0].train != splits[1].train
    assert splits[0] == running_sum(difficulty, seed=1)


@pytest.mark.parametrize("difficulty", [2, 3, 30])
def test_no_answer_is_longer_than_the_longest(difficulty):
    lengths = {len(each.working) for each in running_sum(difficulty, 0).train}
    longest = longest_answer(Data("running-sum", difficulty=difficulty)) - 1
    assert max(lengths) <= longest <= max(lengths) + 7  # 20,000 problems do not meet every carry


def test_no_plain_answer_is_longer_than_the_longest():
    for difficulty in (1, 2, 3):
        lengths = {len(each.output) for each in arithmetic(difficulty, 0).train}
        assert max(lengths) + 1 == longest_answer(Data("arithmetic", difficulty=difficulty))


def test_thirty_numbers_are_several_hundred_characters():
    lengths = [len(problem.working) for problem in running_sum(30, 0).train]
    assert 300 < min(lengths) < max(lengths) < 360


def test_what_stands_in_working_goes_on_from_a_slip():
    assert working([38, 17, 92]) == "38+17=55\n55+92=147"
    slips = iter([56, 148])
    assert working([38, 17, 92], lambda result: next(slips)) == "38+17=56\n56+92=148"


def test_the_reward_of_working_is_that_of_its_last_result():
    problem = Problem("38+17+92", "147", "38+17=55\n55+92=147")
    right = [problem.working, problem.working + "\n", "38+17=54\n54+93=147", "147", "=147\n147+1"]
    wrong = ["38+17=55", "55+92=14", "55+92=146", "55+92=147\n14", "55+92=1479", "55+92=147+1", ""]
    assert [reward(text, problem) for text in right] == [1.0] * len(right)
    assert [reward(text, problem) for text in wrong] == [0.0] * len(wrong)


def test_working_is_not_written_for_nemo_rl(tmp_path):
    write_problems(tmp_path, running_sum(2, 0))
    lines = (tmp_path / "validation.jsonl").read_text().splitlines()
    assert all(set(json.loads(line)) == {"input", "output"} for line in lines)


def test_a_task_is_made_by_its_name_at_its_own_difficulty():
    assert load_problems(Data("running-sum", difficulty=5), 2) == running_sum(5, 2)
    assert load_problems(Data("arithmetic", difficulty=1), 2) == arithmetic(1, 2)


def test_plain_arithmetic_is_what_it_was_in_every_byte():
    """So that starting models and run names of earlier days still mean the same."""
    text = repr([(p.input, p.output) for side in arithmetic(2, 42) for p in side])
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == "04d72dfe2212"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"input": "1", "answer": "2"}', 'lacks "output", has input, answer'),
        ('["1", "2"]', "is no object; a line is"),
        ("null", "is no object; a line is"),
        ('{"input": "1", "out', "is cut short, or no JSON; a line is"),
        ("[" * 100_000, "is cut short, or no JSON; a line is"),
        ('{"input": "1", "input": "2", "output": "3"}', 'has "input" twice; leave one'),
    ],
)
def test_what_a_line_lacks_is_told_without_pythons_words(tmp_path, line, said):
    file = tmp_path / "train.jsonl"
    file.write_text(f'{{"input": "1", "output": "2"}}\n{line}\n')
    with pytest.raises(DataError) as error:
        read_jsonl(file)
    assert str(error.value).startswith(f"{file}:2: {said}")
    assert not re.search(r"Error|codec|NoneType", str(error.value))


def test_bytes_that_are_no_text_are_placed(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(b'{"input": "\xe9"}')
    with pytest.raises(DataError, match="byte 12 is no text in UTF-8; save it as UTF-8"):
        read_jsonl(tmp_path / "train.jsonl")


def test_validation_problems_that_are_trained_on_are_told(tmp_path):
    lines = [f'{{"input": "{n}+1", "output": "{n + 1}"}}\n' for n in range(8)]
    for train, notes in ((lines, ["3 of 3"]), (lines[1:], ["2 of 3"]), (lines[3:], [])):
        (tmp_path / "train.jsonl").write_text("".join(train))
        (tmp_path / "validation.jsonl").write_text("".join(lines[:3]))
        [plan] = compose_plans(["data=jsonl", f"data.path={tmp_path}"])
        told = [
            f"data.path: {each} validation problems are among those to train on" for each in notes
        ]
        assert [note.partition(";")[0] for note in plan.notes if "data.path" in note] == told
