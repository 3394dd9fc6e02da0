"""The Recipe: one dataclass per Hydra group, each limit declared beside the field that it binds.

A Recipe is what a user may say. `mistakes(recipe)` lists everything that is wrong with it, one
`Mistake` per cause, as far as it can be seen in the recipe alone. Unknown keys and wrong types are
found by `compose.py`, what a backend forbids by `plan.py`, what NeMo RL forbids by `host.py` and
`overrides.py`, what a correction's measurement says against it by `measurement.py`.

Fields are plain strings and numbers, because a Recipe is also a YAML file, a command line and a
line of a JSON file. `None` in a number of `grpo` means "as the base configuration has it".
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

WEEK = 7 * 86400


class Mistake(NamedTuple):
    """One thing that is wrong: `Mistake("grpo.steps", 0, "1 or more", "give a whole number")`."""

    key: str
    got: Any
    allowed: str
    remedy: str = ""

    def __str__(self) -> str:
        """One line: key, value, what is allowed, what to do."""
        return f"{self.key}={as_typed(self.got)}: " + "; ".join(filter(None, self[2:]))


def as_typed(value: Any) -> str:
    """A value as a user types it: `null`, `true`, `fp8`."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def short_name(default: str) -> Any:
    """A name that becomes part of a path: letters, digits, dots, dashes and underscores."""
    return field(default=default, metadata={"short_name": True})


def one_of(*allowed: str, default: str | None = None) -> Any:
    """A string field with a closed list of values."""
    return field(default=default or allowed[0], metadata={"one_of": allowed})


def number(
    default: float | None,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
) -> Any:
    """A numeric field with an allowed range; `least` and `most` are inclusive."""
    return field(default=default, metadata={"least": least, "above": above, "most": most})


@dataclass
class Parallel:
    """How a model is spread over GPUs; one layout per model, the same for every precision."""

    tensor: int = number(1, least=1)
    pipeline: int = number(1, least=1)
    context: int = number(1, least=1)
    expert: int = number(1, least=1)
    rollout_tensor: int = number(1, least=1)
    rollout_expert: int = number(1, least=1)


@dataclass
class Memory:
    """How a model shares a GPU that trainer and engine take turns on (`backend=nemo`)."""

    recompute: bool = False
    """Compute activations again in the backward pass instead of keeping them."""
    rollout_share: float = number(0.5, above=0, most=0.95)
    """Share of the GPU that the engine may take."""
    kv_cache_gib: float | None = number(None, above=0)
    """Size of the KV cache per GPU. Without it the engine takes what it saw free when it started,
    and may find it taken when it wakes up (NeMo RL #3412)."""


@dataclass
class Shape:
    """The numbers of a model that its weights' names and shapes follow from."""

    layers: int = number(1, least=1)
    hidden: int = number(128, least=1)
    ffn: int = number(128, least=1)
    heads: int = number(1, least=1)
    kv_heads: int = number(1, least=1)
    head_dim: int = number(128, least=2)
    vocab: int = number(128, least=1)
    experts: int = number(0, least=0)
    experts_per_token: int = number(0, least=0)
    expert_ffn: int = number(0, least=0)
    tied: bool = False
    """Whether `lm_head` shares the embedding's weight."""
    qk_norm: bool = False
    """Whether Q and K are normalized per head, as in Qwen3."""


@dataclass
class Model:
    """A model: where it comes from, where it runs, how large it is."""

    name: str = short_name("tiny-llama")
    backend: str = one_of("local", "nemo")
    hf_id: str | None = None
    path: str | None = None
    """A folder that holds the model; wins over `hf_id`. Without either, the one that ships here."""
    base_config: str | None = None
    """Base YAML in NeMo RL's checkout, for `backend=nemo`."""
    parallel: Parallel = field(default_factory=Parallel)
    memory: Memory = field(default_factory=Memory)
    shape: Shape = field(default_factory=Shape)

    @property
    def hub_id(self) -> str | None:
        """Its name on the hub if it is read from there; None for a folder's."""
        return None if self.path else self.hf_id


