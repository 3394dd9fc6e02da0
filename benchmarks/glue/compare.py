"""Our glue against NeMo RL's own, in one real set-up of NeMo RL: refit, mismatch, ranges, faults.

python -m benchmarks.glue.compare --outputs outputs --out FILE.json
    [--parts refit,mismatch,scales,ranges,bytes,faults] [--glues fp8,bytes]
    -- model=small-llama model.path=DIR precision=fp8-kv-attn [cluster.rollout_gpus=1]

Sets NeMo RL up once for the cell that is named, and then changes nothing but the glue: policy and
vLLM workers are told another recipe, and NeMo RL's handshake runs again. So stock and ours share
weights, prompts, process and machine.

`refit` times `refit_policy_generation`, and of it what `transfer_and_update_weights` takes;
the rest of it is offloading the policy and waking the engine, each with its seconds; `export` is
NeMo RL's export alone, `encode` the whole stream made and thrown away; what remains of a refit is
transfer and load, and what `names` or `bytes` adds to `fp8` is the proof. As many rounds again,
with clocks inside the workers, say where each side's host was (`where`), Python's collections
included: refits vary by more than a proof costs. What its opening takes may be what the receiver
would have waited `for the first tensors`; `for the device` is waited apart before settling, with
and without a book.
`--buffers 0.3,0.03` does it again with other buffers than NeMo RL's own share of the free memory,
by NRL_REFIT_BUFFER_MEMORY_RATIO.
`mismatch` samples the same prompts and scores them; `scales` does so with the scales of an FP8
cache as calibrated, and with all of them 1, what vLLM has without calibration. `ranges` times the
logprob forward watched and not, and NeMo RL's calibration. `bytes`, of a dense model in `fp8-e2e`
and not with `--anyway`, is the share of each weight that the trainer's last forward and the engine
held alike, bytes and scales. `faults` breaks a refit in each way and says
what stock and ours made of it. `--anyway` goes on with an engine whose FP8 weights are not the
plan's, as with a router gate: the line that would have stopped a run is in the file, and what each
refit made of it.
`--after FILE` waits, set up, until that file is there: several set-ups start together, and each
measures alone.
Needs NEMO_RL_ROOT and NeMo RL's packages (docs/install.md).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import record
from benchmarks.glue import held_alike
from fp8_nemo.correction.mismatch import LogprobPair, mismatch_metrics
from fp8_nemo.glue.wire import RefitError, kv_scale_names
from fp8_nemo.launch import driver, session
from fp8_nemo.launch.engine_checks import EngineError, refit_problems, refit_reports
from fp8_nemo.launch.environments import settings_of
from fp8_nemo.nemo.worker_settings import VARIABLE
from fp8_nemo.nemo_config.checkout import host_of
from fp8_nemo.nemo_config.host import root_of
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.notes import STOCK_RECALIBRATE
from fp8_nemo.recipe.options.precision import Glue
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.plain import to_json
from fp8_nemo.recipe.problems import load_problems, write_problems
from fp8_nemo.runs import run_dir

GLUES = {
    "stock": Glue("stock", "stock", "bf16", "off", STOCK_RECALIBRATE, "fa3"),
    "fused": Glue("fused", "fused", "bf16", "off"),
    "fp8": Glue("fp8", "fused", "fp8", "off"),
    "names": Glue("names", "fused", "fp8", "names"),
    "bytes": Glue("bytes", "fused", "fp8", "bytes"),
    "stock rule": Glue("stock rule", "stock", "fp8", "bytes"),
}
TRANSFER = "prepare_for_generation/transfer_and_update_weights"
AROUND = ("policy.offload_before_refit", "policy.offload_after_refit",
          "generation.prepare_for_generation")  # fmt: skip
"""What a colocated refit waits for beside the transfer: the two sides change places in memory."""
SAMPLES = {"mismatch": 128, "faults": 16}  # of each prompt; 16 leave a standard error of 20%
BUFFERS = "NRL_REFIT_BUFFER_MEMORY_RATIO"  # what NeMo RL reads before each refit (grpo.py:2360)


class Clock:
    """The one method of NeMo RL's timer that a refit uses."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Record the seconds of the block under a name."""
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


