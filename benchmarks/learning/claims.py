"""What others say that a recipe's accuracy does against BF16's: it keeps up with it, or it loses.

A study says what it found beside them; docs/research/earlier-studies.md quotes most of them.
"""

from __future__ import annotations

from typing import NamedTuple

KEEPS, LOSES = "keeps", "loses"


class Learning(NamedTuple):
    """A claim on PRECISION-CORRECTION: `Learning("fp8-linear-tis", KEEPS, "FP8-RL, ...")`."""

    cell: str
    expected: str
    source: str


LEARNING = (
    Learning("fp8-linear-none", LOSES, "verl, FP8 page (TIS off); NVIDIA's blog: 0.586 of 0.616"),
    Learning("fp8-linear-tis", KEEPS, "FP8-RL, arXiv 2601.18150"),
    Learning("fp8-linear-tis", LOSES, "NVIDIA's blog: correction narrows the gap, not closes it"),
    Learning("fp8-linear-mis", KEEPS, "FP8-RL, arXiv 2601.18150"),
    Learning("fp8-kv-attn-none", LOSES, "Jet-RL, arXiv 2601.14243, tables 2 and 3"),
    Learning("fp8-kv-attn-tis", KEEPS, "FP8-RL; NeMo RL #1212"),
    Learning("fp8-kv-attn-mis", KEEPS, "FP8-RL, arXiv 2601.18150"),
    Learning("fp8-kv-attn-seq-tis", KEEPS, "this repository's notebook 02, how to choose"),
    Learning("fp8-e2e-none", KEEPS, "Jet-RL, arXiv 2601.14243"),
    Learning("fp8-e2e-tis", KEEPS, "NVIDIA's blog: 0.613 of 0.616"),
    Learning("fp8-e2e-kv-attn-tis", KEEPS, "NVIDIA's blog; NeMo RL #1212"),
)