@dataclass
class Precision:
    """What is held and multiplied in FP8, on either side."""

    name: str = short_name("bf16")
    rollout_linear: str = one_of("bf16", "fp8")
    rollout_kv: str = one_of("bf16", "fp8")
    """FP8 cache, and FP8 attention with it."""
    train_linear: str = one_of("bf16", "fp8")
    scales: str = one_of("fp32", "pow2")
    first_layers_bf16: int = number(0, least=0)
    last_layers_bf16: int = number(0, least=0)


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
    """What multiplies a token's loss for the mismatch of rollout and train (`correction.py`)."""

    name: str = short_name("none")
    level: str = one_of("none", *RATIOS)
    """Which aggregate of `log_ratio` the multiplier is the exponential of; `none`: 1."""
    truncate: float | None = number(None, above=0)
    """Lower the ratio to this."""
    truncate_low: float | None = number(None, above=0)
    """Raise the ratio to this."""
    mask: str = one_of("none", *RATIOS, *DIVERGENCES)
    """Which statistic must lie in `[low, high]` for the token to be kept (`correction.py`)."""
    low: float | None = number(None, least=0)
    high: float | None = number(None, above=0)
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


class Task(NamedTuple):
    """Problems that are made here, and the difficulties that they come in."""

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
    """Problems with verifiable answers."""

    name: str = one_of(*TASKS, "jsonl", "openmath-2", "dapo-math-17k")
    path: str | None = None
    """For `jsonl`: a folder with train.jsonl and validation.jsonl, objects of `input`, `output`."""
    difficulty: int | None = number(None, least=1)
    """Of problems that are made (`TASKS`): digits of an operand, numbers of a sum."""

    @property
    def is_made(self) -> bool:
        """Whether the problems are made here, for either backend."""
        return self.name in TASKS

    @property
    def is_on_hub(self) -> bool:
        """Whether NeMo RL fetches the problems: neither made here nor the user's files."""
        return not self.is_made and self.name != "jsonl"


@dataclass
class Grpo:
    """Steps, batch and optimizer. None inherits the base configuration's value."""

    name: str = short_name("demo")
    steps: int = number(30, least=1)
    prompts_per_step: int | None = number(None, least=1)
    generations_per_prompt: int | None = number(None, least=2)
    max_new_tokens: int | None = number(None, least=1)
    learning_rate: float | None = number(None, above=0, most=1)
    updates_per_step: int | None = number(None, least=1)
    kl_penalty: float | None = number(None, least=0)
    validate_every: int = number(10, least=1)
    validate_first: bool = True
    checkpoint_every: int = number(10, least=1)
    stop_when_unstable: bool = False
    """End the run at a step that `health.py` calls unstable; its last checkpoint stays."""


@dataclass
class Recalibrate:
    """Where Q/K/V ranges come from and how much room they get."""

    source: str = one_of("logprob", "forward")
    """`logprob`: the logprob forward that the step runs anyway; `forward`: an extra pass."""
    margin: float = number(1.05, least=1)
    first_margin: float = number(2.0, least=1)
    """Margin while the ranges come from prompts alone: before the first rollout."""
    history: int = number(2, least=1)
    """Steps over which the maximum is taken."""


@dataclass
class Glue:
    """Which parts of the FP8 path are ours; each switch works alone."""

    name: str = short_name("ours")
    quantize: str = one_of("fused", "stock")
    transfer: str = one_of("fp8", "bf16")
    verify: str = one_of("ledger", "off", "full")
    recalibrate: Recalibrate = field(default_factory=Recalibrate)

    @property
    def has_receiver(self) -> bool:
        """Whether vLLM's workers need our receiver."""
        return (self.quantize, self.transfer, self.verify) != ("stock", "bf16", "off")


@dataclass
class Logging:
    """NeMo RL's own loggers; `metrics.jsonl` is always written."""

    tensorboard: bool = True
    wandb: bool = False


