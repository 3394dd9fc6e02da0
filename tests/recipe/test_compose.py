"""Command lines: what they compose to, and one clear line for each way in which they are wrong."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.plan import plan_from_json, plan_recipe
from fp8_nemo.recipe import compose as composing
from fp8_nemo.recipe.compose import (
    ComposeError,
    _unquoted,
    choices,
    compose,
    compose_cells,
    option_names,
)
from fp8_nemo.recipe.options.cluster import Cluster
from fp8_nemo.recipe.plain import escape_interpolation
from fp8_nemo.recipe.trees import Trees
from fp8_nemo.runs.frozen_code import freeze_code
from fp8_nemo.runs.run_dir import freeze

MISTAKES = {
    "grpp=demo": "grpp=demo: no such key; did you mean grpo?",
    "model=tiny-lama": "did you mean tiny-llama?",
    "+model=tiny-llama": "+model=tiny-llama: model is always there; write model=...",
    "correction=null": "correction=null: must be one of",
    "grpo.stepz=3": "grpo.stepz=3: no such key; did you mean grpo.steps?",
    "grpo.max_new_token=3": "no such key; did you mean grpo.max_new_tokens?",
    "+grpo.stepz=3": "+grpo.stepz=3: no such key; did you mean grpo.steps?",
    "++grpo.stepz=3": "++grpo.stepz=3: no such key; did you mean grpo.steps?",
    "+model.parallel.tenosr=2": "did you mean model.parallel.tensor?",
    "grpo.steps=abc": "grpo.steps=abc: must be a whole number",
    "grpo.steps=2.5": "grpo.steps=2.5: must be a whole number",
    "outputs=": "outputs=: must name a folder",
    "grpo.steps=0": "grpo.steps=0: must be at least 1",
    "grpo.steps=null": "grpo.steps=null: must be a whole number",
    "grpo.learning_rate=inf": "grpo.learning_rate=inf: must be above 0 and at most 1, and finite",
    "grpo.learning_rate=nan": "grpo.learning_rate=nan: must be above 0",
    "precision.train_linear=fp9": "precision.train_linear=fp9: must be one of bf16, fp16, fp8",
    "glue.verify=byte": "glue.verify=byte: must be one of bytes, names, off",
    "correction.veto=2": "correction.veto=2.0: must be above 0 and at most 1",
    "correction.low=0.5": "correction.low=0.5: bounds a mask, and correction.mask=none",
    "correction.mask=token": "correction.mask=token: needs correction.low or correction.high",
    "correction.level=none": "correction.truncate=2.0: truncates a ratio",
    "data=jsonl": "data.path=null: data=jsonl reads a folder",
    "precision.last_layers_bf16=2": "leaves none of the model's 2 layers in FP8",
    "model.name=../elsewhere": "model.name=../elsewhere: must be letters, digits",
    "nemo.grpo.x=1": "nemo.grpo.x=1: nemo starts empty; write +nemo.grpo.x=...",
    "~grpo": "~grpo=: nothing can be deleted",
    "cluster.extra=x": "cluster.extra=x: must be a list: [a,b]",
    "nemo=3": "nemo=3: must be keys of its own: +nemo.grpo.x=1",
    "hydra.run.dir=x": "hydra.run.dir=x: Hydra only composes here; set outputs=FOLDER",
    "precision=bf16,fp8-linear": "several values; add -m to sweep over them",
    "grpo.steps=[1": "grpo.steps=[1: cannot be read",
    "--multi": "--multi: unknown flag",
    "cluster=mine": "one of here, slurm; describe yours in conf/cluster/mine.yaml (docs/cluster.md",
}


def lines(*arguments: str) -> list[str]:
    with pytest.raises(ComposeError) as caught:
        compose(arguments)
    assert str(caught.value) == "\n".join(caught.value.lines)
    return caught.value.lines


def test_the_choices_name_every_group_and_its_options():
    told = choices()
    for group in ("precision", "correction", "model", "cluster", "sweep"):
        [line] = [line for line in told.splitlines() if line.strip().startswith(group + " ")]
        assert option_names(group)[0] in line
    assert all(len(line) <= 80 for line in told.splitlines())


@pytest.mark.parametrize("group", ["precision=bf16,fp8-linear", "data=arithmetic,running-sum"])
def test_two_options_of_one_group_are_refused_and_in_a_sweep_meant_as_an_axis(group):
    name, _, values = group.partition("=")
    words = [f"{name}={value}" for value in values.split(",")]
    said = f"{words[1]}: is on the line 2 times; "
    assert lines(*words) == [f"{said}leave one"]
    assert lines("-m", *words) == [f"{said}write {group}"]


def test_a_key_or_the_cluster_may_be_set_again_and_a_note_says_which_counts():
    [cell] = compose_cells(["grpo.steps=2", "cluster=slurm", "grpo.steps=3", "cluster=here"])
    assert (cell.recipe.grpo.steps, cell.recipe.cluster.kind) == (3, "here")
    assert cell.notes == (
        "grpo.steps: is on the line 2 times; the last counts, 3",
        "cluster: is on the line 2 times; the last counts, here",
    )


@pytest.mark.parametrize(
    ("words", "note"),
    [
        ("experiment=bf16 precision=fp8-linear", "precision=fp8-linear: the line wins over experime"
         "nt=bf16, which has precision=bf16"),
        ("experiment=fp8-linear-tis correction=mis", "correction=mis: the line wins over experiment"
         "=fp8-linear-tis, which has correction=tis"),
        ("-m sweep=precision precision=bf16", "precision=bf16: the line wins over sweep=precision, "
         "which has precision="),
    ],
)  # fmt: skip
def test_what_a_line_overrules_in_its_experiment_or_sweep_is_told(words, note):
    [cell, *_] = compose_cells(words.split())
    [told] = cell.notes
    assert told.startswith(note)
    assert words.endswith(f"{told.partition(':')[0]}")
    [plan, *_] = compose_plans(words.split())
    assert told in plan.notes


@pytest.mark.parametrize(
    "words", ["experiment=bf16", "experiment=bf16 precision=bf16", "experiment=null seed=7"]
)
def test_what_agrees_is_not_told(words):
    assert compose_cells(words.split())[0].notes == ()


@pytest.mark.parametrize(
    "key", ["grpo.steps", "grpo.prompts_per_step", "cluster.nodes", "glue.recalibrate.history"]
)
def test_no_number_is_absurd(key):
    [line] = lines(f"{key}=99999999999999999999999")
    assert line.startswith(f"{key}=99999999999999999999999: must be at most 1,000,000,000")


@pytest.mark.parametrize("key", ["outputs", "model.path", "data.path", "correction.measurement"])
@pytest.mark.parametrize(
    ("path", "said"),
    [("x" * 256, "a name in it has 256 bytes, and 255 is the most"),
     ("é" * 128, "a name in it has 256 bytes"),
     ("/y" * 1800, "has 3,600 bytes, and 3,500 is the most")],
)  # fmt: skip
def test_a_path_longer_than_any_can_be_is_refused(key, path, said):
    [line] = lines(f"{key}='{path}'")
    assert line.startswith(f"{key}={path[:40]}...: {said}")


def test_a_difficulty_out_of_range_is_one_line():
    for value in (-1, 0, 99):
        [line] = lines(f"data.difficulty={value}")
        assert line.startswith(f"data.difficulty={value}: must be from 1 to 6, the digits")


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_that_json_has_not_are_refused_in_nemo_rls_keys(value):
    [line] = lines("model=llama31-8b", f"+nemo.grpo.max_grad_norm={value}")
    assert line == f"nemo.grpo.max_grad_norm={value}: must be a finite number"


NOISE = re.compile(
    r"token recognition|EOF|expecting|viable|EQUAL|BRACKET|Exception|evaluating|Union"
)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "precision=fp8\u2011linear",
            "\u2011 is not the character that it looks like; write precis",
        ),
        (
            "grpo.steps=\uff11\uff10",
            "\uff11 is not the character that it looks like; write grpo.steps=10",
        ),
        ("precision", "it is no KEY=VALUE"),
        ("llama31-8b", "it is no KEY=VALUE; did you mean model=llama31-8b?"),
        ("precision:bf16", "it is no KEY=VALUE; did you mean precision=bf16?"),
        ("precision==bf16", "it has two equals signs; write precision=bf16"),
        (
            "outputs=~/runs",
            'no shell puts a folder in the place of ~ there; write "outputs=$HOME',
        ),
        ("outputs=🦊", "🦊 can stand only in quotes: \"outputs='🦊'\""),
        ("outputs=a#b", "# can stand only in quotes: \"outputs='a#b'\""),
        ("outputs='it''s'", "quote a value that holds"),
        ("precision=bf16\n", "it has a line break"),
        ("outputs=[a", "a quote or a bracket is not closed; quote a value"),
        ('outputs="a', "a quote or a bracket is not closed; quote a value"),
        ("a b=3", "before = stands a key, of letters, digits, dots and underscores"),
        ("grpo..steps=3", "before = stands a key, of letters, digits, dots and underscores"),
        ("precision=bf16,", "a value is missing beside a comma"),
        ("precision=,bf16", "a value is missing beside a comma"),
        ("seed=range(a,b)", "range takes numbers: seed=range(1,4)"),
        ("seed=many(1)", "many(...) is no list of values; write them with commas: seed=a,b"),
    ],
)
def test_a_word_that_cannot_be_read_is_told_in_our_own_words(word, said):
    for flags in ([], ["-m"]):
        [line] = lines(*flags, word)
        shown = word.replace("\n", "\\n")
        assert line.startswith(f"{shown}: cannot be read, {said}")
        assert not NOISE.search(line)


def test_a_reference_to_no_key_is_told_with_its_key():
    [line] = lines("outputs=${foo}")
    assert line.startswith("outputs: refers to foo, which is no key; for a shell's variable write")


@pytest.mark.parametrize("argument", list(MISTAKES))
def test_a_mistake_is_one_line_that_names_key_value_and_remedy(argument):
    [line] = lines(argument)
    assert MISTAKES[argument] in line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["mask=mean-k3", "low=0.1", "high=0.2"], "low=0.1: correction.mask=mean-k3 is a distance"),
        (["truncate_low=3"], "truncate_low=3.0: is above correction.truncate=2.0"),
        (["max_reject=0"], "max_reject=0.0: must be above 0 and at most 1"),
        (["mask=mean_k3", "high=1"], "mask=mean_k3: must be one of none, token, sequence"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(arguments, line):
    [found] = lines("correction=tis", *(f"correction.{each}" for each in arguments))
    assert found.startswith(f"correction.{line}")


def test_every_distinct_mistake_gets_its_own_line():
    assert len(lines("grpo.stepz=3", "modle=x", "grpo.stepz=3")) == 2
    assert len(lines("grpo.steps=0", "correction.veto=2", "grpo.generations_per_prompt=1")) == 3


def test_fp8_kv_cache_needs_fp8_rollout_linears():
    [line] = lines("precision=bf16", "precision.rollout_kv=fp8")
    assert line.startswith("precision.rollout_kv=fp8: needs precision.rollout_linear=fp8, got bf16")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["precision.rollout_kv=bf16"], "rollout_kv=bf16: must be fp16: precision.train_linear"),
        (["precision.rollout_linear=fp8"], "rollout_linear=fp8: must be fp16"),
        (["precision.train_linear=bf16"], "rollout_linear=fp16: must be bf16"),
        (["precision.loss_scale=null"], "loss_scale=null: must be a number: FP16 loses small"),
    ],
)  # fmt: skip
def test_fp16_is_on_both_sides_and_has_a_loss_scale(arguments, line):
    [found] = lines("precision=fp16", *arguments)
    assert found.startswith(f"precision.{line}")


def test_other_formats_have_no_loss_scale():
    [found] = lines("precision=fp8-e2e", "precision.loss_scale=8")
    assert found == "precision.loss_scale=8.0: must be null: bf16 loses no small gradients"


def test_fp8_training_needs_fp8_rollout():
    [line] = lines("precision=bf16", "precision.train_linear=fp8")
    assert "choose precision=fp8-e2e" in line


def test_one_impossible_cell_refuses_the_whole_sweep_and_is_named():
    [line] = lines("-m", "precision=bf16,fp8-linear", "precision.train_linear=fp8")
    assert line.endswith("(cell precision=bf16 precision.train_linear=fp8)")
    [line] = lines("-m", "precision=bf16,fp9")
    assert line.startswith("precision=fp9: must be one of")


def test_a_sweep_without_a_cell_is_a_mistake():
    [line] = lines("-m", "precision=glob(zz*)")
    assert line == "precision=glob(zz*): no cell matches"


def test_a_sweep_is_the_product_of_its_axes_in_the_order_typed():
    recipes = compose(["-m", "precision=bf16,fp8-linear", "seed=1,2,3"])
    assert [(r.precision.name, r.seed) for r in recipes] == [
        ("bf16", 1), ("bf16", 2), ("bf16", 3),
        ("fp8-linear", 1), ("fp8-linear", 2), ("fp8-linear", 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["-m", "seed=1,1"], "seed=1: the same run as seed=1; drop one of them"),
        (
            ["-m", "grpo.steps=10,20"],
            "grpo.steps=20: the same run as grpo.steps=10; drop one of them",
        ),
        (
            ["-m", "sweep=demo,precision-x-correction"],
            "sweep=demo,precision-x-correction: one sweep",
        ),
        (["+sweep=demo"], "+sweep=demo: sweep is always there; write sweep=..."),
        (
            ["-m", "data=arithmetic,openmath-2"],
            "data=openmath-2: backend=local reads arithmetic, running-sum or jsonl; choose "
            "data=arithmetic, or data=jsonl data.path=FOLDER (cell data=openmath-2)",
        ),
    ],
)
def test_cells_that_no_directory_can_hold_are_refused(arguments, line):
    with pytest.raises(ComposeError) as caught:
        compose_plans(arguments)
    assert [each[: len(line)] for each in caught.value.lines] == [line]


def test_plan_level_mistakes_of_all_cells_are_collected():
    arguments = ["-m", "model=tiny-llama,llama31-8b", "data=arithmetic,openmath-2", "backend=local"]
    with pytest.raises(ComposeError) as caught:
        compose_plans(arguments)
    assert len(caught.value.lines) == 4


def test_an_axis_on_the_command_line_replaces_that_of_the_sweep_file():
    recipes = compose(["-m", "sweep=precision-x-correction", "precision=fp8-e2e"])
    assert [(r.precision.name, r.correction.name) for r in recipes] == [
        ("fp8-e2e", "none"), ("fp8-e2e", "tis"), ("fp8-e2e", "mis"),
    ]  # fmt: skip


def test_a_choice_on_the_command_line_wins_over_the_experiment():
    [recipe] = compose(["experiment=fp8-e2e-tis", "correction=mis"])
    assert (recipe.precision.name, recipe.correction.name) == ("fp8-e2e", "mis")


def test_nemo_is_open_and_keeps_types():
    [recipe] = compose(
        ["+nemo.policy.generation.vllm_cfg.gpu_memory_utilization=0.6", "+nemo.grpo.a=[1,b]"]
    )
    assert recipe.nemo == {
        "policy": {"generation": {"vllm_cfg": {"gpu_memory_utilization": 0.6}}},
        "grpo": {"a": [1, "b"]},
    }  # fmt: skip


def test_values_with_shell_characters_arrive_as_typed():
    [recipe] = compose([r"cluster.setup='echo $(id); \"a b\" | tee x'"])
    assert recipe.cluster.setup == r"echo $(id); \"a b\" | tee x"


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("outputs='~/runs'", "outputs=~/runs: names a path that is called so"),
        ("model.path='$HOME/m'", "model.path=$HOME/m: names a path that is called so"),
        ("grpo.steps={x:1}", "grpo.steps.x=1: no such key"),
    ],
)
def test_what_would_be_taken_for_something_else_is_refused(word, line):
    with pytest.raises(ComposeError) as caught:
        compose([word])
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "typed", "refused"),
    [
        ("cluster.time", 1800, [], True),
        ("cluster.account", 83, [], True),
        ("cluster.time", "30:00", [], False),
        ("cluster.qos", None, [], False),
        ("cluster.time", 240, ["model=tiny-llama", "cluster.time=240"], False),
        ("grpo.steps", 3, [], False),
    ],
)
def test_a_text_that_a_sites_file_has_without_quotes_is_refused(key, value, typed, refused):
    found = [str(each) for each in _unquoted({key: value}, typed)]
    said = f"{key}={value}: is what YAML makes of a text without quotes"
    assert [line.startswith(said) for line in found] == [True] * refused


def test_data_that_nobody_reads_is_refused_on_either_backend():
    for backend in ("local", "nemo"):
        found = lines("model=llama31-8b", f"backend={backend}", "data=openmath-2", "data.name=foo")
        assert "data.name=foo: must be one of arithmetic, running-sum, jsonl" in found[0]


def test_no_experiment_and_no_sweep_can_be_said():
    assert compose(["experiment=null", "sweep=null"]) == compose([])


@pytest.mark.parametrize("text", ["a", "${x}", "\\${HOME}/y", "$HOME", "a\\\\${b}", "{c}", "\\"])
def test_a_texts_dollar_and_brace_are_text(text):
    config = OmegaConf.structured(Cluster)
    OmegaConf.update(config, "setup", escape_interpolation(text))
    assert OmegaConf.to_object(config).setup == text
    assert escape_interpolation({"a": [text, 3]}) == {"a": [escape_interpolation(text), 3]}


def test_a_shells_variable_in_braces_is_taken_or_its_remedy_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [recipe] = compose([r"cluster.setup='export A=\${HOME}/x'"])
    assert recipe.cluster.setup == "export A=${HOME}/x"
    plan = plan_recipe(recipe)
    assert plan_from_json(json.loads(json.dumps(plan.to_json()))) == plan
    freeze([plan_recipe(dataclasses.replace(recipe, cluster=Cluster(setup="a=${PATH%%:*}")))])
    [line] = lines("cluster.setup='export A=${HOME}/x'")
    assert line.endswith(r"for a shell's variable write $NAME, or \${NAME}")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("cluster.extra=[[a]]", "must be options of sbatch"),
        ("cluster.extra=['--job-name=x']", "is what a job is found by"),
        ("cluster.extra=['--out=x']", "is what a job is found by"),
        ("cluster.extra=['--array=0-1']", "would run one directory several times"),
        ("cluster.extra=[-a0-1]", "cluster.max_running=N"),
        (
            "cluster.env=['WANDB_API_KEY=abc']",
            "would keep; export it, and name it: cluster.env=[WANDB_API_KEY]",
        ),
        ("cluster.env=[3x]", "must be NAME=value, or NAME alone"),
        ("cluster.max_running=0", "must be at least 1"),
        ("cluster.mounts=[[a]]", "must be an absolute folder"),
        ("cluster.enter=[apptainer,exec]", "must name {image}, where cluster.container goes"),
        (
            "cluster.python='~/bin/python'",
            "cluster.python=~/bin/python: names a path that is called",
        ),
        ("cluster.container='~/x.sqsh'", "cluster.container=~/x.sqsh: names a path that is called"),
    ],
)
def test_what_slurm_would_take_for_something_else_is_refused(word, said):
    [line] = lines("cluster=slurm", word)
    assert said in line


COMPOSE = """
import dataclasses, json, sys
from fp8_nemo.recipe.compose import ComposeError, compose
try:
    found = [dataclasses.asdict(recipe.cluster) for recipe in compose(sys.argv[1:])]
