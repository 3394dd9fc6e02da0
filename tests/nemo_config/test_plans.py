"""Ring 1, without NeMo RL: every cell's overrides against the keys of both versions.

`data/` holds the keys and values of the base files that `conf/model` names, after inheritance, and
the keys that its classes declare, as NeMo RL main 7ea279a and v0.7.0 have them.
"""

import dataclasses
import json
import re
import shlex
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from fp8_nemo.nemo_config.host import BASE_KEYS, KNOWN_BASES, MAIN, Host
from fp8_nemo.nemo_config.keys import ADDED, command_line, may_be_added
from fp8_nemo.nemo_config.limits import host_limits
from fp8_nemo.nemo_config.overrides import path_overrides, path_variables
from fp8_nemo.nemo_config.own.asynchronous import CLEARS_PREFIXES
from fp8_nemo.nemo_config.own.fp16 import AWARE, OTHER_LOSSES, REDUCED
from fp8_nemo.nemo_config.versions import MAIN_DEFECTS, V0_7_0_DEFECTS
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.describe import describe, differences, stock_command
from fp8_nemo.plan.memory import GIB, GPU_GIB, HEADROOM, kv_cache_tokens, memory_per_gpu
from fp8_nemo.plan.plan import PlanError, plan_from_json, plan_recipe
from fp8_nemo.plan.step_time import step_seconds
from fp8_nemo.recipe.compose import ComposeError, compose, read_options
from fp8_nemo.recipe.settled import Base

KEYS = Path(__file__).parent / "data"
FILES = {"main": "nemo_rl-main-7ea279a.json", "v0.7.0": "nemo_rl-v0.7.0.json"}
DEFECTS = {"main": MAIN_DEFECTS, "v0.7.0": V0_7_0_DEFECTS}
VLLM_OF = {"main": "0.25.1", "v0.7.0": "0.20.0"}
LATER = Host("later")

MODELS = ("tiny-llama", "tiny-qwen3-moe", "small-llama", "small-qwen3-moe")
REAL = ("llama31-8b", "qwen3-8b", "qwen3-30b-a3b")
PRECISIONS = ("bf16", "fp8-linear", "fp8-kv-attn", "fp8-e2e", "fp8-e2e-kv-attn")
CORRECTIONS = ("none", "tis", "mis", "seq-tis", "seq-mis", "geo-mis")
NEMO = ("backend=nemo", "glue=stock", "model.path=null")
GIVEN = (
    *("model.layout=null", "model.parallel.tensor=1", "model.parallel.context=1"),
    *("model.parallel.rollout_tensor=1", "model.memory.recompute=true"),
    "model.memory.kv_cache_gib=20",
)
"""A layout that the recipe gives itself, as the real models' files had it once."""
TWO = ("model.parallel.rollout_tensor=2",)
TWO_TRAINED = ("model.layout=null", "model.parallel.tensor=2")

VLLM = "policy.generation.vllm_cfg"
MEGATRON = "policy.megatron_cfg"
ALIGNED = "precision.align=cheap"
EXACT = ("model=llama31-8b", "precision.align=exact", "precision=fp8-e2e")


def once(*words):
    """A line that names each key once: the last time counts."""
    return [*{word.partition("=")[0]: word for word in words}.values()]


def cell(model, precision, correction, *more):
    words = f"model={model}", f"precision={precision}", f"correction={correction}"
    return once(*NEMO, *words, *more)


def plan(*arguments, host=MAIN):
    [recipe] = compose(once(*NEMO, *arguments))
    return plan_recipe(recipe, host)


def overrides(*arguments, host=MAIN):
    return plan(*arguments, host=host).nemo.overrides


def host(version):
    content = json.loads((KEYS / FILES[version]).read_text())
    return Host(
        version,
        bases=content["configs"],
        defects=DEFECTS[version],
        vllm=VLLM_OF[version],
        declared=ADDED | content["declared"],
    )


@pytest.mark.parametrize("version", FILES)
def test_every_key_of_all_210_cells_is_the_bases_own_or_on_the_allow_list(version):
    there, planned, forbidden = host(version), 0, 0
    corrections = read_options("correction")
    for model, precision in product(MODELS + REAL, PRECISIONS):
        [recipe] = compose(cell(model, precision, "none"))
        layout = None  # of the first correction: none of them changes it
        for correction in CORRECTIONS:
            corrected = replace(recipe, correction=corrections[correction])
            try:
                found = plan_recipe(corrected, there, layout)
            except PlanError:
                forbidden += 1
                continue
            layout, planned = found.layout, planned + 1
            base = there.bases[found.nemo.base_config]
            for key in found.nemo.overrides:
                assert key in base or may_be_added(key), (model, precision, correction, key)
    fp8_kv = len(MODELS + REAL) * 2 * len(CORRECTIONS)
    assert (planned, forbidden) == {"main": (210, 0), "v0.7.0": (210 - fp8_kv, fp8_kv)}[version]


@pytest.mark.parametrize("version", FILES)
@pytest.mark.parametrize("path", KNOWN_BASES)
def test_what_the_package_knows_of_a_base_is_what_the_base_says(version, path):
    there = host(version)
    assert there.base(path) == KNOWN_BASES[path]
    assert set(BASE_KEYS) == set(Base._fields)


@pytest.mark.parametrize("each", list(product(REAL, PRECISIONS, ("tis",))))
@pytest.mark.parametrize("nodes", [1, 4])
def test_cells_of_real_models_plan_on_8_and_32_gpus_with_headroom_or_a_reason(each, nodes):
    found = plan(*cell(*each, f"cluster.nodes={nodes}"))
    memory = memory_per_gpu(found.settled)
    reasons = [note for note in found.notes if note.startswith("memory: ")]
    assert bool(reasons) == (memory.headroom(memory.worst) < HEADROOM)
    assert bool(reasons) == (each[0] == "qwen3-30b-a3b" and "e2e" in each[1] and nodes == 1)


def test_the_plan_sets_what_its_features_depend_on_and_inherits_none_of_it():
    cell = ["model=qwen3-30b-a3b", "precision=fp8-e2e-kv-attn", "cluster.gpu=h200", *GIVEN]
    found = overrides(*cell, "model.parallel.rollout_tensor=2")
    assert {
        "loss_fn.force_on_policy_ratio": False,
        f"{MEGATRON}.optimizer.use_precision_aware_optimizer": False,
        "checkpointing.enabled": True,
        "logger.wandb_enabled": False,
        f"{VLLM}.logprobs_mode": "processed_logprobs",
        f"{MEGATRON}.moe_router_dtype": "fp32",
        f"{MEGATRON}.fp8_cfg.fp8_recipe": "blockwise",
        f"{MEGATRON}.fp8_cfg.fp8_param": False,
        "policy.generation.vllm_kwargs.kv_cache_memory_bytes": 20 * GIB,
        f"{MEGATRON}.env_vars.NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
        f"{VLLM}.use_deep_gemm": True,
        "policy.sequence_packing.fuse_loss": True,
        f"{VLLM}.quantization_ignored_layer_kws": ["mlp.gate"],
        f"{VLLM}.precision": "fp8",
        f"{VLLM}.kv_cache_dtype": "fp8",
        f"{MEGATRON}.pipeline_model_parallel_size": 1,
        "grpo.val_at_start": False,
        "grpo.async_grpo.enabled": False,
        "policy.train_global_batch_size": 2048,
    }.items() <= found.items()


def test_an_aligned_engine_is_compiled_as_it_was_measured():
    at = "policy.generation.vllm_kwargs"
    found = overrides("model=llama31-8b", "precision=fp8-linear", ALIGNED)
    wanted = {
        f"{at}.ir_op_priority.rms_norm": ["vllm_c", "native"],
        f"{at}.ir_op_priority.fused_add_rms_norm": ["vllm_c", "native"],
        f"{at}.compilation_config.pass_config.fuse_norm_quant": False,
        f"{at}.compilation_config.pass_config.fuse_act_quant": False,
        f"{MEGATRON}.apply_rope_fusion": True,
        f"{MEGATRON}.bias_activation_fusion": True,
    }
    assert wanted.items() <= found.items()
    assert not wanted.keys() & overrides("model=llama31-8b", "precision=fp8-linear").keys()


def test_alignment_is_noted_unless_a_key_or_the_version_stands_against_it():
    words = "model=llama31-8b", "precision=fp8-e2e", "cluster.gpu=h200"
    unfused = f"+nemo.{MEGATRON}.apply_rope_fusion=false"

    def noted(version, *more):
        [found] = compose_plans([*words, *more], lambda recipe: host(version))
        return any(note.startswith("precision.align: exact made") for note in found.notes)

    assert noted("main") and not noted("main", unfused) and not noted("v0.7.0")


def test_an_exact_plan_notes_micro_batches_of_fewer_rows_than_were_compared():
    few = "precision.align=exact: micro-batches of 2,048 tokens"
    for sequences, noted in ((1, [few]), (2, [])):
        sizes = (f"model.memory.{each}={sequences}" for each in ("micro_batch", "logprob_batch"))
        found = plan(*EXACT, "glue=ours", "grpo.max_new_tokens=1024", *sizes)
        told = [note.partition(";")[0] for note in found.notes if "exact" in note]
        assert told == noted


