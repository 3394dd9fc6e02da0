"""Recipe -> Plan: what is filled in, what is refused, what the run directory is called."""

import dataclasses
import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fp8_nemo.nemo_config.host import MAIN
from fp8_nemo.nemo_config.overrides import path_overrides
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.describe import describe
from fp8_nemo.plan.model import count
from fp8_nemo.plan.plan import PlanError, plan_from_json, plan_recipe
from fp8_nemo.recipe.compose import ComposeError, compose
from fp8_nemo.runs.frozen_code import freeze_code

ROOT = Path(__file__).parents[2]
OWN_VLLM = "nemo.policy.generation.vllm_kwargs"


def plan(*arguments: str):
    return plan_recipe(compose(arguments)[0])


@pytest.mark.parametrize("width", [64, 96, 200])
def test_experts_whose_projections_share_a_block_of_their_slab_are_refused(width):
    line = ["model=tiny-qwen3-moe", f"model.shape.expert_ffn={width}"]
    with pytest.raises(ComposeError, match=f"expert_ffn={width}: must be a multiple of 128"):
        plan(*line, "precision=fp8-linear")
    assert plan(*line, "precision=bf16")


def test_a_plan_survives_json():
    for arguments in (
        [],
        ["model=llama31-8b", "+nemo.policy.generation.vllm_kwargs.hf_overrides={b: 1}"],
        ["correction=geo-mis"],
    ):
        before = plan(*arguments)
        assert plan_from_json(json.loads(json.dumps(before.to_json()))) == before


def test_null_inherits_nemo_rls_base_on_the_local_backend():
    found = plan("grpo=paper").recipe.grpo
    numbers = (found.prompts_per_step, found.generations_per_prompt, found.updates_per_step)
    assert (*numbers, found.max_new_tokens) == (32, 16, 1, 512)
    assert (found.learning_rate, found.kl_penalty) == (5e-6, 0.01)


def test_updates_that_do_not_divide_the_steps_sequences_are_refused():
    with pytest.raises(PlanError, match=r"grpo\.updates_per_step=7: must divide the step's"):
        plan("grpo.updates_per_step=7")


@pytest.mark.parametrize("model", ["tiny-llama", "llama31-8b", "qwen3-30b-a3b"])
def test_a_frozen_plan_settles_to_the_numbers_that_it_was_made_with(model):
    made = plan(f"model={model}", "precision=fp8-linear")
    again = plan_from_json(json.loads(json.dumps(made.to_json())))
    assert again.settled == made.settled and again.settled.recipe == made.recipe
    numbers = [made.settled.prompts_per_step, made.settled.response_tokens, made.settled.gpus]
    assert all(type(each) is int and each > 0 for each in numbers)


def test_null_inherits_the_models_base_yaml_on_nemo():
    grpo = plan("model=llama31-8b").recipe.grpo
    assert (grpo.learning_rate, grpo.updates_per_step, grpo.max_new_tokens) == (3e-7, 4, None)


@pytest.mark.parametrize(
    "argument", ["grpo.steps=900", "outputs=elsewhere", "logging.wandb=true", "cluster.nodes=4"]
)
def test_steps_cluster_logging_and_outputs_do_not_rename_the_run(argument):
    assert plan(argument).run_name == plan().run_name


@pytest.mark.parametrize("words", [[], ["model=llama31-8b"]], ids=["local", "nemo"])
def test_slurms_options_without_slurm_are_told(words):
    found = plan(*words, "cluster.account=team", "cluster.extra=['--mem=0']").notes
    told = [note for note in found if "cluster=here is this machine" in note]
    assert [note.partition(":")[0] for note in told] == ["cluster.account", "cluster.extra"]
    queued = plan(*words, "cluster=slurm", "cluster.account=team", "cluster.interpreter=system")
    assert not [note for note in queued.notes if "is this machine" in note]


