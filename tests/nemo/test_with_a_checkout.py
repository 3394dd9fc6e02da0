"""Ring 2, with NeMo RL on a CPU: its own parser, model and loss, and its entry as far as a GPU.

Set NEMO_RL_ROOT to a checkout. What imports `nemo_rl` also needs an environment that holds its
packages (docs/install.md); the rest reads the checkout's files.
"""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from fp8_nemo.correction.measure import read_pairs
from fp8_nemo.launch import preflight
from fp8_nemo.nemo.step_metrics import LOGGED_TOKENS, OverheardLogger
from fp8_nemo.nemo_config import checkout
from fp8_nemo.nemo_config.host import HostError
from fp8_nemo.nemo_config.keys import command_line
from fp8_nemo.nemo_config.overrides import path_overrides
from fp8_nemo.nemo_config.versions import MAIN_DEFECTS, V0_7_0_DEFECTS
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.plan import PlanError, plan_recipe
from fp8_nemo.recipe.compose import ComposeError, compose
from fp8_nemo.recipe.options.correction import Correction
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.settled import LOCAL_BASE, settle

ROOT = os.environ.get("NEMO_RL_ROOT")
pytestmark = pytest.mark.skipif(not ROOT, reason="NEMO_RL_ROOT: no checkout of NeMo RL")
imports = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None or sys.version_info < (3, 12),
    reason="NeMo RL's packages are not installed here (docs/install.md)",
)

MODELS = ("tiny-llama", "tiny-qwen3-moe", "small-llama", "small-qwen3-moe")
REAL = ("llama31-8b", "qwen3-8b", "qwen3-30b-a3b")
NEW = (
    *("llama32-1b", "llama32-3b", "qwen25-1_5b", "qwen25-7b", "qwen25-math-7b"),
    *("qwen3-4b", "qwen3-14b", "qwen3-32b"),
)
"""In one correction of each kind: the other keys of a model do not depend on it."""
PRECISIONS = ("bf16", "fp8-linear", "fp8-kv-attn", "fp8-e2e", "fp8-e2e-kv-attn")
CORRECTIONS = ("none", "tis", "mis", "seq-tis", "seq-mis", "geo-mis")
NEMO = ("backend=nemo", "glue=stock", "model.path=null")


@pytest.fixture(scope="module")
def host():
    return checkout.read_host(Path(ROOT or ""))


@pytest.fixture
def nemo_path(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([ROOT or "", *sys.path]))


def cells(host):
    """Every cell that this version allows, as a plan."""
    all_of = [*product(MODELS + REAL, PRECISIONS, CORRECTIONS)]
    all_of += product(NEW, PRECISIONS, ("tis", "seq-mis"))
    for model, precision, correction in all_of:
        [recipe] = compose(
            [*NEMO, f"model={model}", f"precision={precision}", f"correction={correction}"]
        )
        try:
            yield plan_recipe(recipe, host)
        except PlanError:
            assert precision.endswith("kv-attn") and host.defects == V0_7_0_DEFECTS


