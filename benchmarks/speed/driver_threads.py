"""Measure what PyTorch's threads cost NeMo RL's driver: it shards a batch, and we take metrics.

PYTHONPATH=/path/to/NeMo-RL python -m benchmarks.speed.driver_threads --out FILE.json

The batch is what GRPO trains on: eight tensors of 128 or 2,048 answers. The driver does both before
GPUs train. Run it on an idle machine.
"""

# pyright: reportMissingImports=false
# NeMo RL stands on the path of a run, not of a type check.
from __future__ import annotations

import argparse
import timeit
from functools import partial
from typing import Any

import torch

from benchmarks import record
from fp8_nemo.correction.correct import advantage_metrics, correct, correction_metrics
from fp8_nemo.correction.mismatch import LogprobPair, mismatch_metrics
from fp8_nemo.recipe.options.correction import Correction

BATCHES = {"128 x 4k": (128, 4096, 8192), "2,048 x 4k": (2048, 4096, 8192)}
"""Answers, their longest in tokens, and tokens of a micro-batch."""
RANKS = 4


def batch_of(answers: int, longest: int) -> dict[str, torch.Tensor]:
    """Return tensors like those that a step trains on, `[answers, longest]` or `[answers]`."""
    generator = torch.Generator().manual_seed(0)
    rollout_BT = -torch.rand(answers, longest, generator=generator)
    return {
        "input_ids": torch.randint(0, 1000, (answers, longest), generator=generator),
        "input_lengths": torch.randint(longest // 2, longest, (answers,), generator=generator),
        "generation_logprobs": rollout_BT,
        "prev_logprobs": rollout_BT + 0.01 * torch.randn(answers, longest, generator=generator),
        "reference_policy_logprobs": rollout_BT.clone(),
        "advantages": torch.randn(answers, 1, generator=generator).expand(answers, longest),
        "token_mask": torch.ones(answers, longest),
        "sample_mask": torch.ones(answers),
    }


def shard(batch: dict[str, torch.Tensor], micro_batch: int) -> None:
    """Divide a batch among ranks and pack it, as `Policy.train` does."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    packing = {
        "max_tokens_per_microbatch": micro_batch,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "algorithm": "modified_first_fit_decreasing",
        "sequence_length_pad_multiple": 16,
    }
    BatchedDataDict(batch).shard_by_batch_size(
        RANKS, batch_size=len(batch["input_ids"]), sequence_packing_args=packing
    )


def measure(batch: dict[str, torch.Tensor]) -> None:
    """Correct a batch with TIS and compute most of the metrics that our `Policy.train` does."""
    pair = LogprobPair(batch["prev_logprobs"], batch["generation_logprobs"], batch["token_mask"])
    correction = Correction(level="token", truncate=2.0)
    multiplier = correct(pair, correction)
    mismatch_metrics(pair)
    correction_metrics(multiplier, pair, correction)
    advantage_metrics(multiplier, pair, batch["advantages"])


def main() -> None:
    """Measure both by threads and by batch, print the rows, and write them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    record.add_options(parser)
    parser.add_argument("--threads", default="1,2,4,16,64")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    record.need("nemo_rl", device=False)
    rows: list[dict[str, Any]] = []
    for name, (answers, longest, micro_batch) in BATCHES.items():
        batch = batch_of(answers, longest)
        calls = {"shard": partial(shard, batch, micro_batch), "metrics": partial(measure, batch)}
        for threads in map(int, options.threads.split(",")):
            torch.set_num_threads(threads)
            for work, call in calls.items():
                call()  # the first one takes memory and imports
                seconds = timeit.repeat(call, number=1, repeat=options.repetitions)
                row = {"batch": name, "threads": threads, "work": work}
                rows.append(row | record.repeated(seconds))
                record.keep(options.out, options.commit, ranks=RANKS, rows=rows)
    shown = [{key: row[key] for key in ("batch", "work", "threads", "median")} for row in rows]
    record.show("seconds in the driver", shown)


if __name__ == "__main__":
    main()