@dataclass
class Cluster:
    """Where a run is started."""

    name: str = short_name("here")
    kind: str = one_of("here", "slurm")
    nodes: int = number(1, least=1)
    gpus_per_node: int = number(8, least=1)
    gpu: str = one_of("h100", "h200", "b200")
    time: str = "04:00:00"
    """Slurm's limit for one job; a run goes on in the next one."""
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    extra: list[str] = field(default_factory=list)
    """More options of `sbatch`, one word each: `['--mem=0','--comment=two words']`."""
    container: str | None = None
    """Image for `srun --container-image` (pyxis); None runs on the bare node."""
    mounts: list[str] = field(default_factory=list)
    """Folders that the container sees, `/from:/to` or `/both`, besides those of the run itself."""
    setup: str | None = None
    """Shell commands that every node runs before anything else: `module load cuda`."""
    python: str | None = None
    """Interpreter of the job; None is the one that submits, and `python3` in a container."""
    nemo_root: str | None = None
    interpreter: str = one_of("container", "system")
    requeue: bool = True
    save_before_end: int = number(600, least=0)
    """Seconds before the time limit from which on a run saves and stops."""
    join_timeout: int = number(1800, least=1)
    """Seconds that all nodes have to join Ray; pulling a container's image counts."""
    preflight: bool = True
    """Run `recipes.check_cluster` at the head of each job."""
    other_versions: str = one_of("refuse", "allow")
    """Whether a run may go on with other versions, weights or problems than it began with."""
    launcher: str = one_of("sbatch", "ray_sub")
    """`ray_sub` leaves the job to NeMo RL's own script."""


@dataclass
class Recipe:
    """One combination of the groups."""

    seed: int = number(42, least=0, most=2**31 - 1)
    backend: str = one_of("auto", "local", "nemo")
    """`auto` takes `model.backend`."""
    model: Model = field(default_factory=Model)
    precision: Precision = field(default_factory=Precision)
    correction: Correction = field(default_factory=Correction)
    data: Data = field(default_factory=Data)
    grpo: Grpo = field(default_factory=Grpo)
    glue: Glue = field(default_factory=Glue)
    logging: Logging = field(default_factory=Logging)
    cluster: Cluster = field(default_factory=Cluster)
    nemo: dict[str, Any] = field(default_factory=dict)
    """Free: NeMo RL's own keys, held against its base YAML by the plan."""
    outputs: str = "outputs"


def mistakes(recipe: Recipe) -> list[Mistake]:
    """Everything that is wrong with a recipe by itself, fields first, then pairs of fields."""
    return [
        *_field_mistakes(recipe),
        *_path_mistakes(recipe),
        *_precision_mistakes(recipe.precision, recipe.model.shape.layers),
        *_correction_mistakes(recipe.correction),
        *_data_mistakes(recipe.data),
        *batch_mistakes(recipe.grpo),
        *_cluster_mistakes(recipe.cluster),
    ]


