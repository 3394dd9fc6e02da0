"""Say what each version of NeMo RL lacks or gets wrong, and what that forbids.

A version is told by what its source does, not by its number: a seam that is gone is one line before
anything starts, and a defect is looked for where it was found. Supported are main 7ea279a (vLLM
0.25.1) and v0.7.0 (vLLM 0.20.0).
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from fp8_nemo.nemo_config.seams import ENGINE, ENTRY, GRPO, SEAMS
from fp8_nemo.recipe.settled import Settled

POLICY, CONFIG = "nemo_rl/models/policy/lm_policy.py", "nemo_rl/utils/config.py"
FP8 = f"{ENGINE}/quantization/fp8.py"
WORKER = f"{ENGINE}/vllm_worker.py"
MEGATRON_SETUP = "nemo_rl/models/megatron/setup.py"

SETUP_GIVES = 13
"""Length of the tuple that `setup` returns."""
TRAIN_TAKES = (
    *("policy", "policy_generation", "wrapped_dataloader", "val_dataloader", "tokenizer"),
    *("loss_fn", "task_to_env", "val_task_to_env", "logger", "checkpointer"),
    *("grpo_save_state", "master_config"),
)
LOSS = "nemo_rl/algorithms/loss/loss_functions.py"
POLICY_WORKER = "nemo_rl/models/policy/workers/megatron_policy_worker.py"


class Needed(NamedTuple):
    """Name what one class, or a file without one, must hold: methods, or what `self` is given."""

    file: str
    of: str
    names: tuple[str, ...]


SENDS = ("prepare_refit_info", "stream_weights_via_ipc_zmq", "broadcast_weights_for_collective")
NEEDED = (
    Needed(
        POLICY,
        "Policy",
        ("train", "get_logprobs", "save_checkpoint", "calibrate_qkv_fp8_scales", *SENDS),
    ),
    Needed(
        POLICY_WORKER,
        "MegatronPolicyWorkerImpl",
        (
            "_iter_params_with_optional_kv_scales",
            "use_reference_model",
            "get_logprobs",
            "prepare_for_training",
            "move_model",
            "move_optimizer",
            *SENDS,
        ),
    ),
    Needed("nemo_rl/models/megatron/data.py", "", ("_pack_sequences_for_megatron",)),
    Needed(
        f"{ENGINE}/vllm_backend.py",
        "VllmInternalWorkerExtension",
        (
            "_load_weights",
            "prepare_refit_info",
            "update_weights_via_ipc_zmq",
            "update_weights_from_collective",
        ),
    ),
    Needed(
        f"{ENGINE}/vllm_generation.py",
        "VllmGeneration",
        ("finish_generation", "prepare_for_generation"),
    ),
    Needed(FP8, "", ("FP8Config", "apply_fp8_patches", "fp8_patches_applied", "global_fp8_config")),
    Needed(f"{ENGINE}/utils.py", "", ("resolve_generation_worker_cls",)),
    Needed(WORKER, "VllmGenerationWorkerImpl", ("generate", "_create_engine")),
    Needed(
        f"{ENGINE}/vllm_worker_async.py",
        "VllmAsyncGenerationWorkerImpl",
        ("generate_async", "_create_engine"),
    ),
    Needed(GRPO, "", ("async_grpo_train", "refit_policy_generation", "MasterConfig")),
    Needed(WORKER, "BaseVllmGenerationWorker", ("_build_sampling_params",)),
    Needed(LOSS, "ClippedPGLossFn", ("use_importance_sampling_correction",)),
    Needed("nemo_rl/utils/venvs.py", "", ("create_local_venv_on_each_node",)),
    Needed("nemo_rl/utils/logger.py", "", ("get_next_experiment_dir",)),
    Needed("nemo_rl/algorithms/utils.py", "", ("get_tokenizer",)),
    Needed("nemo_rl/data/utils.py", "", ("setup_response_data",)),
    Needed("nemo_rl/data/llm_message_utils.py", "", ("batched_message_log_to_flat_message",)),
    Needed("nemo_rl/distributed/batched_data_dict.py", "", ("BatchedDataDict",)),
    Needed(
        "nemo_rl/distributed/ray_actor_environment_registry.py", "", ("ACTOR_ENVIRONMENT_REGISTRY",)
    ),
    Needed("nemo_rl/distributed/virtual_cluster.py", "", ("PY_EXECUTABLES", "init_ray")),
    Needed("nemo_rl/environments/interfaces.py", "", ("EnvironmentReturn",)),
    Needed("nemo_rl/environments/math_environment.py", "", ("BaseMathEnvironment",)),
    Needed(
        "nemo_rl/environments/utils.py",
        "",
        ("ENV_REGISTRY", "chunk_list_to_workers", "register_env"),
    ),
    Needed("nemo_rl/models/generation/__init__.py", "", ("configure_generation_config",)),
    Needed("nemo_rl/models/policy/utils.py", "", ("get_runtime_env_for_policy_worker",)),
)
"""What is imported, overridden, called or set by name; besides `setup`, `grpo_train`, and the
classes that stand here with their methods."""
BF16_LAYERS = "precision.first_layers_bf16 + precision.last_layers_bf16"
SUPPORTED, TESTED = ("main 7ea279a", "v0.7.0"), ("7ea279a", "0.7.0")
LATER = "use NeMo RL main 7ea279a or later, or "


class Limit(NamedTuple):
    """State one thing that a host forbids, and what a recipe makes of it."""

    key: str
    value: Any
    broken: bool
    allowed: str
    mirrors: str
    """Where upstream would stop the run, or go wrong."""
    remedy: str = ""


class Source:
    """Read what the source of a checkout says about itself, without importing it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @cached_property
    def name(self) -> str:
        """Return version and commit: `0.7.0 81aa43d`."""
        numbers = dict(
            re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", self.text("nemo_rl/package_info.py"), re.M)
        )
        version = ".".join(numbers.get(each, "?") for each in ("MAJOR", "MINOR", "PATCH"))
        return " ".join(filter(None, (version, self._commit())))

    @cached_property
    def vllm(self) -> str | None:
        """Return the pinned version of vLLM, by `pyproject.toml`."""
        found = re.search(r"vllm==([\d.]+)", self.text("pyproject.toml"))
        return found[1] if found else None

    def missing_seams(self) -> Iterator[str]:
        """List what the driver calls and this checkout does not have, or not like that."""
        if "policy_factory" not in _arguments(self.function(GRPO, "setup")):
            yield f"{GRPO}: setup takes no policy_factory"
        if (length := self._setup_gives()) != SETUP_GIVES:
            yield f"{ENTRY}: setup gives {length} things, the driver knows {SETUP_GIVES}"
        taken = _arguments(self.function(GRPO, "grpo_train"))[: len(TRAIN_TAKES)]
        if tuple(taken) != TRAIN_TAKES:
            yield f"{GRPO}: grpo_train takes {', '.join(taken)}"
        for file, of, names in NEEDED:
            held = _held(self.named_class(file, of) if of else self.tree(file))
            yield from (f"{file}: {of or 'it'} has no {name}" for name in names if name not in held)

    def defects(self) -> frozenset[str]:
        """Return the names of the known defects that this checkout has."""
        return frozenset(each.name for each in DEFECTS if each.is_in(self))

    def text(self, name: str) -> str:
        """Return a file's text; empty if the checkout has no such file."""
        file = self.root / name
        return file.read_text() if file.is_file() else ""

    @lru_cache  # noqa: B019 - one object per checkout
    def tree(self, name: str) -> ast.Module:
        """Return a file's syntax tree."""
        return ast.parse(self.text(name))

    def function(self, name: str, function: str) -> ast.AST:
        """Return a file's top-level function; an empty tree if it has none."""
        found = [each for each in _functions(self.tree(name)) if each.name == function]
        return found[0] if found else ast.Module([], [])

    def named_class(self, name: str, wanted: str) -> ast.AST:
        """Return a file's class; an empty tree if it has none."""
        for node in self.tree(name).body:
            if isinstance(node, ast.ClassDef) and node.name == wanted:
                return node
        return ast.Module([], [])

    def _setup_gives(self) -> int:
        for node in ast.walk(self.tree(ENTRY)):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
                call = node.value
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "setup":
                    return len(node.targets[0].elts)
        return 0

    def _commit(self) -> str:
        # Named, the repository may be another user's: git asks no `safe.directory` for it then.
        command = ["git", f"--git-dir={self.root / '.git'}", "rev-parse", "--short=7", "HEAD"]
        try:
            found = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.SubprocessError):
            return ""
        return found.stdout.strip()


