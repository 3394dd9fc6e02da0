"""Train a step in NeMo RL's own policy worker, alone on one GPU, and say where its time goes.

python -m benchmarks.speed.train_worker --path models/30b6 --model qwen3-30b-a3b --layers 6 \
    --out benchmarks/results/train-worker-30b6-h200.json [--tokens 8192,16384] [-- KEY=VALUE ...]

The worker is `Fp8PolicyWorkerImpl` of a plan with that model, in this process: no Ray, no engine.
A step is `--sequences` sequences of random tokens, packed by NeMo RL into micro-batches of
`--tokens`, by the recipe's loss. Rows, per size of a micro-batch, choice of routes and library of
the experts' products (`cutlass` launches a layer's at once, in BF16). Routes are `replayed`, as
with replay=r3, and others in each repetition, as in each step; or `repeated`, given too, the same
again; or the router's `own`, which an update moves. The last two run at the first size alone.
Measured are seconds of `train` and of `get_logprobs`; of `train`'s those of `optimizer`, and in its
last repetition Python's for `garbage`. `device` is one more `train`, of two
micro-batches, under the profiler: its seconds, those in which the GPU ran any kernel or copy, the
kernels' milliseconds by kind, and what the host spent longest in. A profiler slows the host.
`numbers` compares logprobs and gradients of a step by each library with those by the first, which
runs twice: what a library does not repeat to the bit is no difference between two.
Needs NEMO_RL_ROOT, NeMo RL's packages, and a model of `benchmarks.speed.random_model`.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import gc
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import record
from benchmarks.speed.decode_kernels import RANGES, Kernel, busy
from benchmarks.speed.train import be_only_rank, by_kind
from fp8_nemo.launch.driver import prepare
from fp8_nemo.nemo_config.checkout import config_of, host_of
from fp8_nemo.nemo_config.host import root_of
from fp8_nemo.nemo_config.overrides import path_overrides
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.settled import GROUPED

AXES = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]
VARIABLE = GROUPED.rpartition(".")[2]
WARM_UP = 1
HOST_ROWS = 12
SHOWN = ("tokens", "routes", "products", "micro_batches", "train", "optimizer", "logprobs",
         "garbage", "busy")  # fmt: skip


class Case(NamedTuple):
    """One row: `Case(8192, "replayed", "cublas")`."""

    tokens: int
    routes: str
    products: str


def add_options(parser: argparse.ArgumentParser, model: str) -> None:
    """Add what a bench of the worker takes: its file, the model, and arguments of the cell."""
    record.add_options(parser)
    parser.add_argument("--path", type=Path, required=True, help="the model's weights")
    parser.add_argument("--model", default=model, help="an option of conf/model")
    parser.add_argument("--layers", type=int, required=True, help="of the model in --path")
    parser.add_argument("arguments", nargs="*", help="of the cell, as for recipes.grpo; they win")


def plan_of(options: argparse.Namespace) -> Plan:
    """Plan the model on one GPU, nothing recomputed; the command line's arguments win."""
    cell = [
        *("backend=nemo", "data=arithmetic", "cluster.interpreter=system", "cluster.nodes=1"),
        *("cluster.gpus_per_node=1", f"model={options.model}", f"model.path={options.path}"),
        f"model.shape.layers={options.layers}",
        f"grpo.max_new_tokens={options.length - 64}",
        "+nemo.data.max_input_seq_length=64",
        *("grpo.generations_per_prompt=8", "model.memory.recompute=false"),
        f"grpo.prompts_per_step={options.sequences // 8}",
    ]
    [plan] = compose_plans([*cell, *options.arguments], host_of)
    return plan


