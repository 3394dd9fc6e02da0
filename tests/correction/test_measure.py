"""Measured mismatch: what is kept, what is predicted from it, and what a plan refuses for it."""

import dataclasses
import json

import pytest
import torch

from fp8_nemo.correction.correct import STATISTICS, correct
from fp8_nemo.correction.measure import (
    by_length,
    by_position,
    effect,
    measure,
    packed,
    pair_file,
    read_pairs,
)
from fp8_nemo.correction.mismatch import LogprobPair
from fp8_nemo.correction.quantiles import (
    MeasureError,
    Measurement,
    read_measurement,
)
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.recipe.compose import ComposeError
from fp8_nemo.recipe.options.correction import DIVERGENCES, RATIOS, Correction
from fp8_nemo.report.mismatch_tables import mismatch_tables, write_option


def batch(seed=0, sequences=400, longest=60, spread=0.05):
    """Ragged sequences whose log ratios have a heavy tail, one of them empty."""
    generator = torch.Generator().manual_seed(seed)
    length_B1 = torch.randint(1, longest + 1, (sequences, 1), generator=generator)
    length_B1[3] = 0
    mask_BT = torch.arange(longest) < length_B1
    x_BT = torch.randn(sequences, longest, generator=generator) * spread
    x_BT *= torch.randn(sequences, 1, generator=generator).exp()
    return LogprobPair(x_BT.double(), torch.zeros(sequences, longest).double(), mask_BT)


@pytest.fixture(scope="module")
def measured():
    return measure({"a": batch(0), "b": batch(1)})


def test_what_a_run_keeps_reads_back_token_by_token(tmp_path):
    pair = batch()
    pair_file(tmp_path, 12).write_bytes(packed(pair))
    [(at, found)] = read_pairs(tmp_path).items()
    assert at.endswith("mismatch/step-000012.safetensors")
    assert torch.equal(found.log_ratio_N, pair.log_ratio_N.float().double())
    assert torch.equal(found.mask_BT.sum(1), pair.mask_BT.sum(1))


def test_no_more_than_whole_sequences_up_to_the_limit_are_kept(tmp_path, monkeypatch):
    from fp8_nemo.correction import measure as module

    pair = batch()
    monkeypatch.setattr(module, "KEPT_TOKENS", 100)
    pair_file(tmp_path, 1).write_bytes(packed(pair))
    [found] = read_pairs(tmp_path).values()
    kept = int(found.mask_BT.sum())
    assert 40 < kept <= 100 and torch.equal(
        found.log_ratio_N, pair.log_ratio_N[:kept].float().double()
    )


@pytest.mark.parametrize("wrapped", [False, True])
def test_nemo_rls_own_record_is_read_without_prompts_and_masked_samples(tmp_path, wrapped):
    def row(train, rollout, mask, sample):
        found = {
            "prev_logprobs": train, "generation_logprobs": rollout, "token_loss_mask": mask,
            "sample_loss_mask": sample, "content": "x",
        }  # fmt: skip
        return {k: [v] if wrapped and k != "content" else v for k, v in found.items()}

    folder = tmp_path / "log" / "nemo" / "exp_001"
    folder.mkdir(parents=True)
    rows = [
        row([0.0, -1.0, -2.0], [0.0, -1.5, -1.0], [0, 1, 1], 1.0),
        row([0.0, -9.0, -9.0], [0.0, -1.0, -1.0], [0, 1, 1], 0.0),
        row([0.0, -1.0, -3.0], [0.0, -1.0, -3.5], [0, 0, 1], 1.0),
    ]
    text = "".join(json.dumps(each) + "\n" for each in rows)
    for step in (2, 10):
        (folder / f"train_data_step{step}.jsonl").write_text(text)
    found = read_pairs(tmp_path)
    assert [name.rpartition("step")[2] for name in found] == ["2.jsonl", "10.jsonl"]
    pair = next(iter(found.values()))
    assert pair.log_ratio_N.tolist() == [0.5, -1.0, 0.5]
    assert pair.mask_BT.sum(1).tolist() == [2, 1]
    assert read_pairs(folder / "train_data_step2.jsonl").keys() == {next(iter(found))}


