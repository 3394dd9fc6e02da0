# pyright: standard
"""Where the mismatch of trainer and rollout comes from: one source at a time, nothing sampled.

A model reads problems with their right answers as the trainer computes it, and as an engine does
after a proven refit, in FP8 where a `Source` says so. Whole distributions are compared, in FP64, so
that machines differ by rounding alone. All of it runs on the CPU.

A single source needs no arithmetic of its own: a BF16 module multiplies the FP32 values of the FP8
bytes (weights alone), or an FP8 module holds BF16 weights with scales of 1 (activations alone).

Shapes: B sequences, T tokens, R answer tokens, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from fp8_nemo.glue.quantize import FP8, Fp8Weight, dequantize_blocks
from fp8_nemo.glue.recalibrate import AmaxObserver, kv_scales
from fp8_nemo.glue.refit import refit_stream
from fp8_nemo.glue.wire import scale_name
from fp8_nemo.local.chat import Chat
from fp8_nemo.local.engine import Batch, Engine, causal_mask, pad_left, positions
from fp8_nemo.local.modules import attention, linears
from fp8_nemo.local.policy import Policy
from fp8_nemo.recipe.options.precision import Precision, Recalibrate
from fp8_nemo.recipe.problems import Problem

CPU = torch.device("cpu")
FP8_KV_ATTN = Precision("fp8-kv-attn", rollout_linear="fp8", rollout_kv="fp8")


@dataclass(frozen=True)
class Source:
    r"""What of a rollout is in FP8: `Source("layer 0", weights=True, where=r"layers\.0\.")`."""

    name: str
    weights: bool = False
    activations: bool = False
    attention: bool = False
    """KV cache, Q and probabilities; the two above are of linears and experts."""
    where: str = ""
    """Regular expression: in the modules alone in whose names it is found."""


NOTHING = Source("nothing")
WEIGHTS = Source("weights", weights=True)
ACTIVATIONS = Source("activations", activations=True)
LINEAR = Source("weights + activations", weights=True, activations=True)
ATTENTION = Source("KV cache + attention", attention=True)
EVERYTHING = Source("everything", weights=True, activations=True, attention=True)
PROJECTIONS = {"qkv": "[qkv]_proj$", "o": "o_proj$", "gate, up": "(gate|up)_proj$"}
PROJECTIONS |= {"down": "down_proj$", "experts": "experts$"}


class ExactMismatch(NamedTuple):
    """What a source does: `ExactMismatch(WEIGHTS, kl_BR=[[2e-4, 0]], entropy_BR=..., mask_BR=...)`.

    KL(rollout || train) over the vocabulary, and the entropy of train: in nats, FP64, zero at
    padding. Column r is before the r-th token of every answer, the end of sequence included.
    """

    source: Source
    kl_BR: Tensor
    entropy_BR: Tensor
    mask_BR: Tensor

    @property
    def mean(self) -> float:
        """Mean KL over answer tokens."""
        return (self.kl_BR.sum() / self.mask_BR.sum()).item()

    @property
    def error(self) -> float:
        """Standard error of `mean` over the choice of problems, whose tokens hang together."""
        excess_B = self.kl_BR.sum(1) - self.mean * self.mask_BR.sum(1)
        return (excess_B.square().sum().sqrt() / self.mask_BR.sum()).item()


@torch.no_grad()
def measure(
    path: Path,
    problems: Sequence[Problem],
    sources: Sequence[Source],
    precision: Precision = FP8_KV_ATTN,
) -> list[ExactMismatch]:
    """Measure the mismatch of every source, on the same tokens and from the same refit.

    Args:
        path: checkpoint in Hugging Face format.
        problems: read with their answers, through the checkpoint's chat template.
        sources: what the rollout has in FP8; what `precision` leaves in BF16 stays so.
        precision: of the trainer, and of the rollout with every source on.

    Raises:
        RefitError: a refit was not proven.
        RecalibrateError: a layer's range of Q, K or V is zero or not finite.
    """
    policy, batch = Policy(path, precision, 0.0, CPU), answered(problems, Chat.load(path))
    fp8, bf16 = engine_model(policy, precision, batch), engine_model(policy, Precision(), batch)
    train_BRV, real_BR = answer_logprobs(policy.model, batch, cached=False), batch.response_mask_BR
    entropy_BR = real_BR * -(train_BRV.exp() * train_BRV).sum(-1)
    found = []
    for source in sources:
        rollout_BRV = answer_logprobs(in_bf16_but(source, fp8, bf16), batch, cached=True)
        kl_BR = real_BR * exact_kl(train_BRV, rollout_BRV)
        found.append(ExactMismatch(source, kl_BR, entropy_BR, real_BR))
    return found


def exact_kl(train_BRV: Tensor, rollout_BRV: Tensor) -> Tensor:
    """Return KL(rollout || train) `[B, R]` in nats from logprobs; rounding may make it negative."""
    return (rollout_BRV.exp() * (rollout_BRV - train_BRV)).sum(-1)


def answered(problems: Sequence[Problem], chat: Chat) -> Batch:
    """Lay out problems with their right answers as a rollout is; nothing was sampled."""
    prompt_BT, mask_BT = pad_left([chat.prompt(each.input) for each in problems], chat.pad, CPU)
    answers = [torch.tensor(chat.answer(each.output)) for each in problems]
    answer_BR = pad_sequence(answers, batch_first=True, padding_value=chat.pad)
    real_BR = pad_sequence([torch.ones_like(each).bool() for each in answers], batch_first=True)
    tokens_BT, mask_BT = torch.cat([prompt_BT, answer_BR], 1), torch.cat([mask_BT, real_BR], 1)
    return Batch(tokens_BT, mask_BT, real_BR, torch.full(real_BR.shape, torch.nan))


def engine_model(policy: Policy, precision: Precision, batch: Batch) -> PreTrainedModel:
    """Return an engine's model after a proven refit, KV scales from the trainer's forward."""
    count = policy.model.config.num_hidden_layers
    engine, observer = Engine(policy.model.config, precision, CPU), AmaxObserver(count, 1)
    policy.logprobs(batch, observer)
    scales = kv_scales(observer.read(), Recalibrate().margin)
    stream = refit_stream(policy.named_weights(), precision, scales, num_layers=count)
    engine.refit(stream, "bytes")
    return engine.model


def in_bf16_but(source: Source, fp8: PreTrainedModel, bf16: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the engine's model `fp8`, as its model `bf16` wherever the source is off."""
    model, plain = deepcopy(fp8), deepcopy(bf16)
    for name, module in dict[str, Any](model.named_modules()).items():
        here = re.search(source.where, name) is not None
        if isinstance(module, linears.Held):
            on = source.weights and here, source.activations and here
            model.set_submodule(name, _with_operands(module, plain.get_submodule(name), *on))
        elif hasattr(module, "k_scale") and not (source.attention and here):
            module.q_scale = module.k_scale = module.v_scale = None
    return model


