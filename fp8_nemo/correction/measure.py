"""Measure a run's mismatch: read what it kept, and say what each correction would do to it.

A run keeps some of its batches (`packed`); inside NeMo RL it keeps some answers of each step
(`train_data_step*.jsonl`), and some steps are read. Both become `LogprobPair`s here.

Shapes: B sequences, T tokens, N real tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fp8_nemo.correction.correct import STATISTICS, correct, correction_metrics
from fp8_nemo.correction.mismatch import LogprobPair, mismatch_metrics
from fp8_nemo.correction.quantiles import POINTS, VETO, MeasureError, Measurement
from fp8_nemo.recipe.options.correction import Correction

KEPT_TOKENS = 2**20  # of one step: 4 MiB kept, and 190 MiB while all statistics are measured
NEMO_STEPS = 64
"""Of a run inside NeMo RL, which keeps 65,536 tokens of every step."""
FOLDER = "mismatch"
NEMO_FILES = "log/nemo/**/train_data_step*.jsonl"


class Effect(NamedTuple):
    """Hold what a correction would do: shares of tokens, effective samples, mean multiplier."""

    clipped: float
    rejected: float
    ess: float
    mean: float


def pair_file(run_dir: Path, step: int) -> Path:
    """Return where a run directory keeps a step's mismatch; its folder is made."""
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    return folder / f"step-{step:06}.safetensors"


def packed(pair: LogprobPair) -> bytes:
    """Return a step's log ratios, whole sequences up to `KEPT_TOKENS`, as a file's bytes."""
    from safetensors.torch import save

    mask_BT = pair.mask_BT.bool().cpu()
    length_B = mask_BT.sum(dim=1)
    kept = int((length_B.cumsum(0) <= KEPT_TOKENS).sum())
    log_ratio_N = pair.log_ratio_BT.cpu()[:kept][mask_BT[:kept]].float()
    return save({"log_ratio_N": log_ratio_N, "length_B": length_B[:kept].int()})


def read_pairs(path: Path) -> dict[str, LogprobPair]:
    """Read a run directory's kept steps, or a file of NeMo RL's, by where it stands.

    Of NeMo RL's steps at most `NEMO_STEPS`, from the first to the last, and of each the last
    attempt's; of each whole sequences up to `KEPT_TOKENS`.

    Raises:
        MeasureError: the path holds none.
    """
    files = [path] if path.is_file() else sorted((path / FOLDER).glob("step-*.safetensors"))
    files = files or _nemo_files(path)
    try:
        steps = {str(file): _read(file) for file in files}
        found = {name: pair for name, pair in steps.items() if pair.mask_BT.any()}
        if steps and not found:
            raise ValueError("a step without a token")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MeasureError(f"{path}: cannot be read as a mismatch, {error}") from None
    if not found:
        raise MeasureError(
            f"{path}: no {FOLDER}/step-*.safetensors and no {NEMO_FILES}; a run keeps its "
            "mismatch at every validation"
        )
    return found


