"""What a plan says of a run whose GPUs do not share trainer and engine: `cluster.rollout_gpus`."""

import json
from pathlib import Path

import pytest

from fp8_nemo.nemo_config.host import MAIN, Host
from fp8_nemo.nemo_config.versions import V0_7_0_DEFECTS
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.describe import decision, describe
from fp8_nemo.plan.layout import choose
from fp8_nemo.plan.memory import GIB, HEADROOM, checkpoint_gib, host_gib, memory_per_gpu
from fp8_nemo.plan.model import count
from fp8_nemo.plan.step_time import step_seconds
from fp8_nemo.recipe.compose import ComposeError
from fp8_nemo.runs.run_dir import freeze, layout_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GIVEN = ("model.layout=null", "model.parallel.tensor=2", "model.memory.kv_cache_gib=20")
PARAMETERS, CUT = 8_030_261_248, 16_060_522_880
"""Of 8B, and the bytes that they take in BF16."""
COLOCATED = "policy.generation.colocated"


def plan(*words, host=MAIN):
    line = ["model=llama31-8b", "correction=tis", "cluster.gpu=h200", *words]
    [found] = compose_plans(line, lambda recipe: host)
    return found


def apart(gpus, *words, host=MAIN):
    return plan(f"cluster.rollout_gpus={gpus}", *words, host=host)


def test_what_trains_and_what_samples_are_counted_apart():
    settled = apart(4, "precision=bf16", *GIVEN).settled
    assert (settled.gpus, settled.train_gpus, settled.rollout_gpus) == (8, 4, 4)
    assert (settled.data_parallel, settled.engines) == (2, 4)
    assert settled.sequences_per_engine == settled.sequences_per_batch / 4
    shared = plan("precision=bf16", *GIVEN).settled
    assert (shared.train_gpus, shared.rollout_gpus) == (8, 8)
    assert (shared.data_parallel, shared.engines) == (4, 8)


def test_each_phase_is_of_the_gpu_that_it_is_on_and_nothing_moves_to_the_host():
    settled = apart(4, "precision=fp8-linear", *GIVEN).settled
    phases = memory_per_gpu(settled).phases
    weights = PARAMETERS / 2
    trains = {"weights": 2 * weights, "optimizer": 10 * weights / 2, "their gradients": 0}
    packets = 2 * 0.02 * 140.4 * GIB
    for phase in ("train", "logprob", "refit"):
        found = phases[phase] | {"their gradients": 0}
        assert {key: found[key] for key in trains} == pytest.approx(trains, rel=1e-3), phase
    assert phases["logprob"]["gradients"] == 0 < phases["refit"]["gradients"]
    assert phases["refit"]["packets"] == pytest.approx(2 * packets)
    assert phases["rollout"] == pytest.approx(
        {
            "engine": count(settled.recipe.model.shape, settled.recipe.precision).refit_bytes,
            "KV cache": 20 * GIB, "packets": packets, "allowance": 6 * GIB,
        },
        rel=1e-3,
    )  # fmt: skip
    own, copied = 2 * weights, 2 * 4 / 3 * 2 * weights  # moved at set-up; the reference policy's
    saved = checkpoint_gib(settled)
    assert host_gib(settled) == pytest.approx(4 * (own + copied) / GIB + saved)
    unreferenced = apart(4, "precision=fp8-linear", "grpo.kl_penalty=0", *GIVEN).settled
    assert host_gib(unreferenced) == pytest.approx(saved)


def test_a_small_models_packets_are_no_more_than_it_has():
    two = ("cluster.gpus_per_node=2", "cluster.rollout_gpus=1")
    [found] = compose_plans(["model=small-llama", "backend=nemo", "precision=bf16", *two])
    sent = count(found.recipe.model.shape, found.recipe.precision).refit_bytes_bf16
    assert memory_per_gpu(found.settled).phases["rollout"]["packets"] == sent


def test_a_phase_takes_as_long_as_its_own_gpus_need():
    whole = step_seconds(plan("precision=bf16", *GIVEN).settled)
    half = step_seconds(apart(4, "precision=bf16", *GIVEN).settled)
    assert half.train == pytest.approx(2 * whole.train, rel=0.05)
    assert half.logprob == pytest.approx(2 * whole.logprob, rel=0.05)
    # The cache bounds what runs, and the last of them end with an engine that empties.
    assert 1.5 * whole.rollout < half.rollout < 2 * whole.rollout
    assert half.optimizer == 0