except ComposeError as error:
    found = error.lines
print(json.dumps(found))
"""


@pytest.fixture
def site(tmp_path):
    """Compose in a copy of the package that has a site's own file, as docs/cluster.md describes."""
    code = freeze_code(tmp_path)

    def run(text: str, *words: str) -> list:
        file = code / "fp8_nemo" / "conf" / "cluster" / "mysite.yaml"
        file.write_text(f"defaults: [slurm, _self_]\nname: mysite\n{text}")
        call = [sys.executable, "-P", "-c", COMPOSE, "cluster=mysite", *words]
        own = os.environ | {"PYTHONPATH": str(code)}
        return json.loads(subprocess.run(call, env=own, capture_output=True, check=True).stdout)

    return run


def test_a_sites_file_that_is_no_yaml_is_named_with_its_line(site):
    [line] = site("foo: [")
    assert "mysite.yaml" in line and "line 3" in line


def test_a_lines_options_of_sbatch_come_after_the_sites(site):
    own = "extra: ['--mem=0']\n"
    assert site(own)[0]["extra"] == ["--mem=0"]
    for word, more in (
        ("cluster.extra=[--hold]", "--hold"),
        ("++cluster.extra=['--comment=a=b c']", "--comment=a=b c"),
    ):
        assert site(own, word)[0]["extra"] == ["--mem=0", more]
    twice = site(own, "cluster.extra=[--hold]", "cluster.extra=[--no-kill]")
    assert twice[0]["extra"] == ["--mem=0", "--hold", "--no-kill"]


