"""GRPO's arithmetic, and every precision x correction cell for two steps on both tiny models."""

import ast
import json
import math
import os
import resource
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from rich.text import Text
from safetensors.torch import load_file, save_file

from fp8_nemo.local.checkpoint import CheckpointError
from fp8_nemo.local.grpo import GrpoLoop
from fp8_nemo.local.loss import clipped_loss, group_advantages, k3
from fp8_nemo.local.run import progress, run
from fp8_nemo.plan.plan import Plan, plan_recipe
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.model_dir import SHIPPED
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.options.training import GRPO
from fp8_nemo.recipe.problems import Problem, read_jsonl, running_sum
from fp8_nemo.runs import metrics, run_dir
from tests.conftest import SMALL
from tests.recipe.test_conf import CELLS, CORRECTIONS

MODELS = ["tiny-llama", "tiny-qwen3-moe"]
CORE_KEYS = {
    "reward/mean", "rollout/tokens", "rollout/mean_length", "train/entropy", "mismatch/kl",
    "mismatch/token_mult_prob_error", "mismatch/abs_log_ratio_p99", "mismatch/abs_log_ratio_max",
    "mismatch/ess", "correction/multiplier_mean", "correction/ess", "correction/clipped_fraction",
    "correction/masked_fraction", "refit/bytes", "refit/verified_weights", "refit/changed_bytes",
    "time/rollout", "time/logprob", "time/train", "time/refit", "time/step",
}  # fmt: skip


def rows_of(plan: Plan) -> list[dict]:
    [frozen] = run_dir.freeze([plan])
    GrpoLoop(plan, frozen.path).train(lambda row: None)
    return metrics.read_metrics(frozen.path)


def test_a_line_says_the_step_and_the_latest_numbers(make_plan, capsys):
    with progress(make_plan("grpo.steps=10")) as report:
        report({"step": 0, "val/accuracy": 0.25})
        report({"step": 1, "reward/mean": 0.5})
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(" s42  step 0/10  val 0.25")
    assert second.endswith("step 1/10  reward 0.5  val 0.25")


def test_on_80_columns_the_bar_says_step_and_time_left(make_plan, capsys, monkeypatch):
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "80", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    row = {"reward/mean": 0.5123, "mismatch/kl": 1.234e-3, "time/step": 12.3}
    with progress(make_plan("precision=fp8-kv-attn", "grpo.steps=100")) as report:
        report({"step": 10, "val/accuracy": 0.255, **row})
    shown = Text.from_ansi(capsys.readouterr().out).plain
    assert "step 10/100 -:--:-- left " in shown and "…" not in shown
    assert "s/step 12" in " ".join(shown.split())


