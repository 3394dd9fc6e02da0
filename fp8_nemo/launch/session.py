"""Repeat `examples/run_grpo.py` of NeMo RL call by call, with our parts in the plan's places.

The configuration is the plan's. The policy is `WatchedPolicy`, through `setup(policy_factory=)`.
The policy workers are ours where the plan has glue. Where NeMo RL's loss does not know the plan's
correction, NeMo RL trains with its own loss without one. Everything else is NeMo RL, unmodified.
"""

# pyright: reportMissingImports=false
# NeMo RL is importable in a run, not in a type check.
from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fp8_nemo.glue.wire import RefitError
from fp8_nemo.launch.engine_checks import (
    check_engine,
    check_layouts,
    check_receivers,
    engine_dtypes,
    refit_problems,
    refit_reports,
    stop_if_it_cannot_sleep_or_wake,
)
from fp8_nemo.launch.environments import settings_of, workers_of
from fp8_nemo.launch.ray_cluster import open_for_anyone, outside_code
from fp8_nemo.nemo.worker_settings import OUR_WORKERS
from fp8_nemo.nemo_config.checkout import config_of
from fp8_nemo.nemo_config.overrides import path_overrides
from fp8_nemo.nemo_config.own.environments import classes
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.model_dir import model_path
from fp8_nemo.recipe.options.recipe import Recipe
from fp8_nemo.recipe.plain import leaves, to_json

CONVERSIONS = "NRL_MEGATRON_CHECKPOINT_DIR"
"""NeMo RL's environment variable: the folder of models in Megatron's format."""


class Session(NamedTuple):
    """Hold what NeMo RL's `setup` made, in the order of `grpo_train`'s arguments."""

    policy: Any
    generation: Any
    loader: Any
    validation_loader: Any
    tokenizer: Any
    loss_fn: Any
    environments: Any
    validation_environments: Any
    logger: Any
    checkpointer: Any
    state: Any
    config: Any


@contextmanager
def opened(plan: Plan, path: Path, root: Path) -> Iterator[Session]:
    """Set up NeMo RL for a plan, check its engine, measure first KV scales; shut down at the end.

    Args:
        plan: of the run.
        path: the run directory; `log/engine.json` will hold the engine's dtypes.
        root: NeMo RL's checkout.

    Raises:
        EngineError: the engine's FP8 weights are not the plan's, a worker lacks our receiver, or
            vLLM failed to go to sleep or wake up.
        RefitError: a refit failed; it names every tensor that the receivers found wrong.
    """
    parts = _set_up(plan, path, root)
    try:
        with failed_tensors_named(lambda: refit_problems(parts.generation)):
            _prove_engine(parts, plan, path / "log" / "engine.json")
            _make_first_kv_scales(parts, plan)
            yield parts
    finally:
        _shut_down(parts)


@contextmanager
def failed_tensors_named(ask: Callable[[], list[str]]) -> Iterator[None]:
    """Turn an error of the block into a `RefitError` if the receivers found tensors wrong.

    Args:
        ask: returns what each receiver found; called after an error. Its own error is dropped,
            because Ray raises one for an actor that died and the block's error says why.

    Raises:
        RefitError: the block raised one, or `ask` returned problems.
    """
    try:
        yield
    except RefitError:  # from the sender, which names tensors; receivers would say `never arrived`
        raise
    except Exception as error:
        problems = list[str]()
        with suppress(Exception):
            problems = ask()
        if problems:
            raise RefitError(problems) from error
        raise


def run_grpo(parts: Session, logger: Any, max_sample_age: int | None) -> None:
    """Run NeMo RL's training loop with `logger` in place of the session's.

    Args:
        parts: of the run.
        logger: what the loop logs to.
        max_sample_age: of the recipe; None runs the synchronous loop.

    Raises:
        RefitError: a refit of the asynchronous loop failed; it names the tensors.
    """
    from nemo_rl.algorithms.grpo import async_grpo_train, grpo_train
    from nemo_rl.data import dataloader

    parts, checkpointer = parts._replace(logger=logger), parts.checkpointer
    with checkpointer if hasattr(checkpointer, "__enter__") else nullcontext():
        if max_sample_age is None:
            grpo_train(*parts)
            return
        # Its collector takes one pass of what it is given, and stops the run.
        endless = parts._replace(loader=dataloader.CyclingDataLoader(parts.loader))
        with stopping_refits(lambda: refit_problems(parts.generation)):
            async_grpo_train(*endless, max_trajectory_age_steps=max_sample_age)


@contextmanager
def stopping_refits(ask: Callable[[], list[str]]) -> Iterator[None]:
    """Let each refit of the block that fails name its tensors at once, and end the run.

    NeMo RL's asynchronous loop prints a first refit's error and returns (seam async-first-refit);
    after any other it shuts its engines down, and nobody could ask them any more.

    Args:
        ask: as for `failed_tensors_named`.
    """
    from nemo_rl.algorithms import grpo

    stock, failed = grpo.refit_policy_generation, list[Exception]()

    def refit(*arguments: Any, **options: Any) -> Any:
        """Refit as NeMo RL does, and keep the error."""
        try:
            with failed_tensors_named(ask):
                return stock(*arguments, **options)
        except Exception as error:
            failed.append(error)
            raise

    grpo.refit_policy_generation = refit
    try:
        yield
    finally:
        grpo.refit_policy_generation = stock
    if failed:
        raise failed[0]


