"""A checkout of NeMo RL, read without importing it: keys, version, seams, known defects.

Versions are told apart by what their source does, not by their number: a seam that is gone is one
line before anything starts, and a defect is looked for where it was found.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fp8_nemo.nemo_config.host import (
    BF16_LAYERS_BROKEN,
    HF_OVERRIDES_LOST,
    KV_SCALES_DROPPED,
    MAIN,
    OPTIMIZER_ALWAYS_MOVED,
    POW2_BROKEN,
    ROOT_VARIABLE,
    Host,
    HostError,
    root_of,
)
from fp8_nemo.nemo_config.keys import leaves, may_be_added
from fp8_nemo.plan.plan import backend_of
from fp8_nemo.recipe.options import Recipe, escape_interpolation

REMEDY = f"set {ROOT_VARIABLE}, or cluster.nemo_root=FOLDER, to a clone of NVIDIA-NeMo/RL"
GRPO, ENTRY = "nemo_rl/algorithms/grpo.py", "examples/run_grpo.py"
POLICY, CONFIG = "nemo_rl/models/policy/lm_policy.py", "nemo_rl/utils/config.py"
FP8 = "nemo_rl/models/generation/vllm/quantization/fp8.py"
WORKER = "nemo_rl/models/generation/vllm/vllm_worker.py"
MEGATRON_SETUP = "nemo_rl/models/megatron/setup.py"

SETUP_GIVES = 13
"""Length of the tuple that `setup` returns."""
TRAIN_TAKES = (
    *("policy", "policy_generation", "wrapped_dataloader", "val_dataloader", "tokenizer"),
    *("loss_fn", "task_to_env", "val_task_to_env", "logger", "checkpointer"),
    *("grpo_save_state", "master_config"),
)
POLICY_HAS = ("train", "prepare_refit_info", "calibrate_qkv_fp8_scales")


def host_of(recipe: Recipe) -> Host:
    """The NeMo RL that a recipe would run in; `MAIN` without a checkout, or with no need of one.

    Raises:
        HostError: the folder is no checkout, or one that the driver cannot drive.
    """
    root = root_of(recipe) if backend_of(recipe) == "nemo" else None
    return read_host(root) if root else MAIN


@lru_cache
def read_host(root: Path) -> Host:
    """A checkout's keys, version and defects.

    Raises:
        HostError: the folder is no checkout, or lacks a seam that the driver needs.
    """
    for name in (ENTRY, GRPO, POLICY, CONFIG):
        if not (root / name).is_file():
            raise HostError(f"{root}: no NeMo RL here, {name} is missing; {REMEDY}")
    source = _Source(root)
    if missing := list(source.missing_seams()):
        raise HostError(
            f"NeMo RL in {root}: {missing[0]}; main 7ea279a and v0.7.0 are known to work"
        )
    return Host(source.name, str(root), Bases(root), frozenset(source.defects()), source.vllm)


class Bases(dict[str, Mapping[str, Any]]):
    """Base YAML files of a checkout as `{dotted key: value}`, read when asked for.

    Interpolations are resolved, inheritance as NeMo RL's own loader does it.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root

    def __missing__(self, path: str) -> Mapping[str, Any]:
        """A file that was not asked for before.

        Raises:
            HostError: as `load_base`.
        """
        self[path] = leaves(load_base(self.root, path))
        return self[path]


def load_base(root: Path, path: str) -> dict[str, Any]:
    """One base YAML as nested plain data, by the checkout's own loader.

    Raises:
        HostError: there is no such file, or it cannot be read.
    """
    file = root / path
    if not file.is_file():
        raise HostError(f"model.base_config={path}: no such file in {root}")
    loader = _config_module(root)
    loader.register_omegaconf_resolvers()
    try:
        content = OmegaConf.to_container(loader.load_config(str(file)), resolve=True)
    except (OmegaConfBaseException, ValueError) as error:
        first = str(error).splitlines()[0]
        raise HostError(f"model.base_config={path}: cannot be read ({first})") from error
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


def config_of(root: Path, base_config: str, written: Mapping[str, Any]) -> dict[str, Any]:
    """A base YAML with a plan's overrides, as NeMo RL's `MasterConfig` takes it.

    Struct mode is on: a key that neither the base nor the allow-list has is an error.

    Raises:
        HostError: a key that the base does not have, or a base that cannot be read.
    """
    loader = _config_module(root)
    load_base(root, base_config)
    config = loader.load_config(str(root / base_config))
    OmegaConf.set_struct(config, True)
    for key, value in written.items():
        try:
            text = escape_interpolation(value)
            OmegaConf.update(config, key, text, force_add=may_be_added(key))
        except OmegaConfBaseException as error:
            raise HostError(f"{base_config}: {key}={value} does not fit: {error}") from error
    content = OmegaConf.to_container(config, resolve=True)
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items()}