def nemo_record(run_dir, attempt: int, step: int, *log_ratios: list[float]):
    """A file as NeMo RL writes it, a sequence of these log ratios a line."""
    folder = run_dir / "log" / "nemo" / f"exp_{attempt:03}"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prev_logprobs": x, "generation_logprobs": [0.0] * len(x),
         "token_loss_mask": [1] * len(x), "sample_loss_mask": 1.0}
        for x in log_ratios
    ]  # fmt: skip
    file = folder / f"train_data_step{step}.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return file


def test_a_step_that_was_done_again_counts_once_as_it_was_done_last(tmp_path):
    first = [nemo_record(tmp_path, 1, step, [1.0]) for step in (9, 10, 11)]
    again = [nemo_record(tmp_path, 2, step, [0.0, 0.0]) for step in (11, 12)]
    assert list(read_pairs(tmp_path)) == [str(file) for file in (*first[:2], *again)]
    assert measure(read_pairs(tmp_path)).tokens == 2 + 4


def test_a_step_without_a_token_and_a_file_put_aside_are_left_out(tmp_path):
    nemo_record(tmp_path, 1, 1, [])
    second = nemo_record(tmp_path, 1, 2, [0.1])
    second.with_name("train_data_step1.old.jsonl").write_text("")
    assert list(read_pairs(tmp_path)) == [str(second)]


@pytest.mark.parametrize("steps", [1, 2, 64, 65, 100])
def test_of_a_long_run_some_steps_are_read_from_the_first_to_the_last(tmp_path, steps):
    for step in range(1, steps + 1):
        nemo_record(tmp_path, 1, step, [0.1])
    found = [
        int(name.rpartition("step")[2].removesuffix(".jsonl")) for name in read_pairs(tmp_path)
    ]
    assert len(found) == min(steps, 64) and found == sorted(set(found))
    assert (found[0], found[-1]) == (1, steps)


def test_of_a_large_step_whole_sequences_are_read_up_to_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("fp8_nemo.correction.measure.KEPT_TOKENS", 5)
    file = nemo_record(tmp_path, 1, 1, [0.1, 0.2], [0.3, 0.4, 0.5], [0.6], [0.7])
    [pair] = read_pairs(file).values()
    assert pair.mask_BT.sum(1).tolist() == [2, 3]


@pytest.mark.parametrize("content", ["", "{", '{"prev_logprobs": [1]}\n'])
@pytest.mark.parametrize("name", ["train_data_step1.jsonl", "step-000001.safetensors"])
def test_a_file_that_is_none_is_one_line(tmp_path, content, name):
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(MeasureError, match=r"cannot be read as a mismatch"):
        measure(read_pairs(file))
    with pytest.raises(MeasureError, match=r"no mismatch/step-\*\.safetensors"):
        read_pairs(tmp_path / "elsewhere")


@pytest.mark.parametrize("mask", [*RATIOS, *DIVERGENCES])
@pytest.mark.parametrize("reject", [0.005, 0.05, 0.3])
def test_proposed_bounds_reject_the_wanted_share_of_the_tokens_they_came_from(
    mask, reject, measured
):
    low, high = measured.bounds(mask, reject)
    correction = Correction(mask=mask, low=low, high=high)
    predicted = measured.rejected(correction)  # inclusive bounds keep a sequence that lies on one
    assert reject - 0.02 < predicted <= reject + 1e-9
    assert effect([batch(0), batch(1)], correction).rejected == pytest.approx(predicted, abs=0.004)
    later = 4 * (reject * (1 - reject) / 400) ** 0.5  # of 800 other sequences, long ones weighing
    assert effect([batch(2), batch(3)], correction).rejected == pytest.approx(reject, abs=later)


@pytest.mark.parametrize("mask", [*RATIOS, *DIVERGENCES])
def test_the_predicted_share_is_that_of_the_correction_itself(mask, measured):
    pairs = [batch(0), batch(1)]
    for share in (0.1, 0.5, 0.9):
        values = torch.cat([STATISTICS[mask](pair)[pair.mask_BT] for pair in pairs])
        bound = values.quantile(share).item() * 1.0001
        correction = Correction(mask=mask, high=bound)
        predicted, real = measured.rejected(correction), effect(pairs, correction).rejected
        assert predicted == pytest.approx(real, abs=0.002)


