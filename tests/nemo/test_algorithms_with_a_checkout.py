"""Ring 2: each algorithm and the replay of routes against NeMo RL's and Megatron's own code.

Set NEMO_RL_ROOT to a checkout, in an environment that holds NeMo RL's packages (docs/install.md).
"""

# pyright: reportMissingImports=false
import importlib.util
import os
import pickle
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from fp8_nemo.nemo_config import checkout
from fp8_nemo.nemo_config.overrides import path_overrides
from fp8_nemo.plan.plan import plan_recipe
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.options.correction import Correction
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Glue, Precision
from tests.nemo.test_with_a_checkout import ROOT, imports, random_batch

pytestmark = [
    pytest.mark.skipif(not ROOT, reason="NEMO_RL_ROOT: no checkout of NeMo RL"),
    imports,
    pytest.mark.usefixtures("nemo_path"),
]
NAMES = ("grpo", "dapo", "rloo", "reinforce++", "cispo", "gspo")
LOSSES = {name: (f"algorithm={name}",) for name in NAMES} | {
    "dual clip": ("algorithm.ratio_clip_c=3",),
    "by sequence": ("algorithm.token_level_loss=false",),
    "wide": ("algorithm.ratio_clip_min=0.5", "algorithm.ratio_clip_max=3"),
}
CORRECTIONS = {
    "none": {},
    "tis": {"level": "token", "truncate": 2.0},
    "mis": {"level": "token", "mask": "token", "low": 0.5, "high": 2.0},
    "geo-mis": {"level": "token", "truncate": 2.0, "mask": "geometric", "low": 0.9, "high": 1.1},
    "renormalize": {
        "level": "token", "mask": "token", "low": 0.5, "high": 2.0, "renormalize_denominator": True
    },
}  # fmt: skip


@pytest.fixture
def nemo_path(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)


@pytest.fixture(scope="module")
def host():
    return checkout.read_host(Path(ROOT or ""))


def plan_of(host, *arguments, model="small-llama"):
    [recipe] = compose(["backend=nemo", f"model={model}", "precision=fp8-linear", *arguments])
    return plan_recipe(recipe, host)


def configured(plan, host, tmp_path):
    """NeMo RL's own model of the plan's configuration."""
    from nemo_rl.algorithms.grpo import MasterConfig

    written = plan.nemo.overrides | path_overrides(plan.recipe, tmp_path, Path(host.root))
    return MasterConfig(**checkout.config_of(Path(host.root), plan.nemo.base_config, written))


def of(group, name):
    """A key of a group, which is a dictionary in v0.7.0 and a model in main."""
    return group[name] if isinstance(group, dict) else getattr(group, name)