WATCHES = "glue.recalibrate.source=logprob"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["precision=fp8-linear", "glue=stock", *TWO], "has vLLM's Ray executor V1"),
        (["precision=fp8-kv-attn", "glue=stock", WATCHES, *TWO], "has vLLM's Ray executor V1"),
        (["precision=fp8-linear", "precision.align=cheap", "glue=stock", *TWO], "executor V1"),
        (
            ["precision=fp8-kv-attn", "glue=ours", *TWO],
            "one of two was timed in one rollout, no faster than two engines of one GPU",
        ),
        (["precision=fp8-linear"], ""),
        (["precision=bf16", *TWO], ""),
        (["precision=bf16", "glue=ours", *TWO], ""),
    ],
)
def test_only_stock_fp8_on_several_gpus_takes_vllms_older_executor(words, told):
    found = plan("model=llama31-8b", "cluster.gpu=h100", *words)
    notes = [note for note in found.notes if "FP8 engine of several GPUs" in note]
    assert len(notes) == bool(told) and all(told in note for note in notes)
    name = f"{VLLM}.env_vars.VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
    assert (name in found.nemo.overrides) == ("V1" in told)


def test_a_dense_model_never_ignores_mlp_gate():
    found = overrides("model=llama31-8b", "precision=fp8-linear")
    assert f"{VLLM}.quantization_ignored_layer_kws" not in found
    assert found[f"{MEGATRON}.optimizer.use_precision_aware_optimizer"] is True
    assert not any("NVTE" in key for key in found)


@pytest.mark.parametrize("version", FILES)
def test_a_base_that_asks_for_what_is_not_driven_is_overruled(version):
    there = host(version)
    asked = {f"{VLLM}.is_mx": True, "policy.generation.refit_transport": "nixl"}
    bases = {path: {**keys, **asked} for path, keys in there.bases.items()}
    cell = "model=qwen3-30b-a3b", "precision=fp8-linear"
    found = overrides(*cell, host=dataclasses.replace(there, bases=bases))
    assert {key: found[key] for key in asked} == {
        f"{VLLM}.is_mx": False, "policy.generation.refit_transport": None,
    }  # fmt: skip
    assert not asked.keys() & overrides(*cell, host=there).keys()


def test_more_engine_ranks_than_key_heads_hold_copies_of_whole_heads():
    layout = ("model.parallel.rollout_tensor=8", "model.parallel.rollout_expert=8")
    found = overrides("model=qwen3-30b-a3b", "precision=fp8-linear", "cluster.nodes=2", *layout)
    assert found[f"{VLLM}.tensor_parallel_size"] == 8  # of 4 key heads


def test_a_bf16_cell_asks_for_nothing_of_fp8():
    found = overrides("model=llama31-8b", "precision=bf16", "correction=none")
    assert found[f"{VLLM}.precision"] == "bfloat16"
    assert found[f"{VLLM}.kv_cache_dtype"] == "auto"
    assert not found[f"{VLLM}.use_deep_gemm"] and not found[f"{MEGATRON}.fp8_cfg.enabled"]
    assert found["loss_fn.use_importance_sampling_correction"] is False
    assert found["grpo.val_at_start"] is True


def test_pow2_scales_and_bf16_layers_reach_both_sides():
    found = overrides(
        *("model=llama31-8b", "precision=fp8-e2e", "precision.scales=pow2"),
        *("precision.first_layers_bf16=2", "precision.last_layers_bf16=1"),
        host=LATER,
    )
    assert {
        f"{VLLM}.pow2_weight_scaling_factors": True,
        f"{VLLM}.pow2_activation_scaling_factors": True,
        f"{VLLM}.num_first_layers_in_bf16": 2,
        f"{VLLM}.num_last_layers_in_bf16": 1,
        f"{MEGATRON}.env_vars.NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "0",
        f"{MEGATRON}.model_overrides.first_last_layers_bf16": True,
        f"{MEGATRON}.model_overrides.num_layers_at_start_in_bf16": 2,
        f"{MEGATRON}.model_overrides.num_layers_at_end_in_bf16": 1,
    }.items() <= found.items()


@pytest.mark.parametrize(
    ("correction", "loss"),
    [
        ("tis", (True, "tis", 2.0, None)),
        ("mis", (True, "icepop", 2.0, 0.5)),
        ("none", (True, None, None, None)),
        ("geo-mis", (True, None, None, None)),
        ("seq-tis", (True, None, None, None)),
        ("tis correction.truncate=null", (True, None, None, None)),
        ("mis correction.low=null", (True, "icepop", 2.0, 0.0)),
        ("mis correction.high=null", (True, None, None, None)),
        ("tis correction.veto=1.0e-4", (True, None, None, None)),
    ],
)
def test_a_correction_is_nemo_rls_own_where_it_has_the_same(correction, loss):
    found = overrides("model=llama31-8b", *f"correction={correction}".split())
    at = "loss_fn.truncated_importance_sampling"
    keys = ("loss_fn.use_importance_sampling_correction", f"{at}_type", f"{at}_ratio")
    assert tuple(found[key] for key in (*keys, f"{at}_ratio_min")) == loss


def test_batches_follow_the_base_and_what_is_given_of_them():
    assert overrides("model=llama31-8b")["policy.train_global_batch_size"] == 512
    fewer = overrides("model=llama31-8b", "grpo.prompts_per_step=32")
    assert fewer["policy.train_global_batch_size"] == 256
    given = overrides("model=llama31-8b", *GIVEN)
    assert given["policy.logprob_batch_size"] == given["policy.train_micro_batch_size"] == 1


def test_a_length_that_is_given_leaves_room_for_the_prompt():
    found = overrides("model=llama31-8b", "grpo.max_new_tokens=1000")
    assert found["policy.generation.max_new_tokens"] == 1000
    assert found["policy.max_total_sequence_length"] == 2048
    inherited = overrides("model=llama31-8b")
    assert inherited["policy.max_total_sequence_length"] == 4096