class Defect(NamedTuple):
    """Describe one thing that some versions get wrong."""

    name: str
    is_in: Callable[[Source], bool]
    """Whether a checkout has it, by its source."""
    limit: Callable[[Settled], Limit]
    """What it forbids where a host has it."""


def _drops_kv_scales(source: Source) -> bool:
    """Find a colocated refit that is not given the KV scales: FP8 KV runs with 1.0."""
    sends = _calls(source.function(GRPO, "refit_policy_generation"), "stream_weights_via_ipc_zmq")
    return not any(keyword.arg == "kv_scales" for call in sends for keyword in call.keywords)


def _without_fp8_kv(settled: Settled) -> Limit:
    precision = settled.recipe.precision
    alike = "fp8-e2e" if precision.train.is_quantized else "fp8-linear"
    return Limit(
        "precision.rollout_kv",
        precision.rollout_kv,
        precision.cache.is_quantized and settled.shares_gpus,
        "this NeMo RL drops the KV scales on the way to the engine, which runs with 1.0",
        f"v0.7.0: {SEAMS['drops-kv-scales'].path}",
        f"{LATER}precision={alike} (rollout_kv=bf16)",
    )


def _appends_bf16_layers(source: Source) -> bool:
    """Find `num_first_layers_in_bf16` appending a list to a list of names: it has no effect."""
    appends = _calls(source.tree(FP8), "append")
    return any("_get_params_in_layers" in ast.dump(call) for call in appends)


