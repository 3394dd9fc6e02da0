"""Our corrections against those of verl, slime and NeMo RL, run from their own sources.

python -m benchmarks.learning.correction_peers --out benchmarks/results/correction-peers.json \
    [--verl CLONE] [--slime examples/train_infer_mismatch_helper/mis.py] [--nemo CLONE]

Of verl and slime only the functions that compute weights and masks are taken out of their files, so
nothing of theirs need be installed; NeMo RL needs its packages (docs/install.md). Its weight of a
token is the gradient of its own loss for that token's advantage. Batches: random ones of four
spreads with sequences of 0 to 16,384 tokens, ratios at the clamp, ratios that lie exactly on a
bound, nothing but padding. Each row says the largest difference of a multiplier, and how many
tokens one side keeps that the other rejects.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import ast
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks import record
from fp8_nemo.correction.correct import correct
from fp8_nemo.correction.mismatch import LogprobPair
from fp8_nemo.recipe.options.correction import Correction
from fp8_nemo.recipe.plain import to_json
from fp8_nemo.runs.provenance import environment

TIS, SEQ = {"level": "token", "truncate": 2.0}, {"level": "sequence", "truncate": 2.0}
Found = tuple[Tensor, Tensor]
"""Multiplier and kept tokens, `[B, T]`."""
Peer = Callable[[LogprobPair], Found]


def batches() -> Iterator[tuple[str, LogprobPair]]:
    """Yield batches by name, with FP32 log ratios, as the peers take them."""
    draw = torch.Generator().manual_seed(0)
    for spread in (0.01, 0.1, 0.5, 4.0):
        lengths = torch.randint(0, 513, (48,), generator=draw)
        lengths[:3] = torch.tensor([0, 1, 512])
        yield f"random, spread {spread}", _pair(lengths, spread, draw)
    lengths = torch.tensor([0, 1, 4096, 16384])
    yield "long, spread 0.02", _pair(lengths, 0.02, draw)
    yield "at the clamp", _of([[25.0, -25.0, 0.0], [19.9, 0.1, 0.0], [-30.0, -1.0, -1.0]])
    edge = [math.log(2.0), math.log(0.5), math.log(2.0) + 1e-6]
    yield "on a bound", _of([edge, [0.0, 0.0, 0.0], [math.log(1.001)] * 3])
    yield (
        "padding alone",
        LogprobPair(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3).bool()),
    )


def _pair(lengths: Tensor, spread: float, draw: torch.Generator) -> LogprobPair:
    T = int(lengths.max())
    mask_BT = torch.arange(T) < lengths[:, None]
    rollout_BT = -torch.empty(len(lengths), T).exponential_(generator=draw)
    noise_BT = torch.randn(len(lengths), T, generator=draw) * spread - spread**2 / 2
    train_BT = (rollout_BT + noise_BT).masked_fill(~mask_BT, 0.0)
    return LogprobPair(train_BT, rollout_BT.masked_fill(~mask_BT, 0.0), mask_BT)


def _of(log_ratio: list[list[float]]) -> LogprobPair:
    x_BT = torch.tensor(log_ratio)
    return LogprobPair(x_BT, torch.zeros_like(x_BT), torch.ones_like(x_BT).bool())


def functions_of(file: Path, names: set[str], given: dict[str, Any]) -> SimpleNamespace:
    """Return the named functions and constants of a source file, run alone."""
    tree = ast.parse(file.read_text())
    taken = [
        node
        for node in tree.body
        if (isinstance(node, ast.FunctionDef) and node.name in names)
        or (
            isinstance(node, ast.Assign | ast.AnnAssign)
            and any(isinstance(t, ast.Name) and t.id in names for t in _targets(node))
        )
    ]
    module = ast.Module(body=taken, type_ignores=[])
    space: dict[str, Any] = {"torch": torch, "math": math, "Any": Any} | given
    exec(compile(module, str(file), "exec"), space)
    return SimpleNamespace(**space)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def verl_rows(root: Path) -> Iterator[tuple[str, Correction, Peer]]:
    """Yield verl's decoupled correction (verl/trainer/ppo/rollout_corr_helper.py)."""
    maths = functions_of(root / "verl/utils/torch_functional.py", {"masked_sum", "masked_mean"}, {})
    import typing

    helper = functions_of(
        root / "verl/trainer/ppo/rollout_corr_helper.py",
        {
            "SAFETY_BOUND", "SUPPORTED_ROLLOUT_RS_OPTIONS", "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS",
            "_parse_rollout_rs_thresholds", "compute_rollout_rejection_mask", "compute_rs_metrics",
            "compute_rollout_correction_weights", "compute_is_metrics",
        },
        {"verl_F": maths, "Optional": typing.Optional},
    )  # fmt: skip

    def weights(level: str, normalize: bool = False) -> Peer:
        def found(pair: LogprobPair) -> Found:
            x_BT, mask_BT = pair.log_ratio_BT.float(), pair.mask_BT.float()
            value_BT, _ = helper.compute_rollout_correction_weights(
                x_BT, mask_BT, level, 2.0, normalize
            )
            return value_BT * mask_BT, pair.mask_BT

        return found

    def rejects(option: str, bounds: str, level: str | None = None) -> Peer:
        def found(pair: LogprobPair) -> Found:
            x_BT, mask_BT = pair.log_ratio_BT.float(), pair.mask_BT.float()
            kept_BT, _ = helper.compute_rollout_rejection_mask(x_BT, mask_BT, option, bounds)
            value_BT = weights(level)(pair)[0] if level else mask_BT
            return value_BT * kept_BT, kept_BT.bool()

        return found

    yield "token_is", Correction(**TIS), weights("token")
    yield "seq_is", Correction(**SEQ), weights("sequence")
    yield "token_is, normalized", Correction(**TIS, normalize=True), weights("token", True)
    yield "seq_is, normalized", Correction(**SEQ, normalize=True), weights("sequence", True)
    inverse = {"low": 0.5, "high": 2.0}
    yield "token_k1 0.5_2.0", Correction(mask="token", **inverse), rejects("token_k1", "0.5_2.0")
    yield (
        "seq_sum_k1 0.5_2.0",
        Correction(mask="sequence", **inverse),
        rejects("seq_sum_k1", "0.5_2.0"),
    )
    yield (
        "seq_mean_k1 0.999_1.001",
        Correction(mask="geometric", low=1 / 1.001, high=1 / 0.999),
        (rejects("seq_mean_k1", "0.999_1.001")),
    )
    asymmetric = Correction(mask="token", low=1 / 1.6, high=1 / 0.6)
    yield "token_k1 0.6_1.6, our bounds inverted", asymmetric, rejects("token_k1", "0.6_1.6")
    named = Correction(mask="token", low=0.6, high=1.6)
    yield "token_k1 0.6_1.6, as documented", named, rejects("token_k1", "0.6_1.6")
    ours = {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}
    for theirs, of in ours.items():
        for kind in ("k2", "k3"):
            row = Correction(mask=f"{of}-{kind}", high=0.01)
            yield f"{theirs}_{kind} 0.01", row, rejects(f"{theirs}_{kind}", "0.01")
    both = Correction(**TIS, mask="mean-k3", high=0.01)
    yield "k3_rs_token_tis", both, rejects("seq_mean_k3", "0.01", "token")


