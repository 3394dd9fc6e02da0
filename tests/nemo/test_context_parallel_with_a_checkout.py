"""Long answers in NeMo RL's own code: packed, chunked, over two context-parallel ranks on a CPU.

Set NEMO_RL_ROOT to a checkout, in an environment that holds NeMo RL's packages (docs/install.md).
Values alone: the backward pass of its gather over ranks asks for a GPU.
"""

# pyright: reportMissingImports=false
import importlib.util
import json
import os
import sys
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch

from fp8_nemo.correction.correct import correct
from fp8_nemo.nemo_config.keys import MEGATRON
from fp8_nemo.plan.plan import plan_recipe
from fp8_nemo.recipe.compose import compose
from fp8_nemo.recipe.options.correction import Correction
from tests.nemo.test_with_a_checkout import ROOT, random_batch

pytestmark = pytest.mark.skipif(
    not ROOT or importlib.util.find_spec("megatron") is None,
    reason="NEMO_RL_ROOT: no checkout of NeMo RL, or not its packages",
)
RANKS, VOCAB = 2, 17
CORRECTIONS = {
    "none": {},
    "geo-mis": {"level": "token", "truncate": 2.0, "mask": "geometric", "low": 0.9, "high": 1.1},
    "mis": {"level": "token", "mask": "token", "low": 0.5, "high": 2.0},
}


def settings_of_loss():
    """NeMo RL's loss without a correction of its own, which also measures."""
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn

    from fp8_nemo.nemo.policy import watched_loss

    return watched_loss(
        ClippedPGLossFn(
            ClippedPGLossConfig(
                reference_policy_kl_penalty=0.05, ratio_clip_min=0.2, ratio_clip_max=0.2,
                ratio_clip_c=None, use_on_policy_kl_approximation=False,
                use_importance_sampling_correction=False, token_level_loss=True,
                truncated_importance_sampling_ratio=None, force_on_policy_ratio=False,
            )
        )
    )  # fmt: skip


def loss_on(rank, ranks, group, alone, correction, chunk):
    """Loss and metrics of a rank that holds its share of each packed sequence's logits."""
    from nemo_rl.algorithms.loss.utils import prepare_packed_loss_input
    from nemo_rl.algorithms.loss.wrapper import SequencePackingFusionLossWrapper
    from nemo_rl.distributed.model_utils import _get_tokens_on_this_cp_rank

    from fp8_nemo.nemo.policy import corrected, logprob_pair

    data, _ = random_batch(5, 0.5)
    draw = torch.Generator().manual_seed(6)
    lengths_B = data["token_mask"].sum(1).long() + 2
    data["input_ids"] = torch.randint(VOCAB, data["input_ids"].shape, generator=draw)
    multiplier = correct(logprob_pair(data), Correction(**correction))
    data = corrected(data, multiplier, False)
    multiple = 2 * RANKS
    padded_B = (lengths_B + multiple - 1) // multiple * multiple
    starts, padded = (
        torch.cat([torch.zeros(1), each.cumsum(0)]).int() for each in (lengths_B, padded_B)
    )
    whole_1TV = torch.randn(1, int(padded[-1]), VOCAB, generator=draw)
    mine = [
        _get_tokens_on_this_cp_rank(whole_1TV[:, start:end], rank, ranks, seq_dim=1)
        for start, end in pairwise(padded)
    ]
    mask_BT = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    loss, metrics = SequencePackingFusionLossWrapper(
        loss_fn=settings_of_loss(),
        prepare_fn=partial(prepare_packed_loss_input, chunk_size=chunk),
        cu_seqlens_q=starts, cu_seqlens_q_padded=padded, vocab_parallel_rank=0,
        vocab_parallel_group=alone, context_parallel_group=group,
    )(torch.cat(mine, 1), data, data["sample_mask"].sum(), mask_BT.sum())  # fmt: skip
    return {"loss": float(loss)} | {name: float(value) for name, value in metrics.items()}


def run_rank(rank, folder):
    """One process of two: every correction and chunk, alone and beside the other."""
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    alone = [torch.distributed.new_group([each]) for each in range(RANKS)][rank]
    both = torch.distributed.group.WORLD
    found = {
        name: {
            "alone": loss_on(0, 1, alone, alone, correction, None),
            "chunked": loss_on(0, 1, alone, alone, correction, 7),
            "both": loss_on(rank, RANKS, both, alone, correction, None),
            "both, chunked": loss_on(rank, RANKS, both, alone, correction, 7),
        }
        for name, correction in CORRECTIONS.items()
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def test_loss_correction_and_metrics_are_the_same_over_two_ranks_and_in_chunks(
    tmp_path, monkeypatch
):
    paths = [str(ROOT), str(Path(__file__).parents[2]), *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    torch.multiprocessing.spawn(run_rank, (str(tmp_path),), nprocs=RANKS)
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for name, ways in found.items():
            for way in ("chunked", "both", "both, chunked"):
                assert ways[way] == pytest.approx(ways["alone"], rel=1e-5, abs=1e-6), (name, way)
        losses = {round(ways["alone"]["loss"], 5) for ways in found.values()}
        assert len(losses) == len(CORRECTIONS)  # each correction changes it


def test_nemo_rl_packs_by_the_keys_of_every_long_plan():
    from nemo_rl.models.megatron.data import _get_pack_sequence_parameters_for_megatron

    prefix = f"{MEGATRON}."
    for context, tensor, precision in product((1, 2, 4), (1, 2), ("bf16", "fp8-e2e")):
        words = [f"model.parallel.context={context}", f"model.parallel.tensor={tensor}"]
        [recipe] = compose(["model=llama31-8b", "grpo=long-32k", f"precision={precision}", *words])
        keys = plan_recipe(recipe).nemo.overrides
        given = {k.removeprefix(prefix): v for k, v in keys.items() if k.startswith(prefix)}
        given["fp8_cfg"] = {
            "enabled": given["fp8_cfg.enabled"], "fp8_recipe": given["fp8_cfg.fp8_recipe"]
        }  # fmt: skip
        longest = keys["policy.max_total_sequence_length"]
        single, whole, fixed = _get_pack_sequence_parameters_for_megatron(
            given, keys["policy.make_sequence_length_divisible_by"], longest
        )
        assert longest % single == 0 and fixed is None
        assert whole == (1 if precision == "bf16" else 128 * (2 * context if context > 1 else 1))
        assert longest % whole == 0  # a full micro-batch gets no padding more than is counted
