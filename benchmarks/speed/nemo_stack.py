"""A stack of a model's layers as NeMo RL's trainer builds it, on one GPU, without weights.

Plan -> NeMo RL's `policy` -> its own `setup_model_config` and `get_model`: Megatron Bridge's
provider, Megatron Core's layers, TransformerEngine, DDP's buffers. A policy whose checkpoint is
`megatron_lm` gets its provider from the Hugging Face config alone, so no weight is needed.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fp8_nemo.nemo_config.checkout import config_of, host_of
from fp8_nemo.nemo_config.host import root_of
from fp8_nemo.nemo_config.overrides import path_overrides
from fp8_nemo.plan.cells import compose_plans
from fp8_nemo.plan.plan import Plan
from fp8_nemo.recipe.options.model import Shape

MEGATRON = "+nemo.policy.megatron_cfg"
PADS = f"{MEGATRON}.model_overrides.moe_router_padding_for_quantization=true"
VARIANTS = {
    "bf16": ("precision=bf16",),
    "fp8": ("precision=fp8-e2e",),
    "fp8-exact": ("precision=fp8-e2e", "precision.align=exact"),
    "fp8-router-pads": ("precision=fp8-e2e", PADS),
    "fp8-param": ("precision=fp8-e2e", f"{MEGATRON}.fp8_cfg.fp8_param=true"),
}


class Case(NamedTuple):
    """One model that is built: `Case("fp8", recompute=False, ends=False)`."""

    variant: str
    recompute: bool
    ends: bool = False
    """One layer between embedding and logprobs, instead of layers alone."""


class MicroBatch(NamedTuple):
    """What a forward takes; `bounds` are the packed sequences' starts and the end, [B + 1]."""

    ids_1T: Any
    packed: Any
    bounds: Any
    hidden_T1I: Any
    gradient_T1I: Any


def plan_of(model: str, layers: int, case: Case, folder: Path, arguments: Sequence[str]) -> Plan:
    """Plan a case on the GPUs of this call; `arguments` win."""
    parallel = ("tensor", "pipeline", "context", "expert", "rollout_tensor", "rollout_expert")
    cell = [
        *("backend=nemo", "cluster.interpreter=system", "cluster.nodes=1"),
        *(f"model={model}", f"model.path={folder}", "model.layout=null", *VARIANTS[case.variant]),
        *(f"model.parallel.{each}=1" for each in parallel),
        f"cluster.gpus_per_node={os.environ.get('WORLD_SIZE', 1)}",
        f"model.shape.layers={1 if case.ends else layers}",
        f"model.memory.recompute={str(case.recompute).lower()}",
    ]
    [plan] = compose_plans([*cell, *arguments], host_of)
    return plan


def policy_of(plan: Plan, folder: Path) -> dict[str, Any]:
    """Return NeMo RL's `policy` of a plan, for a folder that holds only the model's config.json."""
    root = root_of(plan.recipe)
    if root is None or plan.nemo is None:
        raise SystemExit("set NEMO_RL_ROOT to a clone of NVIDIA-NeMo/RL")
    written = plan.nemo.overrides | path_overrides(plan.recipe, folder, root)
    policy = config_of(root, plan.nemo.base_config, written)["policy"]
    policy["pretrained_checkpoint"] = {"format": "megatron_lm", "path": str(folder)}
    policy["megatron_cfg"]["train_iters"] = 1
    return policy


def write_config(shape: Shape, folder: Path) -> None:
    """Write the model's config.json, as a checkpoint of that shape has it."""
    from benchmarks.speed.random_model import config_of

    config_of(shape).save_pretrained(folder)


def provider_of(policy: dict[str, Any], folder: Path) -> tuple[Any, Any]:
    """Return NeMo RL's Megatron configuration of a policy: (everything, the model's provider)."""
    import torch
    from nemo_rl.models.megatron.setup import setup_model_config

    return setup_model_config(policy, 0, torch.bfloat16, str(folder), str(folder))