def slime_rows(file: Path) -> Iterator[tuple[str, Correction, Peer]]:
    """Yield slime's example (examples/train_infer_mismatch_helper/mis.py)."""
    names = {"masked_sum", "masked_mean", "masked_min", "masked_max", "metrics_append"}
    names |= {"calculate_veto_mask", "truncate", "clip", "mask", "add_ppl_metrics"}
    mis = functions_of(file, names | {"compute_mis_weights"}, {})

    def peer(level: str, mode: str, **more: Any) -> Peer:
        usual = {
            "use_tis": True, "tis_level": level, "tis_mode": mode, "tis_lower_bound": 0.5,
            "tis_upper_bound": 2.0, "use_rs": False, "rs_level": "token", "rs_lower_bound": None,
            "rs_upper_bound": None, "rs_veto_threshold": None, "tis_batch_normalize": False,
        }  # fmt: skip
        settings = SimpleNamespace(**usual | more)

        def found(pair: LogprobPair) -> Found:
            lengths = pair.mask_BT.sum(1).tolist()
            rows = [
                [x_T[:n] for x_T, n in zip(side_BT.float(), lengths, strict=True)]
                for side_BT in (pair.train_BT, pair.rollout_BT, pair.mask_BT)
            ]
            weights, masks, _ = mis.compute_mis_weights(
                settings, train_log_probs=rows[0], rollout_log_probs=rows[1], loss_masks=rows[2]
            )
            value_BT, kept_BT = torch.zeros(pair.mask_BT.shape), torch.zeros(pair.mask_BT.shape)
            for b, (value_T, kept_T) in enumerate(zip(weights, masks, strict=True)):
                value_BT[b, : len(value_T)] = value_T * kept_T
                kept_BT[b, : len(kept_T)] = kept_T
            return value_BT, kept_BT.bool()

        return found

    bounds = {"low": 0.5, "high": 2.0}
    for level in ("token", "sequence", "geometric"):
        truncated = Correction(level=level, truncate=2.0)
        yield f"{level} truncate", truncated, peer(level, "truncate")
        clipped = Correction(level=level, truncate_low=0.5, truncate=2.0)
        yield f"{level} clip", clipped, peer(level, "clip")
        yield f"{level} mask", Correction(level=level, mask=level, **bounds), peer(level, "mask")
    for level in ("sequence", "geometric"):
        rejecting = Correction(**TIS, mask=level, **bounds)
        yield (
            f"token truncate, rs {level}",
            rejecting,
            peer("token", "truncate", use_rs=True, rs_level=level),
        )
    shipped = {"use_rs": True, "rs_veto_threshold": 1e-4, "tis_batch_normalize": True}
    ours = Correction(**TIS, mask="token", **bounds, veto=1e-4, normalize=True)
    yield "mis.yaml as shipped", ours, peer("token", "truncate", **shipped)