@contextmanager
def alone(
    parser: argparse.ArgumentParser, options: argparse.Namespace, folder: Path | None = None
) -> Iterator[tuple[Plan, Path]]:
    """Make this process the only rank of a plan: the plan, and a folder for what it writes.

    Args:
        parser: says what is missing, and ends the process.
        options: of the command line.
        folder: in which the folder is made, for as long as the block runs; the system's if None.
    """
    record.need("nemo_rl", "megatron", "transformer_engine")
    be_only_rank()
    plan = plan_of(options)
    root = root_of(plan.recipe)
    if root is None or plan.nemo is None:
        parser.error("set NEMO_RL_ROOT to a clone of NVIDIA-NeMo/RL")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        prepare(plan, root)
        os.environ["NRL_MEGATRON_CHECKPOINT_DIR"] = scratch
        yield plan, Path(scratch)


def worker_of(plan: Plan, folder: Path) -> tuple[Any, Any]:
    """Start NeMo RL's worker of a plan in this process: (worker, configuration)."""
    root = root_of(plan.recipe)
    assert root and plan.nemo
    written = plan.nemo.overrides | path_overrides(plan.recipe, folder, root)
    plain = config_of(root, plan.nemo.base_config, written)
    os.environ.update(plain["policy"]["megatron_cfg"].get("env_vars") or {})  # read by imports
    import numpy
    import ray
    from nemo_rl.algorithms.grpo import MasterConfig
    from nemo_rl.algorithms.utils import get_tokenizer
    from nemo_rl.distributed.named_sharding import NamedSharding
    from nemo_rl.models.generation import configure_generation_config

    from fp8_nemo.nemo.policy_worker import Fp8PolicyWorkerImpl

    config = MasterConfig(**plain)
    tokenizer = get_tokenizer(config.policy["tokenizer"])
    config.policy["generation"] = configure_generation_config(
        config.policy["generation"], tokenizer, has_refit_draft_weights=False, trains_mtp=False
    )
    config.policy["megatron_cfg"]["train_iters"] = 1000
    ray.get_gpu_ids = lambda: [0]  # the worker asks its actor's
    sharding = NamedSharding(numpy.zeros((1, 1, 1, 1), int), AXES)
    worker = Fp8PolicyWorkerImpl(
        config.policy, tokenizer, init_reference_model=False, worker_sharding_annotations=sharding
    )
    return worker, config


def batch_of(plan: Plan, sequences: int, length: int) -> Any:
    """Make what GRPO's loss and the worker take of a step: [B, T]."""
    import torch
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    size = (sequences, length)
    token_mask_BT = torch.ones(size)
    token_mask_BT[:, :16] = 0  # the prompt
    logprobs_BT = torch.full(size, -12.0)
    return BatchedDataDict({
        "input_ids": torch.randint(plan.recipe.model.shape.vocab, size),
        "input_lengths": torch.full((sequences,), length),
        "token_mask": token_mask_BT,
        "sample_mask": torch.ones(sequences),
        "advantages": torch.randn(sequences, 1).expand(size).contiguous(),
        "prev_logprobs": logprobs_BT,
        "generation_logprobs": logprobs_BT.clone(),
        "reference_policy_logprobs": logprobs_BT.clone(),
    })  # fmt: skip


def routes_of(shape: Shape, sequences: int, length: int) -> Any:
    """Draw routes [B, T, L, A]; some experts of a layer are liked more, others in the next draw."""
    import torch

    liked_LE = torch.rand(shape.layers, shape.experts)
    scores_BTLE = torch.rand(sequences, length, shape.layers, shape.experts) + liked_LE
    return scores_BTLE.topk(shape.experts_per_token).indices.short()


def packed(config: Any, batch: Any, tokens: int) -> Any:
    """Shard a batch as NeMo RL's `Policy` does for one rank, micro-batches of `tokens` at most."""
    policy = config.policy
    packing = {
        "algorithm": policy["sequence_packing"]["algorithm"],
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "sequence_length_pad_multiple": policy["make_sequence_length_divisible_by"],
        "max_tokens_per_microbatch": tokens,
    }
    [shard], _ = batch.shard_by_batch_size(1, batch.size, sequence_packing_args=packing)
    return shard


