"""Where a decode step of vLLM goes: wall time, device time by class of kernel, gaps, and the host.

python -m benchmarks.speed.decode_profile --out FILE.json --precision fp8-kv-attn [--layers 32]
    [--points 64x1024,256x1024,64x4096,32x8192] [--gpu h100] [--caches outputs/caches]
    [--engine apart] [--scheduling sync] [--stats off] [--sampling nemo] [--text] [--align exact]
    [--set '{"linear_backend": "auto"}'] [--env VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER=1]

One precision a process. Each point, SEQUENCESxTOKENS, fills its contexts by prefill, decodes 8
steps to settle, 20 by the host's clock, and 20 under torch.profiler with the device's activities.
The clock is in vLLM's worker, at the start of each step. Weights, environment and engine are those
of `benchmarks.speed.rollout`. Graphs are the shipped sizes that the points need and no others: a
start of about 60 s in BF16, and 4 s more for each kernel that DeepGEMM compiles.

`busy_ms` is what the device worked a step; `gaps_ms` is the unprofiled step less that, and a
profile's own gaps, which its tracing makes longer, stand with the classes. `host_ms` is the host's
part of the unprofiled step by what it called: with an engine in this process all of it is one
thread, and what is left is waiting. Once a profile has run, CUPTI stays in the process: give the
first point again at the end to see what it costs. The defaults are NeMo RL's worker's: an engine in
this process, statistics on, vLLM's own choice of scheduling. `--sampling nemo` asks for logprobs as
its worker does; `--text` gives it a tokenizer, whose text it makes and searches for a stop string.
`--align` is the engine of `precision.align`, with the keys that its plans write.
`--decode` is `glue.decode`, for an FP8 cache. With one, `scales` tells whether scales that change
after the capture reach decode: doubled, they halve every code and double what is read, so that
nothing changes but rounding, unless a graph keeps the old. Needs a GPU and vLLM.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.speed import decode_watch, rollout
from benchmarks.speed.capacity import decode_floor
from benchmarks.speed.decode_watch import SETTLE, STEPS, Clock
from benchmarks.speed.rollout import VARIANTS
from benchmarks.speed.rollout_engine import SAMPLING, Engine, Point, prompts_of
from fp8_nemo.nemo import aligned, decode
from fp8_nemo.nemo_config.keys import VLLM_KWARGS
from fp8_nemo.nemo_config.overrides import GRAPHS, path_variables
from fp8_nemo.nemo_config.own.alignment import alignment_keys
from fp8_nemo.recipe.options.model import Shape

POINTS = "64x1024,256x1024,64x4096,32x8192"
USUAL = {"fp8-linear": "fp8-linear-deepgemm"}  # a precision's own variant, where the name differs
SCHEDULING = {"default": {}, "async": {"async_scheduling": True},
              "sync": {"async_scheduling": False}}  # fmt: skip
SAMPLINGS: dict[str, dict[str, Any]] = {
    "bare": SAMPLING,
    # vllm_worker.py, _build_sampling_params
    "nemo": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": 0, "ignore_eos": True,
             "include_stop_str_in_output": True},
}  # fmt: skip
STOP = "</never made>"
TOLD = r"Using|[Bb]ackend|[Ss]cheduling|[Ff]us|[Gg]raph|[Kk]ernel|DeepGEMM|XQA|WARN|[Dd]efault|took"
"""Lines of the engine's log that say what it chose."""


def graph_sizes(batches: list[int]) -> list[int]:
    """Return the shipped sizes that these batches run in: the smallest that holds each."""
    return sorted({min(size for size in GRAPHS if size >= batch) for batch in batches})


def lasting(point: Point) -> Point:
    """Return the point with an output for all watched steps, and some that end the profile."""
    return point.lasting(SETTLE + 2 * STEPS + 2 * SETTLE)