def seconds(time: str) -> int | None:
    """A limit as Slurm reads it: `30`, `30:00`, `4:00:00`, `1-12`, `1-12:30:00`; else None."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if not found:
        return None
    days, *parts = found.groups()
    numbers = [int(part) for part in parts if part is not None]
    first = 3600 if days is not None or len(numbers) == 3 else 60  # without days, minutes lead
    return int(days or 0) * 86400 + sum(
        number * first // 60**place for place, number in enumerate(numbers)
    )


def _field_mistakes(group: Any, prefix: str = "") -> Iterator[Mistake]:
    for declared in dataclasses.fields(group):
        key, value = prefix + declared.name, getattr(group, declared.name)
        if dataclasses.is_dataclass(value):
            yield from _field_mistakes(value, key + ".")
        elif value is not None:
            yield from _limit_mistakes(key, value, declared.metadata)


def _limit_mistakes(key: str, value: Any, limits: Any) -> Iterator[Mistake]:
    if "one_of" in limits and value not in limits["one_of"]:
        yield Mistake(key, value, "must be one of " + ", ".join(limits["one_of"]))
    if "short_name" in limits and not re.fullmatch(r"[\w-][\w.-]*", value):
        yield Mistake(key, value, "must be letters, digits, dots, dashes and underscores")
    if "least" in limits and not _in_range(value, **limits):
        yield Mistake(key, value, "must be " + _range_text(**limits))


def _in_range(value: float, least: float | None, above: float | None, most: float | None) -> bool:
    return (
        value == value
        and abs(value) != float("inf")
        and (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
    )


def _range_text(least: float | None, above: float | None, most: float | None) -> str:
    bounds = [
        f"at least {least}" if least is not None else "",
        f"above {above}" if above is not None else "",
        f"at most {most}" if most is not None else "",
    ]
    return " and ".join(bound for bound in bounds if bound) + ", and finite"


def _precision_mistakes(precision: Precision, layers: int) -> Iterator[Mistake]:
    for key, option in (("rollout_kv", "fp8-kv-attn"), ("train_linear", "fp8-e2e")):
        if getattr(precision, key) == "fp8" and precision.rollout_linear != "fp8":
            yield Mistake(
                f"precision.{key}",
                "fp8",
                f"needs precision.rollout_linear=fp8, got {precision.rollout_linear}",
                f"choose precision={option}, or set precision.{key}=bf16",
            )
    kept = precision.first_layers_bf16 + precision.last_layers_bf16
    if kept and precision.rollout_linear == "fp8" and kept >= layers:
        yield Mistake(
            "precision.first_layers_bf16 + precision.last_layers_bf16",
            kept,
            f"leaves none of the model's {layers} layers in FP8",
            "lower one of them, or choose precision=bf16",
        )


def _correction_mistakes(correction: Correction) -> Iterator[Mistake]:
    low, high = correction.low, correction.high
    if correction.mask == "none":
        for key, bound in (("low", low), ("high", high)):
            if bound is not None:
                yield Mistake(
                    f"correction.{key}",
                    bound,
                    "bounds a mask, and correction.mask=none",
                    "set correction.mask=token, sequence, geometric or a divergence, as token-k2",
                )
    elif low is None and high is None:
        yield Mistake("correction.mask", correction.mask, "needs correction.low or correction.high")
    elif correction.mask in DIVERGENCES and (low is not None or high is None):
        yield Mistake(
            "correction.low",
            low,
            f"correction.mask={correction.mask} is a distance, which has an upper bound alone",
            "set correction.high, and correction.low=null",
        )
    elif low is not None and high is not None and low > high:
        yield Mistake(
            "correction.low", low, f"is above correction.high={high}, so nothing would be kept"
        )
    least, most = correction.truncate_low, correction.truncate
    for key, what in OF_A_RATIO.items() if correction.level == "none" else ():
        if value := getattr(correction, key):
            yield Mistake(
                f"correction.{key}",
                value,
                f"{what}, and correction.level=none",
                f"set correction.level={', '.join(RATIOS[:-1])} or {RATIOS[-1]}",
            )
    if least is not None and most is not None and least > most:
        yield Mistake("correction.truncate_low", least, f"is above correction.truncate={most}")


def _path_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    paths = {
        "outputs": recipe.outputs,
        "data.path": recipe.data.path,
        "model.path": recipe.model.path,
        "cluster.nemo_root": recipe.cluster.nemo_root,
        "cluster.python": recipe.cluster.python,
        "cluster.container": recipe.cluster.container,
    }
    for key, path in paths.items():
        if path and path.startswith(("~", "$")):
            yield Mistake(key, path, "names a path that is called so", f'write "{key}=$HOME/..."')
    if not recipe.outputs:
        yield Mistake("outputs", "", "must name a folder")


def _data_mistakes(data: Data) -> Iterator[Mistake]:
    if data.name == "jsonl" and data.path is None:
        yield Mistake(
            "data.path",
            None,
            "data=jsonl reads a folder",
            "give data.path=FOLDER with train.jsonl and validation.jsonl",
        )
    task = TASKS.get(data.name)
    if task and data.difficulty and not task.least <= data.difficulty <= task.most:
        yield Mistake(
            "data.difficulty",
            data.difficulty,
            f"must be from {task.least} to {task.most}, the {task.measure} of data={data.name}",
        )


def batch_mistakes(grpo: Grpo) -> Iterator[Mistake]:
    """Updates that do not divide the step's sequences, as far as the recipe says its numbers."""
    sizes = (grpo.prompts_per_step, grpo.generations_per_prompt, grpo.updates_per_step)
    prompts, generations, updates = sizes
    if prompts and generations and updates and (prompts * generations) % updates:
        yield Mistake(
            "grpo.updates_per_step",
            updates,
            f"must divide the step's {prompts * generations} sequences",
        )


