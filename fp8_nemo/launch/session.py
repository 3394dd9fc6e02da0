"""`examples/run_grpo.py` of NeMo RL, repeated call by call with our plan in its seams.

The configuration is the plan's, the policy is `WatchedPolicy` through `setup(policy_factory=)`, its
workers are ours where the glue is, and where NeMo RL's loss has no such correction it trains with
its own loss without one. Everything else is NeMo RL, unmodified, and prints what it prints.
"""

# pyright: reportMissingImports=false
# NeMo RL stands on the path of a run, not of a type check.
from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from fp8_nemo.glue.wire import RefitError
from fp8_nemo.launch.engine_checks import (
    check_engine,
    check_receivers,
    engine_dtypes,
    refit_problems,
    refit_reports,
    stop_if_it_cannot_sleep_or_wake,
)
from fp8_nemo.launch.preflight import settings_of
from fp8_nemo.launch.ray_cluster import open_for_anyone, own_code_first
from fp8_nemo.nemo_config.checkout import config_of
from fp8_nemo.nemo_config.overrides import path_overrides
from fp8_nemo.plan.plan import Plan

CONVERSIONS = "NRL_MEGATRON_CHECKPOINT_DIR"


class Session(NamedTuple):
    """Everything that NeMo RL's `setup` made, and the loss that trains."""

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
def opened(
    plan: Plan, path: Path, root: Path, more: dict[str, Any] | None = None
) -> Iterator[Session]:
    """Set NeMo RL up for a plan, up to the engine's proof that it is the plan's; shut it down.

    Args:
        plan: of the run.
        path: its directory.
        root: NeMo RL's checkout.
        more: keys on top of the plan's, for a benchmark of what no plan can ask for.

    Raises:
        EngineError: the engine holds other weights in FP8, a worker lacks our receiver, or vLLM
            could not go to sleep or wake up.
        RefitError: a refit failed; with what each worker's receiver kept of it.
    """
    parts = _set_up(plan, path, root, more or {})
    try:
        dtypes = engine_dtypes(parts.generation)
        (path / "log" / "engine.json").write_text(json.dumps(dtypes, indent=1) + "\n")
        check_engine(dtypes, plan.recipe)
        settings = settings_of(plan.recipe)
        if settings.needs_plugin:
            check_receivers(parts.generation)
            parts.policy.proofs = lambda: refit_reports(parts.generation)
        if settings.observes and not parts.policy.kv_scales.in_force:
            parts.policy.prepare_for_lp_inference()
            ranks = parts.policy.sharding_annotations.get_axis_size("data_parallel")
            count = plan.settled.prompts_per_step
            prompts = first_prompts(parts, -(-count // ranks) * ranks)  # to be shared evenly
            parts.policy.calibrate_qkv_fp8_scales(prompts, include_q=True)
        yield parts
    except RefitError:  # the sender's own names: the engine knows only that the stream went bad
        raise
    except Exception as error:
        if problems := _problems(parts.generation):
            raise RefitError(problems) from error
        raise
    finally:
        _shut_down(parts)


def _problems(generation: Any) -> list[str]:
    """What the engines say of a refit that failed, of those that still answer."""
    try:
        return refit_problems(generation)
    except Exception:  # Ray's, of an actor that died
        return []


def run_grpo(parts: Session, logger: Any) -> None:
    """NeMo RL's loop, heard by `logger`."""
    from nemo_rl.algorithms.grpo import grpo_train

    checkpointer = parts.checkpointer
    with checkpointer if hasattr(checkpointer, "__enter__") else nullcontext():
        grpo_train(
            parts.policy, parts.generation, parts.loader, parts.validation_loader,
            parts.tokenizer, parts.loss_fn, parts.environments, parts.validation_environments,
            logger, checkpointer, parts.state, parts.config,
        )  # fmt: skip


def _set_up(plan: Plan, path: Path, root: Path, more: dict[str, Any]) -> Session:
    """The calls of NeMo RL's `main` before it trains, in its order (run_grpo.py, main 7ea279a)."""
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
        _one_interpreter()
    written = plan.nemo.overrides | path_overrides(plan.recipe, path, root) | more
    config = MasterConfig(**config_of(root, plan.nemo.base_config, written))
    config.logger["log_dir"] = get_next_experiment_dir(config.logger["log_dir"])
    with own_code_first():
        init_ray()
    _register_worker()
    stop_if_it_cannot_sleep_or_wake(VllmGeneration)
    tokenizer = get_tokenizer(config.policy["tokenizer"])
    config.policy["generation"] = configure_generation_config(
        config.policy["generation"], tokenizer, has_refit_draft_weights=False, trains_mtp=False
    )
    dataset, validation, environments, validation_environments = setup_response_data(
        tokenizer, config.data, config.env
    )
    with one_conversion(Path(os.environ[CONVERSIONS])), one_engine_start() as engine_is_up:
        settings = settings_of(plan.recipe)

        def policy_after_engine(**arguments: Any) -> WatchedPolicy:
            engine_is_up()  # colocated: `setup` makes the engine first
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


@contextmanager
def one_engine_start() -> Iterator[Callable[[], None]]:
    """Runs on one machine start their engines one after the other; gives what ends a start.

    Every vLLM takes the first free port from 7000 on (seam engine-port), seconds before it binds
    it: of runs that start together, some find it taken (`EADDRINUSE`).
    """
    with open(open_for_anyone("/tmp/fp8-nemo-engine-start.lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lambda: fcntl.flock(lock, fcntl.LOCK_UN)


@contextmanager
def one_conversion(folder: Path) -> Iterator[None]:
    """Runs that start together convert a model to Megatron's format once, the others wait.

    NeMo RL takes any folder of a conversion for a finished one (seam converted-model), also one
    that another run is still writing, or that a killed run has left. Here `.whole` says that it is.
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


def _one_interpreter() -> None:
    """Every actor runs under this interpreter; `NEMO_RL_PY_EXECUTABLES_SYSTEM` leaves some out."""
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES

    for name, executable in ACTOR_ENVIRONMENT_REGISTRY.items():
        if executable.startswith("uv"):
            ACTOR_ENVIRONMENT_REGISTRY[name] = PY_EXECUTABLES.SYSTEM


def _register_worker() -> None:
    """Our policy worker runs in the environment of the stock one."""
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
    from nemo_rl.utils.venvs import create_local_venv_on_each_node

    from fp8_nemo.nemo.policy import STOCK_WORKER, WORKER

    executable = ACTOR_ENVIRONMENT_REGISTRY[STOCK_WORKER]
    if executable.startswith("uv"):  # NeMo RL would make an environment under our name, without us
        executable = create_local_venv_on_each_node(executable, STOCK_WORKER)
    ACTOR_ENVIRONMENT_REGISTRY[WORKER] = executable


def first_prompts(parts: Session, count: int) -> Any:
    """The first prompts of the data, as NeMo RL gives them to its own first calibration."""
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
    """As `main` does on main 7ea279a; v0.7.0 leaves it to Ray.

    The policy too: its `__del__` would look for workers in a cluster that has ended, for a minute.
    """
    from nemo_rl.algorithms import grpo

    if hasattr(grpo, "shutdown_environments"):
        grpo.shutdown_environments(parts.environments, parts.validation_environments)
    for part in (parts.generation, parts.policy):
        try:
            part.shutdown()
        except Exception as error:  # it must not hide why the run ended
            print(f"shutting down: {error}")
