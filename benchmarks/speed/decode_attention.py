"""One layer's attention of a decode step by itself: vLLM 0.25.1's kernels over a BF16 or FP8 cache.

python -m benchmarks.speed.decode_attention --out FILE.json [--points 64x1024,...] [--ways NAME,...]

A point is SEQUENCESxTOKENS, all of one length, for Llama 3.1 8B's 8 KV heads and Qwen3-30B-A3B's 4,
both of 32 heads of 128. Q, K and V are normal numbers; an FP8 cache has one scale of K and one of
V, and its pages lie in random order. Seconds are of a CUDA graph of calls over caches that are
together far larger than the L2 cache; `tb_s` is the cache's bytes over them. `error` is the L2
distance to attention in FP32 over the same cache, relative, of up to four sequences: what Q, P and
the sums lose. `doubled` is that error after the scales are doubled behind a captured graph, whose
result then should double: near 0.5 where the graph kept the old ones.

FlashAttention 3 is called as vLLM's engine calls it, its schedule made before and at most `splits`
parts a sequence. XQA is FlashInfer's, which nvcc compiles at first use, as vLLM's FlashInfer
backend calls it; `ours` is as `glue.decode=xqa` calls it, over the cache as FlashAttention lays it
out, with `splits` for `SPREAD`. Needs a Hopper GPU and vLLM.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import record
from benchmarks.speed.quantize import per_run
from benchmarks.speed.rollout_engine import Point
from fp8_nemo.nemo.decode import attention

HEADS, HEAD_DIM = 32, 128
KV_HEADS = {"llama31-8b": 8, "qwen3-30b-a3b": 4}
POINTS = "8x1024,64x1024,256x1024,64x4096,32x8192,8x16384,4x65536"
COLD = 256 * 2**20  # bytes of all copies of a cache, five times the L2 cache
CALLS = 8  # of one graph
MAX_FP8 = 448.0
SCALE = 0.01  # of K and V: codes reach 448 at 4.5 deviations
JUDGED = 4  # sequences whose result is judged


class Way(NamedTuple):
    """A kernel and how it is called: `Way("FA3", "fp8", 16, 32)`."""

    kernel: str
    """FA3, XQA, Triton, ours, or ours_by_head, where each head's tokens of a page lie together."""
    cache: str
    """bf16 or fp8."""
    page: int
    """Tokens."""
    splits: int = 0
    """Of a sequence, at most; of FA3, and ours as said above."""
    live: bool = True
    """Scales are tensors, which a refit changes; of XQA alone, FA3's and Triton's are always."""

    @property
    def name(self) -> str:
        """Name as `--ways` takes it: `FA3-fp8-16-32`."""
        parts = [self.kernel, self.cache, str(self.page)]
        parts += [str(self.splits)] if self.splits else []
        return "-".join(parts + ([] if self.live else ["frozen"]))


WAYS = [
    Way("FA3", "bf16", 16, 32), Way("FA3", "bf16", 16, 1), Way("FA3", "bf16", 64, 32),
    Way("FA3", "fp8", 16, 32), Way("FA3", "fp8", 16, 4), Way("FA3", "fp8", 16, 1),
    Way("FA3", "fp8", 64, 32), Way("FA3", "fp8", 128, 32), Way("FA3", "fp8", 256, 32),
    Way("Triton", "fp8", 16), Way("Triton", "fp8", 64),
    *(Way("ours", "fp8", 16, splits) for splits in (1, 2, 3, 4, 6, 8)),
    *(Way("ours_by_head", "fp8", 16, splits) for splits in (1, 4)), Way("ours", "fp8", 64, 4),
    Way("XQA", "fp8", 16, live=False), Way("XQA", "fp8", 16), Way("XQA", "fp8", 64),
    Way("XQA", "fp8", 128), Way("XQA", "bf16", 64),
]  # fmt: skip


class Inputs(NamedTuple):
    """Of one point: several caches, one query and its sequences."""

    query: Tensor
    """`[batch, heads, head_dim]`, BF16."""
    caches: list[Tensor]
    """Each `[pages, 2, page, kv_heads, head_dim]`, BF16 or FP8; K first."""
    table: Tensor
    """`[batch, pages of a sequence]`, int32."""
    lengths: Tensor
    """`[batch]`, int32."""
    tokens: int
    scale: Tensor
    """Of the cache's codes, `[1]`, FP32; 1 for BF16."""