def nemo_rows(root: Path) -> Iterator[tuple[str, Correction, Peer]]:
    """Yield NeMo RL's ClippedPGLossFn; a weight is the loss's gradient for the advantage."""
    sys.path.insert(0, str(root))
    from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    def peer(kind: str | None, low: float | None, high: float | None) -> Peer:
        loss = ClippedPGLossFn(
            ClippedPGLossConfig(
                use_importance_sampling_correction=True, reference_policy_kl_penalty=0.0,
                truncated_importance_sampling_type=kind, truncated_importance_sampling_ratio=high,
                truncated_importance_sampling_ratio_min=low, token_level_loss=True,
            )
        )  # fmt: skip

        def found(pair: LogprobPair) -> Found:
            def shifted(x_BT: Tensor) -> Tensor:
                return torch.nn.functional.pad(x_BT.float(), (1, 0))

            advantages_BT = shifted(torch.ones_like(pair.train_BT)).requires_grad_()
            data = BatchedDataDict(
                {
                    "advantages": advantages_BT, "token_mask": shifted(pair.mask_BT),
                    "sample_mask": torch.ones(len(pair.mask_BT)),
                    "prev_logprobs": shifted(pair.train_BT),
                    "generation_logprobs": shifted(pair.rollout_BT),
                    "reference_policy_logprobs": shifted(pair.train_BT),
                    "input_ids": shifted(pair.train_BT).long(),
                    "input_lengths": pair.mask_BT.sum(1),
                }
            )  # fmt: skip
            tokens = pair.mask_BT.sum().clamp(min=1)
            value, _ = loss(pair.train_BT.float(), data, torch.tensor(len(pair.mask_BT)), tokens)
            value.backward()
            assert advantages_BT.grad is not None
            weight_BT = -advantages_BT.grad[:, 1:] * tokens
            return weight_BT, pair.mask_BT & (weight_BT != 0)

        return found

    yield "no type", Correction(level="token"), peer(None, None, None)
    yield "tis", Correction(**TIS), peer("tis", None, 2.0)
    yield "tis with a minimum", Correction(**TIS, truncate_low=0.5), peer("tis", 0.5, 2.0)
    icepop = Correction(level="token", mask="token", low=0.5, high=5.0)
    yield "icepop", icepop, peer("icepop", 0.5, 5.0)
    masked = Correction(level="token", mask="geometric", low=0.999, high=1.002)
    yield "seq-mask-tis", masked, peer("seq-mask-tis", 0.999, 1.002)


def compared(name: str, correction: Correction, peer: Peer) -> dict[str, Any]:
    """Compare one variant over all batches: largest relative difference, and where."""
    row: dict[str, Any] = {"variant": name, "largest": 0.0, "at": "", "kept otherwise": {}}
    for batch, pair in batches():
        if not pair.mask_BT.any():
            continue
        ours = correct(pair, correction)
        value_BT, kept_BT = peer(pair)
        agree_BT = pair.mask_BT & (ours.kept_BT == kept_BT)
        if disagree := int((pair.mask_BT & ~agree_BT).sum()):
            row["kept otherwise"][batch] = disagree
        there = (ours.value_BT - value_BT).abs()[agree_BT] / value_BT.abs()[agree_BT].clamp(min=1)
        if there.numel() and there.max() > row["largest"]:
            row["largest"], row["at"] = there.max().item(), batch
    return row


def padding_alone(peer: Peer) -> str:
    """Return what a peer makes of a batch without a real token."""
    pair = dict(batches())["padding alone"]
    try:
        value_BT, _ = peer(pair)
        return "zeros" if not value_BT.any() else "other than zeros"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def commit_of(path: Path) -> str | None:
    """Return the commit of a clone; None if it is no clone."""
    folder = path if path.is_dir() else path.parent
    done = subprocess.run(
        ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() or None


def main() -> None:
    """Compare the peers, print the rows, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    for peer in ("verl", "slime", "nemo"):
        parser.add_argument(f"--{peer}", type=Path)
        parser.add_argument(f"--{peer}-commit")
    options = vars(parser.parse_args())
    content: dict[str, Any] = {
        "command": record.command(),
        "environment": environment(),
        "peers": {},
    }
    for peer, rows in (("verl", verl_rows), ("slime", slime_rows), ("nemo", nemo_rows)):
        if not (path := options[peer]):
            continue
        commit = options[f"{peer}_commit"] or commit_of(path)
        found = [compared(*row) | {"padding": padding_alone(row[2])} for row in rows(path)]
        content["peers"][peer] = {"commit": commit, "rows": found}
        for row in found:
            print(peer, row, flush=True)
    options["out"].write_text(to_json(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
