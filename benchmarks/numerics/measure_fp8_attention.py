# SPDX-License-Identifier: Apache-2.0
"""Find out which arithmetic vLLM's FP8 attention performs on a Hopper GPU.

Calls vLLM's FlashAttention 3 kernel on FP8 queries and a paged FP8 cache and compares its output
with FP32 emulations that differ in the softmax probabilities P. Needs vllm==0.25.1 and a Hopper:

    python -m benchmarks.numerics.measure_fp8_attention --out FILE.json
"""

import argparse
import itertools
import math
import pathlib
import subprocess
from importlib.metadata import version
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

from fp8_nemo.recipe.plain import to_json

BATCH, KV_HEADS, GROUP, PAGE = 2, 2, 4, 16
DECODE = [(1, kv, 1) for kv in (16, 24, 100, 128, 500, 2000)] + [(1, 2000, 4), (1, 2000, 32)]
PREFILL = [(16, 500, 1), (17, 500, 1), (128, 128, 1), (128, 2000, 1), (500, 500, 1)]
Pair = tuple[Tensor, Tensor]


class Case(NamedTuple):
    """One input: standard deviation of the logits (0: QK^T adds up exactly), keys per tile."""

    head_dim: int
    q_len: int
    kv_len: int
    num_splits: int
    spread: float
    seed: int
    tile: int


