"""Train low-rank adapters of a model's linears, with merged weights: W + alpha / rank * B A.

Megatron multiplies by W and by B A apart, and merges for a refit alone. Here the model computes
with the merged weight, as its engine does, and the weight's gradient gives the adapter's. What one
row of `LORA_MODULES` names shares its A, as there.

Shapes: R rank, O out, I in features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fp8_nemo.recipe.options.training import LORA_MODULES, Lora

MODULE_OF = {linear: module for module, names in LORA_MODULES.items() for linear in names}


class Adapters:
    """Hold the adapters of a model, which at first add nothing: B is zero.

    Args:
        weights: of the model, `{name: [O, I]}`; those without an adapter need no gradient any more.
        lora: which have one.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], lora: Lora) -> None:
        assert lora.rank and lora.alpha, "a recipe without adapters has none to train"
        self.scale = lora.alpha / lora.rank
        self.masters: dict[str, Tensor] = {}
        """A and B in FP32, by name."""
        self.parts: dict[str, tuple[nn.Parameter, Tensor, str, str]] = {}
        """Weight name to the weight, what it was at first, and the names of its A and B."""
        first = torch.Generator().manual_seed(0)
        for name, weight in weights.items():
            layer, _, linear = name.removesuffix(".weight").rpartition(".")
            module = MODULE_OF.get(linear)
            weight.requires_grad_(module in lora.target_modules)
            if not weight.requires_grad:
                continue
            a, b = f"{layer}.{module}.lora_A", f"{layer}.{linear}.lora_B"
            out, into = weight.shape
            a_RI = nn.init.xavier_normal_(torch.empty(lora.rank, into), generator=first)
            self.masters.setdefault(a, a_RI.to(weight.device))
            self.masters[b] = torch.zeros(out, lora.rank, device=weight.device)
            self.parts[name] = weight, weight.detach().clone(), a, b

    @torch.no_grad()
    def merge(self) -> None:
        """Write the merged weights into the model: the sum in FP32, rounded once."""
        for weight, first_OI, a, b in self.parts.values():
            delta_OI = self.scale * (self.masters[b] @ self.masters[a])
            weight.copy_(first_OI.float() + delta_OI)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Move the weights' gradients on to the adapters: dA = s B^T dW and dB = s dW A^T."""
        for master in self.masters.values():
            master.grad = torch.zeros_like(master)
        for weight, _, a, b in self.parts.values():
            assert weight.grad is not None
            dw_OI, A, B = weight.grad.float(), self.masters[a], self.masters[b]
            assert A.grad is not None and B.grad is not None
            A.grad += self.scale * (B.mT @ dw_OI)
            B.grad += self.scale * (dw_OI @ A.mT)
            weight.grad = None