def loss_of(plan, host):
    """NeMo RL's loss with the base's keys and the plan's, and whether it corrects."""
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    from fp8_nemo.launch.environments import settings_of

    written = {**host.leaves(plan.nemo.base_config), **plan.nemo.overrides}
    keys = {k.removeprefix("loss_fn."): v for k, v in written.items() if k.startswith("loss_fn.")}
    return ClippedPGLossFn(ClippedPGLossConfig(**keys)), settings_of(plan.recipe).loss_corrects


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("rows", CORRECTIONS)
@pytest.mark.parametrize("penalty", ["0", "0.05"])
def test_the_local_loss_is_nemo_rls_with_the_plans_keys(name, rows, penalty, host):
    """Value, gradient and denominators, two micro-batches of one update, a sequence left out."""
    from fp8_nemo.correction.correct import correct
    from fp8_nemo.correction.update import policy_ratio
    from fp8_nemo.local.loss import clipped_loss, k3, reduced
    from fp8_nemo.nemo.policy import corrected, logprob_pair, without_correction

    if rows == "renormalize" and name == "gspo":
        pytest.skip("refused: a rejected token would leave the sequence's ratio")
    plan = plan_of(host, *LOSSES[name], f"grpo.kl_penalty={penalty}")
    correction = Correction(name=rows, **CORRECTIONS[rows])
    plan = plan_recipe(replace(plan.recipe, correction=correction), host)
    algorithm = plan.recipe.algorithm.filled
    loss_fn, corrects = loss_of(plan, host)

    data, current_BT = random_batch(11, 0.5)
    pair = logprob_pair(data)
    multiplier = correct(pair, correction)
    sent = data
    if not corrects:
        loss_fn = without_correction(loss_fn)
        sent = corrected(data, multiplier, correction.renormalize_denominator)

    def theirs(current_BT):
        mask_BT = sent["token_mask"][:, 1:] * sent["sample_mask"][:, None]
        tokens, sequences = mask_BT.sum(), sent["sample_mask"].sum()
        return sum(
            loss_fn(
                current_BT[part],
                type(sent)({key: value[part] for key, value in sent.items()}),
                sequences,
                tokens,
            )[0]
            for part in (slice(0, 5), slice(5, 12))
        )

    def ours(current_BT):
        mask_BT = pair.mask_BT
        counted_BT = multiplier.kept_BT if correction.renormalize_denominator else mask_BT
        ratio_BT = policy_ratio(
            current_BT,
            pair.train_BT,
            mask_BT,
            by_sequence=bool(algorithm.sequence_level_importance_ratios),
        )
        A_BT = data["advantages"][:, 1:]
        loss_BT = multiplier.value_BT * clipped_loss(ratio_BT, current_BT, A_BT, algorithm)
        loss_BT = loss_BT + float(penalty) * k3(
            current_BT, data["reference_policy_logprobs"][:, 1:]
        )
        by_token, sequences = bool(algorithm.token_level_loss), int(data["sample_mask"].sum())
        return reduced(loss_BT, counted_BT, counted_BT, sequences, by_token)

    values, gradients = [], []
    for loss in (theirs, ours):
        leaf = current_BT.clone().requires_grad_()
        value = loss(leaf)
        value.backward()
        values.append(value.detach())
        gradients.append(leaf.grad)
    torch.testing.assert_close(values[0], values[1], rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=2e-5, atol=1e-7)
    assert gradients[0].abs().sum() > 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kl_in_reward", [False, True])
def test_the_local_advantages_are_nemo_rls_estimators(name, kl_in_reward, host, tmp_path):
    from nemo_rl.algorithms.grpo import _create_advantage_estimator

    from fp8_nemo.local.loss import group_advantages, k3, reinforce_plus_plus

    words = [f"algorithm={name}", "grpo.kl_penalty=0.2"]
    if kl_in_reward and name != "reinforce++":
        pytest.skip("refused: the KL in the reward is Reinforce++'s")
    words += ["algorithm.use_kl_in_reward=true"] if kl_in_reward else []
    plan = plan_of(host, *words)
    algorithm = plan.recipe.algorithm.filled
    draw = torch.Generator().manual_seed(4)
    rewards_PG = (torch.rand(6, 8, generator=draw) < 0.4).float()
    rewards_PG[0] = 1.0
    mask_BR = torch.arange(5)[None] < torch.randint(1, 6, (48,), generator=draw)[:, None]
    train_BR = -torch.rand(48, 5, generator=draw)
    reference_BR = train_BR + 0.3 * torch.randn(48, 5, generator=draw)
    prompts_B1 = torch.arange(6).repeat_interleave(8)[:, None]
    estimator = _create_advantage_estimator(configured(plan, host, tmp_path))
    theirs_BR = estimator.compute_advantage(
        prompt_ids=prompts_B1,
        rewards=rewards_PG.flatten(),
        mask=mask_BR.float(),
        repeated_batch=None,
        logprobs_policy=train_BR,
        logprobs_reference=reference_BR,
    )
    if algorithm.estimator == "grpo":
        ours_BR = group_advantages(rewards_PG, algorithm)[:, None].expand(mask_BR.shape)
    else:
        cost_BR = 0.2 * k3(train_BR, reference_BR) if kl_in_reward else None
        ours_BR = reinforce_plus_plus(rewards_PG, mask_BR, algorithm, cost_BR)
    torch.testing.assert_close(ours_BR[mask_BR], theirs_BR[mask_BR], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "words",
    [
        ("algorithm=dapo",),
        ("algorithm.stop_properly_penalty_coef=0.25",),
        ("algorithm.reward_target_min=-0.5", "algorithm.overlong_buffer=0.5"),
        ("algorithm=grpo",),
    ],
    ids=str,
)
def test_the_local_rewards_are_nemo_rls_scaled_and_shaped_ones(words, host, tmp_path):
    from nemo_rl.algorithms.grpo import scale_rewards
    from nemo_rl.algorithms.reward_functions import apply_reward_shaping
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    from fp8_nemo.local.loss import shaped_rewards

    plan = plan_of(host, *words, "grpo.max_new_tokens=64")
    config = configured(plan, host, tmp_path).grpo
    draw = torch.Generator().manual_seed(1)
    right_B = (torch.rand(32, generator=draw) < 0.5).float()
    lengths_B = torch.randint(1, 65, (32,), generator=draw)
    truncated_B = lengths_B > 60
    batch = BatchedDataDict(
        total_reward=right_B.clone(), truncated=truncated_B, response_token_lengths=lengths_B
    )
    batch["message_log"] = [
        [{"role": "assistant", "token_ids": torch.zeros(int(n))}] for n in lengths_B
    ]
    batch = apply_reward_shaping(
        scale_rewards(batch, of(config, "reward_scaling")), of(config, "reward_shaping")
    )
    ours_B = shaped_rewards(
        right_B, lengths_B, truncated_B, plan.recipe.algorithm.filled, longest=64
    )
    torch.testing.assert_close(ours_B, batch["total_reward"])