def _set_up(plan: Plan, path: Path, root: Path) -> Session:
    """Make the calls of NeMo RL's `main` up to training, in its order (run_grpo.py, 7ea279a)."""
    assert plan.nemo
    from nemo_rl.algorithms.grpo import MasterConfig, setup
    from nemo_rl.algorithms.utils import get_tokenizer
    from nemo_rl.data.utils import setup_response_data
    from nemo_rl.distributed.virtual_cluster import init_ray
    from nemo_rl.models.generation import configure_generation_config
    from nemo_rl.models.generation.vllm import VllmGeneration
    from nemo_rl.utils.logger import get_next_experiment_dir

    from fp8_nemo.nemo.policy import WatchedPolicy, without_correction

    if plan.recipe.cluster.interpreter == "system":
        _use_one_interpreter()
    written = plan.nemo.overrides | path_overrides(plan.recipe, path, root)
    config = MasterConfig(**config_of(root, plan.nemo.base_config, written))
    config.logger["log_dir"] = get_next_experiment_dir(config.logger["log_dir"])
    with outside_code():
        init_ray()
    _register_workers(workers_of(plan.recipe).values())
    stop_if_it_cannot_sleep_or_wake(VllmGeneration)
    tokenizer = get_tokenizer(config.policy["tokenizer"])
    config.policy["generation"] = configure_generation_config(
        config.policy["generation"], tokenizer, has_refit_draft_weights=False, trains_mtp=False
    )
    _register_environments(config.env)
    dataset, validation, environments, validation_environments = setup_response_data(
        tokenizer, config.data, config.env
    )
    settings = settings_of(plan.recipe)
    engine_start = one_engine_start(engine_first=plan.settled.shares_gpus)
    # Of an asynchronous engine our worker alone can be asked.
    needs_ours = settings.glue.has_receiver or plan.recipe.grpo.is_asynchronous
    ours = our_generation_worker() if needs_ours else nullcontext()
    with ours, one_conversion(Path(os.environ[CONVERSIONS])), engine_start as engine_is_up:

        def policy_after_engine(**arguments: Any) -> WatchedPolicy:
            engine_is_up()
            return WatchedPolicy(settings, **arguments)

        made = setup(config, tokenizer, dataset, validation, policy_factory=policy_after_engine)
    policy, generation, _, _, loader, validation_loader, loss_fn, *rest = made
    logger, checkpointer, state, config, *_ = rest
    if not settings.loss_corrects:
        loss_fn = without_correction(loss_fn)
    return Session(
        policy, generation, loader, validation_loader, tokenizer, loss_fn, environments,
        validation_environments, logger, checkpointer, state, config,
    )  # fmt: skip


def _prove_engine(parts: Session, plan: Plan, record: Path) -> None:
    """Record the engine's dtypes, compare them with the plan, and check the layout for refits."""
    dtypes = engine_dtypes(parts.generation)
    record.write_text(to_json(dtypes, indent=1) + "\n")
    check_engine(dtypes, plan.recipe)
    if settings_of(plan.recipe).needs_plugin:
        check_receivers(parts.generation)
        check_layouts(parts.generation)
        parts.policy.proofs = lambda: refit_reports(parts.generation)