def merged(arguments: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with the given ones in their place; tables are merged, deep too."""
    found = dict(arguments)
    for name, value in given.items():
        old = found.get(name)
        both = isinstance(old, dict) and isinstance(value, dict)
        found[name] = merged(old, value) if both else value
    return found


def arguments_of(options: argparse.Namespace, shape: Shape, precision: Any, folder: Path) -> dict:
    """Return `vllm.LLM`'s arguments: `rollout`'s with fewer graphs, and what was asked."""
    points = [lasting(point) for point in options.points]
    usual = argparse.Namespace(
        points=points, limited=None, repetitions=1, share=options.share, eager=False,
        kv_gib=None, tensor=1,
    )  # fmt: skip
    variant = VARIANTS[options.precision]
    found = rollout.engine_arguments(shape, variant, precision, folder, usual)
    found["compilation_config"] = {
        "cudagraph_capture_sizes": graph_sizes([point.batch for point in points])
    }
    found |= SCHEDULING[options.scheduling] | {"disable_log_stats": options.stats == "off"}
    found |= {"skip_tokenizer_init": not options.text}
    if options.align:
        found = merged(found, aligned_arguments(replace(precision, align=options.align)))
    return merged(found, options.set)


def aligned_arguments(precision: Any) -> dict[str, Any]:
    """Return the arguments that a plan gives an aligned engine."""
    found: dict[str, Any] = {}
    for key, value in alignment_keys(precision).items():
        if key.startswith(f"{VLLM_KWARGS}."):
            for name in reversed(key.removeprefix(f"{VLLM_KWARGS}.").split(".")):
                value = {name: value}
            found = merged(found, value)
    return found


def environment_of(options: argparse.Namespace) -> dict[str, str]:
    """Return `rollout`'s environment, where the engine lives, and what was asked."""
    found = rollout.environment_variables(VARIANTS[options.precision], options.caches.absolute())
    found["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(options.engine == "apart"))
    return found | dict(pair.split("=", 1) for pair in options.env)


def sampling_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling; with text it also searches for a string that never comes."""
    text = {"detokenize": True, "stop": [STOP]} if options.text else {}
    return SAMPLINGS[options.sampling] | text


def write_model(folder: Path, shape: Shape, longest: int, text: bool) -> None:
    """Write a `config.json`; with text also a tokenizer that has a word for every token."""
    folder.mkdir(parents=True, exist_ok=True)
    rollout.write_config(folder, shape, longest)
    if not text:
        return
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"w{n}": n for n in range(shape.vocab)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


@contextmanager
def logged(file: Path) -> Iterator[None]:
    """Write the output of this process and its children to a file; print its end on failure."""
    sys.stdout.flush()
    kept = os.dup(1), os.dup(2)
    with file.open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        yield
    except BaseException:
        os.write(kept[1], file.read_bytes()[-6000:])
        raise
    finally:
        sys.stdout.flush()
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        os.close(kept[0])
        os.close(kept[1])


def host_clocks(llm: Any, apart: bool) -> dict[str, Clock]:
    """Clock the parts of a step that this process does outside of the worker."""
    engine = llm.llm_engine
    found = {"outputs": Clock(engine.output_processor, "process_outputs")}
    if engine.logger_manager is not None:
        found["statistics"] = Clock(engine.logger_manager, "record")
    if not apart:
        scheduler = engine.engine_core.engine_core.scheduler
        found["schedule"] = Clock(scheduler, "schedule")
        found["update"] = Clock(scheduler, "update_from_output")
    return found


def row_of(point: Point, seen: dict[str, Any], clocks: dict[str, Clock]) -> dict[str, Any]:
    """Return one point's row: milliseconds a step by the wall, the device and the host."""
    first, last = seen["window"]
    wall = 1e3 * (last - first) / len(seen["seconds"])
    host = {name: 1e3 * spent / STEPS for name, spent in seen["worker"].items()}
    host |= {name: 1e3 * clock.within(first, last) / STEPS for name, clock in clocks.items()}
    profile = seen["profile"]
    return {
        "batch": point.batch, "prompt": point.prompt, "context": seen["context"],
        "wall_ms": wall,
        "step_ms": record.repeated([1e3 * each for each in seen["seconds"]]),
        "busy_ms": profile["busy_ms"], "gaps_ms": wall - profile["busy_ms"],
        "host_ms": host, "profile": profile,
    }  # fmt: skip


def decoded(llm: Any, prompts: list[list[int]]) -> list[tuple[int, float]]:
    """Per prompt the first token, which prefill made, and the next one's logprob, by decode."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=2, temperature=0.0, logprobs=0, ignore_eos=True, detokenize=False
    )
    asked = [{"prompt_token_ids": each} for each in prompts]
    outputs = [each.outputs[0] for each in llm.generate(asked, sampling, use_tqdm=False)]
    last = [next(iter(each.logprobs[1].values())).logprob for each in outputs]
    return [(each.token_ids[0], logprob) for each, logprob in zip(outputs, last, strict=True)]


def change(before: list[tuple[int, float]], after: list[tuple[int, float]]) -> float | None:
    """Mean change of a decoded token's logprob where prefill made the same; None where nowhere."""
    pairs = zip(before, after, strict=True)
    found = [abs(a - b) for (first, a), (other, b) in pairs if first == other]
    return sum(found) / len(found) if found else None


def scales_reach(llm: Any, vocab: int, batch: int) -> dict[str, float | None]:
    """Change of logprobs by scales doubled after the capture, and of the same scales again.

    Decode reads the scales at each step if the first is as small as rounding: far below a logit's
    spread, and near what `fp8` costs; a graph that kept the old ones reads V at half its size.
    """
    prompts = prompts_of(Point(batch, 256), vocab, 99)
    before, again = decoded(llm, prompts), decoded(llm, prompts)
    llm.collective_rpc(decode_watch.rescale, args=(2.0,))
    doubled = decoded(llm, prompts)
    llm.collective_rpc(decode_watch.rescale, args=(0.5,))
    return {"unchanged": change(before, again), "doubled": change(before, doubled)}


def told(log: str) -> list[str]:
    """Return what the engine's log says of its choices, each once, without time and process."""
    lines = (line for line in log.splitlines() if re.search(TOLD, line))
    return list(dict.fromkeys(re.sub(r"^.*?(INFO|WARNING) \S+ \S+ ", "", each) for each in lines))


def without_folders(text: str) -> str:
    """Cut absolute paths in a text down to names: no result names a machine's folders."""
    return re.sub(r"/(?:[\w.+@=-]+/)+", "", text)


def run(options: argparse.Namespace) -> None:
    """Start one engine and measure its points; each is in the file before the next begins."""
    start = time.perf_counter()
    os.environ |= environment_of(options)
    folder = options.caches.absolute() / f"{options.model}-{options.precision}-decode"
    cell = argparse.Namespace(**vars(options) | {"nemo": False})
    (folder / "config.json").unlink(missing_ok=True)  # of a run of other lengths
    recipe = rollout.plan_of(cell, folder).recipe
    os.environ |= path_variables(recipe)  # the tiles that plans give an H100's experts
    shape, precision = recipe.model.shape, recipe.precision
    shape = replace(shape, layers=options.layers or shape.layers)
    arguments = arguments_of(options, shape, precision, folder)
    write_model(folder, shape, arguments["max_model_len"], options.text)
    apart, log = options.engine == "apart", options.out.with_suffix(".log")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with logged(log):
        from vllm import LLM

        if options.align:  # before the model
            aligned.register(replace(precision, align=options.align))
        if precision.cache.is_quantized and options.decode == "xqa":
            decode.register()
        engine = Engine(LLM(**arguments), shape.vocab, sampling=sampling_of(options))
        described = engine.described()
        [resolved] = engine.llm.collective_rpc(decode_watch.settings)
    clocks = host_clocks(engine.llm, apart)
    content: dict[str, Any] = {
        "asked": {name: getattr(options, name) for name in
                  ("model", "precision", "layers", "gpu", "engine", "scheduling", "stats",
                   "sampling", "text", "align", "decode", "set", "env")},
        "engine": described | {
            "start_seconds": time.perf_counter() - start,
            "asynchronous_scheduling":
                engine.llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
            "graphs": arguments["compilation_config"]["cudagraph_capture_sizes"],
            "resolved": {name: without_folders(text) for name, text in resolved.items()},
            "log": told(without_folders(log.read_text(errors="replace"))),
        },
        "steps": STEPS, "rows": [],
    }  # fmt: skip
    if precision.rollout_kv == "fp8":
        batch = options.points[0].batch
        content["scales"] = scales_reach(engine.llm, shape.vocab, batch)
    for number, point in enumerate(map(lasting, options.points)):
        ask = engine.call(prompts_of(point, shape.vocab, number), point.output)
        engine.llm.collective_rpc(decode_watch.arm, args=(point.batch,))
        begun = time.perf_counter()
        ask()
        [seen] = engine.llm.collective_rpc(decode_watch.taken)
        row = row_of(point, seen, clocks)
        row["floor_ms"] = 1e3 * decode_floor(
            shape, precision, point.batch, row["context"], options.gpu
        )
        row["took_seconds"] = time.perf_counter() - begun
        content["rows"].append(row)
        content["seconds"] = time.perf_counter() - start
        record.keep(options.out, options.commit, **content)
        print(f"{point.batch}x{point.prompt}: {content['seconds']:.0f} s so far", flush=True)
    print(f"scales: {content.get('scales')}")
    show(content["rows"])


def show(rows: list[dict[str, Any]]) -> None:
    """Print milliseconds a step by class of kernel, and the host's part."""
    times = ("wall_ms", "floor_ms", "busy_ms", "gaps_ms")
    record.show("ms a step", [
        {"point": f"{row['batch']}x{row['prompt']}", **{name: row[name] for name in times},
         **row["profile"]["classes_ms"]} for row in rows
    ])  # fmt: skip
    record.show("host, ms a step", [
        {"point": f"{row['batch']}x{row['prompt']}", **row["host_ms"]} for row in rows
    ])  # fmt: skip
    for row in rows:
        names = [each | {"kernel": each["kernel"][:90]} for each in row["profile"]["unmatched"]]
        record.show(f"{row['batch']}x{row['prompt']}: kernels of no class", names[:8])


def parse(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    record.add_options(parser)
    names = sorted({*VARIANTS, *USUAL})
    parser.add_argument("--precision", required=True, choices=names)
    parser.add_argument("--model", default="llama31-8b", help="an option of conf/model")
    parser.add_argument("--layers", type=int, help="fewer, for a quick look")
    parser.add_argument("--points", default=POINTS, help="sequences x tokens of context")
    parser.add_argument("--share", type=float, default=0.9, help="of the GPU, for the engine")
    parser.add_argument("--gpu", default="h100", help="whose roofline: h100, h200, b200")
    parser.add_argument("--caches", type=Path, default=Path("outputs/caches"))
    where = "in this process, as in NeMo RL's worker, or in one of its own"
    parser.add_argument("--engine", default="inside", choices=("inside", "apart"), help=where)
    parser.add_argument("--scheduling", default="default", choices=SCHEDULING)
    parser.add_argument("--stats", default="on", choices=("on", "off"), help="vLLM's statistics")
    parser.add_argument("--sampling", default="bare", choices=SAMPLINGS)
    parser.add_argument("--text", action="store_true", help="detokenize, and search a stop string")
    parser.add_argument("--align", choices=("cheap", "exact"), help="only with --engine inside")
    parser.add_argument(
        "--decode", default="xqa", choices=("xqa", "fa3"), help="glue.decode; fa3 if apart"
    )
    parser.add_argument("--set", type=json.loads, default={}, help="arguments of vllm.LLM, JSON")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args(words)
    options.points = [Point.read(word) for word in options.points.split(",")]
    if options.engine == "apart":
        if options.align:
            parser.error("--align changes vLLM in this process; not with --engine apart")
        options.decode = "fa3"
    options.precision = USUAL.get(options.precision, options.precision)
    return options


def main() -> None:
    """Measure one precision and write its file."""
    options = parse(sys.argv[1:])
    record.need("vllm", device=False)
    run(options)


if __name__ == "__main__":
    main()