@pytest.mark.parametrize("name", NAMES)
def test_nemo_rls_model_takes_an_algorithm_and_its_loss_every_correction(name, host, tmp_path):
    config = configured(plan_of(host, f"algorithm={name}", "correction=tis"), host, tmp_path)
    assert of(config.grpo, "use_dynamic_sampling") == (name == "dapo")
    for correction in ("none", "tis", "mis", "seq-tis", "geo-mis"):
        loss_fn, _ = loss_of(plan_of(host, f"algorithm={name}", f"correction={correction}"), host)
        assert loss_fn.sequence_level_importance_ratios == (name == "gspo")  # its asserts held


def test_nemo_rl_takes_the_replay_of_routes_and_asks_vllm_for_them(host, tmp_path):
    from nemo_rl.models.megatron.router_replay import (
        configure_vllm_for_router_replay,
        router_replay_enabled,
    )

    policy = configured(plan_of(host, "replay=r3", model="small-qwen3-moe"), host, tmp_path).policy
    assert router_replay_enabled(policy)
    configure_vllm_for_router_replay(policy)
    given = policy["generation"]
    assert given["vllm_kwargs"]["enable_return_routed_experts"] is True
    assert given["vllm_kwargs"]["enable_chunked_prefill"] is False
    assert given["vllm_cfg"]["enable_prefix_caching"] is False


def test_the_corrected_batch_keeps_the_routes_of_rejected_tokens():
    from fp8_nemo.correction.correct import correct
    from fp8_nemo.nemo.policy import corrected, logprob_pair

    data, _ = random_batch(5, 1.0)
    B, T = data["input_ids"].shape
    data["routed_experts"] = torch.randint(0, 8, (B, T, 3, 2), dtype=torch.int8)
    correction = Correction(mask="token", high=1.0)
    sent = corrected(data, correct(logprob_pair(data), correction), True)
    assert sent["routed_experts"] is data["routed_experts"]
    assert set(sent) == set(data)
    assert not torch.equal(sent["token_mask"], data["token_mask"])


