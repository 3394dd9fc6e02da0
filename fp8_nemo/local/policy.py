"""Score and update the trained policy as Megatron does: a BF16 model, FP32 masters behind it.

The optimizer steps FP32 masters; the model computes with their BF16 rounding, and that rounding is
what a refit exports, so that trainer and engine quantize the same numbers. In FP16 the loss is
scaled, so that small gradients are not lost; where one overflows, the update is left out and the
scale halved, and after `GROWTH_INTERVAL` updates without one it is doubled.

Shapes: B sequences, T tokens, R response tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from fp8_nemo.correction.routing import RouteCount
from fp8_nemo.glue.quantize import plain_dtype
from fp8_nemo.glue.recalibrate import AmaxObserver
from fp8_nemo.local.engine import Batch, causal_mask, positions
from fp8_nemo.local.modules import attention
from fp8_nemo.local.modules.lora import Adapters
from fp8_nemo.local.modules.precision import set_train_precision
from fp8_nemo.local.modules.routing import Routers
from fp8_nemo.recipe.options.precision import Precision
from fp8_nemo.recipe.options.training import Lora
from fp8_nemo.recipe.settled import GROWTH_INTERVAL

MAX_GRAD_NORM = 1.0
WARMUP_START = 0.1
"""Share of the rate with which a warm-up begins; `overrides.py` writes the same to NeMo RL."""
WEIGHT_DECAY = 0.01
TOKENS_PER_MICRO_BATCH = 2**14


def load_model(
    path: Path, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> PreTrainedModel:
    """Load a checkpoint in a type of 16 bits with our attention."""
    with device:
        return AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=attention.NAME, local_files_only=True
        )


class Policy:
    """Hold a trainable model with its optimizer.

    Args:
        path: checkpoint to start from.
        precision: the recipe's.
        learning_rate: of AdamW, from the first update on unless `warm_up` lowers it.
        device: where it lives.
        max_grad_norm: that an update's gradient is scaled down to.
        replays: whether tokens go to the experts that a batch names.
        lora: which linears have adapters, which alone are trained; without a rank all weights are.
    """

    def __init__(
        self,
        path: Path,
        precision: Precision,
        learning_rate: float,
        device: torch.device,
        *,
        max_grad_norm: float = MAX_GRAD_NORM,
        replays: bool = False,
        lora: Lora | None = None,
    ) -> None:
        self.model = load_model(path, device, plain_dtype(precision))
        set_train_precision(self.model, precision)
        self.parameters = dict(self.model.named_parameters())
        self.adapters = Adapters(self.parameters, lora) if lora and lora.is_on else None
        self.masters = (
            self.adapters.masters
            if self.adapters
            else {name: weight.detach().float().clone() for name, weight in self.parameters.items()}
        )
        matrices = [master for master in self.masters.values() if master.ndim > 1]
        vectors = [master for master in self.masters.values() if master.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
            lr=learning_rate,
            weight_decay=WEIGHT_DECAY,
        )
        self.learning_rate, self.max_grad_norm = learning_rate, max_grad_norm
        self.scaler = torch.amp.GradScaler(  # it passes all through where it is not enabled
            device.type,
            init_scale=precision.loss_scale or 1.0,
            growth_interval=GROWTH_INTERVAL,
            enabled=precision.plain.scales_loss,
        )
        self.routers = Routers(self.model) if replays else None

    def warm_up(self, steps_before: int, warmup_steps: int) -> None:
        """Set the rate of a step: from a tenth up to the whole, as Megatron's schedule has it.

        Args:
            steps_before: steps that have been trained.
            warmup_steps: after which the rate is whole.
        """
        share = min(1.0, steps_before / warmup_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * (WARMUP_START + (1 - WARMUP_START) * share)

    @property
    def device(self) -> torch.device:
        """Return where the policy lives."""
        return self.model.device

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights for a refit, in a fixed order, as the model computes with them."""
        for name, weight in self.parameters.items():
            yield name, weight.detach()

    @torch.no_grad()
    def logprobs(
        self,
        batch: Batch,
        observer: AmaxObserver | None = None,
        routes: RouteCount | None = None,
    ) -> Tensor:
        """Return logprobs `[B, R]` of all response tokens.

        Args:
            batch: whose routes are replayed, if this policy replays.
            observer: is shown all Q, K and V.
            routes: counts where this policy's routers would have chosen otherwise.
        """
        return torch.cat([self._score(part, observer, routes) for part in micro_batches(batch)])

    def update(self, batch: Batch, loss_of: Callable[[Tensor, slice], Tensor]) -> float | None:
        """Do one optimizer step; return the gradient's norm before clipping, None if it overflowed.

        Args:
            batch: the sequences of this update.
            loss_of: from current logprobs `[b, R]` of some rows and their slice to their share of
                the loss, already divided by the update's denominator.
        """
        start = 0
        for part in micro_batches(batch):
            rows = slice(start, start + len(part.tokens_BT))
            self.scaler.scale(loss_of(self._score(part), rows)).backward()
            start = rows.stop
        self._take_gradients()
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(list(self.masters.values()), self.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.load_masters()
        overflowed = self.scaler.is_enabled() and not norm.isfinite()
        return None if overflowed else float(norm)

    def _take_gradients(self) -> None:
        if self.adapters:
            self.adapters.take_gradients()
            return
        for name, weight in self.parameters.items():
            self.masters[name].grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None

    @torch.no_grad()
    def load_masters(self) -> None:
        """Round the masters to BF16 into the model."""
        if self.adapters:
            self.adapters.merge()
            return
        for name, weight in self.parameters.items():
            weight.copy_(self.masters[name])

    @contextmanager
    def _observed(self, observer: AmaxObserver | None, mask_BT: Tensor) -> Iterator[None]:
        modules = attention.attention_modules(self.model)
        if observer is not None:
            for layer, module in enumerate(modules):
                module.watch = partial(observer.observe, layer, mask_BT=mask_BT)
        yield
        for module in modules:
            module.watch = None

    def _score(
        self,
        batch: Batch,
        observer: AmaxObserver | None = None,
        routes: RouteCount | None = None,
    ) -> Tensor:
        R = batch.response_mask_BR.shape[1]
        replaying = nullcontext()
        if self.routers:
            replaying = self.routers.replaying(batch.routes_BTLA, batch.mask_BT, routes)
        with self._observed(observer, batch.mask_BT), replaying:
            logits = self.model(
                input_ids=batch.tokens_BT,
                attention_mask=causal_mask(batch.mask_BT),
                position_ids=positions(batch.mask_BT),
                use_cache=False,
                logits_to_keep=R + 1,
            ).logits
        logprobs = logits[:, :-1].float().log_softmax(-1)
        picked_BR = logprobs.gather(2, batch.responses_BR[..., None])[..., 0]
        return picked_BR.masked_fill(~batch.response_mask_BR, 0.0)


def micro_batches(batch: Batch) -> Iterator[Batch]:
    """Yield rows of at most `TOKENS_PER_MICRO_BATCH` tokens, padding counted."""
    size = max(1, TOKENS_PER_MICRO_BATCH // batch.tokens_BT.shape[1])
    for start in range(0, len(batch.tokens_BT), size):
        yield batch.of(slice(start, start + size))
