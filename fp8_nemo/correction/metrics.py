"""Name every number that a step writes to metrics.jsonl, with its unit and meaning.

Both backends write the same keys. Means are over real tokens, under the mask before any correction.
docs/metrics.md is rendered from this table, by
`python -m fp8_nemo.correction.metrics > docs/metrics.md`.
"""

from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
    """Describe one key: `Metric("nats per token", "k3 estimate of KL(rollout || train)")`."""

    unit: str
    meaning: str


SHARE = "share"
BAR = "\\|"  # in a table of Markdown
METRICS = {
    "step": Metric("count", "the step; 0 is before training"),
    "reward/mean": Metric("reward", "mean of all answers of the step; 0 to 1 unless shaped"),
    "val/accuracy": Metric(SHARE, "right answers to held-out problems"),
    "rollout/tokens": Metric("tokens", "response tokens of the step"),
    "rollout/mean_length": Metric("tokens", "mean length of a response"),
    "rollout/cut_fraction": Metric(SHARE, "responses as long as they may be: cut, most likely"),
    "rollout/age": Metric("steps", "that the samples' weights are behind, mean; asynchronous"),
    "rollout/batches": Metric("batches", "that dynamic sampling needed for the step"),
    "mismatch/kl": Metric("nats per token", "k3 estimate of KL(rollout || train)"),
    "mismatch/answer_kl": Metric("nats per answer", "the same, summed over an answer"),
    "mismatch/differing_answers": Metric(
        SHARE, "answers with a token whose absolute log ratio is above 1e-5"
    ),
    "mismatch/token_mult_prob_error": Metric(
        "ratio", "mean exp of the absolute log ratio; 1: none"
    ),
    "mismatch/abs_log_ratio_p99": Metric("nats", "99th percentile of the absolute log ratio"),
    "mismatch/abs_log_ratio_max": Metric("nats", "largest absolute log ratio"),
    "mismatch/ess": Metric(SHARE, "effective sample share of the unmodified token ratios"),
    "correction/multiplier_mean": Metric("ratio", "mean of what multiplies a token's loss"),
    "correction/ess": Metric(SHARE, "effective sample share of the multipliers; 1: all are equal"),
    "correction/clipped_fraction": Metric(SHARE, "tokens whose ratio was truncated"),
    "correction/masked_fraction": Metric(SHARE, "tokens that were rejected"),
    "correction/clipped_advantage": Metric(
        "advantage", "mean of the tokens whose ratio was truncated, before it"
    ),
    "correction/masked_advantage": Metric("advantage", "mean of the tokens that were rejected"),
    "replay/rerouted_fraction": Metric(
        SHARE, "routes (a token in a layer) that the trainer would have chosen otherwise"
    ),
    "replay/missing_fraction": Metric(SHARE, "routes that the engine did not report"),
    "refit/bytes": Metric("bytes", "sent by the last refit"),
    "refit/verified_weights": Metric(
        "weights", "quantized weights that the engine was proven to hold; 0 without any, or a proof"
    ),
    "refit/changed_bytes": Metric(
        SHARE,
        "of the engine's linears, scales too: bytes that the last refit changed, but the first; "
        "by a sample",
    ),
    "recalibrate/saturated_fraction": Metric(
        SHARE, "of the Q, K and V ranges of all layers: those beyond the scale in force"
    ),
    "recalibrate/max_drift": Metric(SHARE, "largest relative change of a KV scale"),
    "train/grad_norm": Metric(
        "norm",
        "largest gradient norm of the step's updates, inside NeMo RL the last one's, unclipped",
    ),
    "train/loss_scale": Metric("factor", "on the loss after the step's updates; FP16 alone"),
    "train/skipped_updates": Metric("updates", "left out, as an FP16 gradient overflowed"),
    "train/entropy": Metric("nats per token", "of the policy, estimated on the sampled tokens"),
    "train/kl": Metric(
        "nats per token", "k3 estimate of KL(train || current) over the step's updates"
    ),
    "train/clip_fraction": Metric(
        SHARE, "tokens whose ratio of current to train was outside the algorithm's clip"
    ),
    "train/ratio_max": Metric("ratio", "largest ratio of current to train"),
    "memory/peak": Metric(
        "GiB",
        "most that PyTorch had allocated on a trainer's GPU since the update before, in a first "
        "row since the start; a plan's `train` and `logprob` have a reserve more",
    ),
    "memory/retries": Metric(
        "retries",
        "of PyTorch's allocator in the same time, on all trainer's GPUs: one was full, and PyTorch "
        "gave its cache back",
    ),
    "health/state": Metric("0, 1, 2", "healthy, watch, unstable (`health.py`)"),
    "time/rollout": Metric("seconds", "sampling; asynchronous: beside the training of a step"),
    "time/wait": Metric("seconds", "that the trainer waited for samples; asynchronous"),
    "time/logprob": Metric("seconds", "scoring by the trainer"),
    "time/train": Metric("seconds", "updates"),
    "time/refit": Metric(
        "seconds", "copying the weights that this step sampled with; asynchronous: those it made"
    ),
    "time/recalibrate": Metric("seconds", "making KV scales"),
    "time/step": Metric("seconds", "the step, without validation and saving"),
}


def changed_bytes(changed: int, sampled: int) -> dict[str, float]:
    """Return the metric of what a refit changed; none where nothing was compared.

    A step may move all masters and change few bytes of the engine, because a format rounds a small
    update away until several have added up. The rollout then lags behind the trainer.

    Args:
        changed: bytes that differ from those before.
        sampled: bytes that were compared.
    """
    return {"refit/changed_bytes": changed / sampled} if sampled else {}


def page() -> str:
    """Render the table as docs/metrics.md."""
    rows = [
        f"| `{key}` | {unit} | {meaning.replace('|', BAR)} |"
        for key, (unit, meaning) in METRICS.items()
    ]
    about = (
        "A run writes one JSON object a step to `metrics.jsonl`, with these keys. A key is missing "
        "where it means nothing: a BF16 cache has no scales. `null` stands for NaN and infinities."
    )
    return "\n".join(
        ["# Metrics", "", about, "", "| key | unit | meaning |", "|---|---|---|", *rows]
    )


if __name__ == "__main__":
    print(page())