def watched(train: Any) -> dict[str, Any]:
    """Run `train` under the profiler: seconds, the GPU's, kernels, and the host's longest calls."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        began = time.perf_counter()
        train()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    on_device = [e for e in seen.events() or () if e.device_type == DeviceType.CUDA]
    kernels = [
        Kernel(e.name, e.time_range.start, e.time_range.elapsed_us())
        for e in on_device
        if not (e.is_user_annotation or e.name.startswith(RANGES))
    ]
    kinds, others = by_kind((each.name, each.duration / 1e3) for each in kernels)
    calls = sorted(seen.key_averages(), key=lambda each: -each.self_cpu_time_total)[:HOST_ROWS]
    return {
        "seconds": seconds,
        "busy": busy(kernels) / 1e6,
        "launches": len(kernels), "kernels_ms": kinds, "other_kernels_ms": others,
        "host": [{"name": each.key[:80], "calls": each.count,
                  "seconds": each.self_cpu_time_total / 1e6} for each in calls],
    }  # fmt: skip


def cases_of(options: argparse.Namespace, *, experts: bool) -> list[Case]:
    """Return what is measured: for experts with all choices of routes at the first size."""
    sizes = [int(each) for each in options.tokens.split(",")]
    if not experts:
        return [Case(tokens, "none", "cublas") for tokens in sizes]
    return [
        Case(tokens, routes, products)
        for tokens in sizes
        for routes in ("replayed", "repeated", "own")[: 3 if tokens == sizes[0] else 1]
        for products in options.products.split(",")
    ]


def rows_of(worker: Any, config: Any, plan: Plan, options: argparse.Namespace) -> Iterator[dict]:
    """Measure each case; the profile is of two micro-batches."""
    import torch
    from nemo_rl.algorithms.loss import ClippedPGLossFn

    loss, shape = ClippedPGLossFn(config.loss_fn), plan.recipe.model.shape
    whole = batch_of(plan, options.sequences, options.length)
    spent: list[float] = []
    stepped = worker.optimizer.step

    def timed_step() -> Any:
        found: list[Any] = []
        spent.append(seconds_of(lambda: found.append(stepped())))
        return found[0]

    worker.optimizer.step = timed_step
    fixed_BTLA = routes_of(shape, options.sequences, options.length) if shape.experts else None
    collected = watch_garbage()
    gc.collect()
    gc.freeze()  # as the worker does at the end of NeMo RL's set-up
    for case in cases_of(options, experts=shape.experts > 0):
        os.environ[VARIABLE] = "1" if case.products == "cutlass" else "0"  # read at each product
        worker._router_replay_enabled = case.routes in ("replayed", "repeated")

        def shard_of(count: int, case: Case = case) -> Any:
            batch = whole.slice(0, count)
            if case.routes == "replayed":
                batch["routed_experts"] = routes_of(shape, count, options.length)
            elif case.routes == "repeated":
                batch["routed_experts"] = fixed_BTLA[:count]
            return packed(config, batch, case.tokens)

        def train(shard: Any) -> None:
            worker.prepare_for_training()
            worker.train(shard, loss, gbs=shard.size)

        def logprobs(shard: Any) -> None:
            worker.prepare_for_lp_inference()
            worker.get_logprobs(data=shard)

        times = range(WARM_UP + options.repetitions)
        torch.cuda.reset_peak_memory_stats()
        scored = [seconds_of(partial(logprobs, shard_of(options.sequences))) for _ in times]
        trained = [seconds_of(partial(train, shard_of(options.sequences))) for _ in times[:-1]]
        shard, two = shard_of(options.sequences), shard_of(2 * case.tokens // options.length)
        collected.clear()
        trained.append(seconds_of(partial(train, shard)))
        yield {
            **case._asdict(),
            "micro_batches": len(shard.micro_batch_indices[0]),
            "train": record.repeated(trained[WARM_UP:]),
            "optimizer": record.repeated(spent[-options.repetitions:]),
            "logprobs": record.repeated(scored[WARM_UP:]),
            "garbage": sum(collected),
            "max_memory_gib": torch.cuda.max_memory_allocated() / 2**30,
            "device": watched(partial(train, two)),
        }  # fmt: skip


def numbers_of(worker: Any, config: Any, plan: Plan, options: argparse.Namespace) -> list[dict]:
    """Compare the libraries' logprobs and gradients of one step with given routes, no update."""
    from nemo_rl.algorithms.loss import ClippedPGLossFn

    shape, loss = plan.recipe.model.shape, ClippedPGLossFn(config.loss_fn)
    whole = batch_of(plan, options.sequences, options.length)
    whole["routed_experts"] = routes_of(shape, options.sequences, options.length)
    shard = packed(config, whole, int(options.tokens.partition(",")[0]))
    worker._router_replay_enabled = True
    worker.optimizer.step = lambda: (True, 0.0, 0)
    first, *others = options.products.split(",")
    rows, held = [], None
    for products in (first, first, *others):
        os.environ[VARIABLE] = "1" if products == "cutlass" else "0"
        worker.prepare_for_lp_inference()
        logprobs_BT = worker.get_logprobs(data=shard)["logprobs"].cpu()
        worker.prepare_for_training()
        worker.train(shard, loss, gbs=shard.size)
        buffers = worker.model.buffers + worker.model.expert_parallel_buffers
        found = [logprobs_BT, *(each.grad_data.cpu() for each in buffers)]
        held = held or found
        rows.append({"products": products, "against": first} | apart(held, found))
        print(rows[-1], flush=True)
    return rows[1:]


