"""Combine the groups of options."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fp8_nemo.recipe.options.cluster import Cluster, Logging
from fp8_nemo.recipe.options.correction import Correction
from fp8_nemo.recipe.options.fields import number, one_of
from fp8_nemo.recipe.options.model import Model
from fp8_nemo.recipe.options.precision import (
    FORMATS,
    XQA_GROUP,
    XQA_HEADS,
    Glue,
    Precision,
)
from fp8_nemo.recipe.options.training import (
    LORA_MODULES,
    Algorithm,
    Data,
    Grpo,
    Lora,
    Noise,
    Replay,
)
from fp8_nemo.recipe.plain import leaves

ATTENTION = tuple(
    f"policy.generation.vllm_kwargs.{key}"
    for key in ("attention_backend", "attention_config.backend")
)
"""NeMo RL's keys by which a user has vLLM attend by another backend than `FLASH`."""
FLASH = "FLASH_ATTN"
"""vLLM's first choice on these GPUs, which XQA is called from."""


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

    @cached_property
    def decode_is_chosen(self) -> bool:
        """Return whether `glue.decode` has a meaning: by format, heads, and what else attends."""
        shape, cache = self.model.shape, self.precision.has_one_kv_scale
        is_tried = shape.head_dim in XQA_HEADS and shape.heads <= XQA_GROUP * shape.kv_heads
        own = leaves(self.nemo)
        is_flash = all(str(own.get(key) or FLASH).upper() == FLASH for key in ATTENTION)
        return self.chosen_backend == "nemo" and cache and is_tried and is_flash

    @cached_property
    def adapted(self) -> tuple[str, ...]:
        """Return the projections with adapters: LoRA changes no other weight."""
        return tuple(each for module in self.lora.target_modules for each in LORA_MODULES[module])

    @cached_property
    def resent(self) -> tuple[str, ...]:
        """Return the projections whose weights refits after the first send alone; () sends all.

        They are those with adapters. The local backend sends everything. So does a refit that is
        not compared byte by byte, that adds noise to norms, or that fills an engine in another form
        than it travels in.
        """
        rollout, glue = self.precision.rollout, self.glue
        as_held = not rollout.is_quantized or (glue.sends_fp8 and rollout != FORMATS["nvfp4"])
        is_proven = self.chosen_backend == "nemo" and glue.verify == "bytes"
        return self.adapted if as_held and is_proven and not self.noise.is_on else ()

    @cached_property
    def decodes_by_xqa(self) -> bool:
        """Return whether decode steps attend by XQA, which only Hopper GPUs have."""
        return self.cluster.has_hopper and self.decode_is_chosen and self.glue.decode == "xqa"
