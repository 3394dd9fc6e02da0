"""Note what an option does not do in a cell, and what the host cannot do as asked.

A key without effect is a note and no mistake, or no sweep would compose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from fp8_nemo.nemo_config.own.loss import native_correction
from fp8_nemo.nemo_config.seams import SEAMS
from fp8_nemo.plan.memory import HEADROOM, MemoryByPhase, memory_per_gpu
from fp8_nemo.plan.model import adapters
from fp8_nemo.recipe.compose import read_options
from fp8_nemo.recipe.options.cluster import SBATCH_KEYS, Cluster
from fp8_nemo.recipe.options.precision import Recalibrate
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.options.training import Noise
from fp8_nemo.recipe.problems import longest_answer, shared_problems
from fp8_nemo.recipe.settled import KEEPS_OPTIMIZER, LORA_RATE, PROMPT, SHARE, Settled

WITHOUT_KL = ("dapo", "cispo", "gspo")
"""Algorithms whose recipes in NeMo RL set the KL penalty to 0."""
SMALL_RATE = 1e-6
"""At which NVFP4 rounds nearly all of a step away (benchmarks/results/changed-bytes-cpu.json)."""
TRIED = {"context": 2, "pipeline": 1}
TRIED_WITH_EXPERTS = {"context": 1, "pipeline": 1, "tensor": 1}
"""Most GPUs along an axis of a layout in any run on GPUs, and in any of experts (README)."""

SHIPPED_CLUSTERS = ("here", "slurm")
"""Whose GPU is a default, and says nothing of a machine."""

STOCK_RECALIBRATE = Recalibrate(source="forward", margin=1.05, first_margin=1.05, history=1)
"""NeMo RL's own (conf/glue/stock.yaml)."""


def nemo_notes(settled: Settled, memory: MemoryByPhase) -> Iterator[str]:
    """List the notes on a run inside NeMo RL.

    Args:
        settled: the run's recipe.
        memory: `memory_per_gpu` of the run.
    """
    yield from _recalibrate_notes(settled)
    recipe = settled.recipe
    if not recipe.data.is_made and recipe.grpo.max_new_tokens:
        yield (
            f"nemo.{PROMPT}: NeMo RL cuts prompts of {settled.prompt_tokens} tokens and more to "
            f"4 tokens, learns nothing of them and marks them wrong; +nemo.{PROMPT}=N makes room "
            "for longer ones"
        )
    yield from _untried_axes(settled)
    yield from _engine_of_several_gpus(settled)
    if SHARE in settled.own and settled.layout.kv_cache_gib is not None:
        yield f"nemo.{SHARE}: no effect while model.memory.kv_cache_gib bounds the cache"
    one_ratio = recipe.algorithm.filled.sequence_level_importance_ratios
    if recipe.correction.name != "none" and native_correction(recipe) is None:
        name = recipe.correction.name + (" with one ratio a sequence" if one_ratio else "")
        yield f"correction: NeMo RL has no {name}, it multiplies the advantages"
    if recipe.glue.transfer == "fp8" and not recipe.glue.sends_fp8:
        yield "glue.transfer: no effect, with glue.quantize=stock NeMo RL's receiver quantizes"
    if not settled.shares_gpus:
        yield from _apart_notes(settled)
    yield from _algorithm_notes(settled)
    yield from _lora_notes(settled)
    if recipe.precision.rollout_linear == "nvfp4":
        yield (
            "precision.rollout_linear: from about 64 sequences an engine on FP8 decodes faster "
            "than four bits, and four bits read prompts half as fast as BF16 (docs/precision.md)"
        )
        if settled.learning_rate <= SMALL_RATE:
            yield (
                f"grpo.learning_rate: at {SMALL_RATE:g} a step changed 0.005% of a tiny model's "
                f"bytes in four bits, and this is {settled.learning_rate:g}: the engine lags "
                "behind the trainer until updates add up (refit/changed_bytes)"
            )
    if recipe.noise.is_on and recipe.precision.rollout.is_quantized:
        yield "noise: only tiny Llama trained with it, and gained nothing (docs/precision.md)"
    yield from _rough_experts(settled)
    yield from _mixed_blocks(recipe)
    yield from _without_effect(recipe)
    yield from _tight_memory(settled, memory)
    yield from _other_gpu_than_the_sites(recipe.cluster)


def _untried_axes(settled: Settled) -> Iterator[str]:
    """Name the axes along which a layout has more GPUs than any run here had."""
    experts = settled.recipe.model.shape.experts
    for axis, tried in (TRIED_WITH_EXPERTS if experts else TRIED).items():
        if getattr(settled.layout, axis) > tried:
            above = f" above {tried}" if tried > 1 else ""
            kind = " of experts" if experts else ""
            yield (
                f"model.parallel.{axis}: no run here{kind} had {axis} parallel{above} on GPUs; "
                f"model.parallel.{axis}={tried} avoids it, or try grpo.steps=5 first"
            )