def escape_interpolation(value: Any) -> Any:
    """A value that OmegaConf gives back as it is: `${` is a text here, resolved once before."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {key: escape_interpolation(each) for key, each in value.items()}
    return (
        [escape_interpolation(each) for each in value] if isinstance(value, list | tuple) else value
    )


SBATCH_KEYS = ("account", "partition", "qos", "extra")
"""Keys of `cluster` that are sbatch's alone."""
OURS_OF_SBATCH = ("--job-name", "--output", "--parsable")
OURS_IN_SHORT = ("-J", "-o")


def _is_ours(option: str) -> bool:
    """Whether sbatch reads one of `OURS_OF_SBATCH` in it, `--out=x` too (getopt_long)."""
    name = option.partition("=")[0]
    return option.startswith(OURS_IN_SHORT) or any(each.startswith(name) for each in OURS_OF_SBATCH)


def _cluster_mistakes(cluster: Cluster) -> Iterator[Mistake]:
    limit = seconds(cluster.time)
    if limit is None:
        yield Mistake(
            "cluster.time",
            cluster.time,
            "must be a limit as Slurm reads it: minutes, hours:minutes:seconds, days-hours",
            "such as 240 or 04:00:00",
        )
    elif cluster.time.isdigit() and limit > WEEK:
        yield Mistake(
            "cluster.time",
            cluster.time,
            "is more than a week of minutes",
            'a YAML file reads 12:00:00 as a number: quote it, "12:00:00"; or write days, 8-00',
        )
    elif cluster.kind == "slurm" and cluster.save_before_end >= limit:
        yield Mistake(
            "cluster.save_before_end",
            cluster.save_before_end,
            f"must be less than the {limit} seconds of cluster.time={cluster.time}",
        )
    for key in SBATCH_KEYS:
        # `cluster=here` at the end of a job's line is this machine on purpose.
        if cluster.kind == "here" != cluster.name and (value := getattr(cluster, key)):
            yield Mistake(
                f"cluster.{key}",
                value,
                f"is Slurm's, and cluster={cluster.name} is kind: here, this machine",
                "begin the site's file with `defaults: [slurm, _self_]`",
            )
    for option in cluster.extra:
        if not isinstance(option, str) or not option.startswith("-"):
            yield Mistake("cluster.extra", option, "must be options of sbatch, as --mem=0")
        elif _is_ours(option):
            yield Mistake(
                "cluster.extra",
                option,
                "is what a job is found by, in the queue and in its log",
                "leave it out; a job is named as its cell",
            )
    for mount in cluster.mounts:
        if not isinstance(mount, str) or not mount.startswith("/") or "," in mount:
            yield Mistake("cluster.mounts", mount, "must be an absolute folder, or /from:/to")
    if cluster.launcher == "ray_sub" and cluster.kind == "slurm":
        # Its own header says ACCOUNT and PARTITION, and starts a container in any case.
        for key in ("container", "account", "partition"):
            if getattr(cluster, key) is None:
                yield Mistake(f"cluster.{key}", None, "is needed with cluster.launcher=ray_sub")