def build_model(config: Any, provider: Any, ends: bool) -> Any:
    """Build the model in its wrappers on this GPU, as `setup_model_and_optimizer` does."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from nemo_rl.models.megatron.setup import MoEFloat16Module, get_model

    if not parallel_state.is_initialized():
        provider.initialize_model_parallel(seed=0)
    groups = provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    provide = provider.provide
    provider.provide = lambda **_: provide(pre_process=ends, post_process=ends)
    [model] = get_model(
        provider, config.ddp, pre_wrap_hook=[freeze_routers], pg_collection=groups,
        mixed_precision_wrapper=MoEFloat16Module,
    )  # fmt: skip
    return model.train()


def freeze_routers(models: list[Any]) -> list[Any]:
    """Freeze routers as `policy.megatron_cfg.freeze_moe_router`, set by every base, does."""
    for layer in (layer for model in models for layer in model.decoder.layers):
        if hasattr(layer.mlp, "router"):
            layer.mlp.router.weight.requires_grad = False
    return models


def micro_batch(policy: dict[str, Any], shape: Shape, lengths: Sequence[int]) -> MicroBatch:
    """Make sequences of random tokens, packed by NeMo RL for this policy."""
    import torch
    from nemo_rl.models.megatron import data

    ids_BT = torch.randint(shape.vocab, (len(lengths), max(lengths)), device="cuda")
    pads = data._get_pack_sequence_parameters_for_megatron(
        policy["megatron_cfg"], policy["make_sequence_length_divisible_by"], max(lengths)
    )
    ids_1T, _, packed, _, bounds = data._pack_sequences_for_megatron(
        ids_BT, torch.tensor(lengths), *pads
    )
    size = (ids_1T.shape[1], 1, shape.hidden)
    hidden_T1I = torch.randn(size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    return MicroBatch(ids_1T, packed, bounds, hidden_T1I, torch.randn_like(hidden_T1I) / size[0])


def forward_of(model: Any, batch: MicroBatch, ends: bool) -> Callable[[], Any]:
    """Return the forward pass of a micro-batch: to hidden states [T, 1, I], or to a loss."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_attr_wrapped_model
    from nemo_rl.distributed.model_utils import from_parallel_logits_to_logprobs_packed_sequences

    inputs = {"position_ids": None, "attention_mask": None, "packed_seq_params": batch.packed}

    def stack() -> Any:
        get_attr_wrapped_model(model, "set_input_tensor")(batch.hidden_T1I)
        return model(input_ids=batch.ids_1T, fp32_output=False, **inputs)

    def whole() -> Any:
        logits_1TV = model(input_ids=batch.ids_1T, **inputs)
        group, width = parallel_state.get_tensor_model_parallel_group(), logits_1TV.shape[-1]
        logprobs_BT = from_parallel_logits_to_logprobs_packed_sequences(
            logits_1TV, batch.ids_1T, batch.bounds, batch.packed.max_seqlen_q,
            group.rank() * width, (group.rank() + 1) * width, group,
        )  # fmt: skip
        return -logprobs_BT.mean()

    return whole if ends else stack


def watch_experts(model: Any, seen: list[int]) -> list[Any]:
    """Register hooks that note how many tokens each expert of each layer gets."""

    def note(_: Any, inputs: tuple[Any, ...]) -> None:
        seen.extend(inputs[1].tolist())

    layers = [each for each in model.modules() if type(each).__name__ == "TEGroupedMLP"]
    return [layer.register_forward_pre_hook(note) for layer in layers]


def attention_backend() -> str:
    """Return what TransformerEngine chose for the last attention: `fused NVTE_F16_arbitrary`."""
    from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

    used = [n for n in ("flash", "fused", "unfused") if _attention_backends[f"use_{n}_attention"]]
    which = _attention_backends["fused_attention_backend"] if used == ["fused"] else ""
    return f"{' '.join(used)} {which}".strip()
