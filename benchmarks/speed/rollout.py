"""Decode speed of vLLM by precision: the same batch for all, and a KV cache that overflows in BF16.

python -m benchmarks.speed.rollout --out benchmarks/results/rollout-8b-h200.json [--gpus 0,1,2,3]
    [--model llama31-8b] [--precisions bf16,fp8-kv-attn] [--points 64x1024,32x8192] [--limited
    128x256+768 | none] [--tensor 2] [--caches outputs/caches] [--decode fa3] [--eager] [--nemo]
    [--small]

One process per precision, one after the other, or side by side with one GPU each. The engine runs
inside that process, with statistics on and CUDA graphs, as in NeMo RL's worker; `--nemo` is that
worker itself, with its flags (sleep mode, logprobs, prefix cache) and its patches of vLLM. Weights
are random with a trained model's spread: vLLM's dummies are zeros in FP8, which multiply faster.

`resident`: BATCHxPROMPT; all prompts at once, then three stretches of decode steps in which every
sequence makes one token: seconds per step, tokens/s, and the time to the first token of one prompt
alone. `limited`: BATCHxPROMPT+OUTPUT in a cache of 1/1.6 of what BF16 needs, the same bytes for
all: the rest of the engine's blocks are held (`--kv-gib` starts the engine with a cache of one size
instead). Tokens/s from first prompt to last token, and how often a request was preempted.
`--tensor 2` spreads one engine over that many GPUs, by vLLM's own processes and with the model
runner that plans choose there; NeMo RL runs such engines by Ray. vLLM's fusion of all-reduce and
norm is off there: it needs NVLink multicast, which a machine may lack.

Seconds of 8B in BF16 on an H200 (4.8 TB/s at 88%, prefill 30k tokens/s): engine start 60; prefill
of all points 33; decode 215 steps each of 5.6, 12.5, 5.6, 11.7, 5.6, 11.7 ms, 12; first tokens 4;
limited, 4 times 9. About 170 in all, and in FP8 on DeepGEMM twice that where its cache is empty: it
compiles a kernel per shape, 4 seconds each, one after the other. With `--gpus 0,1,2` the second
such precision finds what the first has compiled. `--caches` is where vLLM, Triton, inductor,
DeepGEMM and FlashInfer keep what they compiled: VLLM_CACHE_ROOT, TRITON_CACHE_DIR,
TORCHINDUCTOR_CACHE_DIR, DG_JIT_CACHE_DIR, FLASHINFER_WORKSPACE_BASE. Needs a GPU and vLLM; `--nemo`
also NEMO_RL_ROOT (docs/install.md).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import record
from benchmarks.speed import rollout_engine
from benchmarks.speed.capacity import decode_floor, kv_capacity
from benchmarks.speed.rollout_engine import Engine, Point, TooFewSteps
from fp8_nemo.nemo import decode
from fp8_nemo.nemo.marlin.layout import holds_four_bits
from fp8_nemo.nemo.marlin.layout import quantization as four_bits
from fp8_nemo.nemo_config.overrides import path_variables
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.model import count
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.plain import to_json


class Variant(NamedTuple):
    """What is measured: `Variant("fp8-linear", "cutlass", "CutlassFp8BlockScaledMMKernel")`."""

    precision: str
    """An option of conf/precision."""
    linear: str = "auto"
    """vLLM's `linear_backend`, by which 0.25.1 narrows its list of block-scaled kernels."""
    kernel: str = "UnquantizedLinearMethod"
    """The class that must have been chosen, for every linear of the layers."""
    experts: str = "triton"
    """vLLM's `moe_backend`; FP8 experts have no CUTLASS (`allow_vllm_cutlass=False`)."""


FOUR_BITS = "nvfp4-w4a16"
CUTLASS, DEEPGEMM = "CutlassFp8BlockScaledMMKernel", "DeepGemmFp8BlockScaledMMKernel"
VARIANTS = {
    "bf16": Variant("bf16"),
    "fp8-linear-cutlass": Variant("fp8-linear", "cutlass", CUTLASS),
    "fp8-linear-deepgemm": Variant("fp8-linear", "deep_gemm", DEEPGEMM),
    "fp8-linear-deepgemm-experts": Variant("fp8-linear", "deep_gemm", DEEPGEMM, "deep_gemm"),
    "fp8-kv-attn": Variant("fp8-kv-attn", "deep_gemm", DEEPGEMM),
    "fp8-kv-attn-cutlass": Variant("fp8-kv-attn", "cutlass", CUTLASS),
    FOUR_BITS: Variant(FOUR_BITS, kernel="ModelOptNvFp4W4A16LinearMethod"),
}
USUAL = "bf16,fp8-linear-cutlass,fp8-linear-deepgemm,fp8-kv-attn"
POINTS = "64x1024,256x1024,16x4096,64x4096,8x8192,32x8192"
OVERFLOW = 1.6
GRAPHS = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256]
BLOCK_FP8 = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
    "weight_block_size": [128, 128],
}  # fmt: skip