def apart(held: list[Any], found: list[Any]) -> dict[str, float]:
    """Return how far logprobs and gradients are from others: lists of tensors, logprobs first."""
    off_BT = (found[0] - held[0]).abs()
    pairs = zip(held[1:], found[1:], strict=True)
    norms = [(float((new - old).norm()), float(old.norm())) for old, new in pairs]
    difference, size = (math.hypot(*each) for each in zip(*norms, strict=True))
    return {
        "logprob_mean": float(off_BT.mean()),
        "logprob_largest": float(off_BT.max()),
        "gradient_share": difference / size,
    }


def watch_garbage() -> list[float]:
    """Return a list to which Python adds the seconds of each collection of garbage from now on."""
    spent: list[float] = []
    began: list[float] = []

    def note(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            began.append(time.perf_counter())
        elif began:
            spent.append(time.perf_counter() - began.pop())

    gc.callbacks.append(note)
    return spent


def seconds_of(work: Any) -> float:
    """Return the seconds that some work takes, its kernels included."""
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    """Start the worker, measure, print a table, write the file after each row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser, "qwen3-30b-a3b")
    parser.add_argument("--tokens", default="8192,16384", help="of a micro-batch, several of them")
    parser.add_argument("--products", default="cublas,cutlass", help="of experts, one or both")
    parser.add_argument("--sequences", type=int, default=64, help="whole eights")
    parser.add_argument("--length", type=int, default=2048, help="tokens of each")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with alone(parser, options) as (plan, scratch):
        worker, config = worker_of(plan, scratch)
        for row in rows_of(worker, config, plan, options):
            rows.append(row | {"busy": row["device"]["busy"] / row["device"]["seconds"]})
            record.keep(
                options.out, options.commit, precision=plan.recipe.precision.name, rows=rows
            )
            print({key: rows[-1][key] for key in SHOWN}, flush=True)
        if plan.recipe.model.shape.experts:
            numbers = numbers_of(worker, config, plan, options)
            record.keep(
                options.out, options.commit,
                precision=plan.recipe.precision.name, rows=rows, numbers=numbers,
            )  # fmt: skip
    shown = [{key: row[key] for key in SHOWN} for row in rows]
    record.show(f"{options.model}, a step in NeMo RL's worker", shown)


if __name__ == "__main__":
    main()
