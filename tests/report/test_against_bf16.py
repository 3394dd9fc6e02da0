"""Verdicts against the BF16 baseline: words by the rule, numbers as by hand."""

import dataclasses
import math
from pathlib import Path

import pytest

from fp8_nemo.plan.plan import plan_recipe
from fp8_nemo.recipe.options.cluster import Cluster
from fp8_nemo.recipe.options.correction import Correction
from fp8_nemo.recipe.options.model import Model
from fp8_nemo.recipe.options.precision import Glue, Precision, Recalibrate
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.options.training import Data, Grpo
from fp8_nemo.report.against_bf16 import EQUAL, against_baselines
from fp8_nemo.report.compare import EMULATION, compare
from fp8_nemo.report.page import to_markdown, verdicts
from fp8_nemo.report.runs import FinishedRun

BF16 = Precision("bf16")
FP8 = Precision("fp8-linear", rollout_linear="fp8")
E2E = Precision("fp8-e2e", rollout_linear="fp8", train_linear="fp8")
NONE, TIS = Correction("none"), Correction("tis", level="token", truncate=2.0)
MACHINE = {"hardware.gpus": "H200", "versions.torch": "2.11.0", "python": "3.12"}


def run(precision, correction=NONE, seed=1, *, last=0.5, kl=0.01, step=1.0, environment=MACHINE,
        state=0, steps=3, **recipe) -> FinishedRun:  # fmt: skip
    """A finished run; its first step takes ten times as long, and its rollout half of a step."""
    plan = plan_recipe(
        Recipe(precision=precision, correction=correction, seed=seed, grpo=Grpo(steps=steps),
               **recipe)
    )  # fmt: skip
    rows: list[dict] = [{"step": 0}]
    rows += [
        {"step": n, "mismatch/kl": kl, "health/state": state * (n == 2),
         "time/step": step * (10 if n == 1 else 1), "time/rollout": step / 2}
        for n in range(1, steps + 1)
    ]  # fmt: skip
    rows[-1]["val/accuracy"] = last
    return FinishedRun(Path(f"runs/{plan.run_name}"), plan, rows, environment)


def nemo(*arguments, **changes) -> FinishedRun:
    base = "examples/configs/grpo_math_1B_megatron.yaml"
    stock = Glue("stock", "stock", "bf16", "off", Recalibrate("forward"))
    settings = {
        "backend": "nemo", "model": Model(base_config=base), "cluster": Cluster(gpus_per_node=1),
        "glue": stock,
    }  # fmt: skip
    return run(*arguments, **(settings | changes))


@pytest.mark.parametrize("before", ["fa3", "xqa"])
def test_the_kernel_over_an_fp8_cache_neither_unmatches_a_baseline_nor_splits_its_seeds(before):
    kv = dataclasses.replace(FP8, name="fp8-kv-attn", rollout_kv="fp8")
    baseline = [
        nemo(BF16, seed=1, glue=Glue(decode=before)), nemo(BF16, seed=2, glue=Glue(decode="xqa"))
    ]  # fmt: skip
    mine = [nemo(kv, TIS, seed=n, glue=Glue(decode="xqa")) for n in (1, 2)]
    found = compare([*baseline, *mine])
    assert [len(cell.runs) for cell in found.cells] == [2, 2]
    assert [run.settings.get("glue.decode") for run in (baseline[0], mine[0])] == [None, "xqa"]
    assert mine[0].matched == baseline[0].matched
    other = nemo(kv, TIS, glue=Glue(decode="fa3"))
    labels = [cell.label for cell in compare([*mine, other]).cells]
    assert sorted(label.split()[-1] for label in labels) == ["glue.decode=fa3", "glue.decode=xqa"]


def only(*runs):
    [found] = against_baselines(compare(runs))
    return found


def pairs(differences, **changes):
    """Seeds of an FP8 cell and its baseline whose accuracies differ by so many points."""
    baselines = [run(BF16, seed=seed, last=0.5) for seed in range(len(differences))]
    cells = [
        run(FP8, seed=seed, last=0.5 + points / 100, **changes)
        for seed, points in enumerate(differences)
    ]
    return [*baselines, *cells]