def inputs(point: Point, kv_heads: int, way: Way, device: str = "cuda") -> Inputs:
    """Draw a point's queries and caches, laid out as the way's kernel has them."""
    torch.manual_seed(0)
    each = -(-point.prompt // way.page)
    pages = point.batch * each
    width = 1 if way.cache == "fp8" else 2
    copies = max(2, -(-COLD // (pages * way.page * kv_heads * HEAD_DIM * 2 * width)))
    across = way.kernel in ("XQA", "ours_by_head")
    shape = (kv_heads, way.page) if across else (way.page, kv_heads)
    caches = []
    for _ in range(min(copies, CALLS)):
        drawn = torch.randn(pages, 2, *shape, HEAD_DIM, device=device, dtype=torch.bfloat16)
        if way.cache == "fp8":
            drawn = (drawn / SCALE).clamp_(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn)
        caches.append(drawn.transpose(2, 3) if across else drawn)
    return Inputs(
        torch.randn(point.batch, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16),
        caches,
        torch.randperm(pages, device=device).view(point.batch, each).int(),
        torch.full((point.batch,), point.prompt, device=device, dtype=torch.int32),
        point.prompt,
        torch.full((1,), SCALE if way.cache == "fp8" else 1.0, device=device),
    )


def fa3(given: Inputs, way: Way) -> Callable[[Tensor, Tensor], Any]:
    """Return vLLM's FlashAttention 3 of one cache into an output, as its backend calls it."""
    from vllm.vllm_flash_attn.flash_attn_interface import (
        flash_attn_varlen_func,
        get_scheduler_metadata,
    )

    batch, kv_heads = len(given.lengths), given.caches[0].shape[3]
    starts = torch.arange(batch + 1, device=given.query.device, dtype=torch.int32)
    query = given.query
    named: dict[str, Any] = {}
    if way.cache == "fp8":
        query = quantized(query)
        one = torch.full((1,), SCALE, device=query.device)
        shape = (batch, kv_heads)
        named = {"q_descale": one.expand(shape), "k_descale": given.scale.expand(shape),
                 "v_descale": given.scale.expand(shape)}  # fmt: skip
    schedule = get_scheduler_metadata(
        batch_size=batch, max_seqlen_q=1, max_seqlen_k=given.tokens, num_heads_q=HEADS,
        num_heads_kv=kv_heads, headdim=HEAD_DIM, cache_seqlens=given.lengths,
        qkv_dtype=query.dtype, cu_seqlens_q=starts, page_size=way.page, causal=True,
        num_splits=way.splits,
    )  # fmt: skip

    def call(cache: Tensor, out: Tensor) -> None:
        keys, values = cache.unbind(1)
        flash_attn_varlen_func(
            query, keys, values, 1, starts, given.tokens, seqused_k=given.lengths, causal=True,
            block_table=given.table, out=out, scheduler_metadata=schedule, fa_version=3,
            num_splits=way.splits, softmax_scale=HEAD_DIM**-0.5, **named,
        )  # fmt: skip

    return call


def xqa(given: Inputs, way: Way) -> Callable[[Tensor, Tensor], Any]:
    """Return FlashInfer's XQA of one cache into an output, as vLLM's backend calls it."""
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    space = torch.zeros(394 * 2**20, dtype=torch.uint8, device=given.query.device)
    number = float(given.scale)

    def call(cache: Tensor, out: Tensor) -> None:
        scale: Any = given.scale if way.live else number
        xqa_batch_decode_with_kv_cache(
            given.query, cache.transpose(2, 3), space, given.table, given.lengths, given.tokens,
            bmm1_scale=scale * HEAD_DIM**-0.5, bmm2_scale=scale, out=out, kv_layout="HND",
        )  # fmt: skip

    return call


def triton(given: Inputs, way: Way) -> Callable[[Tensor, Tensor], Any]:
    """Return vLLM's Triton kernel of one cache into an output, as its backend calls it."""
    from vllm.v1.attention.backends import triton_attn
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    batch, kv_heads = len(given.lengths), given.caches[0].shape[3]
    starts = torch.arange(batch + 1, device=given.query.device, dtype=torch.int32)
    few, parts = triton_attn.MIN_LAUNCH_GRID_SIZE_2D // kv_heads, 16
    assert parts == triton_attn.NUM_PAR_SOFTMAX_SEGMENTS
    space = [torch.empty(few, HEADS, parts, *more, device=given.query.device)
             for more in ((HEAD_DIM,), (), ())]  # fmt: skip
    query, one = quantized(given.query), torch.full((1,), SCALE, device=given.query.device)
    shape = (batch, kv_heads)

    def call(cache: Tensor, out: Tensor) -> None:
        keys, values = cache.unbind(1)
        unified_attention(
            query, keys, values, out, starts, 1, given.lengths, given.tokens, HEAD_DIM**-0.5,
            True, (-1, -1), given.table, 0, one, given.scale.expand(shape),
            given.scale.expand(shape), few, parts, *space,
            kv_quant_mode=KVQuantMode.FP8_PER_TENSOR,
        )  # fmt: skip

    return call


def ours(given: Inputs, way: Way) -> Callable[[Tensor, Tensor], Any]:
    """Return decode as `glue.decode=xqa` has it, of one cache into an output."""
    query, one = quantized(given.query), torch.full((1,), SCALE, device=given.query.device)

    def call(cache: Tensor, out: Tensor) -> None:
        attention.SPREAD = way.splits
        keys, values = cache.unbind(1)
        attention.decode(
            query, keys, values, out, given.lengths, given.table, one, given.scale,
            given.scale, HEAD_DIM**-0.5,
        )  # fmt: skip

    return call


KERNELS = {"FA3": fa3, "XQA": xqa, "Triton": triton, "ours": ours, "ours_by_head": ours}


def quantized(query: Tensor) -> Tensor:
    """Return the query's FP8 codes by the fixed scale."""
    return (query / SCALE).clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn)


def reference(given: Inputs, cache: Tensor) -> Tensor:
    """Return attention in FP32 of the first sequences: `[judged, heads, head_dim]`."""
    judged = min(JUDGED, len(given.lengths))
    found = []
    for sequence in range(judged):
        pages = cache[given.table[sequence].long()].float() * given.scale  # [n, 2, page, H, D]
        keys, values = pages.transpose(0, 1).flatten(1, 2)[:, : given.tokens]  # [T, H, D] each
        query = given.query[sequence].float().unflatten(0, (keys.shape[1], -1))  # [H, G, D]
        weights = torch.einsum("hgd,thd->hgt", query, keys).mul(HEAD_DIM**-0.5).softmax(-1)
        found.append(torch.einsum("hgt,thd->hgd", weights, values).flatten(0, 1))
    return torch.stack(found)


def distance(found: Tensor, wanted: Tensor) -> float:
    """Return the relative L2 distance."""
    return float((found.float() - wanted).norm() / wanted.norm())


def measure(way: Way, point: Point, kv_heads: int) -> dict[str, Any]:
    """Return one way's microseconds, bandwidth and errors at a point."""
    given = inputs(point, kv_heads, way)
    call, out = KERNELS[way.kernel](given, way), torch.empty_like(given.query)
    wanted = reference(given, given.caches[0])
    call(given.caches[0], out)
    error = distance(out[: len(wanted)], wanted)
    runs = [given.caches[n % len(given.caches)] for n in range(CALLS)]
    times = per_run(lambda: [call(cache, out) for cache in runs], CALLS)
    bytes_read = given.caches[0].nbytes
    row = {
        "way": way.name, "batch": point.batch, "tokens": point.prompt, "kv_heads": kv_heads,
        "us": record.repeated([1e6 * each for each in times]),
        "tb_s": bytes_read / median(times) / 1e12, "error": error,
    }  # fmt: skip
    return row | ({"doubled": doubled(call, given, out)} if way.cache == "fp8" else {})


def doubled(call: Callable[[Tensor, Tensor], Any], given: Inputs, out: Tensor) -> float:
    """Return the error against doubled scales that a captured graph did not see at its capture.

    K's scale doubles too, so the reference is attention with twice the logits.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(given.caches[0], out)
    given.scale.mul_(2)
    graph.replay()
    wanted = reference(given, given.caches[0])
    error = distance(out[: len(wanted)], wanted)
    given.scale.div_(2)
    return error


def selected(names: str) -> list[Way]:
    """Return the ways of these names, or all.

    Raises:
        ValueError: a name is none of WAYS.
    """
    known = {way.name: way for way in WAYS}
    if unknown := [name for name in names.split(",") if name and name not in known]:
        raise ValueError(f"{', '.join(unknown)}: no way; there are {', '.join(known)}")
    return [known[name] for name in names.split(",") if name] or WAYS


def ratios(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a table of a row for each point and way, with the speed-up over the first of BF16."""
    rows = list(rows)
    plain = {at(row): row for row in rows if row["way"] == WAYS[0].name}
    return [
        {"kv_heads": row["kv_heads"], "point": f"{row['batch']}x{row['tokens']}",
         "way": row["way"], "us": row["us"], "tb_s": row["tb_s"], "error": row["error"],
         "doubled": row.get("doubled"),
         "times_bf16": plain[at(row)]["us"]["median"] / row["us"]["median"]
         if at(row) in plain else None}
        for row in rows
    ]  # fmt: skip


def at(row: dict[str, Any]) -> tuple[int, int, int]:
    """Return where a row was measured."""
    return row["kv_heads"], row["batch"], row["tokens"]


def main(words: Sequence[str] | None = None) -> None:
    """Measure every way at every point; each row is in the file before the next begins."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    record.add_options(parser)
    parser.add_argument("--points", default=POINTS, help="sequences x tokens")
    parser.add_argument("--ways", default="", help=", ".join(way.name for way in WAYS))
    options = parser.parse_args(words)
    ways = selected(options.ways)
    record.need("vllm", "flashinfer")
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for way in ways:
        for kv_heads in KV_HEADS.values():
            for point in map(Point.read, options.points.split(",")):
                try:
                    rows.append(measure(way, point, kv_heads))
                except (RuntimeError, ValueError, AssertionError) as error:
                    failed[f"{way.name}, {kv_heads} KV heads, {point.batch}x{point.prompt}"] = (
                        f"{type(error).__name__}: {str(error)[:300]}"
                    )
                torch.cuda.empty_cache()
            record.keep(options.out, options.commit, heads=HEADS, head_dim=HEAD_DIM,
                        kv_heads=KV_HEADS, calls=CALLS, rows=rows, failed=failed)  # fmt: skip
        print(way.name, flush=True)
    record.show("attention of one layer of a decode step", ratios(rows))
    for name, reason in failed.items():
        print(f"failed: {name}: {reason}")


if __name__ == "__main__":
    main()
