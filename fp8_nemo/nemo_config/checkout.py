"""Read a checkout of NeMo RL without importing it: its keys, version, seams and defects."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fp8_nemo.nemo_config.host import MAIN, ROOT_VARIABLE, Host, HostError, root_of
from fp8_nemo.nemo_config.keys import ADDED, may_be_added
from fp8_nemo.nemo_config.seams import GRPO
from fp8_nemo.nemo_config.typed_keys import declared_keys
from fp8_nemo.nemo_config.versions import CONFIG, ENTRY, POLICY, Source
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.plain import escape_interpolation, leaves

REMEDY = f"set {ROOT_VARIABLE}, or cluster.nemo_root=FOLDER, to a clone of NVIDIA-NeMo/RL"


def host_of(recipe: Recipe) -> Host:
    """Return the NeMo RL that a recipe would run in; `MAIN` if it has or needs no checkout.

    Raises:
        HostError: the folder is no checkout, or one that the driver cannot drive.
    """
    root = root_of(recipe) if recipe.chosen_backend == "nemo" else None
    return read_host(root) if root else MAIN


@lru_cache
def read_host(root: Path) -> Host:
    """Read a checkout's keys, version and defects.

    Raises:
        HostError: the folder is no checkout, or lacks a seam that the driver needs.
    """
    for name in (ENTRY, GRPO, POLICY, CONFIG):
        if not (root / name).is_file():
            raise HostError(
                f"{root}: no NeMo RL here, {name} is missing; {REMEDY}; to plan without one, add "
                "cluster.nemo_root=null"
            )
    source = Source(root)
    if missing := list(source.missing_seams()):
        raise HostError(
            f"NeMo RL in {root}: {missing[0]}; main 7ea279a and v0.7.0 are known to work"
        )
    return Host(source.name, str(root), Bases(root), source.defects(), source.vllm, _declared(root))


class Bases(dict[str, Mapping[str, Any]]):
    """Hold a checkout's base YAML files as `{dotted key: value}`, each read when first asked for.

    NeMo RL's own loader resolves inheritance and interpolations.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, path: str) -> Mapping[str, Any]:
        """Load a base file when it is first asked for.

        Raises:
            HostError: as `_read_base`.
        """
        self[path] = leaves(_plain(_read_base(self.root, path)))
        return self[path]


def _read_base(root: Path, path: str) -> DictConfig:
    """Read one base YAML, which resolves, with the checkout's own loader.

    Raises:
        HostError: there is no such file, or it cannot be read.
    """
    file = root / path
    if not file.is_file():
        raise HostError(f"model.base_config={path}: no such file in {root}")
    loader = _config_module(root)
    loader.register_omegaconf_resolvers()
    try:
        config = loader.load_config(str(file))
        _plain(config)
    except (OmegaConfBaseException, ValueError) as error:
        first = str(error).splitlines()[0]
        raise HostError(f"model.base_config={path}: cannot be read ({first})") from error
    return config


def _plain(config: DictConfig) -> dict[str, Any]:
    """Return a configuration as nested plain data, its interpolations resolved."""
    content = OmegaConf.to_container(config, resolve=True)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def config_of(root: Path, base_config: str, written: Mapping[str, Any]) -> dict[str, Any]:
    """Return a base YAML with a plan's overrides, as NeMo RL's `MasterConfig` takes it.

    Struct mode is on: a key that neither the base nor NeMo RL's classes have is an error.

    Raises:
        HostError: a key that the base does not have, or a base that cannot be read.
    """
    config, declared = _read_base(root, base_config), _declared(root)
    OmegaConf.set_struct(config, True)
    for key, value in written.items():
        try:
            text = escape_interpolation(value)
            OmegaConf.update(config, key, text, force_add=may_be_added(key, declared))
        except OmegaConfBaseException as error:
            why = str(error).splitlines()[0]
            raise HostError(f"{base_config}: {key}={value} does not fit: {why}") from error
    return _plain(config)


@lru_cache
def _declared(root: Path) -> Mapping[str, str]:
    return ADDED | declared_keys(Source(root))


@lru_cache
def _config_module(root: Path) -> ModuleType:
    """Import `nemo_rl.utils.config` by its path: it needs only Hydra, its package much more."""
    spec = importlib.util.spec_from_file_location("nemo_rl_config_of_checkout", root / CONFIG)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