@pytest.mark.parametrize(
    ("differences", "word"),
    [
        ([5.0, 5.5, 6.0], "higher"),
        ([-5.0, -5.5, -6.0], "lower"),
        ([0.2, -0.2, 0.0], "equal"),
        ([4.0, -4.0, 0.0], "open"),
        ([-4.0], "one seed"),
    ],
)
def test_the_word_on_accuracy_follows_the_interval(differences, word):
    found = only(*pairs(differences))
    assert found.accuracy_word == word and found.seeds == len(differences)
    assert found.accuracy.mean == pytest.approx(sum(differences) / len(differences))


def test_equal_needs_the_whole_interval_within_the_bound():
    deviation = EQUAL / 4.303 * math.sqrt(3)  # the interval of three seeds is then EQUAL wide
    inside, outside = deviation * 0.9, deviation * 1.1
    assert only(*pairs([-inside, 0.0, inside])).accuracy_word == "equal"
    assert only(*pairs([-outside, 0.0, outside])).accuracy_word == "open"


def test_seeds_are_paired_before_they_are_averaged():
    baselines = [run(BF16, seed=seed, last=0.2 * seed) for seed in (1, 2, 3)]
    cells = [run(FP8, seed=seed, last=0.2 * seed + 0.05) for seed in (2, 3, 4)]
    found = only(*baselines, *cells)
    assert found.seeds == 2 and found.accuracy.mean == pytest.approx(5.0)
    assert found.accuracy.half == pytest.approx(0, abs=1e-9) and found.accuracy_word == "higher"


def test_mismatch_stands_beside_the_baselines_and_health_is_the_worst_of_any_seed():
    runs = [run(BF16, seed=1, kl=1e-3), run(BF16, seed=2, kl=2e-3)]
    runs += [run(FP8, seed=1, kl=1e-2), run(FP8, seed=2, kl=4e-2, state=1)]
    found = only(*runs)
    assert found.kl.mean == pytest.approx(0.025) and found.baseline_kl.mean == pytest.approx(1.5e-3)
    assert "KL 2.5e-02 ±1.9e-01, BF16's 1.5e-03; worst step watch" in str(found)


def test_a_baseline_without_mismatch_is_zero_and_no_division():
    assert "BF16's 0.0e+00" in str(only(run(BF16, kl=0.0), run(FP8)))


def test_speed_is_that_of_the_median_step_after_the_first_inside_nemo_rl():
    runs = [nemo(BF16, seed=seed, step=2.0) for seed in (1, 2)]
    runs += [nemo(FP8, seed=1, step=1.0), nemo(FP8, seed=2, step=1.25)]
    found = only(*runs)
    assert found.step.mean == pytest.approx((2.0 + 1.6) / 2) == pytest.approx(found.rollout.mean)
    assert found.speed_word == "open"
    slow = [nemo(BF16, seed=seed, step=2.0) for seed in (1, 2)]
    slow += [nemo(FP8, seed=1, step=2.5), nemo(FP8, seed=2, step=2.51)]
    assert only(*slow).speed_word == "slower"


@pytest.mark.parametrize("key", ["hardware.gpus", "versions.torch"])
def test_seconds_of_other_hardware_or_versions_are_not_compared(key):
    found = only(nemo(BF16), nemo(FP8, environment=MACHINE | {key: "other"}))
    assert found.step is None and found.rollout is None and found.speed_word == "-"
    assert only(nemo(BF16), nemo(FP8, environment=MACHINE | {"commit": "other"})).step


def test_the_local_backend_has_no_speed_and_nor_has_a_run_without_environment():
    assert only(run(BF16), run(FP8)).step is None
    assert only(nemo(BF16, environment={}), nemo(FP8, environment={})).step is None


def test_what_differs_beside_precision_and_correction_is_named_and_no_word_is_said():
    runs = pairs([5.0, 5.5, 6.0], steps=4)
    found = only(*runs)
    assert found.unmatched == ("grpo.steps is 4, the baseline's 3",)
    assert found.accuracy_word == found.speed_word == "not matched"
    assert "NOT MATCHED: grpo.steps is 4, the baseline's 3" in str(found)
    page = verdicts(compare(runs))
    assert "- **fp8-linear-none** is not matched: grpo.steps is 4, the baseline's 3" in page
    assert "| higher |" not in page and "| not matched |" in page


def test_a_run_from_other_weights_is_no_baseline():
    baseline, cell = (
        run(each, environment=MACHINE | {"weights": each.name}) for each in (BF16, FP8)
    )
    found = only(baseline, cell)
    assert found.unmatched == ("starting weights is fp8-linear, the baseline's bf16",)
    assert found.accuracy_word == "not matched"
    assert not [note for note in compare([baseline, cell]).notes if "environments differ" in note]