def _engine_of_several_gpus(settled: Settled) -> Iterator[str]:
    """Note how fast vLLM's executor of such an engine is known to be."""
    recipe, key = settled.recipe, "model.parallel.rollout_tensor: an FP8 engine of several GPUs"
    if settled.layout.rollout_tensor == 1 or recipe.precision.rollout_linear != "fp8":
        return
    yield key + (
        ": one of two was timed in one rollout, no faster than two engines of one GPU, under "
        "vLLM's Ray executor V2; NeMo RL v0.7.0 has V1, twice as slow (docs/speed.md)"
        if recipe.glue.has_receiver
        else " has vLLM's Ray executor V1 under stock glue; decode steps took twice the planned "
        "time there (docs/speed.md)"
    )


def _apart_notes(settled: Settled) -> Iterator[str]:
    """Note what follows from engines with GPUs of their own."""
    recipe = settled.recipe
    share = f"cluster.rollout_gpus: {settled.rollout_gpus} of {settled.gpus} GPUs sample"
    yield share + (
        " the next step's answers while the others train, and finish them before they take the "
        "new weights (grpo.max_sample_age); run with a tiny model on two GPUs, not beyond"
        if recipe.grpo.is_asynchronous
        else ", then the others train: NeMo RL's synchronous step takes one phase after the other"
    )
    if recipe.model.memory.optimizer == "move" or KEEPS_OPTIMIZER in settled.own:
        yield "model.memory.optimizer: no effect, it stays where engines have their own GPUs"


def local_notes(settled: Settled) -> Iterator[str]:
    """List the notes on a run of the local backend."""
    recipe = settled.recipe
    usual, glue = Recipe(), recipe.glue
    yield from _notes({
        "logging": (recipe.logging != usual.logging, "the local backend writes metrics.jsonl"),
        "glue.quantize": (glue.quantize != "fused", "the local backend has one quantizer"),
        "glue.transfer": (glue.transfer != "fp8", "the local backend sends what it holds"),
        "model.parallel": (
            not {None, 1}.issuperset(vars(recipe.model.parallel).values()),
            "one device is used",
        ),
        "precision.align": (
            recipe.precision.is_aligned,
            "the local backend's engine has the trainer's RoPE, SiLU and quantizer",
        ),
        "cluster.nodes": (recipe.cluster.nodes > 1, "the local backend runs on the first node"),
        "model.hf_id": (
            recipe.model.hf_id and recipe.model.name.startswith("tiny-"),
            "the local backend reads a folder, model.path, or the model that ships here",
        ),
    })  # fmt: skip
    limit = settled.response_tokens
    if recipe.data.is_made and limit < (needed := longest_answer(recipe.data)):
        yield (
            f"grpo.max_new_tokens: {limit} may cut right answers off, {recipe.data.name} has some "
            f"of {needed} characters, each a token of the models made here; raise it (grpo=small "
            "has 400), or lower data.difficulty"
        )
    yield from _without_effect(recipe)


def _recalibrate_notes(settled: Settled) -> Iterator[str]:
    recipe = settled.recipe
    precision, recalibrate = recipe.precision, recipe.glue.recalibrate
    fp8_kv, watches = precision.cache.is_quantized, recalibrate.source == "logprob"
    if fp8_kv and not watches and recipe.grpo.validate_first:
        yield (
            "grpo.validate_first: no effect, NeMo RL would validate, and sample the first step, "
            f"with KV scales of 1.0 ({SEAMS['first-validation']}); "
            "glue.recalibrate.source=logprob has real ones"
        )
    usual = (STOCK_RECALIBRATE.history, STOCK_RECALIBRATE.first_margin)
    if fp8_kv and not watches and (recalibrate.history, recalibrate.first_margin) != usual:
        yield (
            "glue.recalibrate.history, first_margin: no effect with source=forward, NeMo RL "
            "measures with the weights that will sample"
        )
    runner_v1 = recipe.model.shape.experts or settled.layout.rollout_tensor > 1
    if fp8_kv and runner_v1 and not (recipe.glue.has_receiver or watches):
        yield (
            "glue=stock: vLLM 0.25.1 puts K and V scales of a mixture of experts, and of an engine "
            "of several GPUs, to 1.0 when its cache wakes up after a refit "
            f"({SEAMS['wakes-with-ones']}); glue=ours keeps them"
        )


