"""Declare what a user may say: one dataclass per Hydra group, each limit beside its field.

`checks.py` validates a Recipe by itself, `compose.py` its keys and types, `plan/` what a backend
forbids, `nemo_config/` what NeMo RL forbids, `correction/quantiles.py` what a measurement says.

Fields are plain strings and numbers, because a Recipe is also a YAML file, a command line and a
line of a JSON file. `None` in a number of `grpo` inherits the base configuration (`settled.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


def short_name(default: str) -> Any:
    """Declare a name that becomes part of a path: letters, digits, dots, dashes, underscores."""
    return field(default=default, metadata={"short_name": True})


def one_of(*allowed: str, default: str | None = None) -> Any:
    """Declare a string field with a closed list of values."""
    return field(default=default or allowed[0], metadata={"one_of": allowed})


def optional_one_of(*allowed: str) -> Any:
    """Declare a string field with a closed list of values, or null."""
    return field(default=None, metadata={"one_of": allowed})


def number(
    default: float | None,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Any:
    """Declare a numeric field with an allowed range; `least` and `most` are inclusive."""
    return field(default=default, metadata={"least": least, "above": above, "most": most})


class Format(NamedTuple):
    """Describe how numbers are held: `Format("fp8", "float8_e4m3fn", 1, block=128, nan=0x7F)`."""

    name: str
    dtype: str
    """Torch's name for one element."""
    bytes: float
    """Of one weight, without its share of a scale."""
    block: int = 0
    """Side of the square of weights that shares a scale; 0: it has none of these."""
    group: int = 0
    """Weights in a row that share a scale; 0: it has none of these."""
    scale_dtype: str = "float32"
    nan: int = 0
    """Byte that reads as NaN, with which a refit poisons the engine's memory."""
    scales_loss: bool = False
    """Whether training in it needs a loss scale: else small gradients become zeros."""

    @property
    def is_quantized(self) -> bool:
        """Return whether values are held with scales."""
        return self.block + self.group > 0

    @property
    def bytes_per_weight(self) -> float:
        """Return the bytes of one weight, with its share of a scale of a block or group."""
        sharing = self.block**2 + self.group
        return self.bytes + (DTYPE_BYTES[self.scale_dtype] / sharing if sharing else 0)


