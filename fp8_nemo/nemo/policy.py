"""The policy that NeMo RL's driver trains: stock workers or ours, watched where the batch is whole.

`Policy.train` is the one place that sees a step's rollout batch unpacked and before it is spread
over ranks: the metrics of the mismatch are taken here, and every correction that NeMo RL's loss
does not know multiplies the advantages here. The clipped losses are linear in the advantage,
`max(-wA r, -wA clip(r)) = w max(-A r, -A clip(r))` for `w >= 0`, so this is the corrected loss
exactly, whatever packing, dynamic batching or context parallelism do to it afterwards.

KV scales are made here from what the workers saw (`glue.recalibrate.source: logprob`): the history
of their ranges is on the driver, is saved with every checkpoint, and the scales in force go into
every refit, also into those for which NeMo RL passes none.

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

from fp8_nemo.correction.correct import Multiplier, correct, correction_metrics
from fp8_nemo.correction.mismatch import (
    LogprobPair,
    entropy_metrics,
    length_metrics,
    mismatch_metrics,
)
from fp8_nemo.glue.manifest import KV_SUFFIXES, MANIFEST, SENTINEL
from fp8_nemo.glue.wire import RefitError
from fp8_nemo.nemo.kv_scales import KvScales
from fp8_nemo.nemo.step_metrics import OPENED
from fp8_nemo.nemo.worker_settings import WorkerSettings

WORKER = "fp8_nemo.nemo.policy_worker.Fp8PolicyWorker"
STOCK_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
RANGES = "fp8_nemo_ranges.json"
"""Beside a checkpoint's weights: ranges and scales, so that a resumed run starts with them."""


