"""Declare what is trained and how: problems, steps, policy gradient, replay, adapters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from fp8_nemo.recipe.options.fields import number, one_of, optional_one_of, short_name


class Task(NamedTuple):
    """Describe problems that are made here, and the difficulties that they come in."""

    usual: int
    least: int
    most: int
    measure: str
    """What difficulty counts."""


TASKS = {
    "arithmetic": Task(2, 1, 6, "digits of each operand"),
    "running-sum": Task(30, 2, 60, "numbers to add up"),
}


@dataclass
class Data:
    """Choose problems with verifiable answers."""

    name: str = one_of(*TASKS, "jsonl", "openmath-2", "dapo-math-17k")
    """Made here (the first two), files, or a set that NeMo RL fetches."""
    path: str | None = None
    """For `jsonl`: a folder with train.jsonl and validation.jsonl, objects of `input`, `output`."""
    difficulty: int | None = None
    """Of problems that are made (`TASKS`): digits of an operand, numbers of a sum."""
    reward: str | None = None
    """A Python file of yours with `reward(answer, output)`; null: right answers get 1, others 0."""

    @property
    def level(self) -> int:
        """Return the difficulty of made problems: the one given, else the task's usual one."""
        return self.difficulty or TASKS[self.name].usual

    @property
    def is_made(self) -> bool:
        """Return whether the problems are made here, for either backend."""
        return self.name in TASKS

    @property
    def is_on_hub(self) -> bool:
        """Return whether NeMo RL fetches the problems: neither made here nor the user's files."""
        return not self.is_made and self.name != "jsonl"


@dataclass
class Grpo:
    """Set steps, batch and optimizer. None inherits the base configuration's value."""

    name: str = short_name("demo")
    """Part of the run directory's name."""
    steps: int = number(30, least=1)
    """GRPO steps; more on the same line go on."""
    prompts_per_step: int | None = number(None, least=1)
    """Prompts sampled in a step."""
    generations_per_prompt: int | None = number(None, least=2)
    """Answers sampled for each prompt: the group."""
    max_new_tokens: int | None = number(None, least=1)
    """Longest answer; in NeMo RL with its prompt at most the sequence."""
    learning_rate: float | None = number(None, above=0, most=1)
    """Adam's rate."""
    warmup_steps: int | None = number(None, least=0)
    """Steps over which the rate rises from a tenth; null: the base's, and locally none."""
    max_grad_norm: float | None = number(None, above=0)
    """Norm that an update's gradient is scaled down to; null: the base's, and locally 1."""
    updates_per_step: int | None = number(None, least=1)
    """Optimizer updates from one step's answers."""
    kl_penalty: float | None = number(None, least=0)
    """Weight of the KL to the reference policy; 0 skips its forward."""
    validate_every: int = number(10, least=1)
    """Steps from one validation to the next."""
    validate_first: bool = True
    """Validate before the first step."""
    checkpoint_every: int = number(10, least=1)
    """Steps from one checkpoint to the next; the last two stay."""
    stop_when_unstable: bool = False
    """End the run at a step that `health.py` calls unstable; its last checkpoint stays."""
    max_sample_age: int | None = number(None, least=1)
    """Asynchronous GRPO: steps that a sample's weights may be behind; null: synchronous."""

    @property
    def is_asynchronous(self) -> bool:
        """Return whether engines sample the next step's answers while this one's train."""
        return self.max_sample_age is not None

    def validates(self, step: int) -> bool:
        """Return whether a validation follows this step."""
        return step % self.validate_every == 0 or step == self.steps


