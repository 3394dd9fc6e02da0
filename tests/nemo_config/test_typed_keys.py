"""The keys that NeMo RL's own classes declare: all of them are taken, of their types alone.

With NEMO_RL_ROOT the kept declaration is held against the checkout, and NeMo RL's own asserts say
of a configuration what ours say.
"""

import ast
import dataclasses
import importlib.util
import json
import os
from pathlib import Path

import pytest

from fp8_nemo.nemo_config.checkout import config_of, read_host
from fp8_nemo.nemo_config.host import MAIN, Host
from fp8_nemo.nemo_config.keys import ADDED, PASSED, command_line
from fp8_nemo.nemo_config.limits import host_limits
from fp8_nemo.nemo_config.overrides import keys_of
from fp8_nemo.nemo_config.seams import ENGINE, SEAMS
from fp8_nemo.nemo_config.typed_keys import declared_keys, fits
from fp8_nemo.nemo_config.versions import Source
from fp8_nemo.nemo_config.vllm_arguments import VLLM_ARGUMENTS
from fp8_nemo.plan.plan import PlanError, plan_recipe
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.settled import settle

DATA = Path(__file__).parent / "data"
FILES = {"0.25.1": "nemo_rl-main-7ea279a.json", "0.20.0": "nemo_rl-v0.7.0.json"}
ROOT = os.environ.get("NEMO_RL_ROOT")
checkout = pytest.mark.skipif(not ROOT, reason="NEMO_RL_ROOT: no checkout of NeMo RL")
LINE = ("backend=nemo", "glue=stock", "model=llama31-8b", "precision=fp8-e2e")
BASE = "examples/configs/grpo_math_8B_megatron.yaml"
AT = "policy.megatron_cfg"


def host(vllm):
    content = json.loads((DATA / FILES[vllm]).read_text())
    declared = ADDED | content["declared"]
    return Host("kept", bases=content["configs"], vllm=vllm, declared=declared)


def recipe(*arguments):
    [found] = compose([*LINE, *arguments])
    return found


def refusal(argument, there):
    with pytest.raises(PlanError) as caught:
        plan_recipe(recipe(argument), there)
    [line] = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize("vllm", FILES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("policy.refit_buffer_size_gb", 4),
        (f"{AT}.fp8_cfg.force_clear_fp8_caches", True),
        (f"{AT}.clear_memory_caches_before_refit", True),
        (f"{AT}.attention_backend", "flash"),
        (f"{AT}.moe_flex_dispatcher_backend", "hybridep"),
        ("policy.generation.vllm_cfg.enable_prefix_caching", False),
        ("policy.sequence_packing.fuse_loss", True),
        ("policy.pretrained_checkpoint.path", "/models/base"),
        ("policy.pretrained_checkpoint.format", "megatron_lm"),
        ("env.code.num_workers", 8),
        ("env.sliding_puzzle.cfg.game_config.size", 4),
        ("grpo.advantage_clip_low", -3.0),
    ],
)
def test_what_nemo_rl_takes_is_taken_and_typed_as_new_in_the_stock_command(key, value, vllm):
    there = host(vllm)
    found = plan_recipe(recipe(f"+nemo.{key}={json.dumps(value)}"), there).nemo
    assert found.overrides[key] == value
    words = command_line(found.base_config, found.overrides, there.declared)
    assert any(word.startswith(f"++{key}=") for word in words)