class WatchedPolicy(Policy):
    """NeMo RL's `Policy`, with our correction and the metrics of a step in `row`.

    Args:
        settings: of the run.
        arguments: as `setup` gives them to its policy factory.
    """

    def __init__(self, settings: WorkerSettings, **arguments: Any) -> None:
        self.settings, self.correction = settings, settings.correction
        self.row: dict[str, float] = {}
        self.refit_info: dict[str, Any] = {}
        self.proofs: Callable[[], list[dict[str, Any]]] = list
        self.keep_rows: Callable[[Path], None] = lambda folder: None
        self.kv_scales = KvScales(settings.shape.layers, settings.glue.recalibrate)
        if settings.needs_plugin:
            arguments["worker_extension_cls_fqn"] = WORKER
        super().__init__(**arguments)
        if settings.observes and arguments.get("weights_path"):
            self.kv_scales.restore(ranges_file(arguments["weights_path"]))

    def train(self, data: Any, loss_fn: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        """`Policy.train` on the corrected batch; the caller's batch stays as it is.

        Raises:
            LogprobError: a logprob of a real token is not finite.
            RefitError: engines took different weights from different ranks of the trainer.
        """
        pair = logprob_pair(data)
        multiplier = correct(pair, self.correction)
        self.row |= mismatch_metrics(pair) | correction_metrics(multiplier, pair, self.correction)
        self.row |= entropy_metrics(pair)
        longest = self.cfg["generation"]["max_new_tokens"]
        full_B = data["input_lengths"] >= self.cfg["max_total_sequence_length"]
        self.row |= length_metrics(pair.mask_BT.sum(1), longest, full_B)
        self.row |= refit_metrics(self.proofs(), self.refit_info)
        if not self.settings.loss_corrects:
            data = corrected(data, multiplier, self.correction.renormalize_denominator)
        results = super().train(data, loss_fn, *arguments, **options)
        self.kv_scales.trained()
        self.row["train/grad_norm"] = float(torch.as_tensor(results["grad_norm"]).max())
        return results

    def prepare_refit_info(self) -> dict[str, Any] | None:
        """`Policy.prepare_refit_info`, noted: what each refit will send."""
        info = super().prepare_refit_info()
        self.refit_info = info or {}
        return info

    def get_logprobs(self, *arguments: Any, **options: Any) -> Any:
        """`Policy.get_logprobs`; the workers observe Q, K and V where the recipe says so."""
        found = super().get_logprobs(*arguments, **options)
        if self.settings.observes:
            self.kv_scales.saw_ranges()
        return found

    def calibrate_qkv_fp8_scales(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        """KV scales for the next rollout, held against those in force.

        From what the step's logprob forward showed; by NeMo RL's own forward over the given batch
        where there was none, and with `source: forward` always.

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
        """`Policy.stream_weights_via_ipc_zmq`, never without the scales in force."""
        self._note_refit()
        return super().stream_weights_via_ipc_zmq(
            buffer_size_bytes, kv_scales=kv_scales or self.kv_scales.in_force or None
        )

    def broadcast_weights_for_collective(
        self, kv_scales: dict[str, float] | None = None, **options: Any
    ) -> Any:
        """`Policy.broadcast_weights_for_collective`, never without the scales in force."""
        self._note_refit()
        return super().broadcast_weights_for_collective(
            kv_scales=kv_scales or self.kv_scales.in_force or None, **options
        )

    def save_checkpoint(self, weights_path: str, *arguments: Any, **options: Any) -> None:
        """`Policy.save_checkpoint`, ranges beside the weights, and the rows of metrics.jsonl."""
        super().save_checkpoint(weights_path, *arguments, **options)
        self.keep_rows(Path(weights_path).parents[1])
        if self.settings.observes:
            self.kv_scales.save(ranges_file(weights_path))

    def _note_refit(self) -> None:
        """Before the step's training it opens the step; after it, it is a validation's."""
        if "train/grad_norm" not in self.row:
            self.row[OPENED] = True

    def take_row(self) -> dict[str, float]:
        """The metrics since the last call."""
        row, self.row = self.row, {}
        return row


def logprob_pair(data: Any) -> LogprobPair:
    """A rollout batch as NeMo RL holds it, `[B, T]`, as our pair `[B, T - 1]` on the host.

    Raises:
        LogprobError: a logprob of a real token is not finite.
    """
    mask_BT = data["token_mask"][:, 1:].bool() & data["sample_mask"].bool()[:, None]
    return LogprobPair(data["prev_logprobs"][:, 1:], data["generation_logprobs"][:, 1:], mask_BT)


def corrected(data: Any, multiplier: Multiplier, renormalize: bool) -> Any:
    """A shallow copy of the batch whose advantages are multiplied.

    Args:
        data: NeMo RL's batch, `[B, T]`.
        multiplier: `[B, T - 1]`.
        renormalize: rejected tokens leave the mask too, and with it every denominator.
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
    """NeMo RL's own loss with a multiplier of exactly 1.

    Its configuration must ask for the correction under FP8 (seam needs-correction); the loss object
    that trains need not.
    """
    plain = copy.copy(loss_fn)
    plain.use_importance_sampling_correction = False
    plain.truncated_importance_sampling_type = None
    plain.truncated_importance_sampling_ratio = None
    plain.truncated_importance_sampling_ratio_min = None
    return plain


def refit_bytes(info: dict[str, Any]) -> int:
    """Bytes of a refit from NeMo RL's metadata, `{name: (shape, dtype)}`."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in info.values())


def ranges_file(weights_path: str | os.PathLike[str]) -> Path:
    """Where a checkpoint's ranges stand: beside the folder of its weights."""
    return Path(weights_path).parent / RANGES


def refit_metrics(proofs: list[dict[str, Any]], info: dict[str, Any]) -> dict[str, float]:
    """Bytes and proven weights of the last refit, of the worker that proved least.

    Args:
        proofs: what each of vLLM's workers reports; none with `verify: off`.
        info: NeMo RL's handshake, `{name: (shape, dtype)}` in the order of the stream.

    Raises:
        RefitError: with `verify: bytes`, what two ranks of the trainer sent is not the same; each
            engine holds what it was sent, so no engine can know.
    """
    proven = [proof for proof in proofs if proof]
    if not proven:
        return {"refit/bytes": refit_bytes(info), "refit/verified_weights": 0}
    if len({proof["sent"] for proof in proven}) > 1:
        names = [n for n in info if n not in (SENTINEL, MANIFEST) and not n.endswith(KV_SUFFIXES)]
        digests = zip(*(memoryview(proof["sent"]).cast("q") for proof in proven), strict=True)
        raise RefitError(
            f"{name}: the trainer's ranks sent different bytes"
            for name, each in zip(names, digests, strict=True)
            if len(set(each)) > 1
        )
    return {
        "refit/bytes": min(proof["bytes"] for proof in proven),
        "refit/verified_weights": min(proof["verified_weights"] for proof in proven),
    }