@lru_cache
def _config_module(root: Path) -> ModuleType:
    """`nemo_rl.utils.config` by itself: it needs Hydra alone, its package needs much more."""
    spec = importlib.util.spec_from_file_location("nemo_rl_config_of_checkout", root / CONFIG)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Source:
    """What the source of a checkout says about itself."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def name(self) -> str:
        """Version and commit: `0.7.0 81aa43d`."""
        numbers = dict(
            re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", self._text("nemo_rl/package_info.py"), re.M)
        )
        version = ".".join(numbers.get(each, "?") for each in ("MAJOR", "MINOR", "PATCH"))
        return " ".join(filter(None, (version, self._commit())))

    @cached_property
    def vllm(self) -> str | None:
        """The pinned version of vLLM, by `pyproject.toml`."""
        found = re.search(r"vllm==([\d.]+)", self._text("pyproject.toml"))
        return found[1] if found else None

    def missing_seams(self) -> Iterator[str]:
        """What the driver calls and this checkout does not have, or not like that."""
        if "policy_factory" not in _arguments(self._function(GRPO, "setup")):
            yield f"{GRPO}: setup takes no policy_factory"
        if (length := self._setup_gives()) != SETUP_GIVES:
            yield f"{ENTRY}: setup gives {length} things, the driver knows {SETUP_GIVES}"
        taken = _arguments(self._function(GRPO, "grpo_train"))[: len(TRAIN_TAKES)]
        if tuple(taken) != TRAIN_TAKES:
            yield f"{GRPO}: grpo_train takes {', '.join(taken)}"
        methods = {each.name for each in _functions(self._class(POLICY, "Policy"))}
        for name in POLICY_HAS:
            if name not in methods:
                yield f"{POLICY}: Policy has no {name}"

    def defects(self) -> Iterator[str]:
        """The known defects that this checkout has."""
        refit = self._function(GRPO, "refit_policy_generation")
        sends = _calls(refit, "stream_weights_via_ipc_zmq")
        if not any(keyword.arg == "kv_scales" for call in sends for keyword in call.keywords):
            yield KV_SCALES_DROPPED
        appends = _calls(self._tree(FP8), "append")
        if any("_get_params_in_layers" in ast.dump(call) for call in appends):
            yield BF16_LAYERS_BROKEN
        own = "per_token_group_quant_fp8"
        calls_itself = any(
            isinstance(node, ast.alias) and node.name == own
            for node in ast.walk(self._function(FP8, own))
        )
        if calls_itself or any(len(call.args) > 1 for call in appends):
            yield POW2_BROKEN
        if "offload_optimizer_for_refit" not in self._text(MEGATRON_SETUP):
            yield OPTIMIZER_ALWAYS_MOVED
        worker = self._class(WORKER, "BaseVllmGenerationWorker")  # main merges in a function
        if "vllm_kwargs.update(fp8_kwargs)" in ast.unparse(worker):
            yield HF_OVERRIDES_LOST

    def _setup_gives(self) -> int:
        for node in ast.walk(self._tree(ENTRY)):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                call = node.value
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "setup":
                    return len(node.targets[0].elts)
        return 0

    def _text(self, name: str) -> str:
        file = self.root / name
        return file.read_text() if file.is_file() else ""

    @lru_cache  # noqa: B019 - one object per checkout
    def _tree(self, name: str) -> ast.Module:
        return ast.parse(self._text(name))

    def _function(self, name: str, function: str) -> ast.AST:
        found = [each for each in _functions(self._tree(name)) if each.name == function]
        return found[0] if found else ast.Module([], [])

    def _class(self, name: str, wanted: str) -> ast.AST:
        for node in self._tree(name).body:
            if isinstance(node, ast.ClassDef) and node.name == wanted:
                return node
        return ast.Module([], [])

    def _commit(self) -> str:
        # Named, the repository may be another user's: git asks no `safe.directory` for it then.
        command = ["git", f"--git-dir={self.root / '.git'}", "rev-parse", "--short=7", "HEAD"]
        try:
            found = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return ""
        return found.stdout.strip()


def _functions(node: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    body = getattr(node, "body", [])
    return [each for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


def _arguments(function: ast.AST) -> list[str]:
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    return [each.arg for each in (*function.args.args, *function.args.kwonlyargs)]


def _calls(node: ast.AST, name: str) -> list[ast.Call]:
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    return [each for each in calls if getattr(each.func, "attr", "") == name]