def test_one_seed_from_other_weights_is_enough():
    def weights(name):
        return MACHINE | {"weights": name}

    runs = [run(each, seed=n, environment=weights("a")) for each in (BF16, FP8) for n in (1, 2)]
    assert only(*runs).unmatched == ()
    runs[-1] = run(FP8, seed=2, environment=weights("b"))
    assert only(*runs).unmatched == ("starting weights is a or b, the baseline's a",)
    [note] = [each for each in compare(runs).notes if "not matched" in each]
    assert note.endswith(" is a in bf16-none, fp8-linear-none; b in fp8-linear-none")
    runs[-1] = run(FP8, seed=2, environment={})  # not begun yet
    assert only(*runs).unmatched == ()


def test_a_pair_that_has_not_finished_says_why_it_has_no_accuracy():
    short = run(FP8)
    unfinished = FinishedRun(short.path, short.plan, short.rows[:2], short.environment)
    assert ": no accuracy before both have finished; KL 1.0e-02" in str(only(run(BF16), unfinished))
    assert "before both" not in str(only(run(BF16), run(FP8)))


def test_each_seed_has_its_own_problems_and_those_of_one_seed_must_be_the_baselines():
    def with_problems(precision, seed, digest, **recipe):
        return run(precision, seed=seed, environment=MACHINE | {"problems": digest}, **recipe)

    baselines = [with_problems(BF16, 1, "one"), with_problems(BF16, 2, "two")]
    alike = [*baselines, with_problems(FP8, 1, "one"), with_problems(FP8, 2, "two")]
    assert compare(alike).notes == (EMULATION,) and not only(*alike).unmatched
    other = [*baselines, with_problems(FP8, 1, "one"), with_problems(FP8, 2, "else")]
    assert only(*other).unmatched == ("problem set of seed 2 is else, the baseline's two",)
    [_, note] = compare(other).notes
    assert note == "not matched: problem set of seed 2 is two in bf16-none; else in fp8-linear-none"
    file = {"data": Data("jsonl", path="problems")}
    edited = [with_problems(*each, **file) for each in ((BF16, 1, "before"), (FP8, 1, "after"))]
    [unmatched] = only(*edited).unmatched
    assert unmatched == "problem set of seed 1 is after, the baseline's before"
    both = [
        with_problems(each, 1, f"{each.name}, {difficulty}", data=Data(difficulty=difficulty))
        for each in (BF16, FP8)
        for difficulty in (1, 3)
    ]
    [note] = [each for each in compare(both).notes if "problem set of seed 1" in each]
    assert note.count(" in ") == 4, "of both data"
    unknown = [*baselines, with_problems(FP8, 1, "one"), run(FP8, seed=2)]
    assert compare(unknown).notes == (EMULATION,) and not only(*unknown).unmatched


def test_the_baseline_is_the_bf16_cell_that_differs_least_and_of_equals_the_uncorrected():
    long, short = run(BF16, steps=9), run(BF16)
    found = only(long, run(FP8), short)
    assert found.unmatched == () and found.accuracy.seeds == 1
    runs = [run(BF16, TIS), run(BF16), run(E2E, TIS)]
    assert only(*runs).baseline == "bf16-none"
    assert only(run(BF16, TIS), run(FP8)).baseline == "bf16-tis"


def test_a_baseline_is_of_the_same_model_and_bf16_cells_have_none():
    other = run(FP8, model=Model("tiny-qwen3-moe"))
    assert against_baselines(compare([run(BF16), run(BF16, TIS), other])) == []
    assert "No FP8 cell here has a BF16 run" in verdicts(compare([other]))


def test_end_to_end_fp8_is_not_taken_for_bf16_though_a_key_is():
    half = dataclasses.replace(BF16, name="fp8-e2e", train_linear="fp8", rollout_linear="fp8")
    assert only(run(BF16), run(half)).cell == "fp8-e2e-none"


def test_an_unfinished_run_has_no_accuracy_and_the_rest_is_said():
    found = only(run(BF16), dataclasses.replace(run(FP8), rows=run(FP8).rows[:2]))
    assert found.accuracy is None and found.accuracy_word == "-" and found.kl is not None