@pytest.fixture
def policy(monkeypatch):
    """A WatchedPolicy whose workers answer here: what it sends, and what they have counted."""
    from nemo_rl.models.policy.lm_policy import Policy

    from fp8_nemo.nemo.policy import WatchedPolicy
    from fp8_nemo.nemo.worker_settings import WorkerSettings

    sent = []

    def train(self, data, loss_fn, *arguments, **options):
        mask_BT = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        current_BT = data["prev_logprobs"][:, 1:] + 0.3
        counts = (data["sample_mask"].sum(), mask_BT.sum())
        metrics = loss_fn(current_BT, data, *counts)[1]
        sent.append((data, loss_fn, metrics))
        many = {key: [value] for key, value in metrics.items()}
        return {"grad_norm": torch.ones(1), "all_mb_metrics": many}

    monkeypatch.setattr(Policy, "__init__", lambda self, **arguments: None)
    monkeypatch.setattr(Policy, "train", train)
    monkeypatch.setattr(
        Policy,
        "run_all_workers_single_data",
        lambda self, name: {
            "fp8_nemo_take_routes": [[3, 60]],
            "fp8_nemo_take_loss_scale": [(32768.0, 2)],
            "fp8_nemo_take_memory": [(71.5, 2), (73.25, 1)],
        }[name],
    )
    correction = Correction("mis", level="token", mask="token", low=0.5, high=2.0, veto=1e-9)
    settings = WorkerSettings(
        Precision(), Shape(experts=8, experts_per_token=2), Glue(), correction, False, replays=True
    )
    made = WatchedPolicy(settings)
    made.cfg = {"generation": {"max_new_tokens": 30}, "max_total_sequence_length": 33}
    monkeypatch.setattr(Policy, "__del__", lambda self: None, raising=False)
    return made, sent


def test_a_step_of_the_policy_hands_routes_through_and_writes_every_metric(policy):
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    made, sent = policy
    data, _ = random_batch(5, 1.0)
    B, T = data["input_ids"].shape
    data["input_lengths"] = data["token_mask"].sum(1).long() + 2
    data["routed_experts"] = torch.zeros(B, T, 3, 2, dtype=torch.int8)
    data["routed_experts"][0, 0, 1] = -1
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0))
    made.train(data, loss_fn)
    [(given, used, in_worker)] = sent
    assert made.trained == 1
    assert given["routed_experts"] is data["routed_experts"]
    assert isinstance(used, ClippedPGLossFn) and loss_fn.__class__ is ClippedPGLossFn
    row = made.take_row()
    assert row["replay/rerouted_fraction"] == 0.05
    routes = 3 * int((data["input_lengths"] - 1).sum())
    assert row["replay/missing_fraction"] == pytest.approx(1 / routes)
    assert row["train/clip_fraction"] == pytest.approx(1.0)  # exp(0.3) is beyond 1.2 everywhere
    assert row["train/kl"] == pytest.approx(0.3498588 - 0.3, rel=1e-4)
    assert row["train/ratio_max"] == pytest.approx(1.3498588, rel=1e-5)
    assert row["train/entropy"] == pytest.approx(in_worker["approx_entropy"])
    assert (row["memory/peak"], row["memory/retries"]) == (73.25, 3)
    assert row["correction/masked_advantage"] != 0 and row["correction/masked_fraction"] > 0
    assert row["rollout/tokens"] == int(data["token_mask"][:, 1:].sum()), "a filtered answer too"


@pytest.mark.parametrize(("held", "said"), [("bf16", (None, None)), ("fp16", (32768.0, 2))])
def test_a_step_in_fp16_tells_of_its_loss_scale_and_skipped_updates(policy, held, said):
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    made, _ = policy
    precision = Precision(rollout_linear=held, rollout_kv=held, train_linear=held)
    made.settings = replace(made.settings, precision=precision, replays=False)
    data, _ = random_batch(5, 1.0)
    data["input_lengths"] = data["token_mask"].sum(1).long() + 2
    made.train(data, ClippedPGLossFn(ClippedPGLossConfig(reference_policy_kl_penalty=0.0)))
    row = made.take_row()
    assert (row.get("train/loss_scale"), row.get("train/skipped_updates")) == said