def _nemo_files(run_dir: Path) -> list[Path]:
    files = sorted(run_dir.glob(NEMO_FILES))  # exp_001 first
    numbers = {file: file.stem.rpartition("step")[2] for file in files}
    of_step = {int(step): file for file, step in numbers.items() if step.isdecimal()}
    steps = sorted(of_step)
    parts = min(len(steps), NEMO_STEPS) - 1
    places = (part * (len(steps) - 1) // max(1, parts) for part in range(parts + 1))
    return [of_step[steps[place]] for place in places]


def measure(pairs: dict[str, LogprobPair]) -> Measurement:
    """Measure the distribution of every statistic over the tokens of all batches.

    Args:
        pairs: by where each came from.
    """
    share = torch.linspace(0, 1, POINTS + 1, dtype=torch.float64)
    values = {
        name: torch.cat([statistic(pair)[pair.mask_BT.bool()] for pair in pairs.values()])
        for name, statistic in STATISTICS.items()
    }
    values[VETO] = torch.cat([_least_ratio(pair)[pair.mask_BT.bool()] for pair in pairs.values()])
    log_ratio_N = torch.cat([pair.log_ratio_N for pair in pairs.values()])
    return Measurement(
        source=list(pairs),
        tokens=log_ratio_N.numel(),
        sequences=sum(int(pair.mask_BT.any(dim=1).sum()) for pair in pairs.values()),
        kl=_spread(log_ratio_N)[0],
        quantiles={name: _quantiles(x.double(), share) for name, x in values.items()},
    )


def effect(pairs: Iterable[LogprobPair], correction: Correction) -> Effect:
    """Average a correction's effect over batches, weighted by tokens; each is normalized alone."""
    keys = ("clipped_fraction", "masked_fraction", "ess", "multiplier_mean")  # as `Effect`
    rows, tokens = [], []
    for pair in pairs:
        found = correction_metrics(correct(pair, correction), pair, correction)
        rows.append([found[f"correction/{key}"] for key in keys])
        tokens.append(int(pair.mask_BT.sum()))
    return Effect(*np.average(rows, axis=0, weights=tokens).tolist())


def by_position(
    pairs: Iterable[LogprobPair], parts: int = 10
) -> Iterator[tuple[str, float, float]]:
    """Yield KL and 99th percentile of `|log_ratio|` by where in its sequence a token stands.

    Yields:
        `("0-10%", kl, p99)`, the first of `parts` equal parts of every sequence first.
    """
    where, ratios = [], []
    for pair in pairs:
        mask_BT = pair.mask_BT.bool()
        place_BT = mask_BT.cumsum(dim=1) - 1
        length_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        where.append((place_BT * parts // length_B1)[mask_BT])
        ratios.append(pair.log_ratio_N)
    where_N, x_N = torch.cat(where), torch.cat(ratios)
    for part in range(parts):
        if (x := x_N[where_N == part]).numel():
            name = f"{100 * part // parts}-{100 * (part + 1) // parts}%"
            yield name, *_spread(x)


def by_length(pairs: Iterable[LogprobPair], parts: int = 4) -> Iterator[tuple[str, float, float]]:
    """Yield KL and 99th percentile of `|log_ratio|` by the length of a token's sequence.

    Yields:
        `("1-7", kl, p99)`: lengths in tokens, at most `parts` groups of about as many sequences,
        those of one length together.
    """
    sequences = [
        x_T[mask_T]
        for pair in pairs
        for x_T, mask_T in zip(pair.log_ratio_BT, pair.mask_BT.bool(), strict=True)
        if mask_T.any()
    ]
    sequences.sort(key=len)
    size = -(-len(sequences) // parts)
    ends = (min(size * part, len(sequences)) for part in range(1, parts + 1))
    lasts = sorted({len(sequences[end - 1]) for end in ends})
    for shortest, longest in zip([1, *(last + 1 for last in lasts)], lasts, strict=False):
        some = [each for each in sequences if shortest <= len(each) <= longest]
        yield f"{len(some[0])}-{len(some[-1])}", *_spread(torch.cat(some))


def _spread(x_N: Tensor) -> tuple[float, float]:
    zeros = torch.zeros_like(x_N)[None]
    found = mismatch_metrics(LogprobPair(x_N[None], zeros, torch.ones_like(zeros).bool()))
    return found["mismatch/kl"], found["mismatch/abs_log_ratio_p99"]


def _least_ratio(pair: LogprobPair) -> Tensor:
    """Return the smallest token ratio of every token's sequence, `[B, T]`."""
    ratio_BT = STATISTICS["token"](pair).masked_fill(~pair.mask_BT.bool(), torch.inf)
    return ratio_BT.amin(dim=1, keepdim=True).expand_as(ratio_BT)


def _quantiles(value_N: Tensor, share: Tensor) -> list[float]:
    """Interpolate between order statistics; `torch.quantile` takes 2**24 values at most."""
    ordered = value_N.sort().values
    at = share * (len(ordered) - 1)
    left = at.long().clamp(max=max(0, len(ordered) - 2))
    right = (left + 1).clamp(max=len(ordered) - 1)
    return torch.lerp(ordered[left], ordered[right], at - left).tolist()


def _read(file: Path) -> LogprobPair:
    if file.suffix == ".jsonl":
        return _read_nemo(file)
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is not whole ({error}); delete it") from None
    lengths = tensors["length_B"].tolist()
    return _padded(list(tensors["log_ratio_N"].double().split(lengths)))


def _read_nemo(file: Path) -> LogprobPair:
    """Read a step as NeMo RL logs it, a sequence a line (seam logged-step), without prompts."""
    sequences, tokens = [], 0
    with file.open() as lines:
        for row in map(json.loads, lines):
            if not _scalar(row["sample_loss_mask"]):
                continue
            keys = ("prev_logprobs", "generation_logprobs", "token_loss_mask")
            train_T, rollout_T, mask_T = (torch.tensor(_flat(row[k])).double() for k in keys)
            sequences.append((train_T - rollout_T)[mask_T.bool()])
            tokens += len(sequences[-1])
            if tokens > KEPT_TOKENS:
                return _padded(sequences[:-1])
    return _padded(sequences)


def _flat(value: list) -> list:
    """Take the one row out of NeMo RL's batch of one: `[[...]]`."""
    return value[0] if value and isinstance(value[0], list) else value


def _scalar(value: float | list) -> float:
    while isinstance(value, list):
        value = value[0]
    return value


def _padded(sequences: list[Tensor]) -> LogprobPair:
    if not sequences:
        raise ValueError("no sequence")
    log_ratio_BT = pad_sequence(sequences, batch_first=True)
    length_B1 = torch.tensor([[len(each)] for each in sequences])
    mask_BT = torch.arange(log_ratio_BT.shape[1]) < length_B1
    return LogprobPair(log_ratio_BT, torch.zeros_like(log_ratio_BT), mask_BT)