@imports
@pytest.mark.parametrize("model", ["llama31-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("precision", ["bf16", "fp8-linear"])
def test_nemo_rls_parser_accepts_lora_and_makes_the_adapters_that_the_plan_counts(
    model, precision, host, tmp_path, nemo_path
):
    from nemo_rl.algorithms.grpo import MasterConfig

    [recipe] = compose([f"model={model}", f"precision={precision}", "lora=all-linear"])
    plan = plan_recipe(recipe, host)
    content = checkout.config_of(
        Path(host.root), plan.nemo.base_config, written(plan, host, tmp_path)
    )
    given = MasterConfig(**content).policy["megatron_cfg"]["peft"]
    assert (given["enabled"], given["dim"], given["lora_dtype"]) == (True, 32, None)
    assert "lm_head" not in given["target_modules"] and len(given["target_modules"]) == 4


@imports
@pytest.mark.parametrize("model", ["small-llama", "llama31-8b", "qwen3-30b-a3b"])
def test_nemo_rls_parser_gives_fp16_to_trainer_optimizer_and_engine(
    model, host, tmp_path, nemo_path
):
    from megatron.core.optimizer import OptimizerConfig
    from nemo_rl.algorithms.grpo import MasterConfig

    [recipe] = compose([*NEMO, f"model={model}", "precision=fp16"])
    plan = plan_recipe(recipe, host)
    content = checkout.config_of(
        Path(host.root), plan.nemo.base_config, written(plan, host, tmp_path)
    )
    policy = MasterConfig(**content).policy
    megatron, engine = policy["megatron_cfg"], policy["generation"]["vllm_cfg"]
    told = policy["precision"], megatron["pipeline_dtype"], engine["precision"]
    assert {*told} == {"float16"} and engine["kv_cache_dtype"] == "auto"
    optimizer = OptimizerConfig(**megatron["optimizer"])
    assert (optimizer.fp16, optimizer.bf16) == (True, False)
    assert (optimizer.initial_loss_scale, optimizer.loss_scale_window) == (65536, 400)
    assert not optimizer.use_precision_aware_optimizer


@imports
@pytest.mark.parametrize(
    ("words", "resources"),
    [
        (("cluster.rollout_gpus=4",), {"num_nodes": 1, "gpus_per_node": 4}),
        (
            ("cluster.nodes=4", "cluster.rollout_gpus=16"),
            {"num_nodes": 2, "gpus_per_node": 8},
        ),
    ],
)
def test_nemo_rls_parser_takes_the_gpus_that_sample_alone(
    words, resources, host, tmp_path, nemo_path
):
    from nemo_rl.algorithms.grpo import MasterConfig

    [recipe] = compose([*NEMO, "model=llama31-8b", "precision=fp8-kv-attn", *words])
    plan = plan_recipe(recipe, host)  # v0.7.0 drops KV scales of a shared GPU alone
    content = checkout.config_of(
        Path(host.root), plan.nemo.base_config, written(plan, host, tmp_path)
    )
    config = MasterConfig(**content)
    assert config.policy["generation"]["colocated"] == {"enabled": False, "resources": resources}
    assert config.cluster["num_nodes"] == plan.recipe.cluster.nodes


def written(plan, host, tmp_path):
    return plan.nemo.overrides | path_overrides(plan.recipe, tmp_path, Path(host.root))


def test_the_checkouts_seams_are_there_and_its_defects_are_known(host):
    assert host.defects in (MAIN_DEFECTS, V0_7_0_DEFECTS)
    assert host.vllm == ("0.20.0" if host.defects == V0_7_0_DEFECTS else "0.25.1")


@imports
def test_nemo_rls_parser_and_model_accept_all_290_cells_or_174_on_v0_7_0(host, tmp_path, nemo_path):
    from nemo_rl.algorithms.grpo import MasterConfig

    count = 0
    for plan in cells(host):
        content = checkout.config_of(
            Path(host.root), plan.nemo.base_config, written(plan, host, tmp_path)
        )
        config = MasterConfig(**content)
        assert config.policy["generation"]["vllm_cfg"]["precision"] in ("fp8", "bfloat16")
        count += 1
    assert count == (174 if host.defects == V0_7_0_DEFECTS else 290)


def test_the_stock_command_line_parses_to_the_same_configuration(host, tmp_path):
    loader = checkout._config_module(Path(host.root))
    loader.register_omegaconf_resolvers()
    from omegaconf import OmegaConf

    for plan in list(cells(host))[::7]:
        ours = written(plan, host, tmp_path)
        words = command_line(plan.nemo.base_config, ours)[4:]
        config = loader.load_config(str(Path(host.root) / plan.nemo.base_config))
        stock = OmegaConf.to_container(loader.parse_hydra_overrides(config, words), resolve=True)
        assert stock == checkout.config_of(Path(host.root), plan.nemo.base_config, ours)


def test_a_key_that_is_on_no_list_is_refused_by_struct_mode(host):
    with pytest.raises(HostError, match=r"policy\.typo=1 does not fit"):
        checkout.config_of(
            Path(host.root), "examples/configs/grpo_math_8B_megatron.yaml", {"policy.typo": 1}
        )


def test_a_typo_under_nemo_is_refused_with_the_nearest_key(host):
    with pytest.raises(ComposeError, match=r"did you mean nemo\.policy\.max_grad_norm"):
        compose_plans(
            [*NEMO, "model=llama31-8b", "precision=bf16", "+nemo.policy.max_grad_nrm=1"],
            lambda recipe: host,
        )


def test_another_base_file_of_the_checkout_can_be_the_base(host):
    base = "examples/configs/grpo_math_70B_megatron.yaml"
    [recipe] = compose([*NEMO, "model=llama31-8b", "precision=bf16", f"model.base_config={base}"])
    assert plan_recipe(recipe, host).nemo.overrides["policy.max_total_sequence_length"] == 4096


def test_a_folder_that_is_no_checkout_is_one_line(tmp_path):
    with pytest.raises(HostError, match=r"no NeMo RL here, examples/run_grpo\.py is missing"):
        checkout.read_host(tmp_path)


def test_a_checkout_whose_loop_has_changed_is_refused(tmp_path):
    for name in (checkout.ENTRY, checkout.GRPO, checkout.POLICY, checkout.CONFIG):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = (Path(ROOT or "") / name).read_text()
        (tmp_path / name).write_text(text.replace("policy_factory", "policy_maker"))
    with pytest.raises(HostError, match="setup takes no policy_factory"):
        checkout.read_host(tmp_path)


def test_another_vllm_is_one_line(host, monkeypatch):
    arguments = [*NEMO, "model=tiny-llama", "precision=bf16", "cluster.interpreter=system"]
    arguments += ["cluster.gpus_per_node=1"]  # of eight a plan takes 88 GiB of the host
    [plan] = compose_plans(arguments, lambda recipe: host)
    monkeypatch.setattr(preflight, "NEEDED_PYTHON", (3, 8))
    monkeypatch.setattr(preflight, "NEEDED_PACKAGES", ())
    monkeypatch.setattr(preflight.metadata, "version", lambda name: "0.19.0")
    lines = preflight.problems_with(plan)
    assert lines == [
        f"vllm 0.19.0: NeMo RL {host.name} works with vllm=={host.vllm} only, whose internals its "
        "FP8 path patches; install that version, or another checkout"
    ]


LOSSES = {
    "none": {},
    "tis": {"level": "token", "truncate": 2.0},
    "bare": {"level": "token"},
    "mis": {"level": "token", "mask": "token", "low": 0.5, "high": 2.0},
    "mis without low": {"level": "token", "mask": "token", "high": 2.0},
    "mis without high": {"level": "token", "mask": "token", "low": 0.5},
    "seq-tis": {"level": "sequence", "truncate": 2.0},
    "seq-mis": {"level": "sequence", "mask": "sequence", "low": 0.5, "high": 2.0},
    "geo-mis": {"level": "token", "truncate": 2.0, "mask": "geometric", "low": 0.9, "high": 1.1},
    "geometric": {"level": "geometric", "truncate": 1.2},
    "mask alone": {"mask": "token", "low": 0.8, "high": 1.25},
    "veto": {"level": "token", "truncate": 2.0, "veto": 0.05},
    "normalize": {"level": "token", "truncate": 2.0, "normalize": True},
    "normalize seq": {"level": "sequence", "truncate": 2.0, "normalize": True},
    "renormalize": {
        "level": "token", "mask": "token", "low": 0.5, "high": 2.0, "renormalize_denominator": True
    },
    "all": {
        "level": "token", "truncate": 1.5, "mask": "sequence", "low": 0.2, "high": 5.0,
        "veto": 0.01, "normalize": True, "renormalize_denominator": True,
    },
}  # fmt: skip


def random_batch(seed, spread):
    """A rollout batch as NeMo RL holds it: first column unpredicted, ragged, one dropped."""
    import torch
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    draw = torch.Generator().manual_seed(seed)
    B, T = 12, 33
    rollout_BT = -torch.rand(B, T, generator=draw) * 3
    log_ratio_BT = torch.randn(B, T, generator=draw) * spread
    lengths_B = torch.randint(2, T, (B,), generator=draw)
    token_mask_BT = (torch.arange(T)[None] < lengths_B[:, None]).float()
    token_mask_BT[:, :2] = 0  # the prompt
    sample_mask_B = torch.ones(B)
    sample_mask_B[3] = 0
    train_BT = rollout_BT + log_ratio_BT
    return BatchedDataDict(
        input_ids=torch.zeros(B, T, dtype=torch.long),
        advantages=torch.randn(B, T, generator=draw),
        prev_logprobs=train_BT,
        generation_logprobs=rollout_BT,
        reference_policy_logprobs=train_BT + 0.1 * torch.randn(B, T, generator=draw),
        token_mask=token_mask_BT,
        sample_mask=sample_mask_B,
    ), train_BT[:, 1:] + 0.2 * torch.randn(B, T - 1, generator=draw)


@imports
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("spread", [0.02, 0.5, 4.0])
@pytest.mark.parametrize("penalty", [0.0, 0.05])
def test_each_correction_through_nemo_rls_own_loss_is_the_multiplier_times_its_clipped_loss(
    name, spread, penalty, nemo_path
):
    """Values, gradients and denominators, micro-batch by micro-batch, for |log_ratio| <= 20."""
    import torch
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    from fp8_nemo.correction.correct import correct
    from fp8_nemo.nemo.policy import corrected, logprob_pair, without_correction
    from fp8_nemo.nemo_config.own.loss import loss_keys, native_correction

    correction = Correction(name=name.split()[0], **LOSSES[name])
    data, current_BT = random_batch(7, spread)
    pair = logprob_pair(data)
    assert pair.log_ratio_BT.abs().max() <= 20
    multiplier = correct(pair, correction)

    recipe = Recipe(correction=correction, precision=Precision(rollout_linear="fp8"))
    settled = replace(settle(recipe, LOCAL_BASE), kl_penalty=penalty)
    keys = {key.removeprefix("loss_fn."): value for key, value in loss_keys(settled).items()}
    assert keys["use_importance_sampling_correction"] is True  # NeMo RL insists on it under FP8
    loss_fn = ClippedPGLossFn(ClippedPGLossConfig(**keys))
    sent = data
    if native_correction(recipe) is None:
        loss_fn = without_correction(loss_fn)
        sent = corrected(data, multiplier, correction.renormalize_denominator)

    def nemo_rls(current_BT):
        mask_BT = sent["token_mask"][:, 1:] * sent["sample_mask"][:, None]
        tokens, sequences = mask_BT.sum(), sent["sample_mask"].sum()
        parts = [slice(0, 5), slice(5, 12)]  # denominators are of the whole batch
        rows = [type(sent)({key: value[part] for key, value in sent.items()}) for part in parts]
        losses = [
            loss_fn(current_BT[part], row, sequences, tokens)[0]
            for part, row in zip(parts, rows, strict=True)
        ]
        return sum(losses)

    def ours(current_BT):
        mask_BT = pair.mask_BT.float()
        if correction.renormalize_denominator:
            mask_BT = multiplier.kept_BT.float()
        ratio_BT = (current_BT - pair.train_BT).exp()
        A_BT = data["advantages"][:, 1:]
        clipped_BT = torch.maximum(-A_BT * ratio_BT, -A_BT * ratio_BT.clamp(0.8, 1.2))
        x_BT = data["reference_policy_logprobs"][:, 1:] - current_BT
        score_BT = (current_BT - current_BT.detach()).exp()
        kl_BT = score_BT * (x_BT.exp() - 1 - x_BT)
        loss_BT = multiplier.value_BT * clipped_BT + penalty * kl_BT
        return (loss_BT * mask_BT).sum() / mask_BT.sum().clamp(min=1)  # all may be rejected

    def value_and_gradient(loss):
        leaf = current_BT.clone().requires_grad_()
        value = loss(leaf)
        value.backward()
        return value.detach(), leaf.grad

    theirs, mine = value_and_gradient(nemo_rls), value_and_gradient(ours)
    torch.testing.assert_close(theirs[0], mine[0], rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(theirs[1], mine[1], rtol=2e-5, atol=1e-7)


@imports
def test_without_a_correction_the_loss_multiplies_by_exactly_one(nemo_path):
    import torch
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    from fp8_nemo.nemo.policy import without_correction

    asked = ClippedPGLossConfig(
        use_importance_sampling_correction=True, reference_policy_kl_penalty=0.0
    )
    never = ClippedPGLossConfig(
        use_importance_sampling_correction=False, reference_policy_kl_penalty=0.0
    )
    data, current_BT = random_batch(3, 1.0)
    counts = (data["sample_mask"].sum(), data["token_mask"].sum())
    plain, _ = without_correction(ClippedPGLossFn(asked))(current_BT, data, *counts)
    stock, _ = ClippedPGLossFn(never)(current_BT, data, *counts)
    corrected, _ = ClippedPGLossFn(asked)(current_BT, data, *counts)
    assert torch.equal(plain, stock) and not torch.equal(plain, corrected)


@imports
def test_the_batch_of_the_caller_is_left_as_it_is(nemo_path):
    from fp8_nemo.correction.correct import correct
    from fp8_nemo.nemo.policy import corrected, logprob_pair

    data, _ = random_batch(5, 1.0)
    before = {key: value.clone() for key, value in data.items()}
    sent = corrected(data, correct(logprob_pair(data), Correction(mask="token", high=1.0)), True)
    assert all((data[key] == before[key]).all() for key in before)
    assert not (sent["advantages"] == data["advantages"]).all()
    assert not (sent["token_mask"] == data["token_mask"]).all()


@imports
@pytest.mark.parametrize(
    "gpus",
    [["cluster.gpus_per_node=1"], ["cluster.gpus_per_node=2", "cluster.rollout_gpus=1"]],
    ids=["shared", "apart"],
)
def test_a_run_goes_as_far_as_asking_ray_for_a_gpu(gpus, tmp_path, nemo_path):
    command = [sys.executable, "-m", "fp8_nemo.recipes.grpo", "backend=nemo", "model=tiny-llama"]
    command += ["glue=stock", "cluster.interpreter=system", *gpus]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "NEMO_RL_ROOT": ROOT or ""}
    done = subprocess.run(
        [*command, f"outputs={tmp_path}"],
        capture_output=True, text=True, env=environment, timeout=400,
    )  # fmt: skip
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()
    assert any("ResourceInsufficientError" in line for line in last), last[-5:]
    [run] = tmp_path.glob("tiny-llama/*/*")
    assert json.loads((run / "environment.json").read_text())["versions"]["vllm"]
    assert "Training dataset loaded" in (run / "log" / "attempt-1.log").read_text()
    assert "Traceback" in (run / "log" / "attempt-1.log").read_text()


@imports
def test_nemo_rls_log_gets_a_part_of_a_step_which_is_read_as_a_mismatch(nemo_path, tmp_path):
    from nemo_rl.utils.logger import Logger

    folder = tmp_path / "log" / "nemo" / "exp_001"
    logger = Logger.__new__(Logger)  # without its writers, which want a whole configuration
    logger.base_log_dir = str(folder)
    answers, longest = 40, 2 * LOGGED_TOKENS // 40
    columns = ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")
    step = {name: [[1] * longest for _ in range(answers)] for name in columns}
    step |= {"content": ["text"] * answers, "sample_loss_mask": [1.0] * answers}
    overheard = OverheardLogger(logger, dict, print)
    overheard.log_batched_dict_as_jsonl(step, "train_data_step1.jsonl")
    [pair] = read_pairs(tmp_path).values()
    assert pair.mask_BT.shape == (answers // 2, longest)
