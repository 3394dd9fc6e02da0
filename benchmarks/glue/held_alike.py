"""Which bytes of a weight two sides hold alike: Megatron's fused matrices beside those of the wire.

Shapes: O out, I in features, P = ceil(O/128), Q = ceil(I/128) blocks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from torch import Tensor

from fp8_nemo.glue.wire import BLOCK
from fp8_nemo.recipe.options.model import Shape


class Rows(NamedTuple):
    """Bytes, and for each row the scales of the blocks that it lies in."""

    bytes_OI: Tensor
    scale_OQ: Tensor


def with_rows(bytes_OI: Tensor, scale_PQ: Tensor) -> Rows:
    """Repeat each block's scale for its rows, so that it stays with the row when matrices split."""
    return Rows(bytes_OI, scale_PQ.repeat_interleave(BLOCK, 0)[: len(bytes_OI)])


def split_fused(name: str, bytes_OI: Tensor, scale_PQ: Tensor, shape: Shape) -> dict[str, Rows]:
    """Split a fused matrix of Megatron's into those of the wire, by their names there.

    `linear_qkv` holds, per key head, its queries, then its key, then its value; `linear_fc1` gate
    above up (Megatron Core, attention.py and mlp.py).

    Raises:
        ValueError: the name is none of a dense layer's.
    """
    found = re.search(r"layers\.(\d+)\..*\.linear_(qkv|proj|fc1|fc2)$", name)
    if found is None:
        raise ValueError(f"{name}: no linear of a dense layer")
    G = shape.heads // shape.kv_heads

    def parts(x: Tensor) -> dict[str, Tensor]:
        if found[2] == "qkv":
            heads = x.unflatten(0, (shape.kv_heads, G + 2, -1))
            q, k, v = heads[:, :G], heads[:, G : G + 1], heads[:, G + 1 :]
            split = {"q_proj": q, "k_proj": k, "v_proj": v}
            return {f"self_attn.{part}": rows.flatten(0, 2) for part, rows in split.items()}
        if found[2] == "fc1":
            return dict(zip(("mlp.gate_proj", "mlp.up_proj"), x.chunk(2), strict=True))
        return {"self_attn.o_proj" if found[2] == "proj" else "mlp.down_proj": x}

    bytes_by, scales_by = (parts(x) for x in with_rows(bytes_OI, scale_PQ))
    layer = f"model.layers.{found[1]}"
    return {f"{layer}.{part}.weight": Rows(bytes_by[part], scales_by[part]) for part in bytes_by}


def alike(one: Rows, other: Rows) -> dict[str, float]:
    """Return the share of equal bytes, and of bytes whose scale is equal as well."""
    same_OI, same_OQ = one.bytes_OI == other.bytes_OI, one.scale_OQ == other.scale_OQ
    scaled_OI = same_OQ.repeat_interleave(BLOCK, 1)[:, : same_OI.shape[1]]
    both = (same_OI & scaled_OI).double().mean().item()
    return {"bytes": same_OI.double().mean().item(), "bytes and scales": both}


def mean_by_kind(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Average `{"q_proj": {"bytes": 0.99, "bytes and scales": 0.84}, ...}` over layers."""
    kinds = sorted({row["weight"].split(".")[-2] for row in rows})
    return {
        kind: {
            key: fmean(row[key] for row in rows if f".{kind}." in row["weight"])
            for key in ("bytes", "bytes and scales")
        }
        for kind in kinds
    }