def _with_operands(fp8: nn.Module, bf16: nn.Module, weights: bool, activations: bool) -> nn.Module:
    """Return a linear or experts with these operands in FP8, from modules in either format."""
    mixed = weights != activations
    for name, held_OI in [each for each in fp8.named_buffers() if mixed and each[1].dtype == FP8]:
        scale_inv_PQ = getattr(fp8, scale_name(name))
        if weights:
            value_OI = dequantize_blocks(Fp8Weight(held_OI, scale_inv_PQ))
            setattr(bf16, name, nn.Parameter(value_OI, requires_grad=False))
        else:
            setattr(fp8, name, getattr(bf16, name).detach())
            scale_inv_PQ.fill_(1.0)
    return fp8 if activations else bf16


def answer_logprobs(model: PreTrainedModel, batch: Batch, cached: bool) -> Tensor:
    """Return logprobs `[B, R, V]` before each answer token in FP64; an engine uses a cache."""
    logits = model(
        input_ids=batch.tokens_BT, attention_mask=causal_mask(batch.mask_BT),
        position_ids=positions(batch.mask_BT), use_cache=cached,
        past_key_values=attention.new_cache(model) if cached else None,
    ).logits[:, -batch.response_mask_BR.shape[1] - 1 : -1]  # fmt: skip
    return logits.double().log_softmax(-1)