@dataclass
class Algorithm:
    """Choose the policy gradient: its keys are NeMo RL's. None inherits, as GRPO has it."""

    name: str = short_name("grpo")
    """Part of the run directory's name."""
    estimator: str | None = optional_one_of("grpo", "reinforce_plus_plus")
    """Advantages: within each prompt's group, or normalized over all tokens of the step."""
    use_leave_one_out_baseline: bool | None = None
    """An answer's baseline leaves its own reward out."""
    normalize_rewards: bool | None = None
    """Divide by the group's standard deviation."""
    minus_baseline: bool | None = None
    """Reinforce++ takes the group's mean off before it normalizes."""
    use_kl_in_reward: bool | None = None
    """Reinforce++ takes `grpo.kl_penalty` off the advantages and not off the loss."""
    ratio_clip_min: float | None = number(None, least=0)
    """The ratio of current to train is clipped below 1 minus this; 0.2 in GRPO."""
    ratio_clip_max: float | None = number(None, least=0)
    """And above 1 plus this; DAPO's clip-higher has 0.28."""
    ratio_clip_c: float | None = number(None, above=1)
    """Dual clip: where the advantage is negative, a ratio counts as this at most."""
    disable_ppo_ratio: bool | None = None
    """The loss is `-A log p`, without ratio and clip (REINFORCE, RLOO)."""
    use_cispo: bool | None = None
    """The clipped ratio weighs `-A log p`, and every token keeps its gradient (CISPO)."""
    sequence_level_importance_ratios: bool | None = None
    """One ratio a sequence, the geometric mean of its tokens' (GSPO)."""
    token_level_loss: bool | None = None
    """All tokens of an update weigh the same; false: all its sequences."""
    overlong_filtering: bool | None = None
    """Answers that were cut leave loss, mismatch and correction."""
    overlong_buffer: float | None = number(None, above=0, most=1)
    """DAPO's overlong shaping: the last share of the longest answer costs reward, in proportion."""
    overlong_buffer_penalty: float | None = number(None, least=0)
    """What the longest answer costs; null: 1."""
    stop_properly_penalty_coef: float | None = number(None, least=0, most=1)
    """Factor on the reward of an answer that was cut; excludes `overlong_buffer`."""
    reward_target_min: float | None = number(None, most=1)
    """What a reward of 0 counts; -1 in DAPO. A reward of 1 stays."""
    use_dynamic_sampling: bool | None = None
    """Leave out prompts whose answers all earn the same, and sample until a step is full."""
    dynamic_sampling_max_gen_batches: int | None = number(None, least=1)
    """Batches after which a step that is not full ends the run."""
    batch_multiplier: float | None = number(None, least=1)
    """Prompts that dynamic sampling takes at a time, over those of a step."""

    @property
    def filled(self) -> Algorithm:
        """Return it with GRPO's value, as NeMo RL's classes have it, where one is null."""
        given = {key: value for key, value in vars(self).items() if value is not None}
        return Algorithm(**vars(GRPO) | given)

    @property
    def changes(self) -> bool:
        """Return whether any key is given."""
        return self != Algorithm(self.name)


GRPO = Algorithm(
    name="grpo",
    estimator="grpo",
    use_leave_one_out_baseline=True,
    normalize_rewards=True,
    minus_baseline=True,
    use_kl_in_reward=False,
    ratio_clip_min=0.2,
    ratio_clip_max=0.2,
    disable_ppo_ratio=False,
    use_cispo=False,
    sequence_level_importance_ratios=False,
    token_level_loss=True,
    overlong_filtering=False,
    overlong_buffer_penalty=1.0,
    reward_target_min=0.0,
    use_dynamic_sampling=False,
    dynamic_sampling_max_gen_batches=10,
    batch_multiplier=1.0,
)


@dataclass
class Replay:
    """Let the trainer send tokens to the experts that the engine chose (mixtures of experts)."""

    name: str = one_of("none", "r3")
    """`r3`: rollout routing replay, in the logprob forward and in training."""

    @property
    def is_on(self) -> bool:
        """Return whether routes are replayed."""
        return self.name != "none"


@dataclass
class Lora:
    """Train low-rank adapters of frozen weights (LoRA); refits send weights merged with them."""

    name: str = short_name("none")
    """Which linears have adapters; `none`: all weights are trained."""
    rank: int | None = number(None, least=1)
    """Rank of an adapter; null: there are none."""
    alpha: int | None = number(None, least=1)
    """The engine's weight is `W + alpha / rank * B A`."""
    target_modules: list[str] = field(default_factory=list)
    """Linears with adapters: `linear_qkv`, `linear_proj` (output), `linear_fc1` (gate, up),
    `linear_fc2` (down)."""

    @property
    def is_on(self) -> bool:
        """Return whether adapters are trained."""
        return self.rank is not None


LORA_MODULES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's linears to Hugging Face's; those of one row share an adapter's `A`."""


@dataclass
class Noise:
    """Add noise to the norms of a quantized engine: QeRL's Adaptive Quantization Noise (AQN)."""

    name: str = short_name("none")
    """`none`, or where the schedule is from."""
    sigma_start: float | None = number(None, above=0, most=1)
    """Standard deviation in the second stage, the first with noise; null: there is none."""
    sigma_end: float | None = number(None, above=0, most=1)
    """Standard deviation in the last stage, and after it; in between it decays exponentially."""
    stages: int | None = number(None, least=3)
    """Equal parts of `steps`."""
    steps: int | None = number(None, least=1)
    """Steps of all stages; QeRL takes those of the run."""

    @property
    def is_on(self) -> bool:
        """Return whether norms get noise."""
        return self.sigma_start is not None

    def sigma(self, trained: int, grpo: Grpo) -> float:
        """Return the standard deviation in a refit after so many steps; 0: no noise.

        QeRL's (`trl_trainer/noise_scheduler.py`, `get_sigma_by_step`), but 0 where a validation
        reads the refit. The rollout after that validation has the same engine.
        """
        if not (self.sigma_start and self.sigma_end and self.stages and self.steps):
            return 0.0
        stage = min(trained * self.stages // self.steps, self.stages - 1)
        if stage == 0 or grpo.validates(trained):
            return 0.0
        return self.sigma_start * (self.sigma_end / self.sigma_start) ** (
            (stage - 1) / (self.stages - 2)
        )
