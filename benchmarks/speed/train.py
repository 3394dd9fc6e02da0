"""Forward and backward of a stack of layers, as NeMo RL's trainer runs it, BF16 against FP8.

python -m benchmarks.speed.train --out benchmarks/results/bench-train-8b-h200.json \
    --model llama31-8b --layers 8 [--tokens 8192,4096] [--cases bf16,fp8] [-- KEY=VALUE ...]

One GPU holds whole layers (TP 1, EP 1); under torchrun add `-- model.parallel.tensor=2` (dense) or
`model.parallel.expert=4`. `model.shape.experts=16` is what one of 8 expert-parallel GPUs
multiplies, without the exchange. Rows, per micro-batch of packed sequences:

`first` quantizes the weights, as the first micro-batch of an optimizer step does, `cached` is every
later one, their difference the price of quantizing weights. `stack` is layers alone; `ends` is one
layer with embedding, `lm_head` in BF16 and NeMo RL's logprobs, so that L layers take
`ends + (L - 1) * stack / layers`. Gradients go into DDP's buffers; nothing is reduced, no optimizer
steps. `fp8-param` keeps weights in FP8, `fp8-router-pads` lets the router pad the experts' tokens.
`forward` and `backward` are milliseconds by CUDA events, `scored` a forward without gradients, as
NeMo RL takes logprobs. `of_peak`: model FLOP/s, none for
recomputing, of the datasheet's for that precision; `of_roofline` counts attention at BF16's.
`kernels`: one more micro-batch under the profiler, in ms by kind. Peaks are an H200's.
Needs NEMO_RL_ROOT and NeMo RL's packages (docs/install.md); FP8 needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.speed import nemo_stack
from benchmarks.speed.nemo_stack import Case
from fp8_nemo.plan.plan import Plan
from fp8_nemo.plan.speed import GPU_SPEED
from fp8_nemo.recipe.options.model import Shape

PEAK = {name: getattr(GPU_SPEED["h200"], name) for name in ("bf16", "fp8")}
"""FLOP/s of dense products on one H200."""
WARM_UP = 4
ALIGN = 16
"""Rows that an expert's tokens are padded to (TransformerEngine, fp8_padding.py)."""
KINDS = (
    ("cast weights", r"block_scaled_cast_transpose"),
    ("cast activations", r"block_scaled_1d_cast_transpose"),
    ("pad", r"multi_(un)?padding"),
    ("permute", r"permute|sort_chunks|chunk_sort|row_id_map"),
    ("attention", r"sdpa|fmha|flash|attn"),
    ("matmul", r"gemm|nvjet|xmma|cutlass|splitk"),
    ("norm", r"norm"),
    ("rope", r"rope"),
)
"""Kind of a kernel by its name, the first that fits; those of TransformerEngine by its library."""
CASES = (
    *(Case(variant, recompute) for recompute in (False, True) for variant in ("bf16", "fp8")),
    *(Case(variant, False, ends=True) for variant in ("bf16", "fp8")),
    *(Case("fp8-exact", recompute) for recompute in (False, True)),
    *(Case(variant, False) for variant in ("fp8-router-pads", "fp8-param")),
)
"""The most telling first, what may fail last."""
SHOWN = ("variant", "part", "tokens", "recompute", "microbatch", "forward", "backward", "scored",
         "speedup", "tokens_per_second", "tflops", "of_peak", "of_roofline",
         "max_memory_gib")  # fmt: skip


def cases(names: Sequence[str], experts: int) -> list[Case]:
    """Return the cases of the named variants; without experts, none about their padding."""
    if unknown := set(names) - set(nemo_stack.VARIANTS):
        known = ", ".join(nemo_stack.VARIANTS)
        raise SystemExit(f"--cases: no {', '.join(sorted(unknown))}, only {known}")
    wanted = set(names) - (set() if experts else {"fp8-router-pads"})
    return [case for case in CASES if case.variant in wanted]


def layer_flops(shape: Shape, lengths: Iterable[int]) -> tuple[float, float]:
    """Count the FLOP of one layer's forward over packed sequences: (linear, attention).

    Two per weight and token; attention by the causal half of QK^T and PV. Norms, RoPE and the
    router are not counted. The backward pass is twice the forward.
    """
    lengths = list(lengths)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ffn = shape.expert_ffn * shape.experts_per_token if shape.experts else shape.ffn
    weights = shape.hidden * (2 * queries + 2 * keys + 3 * ffn)
    return 2.0 * sum(lengths) * weights, 2.0 * queries * sum(each**2 for each in lengths)


