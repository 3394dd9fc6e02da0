"""Describe one NeMo RL as the plan sees it: its keys, its base files, its known defects.

A `Host` is read from a checkout by `checkout.py`. Without one, `MAIN` stands in: the revision that
this package was proven against, of which only the few values in `KNOWN_BASES` are known.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp8_nemo.nemo_config.keys import ADDED
from fp8_nemo.nemo_config.versions import MAIN_DEFECTS, SUPPORTED, TESTED
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.settled import Base

ROOT_VARIABLE = "NEMO_RL_ROOT"

BASE_KEYS = {
    "prompts_per_step": "grpo.num_prompts_per_step",
    "generations_per_prompt": "grpo.num_generations_per_prompt",
    "sequences_per_update": "policy.train_global_batch_size",
    "micro_batch": "policy.train_micro_batch_size",
    "sequence": "policy.max_total_sequence_length",
    "learning_rate": "policy.megatron_cfg.optimizer.lr",
    "kl_penalty": "loss_fn.reference_policy_kl_penalty",
}

KNOWN_BASES = {
    "examples/configs/grpo_math_1B_megatron.yaml": Base(32, 16, 512, 4, 512, 5e-6, 0.01),
    "examples/configs/grpo_math_8B_megatron.yaml": Base(64, 32, 512, 1, 4096, 3e-7, 0.01),
    "examples/configs/recipes/llm/performance/grpo-qwen3-30ba3b-4n8g.yaml": Base(
        64, 32, 2048, 1, 4096, 3e-7, 0.01
    ),
}


class HostError(ValueError):
    """Say in one line why a checkout of NeMo RL cannot be used."""


def base_of(keys: Mapping[str, Any]) -> Base:
    """Read a `Base` from NeMo RL's keys: a base file's leaves, or all that a plan wrote.

    Raises:
        KeyError: a key of `BASE_KEYS` is missing.
    """
    return Base(**{name: keys[key] for name, key in BASE_KEYS.items()})


@dataclass(frozen=True, eq=False)
class Host:
    """Describe one NeMo RL: `Host("v0.7.0", "/opt/nemo-rl", {...}, V0_7_0_DEFECTS)`.

    Hosts are compared by identity: a checkout is read once.
    """

    name: str
    root: str | None = None
    """Folder of the checkout; None if there is none."""
    bases: Mapping[str, Mapping[str, Any]] | None = None
    """Base YAML, relative to `root`, to `{dotted key: value}` of its leaves; None if not known."""
    defects: frozenset[str] = frozenset()
    vllm: str | None = None
    """Version of vLLM that its `pyproject.toml` pins."""
    declared: Mapping[str, str] = field(default_factory=lambda: ADDED)
    """Key to the type that NeMo RL's classes declare, as `typed_keys.py` writes them."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return a line if the checkout is of a revision that was never run; else empty."""
        if self.root is None or any(word in TESTED for word in self.name.split()):
            return ()
        text = f"untested: what our code calls is there; tested are {' and '.join(SUPPORTED)}"
        return (f"NeMo RL {self.name}: {text}",)

    def base(self, path: str) -> Base:
        """Return what the plan inherits from a base YAML.

        Raises:
            HostError: there is no such file, or no checkout to read it from.
        """
        if self.bases is None:
            if path not in KNOWN_BASES:
                known = ", ".join(KNOWN_BASES)
                raise HostError(
                    f"model.base_config={path}: not known without a checkout, only {known}; "
                    "set NEMO_RL_ROOT"
                )
            return KNOWN_BASES[path]
        keys = self.bases[path]
        if missing := [key for key in BASE_KEYS.values() if keys.get(key) is None]:
            raise HostError(
                f"model.base_config={path}: has no {missing[0]}; "
                "choose a GRPO configuration of the Megatron backend"
            )
        return base_of(keys)

    def leaves(self, path: str) -> Mapping[str, Any]:
        """Return the leaves of a base YAML; empty without a checkout."""
        return {} if self.bases is None else self.bases[path]


def root_of(recipe: Recipe) -> Path | None:
    """Return the checkout that a recipe names, else the environment's; None if there is none."""
    named = recipe.cluster.nemo_root or os.environ.get(ROOT_VARIABLE)
    return Path(named).absolute() if named else None


MAIN = Host("main 7ea279a, assumed: no checkout", vllm="0.25.1", defects=MAIN_DEFECTS)
