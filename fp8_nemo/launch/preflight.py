"""Check what a run inside NeMo RL needs before its directory is made: one line per problem."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from fp8_nemo.launch.environments import image_problems, settings_of, worker_problems
from fp8_nemo.launch.room import room, short_of
from fp8_nemo.nemo.worker_settings import PLUGIN, PLUGINS, own_folder
from fp8_nemo.nemo_config.checkout import REMEDY, read_host
from fp8_nemo.nemo_config.host import ROOT_VARIABLE, Host, HostError, root_of
from fp8_nemo.nemo_config.limits import host_mistakes
from fp8_nemo.plan.memory import GPU_GIB
from fp8_nemo.plan.model import position_mistakes
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.mistake import Mistake
from fp8_nemo.recipe.model_dir import known_config, model_mistakes, shape_mistakes
from fp8_nemo.recipe.options.cluster import Cluster
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.own.reward import reward_problems
from fp8_nemo.recipe.problems import DataError, load_problems
from fp8_nemo.runs.provenance import gpus

NEEDED_PYTHON = (3, 12)
"""NeMo RL's pydantic models use `typing.TypedDict`, which needs it."""
NEEDED_PACKAGES = ("ray", "torch", "transformers", "megatron", "vllm", "pydantic")
BRIDGE = "3rdparty/Megatron-Bridge-workspace/Megatron-Bridge"
"""A submodule of NeMo RL, which has Megatron-LM as a submodule of its own."""
HUB_FILES = {
    "model": (
        ("config.json",),
        ("tokenizer_config.json",),
        ("model.safetensors", "model.safetensors.index.json"),
    ),
    "dataset": (("README.md",),),
}
"""Files that every repository of a kind has on the hub, each in one of several forms."""


def problems_with(plan: Plan) -> list[str]:
    """Return one line for each thing that would stop this plan after it has started."""
    recipe, root = plan.recipe, root_of(plan.recipe)
    of_inputs = [*model_problems(plan), *data_problems(plan)]
    if root is None:
        return [f"cluster.nemo_root=null: backend=nemo runs in NeMo RL; {REMEDY}", *of_inputs]
    try:
        host = read_host(root)
    except HostError as error:
        return [str(error), *of_inputs]
    return [
        *host_problems(plan, host),
        *map(str, machine_mistakes(recipe.cluster)),
        *map(str, gpu_mistakes(recipe)),
        *room_problems(plan),
        *software_problems(plan, host),
        *resume_problems(recipe.cluster, root),
        *of_inputs,
    ]


def host_problems(plan: Plan, host: Host) -> Iterator[str]:
    """Check that the checkout is the one that the plan was made for, and can run the plan.

    Commits are compared only if both are known: a checkout without git has a version alone.
    """
    assert plan.nemo
    pairs = zip(plan.nemo.host.split(), host.name.split(), strict=False)
    if any(planned != found for planned, found in pairs):
        yield (
            f"{ROOT_VARIABLE}={host.root}: is {host.name}, the plan was made for "
            f"{plan.nemo.host}; check that out again, or start the line again for a new plan"
        )
    yield from map(str, host_mistakes(plan.settled, host))


def machine_mistakes(cluster: Cluster) -> Iterator[Mistake]:
    """Check that this machine has the GPUs, if the run is to start here on a Ray of its own."""
    if not _has_own_ray_here(cluster):
        return
    if cluster.nodes > 1:
        remedy = "set RAY_ADDRESS to a Ray cluster that spans the nodes"
        yield Mistake("cluster.nodes", cluster.nodes, "cluster.kind=here is one machine", remedy)
    found, wanted = visible_gpus(), cluster.gpus_per_node
    if found is not None and found < wanted:
        remedy = f"set cluster.gpus_per_node={found}, or other CUDA_VISIBLE_DEVICES"
        yield Mistake("cluster.gpus_per_node", wanted, f"this machine shows {found}", remedy)


def gpu_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """Check that a layout chosen for a GPU starts on that one; a job checks each of its nodes."""
    cluster = recipe.cluster
    if not _has_own_ray_here(cluster) or recipe.model.layout != "auto":
        return
    for name in sorted({each.name for each in gpus(os.environ.get("CUDA_VISIBLE_DEVICES")) or []}):
        known = [kind for kind in GPU_GIB if kind in name.lower()]
        if known and cluster.gpu not in known:
            remedy = f"set cluster.gpu={known[0]}"
            yield Mistake("cluster.gpu", cluster.gpu, f"this machine shows {name}", remedy)


def room_problems(plan: Plan) -> Iterator[str]:
    """Check this machine's memory and disk, if the run is to start here on a Ray of its own."""
    if _has_own_ray_here(plan.recipe.cluster):
        yield from short_of(plan, room(plan))


def _has_own_ray_here(cluster: Cluster) -> bool:
    return cluster.kind == "here" and not os.environ.get("RAY_ADDRESS")


def visible_gpus() -> int | None:
    """Count the GPUs that a run may use here; None where there is no driver to ask."""
    visible, found = os.environ.get("CUDA_VISIBLE_DEVICES"), gpus()
    if found is None or visible is None:
        return None if found is None else len(found)
    return len([word for word in visible.split(",") if word.strip()])


def resume_problems(cluster: Cluster, root: Path) -> Iterator[str]:
    """Check that the driver can read a checkpoint, which no first attempt would notice.

    NeMo RL main reads it with Megatron (utils/checkpoint.py). Its container has Megatron for the
    workers alone; the driver finds it in a complete checkout (`nemo_rl/__init__.py`).
    """
    source = root / "nemo_rl" / "utils" / "checkpoint.py"
    reads = source.is_file() and "load_common_state_dict" in source.read_text()
    megatron = root / BRIDGE / "3rdparty" / "Megatron-LM" / "megatron" / "core"
    if cluster.interpreter != "container" or not reads or megatron.is_dir():
        return
    if importlib.util.find_spec("megatron") is None:
        yield (
            f"{ROOT_VARIABLE}={root}: has no Megatron-LM, without which no attempt goes on from a "
            f"checkpoint; git -C {root} submodule update --init --recursive {BRIDGE}"
        )