def rates(
    shape: Shape, lengths: Sequence[int], precision: str, seconds: float, tensor: int = 1
) -> dict[str, float]:
    """Return the speed of one GPU from the seconds of all layers' forward and backward."""
    linear, attention = (3 * shape.layers * n / tensor for n in layer_flops(shape, lengths))
    speed = (linear + attention) / seconds
    floor = linear / PEAK[precision] + attention / PEAK["bf16"]
    return {
        "tokens_per_second": sum(lengths) / seconds / tensor,
        "tflops": speed / 1e12,
        "of_peak": speed / PEAK[precision],
        "of_roofline": floor / seconds,
    }


def kind_of(kernel: str) -> str:
    """Return what a kernel does, by its name: `matmul`, `cast weights`, ..., or `other`."""
    return next((kind for kind, names in KINDS if re.search(names, kernel, re.I)), "other")


def by_kind(kernels: Iterable[tuple[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Return milliseconds by kind of kernel; and of kind `other` the ten longest by name."""
    kinds: dict[str, float] = {}
    others: dict[str, float] = {}
    for name, spent in kernels:
        kind = kind_of(name)
        kinds[kind] = kinds.get(kind, 0.0) + spent
        if kind == "other":
            others[name[:80]] = others.get(name[:80], 0.0) + spent
    return kinds, dict(sorted(others.items(), key=lambda pair: -pair[1])[:10])


def padding(tokens_E: Sequence[int]) -> float:
    """Return rows added over rows held when each expert's tokens are padded: 0.02 is 2% more."""
    return sum(-tokens % ALIGN for tokens in tokens_E) / max(1, sum(tokens_E))


def speedup(row: dict[str, Any], rows: Iterable[dict[str, Any]]) -> float | None:
    """Return the speed-up over BF16's row of the same part, tokens and recompute, or None."""
    same = ("part", "tokens", "sequences", "recompute")
    for other in rows:
        if other["variant"] == "bf16" and all(other.get(key) == row[key] for key in same):
            return milliseconds(other) / milliseconds(row)
    return None


def milliseconds(row: dict[str, Any]) -> float:
    """Return a micro-batch's milliseconds, forward and backward."""
    return row["forward"]["median"] + row["backward"]["median"]


def timed(
    forward: Callable[[], Any], backward: Callable[[Any], None], before: Callable[[], None], n: int
) -> tuple[list[float], list[float]]:
    """Return milliseconds of `n` forward and backward passes, by events, the host running ahead."""
    import torch

    marks = []
    for _ in range(WARM_UP + n):
        before()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        output = forward()
        events[1].record()
        backward(output)
        events[2].record()
        del output
        marks.append(events)
    torch.cuda.synchronize()
    spans = [(a.elapsed_time(b), b.elapsed_time(c)) for a, b, c in marks[WARM_UP:]]
    return [spent for spent, _ in spans], [spent for _, spent in spans]


def scored(
    model: Any, forward: Callable[[], Any], before: Callable[[], None], n: int
) -> list[float]:
    """Return milliseconds of `n` forward passes without gradients, by events."""
    import torch

    model.eval()
    with torch.no_grad():
        forwards, _ = timed(forward, lambda _: None, before, n)
    model.train()
    return forwards


def measure(
    model: Any, batch: nemo_stack.MicroBatch, ends: bool, first: bool, n: int
) -> dict[str, Any]:
    """Measure times, kernels, memory and, of experts, padding of one micro-batch."""
    import torch

    forward = nemo_stack.forward_of(model, batch, ends)

    def backward(output: Any) -> None:
        output.backward(None if ends else batch.gradient_T1I)

    def before() -> None:
        batch.hidden_T1I.grad = None
        if first:
            model.set_is_first_microbatch()

    def once() -> None:
        before()
        backward(forward())
        torch.cuda.synchronize()

    tokens_E: list[int] = []
    with model.no_sync():
        hooks = nemo_stack.watch_experts(model, tokens_E)
        once()
        for hook in hooks:
            hook.remove()
        torch.cuda.reset_peak_memory_stats()
        forwards, backwards = timed(forward, backward, before, n)
        memory = torch.cuda.max_memory_allocated() / 2**30
        kinds, others = by_kind(record.kernels(once))
        alone = scored(model, forward, before, n)
    return {
        "forward": record.repeated(forwards), "backward": record.repeated(backwards),
        "scored": record.repeated(alone),
        "max_memory_gib": memory, "kernels": kinds, "other_kernels": others,
        "padding": padding(tokens_E) if tokens_E else None,
        "attention": nemo_stack.attention_backend(),
    }  # fmt: skip


def rows_of(
    case: Case, plan: Plan, policy: dict[str, Any], folder: Path, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Build a case; a row of each of its micro-batches."""
    import torch

    shape, parallel = plan.recipe.model.shape, plan.settled.layout
    precision = plan.recipe.precision.train_linear
    torch.manual_seed(int(os.environ["RANK"]) // parallel.tensor)  # tensor ranks see one input
    config, provider = nemo_stack.provider_of(policy, folder)
    model = nemo_stack.build_model(config, provider, case.ends)
    if plan.recipe.precision.is_exact:
        from fp8_nemo.nemo.aligned.attention import attend_as_the_engine

        attend_as_the_engine(model)
    for tokens in map(int, options.tokens.split(",")):
        lengths = [tokens // options.sequences] * options.sequences
        batch = nemo_stack.micro_batch(policy, shape, lengths)
        for which in ("first", "cached") if precision == "fp8" else ("cached",):
            row: dict[str, Any] = {
                "model": options.model, "variant": case.variant, "precision": precision,
                "part": "ends" if case.ends else "stack", "layers": shape.layers,
                "experts": shape.experts, "tensor": parallel.tensor, "expert": parallel.expert,
                "tokens": tokens, "sequences": options.sequences, "recompute": case.recompute,
                "microbatch": which,
            }  # fmt: skip
            row |= measure(model, batch, case.ends, which == "first", options.repetitions)
            if not case.ends:
                row |= rates(shape, lengths, precision, milliseconds(row) / 1e3, parallel.tensor)
            yield row


def main() -> None:
    """Measure each case, print a table, write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    record.add_options(parser)
    parser.add_argument("--model", default="llama31-8b", help="an option of conf/model")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", default="8192,4096", help="of a micro-batch, several of them")
    parser.add_argument("--sequences", type=int, default=1, help="packed in a micro-batch")
    parser.add_argument("--cases", default=",".join(nemo_stack.VARIANTS), help="several of them")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("arguments", nargs="*", help="of the cell, as for recipes.grpo; they win")
    options = parser.parse_args()
    be_only_rank()
    for tokens in map(int, options.tokens.split(",")):
        if tokens % (128 * options.sequences):
            parser.error(f"--tokens {tokens}: not {options.sequences} sequences of whole 128s")
    record.need("nemo_rl", "megatron", "transformer_engine")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        todo = []
        one = nemo_stack.plan_of(options.model, 1, CASES[0], Path(scratch), options.arguments)
        if one.recipe.model.shape.experts and one.settled.layout.tensor > 1:
            parser.error("model.parallel.tensor: of experts only model.parallel.expert is measured")
        for number, case in enumerate(
            cases(options.cases.split(","), one.recipe.model.shape.experts)
        ):
            folder = Path(scratch) / str(number)
            plan = nemo_stack.plan_of(
                options.model, options.layers, case, folder, options.arguments
            )
            todo.append((case, plan, nemo_stack.policy_of(plan, folder), folder))
        for _, _, policy, _ in todo:  # TransformerEngine reads them once, when it is imported
            os.environ.update(policy["megatron_cfg"].get("env_vars") or {})
        for _, plan, _, folder in todo:
            nemo_stack.write_config(plan.recipe.model.shape, folder)
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        for case, plan, policy, folder in todo:
            try:
                for row in rows_of(case, plan, policy, folder, options):
                    rows.append(row | {"speedup": speedup(row, [*rows, row])})
                    keep(options, rows)
            except Exception as error:  # the other cases are worth having
                traceback.print_exc()
                told = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                rows.append(case._asdict() | {"error": told})
                keep(options, rows)
            forget()
    if os.environ["RANK"] == "0":
        whole = [row for row in rows if "error" not in row]
        record.show(
            f"{options.model}, ms a micro-batch", [{k: r.get(k) for k in SHOWN} for r in whole]
        )
    raise SystemExit(len(whole) < len(rows) if os.environ["RANK"] == "0" else 0)


def be_only_rank() -> None:
    """Let torch.distributed find this process alone, unless a launcher has said otherwise.

    Its port is free: several of these run side by side.
    """
    with socket.socket() as found:
        found.bind(("localhost", 0))
        usual = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost"}
        for name, value in (usual | {"MASTER_PORT": found.getsockname()[1]}).items():
            os.environ.setdefault(name, str(value))


def forget() -> None:
    """Free the model of the case before; Megatron's cache of rotary embeddings would hold it."""
    import torch
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    RotaryEmbedding.forward.cache_clear()  # pyright: ignore[reportFunctionMemberAccess]
    gc.collect()
    torch.cuda.empty_cache()


def keep(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write all rows so far and print the last one."""
    if os.environ["RANK"] == "0":
        record.keep(options.out, options.commit, peak_flops=PEAK, rows=rows)
        last = {key: rows[-1].get(key) for key in (*SHOWN, "error")}
        print({k: v["median"] if isinstance(v, dict) else v for k, v in last.items()}, flush=True)


if __name__ == "__main__":
    main()
