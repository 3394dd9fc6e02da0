"""Write a local run's model as a Hugging Face folder, which the world around can load."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM

from fp8_nemo.export.make_model import save_model
from fp8_nemo.export.source import ConversionError
from fp8_nemo.local.chat import Chat
from fp8_nemo.local.checkpoint import TENSORS
from fp8_nemo.local.modules.lora import Adapters
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.model_dir import model_path
from fp8_nemo.recipe.options.training import Lora
from fp8_nemo.runs.run_dir import checkpoint_step, checkpoints


def last_checkpoint(run_dir: Path, plan: Plan) -> Path:
    """Return the checkpoint that `exported` would take.

    Raises:
        ConversionError: NeMo RL's run, or no checkpoint yet.
    """
    if plan.backend != "local":
        raise ConversionError(
            f"{run_dir}: a run of NeMo RL, whose examples/converters/convert_megatron_to_hf.py "
            "makes a checkpoint in Hugging Face format of its own"
        )
    saved = checkpoints(run_dir)
    if not saved:
        raise ConversionError(f"{run_dir}: has no checkpoint; the run saves one at its end")
    return saved[-1]


def exported(run_dir: Path, plan: Plan) -> Path:
    """Write `RUN_DIR/model-STEP` from the last checkpoint, its FP32 weights rounded once to BF16.

    Made once; a run that has gone on since gets another, and a checkpoint saved again replaces it.

    Raises:
        ConversionError: there is no such checkpoint, or it cannot be read.
    """
    saved = last_checkpoint(run_dir, plan)
    folder, file = run_dir / f"model-{checkpoint_step(saved)}", saved / TENSORS
    if not folder.is_dir() or folder.stat().st_mtime < file.stat().st_mtime:
        start = model_path(plan.recipe.model)
        transformers.logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(
            start, dtype=torch.bfloat16, local_files_only=True
        )
        _load_masters(dict(model.named_parameters()), plan.recipe.lora, file)
        shutil.rmtree(folder, ignore_errors=True)
        save_model(model, Chat.load(start), folder)
    return folder


@torch.no_grad()
def _load_masters(parameters: dict[str, torch.nn.Parameter], lora: Lora, file: Path) -> None:
    adapters = Adapters(parameters, lora) if lora.is_on else None
    try:
        with safe_open(file, "pt") as tensors:
            for name, held in (adapters.masters if adapters else parameters).items():
                held.copy_(tensors.get_tensor(f"master.{name}"))
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ConversionError(f"{file}: cannot be read into its model ({reason})") from error
    if adapters:
        adapters.merge()