@pytest.mark.parametrize(
    "argument",
    [
        "grpo.learning_rate=1.0e-3",
        "glue.verify=names",
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
        (
            ["data=openmath-2"],
            "data=openmath-2: backend=local reads arithmetic, running-sum or jsonl",
        ),
        (["+nemo.grpo.x=1"], "nemo.grpo.x=1: backend=local has no NeMo RL configuration"),
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


def test_answers_that_would_be_cut_off_are_a_note():
    [note] = plan("data=running-sum", "grpo=demo").notes
    assert note.startswith("grpo.max_new_tokens: 8 may cut right answers off")
    assert "357 characters" in note
    assert plan("data=running-sum", "grpo=demo", "grpo.max_new_tokens=357").notes == ()


def test_a_plan_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().cell = "other"


@pytest.mark.parametrize(
    ("name", "usual", "refused", "limits"),
    [
        ("arithmetic", 2, (0, 7), "from 1 to 6, the digits of each operand"),
        ("running-sum", 30, (1, 61), "from 2 to 60, the numbers to add up"),
    ],
)
def test_a_task_that_is_made_has_difficulties_of_its_own(name, usual, refused, limits):
    assert plan(f"data={name}").recipe.data.difficulty == usual
    assert plan(f"data={name}", "data.difficulty=4").recipe.data.difficulty == 4
    for difficulty in refused:
        with pytest.raises(ComposeError) as caught:
            compose([f"data={name}", f"data.difficulty={difficulty}"])
        assert f"data.difficulty={difficulty}: must be " in str(caught.value)
    assert limits in str(caught.value)


def test_what_nemo_rl_is_given_of_a_task_that_is_made_is_the_runs_own_files(tmp_path):
    arguments = ("backend=nemo", "glue=stock", "precision=bf16", "model=small-llama")
    made = plan(*arguments, "data=running-sum", "data.path=elsewhere")
    keys = path_overrides(made.recipe, tmp_path, None)
    assert keys["data.train.data_path"] == str(tmp_path / "data" / "train.jsonl")
    assert made.nemo.environment["HF_HUB_OFFLINE"] == "1"
    assert "data.path: no effect, data=running-sum reads no file" in made.notes
    plain = plan(*arguments, "data=arithmetic")
    assert {**made.nemo.overrides} == {**plain.nemo.overrides}


def test_runs_of_before_are_found_again():
    """The kept runs' names, which their recipes still have."""
    packed = (ROOT / "benchmarks" / "results" / "runs.jsonl.gz").read_bytes()
    runs = [json.loads(line) for line in gzip.decompress(packed).splitlines()]
    assert len(runs) == 12
    for run in runs:
        saved = plan_from_json(run["plan"])
        assert plan_recipe(saved.recipe).run_name == run["run"] == saved.run_name
        precision, correction = saved.recipe.precision.name, saved.recipe.correction.name
        words = [f"precision={precision}", f"correction={correction}", f"seed={saved.recipe.seed}"]
        assert plan_recipe(compose(words)[0]).run_name == saved.run_name


@pytest.mark.parametrize(
    ("before", "now"), [("ledger", "bytes"), ("full", "bytes"), ("off", "off")]
)
def test_a_proof_frozen_by_its_name_of_before_goes_on_as_the_present_default(before, now):
    content = plan().to_json()
    content["recipe"]["glue"]["verify"] = before
    again = plan_from_json(json.loads(json.dumps(content)))
    assert again.recipe.glue.verify == now
    assert (again.run_name == plan().run_name) is (now == "bytes")


@pytest.mark.parametrize(
    ("word", "note"),
    [
        ("model.hf_id=foo", "model.hf_id: no effect, the local backend reads a folder"),
        ("cluster.python=/nope/python", "cluster.python: no effect, cluster=here is this machine"),
    ],
)
def test_what_the_local_backend_does_not_look_at_is_told(word, note):
    [plan] = compose_plans(["model=tiny-llama", word])
    assert [each for each in plan.notes if each.startswith(note)]


def test_a_layout_that_nobody_gave_is_no_note():
    given, left = (
        compose_plans(["model=tiny-llama", f"model.parallel.tensor={size}"])[0].notes
        for size in ("2", "null")
    )
    assert any("model.parallel: no effect" in note for note in given)
    assert not any("model.parallel" in note for note in left)


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        (["grpo.max_new_tokens=16384"], []),  # the plan recomputes
        (["grpo.max_new_tokens=16384", "model.parallel.context=2"], []),  # which ran
        (["grpo=long-32k", "cluster.gpu=h200"], ["context"]),  # the plan chooses 4
        (["model=qwen3-30b-a3b"], ["tensor"]),
        (["model=qwen3-30b-a3b", "cluster.gpu=h200"], []),
        (
            ["precision=fp8-linear", "model.parallel.context=1", "model.parallel.pipeline=2"],
            ["pipeline"],
        ),
    ],
)
def test_an_axis_that_never_ran_is_told_before_a_run(words, noted):
    names_one = words[0].startswith("model=")
    [plan] = compose_plans([*["model=llama31-8b"][names_one:], *words])
    notes = [note for note in plan.notes if re.search("no run here (of experts )?had", note)]
    assert [note.split(":")[0] for note in notes] == [f"model.parallel.{each}" for each in noted]