FORBIDDEN = [
    (
        ["model=llama31-8b", "precision=bf16", "lora=all-linear", "lora.rank=3", *TWO_TRAINED],
        "lora.rank=3: must be a multiple of model.parallel.tensor=2, which shares it out "
        "(megatron/bridge/peft/utils.py:1046)",
    ),
    (
        ["model=llama31-8b", "precision=bf16", "+nemo.policy.make_sequence_length_divisible_by=3"],
        "nemo.policy.make_sequence_length_divisible_by=3: must divide the longest sequence, 4096 "
        "(nemo_rl/models/megatron/data.py:1290); leave it out",
    ),
    (
        ["model=llama31-8b", "precision=fp8-linear", "model.shape.hidden=4032"],
        "model.shape.hidden=4032: must be a multiple of 128 with FP8 linears",
    ),
    (
        ["model=qwen3-30b-a3b", "model.parallel.pipeline=2", "precision=fp8-kv-attn"],
        "model.parallel.pipeline=2: precision.rollout_kv=fp8 allows 1",
    ),
    (
        ["model=llama31-8b", "model.parallel.tensor=2", "cluster.gpus_per_node=5"],
        "cluster.nodes x cluster.gpus_per_node=5: must be a multiple of tensor x pipeline",
    ),
    (
        ["model=llama31-8b", "cluster.nodes=2", "cluster.rollout_gpus=4"],
        "cluster.rollout_gpus=4: must be whole nodes of 8 with cluster.nodes=2 "
        "(nemo_rl/algorithms/grpo.py:904); set 8 or a multiple, or cluster.nodes=1",
    ),
    (
        ["model=llama31-8b", "cluster.rollout_gpus=4", "model.parallel.rollout_tensor=8"],
        "model.parallel.rollout_tensor=8: must divide cluster.rollout_gpus, 4",
    ),
    (
        ["model=llama31-8b", "cluster.rollout_gpus=3", "model.parallel.tensor=2"],
        "cluster.nodes x cluster.gpus_per_node - cluster.rollout_gpus=5: must be a multiple of",
    ),
    (
        ["model=llama31-8b", "model.parallel.rollout_tensor=3"],
        "model.parallel.rollout_tensor=3: must divide the GPUs, 8",
    ),
    (
        ["model=llama31-8b", "cluster.gpus_per_node=6", "model.parallel.rollout_tensor=3"],
        "model.parallel.rollout_tensor=3: must divide the heads, 32 (vllm, model config); set 1 or",
    ),
    (
        [
            *("model=llama31-8b", "cluster.gpus_per_node=6", "precision=bf16"),
            *("model.shape.heads=24", "model.shape.kv_heads=6", "model.parallel.tensor=3"),
        ],
        "model.parallel.tensor=3: cuts sequences in 3 parts, and the longest has 4096 tokens "
        "(nemo_rl/models/megatron/data.py:1290); set 1",
    ),
    *(
        (
            [
                *("model=llama32-3b", "cluster.gpus_per_node=6", "grpo.prompts_per_step=36"),
                *("precision=bf16", "correction=none", f"model.parallel.rollout_tensor={ranks}"),
            ],
            f"model.parallel.rollout_tensor={ranks}: must divide the K/V heads, 8, or be a "
            "multiple of them (vllm/model_executor/models/llama.py, LlamaAttention); set 1 or 2",
        )
        for ranks in (3, 6)
    ),
    (
        [
            *("model=llama31-8b", "precision=bf16", "model.shape.ffn=14338"),
            "model.parallel.rollout_tensor=4",
        ],
        "model.parallel.rollout_tensor=4: must divide the MLP's width, 14338 (vllm, divide)",
    ),
    (
        ["model=llama31-8b", "precision=bf16", "model.parallel.rollout_expert=2"],
        "model.parallel.rollout_expert=2: must be 1 without experts",
    ),
    (
        ["model=qwen3-30b-a3b", *GIVEN, *TWO, "model.parallel.rollout_expert=3"],
        "model.parallel.rollout_expert=3: must be 1, or a multiple of rollout_tensor=2",
    ),
    (
        ["model=qwen3-30b-a3b", "model.parallel.expert=16"],
        "model.parallel.expert=16: must divide the experts, 128, and the GPUs",
    ),
    (
        ["model=llama31-8b", "model.parallel.expert=2"],
        "model.parallel.expert=2: must divide the experts, none here",
    ),
    (
        [
            *("model=llama31-8b", "model.parallel.pipeline=8", "precision=fp8-linear"),
            *("model.parallel.tensor=1", "model.shape.layers=36"),
        ],
        "model.parallel.pipeline=8: must divide the layers, 36",
    ),
    (
        ["model=qwen3-30b-a3b", "model.parallel.tensor=8"],
        "model.parallel.tensor=8: must divide the K/V heads, 4",
    ),
    (
        ["model=qwen3-30b-a3b", "precision=fp8-linear", "model.parallel.rollout_tensor=4"],
        "model.parallel.rollout_tensor=4: leaves model.layers.0.mlp.experts.0.gate_proj.weight",
    ),
    (
        [
            *("model=llama31-8b", *GIVEN, "grpo.prompts_per_step=2"),
            *("grpo.generations_per_prompt=3", "grpo.updates_per_step=1"),
        ],
        "grpo.updates_per_step=1: gives updates of 6 sequences, which 8 data-parallel",
    ),
    (
        ["model=llama31-8b", "precision=fp8-e2e", "cluster.gpu=b200"],
        "precision.scales=fp32: cluster.gpu=b200 trains blockwise FP8 with powers of two",
    ),
    (
        ["model=qwen3-30b-a3b", "precision=fp8-linear", ALIGNED],
        "precision.align=cheap: is for dense models",
    ),
    (
        ["model=llama31-8b", ALIGNED, "model.shape.head_dim=96"],
        "precision.align=cheap: needs heads of a power of two, got model.shape.head_dim=96",
    ),
    (
        ["model=llama31-8b", "precision=fp8-linear", ALIGNED, "cluster.gpu=b200"],
        "precision.align=cheap: was not tried on cluster.gpu=b200",
    ),
    (
        ["model=llama31-8b", ALIGNED, f"+nemo.{MEGATRON}.apply_rope_fusion=false"],
        f"nemo.{MEGATRON}.apply_rope_fusion=false: must be true with precision.align=cheap",
    ),
    (
        ["model=llama31-8b", ALIGNED, f"+nemo.{MEGATRON}.bias_activation_fusion=false"],
        f"nemo.{MEGATRON}.bias_activation_fusion=false: must be true with precision.align=cheap",
    ),
    (
        ["model=llama31-8b", "precision=fp16", ALIGNED],
        "precision.align=cheap: rounds to BF16: its kernels were not written for precision=fp16",
    ),
    (
        [*EXACT[:2], "precision=fp8-linear"],
        "precision.align=exact: needs every linear in FP8 on both sides",
    ),
    (
        [*EXACT[:2], "precision=fp8-e2e-kv-attn"],
        "precision.align=exact: needs a cache in BF16",
    ),
    (
        [*EXACT, "glue=stock"],
        "precision.align=exact: needs weights quantized by our glue",
    ),
    (
        [*EXACT, "precision.scales=pow2"],
        "precision.align=exact: needs block scales in FP32",
    ),
    (
        [*EXACT, "model.shape.head_dim=64"],
        "precision.align=exact: needs heads of 128, got model.shape.head_dim=64",
    ),
    (
        [*EXACT, "model.shape.hidden=5120"],
        "precision.align=exact: needs model.shape.hidden to be one of 512, 768, 1024, 2048, 4096",
    ),
    (
        [*EXACT, "model.shape.qk_norm=true"],
        "precision.align=exact: repeats no norm and no bias of Q and K",
    ),
    (
        [*EXACT, "noise=aqn", "noise.steps=500", "glue=ours"],
        "precision.align=exact: is undone by noise",
    ),
    (
        [*EXACT, f"+nemo.{VLLM}.quantization_ignored_layer_kws=[o_proj]"],
        f"nemo.{VLLM}.quantization_ignored_layer_kws=['o_proj']: must be [] with precision.align",
    ),
    *(
        (
            [*EXACT, f"+nemo.policy.{key}={value}"],
            f"nemo.policy.{key}={value}: must be {wanted} with",
        )
        for key, value, wanted in (
            ("sequence_packing.enabled", "false", "True"),
            ("generation.temperature", "0.7", "1.0"),
            ("generation.vllm_cfg.use_deep_gemm", "false", "True"),
            ("generation.vllm_cfg.env_vars.VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER", "1", "0"),
            ("generation.vllm_kwargs.disable_cascade_attn", "false", "True"),
            ("generation.vllm_kwargs.attention_backend", "FLASHINFER", "FLASH_ATTN"),
            ("generation.vllm_kwargs.attention_config.backend", "FLASHINFER", "FLASH_ATTN"),
            ("generation.vllm_kwargs.attention_config.flash_attn_version", "2", "3"),
        )
    ),
    (
        [*EXACT, "precision.first_layers_bf16=1"],
        "precision.align=exact: needs every linear in FP8 on both sides",
    ),
    (
        [*EXACT, "model.shape.qkv_bias=true"],
        "precision.align=exact: repeats no norm and no bias of Q and K",
    ),
    (
        [*EXACT, "lora=all-linear", "precision.train_linear=bf16"],
        "precision.align=exact: serves merged weights",
    ),
    *(
        (
            [*EXACT, f"model.parallel.{axis}=2"],
            f"precision.align=exact: needs model.parallel.{axis}=1, got 2: more GPUs add in",
        )
        for axis in ("tensor", "context", "rollout_tensor")
    ),
    (
        [*EXACT, "model.parallel.pipeline=2"],
        "precision.align=exact: needs model.parallel.pipeline=1, got 2: micro-batches of a",
    ),
    (
        ["model=llama31-8b", "precision=fp16", "precision.loss_scale=0.5"],
        "precision.loss_scale=0.5: must be at least 1, where Megatron's scale ends",
    ),
    (
        ["model=llama31-8b", "precision=fp16", f"+nemo.{AWARE}=true"],
        f"nemo.{AWARE}=true: must be false with precision=fp16: else the scale is taken off in",
    ),
    (
        ["model=llama31-8b", "precision=fp16", f"+nemo.{REDUCED}=false"],
        f"nemo.{REDUCED}=false: must be true with precision=fp16: else the scale is taken off in",
    ),
    *(
        (
            ["model=qwen3-30b-a3b", "precision=fp16", f"+nemo.{key}={value}"],
            f"nemo.{key}={value}: must be {none} with precision=fp16: NeMo RL takes the loss scale",
        )
        for (key, none), value in zip(
            {**OTHER_LOSSES, f"{MEGATRON}.model_overrides.moe_z_loss_coeff": "null"}.items(),
            ("aux_loss", 0.001, 1),
            strict=True,
        )
    ),
    (
        ["model=qwen3-30b-a3b", "precision=nvfp4-w4a16"],
        "precision.rollout_linear=nvfp4: is for dense models",
    ),
    (
        ["model=llama31-8b", "precision=nvfp4-w4a16", *GIVEN, "model.parallel.rollout_tensor=2"],
        "model.parallel.rollout_tensor=2: must be 1 with four bits",
    ),
    (
        ["model=llama31-8b", "precision=nvfp4-w4a16", "correction=none"],
        "correction=none: must correct: four bits round more coarsely",
    ),
    (
        ["model=llama31-8b", "precision=nvfp4-w4a16", "glue=stock"],
        "glue=stock: must quantize and send four bits itself",
    ),
    (
        [
            *("model=llama31-8b", "precision=nvfp4-w4a16", "glue=ours"),
            *("cluster.rollout_gpus=4", "grpo.max_sample_age=1"),
        ],
        "grpo.max_sample_age=1: must be null with four bits",
    ),
    (
        ["model=llama31-8b", "precision=nvfp4-w4a16", "cluster.gpu=b200"],
        "cluster.gpu=b200: was not tried with four bits",
    ),
    (
        ["model=llama31-8b", "precision=nvfp4-w4a16", "model.shape.ffn=14352"],
        "model.shape=model.layers.0.mlp.gate_proj.weight: is of a linear that Marlin would pad",
    ),
    (
        ["model=llama31-8b", "precision=nvfp4-w4a16", ALIGNED],
        "precision.align=cheap: was not tried with linears in four bits",
    ),
    (
        ["model=llama31-8b", "precision=fp8-kv-attn", "precision.kv_scales=head"],
        "precision.kv_scales=head: vLLM 0.25.1 takes scales of heads from checkpoints",
    ),
    (
        ["model=llama31-8b", "precision=fp8-kv-attn", "cluster.gpu=b200"],
        "precision.rollout_kv=fp8: on cluster.gpu=b200 vLLM 0.25.1 takes FlashInfer",
    ),
    (
        ["model=qwen3-30b-a3b", "precision=fp8-linear", "precision.first_layers_bf16=1"],
        "precision.first_layers_bf16 + precision.last_layers_bf16=1: must be 0 for a mixture",
    ),
    (
        ["model=llama31-8b", "grpo.updates_per_step=3"],
        "grpo.updates_per_step=3: must divide the step's 2048 sequences",
    ),
    (
        ["model=llama31-8b", "model.base_config=examples/configs/mine.yaml"],
        "model.base_config=examples/configs/mine.yaml: not known without a checkout",
    ),
    (["model=llama31-8b", "model.base_config=null"], "model.base_config=null: backend=nemo"),
    (
        [
            *("model=qwen3-30b-a3b", "precision=bf16", "replay=r3"),
            "+nemo.policy.megatron_cfg.model_overrides.moe_router_fusion=true",
        ],
        "nemo.policy.megatron_cfg.model_overrides.moe_router_fusion=true: must be false with",
    ),
]
AT, KWARGS = "nemo.policy.megatron_cfg", "nemo.policy.generation.vllm_kwargs"
COMPILATION = f"{KWARGS}.compilation_config"
FUSION = f"{COMPILATION}.pass_config.fuse_allreduce_rms"
UNPACKED = "+nemo.policy.sequence_packing.enabled=false"
ASYNCHRONOUS = ("grpo.max_sample_age=1", "cluster.rollout_gpus=4", "correction=tis")
REJECTED_LATER = [
    (
        [*ASYNCHRONOUS[1:], "grpo.max_sample_age=2"],
        "grpo.max_sample_age=2: must be 1: without updates in flight, older samples make nothing",
    ),
    ([*ASYNCHRONOUS, "cluster.rollout_gpus=0"], "grpo.max_sample_age=1: needs GPUs that sample"),
    (
        [*ASYNCHRONOUS, "precision=fp8-kv-attn"],
        "precision.rollout_kv=fp8: must be bf16 with grpo.max_sample_age=1: NeMo RL's asynchronous "
        "engine has no FP8 KV",
    ),
    (
        [*ASYNCHRONOUS, "correction=none"],
        "correction=none: leaves samples uncorrected that are 1 step old",
    ),
    *(
        ([*ASYNCHRONOUS, word], f"{word}: NeMo RL has it in synchronous steps alone")
        for word in (
            "algorithm.overlong_buffer=0.125",
            "algorithm.stop_properly_penalty_coef=0.5",
            "algorithm.reward_target_min=-1.0",
            "algorithm.use_dynamic_sampling=true",
        )
    ),
    *(
        ([*ASYNCHRONOUS, f"+nemo.{key}={value}"], f"nemo.{key}={value}: {why}")
        for key, value, why in (
            ("grpo.use_dynamic_sampling", "true", "NeMo RL has it in synchronous steps alone"),
            ("grpo.reward_shaping.enabled", "true", "NeMo RL has it in synchronous steps alone"),
            ("grpo.reward_scaling.enabled", "true", "NeMo RL has it in synchronous steps alone"),
            (CLEARS_PREFIXES, "false", "must be true: else prompts that begin alike are sampled"),
        )
    ),
    (
        [*ASYNCHRONOUS, "model=qwen3-30b-a3b", "model.parallel.rollout_expert=2"],
        "model.parallel.rollout_expert=2: must be 1 or rollout_tensor=1 with grpo.max_sample_age=1",
    ),
    (["grpo.warmup_steps=1000"], "grpo.warmup_steps=1000: must be below the schedule's"),
    (
        ["model.parallel.tensor=4", "+nemo.policy.logprob_batch_size=2"],
        "nemo.policy.logprob_batch_size=2: must be the micro-batch, 1, with model.parallel.tensor",
    ),
    (
        ["+nemo.policy.dynamic_batching.enabled=true"],
        "nemo.policy.dynamic_batching.enabled=true: excludes packed sequences",
    ),
    (
        [UNPACKED, "+nemo.policy.dynamic_batching.enabled=true", "model.parallel.pipeline=2"],
        "nemo.policy.dynamic_batching.enabled=true: wants one pipeline stage",
    ),
    (
        [UNPACKED, "model.parallel.context=2"],
        "nemo.policy.sequence_packing.enabled=false: must be true with model.parallel.context=2",
    ),
    (
        ["+nemo.policy.logprob_chunk_size=1024", f"+{AT}.defer_fp32_logits=false"],
        "nemo.policy.logprob_chunk_size=1024: needs policy.megatron_cfg.defer_fp32_logits",
    ),
    (
        [f"+{AT}.use_fused_linear_logprobs=true"],
        f"{AT}.use_fused_linear_logprobs=true: excludes packed sequences",
    ),
    (
        ["+nemo.grpo.batch_multiplier=2"],
        "nemo.grpo.batch_multiplier=2: must be 1 without grpo.use_dynamic_sampling",
    ),
    (
        [f"+{AT}.cuda_graph_impl=transformer_engine", "model.memory.recompute=true"],
        f"{AT}.cuda_graph_impl=transformer_engine: excludes recomputing whole layers",
    ),
    (
        [f"+{AT}.moe_enable_deepep=true"],
        f"{AT}.moe_enable_deepep=true: needs policy.megatron_cfg.moe_token_dispatcher_type=flex",
    ),
    (
        ["model=qwen3-30b-a3b", "model.parallel.tensor=2", f"+{AT}.sequence_parallel=false"],
        f"{AT}.sequence_parallel=false: must be true for experts with model.parallel.tensor=2",
    ),
    (
        ["precision=fp8-e2e", f"+{AT}.fp8_cfg.fp8_recipe=mxfp8"],
        f"{AT}.fp8_cfg.fp8_recipe=mxfp8: must be blockwise",
    ),
    *(
        (
            ["precision=fp8-kv-attn", "glue.decode=xqa", f"+{COMPILATION}.{key}={value}"],
            f"{COMPILATION}.{key}={shown}: replays a decode step's graph for prompts, which "
            "glue.decode=xqa cannot attend to "
            f"(vllm/v1/worker/gpu/cudagraph_utils.py, mixed_mode, by {key}); leave it out, or set "
            "glue.decode=fa3",
        )
        for key, value, shown in (
            ("cudagraph_mode", "FULL", "FULL"),
            ("cudagraph_mode", "full", "full"),
            ("cudagraph_mode", "2", "2"),
            ("splitting_ops", "[]", "[]"),
            *(
                (f"pass_config.{name}", "true", "true")
                for name in ("fuse_attn_quant", "enable_sp", "fuse_gemm_comms")
            ),
        )
    ),
    (
        ["precision=fp8-e2e", UNPACKED],
        "nemo.policy.sequence_packing.enabled=false: must be true with precision.train_linear=fp8",
    ),
    (
        ["+nemo.data.default.env_name=code"],
        "nemo.data.default.env_name=code: no env.code is configured, only math",
    ),
    (
        ["+nemo.data.default.env_name=code", "+nemo.env.code.num_workers=8"],
        "nemo.data.default.env_name=code: gives no reward itself",
    ),
    (
        ["+nemo.data.default.env_name=puzzle", "+nemo.env.puzzle.size=4"],
        "nemo.data.default.env_name=puzzle: is none of NeMo RL's",
    ),
    (
        ["+nemo.data.validation.env_name=nemo_gym", "+nemo.env.nemo_gym.config_paths=[]"],
        "nemo.data.default.env_name=nemo_gym: wants vLLM's asynchronous engine",
    ),
    (
        ["+nemo.data.default.env_name=reward_model", "+nemo.env.reward_model.enabled=true"],
        "nemo.data.default.env_name=reward_model: takes some of the run's GPUs",
    ),
    (
        ["+nemo.env.should_use_nemo_gym=true"],
        "nemo.env.should_use_nemo_gym=true: NeMo Gym wants vLLM's asynchronous engine",
    ),
    (
        ["data.reward=my_reward.py", "+nemo.data.train.env_name=math"],
        "data.reward=my_reward.py: is an environment of its own, and nemo.data names math",
    ),
    ([f"+{KWARGS}.seed=1"], f"{KWARGS}.seed=1: is written by NeMo RL"),
    ([f"+{KWARGS}.foo_bar=1"], f"{KWARGS}.foo_bar=1: vLLM 0.25.1 has no such argument"),
    (
        [f"+{KWARGS}.speculative_config.method=ngram"],
        f"{KWARGS}.speculative_config=ngram: not supported yet",
    ),
    (
        ["glue=ours", f"+{KWARGS}.enable_eplb=true"],
        f"{KWARGS}.enable_eplb=true: must be false: a refit would miss experts",
    ),
    (
        ["precision=fp8-kv-attn", f"+{KWARGS}.calculate_kv_scales=true"],
        f"{KWARGS}.calculate_kv_scales=true: must be false",
    ),
]
"""What only NeMo RL, Megatron or vLLM stop at, minutes later; by keys of NeMo RL's."""