def _without_bf16_layers(settled: Settled) -> Limit:
    precision = settled.recipe.precision
    return Limit(
        BF16_LAYERS,
        precision.bf16_layers,
        precision.rollout.is_quantized and precision.bf16_layers > 0,
        "this NeMo RL quantizes the layers that should stay BF16",
        f"v0.7.0: {FP8}, bf16_params.append",
        f"{LATER}set both to 0",
    )


def _breaks_pow2(source: Source) -> bool:
    """Find power-of-two activation scales that cannot be patched in.

    `list.append` is given three things (v0.7.0), or what replaces vLLM's function calls it by its
    name, and so itself (main 7ea279a).
    """
    own = "per_token_group_quant_fp8"
    calls_itself = any(
        isinstance(node, ast.alias) and node.name == own
        for node in ast.walk(source.function(FP8, own))
    )
    return calls_itself or any(len(call.args) > 1 for call in _calls(source.tree(FP8), "append"))


def _without_pow2(settled: Settled) -> Limit:
    precision = settled.recipe.precision
    return Limit(
        "precision.scales",
        precision.scales,
        bool(precision.rollout.block) and precision.scales == "pow2",
        "this NeMo RL's rollout stops at powers of two: a TypeError, or RecursionError",
        f"{FP8}, v0.7.0: vllm_patches.append, main 7ea279a: per_token_group_quant_fp8",
        "set precision.scales=fp32",
    )


def _always_moves_optimizer(source: Source) -> bool:
    """Find that before a refit Adam's state goes to the host, and no key keeps it on the GPU."""
    return "offload_optimizer_for_refit" not in source.text(MEGATRON_SETUP)


def _without_kept_optimizer(settled: Settled) -> Limit:
    return Limit(
        "nemo.policy.offload_optimizer_for_refit",
        not settled.layout.keeps_optimizer,
        settled.layout.keeps_optimizer and settled.shares_gpus,
        "this NeMo RL always moves the optimizer to the host",
        "v0.7.0: nemo_rl/models/policy/workers/megatron_policy_worker.py, offload_before_refit",
        f"{LATER}leave it out",
    )


def _loses_hf_overrides(source: Source) -> bool:
    """Find what FP8 brings to vLLM's configuration replacing `policy.hf_config_overrides`."""
    worker = source.named_class(WORKER, "BaseVllmGenerationWorker")  # main merges in a function
    return "vllm_kwargs.update(fp8_kwargs)" in ast.unparse(worker)