def test_a_refit_to_other_gpus_takes_what_was_measured():
    measured = json.loads((RESULTS / "glue-8b-nccl-h200.json").read_text())
    assert not measured["colocated"]
    seconds = step_seconds(apart(1, "precision=fp8-kv-attn", "cluster.gpus_per_node=2").settled)
    assert seconds.refit == pytest.approx(measured["refit"]["ledger"]["median"]["refit"], rel=0.01)


def test_the_layout_that_is_chosen_fits_both_kinds_of_gpu_and_keeps_the_optimizer():
    settled = apart(4, "precision=fp8-kv-attn").settled
    memory, choices = memory_per_gpu(settled), choose(settled, MAIN)
    assert memory.headroom(memory.worst) >= HEADROOM
    assert choices[0].layout == settled.layout
    assert all(each.layout.keeps_optimizer for each in choices)
    assert settled.layout.kv_cache_gib > plan("precision=fp8-kv-attn").settled.layout.kv_cache_gib


def test_the_plan_says_who_does_what_and_what_it_would_be_on_shared_gpus():
    made, shared = apart(1, "cluster.gpus_per_node=2"), plan("cluster.gpus_per_node=2")
    rows = dict(describe(made, MAIN))
    assert rows["layout"].startswith("2 GPUs, 1 to train, 1 to sample. Train: ")
    assert "Rollout: 1 engine, TP 1" in rows["layout"] and "1 GPUs" not in str(rows)
    told = dict(decision(made, MAIN))
    mine, its = (step_seconds(each.settled).total for each in (made, shared))
    assert told["shared"].startswith(f"{its:.0f} s, {mine / its:.2f} times as fast, if every GPU")
    assert "shared" not in dict(decision(shared, MAIN))
    assert any(note.startswith("cluster.rollout_gpus: 1 of 2 GPUs sample") for note in made.notes)
    one = dict(describe(plan("cluster.gpus_per_node=1"), MAIN))["layout"]
    assert one.startswith("1 GPU. Train: ")


def test_that_the_optimizer_stays_is_told_to_who_asks_for_less():
    asked = apart(4, "precision=bf16", "model.memory.optimizer=move")
    assert asked.settled.layout.keeps_optimizer
    assert any(note.startswith("model.memory.optimizer: no effect") for note in asked.notes)
    assert not any("optimizer" in note for note in apart(4, "precision=bf16").notes)


def test_a_layout_of_shared_gpus_is_none_for_a_run_that_goes_on_apart(tmp_path):
    words = ("precision=fp8-kv-attn", f"outputs={tmp_path}")
    first, other = plan(*words), apart(4, *words)
    assert first.run_name == other.run_name
    freeze([first])
    assert layout_of(plan(*words)) == first.layout
    assert layout_of(other) is None


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ((), {"enabled": True}),
        (
            ("cluster.rollout_gpus=6",),
            {"enabled": False, "resources.num_nodes": 1, "resources.gpus_per_node": 6},
        ),
        (
            ("cluster.nodes=4", "cluster.rollout_gpus=24"),
            {"enabled": False, "resources.num_nodes": 3, "resources.gpus_per_node": 8},
        ),
    ],
)
def test_the_keys_are_nemo_rls_own(words, keys):
    made = plan("precision=bf16", *words).nemo.overrides
    assert {k: v for k, v in made.items() if k.startswith(COLOCATED)} == {
        f"{COLOCATED}.{key}": value for key, value in keys.items()
    }
    if words:
        assert "policy.offload_optimizer_for_refit" not in made


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["cluster.rollout_gpus=8"], "cluster.rollout_gpus=8: leaves none of 8 to train on"),
        (["cluster.rollout_gpus=-1"], "cluster.rollout_gpus=-1: must be at least 0"),
        (
            ["model=tiny-llama", "backend=local", "cluster.rollout_gpus=1"],
            "cluster.rollout_gpus=1: backend=local trains and samples on one device; set 0",
        ),
        (
            [f"+nemo.{COLOCATED}.enabled=false"],
            f"nemo.{COLOCATED}.enabled=false: is written by cluster.rollout_gpus",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(words, line):
    with pytest.raises(ComposeError) as caught:
        compose_plans(["model=llama31-8b", *words] if "model=tiny-llama" not in words else words)
    assert str(caught.value).startswith(line)


def test_v0_7_0_broadcasts_kv_scales_and_leaves_the_optimizer_where_it_is():
    there = Host("v0.7.0", defects=V0_7_0_DEFECTS)
    assert apart(
        4, "precision=fp8-kv-attn", "glue=stock", host=there
    ).settled.layout.keeps_optimizer
    with pytest.raises(ComposeError, match=r"precision\.rollout_kv=fp8: this NeMo RL drops"):
        plan("precision=fp8-kv-attn", "glue=stock", host=there)
