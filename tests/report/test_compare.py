"""Reports: cells grouped as they were run, numbers as by hand, nothing missing shown as zero."""

import dataclasses
import gzip
import io
import json
import math
import subprocess
import sys
import time
import warnings
from itertools import chain
from pathlib import Path

import pytest
from fp8_nemo.recipes.compare import main
from rich.console import Console

from fp8_nemo.plan.plan import plan_recipe
from fp8_nemo.recipe.options.cluster import Cluster, Logging
from fp8_nemo.recipe.options.correction import Correction
from fp8_nemo.recipe.options.model import Model
from fp8_nemo.recipe.options.precision import Glue, Precision, Recalibrate
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.options.training import Grpo
from fp8_nemo.recipe.plain import to_json
from fp8_nemo.report.compare import EMULATION, SECTIONS, compare
from fp8_nemo.report.figures import CURVES, draw_figures, finding, save_figures
from fp8_nemo.report.page import comparison_table, to_markdown, write_pages
from fp8_nemo.report.runs import ARCHIVE, find_runs, read_run, read_runs
from fp8_nemo.runs import provenance, run_dir
from fp8_nemo.runs.metrics import RunDirError, append_metrics
from fp8_nemo.runs.terminal import short_path
from tests.conftest import slowed

BF16 = Precision("bf16")
KV = Precision("fp8-kv-attn", rollout_linear="fp8", rollout_kv="fp8")
E2E_KV = dataclasses.replace(KV, name="fp8-e2e-kv-attn", train_linear="fp8")
NONE, TIS = Correction("none"), Correction("tis", level="token", truncate=2.0)
SEQ_MIS = Correction("seq-mis", level="sequence", mask="sequence", low=0.5, high=2.0)


def metrics(step: int, **changes) -> dict:
    """A row as the local backend writes it."""
    row = {
        "step": step, "reward/mean": 0.5, "rollout/tokens": 780, "rollout/mean_length": 3.05,
        "mismatch/kl": 0.006, "mismatch/token_mult_prob_error": 1.05,
        "mismatch/abs_log_ratio_p99": 0.46, "mismatch/abs_log_ratio_max": 0.7, "mismatch/ess": 0.98,
        "correction/multiplier_mean": 1.0, "correction/ess": 0.98,
        "correction/clipped_fraction": 0.0, "correction/masked_fraction": 0.0,
        "refit/bytes": 1000, "refit/verified_weights": 14, "time/step": 0.4,
    }  # fmt: skip
    row |= {key.replace("__", "/"): value for key, value in changes.items()}
    return {key: value for key, value in row.items() if value is not None}


@pytest.fixture
def make(tmp_path):
    """Freeze a run directory and fill it: a first validation, then `rows`."""

    def run(rows=(), *, first=0.4, environment=True, folder="outputs", steps=4, **recipe) -> Path:
        settings = {"precision": KV, "correction": TIS, "grpo": Grpo(steps=steps)} | recipe
        if settings.get("backend") == "nemo":
            base = "examples/configs/grpo_math_1B_megatron.yaml"
            settings |= {"model": Model(base_config=base), "cluster": Cluster(gpus_per_node=1)}
            settings["glue"] = Glue("stock", "stock", "bf16", "off", Recalibrate("forward"))
        plan = plan_recipe(Recipe(outputs=f"{tmp_path}/{folder}", **settings))
        [frozen] = run_dir.freeze([plan])
        if environment:
            provenance.write_environment(frozen.path)
        validated = {} if first is None else {"val/accuracy": first, "refit/bytes": 1000}
        append_metrics(frozen.path, {"step": 0} | validated)
        for row in rows:
            append_metrics(frozen.path, row)
        return frozen.path

    return run


def finished(last=0.7, **changes) -> list[dict]:
    rows = [metrics(step, **changes) for step in range(1, 5)]
    return [*rows[:-1], rows[-1] | {"val/accuracy": last}]


def shown(cell) -> dict[str, str]:
    return {column.name: cell.show(column) for columns in SECTIONS.values() for column in columns}


def only_cell(*paths):
    [cell] = compare([read_run(path) for path in paths]).cells
    return cell


def as_text(comparison) -> str:
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(comparison_table(comparison))
    return console.export_text()


def test_run_directories_are_found_alone_or_below_a_folder_but_not_in_staging(make, tmp_path):
    first, second = make(seed=1), make(seed=2)
    (first / "checkpoints" / "step-000001").mkdir(parents=True)
    (first / "checkpoints" / "step-000001" / "metrics.jsonl").touch()
    staged = tmp_path / "outputs" / ".staging-x" / "tiny-llama" / "bf16-none" / "s1-abc"
    staged.mkdir(parents=True)
    (staged / "plan.json").write_text("{}")
    assert find_runs(tmp_path / "outputs") == sorted([first, second])
    assert find_runs(first) == [first]
    assert find_runs(tmp_path / "nothing") == []