def _algorithm_notes(settled: Settled) -> Iterator[str]:
    """Note what an algorithm, or the replay of routes, brings along inside NeMo RL."""
    recipe = settled.recipe
    if recipe.algorithm.name in WITHOUT_KL and settled.kl_penalty:
        yield (
            f"grpo.kl_penalty: {settled.kl_penalty:g} from the base, and NeMo RL's recipe of "
            f"{recipe.algorithm.name} has 0; grpo.kl_penalty=0 also saves the reference's forward"
        )
    if recipe.algorithm.filled.use_dynamic_sampling:
        yield (
            f"algorithm.use_dynamic_sampling: a batch has {settled.prompts_per_batch} prompts, and "
            "the step's estimate is of one batch; a step may take more"
        )
    in_fp8 = recipe.precision.rollout.is_quantized
    if recipe.model.shape.experts and in_fp8 and not recipe.replay.is_on:
        yield (
            "replay: with replay=r3 the trainer's tokens go where the engine's went; with 128 "
            "experts of random weights the KL fell from 1.8e-2 to 2.8e-3 (docs/algorithms.md)"
        )
    unreplayed = recipe.glue.recalibrate.source == "forward"
    if recipe.replay.is_on and recipe.precision.cache.is_quantized and unreplayed:
        yield "glue.recalibrate.source: NeMo RL's extra pass measures Q, K and V unreplayed"


def _lora_notes(settled: Settled) -> Iterator[str]:
    """Note what low-rank adapters bring along inside NeMo RL."""
    recipe = settled.recipe
    if not recipe.lora.is_on:
        return
    yield (
        f"lora: a checkpoint holds adapters alone ({SEAMS['saves-adapters']}); NeMo RL's "
        "examples/converters/convert_lora_to_hf.py merges it into the base model"
    )
    if settled.learning_rate < LORA_RATE:
        yield (
            f"grpo.learning_rate: {settled.learning_rate:g} is usual for all weights; adapters "
            f"mostly get {LORA_RATE:g} and more, and what a merged weight rounds away does "
            "not reach the engine"
        )
    experts = adapters(recipe.model.shape, recipe.lora)
    if any(each.in_experts for each in experts):
        yield (
            "lora.target_modules: the experts of a GPU share one adapter "
            f"({SEAMS['shares-an-adapter']}), so what is trained depends on model.parallel.expert"
        )


def _rough_experts(settled: Settled) -> Iterator[str]:
    """Note how rough the estimates of experts are, and where FP8 makes them slower than BF16."""
    recipe = settled.recipe
    if not recipe.model.shape.experts:
        return
    yield (
        "model: how long experts train is estimated by few layers on one GPU, and by four runs on "
        "two and four (docs/research/experts.md), so the step's seconds and the precisions' gains "
        "are rough"
    )
    if recipe.precision.train.is_quantized:
        yield (
            "precision.train_linear: FP8 training of experts was nowhere faster than BF16's "
            "(docs/speed.md); precision=fp8-linear trains in BF16"
        )
    fp8, larger = recipe.precision.rollout.is_quantized, settled.layout.rollout_tensor > 1
    if fp8 and larger and recipe.cluster.gpu == "h100":
        yield (
            "model.parallel.rollout_tensor: tuned tiles for FP8 experts on an H100 ship for "
            "engines of one GPU; with vLLM's default the kernel alone took 1.25 to 1.64 of BF16's "
            "time (benchmarks/results/experts-h100.json)"
        )


def _mixed_blocks(recipe: Recipe) -> Iterator[str]:
    """Note heads whose Q, K and V the trainer's fused weight rounds in common blocks."""
    width, block = recipe.model.shape.head_dim, recipe.precision.train.block
    if block and width % block:
        yield (
            f"precision.train_linear: heads of {width} do not fill the trainer's blocks of {block} "
            "rows, so it rounds Q, K and V in common blocks and the engine does not: the mismatch "
            "of two tiny models was 2 and 3 times as large (docs/research/mismatch.md)"
        )