@pytest.mark.parametrize(("arguments", "line"), FORBIDDEN)
def test_what_the_host_forbids_is_refused_at_compose_time(arguments, line):
    with pytest.raises(ComposeError) as caught:
        compose_plans(once(*NEMO, *arguments))
    assert any(each.startswith(line) for each in caught.value.lines), caught.value.lines


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("tensor=3", "must divide the K/V heads, 8 (megatron/core/transformer)"),
        ("tensor=16", "must divide the K/V heads, 8 (megatron/core/transformer)"),
        ("pipeline=3", "must divide the layers, 32 (megatron/core/transformer)"),
        (
            "context=3",
            "cuts sequences in 6 parts, and the longest has 4096 tokens "
            "(nemo_rl/models/megatron/data.py:1290)",
        ),
        (
            "rollout_tensor=3",
            "must divide the GPUs, 8 (nemo_rl/models/generation/vllm/vllm_generation.py:121)",
        ),
    ],
)
def test_a_size_that_cannot_be_is_told_once_with_those_that_are_taken(wrong, why):
    line = ["model=llama31-8b", "precision=fp8-linear"]
    with pytest.raises(ComposeError) as caught:
        compose_plans(once(*NEMO, *line, f"model.parallel.{wrong}"))
    assert caught.value.lines == [f"model.parallel.{wrong}: {why}; set 1, 2, 4 or 8"]
    for size in (1, 2, 4, 8):
        key = wrong.partition("=")[0]
        assert getattr(plan(*line, f"model.parallel.{key}={size}").settled.layout, key) == size