def _make_first_kv_scales(parts: Session, plan: Plan) -> None:
    """Measure Q, K and V on one step's prompts, unless a checkpoint brought scales along."""
    if not settings_of(plan.recipe).observes or parts.policy.kv_scales.in_force:
        return
    parts.policy.prepare_for_lp_inference()
    ranks = parts.policy.sharding_annotations.get_axis_size("data_parallel")
    # Rounded up, because every rank must get as many prompts as the others.
    count = -(-plan.settled.prompts_per_step // ranks) * ranks
    parts.policy.calibrate_qkv_fp8_scales(first_prompts(parts, count), include_q=True)


def first_prompts(parts: Session, count: int) -> Any:
    """Return the first prompts of the data, batched as for NeMo RL's own first calibration."""
    from nemo_rl.data.llm_message_utils import batched_message_log_to_flat_message
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    policy, loader = parts.config.policy, parts.loader
    batch = loader.collate_fn([loader.dataset[n % len(loader.dataset)] for n in range(count)])
    flat, lengths = batched_message_log_to_flat_message(
        batch["message_log"],
        pad_value_dict={"token_ids": parts.tokenizer.pad_token_id},
        make_sequence_length_divisible_by=policy["make_sequence_length_divisible_by"],
    )
    return BatchedDataDict({"input_ids": flat["token_ids"], "input_lengths": lengths})


def _shut_down(parts: Session) -> None:
    """Shut down environments, engine and policy, as `main` of 7ea279a does.

    v0.7.0 leaves it to Ray. We must end the policy ourselves: otherwise its `__del__` looks for its
    workers for a minute, in a cluster that is gone.
    """
    from nemo_rl.algorithms import grpo

    if hasattr(grpo, "shutdown_environments"):
        grpo.shutdown_environments(parts.environments, parts.validation_environments)
    for part in (parts.generation, parts.policy):
        try:
            part.shutdown()
        except Exception as error:  # printed only: raised, it would hide why the run ended
            print(f"shutting down: {error}")


@contextmanager
def one_engine_start(*, engine_first: bool) -> Iterator[Callable[[], None]]:
    """Let runs on one machine start their engines in turn; yield a function that ends a start.

    NeMo RL makes a policy after its engine where they share GPUs, so an engine is up when a policy
    is asked for. Else it makes both at once, and a start ends with the block alone.

    vLLM chooses the first free port from 7000 on (seam engine-port), seconds before it binds it:
    runs that start together would choose the same one (`EADDRINUSE`).
    """
    with open(open_for_anyone("/tmp/fp8-nemo-engine-start.lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield partial(fcntl.flock, lock, fcntl.LOCK_UN) if engine_first else lambda: None


def conversion_dir(recipe: Recipe) -> Path:
    """Make the folder that caches a model in Megatron's format for all runs that start from it.

    Its name holds a hash over the source's file sizes and times. NeMo RL looks at the name alone,
    so without the hash it would start from the old weights of a model that was made again.
    """
    model, keys = recipe.model, leaves(recipe.nemo)
    files = [] if model.hub_id else sorted(model_path(model).iterdir())
    state = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    changed = {key: keys[key] for key in keys if key.startswith("policy.hf_config_overrides")}
    name = model.hf_id or model.name
    digest = hashlib.sha256(to_json([name, state, changed]).encode()).hexdigest()[:8]
    given = os.environ.get(CONVERSIONS)
    parent = Path(given) if given else Path(recipe.outputs) / ".megatron"
    folder = parent.absolute() / f"{name.replace('/', '--')}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def one_conversion(folder: Path) -> Iterator[None]:
    """Let runs that start together convert a model once; the others wait for the first one.

    NeMo RL takes any existing folder for a finished conversion (seam converted-model), although
    another run may still be writing it, or was killed. Here the file `.whole` marks a finished one.
    """
    whole = folder / ".whole"
    with (folder / ".lock").open("w") as lock:
        if not whole.exists():
            fcntl.flock(lock, fcntl.LOCK_EX)
        if whole.exists():
            fcntl.flock(lock, fcntl.LOCK_UN)
        else:
            for leftover in folder.glob("**/iter_0000000"):
                shutil.rmtree(leftover)
        yield
        whole.touch()


def _use_one_interpreter() -> None:
    """Run every actor under this interpreter: `NEMO_RL_PY_EXECUTABLES_SYSTEM` leaves some out."""
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES

    for name, executable in ACTOR_ENVIRONMENT_REGISTRY.items():
        if executable.startswith("uv"):
            ACTOR_ENVIRONMENT_REGISTRY[name] = PY_EXECUTABLES.SYSTEM


def _register_workers(needed: Iterable[str]) -> None:
    """Run our workers in the environments of NeMo RL's own.

    Args:
        needed: full names of NeMo RL's; the others' environments may not be made.
    """
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.utils.venvs import create_local_venv_on_each_node

    for stock in needed:
        ours = OUR_WORKERS[stock]
        executable = ACTOR_ENVIRONMENT_REGISTRY[stock]
        if executable.startswith("uv"):  # NeMo RL would make an environment named after our worker
            executable = create_local_venv_on_each_node(executable, stock)
        ACTOR_ENVIRONMENT_REGISTRY[ours] = executable


@contextmanager
def our_generation_worker() -> Iterator[None]:
    """Let NeMo RL make our vLLM workers where it would make its own (seam engine-worker)."""
    from nemo_rl.models.generation.vllm import vllm_generation

    stock = vllm_generation.resolve_generation_worker_cls

    def resolve(default: str, config: Any) -> Any:
        """Return our worker's name for NeMo RL's; any other choice of NeMo RL's stays."""
        chosen = stock(default, config)
        return OUR_WORKERS.get(chosen, chosen)

    vllm_generation.resolve_generation_worker_cls = resolve
    try:
        yield
    finally:
        vllm_generation.resolve_generation_worker_cls = stock


def _register_environments(given: Mapping[str, Any]) -> None:
    """Let NeMo RL find each environment whose keys name its class, under the driver's own Python.

    Args:
        given: NeMo RL's group `env`.
    """
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
    from nemo_rl.environments.utils import ENV_REGISTRY, register_env

    for name, actor in classes(given).items():
        if name not in ENV_REGISTRY:
            register_env(name, actor)
        ACTOR_ENVIRONMENT_REGISTRY.setdefault(actor, PY_EXECUTABLES.SYSTEM)