@pytest.mark.parametrize(
    ("model", "precision", "noted"),
    [
        ("llama32-1b", "fp8-e2e", True),
        ("llama32-1b", "fp8-linear", False),
        ("llama31-8b", "fp8-e2e", False),
    ],
)
def test_heads_of_64_are_told_that_training_in_fp8_mixes_their_blocks(model, precision, noted):
    notes = plan(f"model={model}", f"precision={precision}").notes
    assert any(note.startswith("precision.train_linear: heads of 64") for note in notes) is noted


def test_fp16_sends_what_bf16_does():
    [bf16, fp16] = compose(["-m", "precision=bf16,fp16", "model=llama31-8b"])
    sent = [count(each.model.shape, each.precision) for each in (bf16, fp16)]
    assert sent[0] == sent[1] and sent[1].refit_bytes == sent[1].refit_bytes_bf16
    assert "in FP16; glue" in dict(describe(plan_recipe(fp16), MAIN))["refit"]


def test_an_aligned_engine_is_hashed_shown_and_has_no_effect_on_the_local_backend():
    words = ("model=llama31-8b", "precision=fp8-e2e")
    stock, aligned = plan(*words), plan(*words, "precision.align=cheap")
    assert stock.hash6 != aligned.hash6
    assert "align" not in dict(describe(stock, MAIN))["rollout"]
    exact = dict(describe(plan(*words[:1], "precision=fp8-e2e", "precision.align=exact",
                               "model.parallel.tensor=1"), MAIN))["rollout"]  # fmt: skip
    assert exact.endswith("norm, FP8 quantizer by the trainer's formulas, one attention for both")
    assert dict(describe(aligned, MAIN))["rollout"] == (
        "linear fp8, attention and KV bf16; RoPE, SiLU, FP8 quantizer by the trainer's formulas"
    )
    kv = plan("model=llama31-8b", "precision=fp8-kv-attn", "precision.align=cheap")
    assert dict(describe(kv, MAIN))["rollout"].endswith("formulas (not tried with an FP8 cache)")
    [note] = plan("precision=fp8-e2e", "precision.align=cheap").notes
    assert note.startswith("precision.align: no effect, the local backend's engine has")
    assert plan_from_json(json.loads(json.dumps(aligned.to_json()))) == aligned


def test_a_plan_says_that_an_engine_could_be_aligned_where_runs_had_one():
    def noted(*words):
        told = [note.split()[1] for note in plan(*words).notes if "it begins another run" in note]
        return told[0] if told else None

    e2e = ("model=llama31-8b", "precision=fp8-e2e", "cluster.gpu=h200")
    assert noted(*e2e) == "exact"
    assert noted(*e2e, "model.parallel.tensor=2") == "cheap"
    assert noted(*e2e, "model.shape.head_dim=64") == "cheap"
    for elsewhere in (
        (*e2e, "precision.align=cheap"),
        ("model=llama31-8b", "precision=fp8-linear"),
        ("model=llama31-8b", "precision=fp8-e2e-kv-attn"),
        ("model=qwen3-30b-a3b", "precision=fp8-e2e"),
        (*e2e, "model.parallel.rollout_tensor=2"),
        (*e2e, "glue=stock"),
        ("precision=fp8-e2e",),
    ):
        assert not noted(*elsewhere), elsewhere


def test_a_run_of_before_goes_on_with_the_kernel_that_it_had():
    line = ("model=llama31-8b", "precision=fp8-kv-attn")
    now, before = plan(*line), plan(*line, "glue.decode=fa3")
    content = json.loads(json.dumps(before.to_json()))
    del content["recipe"]["glue"]["decode"]
    assert plan_from_json(content) == before and plan_from_json(content).run_name == before.run_name
    assert before.hash6 == "46025b" != now.hash6  # as its directory is called, and another run
    assert not before.recipe.decodes_by_xqa and now.recipe.decodes_by_xqa
    stock = plan(*line, "glue=stock", "glue.recalibrate.source=forward")
    content = json.loads(json.dumps(stock.to_json()))
    del content["recipe"]["glue"]["decode"]
    glue = plan_from_json(content).recipe.glue
    assert glue == stock.recipe.glue and not glue.needs_plugin(stock.recipe.precision)


