"""A vLLM engine under measurement: its weights filled, its steps heard, its cache narrowed.

Shared by the two engines: `vllm.LLM` in this process, and the one that NeMo RL's worker
holds in a Ray actor, to which this module travels by value. It imports nothing of the project.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

STRETCH, SETTLE = 64, 8  # decode steps of one repetition, and those before the first
CHUNK = 16384  # prompt tokens of one step, vLLM's default on an H200
SPREAD, FP8_SPREAD = 0.02, 64.0  # of a weight, and of its FP8 code
SCALE_INV = SPREAD / FP8_SPREAD
FP4_SPREAD = 2.93  # of the eight magnitudes of FP4, 0 to 6
KV_SCALE = 0.02  # 448 times this is above any Q, K or V of such weights
SAMPLING = {"temperature": 1.0, "ignore_eos": True, "detokenize": False}  # tokens and no more


class Point(NamedTuple):
    """Requests: `Point(64, 1024, 0)`; an output of 0 is as long as the stretches need."""

    batch: int
    prompt: int
    output: int = 0

    @staticmethod
    def read(text: str) -> Point:
        """Read a point, `64x1024` or `128x256+768`."""
        batch, _, rest = text.partition("x")
        prompt, _, output = rest.partition("+")
        return Point(int(batch), int(prompt), int(output or 0))

    def filled(self, repetitions: int) -> Point:
        """Return the point with an output that outlasts all stretches, unless it has one."""
        return self if self.output else self.lasting(repetitions * STRETCH + 2 * SETTLE)

    def lasting(self, steps: int) -> Point:
        """Return the point with an output of so many full steps, however the prompts spread."""
        return self._replace(output=steps + -(-self.batch * self.prompt // CHUNK))


class Step(NamedTuple):
    """What the engine said of one iteration."""

    at: float
    """Seconds."""
    tokens: int
    """Generated, over all sequences."""
    begun: int
    """Sequences that got their first token."""
    preempted: int
    running: int


def prompts_of(point: Point, vocab: int, seed: int) -> list[list[int]]:
    """Make prompts of token ids, without the last id, which is the padding."""
    draw = random.Random(seed)
    return [draw.choices(range(vocab - 1), k=point.prompt) for _ in range(point.batch)]


class TooFewSteps(ValueError):
    """A call gave less than was to be timed."""


def stretches(steps: Sequence[Step], batch: int, count: int) -> list[tuple[float, float]]:
    """Return seconds per step, and tokens per sequence at its middle, of each stretch of `count`.

    Of the longest run of steps in which every sequence made one token and none its first, without
    the first few.
    """
    run: list[int] = []
    longest: list[int] = []
    for n, step in enumerate(steps):
        full = step.tokens == batch and not step.begun
        run = [*run, n] if full else []
        longest = max(longest, run, key=len)
    found = []
    for first in longest[SETTLE - 1 : -count : count]:
        made = sum(step.tokens for step in steps[: first + 1]) / batch
        seconds = (steps[first + count].at - steps[first].at) / count
        found.append((seconds, made + count / 2))
    return found


def prompt_rates(steps: Sequence[Step]) -> list[float]:
    """Return prompt tokens/s of each step full of prompts, but the first; none of three or less.

    The last is not full, and may compile a kernel for what is left.
    """
    begun = [n for n, step in enumerate(steps) if step.begun]
    return [
        (CHUNK - (steps[n].tokens - steps[n].begun)) / (steps[n].at - steps[n - 1].at)
        for n in begun[1:-1]
    ]


class Recorder:
    """In the place of vLLM's `StatLoggerManager`: keeps each iteration, and passes it on."""

    def __init__(self, inner: Any, pass_on: bool) -> None:
        self.inner, self.pass_on, self.steps = inner, pass_on, []

    def record(self, scheduler_stats: Any, iteration_stats: Any, **rest: Any) -> None:
        """Record one iteration that gave tokens."""
        made, begun = iteration_stats, len(iteration_stats.time_to_first_tokens_iter)
        numbers = made.num_generation_tokens, begun, made.num_preempted_reqs
        self.steps.append(Step(time.perf_counter(), *numbers, scheduler_stats.num_running_reqs))
        if self.pass_on:
            self.inner.record(scheduler_stats, iteration_stats, **rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def fill(worker: Any) -> list[str]:
    """Fill vLLM's worker with random weights of a trained spread, constant scales, norms of 1.

    vLLM's dummies are within 1e-3, of which 98% are zero as FP8 codes, and zeros multiply faster.
    In place, so that graphs and kernels see it; experts' kernels hold the same scales, or say so.

    Returns:
        The experts whose kernel has other scales than were set; none if all is well.
    """
    import torch

    model, wrong = getattr(worker, "worker", worker).get_model(), []
    with torch.no_grad():
        four_bits = {id(part) for module in model.modules() for part in _fill_four_bits(module)}
        for name, weight in model.named_parameters():
            if id(weight) in four_bits:
                continue
            if weight.dtype == torch.float8_e4m3fn:
                for part in weight.data.split(max(1, 2**26 // weight[0].numel())):
                    codes = torch.randn(part.shape, dtype=torch.bfloat16, device=part.device)
                    part.copy_((codes * FP8_SPREAD).clamp_(-448, 448).to(part.dtype))
            elif name.endswith("weight_scale_inv"):
                weight.data.fill_(SCALE_INV)
            elif name.endswith((".q_scale", ".k_scale", ".v_scale")):
                weight.data.fill_(KV_SCALE)
            elif weight.ndim > 1:
                weight.data.normal_(0, SPREAD)
            elif "norm" in name:
                weight.data.fill_(1)
        for name, module in model.named_modules():
            if hasattr(module, "_k_scale"):
                value = KV_SCALE if module.kv_cache_dtype.startswith("fp8") else 1.0
                for letter in "qkv":
                    getattr(module, f"_{letter}_scale").fill_(value)
                    setattr(module, f"_{letter}_scale_float", value)
            if hasattr(module, "w13_weight_scale_inv"):
                used = module.quant_method.moe_quant_config
                scales = torch.cat([used.w1_scale.flatten(), used.w2_scale.flatten()])
                wrong += [] if (scales == scales.new_tensor(SCALE_INV)).all() else [name]
    return wrong


def _fill_four_bits(module: Any) -> list[Any]:
    """Fill what Marlin multiplies with: random codes, and scales as vLLM lays them out for it.

    Returns:
        The module's parameters that are filled; none of a module without four bits.
    """
    if not hasattr(module, "weight_global_scale"):
        return []
    import torch
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as marlin

    codes, whole = module.weight.data, module.weight_global_scale.data
    codes.random_(torch.iinfo(codes.dtype).min, torch.iinfo(codes.dtype).max)
    plain = module.params_dtype
    ones = torch.ones(16, 64, dtype=plain, device=codes.device)
    scales, factor = marlin.nvfp4_marlin_process_scales(ones, a_dtype=plain)
    module.weight_scale.data.copy_(scales.flatten()[0].expand_as(module.weight_scale))
    spread = torch.full_like(whole, SPREAD / FP4_SPREAD)
    whole.copy_(marlin.nvfp4_marlin_process_global_scale(spread, plain) / factor)
    return [module.weight, module.weight_scale, module.weight_global_scale]


def kernels(worker: Any) -> dict[str, int]:
    """Count how many layers of each kind a vLLM worker multiplies by which class."""
    chosen: Counter[str] = Counter()
    for name, module in getattr(worker, "worker", worker).get_model().named_modules():
        method = getattr(module, "quant_method", None)
        if hasattr(module, "w13_weight"):
            assert method is not None
            chosen[f"experts: {type(method.moe_kernel.impl.fused_experts).__name__}"] += 1
        elif hasattr(module, "_k_scale"):
            version = getattr(module.impl, "vllm_flash_attn_version", "")
            query = "FP8 query" if module.query_quant is not None else "BF16 query"
            words = f"{module.attn_backend.get_name()} {version}, {module.kv_cache_dtype}, {query}"
            chosen[f"attention: {words}"] += 1
        elif method is not None and hasattr(module, "weight"):
            kind = "router" if name.endswith(".gate") else "linear"
            kind = kind if ".layers." in name else "embedding and head"
            chosen[f"{kind}: {type(getattr(method, 'fp8_linear', method)).__name__}"] += 1
    return dict(chosen)


class Engine:
    """A `vllm.LLM`, alone or in NeMo RL's worker, and how its requests are made."""

    def __init__(
        self, llm: Any, vocab: int, nemo: Any = None, sampling: dict[str, Any] = SAMPLING
    ) -> None:
        self.llm, self.vocab, self.nemo, self.seed = llm, vocab, nemo, 0
        self.sampling = sampling

    def generate(self, point: Point) -> tuple[float, list[Step]]:
        """Run a call with new prompts; return its seconds, and the engine's steps."""
        self.seed += 1
        prompts = prompts_of(point, self.vocab, self.seed)
        engine = self.llm.llm_engine
        inner = getattr(engine.logger_manager, "inner", engine.logger_manager)
        engine.logger_manager = heard = Recorder(inner, self.nemo is not None)
        ask = self._nemo_call(prompts, point) if self.nemo else self.call(prompts, point.output)
        start = time.perf_counter()
        ask()
        seconds = time.perf_counter() - start
        return seconds, [step._replace(at=step.at - start) for step in heard.steps]

    def call(self, prompts: list[list[int]], output: int) -> Callable[[], Any]:
        """Make the requests; the call that answers them all, to be timed."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=output, **self.sampling)
        asked = [{"prompt_token_ids": each} for each in prompts]
        return lambda: self.llm.generate(asked, sampling, use_tqdm=False)

    def _nemo_call(self, prompts: list[list[int]], point: Point) -> Callable[[], Any]:
        import torch
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

        self.nemo.cfg["max_new_tokens"] = point.output
        lengths = torch.full((point.batch,), point.prompt)
        data = BatchedDataDict({"input_ids": torch.tensor(prompts), "input_lengths": lengths})
        return lambda: self.nemo.generate(data)

    def described(self) -> dict[str, Any]:
        """Fill the weights; return kernels, cache, and whether logits are finite."""
        from vllm import SamplingParams

        wrong = [name for names in self.llm.collective_rpc(fill) for name in names]  # by GPU
        try:
            chosen = self.llm.collective_rpc(kernels)[0]
        except Exception as error:  # a name that another vLLM has not; the engine is as it was
            chosen = {f"unknown: {type(error).__name__}: {error}": 0}
        asked = [{"prompt_token_ids": each} for each in prompts_of(Point(4, 64), self.vocab, 0)]
        sampling = SamplingParams(max_tokens=4, logprobs=0, ignore_eos=True, detokenize=False)
        outputs = self.llm.generate(asked, sampling, use_tqdm=False)
        steps = [step for output in outputs for step in output.outputs[0].logprobs]
        logprobs = [each.logprob for step in steps for each in step.values()]
        cache = self.llm.llm_engine.vllm_config.cache_config
        return {
            "kernels": chosen,
            "experts_with_other_scales": wrong,
            "logits_finite": all(-1e4 < each <= 0 for each in logprobs),  # NaN is not
            "mean_logprob": sum(logprobs) / len(logprobs),
            "kv_tokens": cache.num_gpu_blocks * cache.block_size,
            "kv_tokens_reported": cache.kv_cache_size_tokens,
        }

    def warm(self, point: Point) -> None:
        """Run one step full of prompts of this length, and what follows it."""
        count = max(1, CHUNK // point.prompt)
        self.generate(Point(count, point.prompt, 4))

    def resident(self, point: Point, repetitions: int) -> dict[str, Any]:
        """Return seconds per decode step, of the first token of one prompt; prompt tokens/s.

        Raises:
            TooFewSteps: a stretch is missing.
        """
        self.warm(point)
        alone = [self.generate(Point(1, point.prompt, 1))[0] for _ in range(repetitions + 1)][1:]
        point = point.filled(repetitions)
        seconds, steps = self.generate(point)
        parts = stretches(steps, point.batch, STRETCH)[:repetitions]
        if len(parts) < repetitions:
            raise TooFewSteps(
                f"{len(steps)} steps gave {len(parts)} of {repetitions} stretches of {STRETCH}"
            )
        return {
            "seconds_per_step": [seconds for seconds, _ in parts],
            "contexts": [point.prompt + made for _, made in parts],
            "first_token_seconds": alone,
            "call_seconds": seconds,
            "output": point.output,
            "prompt_tokens_per_second": prompt_rates(steps),
        }

    def limited(self, point: Point, repetitions: int, kv_tokens: int) -> dict[str, Any]:
        """Return the seconds of all requests in a cache of `kv_tokens`, and preemptions."""
        core = self.llm.llm_engine.engine_core.engine_core
        pool = core.scheduler.kv_cache_manager.block_pool
        block = self.llm.llm_engine.vllm_config.cache_config.block_size
        held = pool.get_new_blocks(max(0, pool.get_num_free_blocks() - kv_tokens // block))
        try:
            # The first meets the shapes of requests that were preempted and come again.
            _, *runs = [self.generate(point) for _ in range(repetitions + 1)]
        finally:
            pool.free_blocks(held)
        return {
            "seconds": [seconds for seconds, _ in runs],
            "preemptions": [sum(step.preempted for step in steps) for _, steps in runs],
            "running_most": [max(step.running for step in steps) for _, steps in runs],
        }


def in_actor(worker: Any, vocab: int, name: str, given: tuple) -> Any:
    """Call a method of the engine that NeMo RL's actor holds."""
    engine = worker.__dict__.setdefault("fp8_bench", Engine(worker.llm, vocab, worker))
    return getattr(engine, name)(*given)