FORMATS = {
    each.name: each
    for each in (
        Format("bf16", "bfloat16", 2),
        Format("fp16", "float16", 2, scales_loss=True),
        Format("fp8", "float8_e4m3fn", 1, block=128, nan=0x7F),
        Format("nvfp4", "uint8", 0.5, group=16, scale_dtype="float8_e4m3fn"),
    )
}
"""What `precision` may name. A new format is a row here, one of `wire.HELD`, a quantizer in
`glue/quantize.py`, a row of PRODUCTS in `local/modules/linears.py` and an option in
`conf/precision/`: `tests/test_fifth_format.py` adds one."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}


@dataclass
class Parallel:
    """Lay a model out over GPUs. With `model.layout=auto` the plan chooses what is null."""

    tensor: int | None = number(1, least=1)
    """GPUs that share each weight in training."""
    pipeline: int | None = number(1, least=1)
    """Stages of layers in training; FP8 KV needs 1."""
    context: int | None = number(1, least=1)
    """GPUs that share a sequence in training."""
    expert: int | None = number(1, least=1)
    """GPUs that share the experts in training."""
    rollout_tensor: int | None = number(1, least=1)
    """GPUs that share each weight in an engine."""
    rollout_expert: int | None = number(1, least=1)
    """GPUs over which an engine spreads whole experts."""


@dataclass
class Memory:
    """Share a GPU that trainer and engine take turns on (`backend=nemo`)."""

    recompute: bool | None = False
    """Compute activations again in the backward pass instead of keeping them."""
    rollout_share: float = number(0.5, above=0, most=0.95)
    """Share of the GPU that the engine may take."""
    kv_cache_gib: float | None = number(None, above=0)
    """KV cache per GPU; null: what the engine saw free at its start (NeMo RL #3412)."""
    micro_batch: int | None = number(None, least=1)
    """Sequences of full length that a training micro-batch has room for; null: the base's."""
    logprob_batch: int | None = number(None, least=1)
    """The same of a logprob micro-batch; null: as many as in training."""
    optimizer: str | None = optional_one_of("move", "keep")
    """Adam's state between two trainings: moved to the host, as without a value, or kept."""


@dataclass(unsafe_hash=True)  # by its numbers, for caches; OmegaConf fills no frozen one
class Shape:
    """Give the numbers of a model that its weights' names and shapes follow from."""

    layers: int = number(1, least=1)
    """Decoder layers."""
    hidden: int = number(128, least=1)
    """Width of the residual stream."""
    ffn: int = number(128, least=1)
    """Width of a dense MLP."""
    heads: int = number(1, least=1)
    """Query heads."""
    kv_heads: int = number(1, least=1)
    """K/V heads."""
    head_dim: int = number(128, least=2)
    """Width of a head."""
    vocab: int = number(128, least=1)
    """Tokens in the embedding."""
    experts: int = number(0, least=0)
    """Experts of a layer; 0: a dense model."""
    experts_per_token: int = number(0, least=0)
    """Experts that a token goes through."""
    expert_ffn: int = number(0, least=0)
    """Width of an expert."""
    tied: bool = False
    """Whether `lm_head` shares the embedding's weight."""
    qk_norm: bool = False
    """Whether Q and K are normalized per head, as in Qwen3."""
    qkv_bias: bool | None = None
    """Whether Q, K and V have biases, as in Qwen2.5; null: no."""

    @property
    def family(self) -> str:
        """Return the `model_type` that Hugging Face gives to models of such numbers."""
        if self.experts:
            return "qwen3_moe"
        return "qwen3" if self.qk_norm else "qwen2" if self.qkv_bias else "llama"


@dataclass
class Model:
    """Describe a model: where it comes from, where it runs, how large it is."""

    name: str = short_name("tiny-llama")
    """Part of the run directory's name."""
    backend: str = one_of("local", "nemo")
    """Where `backend=auto` runs it."""
    hf_id: str | None = None
    """Its name on the Hugging Face hub."""
    path: str | None = None
    """A folder that holds the model; wins over `hf_id`. Without either, the one that ships here."""
    base_config: str | None = None
    """Base YAML in NeMo RL's checkout, for `backend=nemo`."""
    shape_from: str | None = optional_one_of("config")
    """`config`: `shape` is read from the model's config.json and checked against its weights."""
    layout: str | None = optional_one_of("auto")
    """`auto`: the plan chooses what `parallel` and `memory` leave null, the fastest that fits."""
    parallel: Parallel = field(default_factory=Parallel)
    memory: Memory = field(default_factory=Memory)
    shape: Shape = field(default_factory=Shape)

    @property
    def hub_id(self) -> str | None:
        """Return its name on the hub if it is read from there; None for a folder's."""
        return None if self.path else self.hf_id


@dataclass(unsafe_hash=True)
class Precision:
    """Choose what is held and multiplied in FP8, on either side."""

    name: str = short_name("bf16")
    """Part of the run directory's name."""
    rollout_linear: str = one_of(*FORMATS)
    """Weights and activations of the engine's linears; with `nvfp4` the weights alone."""
    rollout_kv: str = one_of("bf16", "fp16", "fp8")
    """FP8 cache, and FP8 attention with it."""
    kv_scales: str = one_of("layer", "head")
    """Of an FP8 cache: one each for a layer's Q, K and V, or for each of its K/V heads."""
    train_linear: str = one_of("bf16", "fp16", "fp8")
    """Weights and activations of the trainer's linears; FP16 is that of all else, on both sides."""
    loss_scale: float | None = number(None, above=0, most=1e10)
    """Factor on the loss that a run in FP16 begins with, taken out of its gradients again."""
    scales: str = one_of("fp32", "pow2")
    """Block scales: any FP32 number, or powers of two."""
    first_layers_bf16: int = number(0, least=0)
    """First layers of the engine that stay in BF16."""
    last_layers_bf16: int = number(0, least=0)
    """Last layers of the engine that stay in BF16."""
    align: str = one_of("none", "cheap")
    """`cheap`: the engine's RoPE, SiLU and FP8 quantizer round as the trainer's."""

    @property
    def is_aligned(self) -> bool:
        """Return whether operations of the engine are replaced by the trainer's."""
        return self.align != "none"

    @property
    def rollout(self) -> Format:
        """Return the format of the engine's linear weights."""
        return FORMATS[self.rollout_linear]

    @property
    def cache(self) -> Format:
        """Return the format of the KV cache, and of attention over it."""
        return FORMATS[self.rollout_kv]

    def kv_groups(self, kv_heads: int) -> int:
        """Return the scales that a layer's Q, K or V has in a model of so many K/V heads."""
        return kv_heads if self.kv_scales == "head" else 1

    @property
    def train(self) -> Format:
        """Return the format in which the trainer multiplies its linears."""
        return FORMATS[self.train_linear]

    @property
    def plain(self) -> Format:
        """Return the format of everything that is not quantized: embeddings, norms, activations."""
        return FORMATS["bf16"] if self.train.is_quantized else self.train

    @property
    def keeps_masters(self) -> bool:
        """Return whether the optimizer keeps whole FP32 masters (`backend=nemo`).

        Beside BF16 weights it needs only the 16 bits that these lack.
        """
        return self.train.is_quantized or self.plain.scales_loss

    @property
    def bf16_layers(self) -> int:
        """Return the layers at either end that stay in BF16."""
        return self.first_layers_bf16 + self.last_layers_bf16


RATIOS = ("token", "sequence", "geometric")
"""Aggregates of `log_ratio` whose exponential is a ratio."""
DIVERGENCES = (
    *("token-k2", "sum-k2", "mean-k2", "max-k2"),
    *("token-k3", "sum-k3", "mean-k3", "max-k3", "mean-error"),
)
"""Distances of train and rollout, which have an upper bound alone."""


OF_A_RATIO = {
    "truncate": "truncates a ratio",
    "truncate_low": "truncates a ratio",
    "normalize": "divides by the mean ratio",
}
"""Options of a correction that has a ratio, and what they do to it."""


@dataclass
class Correction:
    """Choose what multiplies a token's loss for the mismatch of rollout and train."""

    name: str = short_name("none")
    """Part of the run directory's name."""
    level: str = one_of("none", *RATIOS)
    """Which aggregate of `log_ratio` the multiplier is the exponential of; `none`: 1."""
    truncate: float | None = number(None, above=0)
    """Lower the ratio to this."""
    truncate_low: float | None = number(None, above=0)
    """Raise the ratio to this."""
    mask: str = one_of("none", *RATIOS, *DIVERGENCES)
    """Which statistic must lie in `[low, high]` for the token to be kept (`correction.py`)."""
    low: float | None = number(None, least=0)
    """Lower bound of `mask`'s statistic."""
    high: float | None = number(None, above=0)
    """Upper bound of `mask`'s statistic."""
    veto: float | None = number(None, above=0, most=1)
    """Drop a sequence in which any token's ratio is below this."""
    normalize: bool = False
    """Divide by the mean multiplier of the step's rollout batch."""
    renormalize_denominator: bool = False
    """Rejected tokens leave the loss's denominator (verl); by default they stay (NeMo RL)."""
    measurement: str | None = None
    """File of `recipes.measure_mismatch`, which says how much would be rejected."""
    max_reject: float = number(0.1, above=0, most=1)
    """Refuse to plan what would reject a larger share of the measured tokens."""

    @property
    def is_on(self) -> bool:
        """Return whether anything but 1 may multiply a token's loss."""
        return (self.level, self.mask, self.veto) != ("none", "none", None)


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
    """Train low-rank adapters of frozen weights (LoRA); a refit sends the merged weights."""

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


@dataclass
class Recalibrate:
    """Say where Q/K/V ranges come from and how much room they get."""

    source: str = one_of("logprob", "forward")
    """`logprob`: the logprob forward that the step runs anyway; `forward`: an extra pass."""
    margin: float = number(1.05, least=1)
    """Factor on the largest value seen."""
    first_margin: float = number(2.0, least=1)
    """Margin while the ranges come from prompts alone: before the first rollout."""
    history: int = number(2, least=1)
    """Steps over which the maximum is taken."""


@dataclass
class Glue:
    """Choose which parts of the FP8 path are ours; each switch works alone."""

    name: str = short_name("ours")
    """Part of the run directory's name."""
    quantize: str = one_of("fused", "stock")
    """`fused`: our kernel; `stock`: NeMo RL's receiver quantizes."""
    transfer: str = one_of("fp8", "bf16")
    """What travels to the engine."""
    verify: str = one_of("bytes", "names", "off")
    """`bytes` proves every byte of each refit; `names` that each tensor came and was loaded."""
    recalibrate: Recalibrate = field(default_factory=Recalibrate)

    @property
    def sends_fp8(self) -> bool:
        """Return whether FP8 travels: where NeMo RL quantizes, it is given BF16."""
        return self.transfer == "fp8" and self.quantize == "fused"

    @property
    def has_receiver(self) -> bool:
        """Return whether vLLM's workers need our receiver."""
        return (self.quantize, self.transfer, self.verify) != ("stock", "bf16", "off")


@dataclass
class Logging:
    """Turn on NeMo RL's own loggers; `metrics.jsonl` is always written."""

    tensorboard: bool = True
    """Write TensorBoard's files."""
    wandb: bool = False
    """Log to Weights & Biases."""


@dataclass
class Cluster:
    """Say where a run is started."""

    name: str = short_name("here")
    """Part of the run directory's name."""
    kind: str = one_of("here", "slurm")
    """This machine, or Slurm's queue."""
    nodes: int = number(1, least=1)
    """Nodes of the run."""
    gpus_per_node: int = number(8, least=1)
    """GPUs that it takes on each."""
    rollout_gpus: int = number(0, least=0)
    """GPUs that only sample, of several nodes whole ones; 0: each trains and samples in turn."""
    gpu: str = one_of("h100", "h200", "b200")
    """Which GPU; its memory and architecture follow."""
    time: str = "04:00:00"
    """Slurm's limit for one job; a run goes on in the next one."""
    account: str | None = None
    """`sbatch --account`."""
    partition: str | None = None
    """`sbatch --partition`."""
    qos: str | None = None
    """`sbatch --qos`."""
    reservation: str | None = None
    """`sbatch --reservation`."""
    constraint: str | None = None
    """`sbatch --constraint`."""
    nodelist: str | None = None
    """`sbatch --nodelist`."""
    exclude: str | None = None
    """`sbatch --exclude`."""
    mem: str | None = None
    """`sbatch --mem`."""
    gres: str | None = None
    """`sbatch --gres`, and no `--gpus-per-node` beside it."""
    comment: str | None = None
    """`sbatch --comment`; null is `fp8-nemo`, or the sweep's name."""
    mail: str | None = None
    """Address that Slurm writes to when a job begins, ends, fails or is requeued."""
    dependency: str | None = None
    """Start when this has ended well: a run's directory, a job's number, or as sbatch has it."""
    max_running: int | None = number(None, least=1)
    """Cells of a sweep that run at once; null: as many as Slurm starts."""
    env: list[str] = field(default_factory=list)
    """The job's environment: `NAME=value`, or `NAME` alone, a secret of who submits."""
    extra: list[str] = field(default_factory=list)
    """More options of `sbatch`, one word each; those of a line come after the site's."""
    container: str | None = None
    """Image, or root folder, that a job's part on each node runs in; None runs on the bare node."""
    enter: list[str] = field(default_factory=list)
    """Command that enters it, of `{image}`, `{mounts}` and `{folder}`; empty: pyxis does."""
    mounts: list[str] = field(default_factory=list)
    """Folders that the container sees, `/from:/to` or `/both`, besides those of the run itself."""
    setup: str | None = None
    """Shell commands that every node runs before anything else: `module load cuda`."""
    python: str | None = None
    """Interpreter of the job; None is the one that submits, and `python3` in a container."""
    nemo_root: str | None = None
    """NeMo RL's checkout; by default `$NEMO_RL_ROOT`."""
    interpreter: str = one_of("container", "system")
    """`container`: NeMo RL's workers have own environments; `system`: one for all."""
    requeue: bool = True
    """Queue again until `grpo.steps` are done."""
    save_before_end: int = number(600, least=0)
    """Seconds before the time limit from which on a run saves and stops."""
    join_timeout: int = number(1800, least=1)
    """Seconds that all nodes have to join Ray; pulling a container's image counts."""
    preflight: bool = True
    """Run `recipes.check_cluster` at the head of each job."""
    other_versions: str = one_of("refuse", "allow")
    """Whether a run may go on with other versions, weights or problems than it began with."""


@dataclass
class Recipe:
    """Combine one option of each group."""

    seed: int = number(42, least=0, most=2**31 - 1)
    """Seeds problems, sampling and weights' order; part of the directory's name."""
    backend: str = one_of("auto", "local", "nemo")
    """`auto` takes `model.backend`."""
    model: Model = field(default_factory=Model)
    precision: Precision = field(default_factory=Precision)
    correction: Correction = field(default_factory=Correction)
    data: Data = field(default_factory=Data)
    grpo: Grpo = field(default_factory=Grpo)
    algorithm: Algorithm = field(default_factory=Algorithm)
    replay: Replay = field(default_factory=Replay)
    lora: Lora = field(default_factory=Lora)
    noise: Noise = field(default_factory=Noise)
    glue: Glue = field(default_factory=Glue)
    logging: Logging = field(default_factory=Logging)
    cluster: Cluster = field(default_factory=Cluster)
    nemo: dict[str, Any] = field(default_factory=dict)
    """Free: NeMo RL's own keys, held against its base YAML by the plan."""
    outputs: str = "outputs"
    """Folder of all run directories."""

    @property
    def chosen_backend(self) -> str:
        """Return `local` or `nemo`: the model's, unless the recipe names one."""
        return self.model.backend if self.backend == "auto" else self.backend
