"""Find from how many rows on the BF16 head of a model gives each row the bits of a whole batch.

python -m benchmarks.numerics.head_rows --out FILE.json

A decode step has a row a sequence, a trainer thousands, and cuBLAS chooses a kernel by the number
of rows. Rows are normal numbers, weights normal times 0.02. The reference is the product of 8,192
rows. `unequal` lists the numbers of rows whose logits differ from it, and `padded` those that
differ once zeros fill the rows up to ROWS. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from benchmarks import record

HEADS = {
    "llama31-8b": (128256, 4096), "llama32-3b": (128256, 3072), "llama32-1b": (128256, 2048),
    "small-llama": (128, 768), "qwen25-7b": (152064, 3584),
}  # fmt: skip
"""Rows and columns of the head's weight `[V, H]`."""
FEW = (*range(1, 129), 160, 192, 256, 320, 384, 512, 1024)
MANY = (2048, 4096, 8191, 16384)
ROWS = (64, 128, 256)


def differing(x_TH: Tensor, weight_VH: Tensor, whole_TV: Tensor, to: int = 0) -> list[int]:
    """Return the numbers of rows up to `to`, or all, whose logits are not the reference's."""
    found = []
    for rows in (n for n in FEW if not to or n <= to):
        few_TH = pad(x_TH[:rows], (0, 0, 0, max(0, to - rows)))
        if not torch.equal(linear(few_TH, weight_VH)[:rows], whole_TV[:rows]):
            found.append(rows)
    return found


def measure(vocabulary: int, hidden: int) -> dict[str, object]:
    """Compare one head's products."""
    torch.manual_seed(0)
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    x_TH = torch.randn(16384, hidden, **kind)
    weight_VH = torch.randn(vocabulary, hidden, **kind) * 0.02
    whole_TV = linear(x_TH[:8192], weight_VH)[: max(FEW)].clone()
    return {
        "unequal": differing(x_TH, weight_VH, whole_TV),
        "unequal of many": [
            n for n in MANY
            if not torch.equal(linear(x_TH[:n], weight_VH)[: max(FEW)], whole_TV)
        ],
        "padded": {n: differing(x_TH, weight_VH, whole_TV, n) for n in ROWS},
    }  # fmt: skip


def main() -> None:
    """Measure every head and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    options = parser.parse_args()
    record.need()
    heads = {name: measure(*size) for name, size in HEADS.items()}
    record.keep(options.out, options.commit, heads=heads)
    print(json.dumps(heads))


if __name__ == "__main__":
    main()