def test_two_sizes_that_cannot_be_are_a_line_each():
    words = ("precision=bf16", "model.parallel.tensor=3", "model.parallel.pipeline=3")
    with pytest.raises(ComposeError) as caught:
        compose_plans(once(*NEMO, "model=llama31-8b", *words))
    assert sorted(line.partition(":")[0] for line in caught.value.lines) == [
        "model.parallel.pipeline=3",
        "model.parallel.tensor=3",
    ]


def test_a_matrix_that_is_narrower_than_a_block_as_a_whole_asks_for_bf16():
    """No smaller `rollout_tensor` would help."""
    with pytest.raises(ComposeError) as caught:
        compose_plans(once(*NEMO, "model=llama31-8b", *GIVEN, "precision=fp8-linear",
                           "model.shape.kv_heads=1", "model.shape.head_dim=64"))  # fmt: skip
    [line] = [each for each in caught.value.lines if "no multiple of 128" in each]
    assert line.startswith(
        "model.parallel.rollout_tensor=1: leaves model.layers.0.self_attn.k_proj"
    )
    assert line.endswith("; choose precision=bf16")


def rejected(arguments):
    return ["model=llama31-8b", *GIVEN, "precision=fp8-linear", *arguments]


@pytest.mark.parametrize(("arguments", "line"), REJECTED_LATER)
def test_what_nemo_rl_and_its_engines_reject_later_is_refused_in_one_line(arguments, line):
    for there in (MAIN, host("main")):
        with pytest.raises(PlanError) as caught:
            plan(*rejected(arguments), host=there)
        [found] = [each for each in str(caught.value).splitlines() if each.startswith(line)]
        assert found.count("; ") >= 1  # with a remedy


@pytest.mark.parametrize(
    "arguments",
    [
        ["model.parallel.tensor=2", "+nemo.policy.logprob_batch_size=2"],
        [UNPACKED, "+nemo.policy.dynamic_batching.enabled=true"],
        ["+nemo.policy.logprob_chunk_size=1024", f"+{AT}.defer_fp32_logits=true"],
        [UNPACKED, f"+{AT}.use_fused_linear_logprobs=true"],
        ["+nemo.grpo.batch_multiplier=2", "+nemo.grpo.use_dynamic_sampling=true"],
        [f"+{AT}.cuda_graph_impl=transformer_engine", "model.memory.recompute=false"],
        [f"+{AT}.cuda_graph_impl=local", f"+{AT}.recompute_granularity=selective"],
        [f"+{AT}.moe_enable_deepep=true", f"+{AT}.moe_token_dispatcher_type=flex"],
        ["+nemo.data.default.env_name=code_jaccard", "+nemo.env.code_jaccard.num_workers=8"],
        ["+nemo.data.default.env_name=mine", "+nemo.env.mine.env_cls=my_package.MyEnvironment"],
        ["+nemo.data.train.env_name=math_default", "+nemo.env.math_default.num_workers=8"],
        ["data.reward=my_reward.py"],
        [f"+{KWARGS}.calculate_kv_scales=true"],
        [f"+{KWARGS}.compilation_config.cudagraph_capture_sizes=[1,2,4]"],
        [UNPACKED, "precision=fp8-e2e", "+nemo.policy.make_sequence_length_divisible_by=128"],
    ],
)
def test_the_remedy_of_what_is_rejected_later_is_taken(arguments):
    assert plan(*rejected(arguments), host=host("main"))


def test_expert_parallel_engines_keep_experts_whole():
    found = overrides(
        "model=qwen3-30b-a3b", "model.parallel.rollout_tensor=4", "model.parallel.rollout_expert=4"
    )
    assert found[f"{VLLM}.expert_parallel_size"] == 4


DEFECTIVE = [
    (["precision=fp8-kv-attn"], "precision.rollout_kv=fp8: this NeMo RL drops the KV scales"),
    (
        ["precision=fp8-linear", "precision.first_layers_bf16=1"],
        "precision.first_layers_bf16 + precision.last_layers_bf16=1: this NeMo RL quantizes",
    ),
    (
        ["precision=fp8-linear", "precision.scales=pow2"],
        "precision.scales=pow2: this NeMo RL's rollout stops",
    ),
    (
        ["precision=bf16", "+nemo.policy.offload_optimizer_for_refit=false"],
        "nemo.policy.offload_optimizer_for_refit=false: this NeMo RL always moves",
    ),
    (
        ["precision=fp8-linear", "+nemo.policy.hf_config_overrides.rope_theta=1e6"],
        "nemo.policy.hf_config_overrides={'rope_theta': 1000000.0}: this NeMo RL's FP8 rollout",
    ),
    (
        ["precision=bf16", "precision.align=cheap"],
        "precision.align=cheap: was tried with vLLM 0.25.1 alone",
    ),
    (
        ["precision=fp8-linear", "cluster.rollout_gpus=4", "grpo.max_sample_age=1"],
        "grpo.max_sample_age=1: this NeMo RL's asynchronous loop ends with an error after one pass",
    ),
    (
        ["precision=nvfp4-w4a16", "correction=tis", "glue=ours"],
        "precision.rollout_linear=nvfp4: was tried with vLLM 0.25.1 alone",
    ),
]


@pytest.mark.parametrize(("arguments", "line"), DEFECTIVE)
def test_known_defects_of_v0_7_0_are_refused_there_and_nowhere_else(arguments, line):
    there = Host("v0.7.0", defects=V0_7_0_DEFECTS)
    with pytest.raises(PlanError) as caught:
        plan("model=llama31-8b", *arguments, host=there)
    assert str(caught.value).startswith(line)
    assert plan("model=llama31-8b", *arguments, host=LATER)


@pytest.mark.parametrize(
    ("version", "words", "instead"),
    [
        ("v0.7.0", [], "fp8-linear"),
        ("v0.7.0", ["precision=fp8-e2e-kv-attn"], "fp8-e2e"),
        ("main", ["cluster.gpu=b200"], "fp8-linear"),
        ("main", ["cluster.gpu=b200", "precision=fp8-e2e-kv-attn"], "fp8-linear"),
    ],
)
def test_where_the_default_is_refused_each_line_names_the_precision_to_take(
    version, words, instead
):
    with pytest.raises(PlanError) as caught:
        plan("model=llama31-8b", *words, host=host(version))
    for line in str(caught.value).splitlines():
        assert f"precision={instead}" in line.partition("; ")[2].replace(",", " ").split(), line
    assert plan("model=llama31-8b", *words, f"precision={instead}", host=host(version))


