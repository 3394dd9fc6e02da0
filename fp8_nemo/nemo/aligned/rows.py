"""Enough rows for the trainer's FP8 products, where they must give the engine's bits.

On an H200 TransformerEngine's product of the last linear of 8B's MLP has other bits than the
engine's with 2 to 256 rows and with 640, and the same with one, with 288 to 512, and from 768 on
(product-rows-h200.json); probably cuBLAS chooses a kernel by the rows. So a micro-batch of few rows
differs, such as one short answer alone (docs/research/mismatch.md). It arises where an answer is
left over, or where NeMo RL adds micro-batches until every rank has equally many (seam
micro-batches-by-ranks).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

ROWS = 2944
"""The fewest that a micro-batch of all of 8B had without a difference. Its products need 768; more
is a margin for other widths, of which three weights of Llama 3.2 1B alone were measured."""


def filled(pack: Callable[..., Any], train: int, logprob: int) -> Callable[..., Any]:
    """Pad a micro-batch that has too few rows, after NeMo RL's packing.

    Args:
        pack: NeMo RL's.
        train: rows that a micro-batch has at least, in training.
        logprob: the same in the logprob pass, which computes no gradients.
    """

    @wraps(pack)
    def at_least(
        ids_BS: Tensor, lengths_B: Sequence[int] | Tensor, each: int = 1, whole: int = 1,
        to: int | None = None, **ranks: int,
    ) -> Any:  # fmt: skip
        """Pack as NeMo RL does, the last sequence padded further if there are too few rows."""
        wanted = (train if torch.is_grad_enabled() else logprob) // whole * whole
        held = sum(-(-int(length) // each) * each for length in lengths_B)
        return pack(ids_BS, lengths_B, each, whole, wanted if to is None and held < wanted else to,
                    **ranks)  # fmt: skip

    return at_least


def fill_micro_batches(packing: Mapping[str, Any]) -> None:
    """Fill this process's micro-batches up to `ROWS`, or to their own size if that is less.

    Args:
        packing: NeMo RL's `policy.sequence_packing`.
    """
    from nemo_rl.models.megatron import data

    packs, sizes = "_pack_sequences_for_megatron", ("train_mb_tokens", "logprob_mb_tokens")
    least = (min(ROWS, packing[size]) for size in sizes)
    setattr(data, packs, filled(getattr(data, packs), *least))
