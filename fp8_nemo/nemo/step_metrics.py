"""Join what NeMo RL's logger gets of a step and what our policy saw into one row of metrics.

NeMo RL's own log stays as it is, but for the answers of a step, of which it gets a part. It logs
validation before a step's metrics, and a step's times last, so the times close the row; the first
validation, before any step, is row 0.

NeMo RL's time of a whole step includes the validation and the saving after it. Ours includes
neither, on both backends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

TIMES = {
    "generation": "time/rollout",
    "policy_and_reference_logprobs": "time/logprob",
    "policy_training": "time/train",
    "prepare_for_generation/total": "time/refit",
    "recompute_kv_scales": "time/recalibrate",
    "total_step_time": "time/step",
}
"""NeMo RL's timers by our names. Its refit opens the step that uses it."""
ASYNCHRONOUS_TIMES = {"exposed_generation": "time/wait", "weight_sync": "time/refit"}
"""The same of its asynchronous loop, whose refit ends a step. Engines sample meanwhile, and the
trainer waits for samples: before the step, and before the refit until engines have none left."""
ASYNCHRONOUS = {"avg_trajectory_age": "rollout/age", "trajectory_duration_s/max": "time/rollout"}
"""That loop's metrics of a step's samples, by our names."""
BATCHES = "dynamic_sampling_num_gen_batches"
OPENED = "refit opened the step"
"""Set in our policy's row when the step began with a refit.

NeMo RL also refits before validating. The step after that starts with a fresh engine, so its
`time/refit` is dropped.
"""


LOGGED_TOKENS = 2**16
"""Of a step's answers in NeMo RL's log, padding included: 5 MB. All of 128 answers of 4k tokens are
38 MB, written between two steps, which were 1.0 to 2.1 s apart (device-8b-4-h100.json). 2,048 of 8k
are 33 times as many."""


class OverheardLogger:
    """Wrap NeMo RL's `Logger`, and also hand each finished step to `write`.

    Args:
        logger: NeMo RL's.
        take_row: what our policy saw of the step.
        write: called with one row per step.
    """

    def __init__(
        self,
        logger: Any,
        take_row: Callable[[], dict[str, float]],
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        self._logger, self._take_row, self._write = logger, take_row, write
        self._row: dict[str, Any] = {}
        self._validation = 0.0

    def __getattr__(self, name: str) -> Any:
        """Return everything else from NeMo RL's logger."""
        return getattr(self._logger, name)

    def log_metrics(
        self,
        metrics: dict[str, Any],
        step: int,
        prefix: str | None = "",
        *arguments: Any,
        **options: Any,
    ) -> None:
        """Log as NeMo RL does, and collect the metrics of our row."""
        self._logger.log_metrics(metrics, step, prefix, *arguments, **options)
        if prefix == "validation" and "accuracy" in metrics:
            self._row["val/accuracy"] = float(metrics["accuracy"])
            if step == 0:
                self._close(0)
        elif prefix == "timing/validation" and step > 0:  # row 0 is closed before its times come
            self._validation = metrics.get("total_validation_time", 0.0)
        elif prefix == "train" and "reward" in metrics:  # the rollout's own come under it too
            self._row["reward/mean"] = float(metrics["reward"])
            self._take({BATCHES: "rollout/batches"} | ASYNCHRONOUS, metrics)
        elif prefix == "timing/train":
            self._take(TIMES | ASYNCHRONOUS_TIMES, metrics)
            if "time/step" in self._row:
                self._row["time/step"] -= self._validation + metrics.get("checkpointing", 0.0)
            self._close(step, refits="weight_sync" in metrics)

    def log_batched_dict_as_jsonl(self, to_log: dict[str, Any], filename: str) -> None:
        """Log as NeMo RL does; of a step's answers every k-th, with `LOGGED_TOKENS` at the most.

        Args:
            to_log: lists of one entry an answer; `token_ids` among them, unless it is a validation.
            filename: in NeMo RL's log directory.
        """
        padded = sum(map(len, to_log.get("token_ids", ())))
        every = max(1, math.ceil(padded / LOGGED_TOKENS))
        part = {name: values[::every] for name, values in to_log.items()}
        self._logger.log_batched_dict_as_jsonl(part, filename)

    def row_so_far(self, step: int, seen: dict[str, float]) -> dict[str, Any]:
        """Return what is known of a step before NeMo RL has logged it; its rest may never come."""
        return {"step": step} | {key: seen[key] for key in seen if key != OPENED} | self._row

    def _take(self, names: dict[str, str], metrics: dict[str, Any]) -> None:
        self._row |= {ours: metrics[theirs] for theirs, ours in names.items() if theirs in metrics}

    def _close(self, step: int, *, refits: bool = False) -> None:
        seen = self._take_row()
        if not seen.pop(OPENED, False) and not refits:
            self._row.pop("time/refit", None)  # the engine already had these weights
        self._write({"step": step} | seen | self._row)
        self._row, self._validation = {}, 0.0