def test_a_bf16_rollout_has_the_overrides_of_a_models_config_on_v0_7_0_too():
    there = Host("v0.7.0", defects=V0_7_0_DEFECTS)
    given = "+nemo.policy.hf_config_overrides.rope_theta=1e6"
    assert plan("model=llama31-8b", "precision=bf16", given, host=there)


def test_a_prompt_of_the_users_own_is_not_replaced(tmp_path):
    line = ["model=llama31-8b", "data=openmath-2"]
    own = f"+nemo.data.default.prompt_file={tmp_path}/prompt.txt"
    usual = path_overrides(plan(*line).recipe, tmp_path, Path("/rl"))
    assert usual["data.default.prompt_file"] == "/rl/examples/prompts/cot.txt"
    found = plan(*line, own)
    written = found.nemo.overrides | path_overrides(found.recipe, tmp_path, Path("/rl"))
    assert written["data.default.prompt_file"] == f"{tmp_path}/prompt.txt"


def test_a_run_has_its_directorys_name_in_weights_and_biases_unless_the_line_gives_another():
    line, folder = ["model=llama31-8b", "precision=bf16"], Path("o/llama31-8b/bf16-tis/s42-1a2b3c")
    usual = path_overrides(plan(*line).recipe, folder, None)
    assert usual["logger.wandb.name"] == "llama31-8b-bf16-tis-s42-1a2b3c"
    own = plan(*line, "+nemo.logger.wandb.name=mine")
    written = own.nemo.overrides | path_overrides(own.recipe, folder, None)
    assert written["logger.wandb.name"] == "mine"


def test_aime_is_validated_in_whole_passes():
    for data, count in (("dapo-math-17k", 960), ("openmath-2", 256)):
        found = overrides("model=llama31-8b", f"data={data}")
        assert found["grpo.max_val_samples"] == found["grpo.val_batch_size"] == count


def test_fewer_problems_are_validated_in_fewer_never_in_none():
    few = ["model=llama31-8b", "data=dapo-math-17k", "+nemo.grpo.max_val_samples=90"]
    assert overrides(*few)["grpo.val_batch_size"] == 90
    assert overrides(*few, "+nemo.grpo.val_batch_size=30")["grpo.val_batch_size"] == 30
    for batch in (0, 91):
        with pytest.raises(PlanError, match=f"val_batch_size={batch}: must be from 1 to .*=90"):
            overrides(*few, f"+nemo.grpo.val_batch_size={batch}")


@pytest.mark.parametrize(
    "word",
    [
        "data.path=elsewhere",
        "data.difficulty=3",
        "precision.first_layers_bf16=1",
        "correction.renormalize_denominator=true",
    ],
)
def test_what_does_nothing_inside_nemo_rl_is_noted(word):
    line = ["model=llama31-8b", "precision=bf16", "correction=none", "data=openmath-2"]
    key = word.partition("=")[0]
    assert any(note.startswith(f"{key}: no effect") for note in plan(*line, word).notes)
    assert not any(note.startswith(f"{key}: no effect") for note in plan(*line).notes)


def test_powers_of_two_are_refused_on_main_too_whose_patch_calls_itself():
    with pytest.raises(PlanError, match="RecursionError"):
        plan("model=llama31-8b", "precision=fp8-linear", "precision.scales=pow2")


def test_a_cache_that_holds_less_than_one_sequence_is_refused():
    words = ("model=llama31-8b", "precision=fp8-kv-attn", "grpo.max_new_tokens=30000")
    bytes_of_a_token = 2 * 32 * 8 * 128  # K and V of all layers and heads, a byte each
    longest = overrides(*words)["policy.generation.vllm_cfg.max_model_len"]
    enough = longest * bytes_of_a_token / 2**30
    assert plan(*words, f"model.memory.kv_cache_gib={enough}")
    with pytest.raises(PlanError, match=f"a sequence may have {longest:,}: no engine starts"):
        less = f"model.memory.kv_cache_gib={enough * 0.999}"
        plan(*words, less, "model.parallel.rollout_tensor=1")
    assert plan(
        *words, f"model.memory.kv_cache_gib={enough / 2}", "model.parallel.rollout_tensor=2"
    )
    assert plan(*words, "model.memory.kv_cache_gib=null")


def test_the_remedy_for_too_little_memory_is_one():
    def remedy(*words):
        [note] = [note for note in plan(*words).notes if note.startswith("memory: ")]
        return note.partition("GiB, by estimate")[2]

    too_few = ("model=qwen3-30b-a3b", "precision=fp8-e2e", "cluster.nodes=1")
    assert remedy(*too_few).endswith("sequences of one token would not fit either")
    adapters = "would not fit either, or train adapters alone, lora=attention"
    assert remedy(*too_few[:1], "precision=bf16", "cluster.gpus_per_node=2").endswith(adapters)
    too_long = ("model=llama31-8b", "precision=fp8-e2e", "grpo.max_new_tokens=100000")
    assert "or lower grpo.max_new_tokens" in remedy(*too_long, *GIVEN[:-1])
    share = (*GIVEN, "model.memory.kv_cache_gib=null", "model.memory.rollout_share=0.9")
    assert "; lower model.memory.rollout_share, or" in remedy(
        "model=llama31-8b", "precision=fp8-kv-attn", *share
    )
    assert not [
        note for note in plan(
            "model=llama31-8b", "precision=fp8-kv-attn", *share[:-1],
            "model.memory.rollout_share=0.6",
        ).notes
        if note.startswith("memory: rollout")
    ]  # fmt: skip


def test_a_prompt_may_be_given_more_room_and_the_cut_is_told():
    words = ("model=llama31-8b", "data=openmath-2", "grpo.max_new_tokens=2048")
    found = plan(*words)
    assert found.nemo.overrides["policy.max_total_sequence_length"] == 3072
    assert any("cuts prompts of 1024 tokens" in note for note in found.notes)
    wider = plan(*words, "+nemo.data.max_input_seq_length=4000")
    assert wider.nemo.overrides["data.max_input_seq_length"] == 4000
    assert wider.nemo.overrides["policy.max_total_sequence_length"] == 6144 >= 4000 + 2048
    assert any("cuts prompts of 4000 tokens" in note for note in wider.notes)


def test_packed_sequences_fit_a_sequence_parallel_of_the_users():
    words = ("model=llama31-8b", "model.parallel.tensor=2", "+nemo.policy.megatron_cfg")
    found = overrides(*words[:2], f"{words[2]}.sequence_parallel=true")
    assert found["policy.make_sequence_length_divisible_by"] == 2


@pytest.mark.parametrize(
    ("model", "more", "told"),
    [
        ("llama31-8b", [], False),
        ("llama31-8b", ["model.parallel.rollout_tensor=2"], True),
        ("qwen3-30b-a3b", [], True),
        ("qwen3-30b-a3b", ["glue.recalibrate.source=logprob"], False),
        ("qwen3-30b-a3b", ["glue=ours"], False),
    ],
)
def test_it_is_told_where_vllm_forgets_the_scales_of_a_cache(model, more, told):
    notes = plan(f"model={model}", "precision=fp8-kv-attn", *more).notes
    assert any("to 1.0 when its cache wakes up" in note for note in notes) == told


@pytest.mark.parametrize(
    "words",
    [
        ("precision=fp8-kv-attn", "glue.decode=fa3", "FULL"),
        ("precision=fp8-linear", "glue.decode=xqa", "FULL"),
        ("precision=fp8-kv-attn", "glue.decode=xqa", "FULL_AND_PIECEWISE"),
    ],
)
def test_a_graph_mode_is_the_users_where_no_graph_of_xqa_would_serve_prompts(words):
    *others, mode = words
    key = f"{COMPILATION}.cudagraph_mode"
    found = plan("model=llama31-8b", *others, f"+{key}={mode}").nemo
    assert found and found.overrides[key.removeprefix("nemo.")] == mode


def test_every_limit_names_the_line_that_it_mirrors_and_a_case_above_breaks_it():
    there = Host("v0.7.0", defects=V0_7_0_DEFECTS, vllm="0.25.1")
    cases = [case for case, _ in FORBIDDEN] + [["model=llama31-8b", *case] for case, _ in DEFECTIVE]
    cases += [rejected(case) for case, _ in REJECTED_LATER]
    lines = []
    for arguments in cases:
        with pytest.raises(ComposeError) as caught:
            compose_plans(once(*NEMO, *arguments), lambda recipe: there)
        lines += caught.value.lines
    limits = list(host_limits(plan("model=llama31-8b").settled, there))
    assert len({(limit.key, limit.mirrors) for limit in limits}) == len(limits) == 108
    for limit in limits:
        assert limit.mirrors
        broken = [line for line in lines if line.startswith((f"{limit.key}=", f"{KWARGS}."))]
        assert any(f"({limit.mirrors})" in line for line in broken), limit


