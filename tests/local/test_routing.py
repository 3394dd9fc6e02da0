"""Routes are recorded as the engine took them and replayed as they were recorded."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fp8_nemo.correction.mismatch import LogprobPair, mismatch_metrics
from fp8_nemo.correction.routing import MISSING, RouteCount
from fp8_nemo.local.engine import Engine
from fp8_nemo.local.policy import Policy
from fp8_nemo.local.rollout import joined
from fp8_nemo.recipe.model_dir import SHIPPED
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.runs import metrics, run_dir
from tests.local.test_engine import CPU, TEXTS, refit_stream, sample
from tests.local.test_grpo import GrpoLoop

MOE = "tiny-qwen3-moe"
FP8 = Precision("fp8-linear", rollout_linear="fp8")


def pair_of(precision, *, random_routers=False):
    policy = Policy(SHIPPED / MOE, precision, 1e-4, CPU, replays=True)
    if random_routers:  # those that ship send 128-token answers the same way in FP8
        draw = torch.Generator().manual_seed(0)
        for name, weight in policy.parameters.items():
            if name.endswith(".mlp.gate.weight"):
                weight.data = torch.randn(weight.shape, generator=draw).to(weight.dtype) / 10
    engine = Engine(policy.model.config, precision, CPU, records=True)
    stream = refit_stream(policy.named_weights(), precision, None, num_layers=2)
    engine.refit(stream, "bytes")
    return policy, engine


@pytest.fixture(scope="module")
def rollout():
    """A batch that FP8 linears sampled, and the BF16 policy that trains on it."""
    policy, engine = pair_of(FP8, random_routers=True)
    return policy, sample(engine, MOE, TEXTS * 16)


def test_every_token_but_the_last_has_a_route_in_every_layer(rollout):
    _, batch = rollout
    B, T = batch.tokens_BT.shape
    assert batch.routes_BTLA.shape == (B, T, 2, 2)
    assert (batch.routes_BTLA[:, -1] == MISSING).all()
    assert ((batch.routes_BTLA[:, :-1] >= 0) & (batch.routes_BTLA[:, :-1] < 4)).all()


def test_joined_with_a_wider_batch_no_answer_misses_the_route_of_its_last_token():
    _, engine = pair_of(Precision())
    narrow, wide = (sample(engine, MOE, limit=limit) for limit in (2, 6))
    joint = joined([narrow, wide], padding=0)
    loop = SimpleNamespace(routes=RouteCount(CPU))
    assert GrpoLoop._replay_metrics(loop, joint)["replay/missing_fraction"] == 0


def test_bf16_replays_its_own_routes_to_the_same_logprobs_and_none_is_exchanged():
    policy, engine = pair_of(Precision())
    batch, count = sample(engine, MOE), RouteCount(CPU)
    replayed = policy.logprobs(batch, routes=count)
    rerouted, compared = count.take().tolist()
    assert rerouted / compared < 0.01 and compared == 2 * int(batch.mask_BT[:, :-1].sum())
    free = Policy(SHIPPED / MOE, Precision(), 1e-4, CPU)
    assert (replayed - free.logprobs(batch)).abs().max() < 1e-2


def test_what_fp8_routed_otherwise_is_counted_and_its_replay_lowers_the_mismatch(rollout):
    policy, batch = rollout
    count, kl = RouteCount(CPU), {}
    for name, train_BR in {
        "r3": policy.logprobs(batch, routes=count),
        "none": policy.logprobs(replace(batch, routes_BTLA=None)),
    }.items():
        pair = LogprobPair(train_BR, batch.rollout_BR, batch.response_mask_BR)
        kl[name] = mismatch_metrics(pair)["mismatch/kl"]
    rerouted, compared = count.take().tolist()
    assert 0 < rerouted / compared < 0.1
    assert kl["r3"] < 0.8 * kl["none"]


def test_replayed_experts_weigh_what_the_trainers_own_router_gives_them(rollout):
    policy, _ = rollout
    gate = policy.model.model.layers[0].mlp.gate
    hidden = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    routes = torch.tensor([[3, 0], [1, 2], [MISSING, MISSING]])
    everything = torch.ones(3).bool()
    with torch.no_grad():
        logits, own_share, own = gate(hidden)
        with policy.routers.replaying(routes[:, None, None].expand(3, 1, 2, 2), everything, None):
            _, share, index = gate(hidden)
    expected = logits.float().softmax(-1)
    assert index[:2].tolist() == routes[:2].tolist() and index[2].tolist() == own[2].tolist()
    for row in (0, 1):
        weights = expected[row, routes[row]]
        assert share[row].tolist() == pytest.approx((weights / weights.sum()).tolist(), rel=1e-2)
    assert torch.equal(share[2], own_share[2])


def test_the_gradient_reaches_the_experts_that_were_replayed(rollout):
    policy, batch = rollout
    away = batch.routes_BTLA.clone()
    away[:] = torch.tensor([0, 1], dtype=away.dtype)
    one = type(batch)(*(x[:2] for x in (*list(vars(batch).values())[:4], away)))
    policy._score(one).sum().backward()
    slab = policy.parameters["model.layers.0.mlp.experts.down_proj"].grad
    assert slab is not None
    assert [bool(each.any()) for each in slab] == [True, True, False, False]
    policy.model.zero_grad()


def test_a_run_replays_and_a_stopped_one_goes_on(make_plan):
    plan = make_plan("replay=r3", f"model={MOE}", "precision=fp8-linear", "grpo.steps=2")
    [frozen] = run_dir.freeze([plan])
    GrpoLoop(plan, frozen.path).train(lambda row: None, stop=lambda: True)
    GrpoLoop(plan, frozen.path).train(lambda row: None)
    rows = metrics.read_metrics(frozen.path)[1:]
    assert len(rows) == 2
    assert all(0 <= row["replay/rerouted_fraction"] < 0.2 for row in rows)
    assert all(row["replay/missing_fraction"] == 0 for row in rows)