class Bench:
    """One set-up, and how to work it."""

    def __init__(self, parts: session.Session, recipe: Recipe, colocated: bool) -> None:
        self.parts, self.recipe, self.colocated = parts, recipe, colocated

    def switch(self, glue: Glue) -> None:
        """Tell all workers another glue, and let the sides shake hands again."""
        self.recipe = dataclasses.replace(self.recipe, glue=glue)
        content = to_json(dataclasses.asdict(settings_of(self.recipe)))
        self.in_policy(set_recipe_of_policy, content)
        self.in_vllm(set_recipe_of_vllm, content)
        info = self.parts.policy.prepare_refit_info()
        self.parts.generation.prepare_refit_info(info)

    def in_policy(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function in every policy worker."""
        import ray

        workers = self.parts.policy.worker_group.workers
        return ray.get([each.__ray_call__.remote(work, *arguments) for each in workers])

    def in_vllm(self, work: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function in every one of vLLM's workers."""
        import ray

        actors = self.parts.generation.worker_group.workers
        answers = ray.get([each.__ray_call__.remote(ask, work, arguments) for each in actors])
        return [one for answer in answers for one in answer]

    def refit(self) -> dict[str, float]:
        """Run one refit as NeMo RL's loop does; return seconds, and what the receivers proved."""
        from nemo_rl.algorithms.grpo import refit_policy_generation

        clock, around = Clock(), dict.fromkeys(AROUND, 0.0)
        sides = {"policy": self.parts.policy, "generation": self.parts.generation}
        for name in AROUND:
            side, method = name.split(".")
            setattr(sides[side], method, clocked(around, name, getattr(sides[side], method)))
        try:
            with clock.time("refit"):
                refit_policy_generation(
                    self.parts.policy, self.parts.generation, self.colocated, timer=clock
                )
        finally:
            for name in AROUND:
                side, method = name.split(".")
                delattr(sides[side], method)
        proofs = [proof for proof in refit_reports(self.parts.generation) if proof]
        found = {"refit": clock.seconds["refit"], "transfer": clock.seconds[TRANSFER]} | around
        kept = ("bytes", "verified_weights")
        return found | {f"proof_{key}": proof[key] for proof in proofs[:1] for key in kept}

    def rest(self) -> None:
        """Put things back after a refit: the engine asleep, the policy on its GPU."""
        self.parts.generation.finish_generation()
        self.parts.policy.prepare_for_lp_inference()

    def sampled(self, prompts: Any) -> dict[str, float]:
        """Return the mismatch of what the engine samples now; leave it asleep."""
        import torch

        self.parts.generation.prepare_for_generation()
        found = self.parts.generation.generate(prompts)
        self.rest()
        lengths = found["unpadded_sequence_lengths"]
        train_BT = self.scored(found["output_ids"], lengths)
        width = min(train_BT.shape[1], found["logprobs"].shape[1])
        position_T = lengths.new_ones(width).cumsum(0) - 1
        after_B = prompts["input_lengths"]
        mask_BT = (position_T >= after_B[:, None]) & (position_T < lengths[:, None])
        pair = LogprobPair(train_BT[:, 1:width], found["logprobs"][:, 1:width], mask_BT[:, 1:width])
        k3_N = torch.expm1(pair.log_ratio_N) - pair.log_ratio_N
        mean, error = mean_with_error(pair.log_ratio_BT.abs(), pair.mask_BT)
        return mismatch_metrics(pair) | {
            "kl standard error": k3_N.std().item() / math.sqrt(len(k3_N)),
            "mean abs log ratio": mean,
            "mean abs log ratio standard error": error,
            "tokens": len(k3_N),
        }

    def scored(self, ids_BT: Any, lengths_B: Any) -> Any:
        """Return the trainer's logprobs `[B, T]`."""
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

        data = BatchedDataDict({"input_ids": ids_BT, "input_lengths": lengths_B})
        return self.parts.policy.get_logprobs(data)["logprobs"]

    def prompts(self, samples: int) -> Any:
        """Return the first prompts of the data, each repeated."""
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

        count = self.recipe.grpo.prompts_per_step or 1
        batch = session.first_prompts(self.parts, count)
        repeated = {key: value.repeat_interleave(samples, 0) for key, value in batch.items()}
        return BatchedDataDict(repeated)


def mean_with_error(value_BT: Any, mask_BT: Any) -> tuple[float, float]:
    """Return the mean over real tokens and its standard error; sequences are independent.

    A few tokens make a KL, and its error is that of those few; this mean is made by all.
    """
    count_B = mask_BT.sum(1).double()
    sum_B = value_BT.double().masked_fill(~mask_BT.bool(), 0.0).sum(1)
    mean = sum_B.sum() / count_B.sum()
    spread = (sum_B - mean * count_B).square().sum().sqrt() / count_B.sum()
    return mean.item(), spread.item()


def ask(actor: Any, work: Callable[..., Any], arguments: tuple) -> list[Any]:
    """Call a function in a generation actor; ranks without an engine return nothing."""
    return actor.llm.collective_rpc(work, args=arguments) if actor.llm is not None else []


def set_recipe_of_policy(worker: Any, content: str) -> None:
    """Set the recipe of a policy worker, and unfreeze what the last glue froze."""
    import gc
    import os

    os.environ[VARIABLE] = content
    worker.fp8_nemo_wire = None
    gc.unfreeze()


def set_recipe_of_vllm(worker: Any, content: str) -> None:
    """Set the recipe of a vLLM worker."""
    import os

    worker = getattr(worker, "worker", worker)  # vLLM hands out its wrapper
    from fp8_nemo.nemo.worker_settings import VARIABLE, WorkerSettings

    os.environ[VARIABLE] = content
    type(worker).fp8_nemo_settings = WorkerSettings.from_environment()
    if '"quantize": "stock", "transfer": "bf16"' in content:  # its KV scales are BF16, ours FP32
        for name, parameter in worker.model_runner.model.named_parameters():
            if name.endswith((".attn.q_scale", ".attn.k_scale", ".attn.v_scale")):
                parameter.data = parameter.data.bfloat16()


def time_export(worker: Any, stock: bool) -> float:
    """Return the seconds in which a policy worker makes the stream and drops it."""
    import torch
    from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

    iterate = MegatronPolicyWorkerImpl if stock else type(worker)
    with torch.no_grad():
        torch.cuda.synchronize()
        start = time.perf_counter()
        wire, worker.fp8_nemo_wire = worker.fp8_nemo_wire, None  # no KV scale is asked for
        for _ in iterate._iter_params_with_optional_kv_scales(worker, None):
            pass
        worker.fp8_nemo_wire = wire
        torch.cuda.synchronize()
        return time.perf_counter() - start


def clocked(spent: dict[str, float], name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it adds its seconds on the host to `spent`."""

    def run(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return work(*arguments, **options)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - start

    return run


def clock_garbage(spent: dict[str, float], name: str) -> Callable[[str, dict[str, Any]], None]:
    """Clock Python's own collections, which take long on Megatron's heap; return the callback."""
    import gc

    begun: list[float] = []

    def heard(phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            begun.append(time.perf_counter())
        elif begun:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - begun.pop()

    gc.callbacks.append(heard)
    return heard


def clock_policy(worker: Any) -> None:
    """Clock a policy worker: all of the sending, and the part that makes the stream."""
    spent: dict[str, float] = {}
    worker.fp8_nemo_spent = spent
    worker.fp8_nemo_heard = clock_garbage(spent, "sender: garbage collection")
    make = type(worker)._iter_params_with_optional_kv_scales

    def made(*arguments: Any, **options: Any) -> Iterator[Any]:
        stream = make(worker, *arguments, **options)
        take = clocked(spent, "sender: make the stream", lambda: next(stream, None))
        while (pair := take()) is not None:
            yield pair

    worker._iter_params_with_optional_kv_scales = made
    for name in ("stream_weights_via_ipc_zmq", "broadcast_weights_for_collective"):
        setattr(worker, name, clocked(spent, "sender: all", getattr(worker, name)))


def clock_vllm(worker: Any) -> None:
    """Clock a vLLM worker: all of the receiving, and the parts that load and prove."""
    import torch

    from fp8_nemo.nemo import receiver

    worker = getattr(worker, "worker", worker)
    spent: dict[str, float] = {}
    worker.fp8_nemo_spent = spent
    worker.fp8_nemo_heard = clock_garbage(spent, "receiver: garbage collection")
    model = worker.model_runner.model
    model.load_weights = clocked(spent, "receiver: vLLM's loader", model.load_weights)
    worker._load_weights = clocked(spent, "receiver: load", worker._load_weights)
    for name in ("update_weights_via_ipc_zmq", "update_weights_from_collective"):
        setattr(worker, name, clocked(spent, "receiver: all", getattr(worker, name)))
    begin, take, settle = receiver.Refit.__init__, receiver.Refit.take, receiver.Ledger.close
    close = receiver.Refit.close
    worker.fp8_nemo_unclocked = begin, take, settle, close

    opened: list[float] = []

    def timed_begin(*arguments: Any) -> None:
        clocked(spent, "receiver: open the ledger", begin)(*arguments)
        opened.append(time.perf_counter())

    def timed_take(*arguments: Any) -> None:
        if opened:
            spent["receiver: for the first tensors"] = time.perf_counter() - opened.pop()
        take(*arguments)

    def timed_settle(*arguments: Any) -> Any:
        return clocked(spent, "receiver: settle the ledger", settle)(*arguments)

    def timed_close(refit: Any, update: Callable[[], bool]) -> Any:
        """Close a refit, and clock how long the device still loads before the ledger closes."""

        def update_and_wait() -> bool:
            landed = update()
            clocked(spent, "receiver: for the device", torch.cuda.synchronize)()
            return landed

        return close(refit, update_and_wait)

    receiver.Refit.__init__, receiver.Refit.take = timed_begin, timed_take  # pyright: ignore
    receiver.Ledger.close, receiver.Refit.close = timed_settle, timed_close  # pyright: ignore


def take_clock(worker: Any) -> dict[str, float]:
    """Return a worker's seconds by name, and remove its clocks."""
    import gc

    worker = getattr(worker, "worker", worker)
    gc.callbacks.remove(worker.__dict__.pop("fp8_nemo_heard"))
    for name in ("_iter_params_with_optional_kv_scales", "stream_weights_via_ipc_zmq",
                 "broadcast_weights_for_collective"):  # fmt: skip
        worker.__dict__.pop(name, None)
    if unclocked := worker.__dict__.pop("fp8_nemo_unclocked", None):
        from fp8_nemo.nemo import receiver

        receiver.Refit.__init__, receiver.Refit.take = unclocked[:2]
        receiver.Ledger.close, receiver.Refit.close = unclocked[2:]
    return worker.__dict__.pop("fp8_nemo_spent")


def refits(
    bench: Bench,
    glues: list[str],
    repetitions: int,
    shares: list[str],
    keep: Callable[[Any], None],
) -> dict[str, Any]:
    """Time each glue in turn, `repetitions` rounds; a glue's first refit does not count.

    A run has one glue, whose receiver looks the engine's tensors up once.

    Args:
        bench: the set-up.
        glues: by their names in `GLUES`.
        repetitions: rounds.
        shares: of the free memory, for the buffers through which a colocated refit goes. `bytes`
            is timed with the first alone.
        keep: takes what is known after each round.
    """
    from fp8_nemo.nemo.policy import refit_bytes

    kinds = {name: (name, shares[0]) for name in glues}
    kinds |= {
        f"{name}, {share}": (name, share)
        for share in shares[1:]
        for name in glues
        if name != "bytes"
    }
    found: dict[str, Any] = {name: {"rounds": []} for name in kinds}
    for _ in range(repetitions):
        for name, (glue, share) in kinds.items():
            os.environ[BUFFERS] = share
            _clean(bench, glue)
            found[name]["rounds"].append(bench.refit())
            bench.rest()
            found[name]["bytes"] = refit_bytes(bench.parts.policy.refit_info)
            found[name]["median"] = _medians(found[name]["rounds"])
        keep(found)
    for round_ in range(repetitions):  # apart from the refits, whose memory they would take
        for name, (glue, _) in kinds.items():
            bench.switch(GLUES[glue])
            export = max(bench.in_policy(time_export, True))
            encode = max(bench.in_policy(time_export, False))
            found[name]["rounds"][round_] |= {"export": export, "encode": encode}
            found[name]["median"] = _medians(found[name]["rounds"])
        keep(found)
    for _ in range(repetitions):
        for name, (glue, share) in kinds.items():
            os.environ[BUFFERS] = share
            _clean(bench, glue)
            found[name].setdefault("clocked rounds", []).append(_clocked_refit(bench))
        keep(found)
    for each in found.values():
        clocked_rounds = each["clocked rounds"]
        clocks = sorted({key for times in clocked_rounds for key in times})
        each["where"] = {key: median(t.get(key, 0.0) for t in clocked_rounds) for key in clocks}
        print({k: round(v, 3) for k, v in each["median"].items()}, each["bytes"], flush=True)
        print({k: round(v, 3) for k, v in each["where"].items()}, flush=True)
    return found


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the medians of what all rounds have so far."""
    keys = [key for key in rounds[0] if all(key in each for each in rounds)]
    return {key: median(each[key] for each in rounds) for key in keys}


def _clocked_refit(bench: Bench) -> dict[str, float]:
    """Time one refit with clocks in both sides' workers; return seconds by name, the slowest's."""
    bench.in_policy(clock_policy)
    bench.in_vllm(clock_vllm)
    times = bench.refit()
    sides = bench.in_policy(take_clock) + bench.in_vllm(take_clock)
    bench.in_vllm(mend_vllm)
    bench.rest()
    clocks: dict[str, float] = {}
    for key, spent in chain.from_iterable(side.items() for side in sides):
        clocks[key] = max(spent, clocks.get(key, 0.0))
    return {name: times[name] for name in ("refit", "transfer")} | clocks


def mismatches(bench: Bench, keep: Callable[[Any], None]) -> dict[str, Any]:
    """Measure the mismatch of the same prompts after each glue's refit; keep rows as they come."""
    found, prompts = {}, bench.prompts(SAMPLES["mismatch"])
    for name in ("stock", "bytes", "stock rule"):
        bench.switch(GLUES[name])
        try:
            bench.refit()
            found[name] = bench.sampled(prompts)
        except Exception as error:  # what a run would stop with
            found[name] = {"error": _first_reason(bench, error)[:400]}
            bench.rest()
        keep(found)
        print(name, found[name], flush=True)
    return found


def scales(bench: Bench, keep: Callable[[Any], None]) -> dict[str, Any]:
    """Measure the mismatch of the same prompts with an FP8 cache's scales calibrated, and at 1."""
    held, prompts = bench.parts.policy.kv_scales, bench.prompts(SAMPLES["mismatch"])
    usual, found = dict(held.in_force), {}
    bench.switch(GLUES["bytes"])
    for name, factors in (("calibrated", usual), ("all 1", dict.fromkeys(usual, 1.0))):
        held.in_force = factors
        bench.refit()
        found[name] = _finite(bench.sampled(prompts)) | {"largest scale": max(factors.values())}
        keep(found)
        print(name, found[name], flush=True)
    held.in_force = usual
    return found


def bytes_alike(bench: Bench, keep: Callable[[Any], None]) -> dict[str, Any]:
    """Measure the share of bytes that both sides hold alike, per glue, layer and weight.

    TransformerEngine quantizes fused matrices, in whose blocks Q, K and V meet where a head is not
    128 wide; vLLM holds them apart.
    """
    found: dict[str, Any] = {}
    prompts = bench.prompts(1)
    for name in ("stock", "bytes", "stock rule"):
        bench.switch(GLUES[name])
        bench.refit()
        [engine, *_] = bench.in_vllm(fp8_of_engine)  # asleep, it holds nothing
        bench.rest()
        bench.scored(prompts["input_ids"], prompts["input_lengths"])
        [trainer, *_] = bench.in_policy(fp8_of_trainer)
        shape, rows = bench.recipe.model.shape, []
        for fused, (bytes_OI, scale_PQ) in trainer.items():
            for wire, mine in held_alike.split_fused(fused, bytes_OI, scale_PQ, shape).items():
                theirs = held_alike.with_rows(*engine[wire])
                rows.append({"weight": wire} | held_alike.alike(mine, theirs))
        found[name] = {"mean": held_alike.mean_by_kind(rows), "rows": rows}
        keep(found)
        print(name, found[name]["mean"], flush=True)
    return found


def fp8_of_engine(worker: Any) -> dict[str, tuple[Any, Any]]:
    """Return bytes `[O, I]` and block scales of each FP8 weight in a vLLM worker, by wire name."""
    import torch

    from fp8_nemo.glue import wire as weights
    from fp8_nemo.nemo.receiver import EngineMemory

    worker = getattr(worker, "worker", worker)
    engine = EngineMemory(worker.model_runner.model, type(worker).fp8_nemo_settings)
    parts = engine.destination().parts
    return {
        name: (parts[name].tensor.view(torch.uint8).cpu(), parts[scale].tensor.float().cpu())
        for name in parts
        if (scale := weights.scale_name(name)) in parts
    }


def fp8_of_trainer(worker: Any) -> dict[str, tuple[Any, Any]]:
    """Return what TransformerEngine kept of its last forward, by Megatron's name."""
    import torch

    found = {}
    for name, module in worker.model.named_modules():
        held = getattr(module, "_fp8_workspaces", {}).get("weight")
        if held is not None:
            bytes_OI = held._rowwise_data.view(torch.uint8)
            blocks = -(-bytes_OI.shape[1] // 128)  # TransformerEngine pads the scales to fours
            found[name] = bytes_OI.cpu(), held._rowwise_scale_inv[:, :blocks].float().cpu()
    return found


def ranges(bench: Bench, tokens: int, sequences: int, repetitions: int) -> dict[str, Any]:
    """Time logprob forwards, watched and not, and NeMo RL's calibration, on random tokens."""
    import torch
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    if bench.recipe.precision.rollout_kv != "fp8":
        return {}
    vocabulary = bench.recipe.model.shape.vocab
    ids = torch.randint(0, vocabulary, (sequences, tokens))
    lengths = torch.randint(tokens // 2, tokens + 1, (sequences,))
    data = BatchedDataDict({"input_ids": ids, "input_lengths": lengths})
    policy = bench.parts.policy
    seconds: dict[str, list[float]] = {"plain": [], "watched": [], "stock": [], "read": []}
    scales: dict[str, dict[str, float]] = {}
    for _ in range(repetitions + 1):
        bench.switch(GLUES["stock"])
        seconds["plain"].append(_seconds(lambda: policy.get_logprobs(data)))
        start = time.perf_counter()
        stock = super(type(policy), policy).calibrate_qkv_fp8_scales(  # pyright: ignore
            data, include_q=True, margin=1.0
        )
        seconds["stock"].append(time.perf_counter() - start)
        scales["stock"] = stock["layers"]
        bench.switch(GLUES["bytes"])
        seconds["watched"].append(_seconds(lambda: policy.get_logprobs(data)))
        start = time.perf_counter()
        amax = policy.run_all_workers_single_data("fp8_nemo_take_ranges")[0]
        seconds["read"].append(time.perf_counter() - start)
        scales["ours"] = {
            name: value / 448
            for layer, row in enumerate(amax)
            for name, value in zip(kv_scale_names(layer), row, strict=True)
        }
    middle = {name: median(times[1:]) for name, times in seconds.items()}
    ratio = [scales["ours"][name] / scales["stock"][name] for name in scales["stock"]]
    print(middle, "scales ours / stock", min(ratio), max(ratio), flush=True)
    return {
        "tokens": int(lengths.sum()), "seconds": seconds, "median": middle, "scales": scales,
        "overhead": middle["watched"] + middle["read"] - middle["plain"],
    }  # fmt: skip


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# --- faults: each is a function for one side's workers; a clean refit of a new switch undoes it


def drop_on_the_wire(worker: Any, name: str) -> None:
    """Make a vLLM worker lose a tensor on arrival, before anything has seen it."""
    worker = getattr(worker, "worker", worker)
    take = type(worker)._load_weights
    worker._load_weights = lambda weights: take(worker, [p for p in weights if p[0] != name])


def loader(worker: Any, change: Callable[[str, Any], Any]) -> None:
    """Make a vLLM worker's loader take the next refit, and change, or skip (None), what it gets."""
    worker = getattr(worker, "worker", worker)
    if (engine := getattr(worker, "fp8_nemo_engine", None)) is not None:
        engine.proven = None  # as before a first refit: later ones are copied past the loader
    model = worker.model_runner.model
    load = model.load_weights

    def changed(weights: Any) -> Any:
        pairs = [(name, change(name, tensor)) for name, tensor in weights]
        return load([pair for pair in pairs if pair[1] is not None])

    model.load_weights = changed


def stale_scale(worker: Any, name: str) -> None:
    """Make a vLLM worker keep old block scales with a new weight, as NeMo RL once did."""
    loader(worker, lambda n, t: None if n == f"{name}_scale_inv" else t)


def wrong_layout(worker: Any, name: str) -> None:
    """Make a vLLM worker load rows in another order, the shape kept (verl #7986)."""
    loader(worker, lambda n, t: t.flip(0) if n == name else t)


def kv_scales_lost(worker: Any, name: str) -> None:
    """Make a vLLM worker lose the KV scales on the way to the kernels (NeMo RL #3225)."""
    loader(worker, lambda n, t: None if n.endswith((".q_scale", ".k_scale", ".v_scale")) else t)


def stock_receiver(worker: Any, name: str) -> None:
    """Make a vLLM worker use NeMo RL's own class, as without our plugin."""
    worker = getattr(worker, "worker", worker)
    stock = next(each for each in type(worker).__mro__ if each.__module__.endswith("vllm_backend"))
    for method in ("_load_weights", "update_weights_via_ipc_zmq", "update_weights_from_collective"):
        setattr(worker, method, getattr(stock, method).__get__(worker))


def four_times(worker: Any, factor: float) -> None:
    """Multiply a policy worker's weights, as an update would, so that a lost refit shows."""
    import torch

    with torch.no_grad():
        for name, parameter in worker.model.named_parameters():
            if "layers.1.mlp" in name and parameter.ndim >= 2 and "router" not in name:
                parameter.mul_(factor)


def nan_in_the_trainer(worker: Any, name: str) -> None:
    """Write NaN into one weight of a policy worker, as if it had diverged."""
    import torch

    parameter = next(
        p for n, p in worker.model.named_parameters() if "layers.1.mlp" in n and p.ndim == 2
    )
    with torch.no_grad():
        worker.fp8_nemo_kept = parameter, parameter.flatten()[5].clone()
        parameter.view(-1)[5] = torch.nan


def mend_vllm(worker: Any) -> None:
    """Undo what a fault did to a vLLM worker."""
    worker = getattr(worker, "worker", worker)
    for name in ("_load_weights", "update_weights_via_ipc_zmq", "update_weights_from_collective"):
        worker.__dict__.pop(name, None)
    worker.model_runner.model.__dict__.pop("load_weights", None)


def mend_policy(worker: Any) -> None:
    """Undo what a fault did to a policy worker."""
    import torch

    if kept := worker.__dict__.pop("fp8_nemo_kept", None):
        with torch.no_grad():
            kept[0].view(-1)[5] = kept[1]


FAULTS: dict[str, tuple[str, Callable[..., None]]] = {
    "weight dropped on the wire": ("vllm", drop_on_the_wire),
    "stale scale_inv": ("vllm", stale_scale),
    "wrong-layout weight": ("vllm", wrong_layout),
    "KV scales lost": ("vllm", kv_scales_lost),
    "plugin missing": ("vllm", stock_receiver),
    "NaN in a trainer weight": ("policy", nan_in_the_trainer),
}


def faults(bench: Bench, keep: Callable[[Any], None]) -> list[dict[str, Any]]:
    """Test each fault with stock, names and bytes; note the error, or the mismatch.

    Every faulty refit follows a clean one and an update (weights times 4, exactly undone after), so
    that what is lost leaves something old. Rows are kept as they come.
    """
    experts, found, prompts = bench.recipe.model.shape.experts, [], bench.prompts(SAMPLES["faults"])
    name = f"model.layers.1.mlp.{'experts.0.' if experts else ''}gate_proj.weight"
    held = bench.parts.policy.kv_scales
    usual = dict(held.in_force)
    for fault, (side, inject) in FAULTS.items():
        if fault == "KV scales lost" and bench.recipe.precision.rollout_kv != "fp8":
            continue
        for glue in ("names", "bytes", "stock"):
            if fault == "plugin missing" and not GLUES[glue].has_receiver:
                continue
            _clean(bench, "stock" if glue == "stock" else "bytes")
            bench.switch(GLUES[glue])
            bench.in_policy(four_times, 4.0)
            held.in_force = {n: 1.5 * scale for n, scale in usual.items()}
            (bench.in_vllm if side == "vllm" else bench.in_policy)(inject, name)
            row: dict[str, Any] = {"fault": fault, "glue": glue, "error": None}
            start = time.perf_counter()
            try:
                bench.refit()
                if fault == "NaN in a trainer weight":  # sampling from it may end the engine
                    row["passed"] = "the engine holds NaN"
                    bench.rest()
                else:
                    row["mismatch"] = _finite(bench.sampled(prompts))
            except Exception as error:  # what a run would stop with
                row["error"] = _first_reason(bench, error)[:400]
                bench.rest()
            row["seconds"] = time.perf_counter() - start
            bench.in_vllm(mend_vllm)
            bench.in_policy(mend_policy)
            bench.in_policy(four_times, 0.25)
            held.in_force = usual
            found.append(row)
            keep(found)
            print(row, flush=True)
    _clean(bench, "bytes")
    found.append({"fault": "none, after all", "mismatch": bench.sampled(prompts)})
    print(found[-1], flush=True)
    return found


def _first_reason(bench: Bench, error: Exception) -> str:
    """Return the reason that a run would give: the sender's names, the receivers', or the error."""
    if isinstance(error, RefitError):
        return driver._reason(error)
    return (refit_problems(bench.parts.generation) or [driver._reason(error)])[0]


def _check_and_note(
    check: Callable[..., None], note: Callable[[str], None], dtypes: dict[str, str], recipe: Recipe
) -> None:
    """Note what a run would stop with at its start, instead of raising it."""
    try:
        check(dtypes, recipe)
    except EngineError as error:
        note(str(error))
        print(error, flush=True)


def _clean(bench: Bench, glue: str) -> None:
    bench.switch(GLUES[glue])
    bench.refit()
    bench.rest()


def _finite(metrics: dict[str, float]) -> dict[str, Any]:
    return {k: v if math.isfinite(v) else str(v) for k, v in metrics.items()}


def main() -> None:
    """Set up, measure, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outputs", type=Path, required=True)
    record.add_options(parser)
    parser.add_argument("--parts", default="refit,mismatch")
    parser.add_argument("--glues", default="stock,fused,fp8,names,bytes", help="for refit")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence, for ranges")
    parser.add_argument("--sequences", type=int, default=512, help="for ranges")
    parser.add_argument("--buffers", default="0.3", help="shares of free memory, for refit")
    parser.add_argument(
        "--anyway", action="store_true", help="with an engine that is not the plan's"
    )
    parser.add_argument("--after", type=Path, help="a file to wait for, set up")
    parser.add_argument("arguments", nargs="*", help="of the cell, as for recipes.grpo")
    options = parser.parse_args()
    cell = ["backend=nemo", f"outputs={options.outputs}", *options.arguments]
    [plan] = compose_plans(cell, host_of)
    colocated = plan.settled.shares_gpus
    if "," in options.buffers and not colocated:
        parser.error("--buffers: NeMo RL shares memory in a colocated refit alone")
    model, trained = plan.recipe.model, plan.recipe.precision.train_linear
    layout = plan.settled.layout
    whole = layout.tensor == layout.pipeline == 1 and not model.shape.experts
    if "bytes" in options.parts.split(",") and not (whole and trained == "fp8"):
        parser.error("--parts bytes: a dense model in FP8 training, tensor and pipeline of 1")
    [frozen] = run_dir.freeze([plan])
    root = root_of(plan.recipe)
    assert root
    (frozen.path / "log").mkdir(exist_ok=True)
    driver.prepare(plan, root)
    problems = load_problems(plan.recipe.data, plan.recipe.seed)
    write_problems(run_dir.data_dir(frozen.path), problems)
    content: dict[str, Any] = {"colocated": colocated}

    def keep(name: str, found: Any) -> None:
        content[name] = found
        record.keep(options.out, options.commit, **content)

    if options.anyway:
        session.check_engine = partial(
            _check_and_note, session.check_engine, partial(keep, "engine")
        )
    start = time.perf_counter()
    with driver.own_ray(), session.opened(plan, frozen.path, root) as parts:
        content["set-up seconds"] = time.perf_counter() - start
        print("set up", content["set-up seconds"], flush=True)
        while options.after and not options.after.exists():
            time.sleep(0.5)
        bench = Bench(parts, plan.recipe, colocated)
        work: dict[str, Callable[[], Any]] = {
            "refit": lambda: refits(
                bench,
                options.glues.split(","),
                options.repetitions,
                options.buffers.split(","),
                partial(keep, "refit"),
            ),
            "mismatch": lambda: mismatches(bench, partial(keep, "mismatch")),
            "scales": lambda: scales(bench, partial(keep, "scales")),
            "bytes": lambda: bytes_alike(bench, partial(keep, "bytes")),
            "ranges": lambda: ranges(bench, options.tokens, options.sequences, options.repetitions),
            "faults": lambda: faults(bench, partial(keep, "faults")),
        }
        for name in options.parts.split(","):
            keep(name, work[name]())


if __name__ == "__main__":
    main()