@pytest.mark.parametrize(
    ("argument", "line"),
    [
        (
            "+nemo.grpo.max_num_steps=7",
            "nemo.grpo.max_num_steps=7: is written by grpo.steps; set that instead",
        ),
        (
            "+nemo.grpo.async_grpo.enabled=true",
            "nemo.grpo.async_grpo.enabled=true: is written by grpo.max_sample_age; set that",
        ),
        (
            "+nemo.grpo.async_grpo.in_flight_weight_updates=true",
            "nemo.grpo.async_grpo.in_flight_weight_updates=true: must be false: not supported yet",
        ),
        (
            "+nemo.policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather=true",
            "nemo.policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather=true: "
            "must be false: a refit would send shards of before the last update",
        ),
        (
            "+nemo.policy.router_replay.enabled=true",
            "nemo.policy.router_replay.enabled=true: is written by replay; set that instead",
        ),
        (
            "+nemo.policy.generation.vllm_cfg.is_mx=true",
            "nemo.policy.generation.vllm_cfg.is_mx=true: must be false: blockwise FP8 is what is",
        ),
        (
            "+nemo.policy.generation.vllm_cfg.gpu_memory_utilisation=0.6",
            "nemo.policy.generation.vllm_cfg.gpu_memory_utilisation=0.6: not one of the keys that "
            "are known without a checkout; set NEMO_RL_ROOT; did you mean "
            "nemo.policy.generation.vllm_cfg.gpu_memory_utilization?",
        ),
        (
            "+nemo.policy.train_micro_batch_size=abc",
            "nemo.policy.train_micro_batch_size=abc: must be of type int, as 1 is",
        ),
        (
            "+nemo.policy.max_total_sequence_length=2048",
            "nemo.policy.max_total_sequence_length=2048: is written by grpo.max_new_tokens",
        ),
        ("+nemo.grpo.val_start_at=2", "nemo.grpo.val_start_at=2: not one of the keys"),
    ],
)
def test_keys_under_nemo_are_held_against_what_is_known(argument, line):
    with pytest.raises(ComposeError) as caught:
        compose_plans(once(*NEMO, "model=llama31-8b", argument))
    assert caught.value.lines[0].startswith(line)


@pytest.mark.parametrize("version", FILES)
def test_a_typo_anywhere_under_nemo_is_refused_and_the_right_key_is_not(version):
    there = host(version)
    base = there.bases["examples/configs/grpo_math_8B_megatron.yaml"]
    free = ["grpo.batch_multiplier", "logger.num_val_samples_to_print", "policy.max_grad_norm"]
    assert set(free) <= set(base)
    for key in free:
        value = base[key]
        arguments = ["model=llama31-8b", "precision=fp8-linear"]
        assert plan(*arguments, f"+nemo.{key}={value}", host=there).nemo.overrides[key] == value
        with pytest.raises(PlanError, match=r"no such key in .*did you mean nemo\."):
            plan(*arguments, f"+nemo.{key}s={value}", host=there)


def test_a_ragged_width_is_for_bf16():
    assert plan("model=llama31-8b", "model.shape.hidden=4032", "precision=bf16")


def test_a_users_own_key_wins_over_the_plans():
    found = plan("model=llama31-8b", f"+nemo.{VLLM}.gpu_memory_utilization=0.6")
    assert found.nemo.overrides[f"{VLLM}.gpu_memory_utilization"] == 0.6
    assert found.recipe.model.memory.rollout_share == 0.6
    assert any("no effect while model.memory.kv_cache_gib" in note for note in found.notes)
    micro = overrides("model=llama31-8b", *GIVEN, "+nemo.policy.train_micro_batch_size=4")
    assert micro["policy.logprob_batch_size"] == 4
    opened = overrides("model=llama31-8b", "+nemo.policy.generation.vllm_kwargs.max_num_seqs=64")
    assert opened["policy.generation.vllm_kwargs.max_num_seqs"] == 64


def test_first_validation_is_dropped_where_nemo_rl_would_have_no_kv_scales_for_it():
    cell = ("model=llama31-8b", "precision=fp8-kv-attn")
    stock = plan(*cell, "glue=stock")
    assert any("KV scales of 1.0" in note for note in stock.notes)
    assert stock.nemo.overrides["grpo.val_at_start"] is False
    ours = plan(*cell, "glue=ours")
    assert not any("KV scales of 1.0" in note for note in ours.notes)
    assert ours.nemo.overrides["grpo.val_at_start"] is True


@pytest.mark.parametrize(
    ("arguments", "note"),
    [
        (["precision=bf16", "glue.recalibrate.history=5"], "glue.recalibrate: no effect"),
        (
            ["precision=fp8-kv-attn", "glue=stock", "glue.recalibrate.history=5"],
            "glue.recalibrate.history, first_margin: no effect with source=forward",
        ),
    ],
)
def test_recalibration_keys_without_effect_are_noted(arguments, note):
    assert any(each.startswith(note) for each in plan("model=llama31-8b", *arguments).notes)
    for quiet in ("glue=ours", "glue=stock"):
        notes = plan("model=llama31-8b", arguments[0], quiet).notes
        assert not any("glue.recalibrate" in each and "validate" not in each for each in notes)
    assert not any("1.0" in note for note in plan("model=llama31-8b", "precision=bf16").notes)


def test_four_bits_at_a_rate_whose_steps_they_round_away_are_noted():
    def lags(*words):
        notes = plan("model=llama31-8b", "glue=ours", *words).notes
        return any("lags behind" in note for note in notes)

    four = "precision=nvfp4-w4a16"
    assert lags(four) and lags(four, "grpo.learning_rate=1e-6")
    assert not lags(four, "grpo.learning_rate=1e-5") and not lags("precision=fp8-linear")


def test_a_nemo_plan_survives_json():
    before = plan("model=qwen3-30b-a3b", "correction=geo-mis")
    assert plan_from_json(json.loads(json.dumps(before.to_json()))) == before


def test_no_secret_of_the_environment_reaches_a_plan(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "wandb_secret")
    assert "secret" not in json.dumps(plan("model=llama31-8b").to_json())


