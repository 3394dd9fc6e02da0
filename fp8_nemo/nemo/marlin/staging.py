"""Fill an engine's four-bit linears: staged as they arrive, repacked, and copied where they lie.

CUDA graphs hold the addresses of a module's parameters and of its Marlin workspace. vLLM's own way
to load again makes new ones of the workspace (marlin_utils_fp4.py, prepare_fp4_layer_for_marlin).
So a whole module is repacked by vLLM's own method on a module that is thrown away, and its
parameters are copied into those that the engine began with.
"""

# pyright: reportMissingImports=false
# vLLM stands on the path of a run, not of a type check.
from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8_nemo.glue.destination import spec_of
from fp8_nemo.glue.wire import RefitError
from fp8_nemo.nemo.marlin.layout import Module, arriving, modules, staged
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision

SIZES = ("input_size_per_partition", "output_size_per_partition", "logical_widths", "params_dtype")
"""What vLLM's method reads of a layer beside its parameters."""


class Whole(NamedTuple):
    """Hold a module of which everything has arrived."""

    arrived: list[tuple[str, Tensor]]
    """Wire names, and what lies staged of each."""
    repacked: list[tuple[str, Tensor]]
    """Full names of the engine's parameters, and what each is to hold."""


class Staging:
    """Hold memory in checkpoint layout for the modules under way; one refit's.

    A module's memory serves the next one of its shape: a model whose weights arrive layer by layer
    takes one layer of four bits.

    Args:
        model: vLLM's.
        shape: of the model.
        precision: of the recipe.
    """

    def __init__(self, model: Any, shape: Shape, precision: Precision) -> None:
        self.model, self.plain = model, precision.plain.dtype
        found = modules(shape, precision)
        self.places = {
            name: (module, parameter, rows)
            for module in found
            for name, (parameter, rows) in arriving(module).items()
        }
        self.missing = {module.path: {*arriving(module)} for module in found}
        self.under_way: dict[str, dict[str, Tensor]] = {}
        self.free: dict[tuple, list[dict[str, Tensor]]] = {}
        self.done: Any = None

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Whole]:
        """Stage what arrived, and yield each module that is whole by it, after its repacking.

        The engine's parameters are filled when the next one is asked for. NeMo RL's receiver over
        NCCL calls from several streams in turn, so each call waits for the last one's work.

        Args:
            tensors: of `places`; their memory may be used again after the call.

        Raises:
            RefitError: fused weights came with different scales of the whole, or vLLM holds a
                parameter in another form than it repacks.
        """
        if self.done is not None:
            self.done.wait()
        for name, tensor in tensors:
            module, parameter, rows = self.places[name]
            held = self._memory(module, tensor.device)
            held[parameter][rows].copy_(tensor)
            self.missing[module.path].discard(name)
            if not self.missing[module.path]:
                whole = self._repack(module, held)
                yield whole
                for full, made in whole.repacked:
                    _filled(self.model.get_parameter(full), full, made)
                self.free.setdefault(_kind(module), []).append(self.under_way.pop(module.path))
        if torch.cuda.is_available():
            self.done = torch.cuda.current_stream().record_event()

    def close(self) -> None:
        """Give the memory back, when every stream that used it is done."""
        if self.done is not None:
            torch.cuda.synchronize()
        self.under_way.clear()
        self.free.clear()

    def _memory(self, module: Module, device: torch.device) -> dict[str, Tensor]:
        if module.path not in self.under_way:
            kept = self.free.get(_kind(module))
            self.under_way[module.path] = kept.pop() if kept else self._made(module, device)
        return self.under_way[module.path]

    def _made(self, module: Module, device: torch.device) -> dict[str, Tensor]:
        return {
            name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            for name, spec in staged(module, self.plain).items()
        }

    def _repack(self, module: Module, held: dict[str, Tensor]) -> Whole:
        scales = held["weight_scale_2"]
        if not (scales == scales[0]).all():
            raise RefitError([f"{module.path}: its weights came with different weight_scale_2, of "
                              "which vLLM's kernel takes one"])  # fmt: skip
        layer = self.model.get_submodule(module.path)
        made = torch.nn.Module()
        for name in SIZES:
            setattr(made, name, getattr(layer, name))
        for name, tensor in held.items():
            made.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        method = layer.quant_method
        type(method).process_weights_after_loading(method, made)
        pieces = [(n, held[at][rows]) for n, (at, rows) in arriving(module).items()]
        return Whole(pieces, [(f"{module.path}.{n}", p.data) for n, p in made.named_parameters()])


def keep_repacked(model: Any, shape: Shape, precision: Precision) -> None:
    """Let vLLM repack no module again: NeMo RL asks it to at each refit's end (vllm_backend.py)."""
    for module in modules(shape, precision):
        method = model.get_submodule(module.path).quant_method
        method.process_weights_after_loading = _nothing


def _nothing(layer: Any) -> None:
    """Leave a layer as it is."""


def _filled(parameter: Tensor, name: str, made: Tensor) -> None:
    held, wanted = spec_of(parameter), spec_of(made)
    if held != wanted:
        raise RefitError([f"{name}: the engine holds {held.dtype} {list(held.shape)}, repacked it "
                          f"is {wanted.dtype} {list(wanted.shape)}"])  # fmt: skip
    parameter.data.copy_(made)


def _kind(module: Module) -> tuple:
    return module.rows, module.columns, module.has_bias
