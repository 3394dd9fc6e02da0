"""Recipe -> Plan: what is filled in, what is refused, what the run directory is called."""

import dataclasses
import json

import pytest

from fp8_nemo.compose import compose
from fp8_nemo.plan import LOCAL_BASE, PlanError, plan_from_json, plan_recipe


def plan(*arguments: str):
    return plan_recipe(compose(arguments)[0])


def test_a_plan_survives_json():
    for arguments in (
        [],
        ["model=llama31-8b", "+nemo.policy.generation.vllm_kwargs.a={b: 1}"],
        ["correction=geo-mis"],
    ):
        before = plan(*arguments)
        assert plan_from_json(json.loads(json.dumps(before.to_json()))) == before


def test_null_inherits_nemo_rls_base_on_the_local_backend():
    grpo = plan("grpo=paper").recipe.grpo
    assert {key: getattr(grpo, key) for key in LOCAL_BASE} == LOCAL_BASE


def test_null_inherits_the_models_base_yaml_on_nemo():
    grpo = plan("model=llama31-8b").recipe.grpo
    assert (grpo.learning_rate, grpo.updates_per_step, grpo.max_new_tokens) == (3e-7, 4, None)


@pytest.mark.parametrize(
    "argument", ["grpo.steps=900", "outputs=elsewhere", "logging.wandb=true", "cluster.nodes=4"]
)
def test_steps_cluster_logging_and_outputs_do_not_rename_the_run(argument):
    assert plan(argument).run_name == plan().run_name


@pytest.mark.parametrize(
    "argument",
    [
        "grpo.learning_rate=1.0e-3",
        "glue.verify=full",
        "precision.scales=pow2",
        "correction.veto=1.0e-4",
        "data.difficulty=1",
    ],
)
def test_anything_else_renames_the_run(argument):
    assert plan(argument).run_name != plan().run_name
    assert plan(argument).cell == plan().cell


def test_the_run_is_named_model_precision_correction_seed():
    assert plan("seed=7").run_name.startswith("tiny-llama/fp8-kv-attn-tis/s7-")


def test_a_slurm_cell_needs_an_image_for_nemo_rls_own_environments():
    with pytest.raises(PlanError, match=r"cluster\.container=null: .*cluster\.interpreter=system"):
        plan("model=qwen3-8b", "cluster=slurm")
    assert plan("model=qwen3-8b", "cluster=slurm", "cluster.interpreter=system")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["model=llama31-8b", "backend=local", "data=arithmetic"],
            "model.path=null: backend=local reads llama31-8b from a folder",
        ),
        (["data=openmath-2"], "data=openmath-2: backend=local reads arithmetic or jsonl"),
        (["+nemo.grpo.x=1"], "nemo.grpo={'x': 1}: backend=local has no NeMo RL configuration"),
        (
            ["grpo=paper", "grpo.updates_per_step=3"],
            "grpo.updates_per_step=3: must divide the step's 512 sequences",
        ),
    ],
)
def test_what_the_local_backend_cannot_do_is_refused(arguments, line):
    with pytest.raises(PlanError) as caught:
        plan(*arguments)
    assert str(caught.value).startswith(line)


def test_an_option_without_effect_is_a_note_so_that_sweeps_compose():
    [note] = plan("precision=bf16", "precision.scales=pow2").notes
    assert note == "precision.scales: no effect, nothing is quantized"
    notes = plan("glue.quantize=stock", "glue.transfer=bf16", "logging.wandb=true").notes
    assert [note.split(":")[0] for note in notes] == ["logging", "glue.quantize", "glue.transfer"]
    assert plan().notes == ()


def test_a_plan_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().cell = "other"