def test_of_files_called_like_an_archive_only_those_of_runs_count(make, tmp_path):
    [run], folder = [make(finished())], tmp_path / "outputs"
    stale = {"run": str(run.relative_to(folder)), "plan": {}, "environment": {}, "rows": []}
    file, problems = tmp_path / f"outputs{ARCHIVE}", folder / f"train{ARCHIVE}"
    problems.write_bytes(gzip.compress(b'{"question": "1+1"}\n[1]\n'))
    file.write_bytes(gzip.compress(f"{to_json(stale)}\n".encode()))
    assert find_runs(folder) == [run]
    assert read_run(run).rows, "of the directory, not of the archive"
    comparison = compare([read_run(run)])
    page, *_ = write_pages(comparison, [file], "line", with_html=False)
    assert page == short_path(folder) / "report" / "report.md"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(RunDirError, match=r"outputs\.jsonl\.gz: cannot be read"):
        find_runs(folder)


def test_a_run_without_its_plan_is_still_found_so_that_it_is_named_as_damaged(make):
    path = make(finished())
    (path / "plan.json").unlink()
    runs, [line] = read_runs(find_runs(path))
    assert runs == [] and str(path) in line


def test_a_run_is_finished_when_its_last_planned_step_is_there(make):
    whole, half, new = (
        make(finished(), seed=1),
        make(finished()[:2], seed=2),
        make(first=None, seed=3),
    )
    states = [(run.state, run.steps) for run in map(read_run, (whole, half, new))]
    assert states == [("finished", 4), ("unfinished", 2), ("unfinished", 0)]


def test_numbers_of_one_run_equal_those_computed_by_hand(make):
    rows = [
        metrics(step, reward__mean=step / 10, mismatch__kl=step * 1e-3,
                mismatch__abs_log_ratio_p99=step / 4, mismatch__token_mult_prob_error=1 + step / 8,
                correction__multiplier_mean=1 + step / 10, correction__ess=1 - step / 100,
                correction__clipped_fraction=step / 1000, correction__masked_fraction=step / 100,
                refit__verified_weights=15 - (step == 3),
                recalibrate__saturated_fraction=step / 100, recalibrate__max_drift=1 / step)
        for step in range(1, 9)
    ]  # fmt: skip
    rows[3]["val/accuracy"], rows[7]["val/accuracy"] = 0.9, 0.65
    cell = only_cell(make(rows, steps=8))
    assert shown(cell) == {
        "first acc.": "40.0%", "last acc.": "65.0%", "gain": "+25.0",
        "reward": "0.600",  # steps 4 to 8
        "KL": "4.5e-03", "p99": "1.125", "prob. error": "1.562", "mult. mean": "1.450",
        "mult. ESS": "0.955", "clip": "0.45%", "mask": "4.50%",
        "refit bytes": "1,000", "refit /BF16": "-", "verified": "14",
        "saturated": "4.50%",
        "drift": "50.0%",  # step 1 is left out
    }  # fmt: skip


def test_seeds_are_averaged_with_a_95_percent_interval(make):
    paths = [make(finished(last), seed=seed) for seed, last in ((7, 0.6), (8, 0.7), (9, 0.5))]
    cell = only_cell(*paths)
    assert (cell.seeds, cell.steps) == ("7, 8, 9", "4/4")
    gain = cell.numbers["gain"]
    half = 4.303 * 10 / math.sqrt(3)  # Student's t at 2 degrees of freedom, deviation 10 points
    assert gain.mean == pytest.approx(20) and gain.half == pytest.approx(half) and gain.seeds == 3
    assert shown(cell)["last acc."] == "60.0% ±24.8%"
    assert shown(cell)["gain"] == "+20.0 ±24.8"
    assert shown(cell)["KL"] == "6.0e-03"  # equal in all seeds


