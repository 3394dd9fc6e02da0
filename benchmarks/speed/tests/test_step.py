"""What benchmarks/speed/step.py makes of measured phases, and says of one that is missing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.speed import step as step_time
from benchmarks.speed.step import Load, Missing
from fp8_nemo.plan.plan import plan_recipe
from fp8_nemo.recipe.compose import compose
from fp8_nemo.report.runs import find_runs

ROOT = Path(__file__).parents[3]


LAYOUT = (
    *("model.layout=null", "model.parallel.tensor=1", "model.parallel.context=1"),
    *("model.parallel.rollout_tensor=1", "model.memory.recompute=true"),
)


def plan_of(*arguments):
    usual = ["backend=nemo", "cluster=slurm", "cluster.interpreter=system"]
    if not any(word.startswith("model=") for word in arguments):
        usual.append("model=llama31-8b")
    [recipe] = compose([*usual, *LAYOUT, "correction=tis", "grpo=paper", *arguments])
    return plan_recipe(recipe)


def rollout_row(precision="bf16", batch=128, context=2176.0, rate=1000.0):
    return {
        "model": "llama31-8b", "precision": precision, "regime": "resident", "batch": batch,
        "context": context, "tokens_per_second": {"median": rate},
        "prompt_tokens_per_second": {"median": 30_000.0},
    }  # fmt: skip


def train_rows(precision="bf16", recompute=True, tokens=4096):
    """Forward 1 ms and backward 2 ms a layer, 1 more when recomputing or quantizing; ends 10."""
    rows = []
    for part, again in (("stack", False), ("stack", recompute), ("ends", False)):
        for which in ("first", "cached") if precision == "fp8" else ("cached",):
            layers = 1 if part == "ends" else 8
            forward = layers * (1 + (which == "first")) + (10 if part == "ends" else 0)
            backward = layers * (2 + again) + (10 if part == "ends" else 0)
            rows.append({
                "model": "llama31-8b", "variant": precision, "part": part, "recompute": again,
                "microbatch": which, "tokens": tokens, "tensor": 1, "expert": 1, "experts": 0,
                "layers": layers,
                "forward": {"median": forward}, "backward": {"median": backward},
                "scored": {"median": forward},
            })  # fmt: skip
    return rows


def glue_file(precision="bf16", **parts):
    command = f"python -m benchmarks.glue.compare -- model=llama31-8b precision={precision} x"
    return {"command": f"{command} cluster.gpus_per_node=2", **parts}


REFITS = {
    "stock": {"median": {"refit": 9.0}, "rounds": []},
    "fused": {"median": {"refit": 2.0}, "rounds": []},
    "ledger": {"median": {"refit": 9.5}, "rounds": []},
    "bytes": {"median": {"refit": 2.5}, "rounds": []},
}
RANGES = {"tokens": 1000, "overhead": 0.1}


def everything(precision="bf16", train="bf16"):
    names = {precision: step_time.ROLLOUT[precision]}
    return {
        "rollout.json": {"rows": [rollout_row(names[precision])]},
        "train.json": {"rows": train_rows(train)},
        "glue.json": glue_file(precision, refit=REFITS, ranges=RANGES),
    }


def test_the_load_is_what_the_plan_has_room_for():
    plan = plan_of("precision=bf16")
    assert step_time.load_of(plan, 256, None) == Load(256, 4096 - 256, 4096, 1)
    assert step_time.load_of(plan, 256, 768.0) == Load(256, 768, 4096, 4)
    assert step_time.load_of(plan, 256, 1e9).response == 4096 - 256


def test_sequences_about_as_long_as_they_may_be_fit_whole_and_shorter_ones_fill_a_micro_batch():
    run = plan_of("precision=bf16").settled
    assert step_time.micro_batches(run, Load(256, 2500, 4096, 1)) == 2048 / 16
    plan = plan_of("precision=bf16", "grpo.max_new_tokens=2048")
    tokens = step_time.load_of(plan, 7, None).micro_batch
    for response, together in ((2000.0, tokens // 2007), (1500.0, tokens / 1507)):
        assert step_time.load_of(plan, 7, response).together == together


def test_rollout_is_each_engines_share_at_the_measured_speed():
    run, load = plan_of("precision=bf16").settled, Load(256, 3840, 4096, 1)
    found = step_time.rollout(run, load, everything())
    share = 64 * 32 / 16  # sequences of one of sixteen engines
    assert found == (share * 256 / 30_000 + share * 3840 / 1000, "rollout.json")


def test_engines_on_gpus_of_their_own_share_all_sequences_and_are_refitted_by_broadcast():
    load, apart = Load(256, 3840, 4096, 1), ("precision=bf16", "cluster.rollout_gpus=8")
    shared, few = plan_of("precision=bf16").settled, plan_of(*apart).settled
    assert (shared.gpus, few.engines) == (16, 8)
    rows = {"a.json": {"rows": [rollout_row(batch=128), rollout_row(batch=256)]}}
    times = (
        step_time.rollout(few, load, rows).seconds / step_time.rollout(shared, load, rows).seconds
    )
    assert times == pytest.approx(2)
    files = everything() | {"nccl.json": glue_file(refit=REFITS) | {"colocated": False}}
    assert step_time.refit(few, load, files).source == "nccl.json"
    assert step_time.refit(shared, load, files).source == "glue.json"
    with pytest.raises(Missing, match=r"cluster\.gpus_per_node=2 cluster\.rollout_gpus=1"):
        step_time.refit(few, load, everything())
    ranges = [step_time.recalibrate(plan_of("precision=fp8-kv-attn", *more).settled, load,
              everything("fp8-kv-attn")).seconds for more in ((), apart[1:])]  # fmt: skip
    assert ranges[1] == 2 * ranges[0]


def test_the_nearest_batch_and_context_is_taken_and_none_beyond_15_percent():
    run, load = plan_of("precision=bf16").settled, Load(0, 4096, 4096, 1)
    near = [rollout_row(batch=125, context=2000.0, rate=7.0), rollout_row(batch=140, rate=8.0)]
    files = {"r.json": {"rows": [*reversed(near), {"regime": "limited", "batch": 128}]}}
    assert step_time.rollout(run, load, files).seconds == 128 * 4096 / 7.0
    far = {"r.json": {"rows": [rollout_row(batch=150), rollout_row(context=1700.0)]}}
    with pytest.raises(
        Missing, match=r"benchmarks.speed.rollout .*--precisions bf16 --points 128x2048"
    ):
        step_time.rollout(run, load, far)


def test_training_is_ends_and_layers_of_every_micro_batch():
    run, load = plan_of("precision=bf16").settled, Load(256, 3840, 4096, 1)
    assert run.layout.recompute
    assert step_time.micro_batches(run, load) == 2048 / 16
    found = step_time.train(run, load, everything())
    whole = (20 + 32 * (1 + 3)) / 1e3  # ends without their layer; layers that recompute
    assert found.seconds == pytest.approx(128 * whole) and found.source == "train.json"


def test_the_first_micro_batch_of_each_update_quantizes_the_weights():
    run, load = plan_of("precision=fp8-e2e").settled, Load(256, 3840, 4096, 1)
    files = everything("fp8-e2e", "fp8")
    cached, first = (20 + 32 * (1 + 3)) / 1e3, (20 + 32 * (2 + 3)) / 1e3
    assert run.updates_per_step == 4
    found = step_time.train(run, load, files).seconds
    assert found == pytest.approx(4 * first + 124 * cached)
    forward = (10 + 32) / 1e3
    logprob = step_time.logprob(run, load, files).seconds
    assert logprob == pytest.approx(2 * (forward + 32 / 1e3 + 127 * forward))


def test_without_a_penalty_there_is_no_pass_of_the_reference_policy():
    load, files = Load(256, 3840, 4096, 1), everything()
    both = step_time.logprob(plan_of("precision=bf16").settled, load, files)
    one = step_time.logprob(plan_of("precision=bf16", "grpo.kl_penalty=0").settled, load, files)
    assert both.seconds == 2 * one.seconds


def test_bf16_refits_unproven_and_fp8_with_every_byte_proven_or_as_a_file_of_before_has_it():
    load = Load(256, 3840, 4096, 1)
    for precision, seconds in (("bf16", 2.0), ("fp8-linear", 2.5)):
        run = plan_of(f"precision={precision}").settled
        assert step_time.refit(run, load, everything(precision)) == (seconds, "glue.json")
    before = {"glue.json": glue_file("fp8-linear", refit={"ledger": REFITS["ledger"]})}
    assert step_time.refit(run, load, before) == (9.5, "glue.json")


def test_what_travels_alike_stands_for_another_precision_and_another_transport_for_none():
    load, files = Load(256, 3840, 4096, 1), {"kv.json": glue_file("fp8-kv-attn", refit=REFITS)}
    for precision, seconds in (("bf16", 2.0), ("fp8-linear", 2.5), ("fp8-e2e", 2.5)):
        run = plan_of(f"precision={precision}").settled
        assert step_time.refit(run, load, files) == (seconds, "kv.json")
    own = {"fused": {"median": {"refit": 1.5}, "rounds": []}}
    files["own.json"] = glue_file("bf16", refit=own)
    run = plan_of("precision=bf16").settled
    assert step_time.refit(run, load, files) == (1.5, "own.json")
    with pytest.raises(Missing, match="--parts refit"):
        step_time.refit(run, load, {"a.json": files["own.json"] | {"colocated": False}})
    old = {"a.json": glue_file("bf16", refit={"stock": own["fused"]})}
    with pytest.raises(Missing, match=r"a\.json has no `fused`; .*glue\.compare --parts refit"):
        step_time.refit(run, load, old)


def test_recalibration_grows_with_the_tokens_of_a_gpu_and_is_nothing_in_bf16():
    load = Load(256, 3840, 4096, 1)
    run = plan_of("precision=fp8-kv-attn").settled
    found = step_time.recalibrate(run, load, everything("fp8-kv-attn"))
    assert found.seconds == pytest.approx(0.1 * (2048 * 4096 / 16) / (1000 / 2))
    assert step_time.recalibrate(plan_of("precision=bf16").settled, load, {}).seconds == 0


def test_a_step_is_the_sum_and_each_number_has_its_file():
    found = step_time.step(
        plan_of("precision=bf16").settled, Load(256, 3840, 4096, 1), everything()
    )
    assert found["step"].seconds == sum(found[phase].seconds for phase in step_time.PHASES)
    assert found["refit"].source == "glue.json" and found["logprob"].source == "train.json"


def test_all_that_is_missing_is_said_at_once_with_its_command():
    with pytest.raises(Missing) as error:
        step_time.step(plan_of("precision=fp8-kv-attn").settled, Load(256, 3840, 4096, 1), {})
    lines = str(error.value).splitlines()
    scripts = [line.split(" -m benchmarks.")[1].split()[0] for line in lines]
    assert scripts == ["speed.rollout", "speed.train", "glue.compare", "glue.compare"]
    assert "--parts refit" in lines[2] and "--parts ranges" in lines[3]


def test_a_failed_row_and_another_layout_are_no_measurement():
    run, load = plan_of("precision=bf16").settled, Load(256, 3840, 4096, 1)
    files = everything()
    files["train.json"]["rows"][0]["error"] = "OutOfMemoryError"
    with pytest.raises(Missing, match=r"python -m benchmarks.speed.train"):
        step_time.train(run, load, files)
    two = plan_of("precision=bf16", "model.parallel.tensor=2").settled
    with pytest.raises(Missing, match=r"torchrun --nproc-per-node 2 .*model.parallel.tensor=2"):
        step_time.train(two, load, everything())


def test_a_rank_of_eight_with_sixteen_experts_is_measured_by_sixteen_experts():
    run = plan_of("model=qwen3-30b-a3b", "precision=bf16", "model.parallel.expert=8").settled
    load, files = Load(256, 3840, 4096, 1), {"train.json": {"rows": train_rows()}}
    for row in files["train.json"]["rows"]:
        row |= {"model": "qwen3-30b-a3b", "experts": 128}
    with pytest.raises(Missing, match=r"-- model.parallel.tensor=1 model.shape.experts=16"):
        step_time.train(run, load, files)
    for row in files["train.json"]["rows"]:
        row["experts"] = 16
    assert step_time.train(run, load, files).seconds > 0


def test_a_model_cut_to_fewer_layers_is_not_served_by_the_whole_ones_numbers():
    load, files = Load(256, 3840, 4096, 1), everything()
    cut = plan_of("precision=bf16", "model.shape.layers=16").settled
    for phase in (step_time.rollout, step_time.refit):
        with pytest.raises(Missing):
            phase(cut, load, files)
    files["glue.json"]["command"] += " model.shape.layers=16"
    assert step_time.refit(cut, load, files).seconds == 2.0


def test_a_runs_first_step_and_what_it_lacks_are_left_out():
    rows = [
        {"step": 0, "val/accuracy": 0.5},
        {"step": 1, "time/train": 100.0, "time/step": 200.0},
        {"step": 2, "time/train": 10.0, "time/step": 20.0, "rollout/mean_length": 300.0},
        {"step": 3, "time/train": 12.0, "time/step": 24.0, "rollout/mean_length": 500.0},
    ]
    found = {"train": 11.0, "step": 22.0, "rollout/mean_length": 400.0}
    assert step_time.measured(rows, first=2) == found
    assert step_time.measured(rows, first=3)["train"] == 12.0


def run_script(*words):
    command = [sys.executable, "-m", "benchmarks.speed.step", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


CELL = ("--", "cluster.interpreter=system", *LAYOUT)


def test_the_command_writes_the_ratio_to_bf16(tmp_path):
    for number, (precision, train) in enumerate((("bf16", "bf16"), ("fp8-e2e", "fp8"))):
        for name, content in everything(precision, train).items():
            (tmp_path / f"{number}-{name}").write_text(json.dumps(content))
    out = tmp_path / "out" / "step.json"
    out.parent.mkdir()
    files = sorted(tmp_path.glob("*.json"))
    done = run_script("--out", out, "--precisions", "bf16,fp8-e2e", "--results", *files, *CELL)
    assert done.returncode == 0, done.stdout + done.stderr
    bf16, fp8 = json.loads(out.read_text())["rows"]
    assert fp8["times_bf16"] == bf16["step"] / fp8["step"] and "times_bf16" not in bf16
    assert fp8["sources"]["train"] == "1-train.json" and fp8["gpus"] == 16


def test_the_command_says_what_is_not_measured_and_writes_nothing(tmp_path):
    empty = tmp_path / "empty.json"
    empty.write_text("{}")
    out = tmp_path / "step.json"
    done = run_script("--out", out, "--precisions", "bf16", "--results", empty, *CELL)
    assert done.returncode == 2 and "not measured yet:" in done.stdout
    assert "benchmarks.speed.train" in done.stdout and not out.exists()


def test_a_real_run_stands_beside_its_prediction(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out.json"
    run.mkdir()
    (run / "plan.json").write_text(json.dumps(plan_of("precision=bf16").to_json()))
    times = {"time/rollout": 70.0, "time/train": 30.0, "time/step": 120.0}
    rows = [{"step": n, "rollout/mean_length": 1000.0} | times for n in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, content in everything().items():
        (tmp_path / name).write_text(json.dumps(content))
    files = [tmp_path / name for name in everything()]
    content = json.loads(files[0].read_text())
    content["rows"][0]["context"] = 800.0
    files[0].write_text(json.dumps(content))
    done = run_script("--out", out, "--run", run, "--results", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    predicted, real = json.loads(out.read_text())["rows"]
    assert (predicted["of"], predicted["response"]) == ("predicted", 1000.0)
    assert (real["of"], real["train"], real["step"]) == ("measured", 30.0, 120.0)
    assert str(tmp_path) not in json.dumps(predicted)


def test_a_run_of_the_local_backend_is_no_measurement_of_speed(tmp_path):
    run = find_runs(ROOT / "benchmarks" / "results" / "runs")[0]
    (tmp_path / "r.json").write_text("{}")
    words = ("--out", tmp_path / "out.json", "--run", run, "--results", tmp_path / "r.json")
    done = run_script(*words)
    assert done.returncode == 1 and "local backend" in done.stderr
