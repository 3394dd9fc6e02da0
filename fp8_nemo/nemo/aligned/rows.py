"""Enough rows for the trainer's FP8 products, where they must give the engine's bits.

cuBLAS chooses a product's kernel by its number of rows. An answer of 8B's that had a micro-batch of
256 rows to itself got other bits than among 4,096, which were the engine's. Such micro-batches come
from NeMo RL: it makes as many as its ranks divide (seam micro-batches-by-ranks), and takes the
shortest answer for one that is missing.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from torch import Tensor

ROWS = 4096
"""Of 2,944 rows and more no difference from the engine was seen."""


def filled(pack: Callable[..., Any], rows: int) -> Callable[..., Any]:
    """Make NeMo RL's packing of a micro-batch end with padding, up to `rows` at least."""

    @wraps(pack)
    def at_least(
        ids_BS: Tensor, lengths_B: Sequence[int] | Tensor, each: int = 1, whole: int = 1,
        to: int | None = None, **ranks: int,
    ) -> Any:  # fmt: skip
        wanted = rows // whole * whole
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

    sizes = (packing["train_mb_tokens"], packing["logprob_mb_tokens"])
    packs = "_pack_sequences_for_megatron"
    setattr(data, packs, filled(getattr(data, packs), min(ROWS, *sizes)))