def test_the_watched_loss_is_the_loss_and_travels_to_a_worker():
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    from fp8_nemo.nemo.policy import watched_loss

    data, current_BT = random_batch(3, 0.5)
    config = ClippedPGLossConfig(
        sequence_level_importance_ratios=True,
        token_level_loss=False,
        ratio_clip_min=0.02,
        ratio_clip_max=0.02,
    )
    plain = ClippedPGLossFn(config)
    counts = (data["sample_mask"].sum(), data["token_mask"].sum())
    watched = pickle.loads(pickle.dumps(watched_loss(plain)))
    value, metrics = watched(current_BT, data, *counts)
    expected, stock = plain(current_BT, data, *counts)
    assert torch.equal(value, expected)
    assert {key: metrics[key] for key in stock} == stock
    assert 0 < metrics["fp8_nemo_clipped"] < 1 and metrics["fp8_nemo_moved"] > 0


def test_megatrons_replay_is_counted_without_padding_and_without_missing_routes():
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("Megatron is not here")
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
    from nemo_rl.models.megatron.router_replay import _install_missing_route_fallback_patch

    from fp8_nemo.correction.routing import RouteCount
    from fp8_nemo.nemo.policy_worker import counted_routes

    _install_missing_route_fallback_patch()
    replay, count = RouterReplay(), RouteCount("cpu")
    logits = torch.tensor([[0.0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2, 3], [0, 1, 2, 3], [3, 0, 0, 2]])
    given = torch.tensor([[3, 2], [0, 2], [0, 1], [-1, -1], [3, 0]])  # same, other, pad, none, same
    before = RouterReplay.get_replay_topk
    replay.set_target_indices(given)
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    with counted_routes(count):
        _, routed = topk_routing_with_score_function(logits, 2, router_replay=replay)
    assert RouterReplay.get_replay_topk is before
    assert routed[1].tolist() == [True, False, True, False]
    assert routed[3].tolist() == [False, False, True, True], "its own, where none is known"
    assert count.take().tolist() == [1, 3]
    replay.set_router_replay_action(RouterReplayAction.RECORD)
    with counted_routes(count):
        topk_routing_with_score_function(logits, 2, router_replay=replay)
    assert count.take().tolist() == [0, 0]


def test_dynamic_sampling_keeps_the_prompts_that_nemo_rl_keeps(host, tmp_path):
    from nemo_rl.algorithms.grpo import dynamic_sampling
    from nemo_rl.algorithms.utils import calculate_baseline_and_std_per_prompt
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.utils.timer import Timer

    from fp8_nemo.local.loss import is_informative

    plan = plan_of(
        host, "algorithm=dapo", "grpo.prompts_per_step=4", "grpo.generations_per_prompt=4",
        "cluster.gpus_per_node=1",
    )  # fmt: skip
    config = configured(plan, host, tmp_path)
    draw = torch.Generator().manual_seed(2)
    rewards_PG = (torch.rand(12, 4, generator=draw) < 0.3).float()
    prompts_B1 = torch.arange(12).repeat_interleave(4)[:, None]
    flat = rewards_PG.flatten()
    baseline, std = calculate_baseline_and_std_per_prompt(
        prompts_B1, flat - 1, torch.ones(48), leave_one_out_baseline=False, std_rewards=flat
    )
    batch = BatchedDataDict(total_reward=flat - 1, row=torch.arange(48))
    kept, whole, *_ = dynamic_sampling(batch, std, baseline, 1, config, Timer())
    informative_B = is_informative(rewards_PG).repeat_interleave(4)
    assert whole and informative_B.sum() >= 16
    assert kept["row"].tolist() == torch.arange(48)[informative_B][:16].tolist()


def test_settings_of_a_run_with_replay_travel_to_the_workers():
    from fp8_nemo.launch.environments import settings_of
    from fp8_nemo.nemo.worker_settings import VARIABLE, WorkerSettings

    [recipe] = compose(["model=small-qwen3-moe", "replay=r3"])
    settings = settings_of(recipe)
    os.environ |= settings.to_environment()
    try:
        assert WorkerSettings.from_environment() == settings and settings.replays
    finally:
        del os.environ[VARIABLE]
    assert asdict(settings)["replays"] is True