@pytest.mark.parametrize(
    "changes",
    [
        {"logging": Logging(wandb=True)},
        {"cluster": Cluster(nodes=2)},
        {"folder": "elsewhere"},
        {"seed": 1},
        {"backend": "local"},  # what auto had chosen
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_no_part_of_a_cell_does_not_split_it(make, changes):
    assert only_cell(make(finished(), seed=5), make(finished(), **({"seed": 6} | changes)))


def test_runs_that_differ_in_a_setting_are_never_averaged_and_the_label_says_in_what(make):
    loose = dataclasses.replace(TIS, truncate=3.0)
    paths = [
        make(finished(0.5)),
        make(finished(0.9), correction=loose),
        make(finished(), glue=Glue(verify="names")),
    ]
    comparison = compare(map(read_run, paths))
    labels = [cell.label for cell in comparison.cells]
    assert labels == [
        "fp8-kv-attn-tis correction.truncate=2.0 glue.verify=bytes",
        "fp8-kv-attn-tis correction.truncate=3.0 glue.verify=bytes",
        "fp8-kv-attn-tis correction.truncate=2.0 glue.verify=names",
    ]
    assert [shown(cell)["last acc."] for cell in comparison.cells] == ["50.0%", "90.0%", "70.0%"]


def test_a_key_of_nemo_that_only_one_run_has_is_in_both_labels(make):
    nemo = {"precision": BF16, "backend": "nemo"}
    own = {"policy": {"generation": {"vllm_kwargs": {"max_num_seqs": 1}}}}
    paths = [make(finished(), **nemo), make(finished(), nemo=own, **nemo)]
    labels = [cell.label for cell in compare(map(read_run, paths)).cells]
    key = "nemo.policy.generation.vllm_kwargs.max_num_seqs"
    assert labels == [f"bf16-tis {key}=not set", f"bf16-tis {key}=1"]


def test_cells_of_several_models_carry_the_model(make):
    paths = [make(finished()), make(finished(), model=Model("tiny-qwen3-moe"))]
    labels = [cell.label for cell in compare(map(read_run, paths)).cells]
    assert labels == ["tiny-llama/fp8-kv-attn-tis", "tiny-qwen3-moe/fp8-kv-attn-tis"]


def test_what_is_not_matched_between_cells_is_a_note_and_matched_cells_have_none(make):
    fp8, bf16 = make(finished()), make(finished(), precision=BF16, correction=NONE)
    assert compare([read_run(fp8), read_run(bf16)]).notes == (EMULATION,)
    longer = make(finished(), precision=BF16, correction=NONE, steps=9, seed=3)
    notes = compare([read_run(fp8), read_run(longer)]).notes
    assert "not matched: grpo.steps is 4 in fp8-kv-attn-tis; 9 in bf16-none" in notes
    assert "not matched: seed is 42 in fp8-kv-attn-tis; 3 in bf16-none" in notes


def test_cells_stand_in_the_order_in_which_they_were_found(make):
    runs = [
        read_run(make(finished(mismatch__kl=kl), precision=each))
        for each, kl in ((KV, 1e-3), (BF16, 1e-2))
    ]
    assert [cell.label for cell in compare(runs).cells] == ["fp8-kv-attn-tis", "bf16-tis"]
    assert [cell.label for cell in compare(runs[::-1]).cells] == ["bf16-tis", "fp8-kv-attn-tis"]


def test_refit_bytes_are_relative_to_the_bf16_rollout_of_the_same_model(make):
    moe = Model("tiny-qwen3-moe")
    paths = [
        make(finished(refit__bytes=2000), precision=BF16, first=None),
        make(finished(refit__bytes=1100), first=None),
        make(finished(refit__bytes=900), model=moe, first=None),
    ]
    bf16, fp8, other_model = compare(map(read_run, paths)).cells
    shares = [shown(cell)["refit /BF16"] for cell in (bf16, fp8, other_model)]
    assert shares == ["1.00", "0.55", "-"]
    assert shown(fp8)["refit bytes"] == "1,100"


def test_a_missing_number_is_a_dash_and_a_zero_is_a_zero(make):
    cell = only_cell(make(finished(refit__bytes=None), precision=BF16, first=None))
    assert {name for name, text in shown(cell).items() if text == "-"} == {
        "first acc.", "gain", "refit bytes", "refit /BF16", "saturated", "drift",
    }  # fmt: skip
    assert shown(cell)["clip"] == "0.00%"


def without(steps, rows):
    return [row for row in rows if row["step"] not in steps]


def test_missing_steps_are_named_in_notes_and_in_the_table_of_runs(make):
    whole, holed = make(finished(), seed=1), make(without({1, 3}, finished()), seed=2)
    comparison = compare([read_run(whole), read_run(holed)])
    said = f"{holed}: metrics.jsonl lacks step 1, 3 of 4: its curves have a hole"
    assert [note for note in comparison.notes if said in note]
    assert not [note for note in comparison.notes if str(whole) in note]
    assert "| finished, without step 1, 3 |" in to_markdown(comparison, {}, "make")


@pytest.mark.parametrize(
    ("key", "every", "values", "drawn"),
    [
        ("reward/mean", 10, {1: 0.1, 2: 0.2, 5: 0.5, 6: 0.6}, [1, 2, None, 5, 6]),
        ("reward/mean", 10, {1: 0.1, 2: math.nan, 3: 0.3, 4: 0.4}, [1, None, 3, 4]),
        ("val/accuracy", 10, {0: 0.1, 10: 0.2, 25: 0.3, 30: 0.4}, [0, 10, None, 25, 30]),
        ("val/accuracy", 10, {0: 0.1, 10: 0.2, 20: 0.3, 25: 0.4}, [0, 10, 20, 25]),
    ],
)
def test_no_line_crosses_a_hole(make, key, every, values, drawn):
    rows = [{"step": step, key: value} for step, value in values.items() if step]
    grpo = Grpo(steps=40, validate_every=every)
    comparison = compare([read_run(make(rows, first=values.get(0), grpo=grpo))])
    [curve] = [each for each in CURVES if each.key == key]
    [figure] = [figure for each, figure in draw_figures(comparison) if each == curve]
    [line] = figure.axes[0].lines
    found = [None if math.isnan(step) else step for step in line.get_xdata()]
    assert found == drawn
    alone = [at for at, step in enumerate(drawn) if step == 1 and drawn[at + 1] is None]
    assert {*alone} <= {*line.get_markevery()}, "no line would tell of it"


def test_a_number_that_was_none_is_one_in_the_table_too(make):
    rows = [metrics(step) for step in range(1, 4)] + [metrics(4, mismatch__kl=math.inf)]
    texts = shown(only_cell(make(rows)))
    assert texts["KL"] == "nan" and texts["p99"] == "0.460"


def test_the_terminals_table_breaks_a_label_where_its_parts_meet(make):
    small = Grpo(steps=4, learning_rate=1e-3)
    runs = [make(finished()), make(finished(), grpo=small), make(finished(), precision=E2E_KV)]
    runs.append(make(finished(), model=Model(name="tiny-qwen3-moe")))
    console = Console(file=io.StringIO(), width=100)
    console.print(comparison_table(compare(map(read_run, runs))))
    firsts = [line[:16].rstrip() for line in console.file.getvalue().splitlines()]
    assert firsts.count("tiny-llama/") == 3 and firsts.count("fp8-kv-attn-tis") == 3
    assert "grpo.learning_ra" in firsts and "fp8-e2e-kv-attn-" in firsts


def test_a_run_that_fell_apart_leaves_the_table_as_wide_as_it_was(make):
    path = make(finished(mismatch__token_mult_prob_error=2.5e83, refit__bytes=5_600_000))
    texts = shown(only_cell(path))
    assert texts["prob. error"] == "2.5e+83" and texts["refit bytes"] == "5,600,000"
    seeds = [make(finished(mismatch__token_mult_prob_error=x), seed=x) for x in (1, 90_000)]
    assert shown(only_cell(*seeds))["prob. error"] == "4.5e+04 ±5.7e+05"


def test_an_unfinished_run_has_no_last_validation_even_if_it_validated_on_its_way(make):
    rows = [metrics(1), metrics(2, val__accuracy=0.9)]
    texts = shown(only_cell(make(rows)))
    assert (texts["first acc."], texts["last acc."], texts["gain"]) == ("40.0%", "-", "-")
    assert texts["KL"] == "6.0e-03"


def test_a_number_that_some_seeds_lack_says_how_many_have_it(make):
    cell = only_cell(make(finished(0.7), seed=1), make(finished(0.7)[:2], seed=2))
    assert cell.steps == "2-4/4"
    assert shown(cell)["last acc."] == "70.0% (1/2)"
    assert shown(cell)["reward"] == "0.500"


def test_a_run_that_has_not_started_is_a_row_of_dashes(make, tmp_path):
    comparison = compare([read_run(make(first=None, environment=False))])
    assert set(shown(comparison.cells[0]).values()) == {"-"}
    assert save_figures(comparison, tmp_path) == {}
    assert "0/4" in to_markdown(comparison, {}, "x")


def test_the_nan_of_a_diverged_run_stays_visible(make, tmp_path):
    paths = [make(finished(), seed=1), make(finished(mismatch__kl=math.nan), seed=2)]
    comparison = compare(map(read_run, paths))
    assert shown(comparison.cells[0])["KL"] == "nan ±nan"
    assert len(list(chain(*save_figures(comparison, tmp_path).values()))) == len(CURVES)


def damage_plan(path: Path) -> str:
    text = (path / "plan.json").read_text()
    (path / "plan.json").write_text(text[: len(text) // 2])
    return "plan.json"


def damage_metrics(path: Path) -> str:
    lines = (path / "metrics.jsonl").read_text().splitlines()
    (path / "metrics.jsonl").write_text("\n".join([*lines[:2], lines[2][:30], *lines[3:]]) + "\n")
    return "metrics.jsonl:3"


def damage_bytes(path: Path) -> str:
    (path / "metrics.jsonl").write_bytes(b"\xff\xfe\x00\n\n")
    return "it is not UTF-8"


def damage_environment(path: Path) -> str:
    (path / "environment.json").write_text('{"python": ')
    return str(path)


@pytest.mark.parametrize("damage", [damage_plan, damage_metrics, damage_bytes, damage_environment])
def test_a_damaged_directory_is_one_line_and_the_others_are_compared(
    make, damage, capsys, tmp_path
):
    whole, broken = make(finished(), seed=1), make(finished(), seed=2)
    named = damage(broken)
    assert main([str(tmp_path / "outputs")]) == 0
    [line] = capsys.readouterr().err.splitlines()
    assert str(broken) in line and named in line
    page = (tmp_path / "outputs" / "report" / "report.md").read_text()
    assert f"> {line}" in page and str(whole) in page and f"| {broken} |" not in page


def test_a_last_line_cut_short_by_a_kill_is_left_out(make):
    path = make(finished())
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')
    assert read_run(path).steps == 4


def test_environments_that_differ_are_named_and_the_common_part_is_listed(make):
    fp8, bf16 = make(finished()), make(finished(), precision=BF16)
    content = json.loads((bf16 / "environment.json").read_text())
    content["versions"]["omegaconf"], content["commit"] = "1.0", "abc-dirty"
    (bf16 / "environment.json").write_text(json.dumps(content))
    comparison = compare([read_run(fp8), read_run(bf16)])
    notes = [note for note in comparison.notes if note.startswith("environments differ")]
    assert (
        len(notes) == 2 and "; 1.0 in bf16-tis" in notes[0] and "abc-dirty in bf16-tis" in notes[1]
    )
    page = to_markdown(comparison, {}, "x")
    assert f"- python: {content['python']}" in page and "- hardware.cores:" in page
    assert "- commit:" not in page


def test_a_run_without_a_recorded_environment_is_named_and_does_not_hide_the_others(make):
    comparison = compare(
        map(read_run, (make(finished()), make(finished(), seed=2, environment=False)))
    )
    [note] = [note for note in comparison.notes if "environment.json" in note]
    assert "/s2-" in note and "/s42-" not in note
    assert not any(note.startswith("environments differ") for note in comparison.notes)
    assert "- python:" in to_markdown(comparison, {}, "x")


def test_local_runs_are_called_an_emulation_and_others_are_not(make):
    local = compare([read_run(make(finished()))])
    nemo = compare([read_run(make(finished(), backend="nemo"))])
    assert EMULATION in to_markdown(local, {}, "x")
    assert "emulation" in as_text(local)
    assert EMULATION not in to_markdown(nemo, {}, "x")


def test_the_page_names_its_command_and_has_every_column_cell_and_run(make):
    paths = [make(finished()), make(finished(), precision=BF16)]
    page = to_markdown(
        compare(map(read_run, paths)),
        {"Learning": [Path("reward.png")]},
        "python -m recipes.compare x",
    )
    assert "`python -m recipes.compare x`" in page
    for columns in SECTIONS.values():
        heading = "| cell | seeds | steps | " + " | ".join(column.name for column in columns) + " |"
        assert heading in page
    assert "| bf16-tis | 42 | 4/4 | 40.0% | 70.0% | +30.0 | 0.500 |" in page
    assert all(f"| {path} | 4 | 4 | finished |" in page for path in paths)
    assert "](reward.png)" in page and "](mismatch.png)" not in page


def test_the_page_says_which_step_was_worst_and_why(make):
    rows = finished(mismatch__kl=0.01)
    rows[2] |= {"health/state": 1, "mismatch/kl": 0.03}
    well, ill = make(finished(), precision=BF16), make(rows)
    page = to_markdown(compare(map(read_run, (well, ill))), {}, "x")
    assert f"- {ill}: watch in 1 of 4 steps, worst step 3: mismatch/kl 0.03 &gt; 0.02: " in page
    assert f"- {well}: " not in page and "other than healthy" not in page
    assert "No step was other than healthy." in to_markdown(compare([read_run(well)]), {}, "x")


def test_a_pipe_in_a_setting_does_not_break_the_page(make):
    nemo = {"backend": "nemo", "precision": BF16}
    own = [{"policy": {"generation": {"vllm_kwargs": {"revision": text}}}} for text in ("x|y", "z")]
    paths = [make(finished(), nemo=each, **nemo) for each in own]
    assert "| bf16-tis nemo.policy.generation.vllm_kwargs.revision=x\\|y |" in to_markdown(
        compare(map(read_run, paths)), {}, "x"
    )


def test_the_terminal_table_keeps_every_number_whole_in_100_columns(make):
    runs = []
    for seed, last in ((1, 0.5), (2, 0.8), (3, 0.1)):
        shares = {
            f"correction__{key}": last for key in ("multiplier_mean", "ess", "masked_fraction")
        }
        wide = {"reward__mean": last / 3, "mismatch__kl": last / 99} | shares
        wide |= {"recalibrate__saturated_fraction": last, "correction__clipped_fraction": last / 50}
        for precision in (BF16, E2E_KV):
            paths = [
                make(finished(last, **wide), precision=precision, correction=SEQ_MIS, seed=seed)
            ]
            paths += [make([], precision=precision, correction=SEQ_MIS, seed=seed + 9)] * (
                last == 0.8
            )
            runs += map(read_run, paths)
    text = as_text(compare(runs))
    assert "…" not in text and max(map(len, text.splitlines())) <= 100
    for number in ("46.67%", "±87.25%", "4.7e-03", "±8.8e-03", "+6.7", "±87.2", "(3/4)", "0-4/4"):
        assert number in text
    assert "\nfp8-e2e-kv-attn- " in text and "\nseq-mis " in text


@pytest.mark.parametrize("kl", [0.006, 0.0])
def test_figures_are_pngs_drawn_without_a_warning_also_where_kl_is_zero(make, tmp_path, kl):
    paths = [make(finished(mismatch__kl=kl), seed=1), make(finished()[:2], seed=2)]
    paths += [make(finished(), precision=BF16), make(first=None, precision=E2E_KV)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = save_figures(compare(map(read_run, paths)), tmp_path)
    figures = list(chain(*drawn.values()))
    assert [figure.name for figure in figures] == ["validation.png", "reward.png", "mismatch.png"]
    for figure in figures:
        header = figure.read_bytes()[:24]
        assert header[:8] == b"\x89PNG\r\n\x1a\n"
        assert int.from_bytes(header[16:20], "big") == 1200


def test_a_cell_that_a_log_axis_cannot_show_is_in_the_title_and_not_in_the_legend(make):
    paths = [make(finished(mismatch__kl=0.0), precision=BF16), make(finished())]
    figures = {curve.name: each for curve, each in draw_figures(compare(map(read_run, paths)))}
    legends = {
        name: [text.get_text() for text in each.legends[0].get_texts()]
        for name, each in figures.items()
    }
    assert legends["mismatch"] == ["fp8-kv-attn-tis"]
    assert legends["reward"] == ["bf16-tis", "fp8-kv-attn-tis"]
    title = " ".join(figures["mismatch"].get_suptitle().split())
    assert title.endswith("below 1e-07, so not drawn: bf16-tis")


def titles(*paths) -> dict[str, str]:
    comparison = compare(map(read_run, paths))
    return {curve.name: finding(curve, comparison) for curve in CURVES}


def test_a_figures_title_says_how_the_accuracies_compare(make):
    def seeds(precision, *lasts):
        return [make(finished(x), precision=precision, seed=n) for n, x in enumerate(lasts)]

    bf16, one = seeds(BF16, 0.7, 0.7, 0.7), seeds(KV, 0.71)
    assert titles(*bf16)["validation"] == "No accuracy can be held against BF16 yet"
    assert titles(*bf16, *one)["validation"] == "fp8-kv-attn-tis: not decided by one seed"
    far = seeds(E2E_KV, 0.5, 0.7, 0.9)
    assert titles(*bf16, *far)["validation"] == "No accuracy is shown to differ from BF16's"
    low = seeds(Precision("fp8-linear", rollout_linear="fp8"), 0.6, 0.61, 0.6)
    assert titles(*bf16, *far, *low)["validation"] == (
        "fp8-linear-tis: less accurate than BF16; fp8-e2e-kv-attn-tis: not decided"
    )


def test_a_title_counts_cells_that_are_too_many_to_name(make):
    bounds = (1.5, 2.0, 2.5, 3.0)
    cells = [make(finished(), correction=dataclasses.replace(TIS, truncate=x)) for x in bounds]
    title = titles(make(finished(), precision=BF16, correction=NONE), *cells)["validation"]
    assert title == "4 cells: not decided by one seed"


def test_a_title_says_whether_the_reward_rises(make):
    up = [metrics(step, reward__mean=step / 10) for step in range(1, 11)]
    flat = [metrics(step) for step in range(1, 11)]
    rising = make(up, steps=10)
    assert titles(rising)["reward"] == "The reward rises in every cell, by 0.50 to 0.50"
    still = make(flat, steps=10, precision=BF16)
    assert titles(rising, still)["reward"] == "The reward does not rise in bf16-tis"


def test_reading_and_comparing_needs_neither_torch_nor_matplotlib():
    code = "import sys, fp8_nemo.report.compare; print({'torch', 'matplotlib'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("set()\n", "")


def test_the_recipe_prints_the_table_writes_the_page_and_ends_with_its_path(make, capsys, tmp_path):
    make(finished())
    make(finished(), precision=BF16)
    assert main([str(tmp_path / "outputs")]) == 0
    out, err = capsys.readouterr()
    folder = tmp_path / "outputs" / "report"
    assert out.splitlines()[-1] == str(folder / "report.md") and err == ""
    assert "fp8-kv-attn-tis" in out
    assert sorted(each.name for each in folder.iterdir()) == [
        "mismatch.png", "report.md", "reward.png", "validation.png",
    ]  # fmt: skip


def test_the_page_of_one_run_lies_in_it_and_of_several_in_their_common_parent(make, capsys):
    first, second = make(finished(), seed=1), make(finished(), seed=2)
    assert main([str(first)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(first / "report" / "report.md")
    assert main([str(first), str(second)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(first.parent / "report" / "report.md")


def test_a_run_that_is_named_twice_counts_once(make, capsys, tmp_path, monkeypatch):
    path = make(finished())
    monkeypatch.chdir(tmp_path)
    assert main(["outputs", str(path), "outputs/tiny-llama"]) == 0
    capsys.readouterr()
    page = (tmp_path / "outputs" / "report" / "report.md").read_text()
    assert page.count(f"| {path.relative_to(tmp_path)} |") == 1 and "| 42 | 4/4 |" in page


def test_a_path_without_runs_is_one_line_and_the_others_are_compared(make, capsys, tmp_path):
    path = make(finished())
    assert main([str(path), str(tmp_path / "typo")]) == 0
    assert capsys.readouterr().err == f"{tmp_path}/typo: no run directory here\n"


@pytest.mark.parametrize("arguments", [["nothing-here"], []], ids=["no run", "no path"])
def test_no_run_at_all_is_one_line_and_exit_code_2_and_nothing_is_made(arguments, tmp_path):
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "recipes.compare", *arguments],
        cwd=tmp_path, env={"PYTHONPATH": str(root)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_report_that_cannot_be_written_is_one_line_and_exit_code_2(make, capsys):
    path = make(finished())
    (path / "report").write_text("a file in its place")
    assert main([str(path)]) == 2
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == 1 and "cannot be written" in err and "fp8-kv-attn-tis" in out


def test_without_matplotlib_the_table_is_there_and_the_remedy_is_named(make, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([str(make(finished()))]) == 2
    out, err = capsys.readouterr()
    assert len(err.splitlines()) == 1 and "fp8-nemo[report]" in err and "fp8-kv-attn-tis" in out


def test_30_runs_of_1000_steps_compare_in_under_5_seconds(make, capsys, tmp_path):
    for precision in (BF16, KV, E2E_KV):
        for seed in range(10):
            path = make(precision=precision, seed=seed, steps=1000)
            rows = (metrics(step, mismatch__kl=step / 1e4) for step in range(1, 1001))
            with (path / "metrics.jsonl").open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    start = time.process_time()  # not the clock on the wall: tests share cores
    assert main([str(tmp_path / "outputs")]) == 0
    assert time.process_time() - start < 5 * slowed()
    assert capsys.readouterr().err == ""


def test_a_legend_of_many_long_labels_leaves_room_for_the_curves(make, tmp_path):
    paths = [
        make(finished(), precision=precision, correction=dataclasses.replace(TIS, truncate=bound))
        for precision in (BF16, KV, E2E_KV)
        for bound in (1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "axes sizes collapsed to zero"
        for _, figure in draw_figures(compare(map(read_run, paths))):
            figure.savefig(tmp_path / "x.png")
            axes = figure.axes[0].get_window_extent()
            legend = figure.legends[0].get_window_extent()
            assert legend.y1 <= axes.y0 and axes.height > 2 * figure.dpi
            assert legend.x0 >= 0 and legend.x1 <= figure.bbox.x1


def test_a_mismatch_of_rounding_alone_has_no_curve(make, tmp_path):
    paths = [make(finished(mismatch__kl=kl), precision=p) for kl, p in ((0.0, BF16), (1e-16, KV))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = [curve.name for curve, _ in draw_figures(compare(map(read_run, paths)))]
    assert drawn == ["validation", "reward"] and not list(draw_figures(compare([])))


def test_a_setting_with_a_tag_or_a_star_stays_text_in_the_page(make):
    evil = ["<img src=x onerror=alert(1)> *c*", "</answer>"]
    own = [{"policy": {"generation": {"vllm_kwargs": {"revision": text}}}} for text in evil]
    paths = [make(finished(), nemo=each, backend="nemo", precision=BF16) for each in own]
    page = to_markdown(compare(map(read_run, paths)), {}, "x")
    assert "<img" not in page and "</answer>" not in page
    assert r"vllm_kwargs.revision=&lt;img src=x onerror=alert(1)&gt; \*c\*" in page


def test_a_damaged_archive_is_one_line(make, capsys, tmp_path):
    packed = gzip.compress(to_json({"run": "x" * 400}).encode() * 9)
    damaged = packed[:20] + bytes(byte ^ 255 for byte in packed[20:40]) + packed[40:]
    (tmp_path / f"runs{ARCHIVE}").write_bytes(damaged)
    assert main([str(tmp_path / "runs")]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "cannot be read" in err


def test_runs_that_were_scored_by_other_code_are_not_matched(make):
    rewards = {}
    for precision, digest in ((BF16, "aaaa"), (KV, "bbbb")):
        path = make(finished(), precision=precision)
        environment = path / provenance.ENVIRONMENT
        found = json.loads(environment.read_text())
        environment.write_text(to_json(found | {"reward": digest}))
        rewards[path] = digest
    notes = compare([read_run(path) for path in rewards]).notes
    assert any(note.startswith("not matched: reward's code is aaaa") for note in notes)


def test_the_seed_with_the_fewest_proven_weights_is_the_one_that_counts(make):
    proven = make(finished(), seed=1)
    skipped = make(finished(refit__verified_weights=0), seed=2)
    assert shown(only_cell(proven, skipped))["verified"] == "0"


def test_a_drift_that_was_no_number_is_none_in_whatever_step(make):
    for drifts in ((0.1, math.nan, 0.2), (math.nan, 0.1, 0.2)):
        rows = [
            metrics(1),
            *(metrics(n, recalibrate__max_drift=x) for n, x in enumerate(drifts, 2)),
        ]
        assert shown(only_cell(make(rows)))["drift"] == "nan%"


def test_a_dollar_in_a_label_is_drawn_as_it_stands(make, tmp_path):
    for number in range(2):
        other = {"policy": {"generation": {"vllm_kwargs": {"revision": f"x_$USER/y_$z/{number}"}}}}
        make(finished(), backend="nemo", nemo=other)
    comparison = compare(*read_runs(find_runs(tmp_path / "outputs")))
    assert all("$" in cell.label for cell in comparison.cells)
    assert len(list(chain(*save_figures(comparison, tmp_path).values()))) == len(CURVES)


@pytest.mark.parametrize("steps", [2, 4, 5])
def test_the_reward_of_a_few_steps_rises_if_it_does(make, steps):
    rows = [metrics(step, reward__mean=step / 10) for step in range(1, steps + 1)]
    assert titles(make(rows, steps=steps))["reward"].startswith("The reward rises in every cell")


def test_a_mismatch_that_is_no_number_is_named_and_not_the_highest(make):
    well = make(finished())
    for kl in (math.nan, 0.2):
        broken = make(finished(mismatch__kl=kl), precision=E2E_KV)
        said = titles(well, broken)["mismatch"]
        highest = "fp8-kv-attn-tis, 6.0e-03" if kl != 0.2 else "fp8-e2e-kv-attn-tis, 2.0e-01"
        assert said.startswith(f"The mean KL is highest in {highest}")
        assert ("not finite in fp8-e2e-kv-attn-tis" in said) == (kl != 0.2)
        for file in broken.iterdir():
            file.unlink() if file.is_file() else None


def test_a_curve_that_is_drawn_is_not_called_hidden(make):
    rows = [metrics(step, mismatch__kl=1e-6 if step == 2 else 1e-14) for step in range(1, 40)]
    assert "not drawn" not in titles(make(rows, steps=39))["mismatch"]