def test_a_row_of_the_page_has_every_number():
    page = verdicts(compare(pairs([0.2, -0.2, 0.0])))
    [row] = [line for line in page.splitlines() if line.startswith("| fp8-linear-none")]
    assert [each.strip() for each in row.split("|")[1:-1]] == [
        "fp8-linear-none", "bf16-none", "3", "+0.0 ±0.5", "equal", "1.0e-02",
        "1.0e-02", "healthy", "-", "-", "-",
    ]  # fmt: skip


def test_a_baseline_that_learned_nothing_still_counts():
    baselines = [run(BF16, seed=seed, last=last) for seed, last in ((1, 0.0), (2, 0.5), (3, 0.5))]
    cells = [run(FP8, seed=seed, last=last) for seed, last in ((1, 0.9), (2, 0.5), (3, 0.5))]
    found = only(*baselines, *cells)
    assert found.accuracy.mean == pytest.approx(30) and found.accuracy_word == "open"


def test_a_cell_of_which_a_seed_died_gets_no_word_on_accuracy():
    whole = pairs([0.1, 0.1, 0.2, 0.1])
    whole[-1] = dataclasses.replace(whole[-1], rows=whole[-1].rows[:2])
    found = only(*whole)
    assert (found.seeds, found.validated) == (4, 3) and found.accuracy_word == "3 of 4 finished"
    assert "accuracy +0.1 ±0.1 points (3 of 4 finished)" in str(found)


def test_a_run_that_is_not_as_far_is_compared_over_the_steps_of_both():
    def grows(made):
        rows = [row | dict.fromkeys(("time/step", "mismatch/kl"), row["step"]) for row in made.rows]
        return dataclasses.replace(made, rows=[{"step": 0}, *rows[1:]])

    baselines = [grows(nemo(BF16, seed=seed, steps=100)) for seed in (1, 2)]
    cells = [grows(nemo(FP8, seed=seed, steps=100)) for seed in (1, 2)]
    cells = [dataclasses.replace(each, rows=each.rows[:21]) for each in cells]
    found = only(*baselines, *cells)
    assert found.step.mean == 1 and found.speed_word == "equal"
    assert found.kl.mean == found.baseline_kl.mean == pytest.approx(10.5)


@pytest.mark.parametrize(
    "change", [{"nodes": 2}, {"gpus_per_node": 8}, {"rollout_gpus": 1}, {"gpu": "h200"}]
)
def test_speed_on_other_nodes_is_not_compared(change):
    cluster = Cluster(gpus_per_node=2)
    other = dataclasses.replace(cluster, **change)
    found = only(nemo(BF16, cluster=cluster), nemo(FP8, cluster=other))
    assert found.step is None and found.speed_word == "-"


def test_another_correction_of_the_baselines_is_named_and_its_own_or_none_is_not():
    tight = dataclasses.replace(TIS, truncate=0.01)
    [said] = only(run(BF16, tight), run(FP8, TIS)).unmatched
    assert said == "the baseline's correction is tis: level=token truncate=0.01"
    assert only(run(BF16, TIS), run(FP8, TIS)).unmatched == ()
    assert only(run(BF16), run(FP8, TIS)).unmatched == ()


def test_a_page_says_what_a_cell_is_whatever_a_line_has_made_of_its_options():
    off, wide = Correction("tis"), dataclasses.replace(TIS, truncate=100, mask="token", high=2.0)
    page = to_markdown(compare([run(BF16), run(FP8, off), run(E2E, wide)]), {}, "x")
    lines = page.partition("## Cells\n\n")[2].split("\n\n")[0].splitlines()
    assert lines == [
        "- **bf16-none**: BF16; no correction",
        "- **fp8-linear-tis**: rollout_linear=fp8; no correction",
        "- **fp8-e2e-tis**: rollout_linear=fp8 train_linear=fp8; "
        "level=token truncate=100 mask=token high=2.0",
    ]


def test_the_same_seed_twice_is_one_seed_and_the_longer_run_counts():
    twice = [run(FP8, last=0.7), run(FP8, last=0.9, outputs="elsewhere")]
    half = dataclasses.replace(twice[0], rows=twice[0].rows[:1], path=Path("copy"))
    comparison = compare([run(BF16), half, *twice])
    assert [len(cell.runs) for cell in comparison.cells] == [1, 1]
    assert comparison.cells[1].runs[0].rows[-1]["val/accuracy"] == 0.9
    assert any(note.startswith("copy: left out") for note in comparison.notes)


def test_what_diverged_is_called_so_and_not_open():
    assert only(*pairs([math.nan, 1.0])).accuracy_word == "diverged"
