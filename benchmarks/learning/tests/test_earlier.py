"""Late accuracy and area of a run as defined, their table, and the claims beside the studies."""

from pathlib import Path

import pytest

from benchmarks.learning import earlier, judge
from benchmarks.learning.claims import LEARNING
from fp8_nemo.plan.plan import plan_recipe
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.plain import read_json
from fp8_nemo.report.compare import compare
from fp8_nemo.report.runs import FinishedRun

RESULTS = Path(__file__).parents[2] / "results"
STEPS = 9


def run(seed, late, done=STEPS):
    """A run whose validations are 20% at first, 0% then, and `late` points in the last third."""
    [recipe] = compose(["precision=bf16", "correction=none", f"seed={seed}", f"grpo.steps={STEPS}"])
    accuracy = [0.2] + [0.0] * 6 + [late / 100 + each for each in (-0.01, 0.0, 0.01)]
    rows = [
        {
            "step": step,
            "val/accuracy": value,
            "mismatch/kl": 1e-3,
            "correction/masked_fraction": 0.5,
        }
        for step, value in enumerate(accuracy[: done + 1])
    ]
    plan = plan_recipe(recipe)
    return FinishedRun(Path(f"runs/{plan.run_name}"), plan, rows, {})


def test_late_accuracy_is_the_mean_of_the_last_third_of_a_finished_run():
    assert earlier.late_accuracy(run(1, 50.0)) == pytest.approx(50.0)
    assert earlier.gain(run(1, 50.0)) == pytest.approx(30.0)
    assert earlier.area(run(1, 50.0)) == pytest.approx(50.0 / 3)
    stopped = run(1, 50.0, done=8)
    assert [earlier.late_accuracy(stopped), earlier.gain(stopped), earlier.area(stopped)] == [
        None
    ] * 3


def test_a_table_has_an_interval_where_there_are_seeds_and_a_dash_where_there_is_no_number():
    runs = [run(seed, late) for seed, late in enumerate((50.0, 60.0, 70.0), start=1)]
    one, three = (earlier.means(compare(some))[1] for some in (runs[:1], runs))
    assert one == ("bf16-none", "1", "50.0", "1.0e-03", "50.00%")
    assert three == ("bf16-none", "3", "60.0 ±24.8", "1.0e-03", "50.00%")
    assert earlier.means(compare([run(1, 50.0, done=8)]))[1][2] == "-"


def test_the_kept_runs_are_judged_again_as_the_results_file_says():
    stored = read_json((RESULTS / "judged-again.json").read_text())["rows"]
    found = judge.again(RESULTS)["rows"]
    assert [row["cell"] for row in found] == [row["cell"] for row in stored]
    for measure in ("late accuracy", "area"):
        for was, now in zip(stored, found, strict=True):
            assert now[measure] == pytest.approx(was[measure])


def test_every_cell_of_the_study_has_a_claim_and_every_claim_is_an_experiments():
    options = RESULTS.parents[1] / "conf" / "experiment"
    experiments = ",".join(sorted(path.stem for path in options.glob("*.yaml")))
    studied, known = (
        {
            f"{each.precision.name}-{each.correction.name}"
            for each in compose(["-m", word, "seed=1"])
        }
        for word in ("sweep=study-eight", f"experiment={experiments}")
    )
    assert studied - {judge.BASELINE} <= {claim.cell for claim in LEARNING} <= known
