"""NeMo RL's own reward and data set, on a CPU: they take a running sum as the local backend does.

Set NEMO_RL_ROOT to a checkout and run in an environment that holds its packages (docs/install.md).
"""

import importlib.util
import os
import random
import sys

import pytest

from fp8_nemo.nemo_config.overrides import path_overrides
from fp8_nemo.plan.plan import plan_recipe
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.problems import reward, running_sum, write_problems

ROOT = os.environ.get("NEMO_RL_ROOT")
pytestmark = pytest.mark.skipif(
    not ROOT or importlib.util.find_spec("math_verify") is None or sys.version_info < (3, 12),
    reason="NEMO_RL_ROOT: no checkout of NeMo RL, or its packages are not here (docs/install.md)",
)
LINE = ("backend=nemo", "glue=stock", "model=small-llama", "precision=bf16", "data=running-sum")
PROBLEMS = running_sum(6, 0).validation[:40]


@pytest.fixture(scope="module")
def nemo_reward():
    """The rewards of a list of answers to one problem, by the verifier that a plan chooses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        from nemo_rl.environments.math_environment import HFVerifyWorker

        worker = HFVerifyWorker.__ray_metadata__.modified_class()
        written = plan_recipe(compose(LINE)[0]).nemo.overrides
        chosen = written["env.math.math_verify_impl"]
        assert written["data.default.env_name"] == "math"
        yield lambda answers, problem: worker.verify(
            answers, [problem.output] * len(answers), math_verify_impl=chosen
        )


def ours(answers, problem):
    return [reward(answer, problem) for answer in answers]


def one_character_changed(text, draw):
    place = draw.randrange(len(text))
    return text[:place] + draw.choice("0123456789+=\n") + text[place + 1 :]


def test_right_working_is_rewarded_and_another_result_is_not(nemo_reward):
    for problem in PROBLEMS:
        wrong = problem.working[: -len(problem.output)] + str(int(problem.output) + 1)
        assert nemo_reward([problem.working, wrong], problem) == [1.0, 0.0]
        assert ours([problem.working, wrong], problem) == [1.0, 0.0]


def test_working_cut_anywhere_is_rewarded_by_neither(nemo_reward):
    for problem in PROBLEMS[:8]:
        cut = [problem.working[:end] for end in range(len(problem.working))]
        assert nemo_reward(cut, problem) == ours(cut, problem) == [0.0] * len(cut)


def test_working_that_goes_on_after_the_result_gets_the_same_reward_from_both(nemo_reward):
    for problem in PROBLEMS[:8]:
        more = f"{problem.working}\n{problem.output}+17={int(problem.output) + 17}"
        longer = [more[:end] for end in range(len(problem.working), len(more) + 1)]
        assert nemo_reward(longer, problem) == ours(longer, problem)
        assert ours(longer, problem)[0] == 1.0 and ours(longer, problem)[-1] == 0.0


def test_working_with_an_error_anywhere_gets_the_same_reward_from_both(nemo_reward):
    draw = random.Random(0)
    for problem in PROBLEMS:
        changed = [one_character_changed(problem.working, draw) for _ in range(20)]
        assert nemo_reward(changed, problem) == ours(changed, problem)


def test_nemo_rls_data_set_reads_what_is_written_for_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from nemo_rl.data.datasets.response_datasets import ResponseDataset

    recipe = compose(LINE)[0]
    split = running_sum(6, 1)
    keys = path_overrides(recipe, tmp_path, None)
    (tmp_path / "data").mkdir()
    write_problems(tmp_path / "data", split)
    written = plan_recipe(recipe).nemo.overrides
    for side, problems in (("train", split.train), ("validation", split.validation)):
        assert written[f"data.{side}.dataset_name"] == "ResponseDataset"
        rows = ResponseDataset(
            keys[f"data.{side}.data_path"],
            input_key=written[f"data.{side}.input_key"],
            output_key=written[f"data.{side}.output_key"],
        ).dataset
        assert len(rows) == len(problems)
        contents = [message["content"] for message in rows[0]["messages"]]
        assert contents == [problems[0].input, problems[0].output]