def test_a_sites_file_may_refer_to_other_keys_of_the_line(site):
    found = site("comment: s${seed}-${grpo.steps}\n", "-m", "seed=1,2", "grpo.steps=7")
    assert [cluster["comment"] for cluster in found] == ["s1-7", "s2-7"]


@pytest.mark.parametrize("own", ["", "comment: s${seed}\n"])
def test_a_text_that_looks_like_a_number_arrives_as_it_was_typed(site, own):
    words = ["cluster.dependency=12_3", "cluster.account=0012", "cluster.mem=1e3"]
    [cluster] = site(own, *words)
    found = [cluster[key] for key in ("dependency", "account", "mem")]
    assert found == ["12_3", "0012", "1e3"]


@pytest.mark.parametrize(
    "words",
    [
        ["seed=3", "precision=bf16", "seed=4"],
        ["outputs='a, b'", "model.path='/m/x=y'", "cluster.time=04:00:00", "data.difficulty=null"],
        [
            "+nemo.grpo.x=1",
            "++grpo.steps=5",
            "correction.truncate=1e1",
            "grpo.validate_first=False",
        ],
        ["model.parallel.tensor=2", "model.parallel={pipeline:2}", "cluster.mounts=[/a]"],
        ["experiment=fp8-linear-tis", "correction.truncate=3", "correction=mis"],
    ],
)
def test_words_put_in_after_composing_are_what_hydra_makes_of_them(words, monkeypatch):
    [ours] = compose(words)
    monkeypatch.setattr(Trees, "_plain_value", lambda self, word: None)
    assert compose(words) == [ours]