def test_a_veto_is_predicted_by_the_smallest_ratio_of_a_sequence(measured):
    pairs = [batch(0), batch(1)]
    for veto in (0.5, 0.8, 0.95):
        correction = Correction(veto=veto)
        assert measured.rejected(correction) == pytest.approx(
            effect(pairs, correction).rejected, abs=0.002
        )
    both = Correction(veto=0.9, mask="token", low=0.9)
    assert measured.rejected(both) >= effect(pairs, both).rejected - 0.002


def test_bounds_beyond_what_was_seen_reject_nothing_or_all(measured):
    assert measured.rejected(Correction(mask="token", low=1e-9, high=1e9)) == 0
    assert measured.rejected(Correction(mask="token", high=1e-9)) == 1
    assert measured.rejected(Correction(mask="token", low=1e9)) == 1
    assert measured.rejected(Correction()) == 0


def test_bf16_ties_at_a_ratio_of_one_stay_inside_inclusive_bounds():
    zeros = torch.zeros(50, 20).double()
    tied = measure({"tied": LogprobPair(zeros, zeros, torch.ones(50, 20).bool())})
    assert tied.rejected(Correction(mask="token", low=1.0, high=1.0)) == 0


def test_positions_and_lengths_divide_every_token_once():
    pair = batch(5)
    growing = pair.log_ratio_BT + 0.5 * (torch.arange(60) / pair.mask_BT.sum(1, keepdim=True))
    pair = LogprobPair(growing, torch.zeros_like(growing), pair.mask_BT)
    rows = list(by_position([pair]))
    assert len(rows) == 10 and rows[0][0] == "0-10%"
    assert rows[-1][1] > rows[0][1] and rows[-1][2] > rows[0][2]
    lengths = [name for name, _, _ in by_length([pair])]
    assert len(lengths) == 4 and lengths[0].startswith("1-") and lengths[-1].endswith("-60")
    short = batch(6, longest=2)
    assert [name for name, _, _ in by_length([short])] == ["1-1", "2-2"]


def test_a_measurement_reads_back_and_anything_else_is_one_line(tmp_path, measured):
    file = tmp_path / "mismatch.json"
    file.write_text(measured.to_json())
    assert read_measurement(file) == measured
    for content in ("", "{}", '{"quantiles": {}}', json.dumps(dataclasses.asdict(measured))[:-9]):
        file.write_text(content)
        with pytest.raises(MeasureError, match="is no measurement"):
            read_measurement(file)
    old = dataclasses.asdict(measured)
    old["quantiles"]["max-k2"][-1] = None
    file.write_text(json.dumps(old))
    with pytest.raises(MeasureError, match="is no measurement"):
        read_measurement(file)
    del old["quantiles"]["max-k2"]
    file.write_text(json.dumps(old))
    with pytest.raises(MeasureError, match="max-k2 is missing; measure again"):
        read_measurement(file)
    with pytest.raises(MeasureError, match="no such file"):
        read_measurement(tmp_path / "gone.json")
    with pytest.raises(MeasureError, match="is a directory"):
        read_measurement(tmp_path)


def test_a_plan_that_would_reject_more_than_allowed_is_refused_with_the_share(tmp_path, measured):
    file = tmp_path / "mismatch.json"
    file.write_text(measured.to_json())
    named = f"correction.measurement={file}"
    assert compose_plans(["correction=tis", named])
    with pytest.raises(ComposeError, match=r"geo-rs: would reject \d+\.\d% of the tokens"):
        compose_plans(["correction=geo-rs", named])
    [allowed] = compose_plans(["correction=geo-rs", named, "correction.max_reject=1"])
    [told] = [note for note in allowed.notes if note.startswith("correction.measurement: geo-rs")]
    share, length = (
        measured.rejected(allowed.recipe.correction),
        measured.tokens / measured.sequences,
    )
    assert f"rejects {share:.2%} of what was measured, {length:.0f} tokens a sequence" in told
    assert told.endswith(f"on {', '.join(measured.source)}")
    with pytest.raises(ComposeError, match=r"correction\.measurement=.*no such file"):
        compose_plans(["correction=tis", f"{named}.gone"])


