"""What a run inside NeMo RL needs, checked before a directory is made: one line for each lack."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from fp8_nemo.nemo.worker_settings import PLUGIN, PLUGINS, WorkerSettings, own_folder
from fp8_nemo.nemo_config.checkout import REMEDY, read_host
from fp8_nemo.nemo_config.host import ROOT_VARIABLE, Host, HostError, root_of
from fp8_nemo.nemo_config.limits import host_mistakes
from fp8_nemo.nemo_config.overrides import native_correction
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.checks import Mistake
from fp8_nemo.recipe.model_dir import model_mistakes, model_path, shape_mistakes
from fp8_nemo.recipe.options import Recipe
from fp8_nemo.recipe.plain import leaves
from fp8_nemo.recipe.problems import DataError, load_problems
from fp8_nemo.runs.provenance import gpus

NEEDED_PYTHON = (3, 12)
"""NeMo RL's pydantic models use `typing.TypedDict`, which needs it."""
BRIDGE = "3rdparty/Megatron-Bridge-workspace/Megatron-Bridge"
"""A submodule of NeMo RL, whose own submodule is Megatron-LM."""
NEEDED_PACKAGES = ("ray", "torch", "transformers", "megatron", "vllm", "pydantic")


def settings_of(recipe: Recipe) -> WorkerSettings:
    """Return what a run of this recipe tells its workers."""
    return WorkerSettings.of(recipe, loss_corrects=native_correction(recipe.correction) is not None)


def problems_with(plan: Plan) -> list[str]:
    """One line for each thing that would stop this plan after it has started."""
    recipe, root = plan.recipe, root_of(plan.recipe)
    lines = list(map(str, _model(recipe, plan)))
    lines += _data(recipe)
    if root is None:
        return [
            f"cluster.nemo_root=null: backend=nemo runs in NeMo RL; {REMEDY}",
            *lines,
        ]
    try:
        host = read_host(root)
    except HostError as error:
        return [str(error), *lines]
    lines = [*_resume(recipe, root), *lines]
    return [*_frozen_for(plan, host), *map(str, _machine(recipe)), *_software(recipe, host), *lines]


def _frozen_for(plan: Plan, host: Host) -> Iterator[str]:
    """Whether the checkout is still the one that the plan was made for."""
    if plan.nemo and not _same(plan.nemo.host, host.name):
        yield (
            f"{ROOT_VARIABLE}={host.root}: is {host.name}, the plan was made for "
            f"{plan.nemo.host}; check that out again, or start the line again for a new plan"
        )
    yield from map(str, host_mistakes(plan.settled, host))


def _same(planned: str, found: str) -> bool:
    """Version and commit; the version alone where one side could not be asked for a commit."""
    return all(one == other for one, other in zip(planned.split(), found.split(), strict=False))


def _machine(recipe: Recipe) -> Iterator[Mistake]:
    """Whether this machine has the GPUs, where it can be asked and the run is to be here."""
    cluster = recipe.cluster
    if cluster.kind != "here" or os.environ.get("RAY_ADDRESS"):
        return
    if cluster.nodes > 1:
        yield Mistake(
            "cluster.nodes",
            cluster.nodes,
            "cluster.kind=here is one machine",
            "set RAY_ADDRESS to a Ray cluster that spans the nodes",
        )
    found = visible_gpus()
    if found is not None and found < cluster.gpus_per_node:
        yield Mistake(
            "cluster.gpus_per_node",
            cluster.gpus_per_node,
            f"this machine shows {found}",
            f"set cluster.gpus_per_node={found}, or other CUDA_VISIBLE_DEVICES",
        )


def visible_gpus() -> int | None:
    """GPUs that a run may use here; None where no driver can be asked."""
    visible, found = os.environ.get("CUDA_VISIBLE_DEVICES"), gpus()
    if found is None:
        return None
    if visible is None:
        return len(found)
    return len([word for word in visible.split(",") if word.strip()])


def _resume(recipe: Recipe, root: Path) -> Iterator[str]:
    """Whether the driver will be able to read a checkpoint: a first attempt would not tell.

    NeMo RL main reads it with Megatron (utils/checkpoint.py), which its container has for the
    workers; the driver finds it in the checkout (`nemo_rl/__init__.py`), where that is whole.
    """
    source = root / "nemo_rl" / "utils" / "checkpoint.py"
    reads = source.is_file() and "load_common_state_dict" in source.read_text()
    megatron = root / BRIDGE / "3rdparty" / "Megatron-LM" / "megatron" / "core"
    if recipe.cluster.interpreter != "container" or not reads or megatron.is_dir():
        return
    if importlib.util.find_spec("megatron") is None:
        yield (
            f"{ROOT_VARIABLE}={root}: has no Megatron-LM, without which no attempt goes on from a "
            f"checkpoint; git -C {root} submodule update --init --recursive {BRIDGE}"
        )