def _without_effect(recipe: Recipe) -> Iterator[str]:
    """List options that were set and do nothing on either backend."""
    precision, correction, data = recipe.precision, recipe.correction, recipe.data
    bf16 = not precision.rollout.is_quantized
    recalibrates = recipe.glue.recalibrate not in (Recalibrate(), STOCK_RECALIBRATE)
    algorithm = recipe.algorithm
    by_group = algorithm.filled.estimator == "grpo"
    baseline = algorithm.use_leave_one_out_baseline, algorithm.normalize_rewards
    clips = algorithm.ratio_clip_min, algorithm.ratio_clip_max
    rejects = correction.mask != "none" or correction.veto is not None
    yield from _notes({
        "glue.recalibrate": (
            not precision.cache.is_quantized and recalibrates, "the KV cache is BF16"
        ),
        "precision.kv_scales": (
            not precision.cache.is_quantized and precision.kv_scales != "layer",
            "the KV cache has no scales",
        ),
        "precision.scales": (
            not precision.rollout.block and precision.scales != "fp32",
            "nothing is quantized" if bf16 else "blocks of FP8 alone have a choice",
        ),
        "noise": (
            (bf16 or not recipe.noise.is_on) and recipe.noise != Noise(recipe.noise.name),
            "nothing is quantized" if bf16 else "without noise.sigma_start there is none",
        ),
        "precision.first_layers_bf16": (bf16 and precision.first_layers_bf16, "all are BF16"),
        "precision.last_layers_bf16": (bf16 and precision.last_layers_bf16, "all are BF16"),
        "algorithm.use_leave_one_out_baseline, normalize_rewards": (
            not by_group and baseline != (None, None), "Reinforce++ normalizes over all tokens"
        ),
        "algorithm.minus_baseline": (
            by_group and algorithm.minus_baseline is not None, "estimator=grpo has a baseline"
        ),
        "algorithm.ratio_clip_min, ratio_clip_max": (
            algorithm.filled.disable_ppo_ratio and clips != (None, None), "there is no ratio"
        ),
        "algorithm.overlong_buffer_penalty": (
            algorithm.overlong_buffer is None and algorithm.overlong_buffer_penalty is not None,
            "without overlong_buffer no answer is too long",
        ),
        "correction.renormalize_denominator": (
            correction.renormalize_denominator and not rejects, "nothing is rejected"
        ),
        "data.path": (data.name != "jsonl" and data.path, f"data={data.name} reads no file"),
        "data.difficulty": (not data.is_made and data.difficulty, "problems are read"),
    })  # fmt: skip
    yield from _learned_by_heart(recipe)
    yield from _queued_nowhere(recipe)


def _learned_by_heart(recipe: Recipe) -> Iterator[str]:
    if recipe.data.name == "jsonl" and (shared := shared_problems(recipe.data))[0]:
        yield (
            f"data.path: {shared[0]} of {shared[1]} validation problems are among those to train "
            "on; val/accuracy then says what was learned by heart"
        )


def _queued_nowhere(recipe: Recipe) -> Iterator[str]:
    """List Slurm's keys beside `cluster=here`; no mistake, it may end a job's line on purpose."""
    here = f"cluster={recipe.cluster.name} is this machine; cluster=slurm, or a site's own file, "
    for key in (*SBATCH_KEYS, "python") if recipe.cluster.kind == "here" else ():
        if getattr(recipe.cluster, key):
            yield f"cluster.{key}: no effect, {here}queues it"


def _notes(without_effect: Mapping[str, tuple[Any, str]]) -> Iterator[str]:
    for key, (is_set, reason) in without_effect.items():
        if is_set:
            yield f"{key}: no effect, {reason}"


def _other_gpu_than_the_sites(cluster: Cluster) -> Iterator[str]:
    """Note a line that names another GPU than its site's own file."""
    site = None if cluster.name in SHIPPED_CLUSTERS else _sites().get(cluster.name)
    if site and site.gpu != cluster.gpu:
        yield (
            f"cluster.gpu={cluster.gpu}: {cluster.name}'s file has {site.gpu}; cluster.preflight "
            "ends a job on other GPUs than its plan's, so leave cluster.gpu out, unless the nodes "
            f"have {cluster.gpu}"
        )


@cache
def _sites() -> dict[str, Cluster]:
    return read_options("cluster")


def _tight_memory(settled: Settled, memory: MemoryByPhase) -> Iterator[str]:
    """Note what may run out of memory; it is not refused, because it is an estimate."""
    recipe = settled.recipe
    if memory.headroom(memory.worst) < HEADROOM:
        yield (
            f"memory: {memory.worst} needs {memory.needed_gib(memory.worst):.0f} of an "
            f"{recipe.cluster.gpu}'s {memory.gpu_gib} GiB, by estimate; "
            f"{memory.text(memory.worst)}; {_room(settled, memory.worst)}"
        )


def _room(settled: Settled, phase: str) -> str:
    """Return what would make room in a phase; shorter sequences only where they help."""
    if phase == "rollout":
        bounded = settled.layout.kv_cache_gib is not None
        lower = f"model.memory.{'kv_cache_gib' if bounded else 'rollout_share'}"
        return f"lower {lower}, or raise model.parallel.rollout_tensor"
    if memory_per_gpu(replace(settled, sequence_tokens=1)).headroom(phase) < HEADROOM:
        recipe = settled.recipe
        trains_all = not (recipe.lora.is_on or recipe.precision.train.is_quantized)
        adapters = ", or train adapters alone, lora=attention"
        instead = adapters * (trains_all and phase == "train")
        return f"use more GPUs: sequences of one token would not fit either{instead}"
    if settled.layout.recompute:
        return "use more GPUs, or lower grpo.max_new_tokens"
    return "use more GPUs, or model.memory.recompute=true"