@pytest.mark.parametrize(
    "key", ["env.code.num_workers=8", "policy.sequence_packing.fuse_loss=true"]
)
def test_without_a_checkout_environments_are_open_and_what_no_class_declares_is_known(key):
    assert plan_recipe(recipe(f"+nemo.{key}"), MAIN)


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        (
            "+nemo.checkpointing.keep_top_k=null",
            "nemo.checkpointing.keep_top_k=null: must be int, as NeMo RL declares it",
        ),
        (
            f"+nemo.{AT}.recompute_granularity=half",
            f"nemo.{AT}.recompute_granularity=half: must be 'full' or 'selective', as",
        ),
        (
            "+nemo.policy.max_grad_norm=strong",
            "nemo.policy.max_grad_norm=strong: must be float or int or null, as NeMo RL declares",
        ),
        (
            f"+nemo.{AT}.fp8_cfg.force_clear_fp8_cache=true",
            f"nemo.{AT}.fp8_cfg.force_clear_fp8_cache=true: no such key in {BASE}, and NeMo RL "
            f"declares none; did you mean nemo.{AT}.fp8_cfg.force_clear_fp8_caches?",
        ),
        (f"+nemo.{AT}.peft.enabled=true", f"nemo.{AT}.peft.enabled=true: is written by lora; set"),
        (
            f"+nemo.{AT}.model_overrides.tp_comm_overlap=true",
            f"nemo.{AT}.model_overrides.tp_comm_overlap=true: must be false: NeMo RL initializes",
        ),
        (
            f"+nemo.{AT}.model_overrides.batch_invariant_mode=true",
            f"nemo.{AT}.model_overrides.batch_invariant_mode=true: must be false: NeMo RL enables",
        ),
        (
            f"+nemo.{AT}.optimizer.exp_avg_dtype=bfloat16",
            f"nemo.{AT}.optimizer.exp_avg_dtype=bfloat16: must be null: NeMo RL hands over a text",
        ),
        ("+nemo.policy.quant_cfg=NVFP4", "nemo.policy.quant_cfg=NVFP4: must be null: precision"),
    ],
)
def test_a_value_of_another_type_or_of_what_is_not_driven_is_one_line(argument, line):
    assert refusal(argument, host("0.25.1")).startswith(line)


@pytest.mark.parametrize("name", PASSED)
def test_no_argument_of_vllm_is_given_twice(name):
    at = f"nemo.policy.generation.vllm_kwargs.{name}"
    line = refusal(f"+{at}=1", host("0.25.1"))
    assert line.startswith(f"{at}=1: is written by NeMo RL")
    assert line.endswith(f"set {PASSED[name]} instead" if PASSED[name] else "leave it out")


def test_a_misspelled_argument_of_vllm_is_told_the_nearest_of_its_version():
    at = "nemo.policy.generation.vllm_kwargs"
    assert "did you mean max_num_seqs?" in refusal(f"+{at}.max_num_seq=8", host("0.25.1"))
    newer = recipe(f"+{at}.watermark=0.1")
    assert plan_recipe(newer, host("0.25.1")) and plan_recipe(newer, Host("later"))
    assert "vLLM 0.20.0 has no such" in refusal(f"+{at}.watermark=0.1", host("0.20.0"))


@pytest.mark.parametrize(
    ("value", "kinds", "taken"),
    [
        (1, "int", True), (1.0, "int", True), (0.5, "int", False), (True, "int", False),
        (float("inf"), "int", False), (1, "float", True), (True, "float", False),
        (None, "int | None", True), (None, "str", False), ("fp8", "'auto' | 'fp8'", True),
        ("fp9", "'auto' | 'fp8'", False), ([1], "list | dict", True), (1, "bool", False),
        ("x", "Any", True),
    ],
)  # fmt: skip
def test_values_fit_their_declared_types_as_pydantic_has_it(value, kinds, taken):
    assert fits(value, kinds) == taken


@checkout
def test_the_kept_declaration_is_the_checkouts_and_its_own_bases_keep_to_it():
    there = read_host(Path(ROOT))
    kept = json.loads((DATA / FILES[there.vllm]).read_text())
    assert declared_keys(Source(Path(ROOT))) == kept["declared"]
    for path in kept["configs"]:
        for key, value in there.bases[path].items():
            assert fits(value, there.declared.get(key, "Any")), (path, key, value)


@checkout
def test_a_key_that_no_class_declares_is_read_somewhere():
    text = "".join(path.read_text() for path in (Path(ROOT) / "nemo_rl").rglob("*.py"))
    known = read_host(Path(ROOT)).declared
    undeclared = [key for key in ADDED if known[key] == ADDED[key]]
    lacking = [key for key in undeclared if key.rpartition(".")[2] not in text]
    newer = {"policy.offload_optimizer_for_refit", f"{AT}.scheduler.override_opt_param_scheduler"}
    passed_on = {key for key in lacking if key.startswith(f"{AT}.optimizer.")}
    assert not {*lacking} - newer - passed_on
    megatron = pytest.importorskip("megatron.core.optimizer.optimizer_config")
    fields = {each.name for each in dataclasses.fields(megatron.OptimizerConfig)}
    assert {key.rpartition(".")[2] for key in passed_on} <= fields


