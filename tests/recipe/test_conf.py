"""`conf/` as code: every option composes, names are what they say, experiments are diffs."""

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fp8_nemo.plan.plan import PlanError, plan_recipe
from fp8_nemo.recipe.compose import compose, read_options
from fp8_nemo.recipe.options.recipe import Recipe

CONF = Path(__file__).parents[2] / "conf"
read = cache(read_options)
GROUPS = (
    *("model", "precision", "correction", "data", "grpo", "algorithm", "replay", "glue"),
    *("lora", "noise", "cluster"),
)


def options(group: str) -> list[str]:
    return sorted(
        path.stem for path in (CONF / group).glob("*.yaml") if not path.stem.startswith("my")
    )


def arguments(group: str, option: str) -> list[str]:
    more = {"jsonl": ["data.path=somewhere"], "r3": ["model=tiny-qwen3-moe"]}
    more |= {key: ["precision=fp8-linear"] for key in ("all-linear", "attention")}
    more |= {"aqn": ["noise.steps=30"]}
    return [f"{group}={option}", *more.get(option, ())]


ALL_OPTIONS = [(group, option) for group in GROUPS for option in options(group)]
MODELS = [
    option for option in options("model") if option != "auto"
]  # tests/recipe/test_own_model.py
CORRECTIONS = ("none", "tis", "mis", "seq-tis", "seq-mis", "geo-mis")  # not everybody's presets
CELLS = list(product(options("precision"), CORRECTIONS))
REFUSED = {
    "nvfp4-w4a16": lambda recipe: (
        "is for dense models" if recipe.model.shape.experts
        else "must correct" if recipe.correction.name == "none"
        else "must be 1 with four bits" if recipe.model.parallel.rollout_tensor not in (None, 1)
        else None
    ),
}  # fmt: skip
"""By precision, what NeMo RL's plan says of a recipe that it does not take."""


def test_the_options_of_the_contract_are_there():
    assert options("precision") == [
        "bf16",
        "fp16",
        "fp8-e2e",
        "fp8-e2e-kv-attn",
        "fp8-kv-attn",
        "fp8-linear",
        "nvfp4-w4a16",
    ]
    assert {"geo-mis", "mis", "none", "seq-mis", "seq-tis", "tis"} < set(options("correction"))
    assert {"tiny-llama", "tiny-qwen3-moe", "llama31-8b", "qwen3-30b-a3b"} <= set(options("model"))


@pytest.mark.parametrize(
    ("group", "option"), [each for each in ALL_OPTIONS if each != ("model", "auto")]
)
def test_an_option_composes_and_is_named_like_its_file(group, option):
    [recipe] = compose(arguments(group, option))
    assert getattr(recipe, group).name == option


@pytest.mark.parametrize(("group", "option"), ALL_OPTIONS)
def test_an_option_file_sets_only_keys_of_its_group(group, option):
    known = OmegaConf.structured(Recipe)[group]
    content = OmegaConf.load(CONF / group / f"{option}.yaml")
    assert set(content) - {"defaults"} <= set(known)


@pytest.mark.parametrize("model", MODELS)
def test_every_precision_plans_on_every_model_and_every_correction_on_one(model):
    """All pairs with NeMo RL's own keys: tests/nemo_config/test_plans.py."""
    one = model == "llama31-8b"
    cells = CELLS if one else [(each, "tis") for each in options("precision")]
    extra = ["model.layout=null"]  # what it chooses is the matter of tests/plan
    extra += ["model.path=somewhere"] if model == "small-llama" else []
    precisions, corrections = read("precision"), read("correction")
    [chosen] = compose([f"model={model}", *extra])
    for precision, correction in cells:
        recipe = replace(
            chosen, precision=precisions[precision], correction=corrections[correction]
        )
        is_nemo = recipe.chosen_backend == "nemo"
        if is_nemo and precision in REFUSED and (text := REFUSED[precision](recipe)):
            with pytest.raises(PlanError, match=text):
                plan_recipe(recipe)
        else:
            assert plan_recipe(recipe).cell == f"{model}/{precision}-{correction}"


@pytest.mark.parametrize("name", options("experiment"))
def test_an_experiment_composes_and_changes_every_value_that_it_sets(name):
    text = (CONF / "experiment" / f"{name}.yaml").read_text()
    assert f"python -m recipes.grpo experiment={name}" in text
    content = OmegaConf.to_container(OmegaConf.load(CONF / "experiment" / f"{name}.yaml"))
    overrides = content.pop("defaults", [])
    assert all("override" in next(iter(each)) for each in overrides if isinstance(each, dict))
    base = [f"{next(iter(each)).split('/')[1]}={next(iter(each.values()))}" for each in overrides]
    [without], [with_it] = compose(base), compose([f"experiment={name}"])
    for key in content:
        assert OmegaConf.structured(without)[key] != OmegaConf.structured(with_it)[key], key


@pytest.mark.parametrize("name", options("sweep"))
def test_a_sweep_composes_into_distinct_cells(name):
    recipes = compose(["-m", f"sweep={name}"])
    names = [plan_recipe(recipe).run_name for recipe in recipes]
    assert len(names) == len(set(names)) > 1


def test_the_default_line_is_tiny_llama_in_fp8_here():
    [recipe] = compose([])
    plan = plan_recipe(recipe)
    assert (plan.backend, plan.cell) == ("local", "tiny-llama/fp8-kv-attn-tis")


def test_a_real_model_brings_its_data_and_batch_unless_told_otherwise():
    [recipe] = compose(["model=llama31-8b"])
    assert (recipe.data.name, recipe.grpo.name) == ("openmath-2", "paper")
    [recipe] = compose(["model=llama31-8b", "data=arithmetic", "grpo=demo"])
    assert (recipe.data.name, recipe.grpo.name) == ("arithmetic", "demo")


@pytest.mark.parametrize("group", ["precision", "correction"])
@pytest.mark.parametrize("model", ["llama31-8b", "qwen3-30b-a3b", "tiny-llama"])
def test_an_option_changes_nothing_beyond_its_group(model, group):
    """So the cells above put one option for another; a layout is the same in all precisions."""
    [chosen] = compose([f"model={model}"])
    for name in options(group):
        [found] = compose([f"model={model}", f"{group}={name}"])
        assert found == replace(chosen, **{group: read(group)[name]})


@pytest.mark.parametrize("model", MODELS)
def test_no_model_is_spread_over_a_pipeline(model):
    assert compose([f"model={model}"])[0].model.parallel.pipeline == 1
