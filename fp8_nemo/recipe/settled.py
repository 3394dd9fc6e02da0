"""Settle a recipe: decide every number that it leaves open, once, before anything depends on it.

A number that the recipe leaves out is inherited from a `Base`: the model's base YAML in NeMo RL, or
`LOCAL_BASE`. A user's own key under `nemo` wins over both. A frozen plan is settled again from what
it wrote, and gives the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.plain import leaves

PROMPT_ROOM = 1024
"""Tokens kept for the prompt when `grpo.max_new_tokens` is given, and not by `PROMPT`."""
PROMPT = "data.max_input_seq_length"
"""NeMo RL cuts a prompt of so many tokens to four, and learns nothing of it."""
MICRO_BATCH = "policy.train_micro_batch_size"
LOGITS_CHUNK = "policy.logprob_chunk_size"
LOGPROB_BATCH = "policy.logprob_batch_size"
SHARE = "policy.generation.vllm_cfg.gpu_memory_utilization"
VALIDATED = "grpo.max_val_samples"
GROUPED = "policy.megatron_cfg.env_vars.NVTE_USE_CUTLASS_GROUPED_GEMM"
"""TransformerEngine's variable: on Hopper CUTLASS multiplies a layer's experts in 16 bits by one
launch, where cuBLAS launches each; their weights' gradients stay with cuBLAS. With the router's own
routes training took cuBLAS 1.5 and 1.6 times as long, with the same given routes again 0.8 to 1.1
times (train-worker-30b*-h200.json)."""
KEEPS_OPTIMIZER = "policy.offload_optimizer_for_refit"
VALIDATION_PROBLEMS = 256
"""Held-out problems of one validation, on both backends."""
AIME_ROWS = 960
"""`dapo-math-17k` validates on AIME 2024, 30 problems 32 times over: 256 rows are no whole pass."""
KEPT_CHECKPOINTS = 2
"""The last one, and one to fall back to if it is damaged."""
GROWTH_INTERVAL = 400
"""Updates without an overflow that double FP16's loss scale, as in the Precision-RL patch (arXiv
2510.26788)."""


class Base(NamedTuple):
    """Hold what a base configuration says where the recipe says null."""

    prompts_per_step: int
    generations_per_prompt: int
    sequences_per_update: int
    micro_batch: int
    sequence: int
    """Longest sequence, prompt and response, in tokens."""
    learning_rate: float
    kl_penalty: float


class Layout(NamedTuple):
    """Say how a run uses its GPUs: `Layout(tensor=1, ..., recompute=False, keeps_optimizer=True)`.

    What a recipe gives under `model.parallel` and `model.memory`; `plan/layout.py` chooses the
    rest, or the plan that froze at the first submission has it.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    rollout_tensor: int = 1
    rollout_expert: int = 1
    recompute: bool = False
    micro_batch: int = 1
    """Sequences of full length that one micro-batch of training has room for."""
    logprob_batch: int = 1
    """The same of a logprob pass."""
    keeps_optimizer: bool = False
    """Adam's state stays on the GPU, always where engines have GPUs of their own. Else it goes to
    the host before every refit and back before training: the moments, and the masters where they
    are the precision-aware optimizer's."""
    kv_cache_gib: float | None = None
    logits_chunk: int = 0
    """Tokens whose logits become FP32 at a time; 0: all of a micro-batch's."""

    @property
    def copy(self) -> int:
        """Return the GPUs that one copy of the policy trains on."""
        return self.tensor * self.pipeline * self.context


LORA_RATE = 1e-5
"""The least learning rate of adapters where none is typed: ten times the 1e-6 that is usual for all
weights, as QeRL trains them. NeMo RL's own recipe of adapters for Qwen3-8B has 5e-6."""
LOCAL_BASE = Base(32, 16, 512, 4, 512, 5.0e-6, 0.01)
"""The values of NeMo RL's grpo_math_1B.yaml (main 7ea279a), for the local backend."""