@pytest.mark.parametrize(
    "words",
    [
        ("precision=bf16",),
        ("precision=fp8-kv-attn", "model.shape.head_dim=96"),
        ("precision=fp8-kv-attn", "model.shape.kv_heads=2"),
        ("precision=fp8-kv-attn", f"+{OWN_VLLM}.attention_backend=FLASHINFER"),
        ("precision=fp8-kv-attn", f"+{OWN_VLLM}.attention_config.backend=TRITON_ATTN"),
    ],
)
def test_the_kernel_of_decode_names_no_run_that_cannot_have_it(words):
    line = ("model=llama31-8b", *words)
    xqa, fa3 = plan(*line, "glue.decode=xqa"), plan(*line, "glue.decode=fa3")
    assert xqa.hash6 == fa3.hash6 and not xqa.recipe.decodes_by_xqa


def test_vllms_own_choice_of_attention_named_by_the_user_still_decodes_by_xqa():
    for key in ("attention_backend", "attention_config.backend"):
        line = ("model=llama31-8b", "precision=fp8-kv-attn", f"+{OWN_VLLM}.{key}=FLASH_ATTN")
        assert plan(*line).recipe.decodes_by_xqa


def test_scales_of_heads_are_counted_hashed_and_refused_inside_nemo_rl():
    layer = plan("precision=fp8-kv-attn", "precision.kv_scales=layer")
    head = plan("precision=fp8-kv-attn", "precision.kv_scales=head")
    assert layer.hash6 == plan("precision=fp8-kv-attn").hash6 == "0c31f4" != head.hash6
    shape = head.recipe.model.shape
    sent = [count(shape, each.recipe.precision).refit_bytes for each in (layer, head)]
    assert sent[1] - sent[0] == 4 * 3 * shape.layers * (shape.kv_heads - 1)
    with pytest.raises(PlanError) as error:
        plan("precision=fp8-kv-attn", "precision.kv_scales=head", "model=llama31-8b")
    [line] = str(error.value).splitlines()
    assert line.startswith("precision.kv_scales=head: vLLM 0.25.1 takes scales of heads")
    noted = plan("precision=fp8-linear", "precision.kv_scales=head").notes
    assert noted == ("precision.kv_scales: no effect, the KV cache has no scales",)


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        (["model=qwen3-30b-a3b", "precision=fp8-linear", "replay=none"], True),
        (["model=qwen3-30b-a3b", "precision=fp8-linear"], False),
        (["model=qwen3-30b-a3b", "precision=bf16"], False),
        (["model=llama31-8b", "precision=fp8-linear"], False),
    ],
)
def test_experts_in_fp8_are_told_of_replay(words, noted):
    [found] = compose_plans(words)
    assert any(note.startswith("replay:") for note in found.notes) is noted


NOTES = """
import sys
from fp8_nemo.nemo_config.host import MAIN
from fp8_nemo.plan.cells import compose_plans
print(*compose_plans(sys.argv[1:], lambda recipe: MAIN)[0].notes, sep="\\n")
"""


def test_a_plan_notes_a_line_whose_gpu_is_not_the_one_in_the_sites_file(tmp_path):
    code = freeze_code(tmp_path)
    site = code / "fp8_nemo" / "conf" / "cluster" / "mysite.yaml"
    site.write_text("defaults: [slurm, _self_]\nname: mysite\ngpu: h100\ninterpreter: system\n")

    def notes(*words):
        call = [sys.executable, "-P", "-c", NOTES, "model=llama31-8b", *words]
        own = os.environ | {"PYTHONPATH": str(code)}
        found = subprocess.run(call, env=own, capture_output=True, text=True, check=True).stdout
        return [line for line in found.splitlines() if "file has" in line]

    [line] = notes("cluster=mysite", "cluster.gpu=h200")
    assert line.startswith("cluster.gpu=h200: mysite's file has h100; cluster.preflight")
    assert not notes("cluster=mysite")
    assert not notes("cluster=slurm", "cluster.gpu=h200", "cluster.interpreter=system")
