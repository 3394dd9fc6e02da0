"""Save what a killed run needs to go on unharmed: masters, optimizer, RNG, KV ranges.

Two files: tensors in safetensors, and `state.json` with the step, the scales in force and the
tensors' SHA-256. They appear by one rename (`run_dir.new_checkpoint`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8_nemo.glue.recalibrate import AmaxObserver
from fp8_nemo.local.policy import Policy
from fp8_nemo.recipe.plain import read_json, sha256_of, to_json
from fp8_nemo.runs.run_dir import checkpoint_step, new_checkpoint

TENSORS, STATE = "state.safetensors", "state.json"
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class CheckpointError(ValueError):
    """Report a checkpoint that cannot be written, or resumed from, and what to do."""


@dataclass
class Progress:
    """Hold what changes from step to step beside the policy."""

    step: int
    sampler: torch.Generator
    observer: AmaxObserver
    kv_scales: dict[str, float]
    """Scales in force in the engine; empty where the cache is BF16."""
    prompts: int = 0
    """Prompts that dynamic sampling has drawn; elsewhere the step tells which are next."""


def save(run_dir: Path, policy: Policy, progress: Progress) -> None:
    """Write a checkpoint of `progress.step`, whole or not at all.

    Raises:
        CheckpointError: there is no room, or something else keeps it from being written.
    """
    tensors: dict[str, Tensor] = {
        "rng.sampler": progress.sampler.get_state(),
        "kv.amax_SL3": progress.observer.amax_SL3,
    }
    for name, master in policy.masters.items():
        tensors[f"master.{name}"] = master
        for moment, value in policy.optimizer.state.get(master, {}).items():
            tensors[f"{moment}.{name}"] = value
    try:
        with new_checkpoint(run_dir, progress.step) as folder:
            contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(contiguous, folder / TENSORS)
            state = {
                "step": progress.step, "kv_scales": progress.kv_scales, "prompts": progress.prompts,
                "loss_scale": policy.scaler.state_dict(), "sha256": sha256_of(folder / TENSORS),
            }  # fmt: skip
            (folder / STATE).write_text(to_json(state))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{run_dir}: step {progress.step} cannot be saved, {error}; make room, and the same "
            "line goes on from the checkpoint before it"
        ) from error


def load(checkpoint: Path, policy: Policy, progress: Progress) -> None:
    """Put policy and progress where they were when `checkpoint` was saved.

    Raises:
        CheckpointError: a file is missing, cut short or of another model; or it is whole, and was
            saved with a GPU where there is none, or without; or it does not fit here now.
    """
    broken = (
        FileNotFoundError,
        NotADirectoryError,
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
    )
    try:
        tensors = load_file(checkpoint / TENSORS, device=str(policy.device))
        state: dict[str, Any] = read_json((checkpoint / STATE).read_bytes())
        if state["step"] != checkpoint_step(checkpoint) or not isinstance(state["kv_scales"], dict):
            raise ValueError(f"{STATE} is of another step, or none")
        if tensors["rng.sampler"].shape != progress.sampler.get_state().shape:
            raise RuntimeError(f"saved on another kind of device than the {policy.device.type}")
        if state.get("sha256") not in (None, sha256_of(checkpoint / TENSORS)):  # None: earlier
            raise ValueError(f"{TENSORS} is not what was saved")
        _restore(tensors, policy, progress)
        progress.step, progress.kv_scales = state["step"], state["kv_scales"]
        progress.prompts = state.get("prompts", 0)  # earlier versions had no dynamic sampling
        if scale := state.get("loss_scale"):  # nor FP16
            policy.scaler.load_state_dict(scale)
    except (*broken, OSError, RuntimeError) as error:
        remedy = (
            "delete this folder and the run goes on from the checkpoint before it"
            if isinstance(error, broken)
            else "the checkpoint is left as it is, and the same line goes on from it where that is "
            "mended"
        )
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise CheckpointError(f"{checkpoint}: cannot be read ({why}); {remedy}") from error


def _restore(tensors: dict[str, Tensor], policy: Policy, progress: Progress) -> None:
    has_moments = any(name.startswith(MOMENTS[0]) for name in tensors)  # some update was made
    for name, master in policy.masters.items():
        master.copy_(tensors[f"master.{name}"])
        if not has_moments:
            continue
        moments = {moment: tensors[f"{moment}.{name}"] for moment in MOMENTS}
        moments["step"] = moments["step"].cpu()  # where AdamW keeps its step count
        policy.optimizer.state[master] = moments
    policy.load_masters()
    progress.sampler.set_state(tensors["rng.sampler"].cpu())
    progress.observer.load(tensors["kv.amax_SL3"])
