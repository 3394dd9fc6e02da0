"""Sample with a KV cache from a second model, in rollout precision, that refits fill.

Prompts are left-padded, responses right-padded, so a batch of prompts and responses is one
rectangle `[B, T]` that the trainer scores as it stands. Rollout logprobs are those of the sampled
tokens under the quantized model, taken while sampling, as an engine reports them.

Shapes: B sequences, T tokens, R response tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fp8_nemo.correction.mismatch import LogprobError
from fp8_nemo.glue import wire as weights
from fp8_nemo.glue.destination import Destination
from fp8_nemo.glue.ledger import Ledger, RefitProof
from fp8_nemo.glue.manifest import KV_SUFFIXES
from fp8_nemo.glue.quantize import plain_dtype
from fp8_nemo.local.chat import Chat
from fp8_nemo.local.modules import attention
from fp8_nemo.local.modules.experts import without_host_reads
from fp8_nemo.local.modules.linears import values_once
from fp8_nemo.local.modules.precision import set_rollout_precision
from fp8_nemo.local.modules.routing import Routers, stacked, with_last
from fp8_nemo.recipe.options.precision import Precision

WIDTH = 256
"""Places of a cache that a captured step reads, or a multiple of it."""


@dataclass(frozen=True)
class Batch:
    """Hold prompts and responses of one rollout as one rectangle."""

    tokens_BT: Tensor
    mask_BT: Tensor
    """True at real tokens, of prompt and response."""
    response_mask_BR: Tensor
    """True at response tokens, the end of sequence included; R last columns of the rectangle."""
    rollout_BR: Tensor
    """Logprob of each response token as sampled."""
    routes_BTLA: Tensor | None = None
    """Experts that each token went through, by layer, where they are recorded; the last is -1."""

    @property
    def responses_BR(self) -> Tensor:
        """Return the response part of the rectangle."""
        return self.tokens_BT[:, -self.response_mask_BR.shape[1] :]

    def of(self, rows: slice | Tensor) -> Batch:
        """Return the sequences of a slice, or where a mask is true."""
        fields: dict[str, Any] = {
            name: None if each is None else each[rows] for name, each in vars(self).items()
        }
        return Batch(**fields)


class Engine:
    """Run a model in rollout precision.

    Args:
        config: of the model.
        precision: the recipe's.
        device: where it lives.
        records: whether its batches hold the experts that its routers chose.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        precision: Precision,
        device: torch.device,
        *,
        records: bool = False,
    ) -> None:
        with torch.random.fork_rng():
            model = AutoModelForCausalLM.from_config(
                deepcopy(config), dtype=plain_dtype(precision), attn_implementation=attention.NAME
            )
        self.model: PreTrainedModel = model.to(device).eval().requires_grad_(False)
        shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        self.kv_groups = precision.kv_groups(config.num_key_value_heads)
        self.expected = weights.wire_specs(
            shapes, precision, config.num_hidden_layers, self.kv_groups
        )
        set_rollout_precision(self.model, precision)
        self.routers = Routers(self.model) if records else None

    @torch.no_grad()
    def refit(
        self, stream: Iterable[tuple[str, Tensor]], verify: str, number: int = 0
    ) -> RefitProof:
        """Load what a refit sends; unless `verify` is off, by a ledger that must close.

        Args:
            stream: `glue.refit.refit_stream`.
            verify: the recipe's, as the sender was told.
            number: of the refit that is due.

        Raises:
            RefitError: something did not land; the engine must not be used.
        """
        tensors = self.wire_tensors()
        if verify == "off":
            return _load_unproven(stream, tensors)
        destination = Destination(tensors, self.expected)
        ledger = Ledger(self.expected, destination, verify=verify, number=number)
        for name, tensor in stream:
            if ledger.receive(name, tensor):
                tensors[name].copy_(tensor)
        return ledger.close(lambda: Destination(self.wire_tensors(), self.expected))

    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        chat: Chat,
        max_new_tokens: int,
        generator: torch.Generator,
    ) -> Batch:
        """Sample a response per prompt at temperature 1, until all ended or reached the limit.

        Raises:
            LogprobError: the weights give no probabilities.
        """
        tokens_BT, mask_BT = pad_left(prompts, chat.pad, self.model.device)
        decoder = Decoder(self.model, tokens_BT, mask_BT, max_new_tokens, self.routers)
        ended_B1 = torch.zeros_like(mask_BT[:, :1])
        tokens, logprobs, real, routes = [tokens_BT], [], [], []
        with values_once(self.model):
            logprob_BV = decoder.first()
            while True:
                if self.routers:
                    routes.append(stacked(decoder.chosen_NA, len(tokens_BT)))
                if logprob_BV.isnan().any():
                    raise LogprobError("the engine has diverged: a logprob is not a number")
                new_B1 = torch.multinomial(logprob_BV.exp(), 1, generator=generator)
                new_B1 = new_B1.masked_fill(ended_B1, chat.pad)
                logprobs.append(logprob_BV.gather(1, new_B1).masked_fill(ended_B1, 0.0))
                tokens.append(new_B1)
                real.append(~ended_B1)
                ended_B1 = ended_B1 | (new_B1 == chat.end)
                if len(logprobs) == max_new_tokens or ended_B1.all():
                    break
                logprob_BV = decoder.next(new_B1, real[-1])
        real_BR = torch.cat(real, dim=1)
        return Batch(
            torch.cat(tokens, dim=1), torch.cat([mask_BT, real_BR], dim=1), real_BR,
            torch.cat(logprobs, dim=1), with_last(routes) if routes else None,
        )  # fmt: skip

    def wire_tensors(self) -> dict[str, Tensor]:
        """Return the engine's own tensors by wire name; experts are views into their slabs."""
        held = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        found: dict[str, Tensor] = {}
        for name, tensor in held.items():
            slab = weights.weight_of(name)
            suffix = name.removeprefix(slab)
            if projections := weights.slab_projections(slab):
                tensor = tensor.unflatten(1, (len(projections), -1)).flatten(0, 1)
                wires = weights.wire_names(slab, (len(tensor) // len(projections),))
                found |= {wire + suffix: view for wire, view in zip(wires, tensor, strict=True)}
            elif name.endswith(KV_SUFFIXES) and self.kv_groups > 1:
                at, _, kind = _vllm_name(name).rpartition(".")
                views = enumerate(tensor.split(1))
                found |= {f"{at}.{group}.{kind}": view for group, view in views}
            else:
                found[_vllm_name(name)] = tensor
        return {name: tensor for name, tensor in found.items() if "inv_freq" not in name}


class Decoder:
    """Lead a batch through a model, token by token, with its cache.

    On a CPU a step reads as many places as are written. On a GPU it reads a multiple of `WIDTH`, is
    captured once for each, and replayed: launching the 1,400 kernels of a token of a model with 12
    layers took 2.6 times as long as their work (docs/research/log.md, 2026-11-21).

    Args:
        model: in rollout precision.
        tokens_BT: prompts, left-padded.
        mask_BT: true at their tokens.
        more: tokens that will follow.
        routers: of the model, if `chosen_NA` is asked for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokens_BT: Tensor,
        mask_BT: Tensor,
        more: int,
        routers: Routers | None = None,
    ) -> None:
        self.model, self.tokens_BT, self.routers = model, tokens_BT, routers
        self.chosen_NA: list[Tensor] = []
        """What each router chose in the last forward; the next one may overwrite it."""
        self.written = tokens_BT.shape[1]
        places_T = torch.arange(self.written, device=mask_BT.device)
        self.room = attention.Room(self.written + more, places_T, self.written)
        self.cache = attention.new_cache(model, self.room)
        self.mask_BS = torch.nn.functional.pad(mask_BT, (0, more))
        self.token_B1, self.place_1 = tokens_BT[:, -1:].clone(), places_T[-1:].clone()
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, list[Tensor]]] = {}
        self.pool = torch.cuda.graph_pool_handle() if tokens_BT.is_cuda else None

    def first(self) -> Tensor:
        """Return logprobs `[B, V]` of what follows the prompts."""
        return self._forward(self.tokens_BT)

    def next(self, token_B1: Tensor, real_B1: Tensor) -> Tensor:
        """Return logprobs `[B, V]` of what follows one more token; the next call overwrites them.

        Args:
            token_B1: of each sequence.
            real_B1: false where the sequence has ended.
        """
        self.token_B1.copy_(token_B1)
        self.room.at_N = self.place_1.fill_(self.written)
        self.mask_BS[:, self.written] = real_B1[:, 0]
        self.written += 1
        self.room.width = self.written
        return self._replayed() if token_B1.is_cuda else self._forward(self.token_B1)

    def _forward(self, tokens_BN: Tensor) -> Tensor:
        """Return logprobs after tokens that go into the cache."""
        new, mask_BS = tokens_BN.shape[1], self.mask_BS[:, : self.room.width]
        output = self.model(
            input_ids=tokens_BN,
            attention_mask=causal_mask(mask_BS, new),
            position_ids=positions(mask_BS)[:, -new:],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if self.routers:
            self.chosen_NA = list(self.routers.chosen_NA)
        return output.logits[:, -1].float().log_softmax(-1)

    def _replayed(self) -> Tensor:
        self.room.width = min(self.room.tokens, -(-self.written // WIDTH) * WIDTH)
        if self.room.width not in self.graphs:
            graph = torch.cuda.CUDAGraph()
            with without_host_reads():
                self._forward(self.token_B1)  # compiles kernels, which a capture cannot
                with torch.cuda.graph(graph, pool=self.pool):
                    logprob_BV = self._forward(self.token_B1)
            self.graphs[self.room.width] = graph, logprob_BV, self.chosen_NA
        graph, logprob_BV, self.chosen_NA = self.graphs[self.room.width]
        graph.replay()
        return logprob_BV


def _load_unproven(stream: Iterable[tuple[str, Tensor]], tensors: dict[str, Tensor]) -> RefitProof:
    received = 0
    for name, tensor in stream:
        if name in tensors:
            tensors[name].copy_(tensor)
            received += tensor.numel() * tensor.element_size()
    return RefitProof(received, verified_weights=0, equal_digests=0)


def pad_left(rows: list[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tokens `[B, T]` and mask of rows of unequal length, aligned at their ends."""
    width = max(map(len, rows))
    tokens = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    return tokens, mask.bool()


def positions(mask_BT: Tensor) -> Tensor:
    """Return the position of each token, counted from the first real one."""
    return (mask_BT.long().cumsum(-1) - 1).clamp(min=0)


def causal_mask(mask_BT: Tensor, queries: int | None = None) -> Tensor:
    """Return `[B, 1, Q, T]`: true where one of the last Q tokens, or of all, may see a key."""
    T = mask_BT.shape[1]
    Q = T if queries is None else queries
    causal_QT = torch.ones(Q, T, dtype=torch.bool, device=mask_BT.device).tril(T - Q)
    return (causal_QT & mask_BT[:, None, :])[:, None]


def _vllm_name(name: str) -> str:
    return name.replace(".self_attn.q_scale", ".self_attn.attn.q_scale")