@checkout
def test_a_key_that_a_base_lacks_enters_its_configuration():
    key = "policy.pretrained_checkpoint.format"
    found = config_of(Path(ROOT), BASE, {key: "megatron_lm"})
    assert found["policy"]["pretrained_checkpoint"] == {"format": "megatron_lm"}


@checkout
def test_what_nemo_rl_passes_to_vllm_is_what_may_not_be_passed_again():
    source = Source(Path(ROOT))
    calls = [node for node in ast.walk(source.tree(f"{ENGINE}/vllm_worker.py"))
             if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict"
             and any(each.arg == "served_model_name" for each in node.keywords)]  # fmt: skip
    [call] = calls
    passed = {each.arg for each in call.keywords} - {None}
    replaced = {"quantization", "kv_cache_dtype", "distributed_executor_backend", "logprobs_mode"}
    assert passed | replaced == {*PASSED}


PACKED, DYNAMIC = "+nemo.policy.sequence_packing.enabled", "+nemo.policy.dynamic_batching.enabled"
CHUNKED, DEFERRED = "+nemo.policy.logprob_chunk_size=1024", f"+nemo.{AT}.defer_fp32_logits"
FUSED = f"+nemo.{AT}.use_fused_linear_logprobs=true"
ASSERTS = {
    "equal-micro-batches": (
        ["model.parallel.tensor=4", "+nemo.policy.logprob_batch_size=2"],
        ["model.parallel.tensor=4", "+nemo.policy.logprob_batch_size=1"],
    ),
    "dynamic-or-packed": ([f"{DYNAMIC}=true"], [f"{DYNAMIC}=true", f"{PACKED}=false"]),
    "dynamic-stages": (
        [f"{DYNAMIC}=true", f"{PACKED}=false", "model.parallel.pipeline=2"],
        [f"{DYNAMIC}=true", f"{PACKED}=false"],
    ),
    "packed-context": (
        ["model.parallel.context=2", f"{PACKED}=false"],
        ["model.parallel.context=2"],
    ),
    "chunked-logprobs": ([CHUNKED, f"{DEFERRED}=false"], [CHUNKED, f"{DEFERRED}=true"]),
    "fused-logprobs": ([FUSED], [FUSED, f"{PACKED}=false"]),
    "batch-multiplier": (["+nemo.grpo.batch_multiplier=2"], []),
}


@checkout
@pytest.mark.parametrize("key", ASSERTS)
def test_nemo_rls_own_assert_fails_where_our_limit_does(key):
    there, seam = read_host(Path(ROOT)), SEAMS[key]
    if there.vllm != "0.25.1":
        pytest.skip("the lines are main's")
    [stop] = [node for node in ast.walk(Source(Path(ROOT)).tree(seam.file))
              if isinstance(node, ast.Assert) and node.lineno == seam.lines[0]]  # fmt: skip
    for words, holds in zip(ASSERTS[key], (False, True), strict=True):
        settled = settle(recipe(*words), there.base(BASE))
        config = config_of(Path(ROOT), BASE, keys_of(settled, there) | settled.own)
        policy = config["policy"]
        names = {
            "config": policy,
            "policy_config": policy,
            "pp_size": policy["megatron_cfg"]["pipeline_model_parallel_size"],
            "batch_multiplier": config["grpo"]["batch_multiplier"],
        }
        assert eval(compile(ast.Expression(stop.test), seam.file, "eval"), names) == holds
        ours = [each for each in host_limits(settled, there) if each.mirrors == seam.path]
        assert any(each.broken for each in ours) != holds


def test_the_kept_arguments_of_vllm_are_its_own():
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm is not here")
    root = Path(next(iter(spec.submodule_search_locations)))
    trees = {name: ast.parse((root / name).read_text())
             for name in ("engine/arg_utils.py", "entrypoints/llm.py")}  # fmt: skip
    classes = {node.name: node for tree in trees.values() for node in tree.body
               if isinstance(node, ast.ClassDef)}  # fmt: skip
    fields = {each.target.id for each in classes["EngineArgs"].body
              if isinstance(each, ast.AnnAssign)}  # fmt: skip
    [start] = [each for each in classes["LLM"].body if getattr(each, "name", "") == "__init__"]
    own = {each.arg for each in (*start.args.args, *start.args.kwonlyargs)} - {"self"}
    assert fields | own | {"swap_space"} in VLLM_ARGUMENTS.values()