def test_a_folder_with_local_problems_runs_offline_and_a_hub_model_does_not():
    assert plan("model=tiny-llama").nemo.environment["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in plan("model=llama31-8b").nemo.environment
    system = plan("model=tiny-llama", "cluster.interpreter=system").nemo.environment
    assert system["NEMO_RL_PY_EXECUTABLES_SYSTEM"] == "1"


def test_an_engine_of_two_gpus_gets_the_model_runner_that_survives_there():
    name = "VLLM_USE_V2_MODEL_RUNNER"
    assert name not in plan("model=llama31-8b").nemo.environment
    assert plan("model=llama31-8b", "model.parallel.rollout_tensor=2").nemo.environment[name] == "0"


@pytest.mark.parametrize(
    ("words", "fuses"),
    [
        (["model.parallel.rollout_tensor=1"], None),
        (["model.parallel.rollout_tensor=2"], False),
        (["model.parallel.rollout_tensor=2", "glue=stock"], False),
        (["model.parallel.rollout_tensor=2", f"+{FUSION}=true"], True),
    ],
)
def test_an_engine_of_two_gpus_does_not_fuse_all_reduce_and_norm_unless_told_to(words, fuses):
    written = overrides("model=llama31-8b", "precision=bf16", *words)
    assert written.get(FUSION.removeprefix("nemo.")) is fuses


def test_experts_that_train_in_16_bits_are_multiplied_by_one_launch():
    name = f"{MEGATRON}.env_vars.NVTE_USE_CUTLASS_GROUPED_GEMM"
    for precision in ("bf16", "fp16", "fp8-linear", "fp8-kv-attn"):
        found = plan("model=qwen3-30b-a3b", f"precision={precision}")
        assert found.nemo.overrides[name] == "1"
    experts = "model=qwen3-30b-a3b"
    for line in (
        [experts, "precision=fp8-e2e"],
        [experts, "cluster.gpu=b200"],
        ["model=llama31-8b"],
    ):
        assert name not in plan(*line).nemo.overrides
    off = plan(experts, f"+nemo.{name}='0'")
    assert off.nemo.overrides[name] == "0"
    assert step_seconds(off.settled).train > step_seconds(plan(experts).settled).train


def test_experts_on_an_h100_get_tiles_under_the_name_by_which_vllm_looks_for_them():
    name, line = "VLLM_TUNED_CONFIG_FOLDER", ["model=qwen3-30b-a3b", "precision=fp8-linear"]
    recipe = plan(*line).recipe
    folder, shape = Path(path_variables(recipe)[name]), recipe.model.shape
    [file] = folder.iterdir()
    where = f"E={shape.experts},N={shape.expert_ffn},device_name=NVIDIA_H100_80GB_HBM3"
    assert file.name == f"{where},dtype=fp8_w8a8,block_shape=[128,128].json"
    tiles = {int(rows): each for rows, each in json.loads(file.read_text()).items()}
    assert {"BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M"} <= tiles[128].keys()
    assert all(
        128 % each["BLOCK_SIZE_N"] == 0 == each["BLOCK_SIZE_K"] % 128 for each in tiles.values()
    )
    for other in ("cluster.gpu=h200", "precision=bf16", "model=llama31-8b"):
        assert not path_variables(plan(*line, other).recipe)


def test_the_changes_and_the_stock_command_name_absolute_folders(tmp_path):
    found = plan("model=llama31-8b", "precision=fp8-linear")
    changed = {each.key: each for each in differences(found, MAIN, tmp_path)}
    assert changed["checkpointing.checkpoint_dir"].plan == str(tmp_path / "checkpoints")
    words = stock_command(found, MAIN, tmp_path)
    assert words[:2] == ["python", "examples/run_grpo.py"]
    assert f"logger.log_dir='{tmp_path}/log/nemo'" in words
    assert shlex.split(shlex.join(words)) == words


@pytest.mark.parametrize("version", FILES)
def test_changes_are_what_differs_from_the_base(version, tmp_path):
    there = host(version)
    found = plan("model=llama31-8b", "precision=bf16", "correction=none", host=there)
    changed = {each.key: each for each in differences(found, there, tmp_path)}
    assert changed[f"{MEGATRON}.pipeline_model_parallel_size"][1:] == (2, 1)
    assert "policy.max_total_sequence_length" not in changed


def test_memory_counts_weights_and_optimizer_exactly():
    line = ["model=llama31-8b", "precision=bf16", *GIVEN]
    found = plan(*line).settled
    memory = memory_per_gpu(found)
    train = memory.phases["train"]
    assert train["weights"] == train["gradients"] == 2 * 8_030_261_248
    assert train["optimizer"] == 10 * 8_030_261_248 / 8
    assert kv_cache_tokens(found, memory) == 20 * GIB // 131_072
    half = memory_per_gpu(plan(*line, "cluster.nodes=2").settled).phases["train"]
    assert half["optimizer"] == train["optimizer"] / 2
    assert memory.headroom("train") == 1 - sum(train.values()) / (GPU_GIB["h100"] * GIB)


def test_a_ranks_part_of_a_sequence_is_what_its_logits_and_activations_are_of():
    line = ["model=llama31-8b", *GIVEN, "grpo.max_new_tokens=31744", "cluster.nodes=4"]
    one, four = (
        memory_per_gpu(plan(*line, f"model.parallel.context={n}").settled).phases["train"]
        for n in (1, 4)
    )
    assert one["logits"] == 4 * four["logits"] and one["activations"] == 4 * four["activations"]


KEEPING = "+nemo.policy.offload_optimizer_for_refit=false"


def test_an_optimizer_that_is_kept_is_counted_beside_the_engine_and_set_upstream():
    cell = ["model=llama31-8b", *GIVEN, "precision=fp8-e2e", "cluster.gpu=h200"]
    moved, kept = plan(*cell), plan(*cell, KEEPING)
    assert kept.nemo.overrides["policy.offload_optimizer_for_refit"] is False
    assert "policy.offload_optimizer_for_refit" not in moved.nemo.overrides
    here, there = (memory_per_gpu(each.settled) for each in (moved, kept))
    assert here.phases["train"] == there.phases["train"]
    for phase in ("refit", "rollout"):
        more = sum(there.phases[phase].values()) - sum(here.phases[phase].values())
        assert more == pytest.approx(8 * 8_030_261_248 / 8)  # its masters were there before
    plain = [each.replace("e2e", "linear") for each in cell]
    here, there = (memory_per_gpu(plan(*each).settled) for each in (plain, [*plain, KEEPING]))
    assert sum(here.phases["rollout"][name] for name in ("masters", "FP8 copies", "moments")) == 0
    assert there.phases["rollout"]["moments"] == there.phases["train"]["optimizer"]


def test_what_an_fp8_trainer_leaves_on_its_gpu_is_what_a_real_step_of_8b_had():
    cell = ["model=llama31-8b", *GIVEN, "precision=fp8-e2e-kv-attn", "cluster.gpu=h200"]
    cell += ["model.parallel.tensor=2", "cluster.gpus_per_node=2"]
    phases = memory_per_gpu(replace(plan(*cell).settled, sequence_tokens=3072)).phases
    names = ("masters", "their gradients", "FP8 copies", "moments")
    left = {name: phases["rollout"][name] / GIB for name in names}
    # NeMo RL's own prints, two H200s, in GiB: in rollouts, before the refit, after training.
    assert sum(left.values()) == pytest.approx(36.5, abs=0.2) and left["moments"] == 0
    weights = phases["train"]["weights"] / GIB
    assert sum(left.values()) + weights == pytest.approx(44.0, abs=0.3)
    train = {k: v / GIB for k, v in phases["train"].items() if k != "allowance"}
    assert sum(train.values()) == pytest.approx(81.4, abs=0.5)


@pytest.mark.parametrize(
    ("arguments", "host", "told"),
    [
        (["cluster.gpu=h200"], MAIN, True),
        (["cluster.gpu=h200", KEEPING], MAIN, False),
        (["cluster.gpu=h200"], Host("v0.7.0", defects=V0_7_0_DEFECTS), False),
        (["cluster.gpus_per_node=2", "model.memory.kv_cache_gib=30"], MAIN, False),
    ],
    ids=["room", "kept already", "no such key", "no room"],
)
def test_a_plan_tells_where_an_optimizer_need_not_leave_the_gpu(arguments, host, told):
    found = plan("model=llama31-8b", *GIVEN, "precision=fp8-linear", *arguments, host=host)
    memory = dict(describe(found, host))["memory"]
    assert ("unless " + KEEPING in memory) == told


def test_what_stands_in_a_groups_place_is_one_line_on_every_host():
    for host in (MAIN, Host("v0.7.0", defects=V0_7_0_DEFECTS)):
        with pytest.raises(PlanError, match=r"nemo\.policy=5"):
            plan("model=llama31-8b", "precision=bf16", "+nemo.policy=5", host=host)


def speed_of(*arguments):
    return dict(describe(plan("grpo=demo", "data=arithmetic", *arguments), MAIN))["decode"]


def test_a_plan_says_what_a_measured_model_decodes_and_that_a_full_cache_halves_it():
    cell = ["model=llama31-8b", *GIVEN, "cluster.gpu=h200", "grpo.max_new_tokens=4000"]
    cell += ["grpo.prompts_per_step=256", "cluster.gpus_per_node=8", "cluster.nodes=1"]
    plain, fp8 = (speed_of(*cell, f"precision={name}") for name in ("bf16", "fp8-kv-attn"))
    sequences = re.compile(r"(\d+) of an engine's 256 sequences fit its cache, at a mean of")
    rate = re.compile(r"([\d,]+) tokens/s an engine on h200")
    held = [int(sequences.search(text)[1]) for text in (plain, fp8)]
    assert held[0] < 256 and held[1] == min(256, 2 * held[0])  # half the bytes a token
    rates = [int(rate.search(text)[1].replace(",", "")) for text in (plain, fp8)]
    gain = f"{rates[1] / rates[0]:.2f} times BF16's in this layout"
    assert f"{gain}, where BF16's cache holds {held[0]};" in fp8
    assert rates[1] > 1.5 * rates[0] and "times BF16" not in plain
    assert all("h100" not in text and "fitted on an H200" in text for text in (plain, fp8))


@pytest.mark.parametrize(
    "other",
    [["model=qwen3-8b"], ["model=llama31-8b", "model.shape.layers=16"],
     ["model=llama31-8b", "model.parallel.rollout_tensor=2"]],
)  # fmt: skip
def test_a_plan_says_that_a_speed_is_of_what_was_not_measured(other):
    assert speed_of(*other).endswith("was not measured (docs/research/speed.md)")


def test_what_people_read_names_layout_memory_and_what_was_checked():
    rows = dict(describe(plan("model=llama31-8b", "precision=fp8-linear"), MAIN))
    assert rows["layout"].startswith(
        "8 GPUs. Train: TP 1, PP 1, CP 1, EP 1, DP 8, micro-batches of"
    )
    assert "Rollout: 8 engines, TP 1, EP 1, KV cache" in rows["layout"]
    assert "a checkpoint 105 GiB, 2 kept" in rows["memory"] and "host memory" in rows["memory"]
    assert rows["memory"].startswith("of 80 GiB free in train ")
    assert rows["refit"].startswith("16.1 GB, in BF16")
    assert "NEMO_RL_ROOT" in rows["checked"]


def test_a_plan_names_the_jobs_hub_cache_or_that_of_who_submits(monkeypatch):
    def said(*words):
        found = describe(plan("model=llama31-8b", *words), MAIN)
        return dict(found)["environment"].partition("hub cache ")[2]

    monkeypatch.delenv("HF_HOME", raising=False)
    assert said() == "~/.cache/huggingface"
    monkeypatch.setenv("HF_HOME", "/mine")
    assert said("cluster.env=[HF_HOME]") == "/mine"
    assert said("cluster.env=[HF_TOKEN,'HF_HOME=/job']") == "/job"


@pytest.mark.parametrize("text", ["a\\b", "a'b", "a\\'b", "ends\\", "a\\\\'", "a\\\\b"])
def test_hydra_reads_a_text_of_the_stock_command_as_it_is(text):
    words = command_line("base.yaml", {"logger.wandb.name": text})
    assert OverridesParser.create().parse_override(words[-1]).value() == text