def _without_hf_overrides(settled: Settled) -> Limit:
    policy = settled.recipe.nemo.get("policy")
    given = policy.get("hf_config_overrides") if isinstance(policy, dict) else None
    return Limit(
        "nemo.policy.hf_config_overrides",
        given,
        bool(given) and settled.recipe.precision.rollout.is_quantized,
        "this NeMo RL's FP8 rollout goes without them, the trainer with them",
        f"v0.7.0: {SEAMS['hf-overrides'].path}, vllm_kwargs.update(fp8_kwargs)",
        f"{LATER}write them into a copy of the model's config.json",
    )


TRIED_VLLM = "0.25.1"


def _pins_another_vllm(source: Source) -> bool:
    """Find a vLLM in which `nemo/aligned` and `nemo/marlin` were never tried."""
    return source.vllm != TRIED_VLLM


def _without_alignment(settled: Settled) -> Limit:
    precision = settled.recipe.precision
    return Limit(
        "precision.align",
        precision.align,
        precision.is_aligned,
        f"was tried with vLLM {TRIED_VLLM} alone, and this NeMo RL pins another",
        "v0.7.0: pyproject.toml, vllm==0.20.0",
        f"{LATER}set precision.align=none",
    )


def _ends_with_its_data(source: Source) -> bool:
    """Find no loader that begins again: the asynchronous loop stops after one pass of the data."""
    return "class CyclingDataLoader" not in source.text("nemo_rl/data/dataloader.py")


def _without_asynchronous(settled: Settled) -> Limit:
    return Limit(
        "grpo.max_sample_age",
        settled.recipe.grpo.max_sample_age,
        settled.recipe.grpo.is_asynchronous,
        "this NeMo RL's asynchronous loop ends with an error after one pass of the data",
        "v0.7.0: nemo_rl/data/dataloader.py, CyclingDataLoader",
        f"{LATER}set null",
    )


def _without_four_bits(settled: Settled) -> Limit:
    precision = settled.recipe.precision
    return Limit(
        "precision.rollout_linear",
        precision.rollout_linear,
        precision.rollout.group > 0,
        f"was tried with vLLM {TRIED_VLLM} alone, and this NeMo RL pins another",
        "v0.7.0: pyproject.toml, vllm==0.20.0",
        f"{LATER}choose precision=fp8-linear",
    )


OPTIMIZER_ALWAYS_MOVED, POW2_BROKEN = "optimizer-always-moved", "pow2-broken"
ALIGNMENT_UNTRIED = "alignment-untried"
DEFECTS = (
    Defect("kv-scales-dropped", _drops_kv_scales, _without_fp8_kv),
    Defect("bf16-layers-broken", _appends_bf16_layers, _without_bf16_layers),
    Defect(POW2_BROKEN, _breaks_pow2, _without_pow2),
    Defect(OPTIMIZER_ALWAYS_MOVED, _always_moves_optimizer, _without_kept_optimizer),
    Defect("hf-overrides-lost", _loses_hf_overrides, _without_hf_overrides),
    Defect(ALIGNMENT_UNTRIED, _pins_another_vllm, _without_alignment),
    Defect("asynchronous-one-pass", _ends_with_its_data, _without_asynchronous),
    Defect("four-bits-untried", _pins_another_vllm, _without_four_bits),
)
"""In the order in which users see them."""
V0_7_0_DEFECTS = frozenset(each.name for each in DEFECTS)
MAIN_DEFECTS = frozenset({POW2_BROKEN})


def defect_limits(settled: Settled, defects: frozenset[str]) -> Iterator[Limit]:
    """Yield the limit of each known defect; it counts as kept if the host lacks the defect."""
    for each in DEFECTS:
        limit = each.limit(settled)
        yield limit._replace(broken=limit.broken and each.name in defects)


def _functions(node: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    body = getattr(node, "body", [])
    return [each for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


def _held(node: ast.AST) -> set[str]:
    """Return the names of a class's or file's functions, classes and variables.

    Of a class also the attributes that its methods set.
    """
    found = {each.name for each in ast.walk(node) if isinstance(each, ast.ClassDef)}
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute | ast.Name) and isinstance(each.ctx, ast.Store):
            found.add(each.attr if isinstance(each, ast.Attribute) else each.id)
    return found | {each.name for each in _functions(node)}


def _arguments(function: ast.AST) -> list[str]:
    if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    return [each.arg for each in (*function.args.args, *function.args.kwonlyargs)]


def _calls(node: ast.AST, name: str) -> list[ast.Call]:
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    return [each for each in calls if getattr(each.func, "attr", "") == name]