def test_a_site_that_would_train_on_the_login_node_is_refused():
    words = ["cluster.account=mine", "cluster.name=mysite"]
    with pytest.raises(ComposeError, match="account=mine: is Slurm's, and cluster=mysite is kind"):
        compose(words)
    assert compose(words[:1]) and compose([*words, "cluster=slurm"])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["model.shape.kv_heads=3"], "kv_heads=3: must divide the query heads, 4"),
        (["model.shape.head_dim=63"], "head_dim=63: must be even"),
        (["model.shape.experts=4"], "experts_per_token=0: must be 1 to 4"),
        (["model=tiny-qwen3-moe", "model.shape.experts_per_token=5"], "must be 1 to 4"),
        (["model=tiny-qwen3-moe", "model.shape.expert_ffn=0"], "must be the width of an expert"),
    ],
)
def test_numbers_that_no_model_has_together_are_refused(words, line):
    assert line in lines(*words)[0]


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        (
            "precision.rollout_kv=fp8",
            "precision.rollout_kv=fp8: needs precision.rollout_linear=fp8",
        ),
        ("precision.train_linear=fp8", "train_linear=fp8: needs precision.rollout_linear=fp8"),
        ("model.shape.hidden=200", "model.shape.hidden=200: must be a multiple of 16 with nvfp4"),
        ("precision.first_layers_bf16=2", "leaves none of the model's 2 layers in NVFP4"),
    ],
)
def test_four_bits_are_of_the_rollouts_weights_alone(argument, line):
    [found] = lines("precision=nvfp4-w4a16", argument)
    assert line in found


def test_options_read_alone_are_those_of_a_recipe_and_one_that_cannot_be_read_is_left_out(
    monkeypatch,
):
    names = composing.option_names("precision")
    recipes = compose(["-m", f"precision={','.join(names)}"])
    monkeypatch.setattr(composing, "option_names", lambda group: ["gone", *names])
    found = composing.read_options("precision")
    assert found == {each.precision.name: each.precision for each in recipes}
