"""Say which environment of NeMo RL rewards a run: its math, another one, or the user's own.

NeMo RL finds an environment by the name that the data gives (`env_name`): in its registry, or
among those that the driver registers, whose keys hold `env_cls`, a Ray actor's class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fp8_nemo.nemo_config.seams import SEAMS
from fp8_nemo.nemo_config.versions import Limit
from fp8_nemo.recipe.options.training import Data

REWARD = "fp8_nemo_reward"
"""Name of the environment around `data.reward`."""
CLASS = "env_cls"
REWARD_CLASS = "fp8_nemo.nemo.own.reward_environment.RewardEnvironment"
REWARD_WORKERS = 8
NAMES = re.compile(r"data\.(default|train|validation)\.env_name")
GYM = "env.should_use_nemo_gym"
ASYNCHRONOUS = "wants vLLM's asynchronous engine, which is not driven here"

REGISTERED = {
    "math": "",
    "math_default": "",
    "math_multi_reward": "",
    "code_jaccard": "",
    "nemo_gym": ASYNCHRONOUS,
    "code": "gives no reward itself, and no data set of NeMo RL brings the folder and the "
    "variables that it executes in",
    "vlm": "is for models of images",
    "reward_model": "takes some of the run's GPUs, which a plan does not count; not supported yet",
}
"""NeMo RL's own environments, and what is against one; empty if it runs here."""


def reward_keys(data: Data) -> dict[str, Any]:
    """Return the keys that let a user's own reward judge the answers; its file is a folder's."""
    if data.reward is None:
        return {}
    return {
        "data.default.env_name": REWARD,
        f"env.{REWARD}.{CLASS}": REWARD_CLASS,
        f"env.{REWARD}.num_workers": REWARD_WORKERS,
    }


def reward_paths(data: Data) -> dict[str, Any]:
    """Return where the workers find the user's file."""
    return {f"env.{REWARD}.file": str(Path(data.reward).absolute())} if data.reward else {}


def classes(environments: Mapping[str, Any]) -> dict[str, str]:
    """Return the environments that the driver registers: name to the class of its Ray actor.

    Args:
        environments: NeMo RL's group `env`.
    """
    given = {name: keys for name, keys in environments.items() if isinstance(keys, Mapping)}
    return {name: keys[CLASS] for name, keys in given.items() if keys.get(CLASS)}


def environment_limits(data: Data, written: Mapping[str, Any]) -> Iterator[Limit]:
    """Give what a data set may name as its environment, by every key that NeMo RL is given."""
    there = sorted({key.split(".")[1] for key in written if key.startswith("env.")})
    named = {key: name for key, name in written.items() if NAMES.fullmatch(key)}
    key, name = next(
        ((key, name) for key, name in named.items() if name not in there),
        ("data.default.env_name", named.get("data.default.env_name")),
    )
    yield Limit(
        f"nemo.{key}",
        name,
        isinstance(name, str) and name not in there,
        f"no env.{name} is configured, only {', '.join(there)}",
        SEAMS["environment"].path,
        f"add its keys, as +nemo.env.{name}.num_workers=8",
    )
    yield Limit(
        f"nemo.{GYM}",
        written.get(GYM),
        bool(written.get(GYM)),
        f"NeMo Gym {ASYNCHRONOUS}",
        SEAMS["gym-engine"].path,
        "leave it out",
    )
    own = {name for name in there if written.get(f"env.{name}.{CLASS}")}
    names = [name for name in named.values() if name in there and name not in own]
    against = {name: REGISTERED.get(name, "is none of NeMo RL's") for name in names}
    name = next((name for name, text in against.items() if text), None)
    yield Limit(
        "nemo.data.default.env_name",
        name,
        name is not None,
        against.get(name or "", ""),
        SEAMS["registered-environments"].path,
        f"name its class, as +nemo.env.{name}.{CLASS}=module.Class, or give data.reward=FILE",
    )
    others = [name for name in named.values() if isinstance(name, str) and name != REWARD]
    yield Limit(
        "data.reward",
        data.reward,
        data.reward is not None and bool(others),
        f"is an environment of its own, and nemo.data names {', '.join(others)}",
        SEAMS["environment"].path,
        "leave one of them out",
    )