def software_problems(plan: Plan, host: Host) -> Iterator[str]:
    """Check that the run can start in this environment; not on a login node, which submits it."""
    recipe = plan.recipe
    if recipe.cluster.kind == "slurm" and "RAY_ADDRESS" not in os.environ:
        return
    needs_plugin = settings_of(recipe).needs_plugin
    if sys.version_info < NEEDED_PYTHON:
        yield (
            f"python {sys.version_info.major}.{sys.version_info.minor}: NeMo RL needs 3.12 or "
            "later; run in its container, or in an environment of that Python"
        )
    elif recipe.cluster.interpreter == "container":
        if importlib.util.find_spec("ray") is None:
            yield "ray is not installed here; run in NeMo RL's container (docs/install.md)"
        if needs_plugin and own_folder() is None:
            yield (
                "fp8-nemo is installed among the driver's own packages, where NeMo RL's workers "
                "cannot reach it; run from a clone (pip install --no-deps -e .), or glue=stock"
            )
        yield from image_problems(host)
        yield from worker_problems(plan)
    elif missing := [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]:
        yield (
            f"cluster.interpreter=system: {', '.join(missing)} cannot be imported here; install "
            "what docs/install.md lists, run in NeMo RL's container, or set "
            "cluster.interpreter=container where uv made environments for NeMo RL's workers"
        )
    elif needs_plugin and (problem := _plugin_problem()):
        yield problem
    elif (found := metadata.version("vllm").split("+")[0]) != host.vllm:
        yield (
            f"vllm {found}: NeMo RL {host.name} works with vllm=={host.vllm} only, whose internals "
            "its FP8 path patches; install that version, or another checkout"
        )


def _plugin_problem() -> str:
    """Return why vLLM would not load our receiver here; empty if it would."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed}: keeps out our receiver; add {PLUGIN}, or unset it"
    if PLUGIN not in {each.name for each in metadata.entry_points(group=PLUGINS)}:
        return (
            f"fp8-nemo is installed here without its entry point {PLUGIN} of {PLUGINS}, by which "
            "vLLM finds our receiver; install it again: pip install -e ."
        )
    return ""


def model_problems(plan: Plan) -> Iterator[str]:
    """Check that the model can be read, has the planned shape, and enough positions."""
    recipe, model = plan.recipe, plan.recipe.model
    if model.hub_id:
        found, config = list(hub_mistakes(model.hub_id)), known_config(recipe)
        found += shape_mistakes(config, model.hub_id, model) if config else ()
    else:
        found = list(model_mistakes(recipe, pads=False))
    yield from map(str, [*found, *position_mistakes(plan.settled)])


def hub_mistakes(name: str, kind: str = "model") -> Iterator[Mistake]:
    """Check that the hub, or its cache here, gives a model to this user.

    Without `huggingface_hub` nothing is checked: a login node may not have it.

    Args:
        name: on the hub.
        kind: `model` or `dataset`.
    """
    try:
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ModuleNotFoundError:
        return
    if not (missing := missing_in_cache(name, kind)):
        return
    key, remedy = {
        "model": ("model.hf_id", "or give model.path=FOLDER"),
        "dataset": ("data", "or choose data=jsonl"),
    }[kind]
    text = f"{missing} is not in the cache, {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set"
    first = f"fill it with `hf download --repo-type {kind} {name}`"
    if not constants.HF_HUB_OFFLINE:
        try:
            get_hf_file_metadata(
                hf_hub_url(name, HUB_FILES[kind][0][0], repo_type=kind), timeout=10
            )
            return
        except GatedRepoError:
            text = "is gated, and this account has no access"
            first = "ask for it on its page, set HF_TOKEN"
        except RepositoryNotFoundError:
            text, first = "is not on the hub, or not for this account", "set HF_TOKEN"
        except Exception as error:  # the network has many errors of its own
            text = f"the hub cannot be asked ({type(error).__name__})"
            first = "fill the cache first"
    yield Mistake(key, name, text, f"{first}, {remedy}")


def missing_in_cache(name: str, kind: str) -> str:
    """Return the first file of a model or data set that the hub's cache lacks; empty if none."""
    from huggingface_hub import constants, try_to_load_from_cache

    home = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    if kind == "dataset" and (home / name.replace("/", "___").lower()).is_dir():
        return ""  # `datasets` keeps what it has converted here, and needs no more
    for forms in HUB_FILES[kind]:
        found = [try_to_load_from_cache(name, form, repo_type=kind) for form in forms]
        if not any(isinstance(each, str) for each in found):
            return forms[0]
    return ""


def data_problems(plan: Plan) -> Iterator[str]:
    """Check that problems outside the hub can be read and fill a batch, and a user's reward."""
    recipe, prompts = plan.recipe, plan.settled.prompts_per_step
    if recipe.data.is_on_hub:
        yield from reward_problems(recipe.data)
        return
    try:
        problems = load_problems(recipe.data, recipe.seed).train
    except DataError as error:
        yield str(error)
        return
    yield from reward_problems(recipe.data, problems[0])
    count = len(problems)
    if plan.nemo and count < prompts:
        text = f"NeMo RL drops the last, unfilled batch, and there are {count} problems"
        remedy = "lower it, or give more problems"
        yield str(Mistake("grpo.prompts_per_step", prompts, text, remedy))