def to_fp8(x: Tensor) -> Pair:
    """Quantize with one scale for the whole tensor."""
    scale = x.abs().max() / 448
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def run_kernel(case: Case, qkv: tuple[Tensor, ...], scales: tuple[Tensor, ...]) -> Tensor:
    """Scatter K and V over shuffled pages, call the kernel: [batch, q_len, heads, head_dim]."""
    pages = -(-case.kv_len // PAGE)
    table = torch.randperm(BATCH * pages).view(BATCH, pages).int()
    cache = torch.zeros(BATCH * pages, 2, PAGE, KV_HEADS, case.head_dim, dtype=torch.uint8)
    token = torch.arange(case.kv_len)
    for i in (0, 1):
        cache[table[:, token // PAGE].long(), i, token % PAGE] = qkv[i + 1].view(torch.uint8)
    query, (keys, values) = qkv[0].flatten(0, 1), cache.view(torch.float8_e4m3fn).unbind(1)
    out = torch.full_like(query, math.nan, dtype=torch.bfloat16)
    starts = case.q_len * torch.arange(BATCH + 1, dtype=torch.int32)
    options: dict[str, Any] = {"block_table": table, "out": out, "causal": True, "fa_version": 3}
    options |= {"seqused_k": starts[1:] * 0 + case.kv_len, "num_splits": case.num_splits}
    options |= {f"{'qkv'[i]}_descale": scales[i].expand(BATCH, KV_HEADS) for i in range(3)}
    flash_attn_varlen_func(query, keys, values, case.q_len, starts, case.kv_len, **options)
    return out.view(qkv[0].shape).float()


def emulate(case: Case, raw: Tensor, v: Tensor, scale: Tensor) -> dict[str, Tensor]:
    """Return every candidate by name; `scale` takes raw FP8 products to base-2 logits."""

    def attend(tiles: list[slice], peak: int = 8, cast: bool = True, own: bool = False) -> Pair:
        """Compute online softmax over tiles in order; return the output and log2 of the row sum."""
        top = torch.full_like(raw[..., :1], -math.inf)
        total = acc = torch.zeros_like(top)
        for tile in tiles:
            new = torch.maximum(top, raw[..., tile].amax(-1, keepdim=True))
            base = torch.where(new.isneginf(), 0.0, new * scale)
            p = torch.exp2(raw[..., tile] * scale - (base - peak))
            used = p.to(torch.float8_e4m3fn).float() if cast else p
            decay = torch.exp2(top * scale - base)
            total = total * decay + (used if own else p).sum(-1, keepdim=True)
            acc, top = acc * decay + used @ v[..., tile, :], new
        return acc / total, top * scale + torch.log2(total) - peak

    sizes = (case.kv_len, case.tile, {128: 96, 96: 128, 192: 160}[case.tile])
    whole, up, other = ([slice(i, i + t) for i in range(0, case.kv_len, t)] for t in sizes)
    pairs = {
        "P in FP32": attend(whole, cast=False),
        "P e4m3, max 1": attend(whole, peak=0),
        "P e4m3, max 256": attend(whole),
        "P e4m3, max 256, sum of rounded P": attend(whole, own=True),
        "tiles last to first": attend(up[::-1]),
        "tiles last to first, sum of rounded P": attend(up[::-1], own=True),
        "tiles first to last": attend(up),
        "tiles last to first, another size": attend(other[::-1]),
    }
    step = math.ceil(len(up) / case.num_splits)
    parts = [attend(up[i : i + step][::-1]) for i in range(0, len(up), step)]
    weight = torch.softmax(torch.stack([p[1] for p in parts]) * math.log(2), 0)
    split = (weight * torch.stack([p[0] for p in parts])).sum(0)
    return {k: p[0] for k, p in pairs.items()} | {"tiles last to first in each split": split}


def measure(case: Case) -> dict[str, list[float]]:
    """Compare the kernel with every emulation on one random input."""
    torch.manual_seed(case.seed)
    q = torch.randn(BATCH, case.q_len, KV_HEADS * GROUP, case.head_dim)
    k, v = torch.randn(2, BATCH, case.kv_len, KV_HEADS, case.head_dim).unbind()
    q, k = (q * case.spread, k) if case.spread else (q.round().clamp(-2, 2), k.sign())
    qkv, scales = zip(*map(to_fp8, (q, k, v)), strict=True)
    got = run_kernel(case, qkv, scales)
    query, key, value = (x.float() for x in qkv)
    raw = torch.einsum("bqhgd,bkhd->bhgqk", query.unflatten(2, (KV_HEADS, GROUP)), key)
    raw += torch.full_like(raw[0, 0, 0], -math.inf).triu(case.kv_len - case.q_len + 1)
    scale = case.head_dim**-0.5 * math.log2(math.e) * scales[0] * scales[1]
    errors = {}
    for name, out in emulate(case, raw, value.transpose(1, 2).unsqueeze(2), scale).items():
        diff = (out * scales[2]).bfloat16().float().permute(0, 3, 1, 2, 4).flatten(2, 3) - got
        numbers = (diff.norm() / got.norm(), diff.abs().max(), (diff == 0).float().mean())
        errors[name] = [float(f"{x:.4g}") for x in numbers]
    return errors


def main() -> None:
    """Measure every case and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON file to write")
    out = parser.parse_args().out
    torch.set_default_device("cuda")
    rows, groups = list[dict[str, Any]](), dict[str, list[list[float]]]()
    for d, s, x, i in itertools.product((64, 128), DECODE + PREFILL, (0.0, 1.0, 4.0), range(3)):
        case = Case(d, *s, x, i, 128 if d == 64 else 96 if s[0] * GROUP <= 64 else 192)
        rows.append(case._asdict() | {"errors": measure(case)})
        tiles = "one tile" if case.kv_len <= case.tile else f"many tiles, splits {case.num_splits}"
        for name, numbers in rows[-1]["errors"].items():
            groups.setdefault(f"d{d}, {tiles}, spread {x:g}: {name}", []).append(numbers)
    driver = subprocess.getoutput("nvidia-smi --query-gpu=driver_version --format=csv,noheader")
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "driver": driver}
    report: dict[str, Any] = {
        "command": f"python -m benchmarks.numerics.measure_fp8_attention --out {out}",
        "commit": subprocess.getoutput("git rev-parse --verify -q HEAD 2>/dev/null") or None,
        "versions": versions | {"vllm": version("vllm")},
        "hardware": torch.cuda.get_device_name(),
        "numbers": ["relative L2 error", "largest absolute error", "share of equal outputs"],
        "median": {k: [*map(median, zip(*v, strict=True))] for k, v in groups.items()},
        "repetitions": rows,
    }
    out.write_text(to_json(report, indent=1).replace("\n   ", " ") + "\n")


if __name__ == "__main__":
    main()