def without_times(rows: list[dict]) -> str:
    return json.dumps([{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows])


@cache
def composed(word: str) -> Recipe:
    """A small recipe with one option. Composing every cell takes as long as a step of it."""
    [recipe] = compose([*SMALL, word])
    return recipe


@pytest.mark.parametrize(
    ("precision", "correction", "model"),
    [(*cell, MODELS[sum(divmod(n, len(CORRECTIONS))) % 2]) for n, cell in enumerate(CELLS)],
    ids=["-".join(cell) for cell in CELLS],
)
def test_every_cell_runs_two_steps(tmp_path, precision, correction, model):
    """Each precision and each correction with each model: a correction sees logprobs alone."""
    recipe = replace(
        composed(f"model={model}"),
        precision=composed(f"precision={precision}").precision,
        correction=composed(f"correction={correction}").correction,
        outputs=str(tmp_path),
    )
    rows = rows_of(plan_recipe(recipe))
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert set(rows[1]) >= CORE_KEYS and "val/accuracy" in rows[2]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert ("recalibrate/max_drift" in rows[1]) == precision.endswith("kv-attn")
    assert (rows[1]["refit/verified_weights"] > 0) == (precision not in ("bf16", "fp16"))
    assert rows[1].get("train/loss_scale") == (65536.0 if precision == "fp16" else None)
    changed = rows[1]["refit/changed_bytes"]
    assert "refit/changed_bytes" not in rows[0] and changed < 0.8  # the first: nothing before it
    # Every answer masked, or those that are left as good as each other: no gradient.
    assert changed > 0 or rows[1]["train/grad_norm"] == 0
    if correction == "none":
        assert rows[1]["correction/multiplier_mean"] == 1.0 == rows[1]["correction/ess"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["glue.verify=names"], ["glue.verify=off"], ["glue=stock"],
        ["glue.recalibrate.source=forward"],
        ["grpo.kl_penalty=0.1"], ["grpo.updates_per_step=4"], ["correction.normalize=true"],
        ["correction=mis", "correction.renormalize_denominator=true"], ["correction.veto=0.5"],
        ["precision.scales=pow2"], ["precision.first_layers_bf16=1"], ["grpo.validate_first=true"],
        ["model=tiny-qwen3-moe", "precision=fp8-e2e", "precision.last_layers_bf16=1"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_modifier_runs_and_changes_the_run(make_plan, arguments):
    rows = rows_of(make_plan(*arguments))
    assert len(rows) == 3 and all(math.isfinite(value) for row in rows for value in row.values())


def test_a_run_on_sums_with_working_writes_the_problems_that_it_samples(make_plan):
    plan = make_plan("data=running-sum", "data.difficulty=3", "grpo.max_new_tokens=20")
    rows = rows_of(plan)
    assert rows[1]["rollout/mean_length"] > 0 and math.isfinite(rows[1]["mismatch/kl"])
    data = run_dir.data_dir(run_dir.run_path(plan))
    split = running_sum(3, plan.recipe.seed)
    kept = [Problem(each.input, each.output) for each in split.validation]
    assert read_jsonl(data / "validation.jsonl") == kept


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(make_plan, tmp_path):
    first = without_times(rows_of(make_plan()))
    again = without_times(rows_of(make_plan(f"outputs={tmp_path}/again")))
    other = without_times(rows_of(make_plan("seed=7")))
    assert first == again != other


def test_a_run_stopped_anywhere_goes_on_as_if_it_had_not(make_plan, tmp_path):
    steps = ["grpo.steps=6", "grpo.checkpoint_every=2", "grpo.validate_every=3"]
    whole = without_times(rows_of(make_plan(*steps)))

    class Stop(Exception):
        pass

    def stop_at(last: int):
        def report(row):
            if row["step"] == last:
                raise Stop

        return report

    plan = make_plan(*steps, f"outputs={tmp_path}/stopped")
    [frozen] = run_dir.freeze([plan])
    for last in (0, 3, 5):
        with pytest.raises(Stop):
            GrpoLoop(plan, frozen.path).train(stop_at(last))
    GrpoLoop(plan, frozen.path).train(lambda row: None)
    assert without_times(metrics.read_metrics(frozen.path)) == whole


def test_a_whole_checkpoint_of_another_kind_of_device_is_not_called_broken(make_plan):
    [frozen] = run_dir.freeze([plan := make_plan("grpo.checkpoint_every=1")])
    GrpoLoop(plan, frozen.path).train(lambda row: None)
    file = run_dir.checkpoints(frozen.path)[-1] / "state.safetensors"
    on_a_gpu = {"rng.sampler": torch.zeros(16, dtype=torch.uint8)}  # what a CUDA generator's takes
    save_file(load_file(file) | on_a_gpu, file)
    with pytest.raises(CheckpointError, match="on another kind of device than the cpu") as error:
        GrpoLoop(plan, frozen.path).train(lambda row: None)
    assert "is left as it is" in str(error.value) and "delete" not in str(error.value)


def test_a_checkpoint_with_one_flipped_bit_is_named(make_plan):
    [frozen] = run_dir.freeze([plan := make_plan()])
    GrpoLoop(plan, frozen.path).train(lambda row: None)
    file = run_dir.checkpoints(frozen.path)[-1] / "state.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1  # of a tensor: the file is still whole to safetensors
    file.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"state\.safetensors is not what was saved\); delete"
    ):
        GrpoLoop(plan, frozen.path).train(lambda row: None)


GARBAGE = ("[]", "3", "{}", '{"step": 1, "kv_scales": {}}', '{"step": 2, "kv_scales": []}')


@pytest.mark.parametrize("state", GARBAGE)
def test_a_state_of_garbage_is_named(make_plan, state):
    [frozen] = run_dir.freeze([plan := make_plan()])
    GrpoLoop(plan, frozen.path).train(lambda row: None)
    [saved] = run_dir.checkpoints(frozen.path)
    (saved / "state.json").write_text(state)
    with pytest.raises(CheckpointError, match=r"step-000002: cannot be read .*; delete this"):
        GrpoLoop(plan, frozen.path).train(lambda row: None)


@pytest.mark.parametrize(
    ("file", "change"),
    [("config.json", ('"llama"', '"none-such"')), ("chat_template.jinja", ("{%", "{% if"))],
)
def test_a_model_that_cannot_be_loaded_is_one_line(make_plan, tmp_path, capsys, file, change):
    shutil.copytree(SHIPPED / "tiny-llama", tmp_path / "model")
    path = tmp_path / "model" / file
    path.write_text(path.read_text().replace(*change))
    plan = make_plan(f"model.path={tmp_path}/model")
    [frozen] = run_dir.freeze([plan])
    assert run(plan, frozen.path) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}/model: this model cannot be loaded (" in line


def test_problems_that_cannot_be_written_are_not_the_models_fault(make_plan, capsys):
    plan = make_plan()
    [frozen] = run_dir.freeze([plan])
    blocked = run_dir.data_dir(frozen.path) / "train.jsonl"
    blocked.mkdir()
    assert run(plan, frozen.path) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert str(blocked) in line and "model" not in line.removeprefix(str(frozen.path))


def test_a_full_disk_is_one_line_and_the_run_goes_on_from_the_checkpoint_before_it(make_plan):
    [frozen] = run_dir.freeze([plan := make_plan("grpo.steps=4", "grpo.checkpoint_every=2")])
    most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(row):
        """From step 3 on no file may be longer than 64 KiB, and checkpoints are."""
        if row["step"] == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, most[1]))

    try:
        with pytest.raises(CheckpointError, match=r"step 4 cannot be saved, .*; make room, and"):
            GrpoLoop(plan, frozen.path).train(fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert [path.name for path in run_dir.checkpoints(frozen.path)] == ["step-000002"]
    assert GrpoLoop(plan, frozen.path).train(lambda row: None) == 4


def test_fp8_rollouts_send_about_half_the_bytes(make_plan):
    bf16 = rows_of(make_plan("precision=bf16"))[1]["refit/bytes"]
    fp8 = rows_of(make_plan("precision=fp8-linear"))[1]["refit/bytes"]
    assert fp8 / bf16 == pytest.approx(0.53, abs=0.01)


def test_an_fp16_update_that_overflows_is_left_out_and_the_loss_scale_halved(make_plan, tmp_path):
    """And a run that stops meanwhile goes on with its scale."""
    steps = ["precision=fp16", "precision.loss_scale=1e7", "grpo.checkpoint_every=1"]
    plan = make_plan(*steps, "grpo.steps=8", "grpo.learning_rate=1e-3")
    rows = rows_of(plan)
    scales, skipped = ([row[f"train/{key}"] for row in rows[1:]] for key in
                       ("loss_scale", "skipped_updates"))  # fmt: skip
    assert 0 < sum(skipped) < 8
    for before, after, count in zip([1e7, *scales], scales, skipped, strict=False):
        assert after == before / 2**count
    unchanged = [row["refit/changed_bytes"] == 0 for row in rows[1:]]
    assert unchanged == [count == 1 for count in skipped]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    for steps_so_far in (2, 8):
        again = make_plan(*steps, f"grpo.steps={steps_so_far}", "grpo.learning_rate=1e-3",
                          f"outputs={tmp_path}/in-two")  # fmt: skip
        [frozen] = run_dir.freeze([again])
        GrpoLoop(again, frozen.path).train(lambda row: None)
    found = metrics.read_metrics(frozen.path)
    assert [row["train/loss_scale"] for row in found[1:]] == scales


def test_scales_of_heads_arrive_are_recalibrated_and_survive_a_stop(make_plan, tmp_path):
    heads = ["precision=fp8-kv-attn", "precision.kv_scales=head", "grpo.checkpoint_every=1"]
    whole = rows_of(make_plan(*heads, "grpo.steps=3"))
    for steps in (1, 3):
        plan = make_plan(*heads, f"grpo.steps={steps}", f"outputs={tmp_path}/in-two")
        [frozen] = run_dir.freeze([plan])
        loop = GrpoLoop(plan, frozen.path)
        loop.train(lambda row: None)
    held, scales = loop.engine.model.model.layers[1].self_attn.k_scale, loop.progress.kv_scales
    assert len(scales) == 2 * 3 * 2 and len(held) == 2 and held[0] != held[1]
    sent = [scales[f"model.layers.1.self_attn.{head}.k_scale"] for head in range(2)]
    assert held.tolist() == torch.tensor(sent).tolist()
    found = metrics.read_metrics(frozen.path)
    for key in ("mismatch/kl", "recalibrate/max_drift"):
        assert [row[key] for row in found[1:]] == [row[key] for row in whole[1:]]


def test_fp16_is_what_both_sides_hold_and_what_travels(make_plan, tmp_path):
    loop = GrpoLoop(make_plan("precision=fp16", "model=tiny-qwen3-moe"), tmp_path)
    loop._refit(0)
    held = [*loop.policy.model.parameters(), *loop.engine.wire_tensors().values()]
    assert {each.dtype for each in held} == {torch.float16}
    computed = set()

    def note(module, inputs, output):
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            computed.add(output.dtype)

    for module in (*loop.policy.model.modules(), *loop.engine.model.modules()):
        module.register_forward_hook(note)
    batch = loop._sample(loop._problems_of(0, 1), loop.progress.sampler)
    loop.policy.logprobs(batch)
    assert computed == {torch.float16}
    assert {spec.dtype for spec in loop.engine.expected.values()} == {"float16"}


def test_advantages_leave_one_out_and_divide_by_the_deviation_of_the_others():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    found = group_advantages(rewards, GRPO)
    others = torch.tensor([1.0, 0.0, 0.0])  # what the first response sees
    expected = (1 - others.mean()) / (others.var(unbiased=True).sqrt() + 1e-6)
    assert found[0].item() == pytest.approx(expected.item(), rel=1e-5)
    assert found[4:].tolist() == [0.0] * 4


def nemo_rls_function():
    """NeMo RL's own baseline function, out of the checkout's source."""
    root = os.environ.get("NEMO_RL_ROOT")
    if not root:
        pytest.skip("NEMO_RL_ROOT: no checkout of NeMo RL")
    tree = ast.parse((Path(root) / "nemo_rl" / "algorithms" / "utils.py").read_text())
    name = "calculate_baseline_and_std_per_prompt"
    [function] = [node for node in tree.body if getattr(node, "name", "") == name]
    scope = {"torch": torch}
    exec(compile(ast.Module([function], []), root, "exec"), scope)
    return scope[name]


def test_advantages_equal_those_of_nemo_rl():
    function = nemo_rls_function()
    rewards = (torch.rand(50, 8, generator=torch.Generator().manual_seed(0)) < 0.4).float()
    prompts = torch.arange(50).repeat_interleave(8)[:, None]
    flat = rewards.flatten()
    baseline, std = function(prompts, flat, torch.ones(400), leave_one_out_baseline=True)
    expected = torch.where(std > 0, (flat - baseline) / (std + 1e-6), flat - baseline)
    assert torch.allclose(group_advantages(rewards, GRPO), expected, atol=1e-5)


def test_a_response_whose_peers_agree_is_not_divided():
    found = group_advantages(torch.tensor([[1.0, 0.0, 0.0]]), GRPO)
    assert found[0].item() == 1.0 and found[1] < 0


def test_the_surrogate_is_clipped_at_a_fifth_on_the_side_that_helps():
    advantage, ratio = torch.tensor([[1.0]]), torch.tensor([[1.5, 1.1, 0.9, 0.5]])
    assert clipped_loss(ratio, ratio.log(), advantage, GRPO)[0].tolist() == pytest.approx(
        [-1.2, -1.1, -0.9, -0.5]
    )
    assert clipped_loss(ratio, ratio.log(), -advantage, GRPO)[0].tolist() == pytest.approx(
        [1.5, 1.1, 0.9, 0.8]
    )


def test_k3_is_zero_at_agreement_positive_elsewhere_and_bounded():
    current = torch.tensor([[-1.0, -2.0, -50.0]])
    found = k3(current, torch.tensor([[-1.0, -1.0, 0.0]]))[0].tolist()
    assert found[0] == 0 and found[1] == pytest.approx(math.e - 2, rel=1e-6) and found[2] == 10


def test_a_rejecting_correction_leaves_the_policy_where_it_was(make_plan):
    plan = make_plan("correction=mis", "correction.low=1.0e+8", "correction.high=1.0e+9")
    [frozen] = run_dir.freeze([plan])
    run = GrpoLoop(plan, frozen.path)
    before = {name: weight.clone() for name, weight in run.policy.parameters.items()}
    run.policy.optimizer.param_groups[0]["weight_decay"] = 0.0
    run.train(lambda row: None)
    rows = metrics.read_metrics(frozen.path)
    assert rows[1]["correction/masked_fraction"] == 1.0 and rows[1]["correction/ess"] == 0.0
    assert all(torch.equal(before[name], weight) for name, weight in run.policy.parameters.items())
