"""The policy that NeMo RL's driver trains, with our correction and the metrics of each step.

`Policy.train` is the one place that sees a step's rollout batch unpacked, before it is spread over
ranks. We therefore measure the mismatch here, and multiply the advantages here for every correction
that NeMo RL's loss does not have. The clipped losses are linear in the advantage,
`max(-wA r, -wA clip(r)) = w max(-A r, -A clip(r))` for `w >= 0`. So this is exactly the corrected
loss, whatever packing, dynamic batching or context parallelism do to it afterwards. It holds for
dual clip, CISPO, and losses without a ratio or with one of the whole sequence, too.

KV scales are made here from the ranges that the workers saw (`glue.recalibrate.source: logprob`).
The driver holds their history and saves it with every checkpoint. The current scales go into every
refit, also into those for which NeMo RL passes none.

Shapes: B sequences, T tokens, the first of which nothing predicts.
"""

# pyright: reportMissingImports=false
# NeMo RL stands on the path of a run, not of a type check.
from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossFn
from nemo_rl.models.policy.lm_policy import Policy

from fp8_nemo.correction.correct import (
    Multiplier,
    advantage_metrics,
    correct,
    correction_metrics,
)
from fp8_nemo.correction.metrics import changed_bytes
from fp8_nemo.correction.mismatch import LogprobPair, length_metrics, mismatch_metrics
from fp8_nemo.correction.routing import replay_metrics
from fp8_nemo.correction.update import (
    CLIPPED,
    MOVED,
    clipped_tokens,
    kl_sum,
    policy_ratio,
    update_metrics,
)
from fp8_nemo.glue.manifest import KV_SUFFIXES, MANIFEST, SENTINEL, sent_again
from fp8_nemo.glue.wire import RefitError
from fp8_nemo.nemo.kv_scales import KvScales
from fp8_nemo.nemo.step_metrics import OPENED
from fp8_nemo.nemo.worker_settings import WORKER, WorkerSettings

RANGES = "fp8_nemo_ranges.json"
"""Beside a checkpoint's weights: ranges and scales, so that a resumed run starts with them."""