def write_config(folder: Path, shape: Shape, longest: int) -> None:
    """Write the `config.json` of a model of any family: no first token, the last ends an answer."""
    from benchmarks.speed.random_model import config_of

    config = config_of(shape).to_dict() | {
        "max_position_embeddings": longest, "bos_token_id": None, "eos_token_id": shape.vocab - 1,
    }  # fmt: skip
    (folder / "config.json").write_text(to_json(config, indent=1) + "\n")


def engine_arguments(
    shape: Shape, variant: Variant, precision: Precision, folder: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Return `vllm.LLM`'s arguments, with those of NeMo RL's worker (fp8.py, vllm_worker.py)."""
    found: dict[str, Any] = {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True,
        "dtype": "bfloat16", "seed": 0, "enable_prefix_caching": False, "disable_log_stats": False,
        "gpu_memory_utilization": options.share, "max_model_len": longest(options),
        "enforce_eager": options.eager, "generation_config": "vllm",
        "enable_flashinfer_autotune": False, "linear_backend": variant.linear,
        "kv_cache_dtype": "fp8" if precision.rollout_kv == "fp8" else "auto",
    }  # fmt: skip
    if shape.experts:
        found["moe_backend"] = variant.experts
    if options.tensor > 1:
        found["tensor_parallel_size"] = options.tensor
    if options.kv_gib:
        found["kv_cache_memory_bytes"] = int(options.kv_gib * 2**30)
    if not options.eager:
        found["compilation_config"] = {"cudagraph_capture_sizes": graph_sizes(options)}
    if options.tensor > 1 and not options.eager:
        found["compilation_config"]["pass_config"] = {"fuse_allreduce_rms": False}
    if precision.rollout_linear == "fp8":
        gates = [f"model.layers.{n}.mlp.gate" for n in range(shape.layers if shape.experts else 0)]
        quantization = BLOCK_FP8 | {"ignored_layers": gates, "ignore": gates}
        found |= {"quantization": "fp8", "hf_overrides": {"quantization_config": quantization}}
    if holds_four_bits(precision):
        found |= four_bits(precision, shape.layers)
    return found


def environment_variables(variant: Variant, caches: Path) -> dict[str, str]:
    """Return what vLLM needs before import: FP32 scales (fp8.py:236), no FlashInfer.

    Its kernel for fewer than 32 tokens would be first in vLLM's list, and compiles when first used.
    """
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
        "VLLM_USE_DEEP_GEMM": str(int("deep_gemm" in variant)),
        "VLLM_USE_DEEP_GEMM_E8M0": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",  # of every M: graphs and warm-ups meet those that count
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "DG_JIT_CACHE_DIR": str(caches / "deep_gemm"),
        "FLASHINFER_WORKSPACE_BASE": str(caches / "flashinfer"),
    }


def graph_sizes(options: argparse.Namespace) -> list[int]:
    """Return a fifth of vLLM's own sizes, and those of the points: DeepGEMM compiles for each."""
    return sorted({*GRAPHS, *(each.batch for each in options.points)})


def longest(options: argparse.Namespace) -> int:
    """Return the tokens of the longest sequence of any point, in whole blocks."""
    given = [*options.points, *([options.limited] if options.limited else [])]
    points = [point.filled(options.repetitions) for point in given]
    return -(-max(each.prompt + each.output for each in points) // 16) * 16


class Bench:
    """One precision: its engine's calls, and the rows they make."""

    def __init__(self, options: argparse.Namespace, plan: Plan) -> None:
        self.options, self.plan, self.variant = options, plan, VARIANTS[options.precision]
        self.shape, self.precision = plan.recipe.model.shape, plan.recipe.precision
        engine = "NeMo RL" if options.nemo else "vLLM"
        self.names = {"model": options.model, "precision": options.precision, "engine": engine}
        self.names |= {"tensor": options.tensor} if options.tensor > 1 else {}
        self.names |= {"decode": options.decode} if self.precision.cache.is_quantized else {}
        self.failed = False

    def measure(self, call: Callable[..., Any], start: float) -> None:
        """Measure both regimes; write each row to the file before the next is begun.

        Raises:
            SystemExit: a point failed, or the engine's kernels are others than this row's name.
        """
        ready = time.perf_counter() - start
        engine: dict[str, Any] = {"start_seconds": ready, "eager": self.options.eager}
        engine |= self.names | call("described")
        kernels = engine["kernels"]
        linears = [kind for kind in kernels if kind.startswith("linear: ")]
        engine["kernel_as_asked"] = linears == [f"linear: {self.variant.kernel}"]
        engine["kernels"] = ", ".join(f"{count} {name}" for name, count in kernels.items())
        keep(self.options, "engines", engine)
        print(to_json(engine, indent=1), flush=True)
        if limited := self.options.limited:
            self._keep(limited, lambda: self._limited(limited, call))
        for point in self.options.points:
            self._keep(point, lambda p=point: self._resident(p, call))
        if self.failed or not engine["kernel_as_asked"]:
            raise SystemExit("a point failed" if self.failed else f"not {self.variant.kernel}")

    def _keep(self, point: Point, make: Callable[[], dict[str, Any]]) -> None:
        start = time.perf_counter()
        row: dict[str, Any]
        try:
            row = make()
        except TooFewSteps as error:  # which must not cost the points after it
            traceback.print_exc()
            self.failed = True
            row = {"regime": "failed", "error": str(error).splitlines()[-1:]}
        row["took_seconds"] = time.perf_counter() - start
        row = self.names | {"batch": point.batch, "prompt": point.prompt} | row
        keep(self.options, "rows", row)
        print(to_json(row), flush=True)

    def _resident(self, point: Point, call: Callable[..., Any]) -> dict[str, Any]:
        found = call("resident", point, self.options.repetitions)
        times, contexts = found["seconds_per_step"], found["contexts"]
        rates = found["prompt_tokens_per_second"]
        context, step = sum(contexts) / len(contexts), record.repeated(times)
        floor = decode_floor(self.shape, self.precision, point.batch, context, self.options.gpu)
        floor /= self.options.tensor
        return {
            "regime": "resident",
            "context": context,
            "tokens_per_second": record.repeated([point.batch / each for each in times]),
            "seconds_per_step": step,
            "of_roofline": floor / step["median"],
            "first_token_seconds": record.repeated(found["first_token_seconds"]),
            "call_tokens_per_second": point.batch * found["output"] / found["call_seconds"],
            "prompt_tokens_per_second": record.repeated(rates) if rates else None,
        }

    def _limited(self, point: Point, call: Callable[..., Any]) -> dict[str, Any]:
        tokens = point.batch * (point.prompt + point.output)
        size = tokens * count(self.shape, Precision()).kv_bytes_per_token / OVERFLOW
        left = kv_capacity(self.shape, self.precision, size)
        found = call("limited", point, self.options.repetitions, left)
        made = point.batch * point.output
        return {
            "regime": "limited",
            "output": point.output,
            "kv_bytes": int(size),
            "kv_tokens": left,
            "tokens_per_second": record.repeated([made / each for each in found["seconds"]]),
            **{name: record.repeated(numbers) for name, numbers in found.items()},
        }

    def alone(self, folder: Path) -> None:
        """Measure through `vllm.LLM` in this process."""
        start = time.perf_counter()
        from vllm import LLM

        if self.names.get("decode") == "xqa":
            decode.register()
        arguments = engine_arguments(self.shape, self.variant, self.precision, folder, self.options)
        engine = Engine(LLM(**arguments), self.shape.vocab)
        self.measure(lambda name, *given: getattr(engine, name)(*given), start)

    def in_nemo(self, folder: Path) -> None:
        """Measure through NeMo RL's generation worker, an actor of Ray on one GPU."""
        start = time.perf_counter()
        from fp8_nemo.launch import driver, ray_cluster

        assert self.plan.nemo
        settings = nemo_settings(self.plan, folder, self.options)
        number = int(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0])  # sets its ports
        for name, value in self.plan.nemo.environment.items():
            os.environ.setdefault(name, value)
        with driver.own_ray():
            ray_cluster.connect(60)
            import ray
            from nemo_rl.models.generation.vllm.vllm_worker import (
                VllmGenerationWorker,
                VllmGenerationWorkerImpl,
            )
            from ray import cloudpickle

            cloudpickle.register_pickle_by_value(rollout_engine)
            _, own, arguments, _ = VllmGenerationWorkerImpl.configure_worker(1, (0, [number]))
            variables = environment_variables(self.variant, self.options.caches.absolute()) | own
            variables |= path_variables(self.plan.recipe)
            actor = VllmGenerationWorker.options(  # type: ignore[attr-defined]
                num_gpus=1, runtime_env={"env_vars": variables}
            ).remote(settings, **arguments)
            ray.get(actor.__ray_ready__.remote())
            work, vocab = rollout_engine.in_actor, self.shape.vocab
            self.measure(
                lambda name, *given: ray.get(actor.__ray_call__.remote(work, vocab, name, given)),
                start,
            )


def nemo_settings(plan: Plan, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return `policy.generation` as our plan writes it, with our cache, lengths and graphs."""
    from fp8_nemo.nemo_config.checkout import config_of
    from fp8_nemo.nemo_config.host import root_of

    root = root_of(plan.recipe)
    assert root and plan.nemo
    found = config_of(root, plan.nemo.base_config, plan.nemo.overrides)["policy"]["generation"]
    found |= {"model_name": str(folder), "_pad_token_id": plan.recipe.model.shape.vocab - 1}
    found |= {"stop_token_ids": [], "ignore_eos": True}
    found["vllm_cfg"] |= {
        "load_format": "dummy", "skip_tokenizer_init": True, "use_tqdm": False,
        "max_model_len": longest(options), "gpu_memory_utilization": options.share,
        "enforce_eager": options.eager,
        "use_deep_gemm": VARIANTS[options.precision].linear == "deep_gemm",
    }  # fmt: skip
    found["vllm_kwargs"].pop("kv_cache_memory_bytes", None)
    if not options.eager:
        found["vllm_kwargs"]["compilation_config"] = {
            "cudagraph_capture_sizes": graph_sizes(options)
        }
    found["vllm_kwargs"]["linear_backend"] = VARIANTS[options.precision].linear
    return found


def plan_of(options: argparse.Namespace, folder: Path) -> Plan:
    """Plan the cell of one precision; with NeMo RL's keys where its worker is used."""
    precision = VARIANTS[options.precision].precision
    glue = "ours" if precision == FOUR_BITS else "stock"
    words = [
        "backend=nemo", f"glue={glue}", "correction=tis", "data=arithmetic",
        f"model={options.model}", f"precision={precision}", f"model.path={folder}",
        "cluster.interpreter=system", f"cluster.gpu={options.gpu}", "cluster.nodes=1",
        "cluster.gpus_per_node=1", "model.parallel.tensor=1", "model.parallel.expert=1",
        "model.parallel.rollout_tensor=1", "model.layout=null",
    ]  # fmt: skip
    if not options.nemo:
        return compose_plans(words)[0]
    from fp8_nemo.nemo_config.checkout import host_of

    return compose_plans(words, host_of)[0]


def keep(options: argparse.Namespace, key: str, row: dict[str, Any] | None) -> None:
    """Add a row to the results file, which other processes add to; an older twin gives way."""
    options.caches.mkdir(parents=True, exist_ok=True)
    with (options.caches / f"{options.out.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        old = json.loads(options.out.read_text()) if options.out.exists() else {}
        rows = {name: old.get(name, []) for name in ("rows", "engines")}
        if row is not None:
            rows[key] = [each for each in rows[key] if not twins(each, row)] + [row]
        given = {name: getattr(options, name) for name in ("gpu", "share", "eager")}
        record.keep(options.out, options.commit, **given, **rows)


def twins(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Return whether two rows are of one point; a failed row matches any result of its point."""
    same = ("model", "precision", "engine", "tensor", "batch", "prompt")
    kinds = {old.get("regime"), new.get("regime")} - {"failed"}
    return all(old.get(name) == new.get(name) for name in same) and len(kinds) < 2


def run_one(options: argparse.Namespace) -> None:
    """Run one precision in this process."""
    folder = options.caches.absolute() / f"{options.model}-{options.precision}"  # no two write one
    (folder / "config.json").unlink(missing_ok=True)  # of a run of other lengths
    plan = plan_of(options, folder)
    os.environ |= environment_variables(VARIANTS[options.precision], options.caches.absolute())
    os.environ |= path_variables(plan.recipe)  # the tiles that plans give an H100's experts
    if options.tensor > 1:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, plan.recipe.model.shape, longest(options))
    bench = Bench(options, plan)
    (bench.in_nemo if options.nemo else bench.alone)(folder)


def run_all(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Run each precision in its own process on the next free GPU; return the worst exit code."""
    waiting, running, worst = options.precisions.split(","), {}, 0
    free = options.gpus.split(",")
    while waiting or running:
        while waiting and free:
            name, gpu = waiting.pop(0), free.pop(0)
            log = options.out.with_name(f"{options.out.stem}-{name}.log")
            command = [
                sys.executable,
                "-m",
                "benchmarks.speed.rollout",
                *words,
                "--precision",
                name,
            ]
            own = os.environ | {"CUDA_VISIBLE_DEVICES": gpu}
            with log.open("w") as file:
                child = subprocess.Popen(command, env=own, stdout=file, stderr=subprocess.STDOUT)
            running[name] = child, gpu, log, time.monotonic()
        for name, (child, gpu, log, start) in list(running.items()):
            late = time.monotonic() - start > options.limit
            if late:
                child.kill()
            if late or child.poll() is not None:
                code = child.wait()
                print(f"{name}: exit {code} after {time.monotonic() - start:.0f} s", flush=True)
                if code:
                    print(log.read_text()[-3000:], flush=True)
                worst = max(worst, abs(code))
                free.append(gpu)
                del running[name]
        time.sleep(0.5)
    return worst


def against_bf16(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows by point, each with its tokens/s over those of BF16 in the same engine."""

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        names = ("model", "regime", "prompt", "batch", "engine")
        return *(row[name] for name in names), row.get("tensor", 1)

    rates = {
        (place(row), row["precision"]): row["tokens_per_second"]["median"]
        for row in rows
        if "tokens_per_second" in row
    }
    found = []
    for row in sorted(rows, key=place):
        rate, base = (rates.get((place(row), name)) for name in (row["precision"], "bf16"))
        found.append(row | {"of_bf16": rate / base if rate and base else None})
    return found


def show(out: Path) -> None:
    """Print the file's rows, and below them the engines that gave them."""
    content = json.loads(out.read_text())
    columns = ("model", "regime", "batch", "prompt", "engine", "precision", "tokens_per_second",
               "of_bf16", "seconds_per_step", "of_roofline", "first_token_seconds",
               "preemptions")  # fmt: skip
    rows = against_bf16(content["rows"])
    record.show(out.stem, [{name: row.get(name) for name in columns} for row in rows])
    columns = ("precision", "engine", "start_seconds", "kv_tokens", "kernel_as_asked",
               "logits_finite", "kernels")  # fmt: skip
    record.show("engines", [{name: e.get(name) for name in columns} for e in content["engines"]])


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; `--small` changes what is not given."""
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    parser.add_argument("--small", action="store_true", help="a small model and short sequences")
    parser.add_argument("--model", default="llama31-8b", help="an option of conf/model")
    parser.add_argument("--precisions", default=USUAL, help=", ".join(VARIANTS))
    parser.add_argument("--precision", choices=VARIANTS, help="this one alone, in this process")
    parser.add_argument("--points", type=_points, default=_points(POINTS))
    parser.add_argument("--limited", type=_limited, default=Point(128, 256, 768))
    parser.add_argument("--tensor", type=int, default=1, help="GPUs of one engine, alone on them")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.9, help="of the GPU, for the engine")
    parser.add_argument("--kv-gib", type=float, help="size of the cache, instead of the share")
    parser.add_argument("--gpu", default="h200", help="whose roofline: h100, h200, b200")
    parser.add_argument("--gpus", default="0", help="numbers; several run side by side")
    parser.add_argument("--limit", type=float, default=580, help="seconds of one precision")
    parser.add_argument("--caches", type=Path, default=Path("outputs/caches"))
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--nemo", action="store_true", help="through NeMo RL's worker, on one GPU")
    kernel = "glue.decode, over an FP8 cache; fa3 with --nemo or --tensor"
    parser.add_argument("--decode", default="xqa", choices=("xqa", "fa3"), help=kernel)
    if "--small" in words:
        small = {"model": "small-llama", "points": _points("8x128,16x256"), "share": 0.3}
        parser.set_defaults(**small, limited=Point(32, 64, 192))
    options = parser.parse_args(words)
    if options.tensor > 1 and (options.nemo or not options.precision):
        parser.error("--tensor: of one --precision, through vLLM itself")
    if options.nemo and FOUR_BITS in (options.precision or options.precisions):
        parser.error(f"--nemo: NeMo RL itself has no {FOUR_BITS}; its worker is ours")
    if options.nemo or options.tensor > 1:  # vLLM's processes, which this one cannot change
        options.decode = "fa3"
    return options


def _limited(text: str) -> Point | None:
    return None if text == "none" else Point.read(text)


def _points(text: str) -> list[Point]:
    return [Point.read(word) for word in text.split(",")]


def main() -> int:
    """Measure one precision, or all; the table."""
    words = sys.argv[1:]
    options = parse(words)
    record.need("vllm", device=False)
    if options.precision:
        run_one(options)
        return 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    code = run_all(options, words)
    keep(options, "rows", None)  # the file names this command, not its last child's
    show(options.out)
    return code


if __name__ == "__main__":
    sys.exit(main())