def _software(recipe: Recipe, host: Host) -> Iterator[str]:
    """Whether the run can start in this environment; on a login node it is not to start."""
    if recipe.cluster.kind == "slurm" and "RAY_ADDRESS" not in os.environ:
        return
    if sys.version_info < NEEDED_PYTHON:
        yield (
            f"python {sys.version_info.major}.{sys.version_info.minor}: NeMo RL needs 3.12 or "
            "later; run in its container, or in an environment of that Python"
        )
        return
    if recipe.cluster.interpreter == "container":
        if importlib.util.find_spec("ray") is None:
            yield "ray is not installed here; run in NeMo RL's container (docs/install.md)"
        if settings_of(recipe).needs_plugin and own_folder() is None:
            yield (
                "fp8-nemo is installed among the driver's own packages, where NeMo RL's workers "
                "cannot reach it; run from a clone (pip install --no-deps -e .), or glue=stock"
            )
        return
    missing = [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        yield (
            f"cluster.interpreter=system: {', '.join(missing)} cannot be imported here; install "
            "what docs/install.md lists, or run in NeMo RL's container"
        )
    elif settings_of(recipe).needs_plugin and (problem := _plugin_problem()):
        yield problem
    elif (found := metadata.version("vllm").split("+")[0]) != host.vllm:
        yield (
            f"vllm {found}: NeMo RL {host.name} works with vllm=={host.vllm} only, whose internals "
            "its FP8 path patches; install that version, or another checkout"
        )


def _plugin_problem() -> str:
    """Why vLLM would not load our receiver here; empty if it would."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed}: keeps out our receiver; add {PLUGIN}, or unset it"
    if PLUGIN not in {each.name for each in metadata.entry_points(group=PLUGINS)}:
        return (
            f"fp8-nemo is installed here without its entry point {PLUGIN} of {PLUGINS}, by which "
            "vLLM finds our receiver; install it again: pip install -e ."
        )
    return ""


def _model(recipe: Recipe, plan: Plan) -> Iterator[Mistake]:
    model, overridden = recipe.model, "policy.hf_config_overrides"
    if model.hub_id:
        found = list(hub_mistakes(model.hub_id))
        config = cached_config(model.hub_id)
        if any(key.startswith(overridden) for key in leaves(recipe.nemo)):
            config = {}  # it is not what the model will be
        found += shape_mistakes(config, model.hub_id, model) if config else ()
    else:
        found = list(model_mistakes(recipe, pads=False))
        config = {} if found else json.loads((model_path(model) / "config.json").read_text())
    yield from found
    longest = plan.nemo.overrides["policy.max_total_sequence_length"] if plan.nemo else 0
    most = config.get("max_position_embeddings", longest)
    if longest > most and rope_type(config) in UNSTRETCHED:
        yield Mistake(
            "grpo.max_new_tokens",
            recipe.grpo.max_new_tokens,
            f"makes sequences of {longest} tokens, the model has {most} positions",
            "lower it",
        )


UNSTRETCHED = ("default", "llama3")
"""Rotary embeddings with which `max_position_embeddings` is all that vLLM takes."""


def rope_type(config: dict[str, Any]) -> str:
    """Of a `config.json`, in transformers' older spellings too."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope.get("rope_type") or rope.get("type") or "default"


def hub_mistakes(name: str, kind: str = "model") -> Iterator[Mistake]:
    """Whether the hub, or its cache here, gives this user a model; silent without its library.

    Args:
        name: on the hub.
        kind: `model` or `dataset`.
    """
    try:
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ModuleNotFoundError:
        return
    key = "model.hf_id" if kind == "model" else "data"
    remedy = "or give model.path=FOLDER" if kind == "model" else "or choose data=jsonl"
    missing = missing_in_cache(name, kind)
    if not missing:
        return
    if constants.HF_HUB_OFFLINE:
        text = f"{missing} is not in the cache, {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set"
        fill = f"fill it with `hf download --repo-type {kind} {name}`, {remedy}"
        yield Mistake(key, name, text, fill)
        return
    file = CACHED[kind][0][0]
    try:
        get_hf_file_metadata(hf_hub_url(name, file, repo_type=kind), timeout=10)
    except GatedRepoError:
        text = "is gated, and this account has no access"
        yield Mistake(key, name, text, f"ask for it on its page, set HF_TOKEN, {remedy}")
    except RepositoryNotFoundError:
        text = "is not on the hub, or not for this account"
        yield Mistake(key, name, text, f"set HF_TOKEN, {remedy}")
    except Exception as error:  # the network's own, of which there are many
        text = f"the hub cannot be asked ({type(error).__name__})"
        yield Mistake(key, name, text, f"fill the cache first, {remedy}")


CACHED = {
    "model": (
        ("config.json",),
        ("tokenizer_config.json",),
        ("model.safetensors", "model.safetensors.index.json"),
    ),
    "dataset": (("README.md",),),
}
"""Files of the hub that every repository of a kind has, each in one of its forms."""


def cached_config(name: str) -> dict[str, Any]:
    """A hub model's `config.json`, where the hub's cache here has it; else empty."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ModuleNotFoundError:
        return {}
    found = try_to_load_from_cache(name, "config.json")
    return json.loads(Path(found).read_text()) if isinstance(found, str) else {}


def missing_in_cache(name: str, kind: str) -> str:
    """The first file of a model or data set that the hub's cache here lacks; empty if none."""
    from huggingface_hub import constants, try_to_load_from_cache

    home = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    if kind == "dataset" and (home / name.replace("/", "___").lower()).is_dir():
        return ""  # as `datasets` keeps what it has converted
    for forms in CACHED[kind]:
        found = [try_to_load_from_cache(name, form, repo_type=kind) for form in forms]
        if not any(isinstance(each, str) for each in found):
            return forms[0]
    return ""


def _data(recipe: Recipe) -> Iterator[str]:
    if recipe.data.is_on_hub:
        return
    try:
        problems = load_problems(recipe.data, recipe.seed).train
    except DataError as error:
        yield str(error)
        return
    prompts = recipe.grpo.prompts_per_step or 0
    if len(problems) < prompts:
        yield str(
            Mistake(
                "grpo.prompts_per_step",
                prompts,
                f"NeMo RL drops the last, unfilled batch, and there are {len(problems)} problems",
                "lower it, or give more problems",
            )
        )