class WatchedPolicy(Policy):
    """Extend NeMo RL's `Policy` with our correction and the metrics of a step in `row`.

    Args:
        settings: of the run.
        arguments: as `setup` gives them to its policy factory.
    """

    def __init__(self, settings: WorkerSettings, **arguments: Any) -> None:
        self.settings = settings
        self.row: dict[str, float] = {}
        self.refit_info: dict[str, Any] = {}
        self.proofs: Callable[[], list[dict[str, Any]]] = list
        self.keep_rows: Callable[[Path], None] = lambda folder: None
        self.trained = trained_steps(arguments.get("weights_path"))
        self.kv_scales = KvScales(settings.shape.layers, settings.glue.recalibrate)
        if settings.needs_plugin:
            arguments["worker_extension_cls_fqn"] = WORKER
        super().__init__(**arguments)
        if settings.observes and arguments.get("weights_path"):
            self.kv_scales.restore(ranges_file(arguments["weights_path"]))

    def train(self, data: Any, loss_fn: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Run `Policy.train` on a corrected copy of the batch, and record the step's metrics.

        Raises:
            LogprobError: a logprob of a real token is not finite.
            RefitError: engines took different weights from different ranks of the trainer.
        """
        pair, correction = logprob_pair(data), self.settings.correction
        multiplier = correct(pair, correction)
        self.row |= mismatch_metrics(pair) | correction_metrics(multiplier, pair, correction)
        self.row |= advantage_metrics(multiplier, pair, data["advantages"][:, 1:])
        longest = self.cfg["generation"]["max_new_tokens"]
        full_B = data["input_lengths"] >= self.cfg["max_total_sequence_length"]
        # Answers that were filtered were sampled too.
        self.row |= length_metrics(data["token_mask"][:, 1:].sum(1), longest, full_B)
        self.row |= refit_metrics(self.proofs(), self.refit_info, self.settings)
        if self.settings.replays and self.settings.needs_plugin:
            counted_2 = torch.tensor(self.run_all_workers_single_data("fp8_nemo_take_routes")[0])
            routes_BTLA, last_B1 = data["routed_experts"], data["input_lengths"][:, None] - 1
            routed_BT = torch.arange(routes_BTLA.shape[1], device=last_B1.device) < last_B1
            self.row |= replay_metrics(counted_2, routes_BTLA, routed_BT)
        if not self.settings.loss_corrects:
            data = corrected(data, multiplier, correction.renormalize_denominator)
        if self.settings.needs_plugin:
            loss_fn = watched_loss(loss_fn)
        results = super().train(data, loss_fn, *arguments, **options)
        self.row |= update_metrics(
            results.get("all_mb_metrics", {}), has_ratio=not loss_fn.disable_ppo_ratio
        )
        self.kv_scales.trained()
        self.trained += 1
        if self.settings.precision.plain.scales_loss:
            scale, skipped = self.run_all_workers_single_data("fp8_nemo_take_loss_scale")[0]
            self.row |= {"train/loss_scale": scale, "train/skipped_updates": skipped}
        if self.settings.needs_plugin:
            peaks, retries = zip(
                *self.run_all_workers_single_data("fp8_nemo_take_memory"), strict=True
            )
            self.row |= {"memory/peak": max(peaks), "memory/retries": sum(retries)}
        self.row["train/grad_norm"] = float(torch.as_tensor(results["grad_norm"]).max())
        return results

    def prepare_refit_info(self) -> dict[str, Any] | None:
        """Run `Policy.prepare_refit_info` and keep what it returns: what a whole refit sends."""
        info = super().prepare_refit_info()
        self.refit_info = info or {}
        return info

    def get_logprobs(self, *arguments: Any, **options: Any) -> Any:
        """Run `Policy.get_logprobs`; the workers observe Q, K and V if the recipe says so."""
        found = super().get_logprobs(*arguments, **options)
        if self.settings.observes:
            self.kv_scales.saw_ranges()
        return found

    def calibrate_qkv_fp8_scales(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Return KV scales for the next rollout, and record their change.

        They come from the ranges of the step's logprob forward. Without such a forward, and always
        with `source: forward`, NeMo RL runs its own forward over the given batch.

        Raises:
            RecalibrateError: a scale is zero or not finite.
        """
        settings = self.settings.glue.recalibrate
        if settings.source == "forward":
            options.setdefault("margin", settings.margin)
            found = super().calibrate_qkv_fp8_scales(*arguments, **options)
            self.row |= self.kv_scales.take_scales(found["layers"])
            return found
        if self.kv_scales.needs_forward:
            super().calibrate_qkv_fp8_scales(*arguments, **options)
            self.kv_scales.saw_ranges()
        if self.kv_scales.is_observed:
            amax_L3 = torch.tensor(self.run_all_workers_single_data("fp8_nemo_take_ranges")[0])
            self.row |= self.kv_scales.take_ranges(amax_L3)
        self.kv_scales.done()
        return {"format": "fp8", "margin": settings.margin, "layers": self.kv_scales.in_force}

    def stream_weights_via_ipc_zmq(
        self, buffer_size_bytes: int, kv_scales: dict[str, float] | None = None
    ) -> Any:
        """Run `Policy.stream_weights_via_ipc_zmq`, by default with the current KV scales."""
        self._note_refit()
        return super().stream_weights_via_ipc_zmq(
            buffer_size_bytes, kv_scales=kv_scales or self.kv_scales.in_force or None
        )

    def broadcast_weights_for_collective(
        self, kv_scales: dict[str, float] | None = None, **options: Any
    ) -> Any:
        """Run `Policy.broadcast_weights_for_collective`, by default with the current scales."""
        self._note_refit()
        return super().broadcast_weights_for_collective(
            kv_scales=kv_scales or self.kv_scales.in_force or None, **options
        )

    def save_checkpoint(self, weights_path: str, *arguments: Any, **options: Any) -> None:
        """Run `Policy.save_checkpoint`; keep ranges beside the weights, and the run's rows."""
        super().save_checkpoint(weights_path, *arguments, **options)
        self.keep_rows(Path(weights_path).parents[1])
        if self.settings.observes:
            self.kv_scales.save(ranges_file(weights_path))

    def _note_refit(self) -> None:
        """Record that a refit came before this step's `train`, so that it belongs to this step.

        A refit after `train` belongs to the validation that follows. Workers that add noise are
        told the step first.
        """
        if self.settings.noise.is_on and self.settings.glue.has_receiver:
            self.run_all_workers_single_data("fp8_nemo_set_trained", trained=self.trained)
        if "train/grad_norm" not in self.row:
            self.row[OPENED] = True

    def take_row(self) -> dict[str, float]:
        """Return the metrics recorded since the last call."""
        row, self.row = self.row, {}
        return row


def logprob_pair(data: Any) -> LogprobPair:
    """Convert NeMo RL's rollout batch `[B, T]` to our pair `[B, T - 1]` on the host.

    Raises:
        LogprobError: a logprob of a real token is not finite.
    """
    mask_BT = data["token_mask"][:, 1:].bool() & data["sample_mask"].bool()[:, None]
    return LogprobPair(data["prev_logprobs"][:, 1:], data["generation_logprobs"][:, 1:], mask_BT)


def corrected(data: Any, multiplier: Multiplier, renormalize: bool) -> Any:
    """Return a shallow copy of the batch with multiplied advantages.

    Everything else is the batch's own, `routed_experts` of rejected tokens too: they are context.

    Args:
        data: NeMo RL's batch, `[B, T]`.
        multiplier: `[B, T - 1]`.
        renormalize: also drop rejected tokens from the mask, and so from every denominator.
    """
    data = copy.copy(data)
    advantages_BT = data["advantages"].clone()
    advantages_BT[:, 1:] *= multiplier.value_BT
    data["advantages"] = advantages_BT
    if renormalize:
        token_mask_BT = data["token_mask"].clone()
        token_mask_BT[:, 1:] *= multiplier.kept_BT
        data["token_mask"] = token_mask_BT
    return data


def without_correction(loss_fn: ClippedPGLossFn) -> ClippedPGLossFn:
    """Return a copy of NeMo RL's own loss with a multiplier of exactly 1.

    Under FP8 NeMo RL's configuration must ask for its correction (seam needs-correction); the loss
    object that trains need not.
    """
    plain = copy.copy(loss_fn)
    plain.use_importance_sampling_correction = False
    plain.truncated_importance_sampling_type = None
    plain.truncated_importance_sampling_ratio = None
    plain.truncated_importance_sampling_ratio_min = None
    return plain


class WatchedLoss(ClippedPGLossFn):
    """Compute NeMo RL's loss, and say how far an update has moved the policy."""

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: Any,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return NeMo RL's loss and metrics, with our two as shares of the update's tokens."""
        loss, metrics = super().__call__(
            next_token_logprobs, data, global_valid_seqs, global_valid_toks
        )
        current_BT, train_BT = next_token_logprobs.detach(), data["prev_logprobs"][:, 1:]
        mask_BT = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        ratio_BT = policy_ratio(
            current_BT, train_BT, mask_BT, by_sequence=self.sequence_level_importance_ratios
        )
        clip = (1 - self.ratio_clip_min, 1 + self.ratio_clip_max)
        return loss, metrics | {
            CLIPPED: (clipped_tokens(ratio_BT, mask_BT, clip) / global_valid_toks).item(),
            MOVED: (kl_sum(current_BT, train_BT, mask_BT) / global_valid_toks).item(),
        }


def watched_loss(loss_fn: ClippedPGLossFn) -> WatchedLoss:
    """Return a copy of NeMo RL's loss that measures, too."""
    watched = copy.copy(loss_fn)
    watched.__class__ = WatchedLoss
    assert isinstance(watched, WatchedLoss)
    return watched


def refit_bytes(info: dict[str, Any]) -> int:
    """Return the bytes of a refit from NeMo RL's metadata, `{name: (shape, dtype)}`."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in info.values())


def ranges_file(weights_path: str | os.PathLike[str]) -> Path:
    """Return the path of a checkpoint's ranges, beside the folder of its weights."""
    return Path(weights_path).parent / RANGES


def trained_steps(weights_path: str | os.PathLike[str] | None) -> int:
    """Return the step of a checkpoint by its folder, `step_7/policy/weights`; 0 without one."""
    return int(Path(weights_path).parents[1].name.rpartition("_")[2]) if weights_path else 0


def refit_metrics(
    proofs: list[dict[str, Any]], info: dict[str, Any], settings: WorkerSettings
) -> dict[str, float]:
    """Return a refit's metrics: those of the worker that proved least, and the bytes changed.

    Args:
        proofs: what each of vLLM's workers reports; none with `verify: off`.
        info: NeMo RL's handshake, `{name: (shape, dtype)}` in the order of the stream.
        settings: of the run.

    Raises:
        RefitError: with `verify: bytes`, two ranks of the trainer sent different bytes. No engine
            can notice, as each holds what it was sent.
    """
    proven = [proof for proof in proofs if proof]
    if not proven:
        return {"refit/bytes": refit_bytes(info), "refit/verified_weights": 0}
    if len({proof["sent_digests"] for proof in proven}) > 1:
        adapted = settings.adapted(proven[0]["number"])
        sent = sent_again(info, adapted) if adapted else info
        names = [n for n in sent if n not in (SENTINEL, MANIFEST) and not n.endswith(KV_SUFFIXES)]
        by_engine = (memoryview(proof["sent_digests"]).cast("q") for proof in proven)
        digests = zip(*by_engine, strict=True)
        raise RefitError(
            f"{name}: the trainer's ranks sent different bytes"
            for name, each in zip(names, digests, strict=True)
            if len(set(each)) > 1
        )
    counted = changed_bytes(*(sum(p[key] for p in proven) for key in ("changed", "sampled")))
    return counted | {
        "refit/bytes": min(proof["bytes"] for proof in proven),
        "refit/verified_weights": min(proof["verified_weights"] for proof in proven),
    }
