"""Declare a model: its shape, and how it lies on GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field

from fp8_nemo.recipe.options.fields import number, one_of, optional_one_of, short_name


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

    layers: int = number(1, least=1, most=1000)
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
    experts: int = number(0, least=0, most=4096)
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
    """`auto`: the plan chooses what `parallel` and `memory` leave null, of the fastest that fit."""
    parallel: Parallel = field(default_factory=Parallel)
    memory: Memory = field(default_factory=Memory)
    shape: Shape = field(default_factory=Shape)

    @property
    def hub_id(self) -> str | None:
        """Return its name on the hub if it is read from there; None for a folder's."""
        return None if self.path else self.hf_id