@dataclass(frozen=True)
class Settled:
    """Hold a recipe and every number that it left open; none of them is None.

    Example: `Settled(recipe, own={}, prompts_per_step=64, generations_per_prompt=32,
    updates_per_step=4, learning_rate=3e-7, kl_penalty=0.01, layout=Layout(), prompt_tokens=1024,
    response_tokens=3072, sequence_tokens=4096, validation_problems=256)`.
    """

    recipe: Recipe
    """With the same numbers filled in; the name of its run directory follows from it."""
    own: Mapping[str, Any]
    """The user's own keys of NeMo RL, `{dotted key: value}`."""
    prompts_per_step: int
    generations_per_prompt: int
    updates_per_step: int
    learning_rate: float
    kl_penalty: float
    layout: Layout
    prompt_tokens: int
    """Room for the prompt."""
    response_tokens: int
    """Room for the response."""
    sequence_tokens: int
    """Room for both."""
    validation_problems: int

    @property
    def gpus(self) -> int:
        """Return the GPUs of the whole run."""
        return self.recipe.cluster.nodes * self.recipe.cluster.gpus_per_node

    @property
    def shares_gpus(self) -> bool:
        """Return whether every GPU trains and samples, in turn."""
        return not self.recipe.cluster.rollout_gpus

    @property
    def train_gpus(self) -> int:
        """Return the GPUs that train."""
        return self.gpus - self.recipe.cluster.rollout_gpus

    @property
    def rollout_gpus(self) -> int:
        """Return the GPUs that sample."""
        return self.recipe.cluster.rollout_gpus or self.gpus

    @property
    def data_parallel(self) -> int:
        """Return the copies of the policy that train side by side; at least 1."""
        return max(1, self.train_gpus // self.layout.copy)

    @property
    def engines(self) -> int:
        """Return the engines that sample side by side; at least 1."""
        return max(1, self.rollout_gpus // self.layout.rollout_tensor)

    @property
    def sequences_per_step(self) -> int:
        """Return the sequences of one step's rollout."""
        return self.prompts_per_step * self.generations_per_prompt

    @property
    def prompts_per_batch(self) -> int:
        """Return the prompts that are sampled at a time: dynamic sampling takes more at once."""
        return int(self.prompts_per_step * (self.recipe.algorithm.filled.batch_multiplier or 1))

    @property
    def groups_experts(self) -> bool:
        """Return whether the trainer multiplies a layer's experts by one launch (`GROUPED`)."""
        recipe = self.recipe
        takes_16_bits = recipe.model.shape.experts and not recipe.precision.train.is_quantized
        is_on = str(self.own.get(GROUPED, 1)) == "1"
        return bool(takes_16_bits and recipe.cluster.has_hopper and is_on)

    @property
    def sequences_per_batch(self) -> int:
        """Return the sequences that are sampled at a time."""
        return self.prompts_per_batch * self.generations_per_prompt

    @property
    def sequences_per_engine(self) -> int:
        """Return the sequences of one batch that one engine samples, at most."""
        return math.ceil(self.sequences_per_batch * self.layout.rollout_tensor / self.rollout_gpus)

    @property
    def sequences_per_update(self) -> int:
        """Return the sequences of one optimizer step."""
        return self.sequences_per_step // self.updates_per_step

    @property
    def micro_batch_tokens(self) -> int:
        """Return the tokens of one micro-batch: packed sequences fill this many at most."""
        return self.sequence_tokens * self.layout.micro_batch


def settle(recipe: Recipe, base: Base, layout: Layout | None = None) -> Settled:
    """Decide every number that a recipe leaves open.

    A base that is given fewer or more sequences keeps its number of updates per step.

    Args:
        recipe: valid by itself.
        base: what is inherited.
        layout: what a plan chose; by default what the recipe gives, and 1 or false where it
            leaves a number to the plan.
    """
    grpo, own, is_local = recipe.grpo, leaves(recipe.nemo), recipe.chosen_backend == "local"
    base_updates = base.prompts_per_step * base.generations_per_prompt // base.sequences_per_update
    prompts = _or(grpo.prompts_per_step, base.prompts_per_step)
    generations = _or(grpo.generations_per_prompt, base.generations_per_prompt)
    updates = _or(grpo.updates_per_step, max(1, base_updates))
    least_rate = LORA_RATE if recipe.lora.is_on else 0.0
    learning_rate = _or(grpo.learning_rate, max(least_rate, base.learning_rate))
    kl_penalty = _or(grpo.kl_penalty, base.kl_penalty)
    prompt = response = sequence = base.sequence
    if grpo.max_new_tokens is not None:
        response, prompt = grpo.max_new_tokens, _number(own, PROMPT, PROMPT_ROOM)
        sequence = 128 * math.ceil((response + prompt) / 128)
    filled = replace(
        grpo,
        prompts_per_step=prompts,
        generations_per_prompt=generations,
        updates_per_step=updates,
        learning_rate=learning_rate,
        kl_penalty=kl_penalty,
        # NeMo RL's base bounds the whole sequence, and its response has no number of its own.
        max_new_tokens=response if is_local else grpo.max_new_tokens,
    )
    memory = recipe.model.memory
    memory = replace(memory, rollout_share=_number(own, SHARE, memory.rollout_share))
    data = recipe.data
    if data.is_made:
        data = replace(data, difficulty=data.level)
    return Settled(
        recipe=replace(recipe, grpo=filled, data=data, model=replace(recipe.model, memory=memory)),
        own=own,
        prompts_per_step=prompts,
        generations_per_prompt=generations,
        updates_per_step=updates,
        learning_rate=learning_rate,
        kl_penalty=kl_penalty,
        layout=layout or _given_layout(recipe, base, own),
        prompt_tokens=prompt,
        response_tokens=response,
        sequence_tokens=sequence,
        validation_problems=_number(
            own,
            VALIDATED,
            AIME_ROWS if recipe.data.name == "dapo-math-17k" else VALIDATION_PROBLEMS,
        ),
    )


def _given_layout(recipe: Recipe, base: Base, own: Mapping[str, Any]) -> Layout:
    """Take the layout that a recipe, or the user's own keys of NeMo RL, give."""
    at, memory = recipe.model.parallel, recipe.model.memory
    micro_batch = _number(own, MICRO_BATCH, _or(memory.micro_batch, base.micro_batch))
    return Layout(
        tensor=at.tensor or 1,
        pipeline=at.pipeline or 1,
        context=at.context or 1,
        expert=at.expert or 1,
        rollout_tensor=at.rollout_tensor or 1,
        rollout_expert=at.rollout_expert or 1,
        recompute=bool(memory.recompute),
        micro_batch=micro_batch,
        logprob_batch=_number(own, LOGPROB_BATCH, memory.logprob_batch or micro_batch),
        keeps_optimizer=recipe.cluster.rollout_gpus > 0
        or not own.get(KEEPS_OPTIMIZER, memory.optimizer != "keep"),
        kv_cache_gib=memory.kv_cache_gib,
        logits_chunk=_number(own, LOGITS_CHUNK, 0),
    )


def _or(given: Any, inherited: Any) -> Any:
    return inherited if given is None else given


def _number(own: Mapping[str, Any], key: str, default: Any) -> Any:
    """Take a user's own number; what is none is refused later, against the type of ours."""
    value = own.get(key, default)
    return value if type(value) in (int, float) else default
