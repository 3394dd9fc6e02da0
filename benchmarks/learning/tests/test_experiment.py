"""The rule of docs/research/earlier-studies.md: known verdicts, and runs that were kept."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.learning import experiment
from benchmarks.learning.experiment import KEEPS, LOSES, NOT_SUPPORTED, OPEN, SUPPORTED
from fp8_nemo.plan.plan import plan_recipe
from fp8_nemo.recipe.compose import compose
from fp8_nemo.report.compare import MeanOfSeeds, compare, mean_of_seeds
from fp8_nemo.report.runs import FinishedRun, find_runs, read_runs

ROOT = Path(__file__).parents[3]
KEPT = ROOT / "benchmarks" / "results" / "runs"

STEPS = 9


def run(cell, seed, late=50.0, *, kl=1e-3, growth=1.0, error=1.01, done=STEPS, first=20.0,
        model="tiny-llama", weights="first", problems=()):  # fmt: skip
    """A run of STEPS steps: validated at each, in the last third with `late` points on average."""
    precision, _, correction = cell.rpartition("-")
    words = [f"model={model}", f"precision={precision}", f"correction={correction}"]
    [recipe] = compose([*words, f"seed={seed}", f"grpo.steps={STEPS}"])
    plan = plan_recipe(recipe)
    rows = [
        {"step": n, "mismatch/kl": kl * (growth if n > 6 else 1.0), "reward/mean": 0.5,
         "mismatch/token_mult_prob_error": error, "mismatch/abs_log_ratio_p99": 0.1,
         "correction/masked_fraction": 0.02,
         "val/accuracy": late / 100 + (0.01 * (n - 8) if n > 6 else -0.3)}
        for n in range(1, done + 1)
    ]  # fmt: skip
    rows.insert(0, {"step": 0, "val/accuracy": first / 100})
    return FinishedRun(
        Path(f"runs/{plan.run_name}"), plan, rows, {"weights": weights, **dict(problems)}
    )


def cell(name, points, **changes):
    """Seeds of a cell whose late accuracies are these."""
    return [run(name, seed, late, **changes) for seed, late in enumerate(points, start=1)]


def said(runs, text):
    """The verdict, and its evidence, on the only claim that begins with a text."""
    found = experiment.verdicts(experiment.cells_of(compare(runs)))
    [verdict] = [each for each in found if each.claim.startswith(text)]
    return verdict.verdict, verdict.evidence


BASE = cell("bf16-none", [50.0, 60.0, 70.0])


@pytest.mark.parametrize(
    ("points", "word"),
    [
        ([50.0, 60.5, 69.5], KEEPS),  # -0.0 ±1.2: a loss of 3 is ruled out
        ([49.0, 58.5, 68.5], KEEPS),  # -1.3 ±0.7: lower, yet not by 3
        ([46.0, 55.0, 65.5], LOSES),  # -4.5 ±1.2
        ([20.0, 31.0, 40.5], LOSES),
        ([48.0, 57.5, 68.5], LOSES),  # -2.0 ±1.2: lower, and 3 is not ruled out
        ([50.0, 55.0, 70.0], None),  # -1.7 ±7.2
        ([49.0, 60.0, 60.0], None),
    ],
)
def test_a_cell_keeps_up_loses_or_is_open_by_its_interval_alone(points, word):
    runs = [*BASE, *cell("fp8-linear-tis", points)]
    cells = experiment.cells_of(compare(runs))
    ours, base = (cells["tiny-llama", name] for name in ("fp8-linear-tis", "bf16-none"))
    found = experiment.difference(ours, base, experiment.late_accuracy)
    assert experiment.learning_word(found) == word
    expected = [mine - its for mine, its in zip(points, (50.0, 60.0, 70.0), strict=True)]
    assert found.mean == pytest.approx(sum(expected) / 3)
    assert found.half == pytest.approx(mean_of_seeds(expected).half)


def test_one_finding_supports_a_claim_and_refutes_its_opposite():
    runs = [*BASE, *cell("fp8-linear-tis", [30.0, 40.0, 51.0])]
    assert said(runs, "fp8-linear-tis loses")[0] == SUPPORTED
    assert said(runs, "fp8-linear-tis keeps")[0] == NOT_SUPPORTED
    runs = [*BASE, *cell("fp8-linear-tis", [50.0, 60.0, 71.0])]
    assert said(runs, "fp8-linear-tis loses")[0] == NOT_SUPPORTED
    assert said(runs, "fp8-linear-tis keeps")[0] == SUPPORTED


def test_two_seeds_a_dead_seed_and_other_settings_decide_nothing():
    two = [*BASE, *cell("fp8-e2e-tis", [20.0, 30.0])]
    assert said(two, "fp8-e2e-tis keeps") == (OPEN, "-30.0 (2 seeds) points")
    dead = [*BASE, *cell("fp8-e2e-tis", [20.0, 30.0, 40.0]), run("fp8-e2e-tis", 4, done=5)]
    verdict, evidence = said(dead, "fp8-e2e-tis keeps")
    assert verdict == OPEN and "not finished: tiny-llama/fp8-e2e-tis seed 4 at step 5" in evidence
    [recipe] = compose(["precision=fp8-e2e", "correction=tis", "grpo.steps=9", "grpo.kl_penalty=1"])
    other = [
        FinishedRun(each.path, plan_recipe(recipe), each.rows, {})
        for each in cell("fp8-e2e-tis", [1])
    ]
    verdict, evidence = said([*BASE, *other], "fp8-e2e-tis keeps")
    assert verdict == OPEN and evidence.startswith("not matched: grpo.kl_penalty is 1.0")
    assert said(cell("fp8-e2e-tis", [1.0, 2.0, 3.0]), "fp8-e2e-tis keeps")[0] == OPEN


def test_runs_that_began_from_other_weights_or_problems_decide_nothing():
    others = cell("fp8-linear-tis", [49.0, 58.5, 68.5], weights="another")
    assert said([*BASE, *others], "fp8-linear-tis keeps") == (
        OPEN,
        "not matched: starting weights is another or first",
    )
    asked, otherwise = {"problems": "one"}, {"problems": "two"}
    base = [*BASE[:2], run("bf16-none", 3, 70.0, problems=asked)]
    others = cell("fp8-linear-tis", [49.0, 58.5])
    others += [run("fp8-linear-tis", 3, 68.5, problems=otherwise)]
    assert said([*base, *others], "fp8-linear-tis keeps") == (
        OPEN,
        "not matched: problem set of seed 3 is two or one",
    )
    mixed = [*cell("fp8-e2e-tis", [1.0, 2.0]), run("fp8-e2e-tis", 3, 3.0, weights="another")]
    assert said(mixed, "token_mult_prob_error")[0] == OPEN
    lower = cell("fp8-linear-tis", [1, 2, 3], kl=2e-3)
    lower += cell("fp8-kv-attn-tis", [1, 2, 3], kl=3e-3)
    assert said(lower, "KL of fp8-kv-attn-tis > fp8-linear-tis")[0] == SUPPORTED
    died = run("fp8-kv-attn-tis", 4, kl=3e-3, done=5)
    assert said([*lower, died], "KL of fp8-kv-attn-tis > fp8-linear-tis")[0] == OPEN


def test_nothing_is_said_of_accuracy_where_bf16_itself_does_not_learn():
    runs = [*BASE, *cell("fp8-e2e-tis", [20.0, 30.0, 41.0])]
    assert said(runs, "fp8-e2e-tis keeps")[0] == NOT_SUPPORTED
    flat = [*cell("bf16-none", [50.0, 60.0, 70.0], first=55.0), *runs[3:]]
    assert said(flat, "fp8-e2e-tis keeps") == (
        OPEN,
        "bf16-none itself gains +5.0 ±24.8 (3 seeds) points",
    )


def test_the_order_of_mismatch_needs_every_neighbour_and_one_reversal_refutes_it():
    def runs(e2e):
        kl = {"fp8-linear-none": [5e-3, 6e-3, 5.5e-3], "fp8-e2e-none": e2e, "bf16-none": [0, 0, 0]}
        return [
            run(name, seed, kl=value) for name in kl for seed, value in enumerate(kl[name], start=1)
        ]

    claim = "KL of fp8-linear-none > fp8-e2e-none > bf16-none"
    assert said(runs([1e-3, 2e-3, 1.5e-3]), claim)[0] == SUPPORTED
    assert said(runs([8e-3, 9e-3, 8.5e-3]), claim)[0] == NOT_SUPPORTED
    assert said(runs([1e-3, 9e-3, 5e-3]), claim)[0] == OPEN


@pytest.mark.parametrize(
    ("errors", "verdict", "good"),
    [
        ([1.010, 1.011, 1.012], SUPPORTED, True),
        ([1.040, 1.041, 1.042], SUPPORTED, False),
        ([1.049, 1.051, 1.050], OPEN, False),
        ([1.080, 1.081, 1.082], NOT_SUPPORTED, False),
    ],
)
def test_the_probability_error_is_held_against_its_band(errors, verdict, good):
    runs = [run("fp8-e2e-tis", seed, error=error) for seed, error in enumerate(errors, start=1)]
    found = said(runs, "token_mult_prob_error of fp8-e2e-tis")
    assert found[0] == verdict and found[1].endswith("below 1.03 too") == good


@pytest.mark.parametrize(
    ("model", "growth", "verdict"),
    [
        ("tiny-llama", (2.0, 2.1, 2.2), NOT_SUPPORTED),
        ("tiny-llama", (0.7, 0.8, 0.75), SUPPORTED),
        ("tiny-llama", (0.7, 1.8, 1.1), OPEN),
        ("tiny-qwen3-moe", (2.0, 2.1, 2.2), SUPPORTED),
    ],
)
def test_a_trend_is_said_to_grow_in_experts_and_not_to_in_a_dense_model(model, growth, verdict):
    runs = [
        run("fp8-linear-tis", seed, growth=times, model=model)
        for seed, times in enumerate(growth, start=1)
    ]
    assert said(runs, "KL of fp8-linear-tis")[0] == verdict
    assert experiment.trend(runs[0]) == pytest.approx(growth[0])


def test_experts_are_held_against_the_dense_model_cell_by_cell():
    dense = cell("fp8-linear-tis", [50.0] * 3, kl=1e-3)
    experts = [
        run("fp8-linear-tis", seed, kl=kl, model="tiny-qwen3-moe")
        for seed, kl in ((1, 2e-3), (2, 3e-3), (3, 2.5e-3))
    ]
    claim = "KL of fp8-linear-tis is higher in the mixture of experts"
    assert said([*dense, *experts], claim)[0] == SUPPORTED


def test_two_studies_at_once_are_refused():
    [recipe] = compose(["precision=bf16", "correction=none", "grpo.learning_rate=1", "seed=9"])
    other = FinishedRun(Path("runs/other"), plan_recipe(recipe), [], {})
    with pytest.raises(SystemExit, match="one study at a time"):
        experiment.cells_of(compare([*BASE, other]))


def test_late_accuracy_is_the_mean_of_the_last_third_of_a_finished_run():
    assert experiment.late_accuracy(run("bf16-none", 1, 50.0)) == pytest.approx(50.0)
    assert experiment.late_accuracy(run("bf16-none", 1, done=8)) is None


def test_the_runs_that_are_kept_get_the_verdicts_that_their_numbers_give(tmp_path):
    out = tmp_path / "found.json"
    script = [sys.executable, "-m", "benchmarks.learning.experiment", KEPT, "--out", out]
    subprocess.run(script, check=True, capture_output=True, cwd=ROOT)
    content = json.loads(out.read_text())
    found = {each["claim"]: each["verdict"] for each in content["verdicts"]}
    assert found["fp8-e2e-tis keeps against bf16-none"] == SUPPORTED
    assert found["fp8-kv-attn-tis keeps against bf16-none"] == OPEN
    assert found["token_mult_prob_error of fp8-kv-attn-tis is below 1.05"] == SUPPORTED
    runs, _ = read_runs(find_runs(KEPT))
    by_hand = [
        100 * sum(row["val/accuracy"] for row in each.rows if row["step"] in (30, 40)) / 2
        for each in runs
        if each.plan.cell.endswith("fp8-kv-attn-tis")
    ]
    [row] = [row for row in content["rows"] if row["cell"].endswith("fp8-kv-attn-tis")]
    assert MeanOfSeeds(**row["late_accuracy"]) == pytest.approx(mean_of_seeds(by_hand))
    assert row["rejected"]["mean"] == 0 and 0.3 < row["abs_log_ratio_p99"]["mean"] < 0.6
    assert len(content["runs"]) == 12
    assert [Path(each) for each in content["runs"]] == find_runs(KEPT)


def test_every_claims_cell_is_in_a_sweep_and_every_sweeps_cell_has_a_claim():
    names = {
        f"{recipe.precision.name}-{recipe.correction.name}"
        for sweep in ("experiment", "experiment-moe", "stress", "stress-tiny", "stress-working")
        for recipe in compose(["-m", f"sweep={sweep}"])
    }
    claimed = {claim.cell for claim in experiment.LEARNING}
    assert claimed == names - {experiment.BASELINE}
    assert {name for order in experiment.ORDERS for name in order.cells} <= names


def test_one_seed_has_no_interval():
    one, three = (experiment.learning_table(compare(runs))[1] for runs in (BASE[:1], BASE))
    assert one[2] == "50" and three[2] == "60 ±25"