def test_all_mistakes_of_a_line_are_named_at_once_that_of_its_measurement_among_them(tmp_path):
    with pytest.raises(ComposeError) as error:
        compose_plans([f"correction.measurement={tmp_path}/gone.json", "data=openmath-2"])
    assert [line.partition("=")[0] for line in error.value.lines] == [
        "correction.measurement", "data",
    ]  # fmt: skip


def test_a_measurement_changes_no_run_directory(tmp_path, measured):
    file = tmp_path / "mismatch.json"
    file.write_text(measured.to_json())
    [with_it] = compose_plans(["correction=tis", f"correction.measurement={file}"])
    [without] = compose_plans(["correction=tis"])
    assert with_it.run_name == without.run_name


def test_tables_are_drawn_for_every_option_and_statistic(measured):
    pairs = [batch(0), batch(1)]
    rows = [table.row_count for table in mismatch_tables(pairs, measured, 0.01)]
    assert rows[0] == 1 + 10 + 4 and rows[1] >= 15 and rows[2] == len(RATIOS) + len(DIVERGENCES)


def test_an_option_with_measured_bounds_composes_and_is_held_to_them(
    tmp_path, measured, monkeypatch
):
    from fp8_nemo.report import mismatch_tables as bounds

    monkeypatch.setattr(bounds, "option_folder", lambda group: tmp_path)
    file = tmp_path / "mismatch.json"
    file.write_text(measured.to_json())
    [path] = write_option("my-k3", "mean-k3", 0.02, measured, file)
    text = path.read_text()
    assert path.name == "my-k3.yaml" and "name: my-k3\nmask: mean-k3\nhigh: " in text
    settings = [
        f"correction.{line.replace(': ', '=')}"
        for line in text.splitlines()
        if line.split(":")[0] in ("mask", "low", "high", "measurement", "name")
    ]
    [plan] = compose_plans(["correction=tis", *settings])
    kept_BT = correct(batch(0), plan.recipe.correction).kept_BT
    assert kept_BT.sum() / batch(0).mask_BT.sum() == pytest.approx(0.98, abs=0.015)
    assert f"rejected {measured.rejected(plan.recipe.correction):.2%} of" in text
    with pytest.raises(MeasureError, match="must begin with my"):
        write_option("k3", "mean-k3", 0.02, measured, file)
    with pytest.raises(MeasureError, match=r"my-k3\.yaml is there; take another name"):
        write_option("my-k3", "sequence", 0.02, measured, file)
    assert path.read_text() == text


@pytest.mark.parametrize("mask", ["geometric", "mean-k3"])
def test_no_bounds_are_written_from_a_run_without_a_mismatch(tmp_path, monkeypatch, mask):
    from fp8_nemo.report import mismatch_tables as bounds

    monkeypatch.setattr(bounds, "option_folder", lambda group: tmp_path)
    zeros, mask_BT = torch.zeros(4, 6), torch.ones(4, 6).bool()
    same = measure({"a": LogprobPair(zeros, zeros, mask_BT)})
    with pytest.raises(MeasureError, match="measure a run whose rollouts are in FP8"):
        write_option("my-own", mask, 0.01, same, tmp_path / "mismatch.json")
    assert not list(tmp_path.iterdir())


def test_an_option_that_does_not_compose_is_a_row_and_no_end(measured, monkeypatch):
    from fp8_nemo.report import mismatch_tables as bounds

    monkeypatch.setattr(bounds, "option_names", lambda group: ["my-broken", "tis"])
    effects = list(mismatch_tables([batch(0)], measured, 0.01))[1]
    name, clips = ([str(cell) for cell in column.cells] for column in effects.columns[:2])
    assert name == ["my-broken", "tis"] and "must be one of" in clips[0] and "%" in clips[1]


def test_measurements_hold_what_says_where_they_come_from(measured):
    assert measured.source == ["a", "b"] and measured.sequences == 798
    assert measured.tokens == sum(int(batch(n).mask_BT.sum()) for n in (0, 1))
    assert isinstance(measured, Measurement) and measured.kl > 0
