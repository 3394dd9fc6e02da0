"""vLLM's RoPE, SiLU and FP8 quantizer replaced by the trainer's, in this process.

Importing it registers them: `CustomOp.register_oot` makes vLLM build ours where its models name its
own (seam builds-another-class), so it has to come before the model: `receiver.register` does so in
each of vLLM's processes.

Each is an operation of torch that no compiler sees into, always on: Inductor would drop the
rounding between SiLU and quantizer, and vLLM's own switch, `+quant_fp8`, is not asked of a class
registered from outside, which has its class's name (`CustomOp.register_oot`).

What keeps vLLM's own: experts, which call kernels and no operations that can be replaced (seams
experts-quantizer, experts-silu), frequencies scaled otherwise than Llama 3's, scales that are
static, of whole tensors or rows, or powers of two.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.utils.torch_utils import direct_register_custom_op

from fp8_nemo.glue.wire import BLOCK
from fp8_nemo.nemo.aligned import ops


def _like_rope(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin: Tensor, head: int
) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape)


def _like_silu(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def _like_quantize(x_TI: Tensor, by_column: bool, padded: bool) -> tuple[Tensor, Tensor]:
    codes = x_TI.new_empty(x_TI.shape, dtype=torch.float8_e4m3fn)
    return codes, ops.empty_scales(x_TI, by_column, padded)


for name, like in (("rope", _like_rope), ("silu", _like_silu), ("quantize", _like_quantize)):
    direct_register_custom_op(
        f"aligned_{name}", getattr(ops, name), fake_impl=like,
        dispatch_key="CompositeExplicitAutograd",
    )  # fmt: skip


class Always:
    """Run an operation in one way, whatever `custom_ops` says and wherever it runs."""

    @classmethod
    def enabled(cls) -> bool:
        """Say that vLLM is to dispatch to the device's method."""
        return True

    def forward_native(self, *args, **kwargs):
        """Run the one way."""
        return self.forward_cuda(*args, **kwargs)  # type: ignore[attr-defined]

    forward_cpu = forward_native


class Rope(Always):
    """Compute RoPE with cosines and sines in FP32, Q and K rounded once."""

    def __init__(self, head_size, rotary_dim, max_position_embeddings, base, is_neox_style,
                 dtype, *more, **options):  # fmt: skip
        if rotary_dim != head_size or not is_neox_style:
            raise ValueError(
                f"rotary_dim {rotary_dim} of heads of {head_size}, is_neox_style {is_neox_style}: "
                "only whole heads by halves are aligned with the trainer"
            )
        sizes = (head_size, rotary_dim, max_position_embeddings, base, is_neox_style)
        super().__init__(*sizes, torch.float32, *more, **options)  # type: ignore[call-arg]

    def _compute_cos_sin_cache(self) -> Tensor:
        inv_freq = self._compute_inv_freq(self.base)  # type: ignore[attr-defined]
        return ops.cos_sin_table(inv_freq, self.max_position_embeddings)  # type: ignore[attr-defined]

    def forward_cuda(self, positions: Tensor, query: Tensor, key: Tensor | None = None):
        """Return Q `[T, A * D]` and K `[T, K * D]`, new; the given ones stay."""
        assert key is not None, "the trainer's RoPE has Q and K"
        flat = positions.flatten()
        return torch.ops.vllm.aligned_rope(flat, query, key, self.cos_sin_cache, self.head_size)  # type: ignore[attr-defined]


@RotaryEmbedding.register_oot
class AlignedRope(Rope, RotaryEmbedding):
    """Compute RoPE of one base."""


@Llama3RotaryEmbedding.register_oot
class AlignedLlama3Rope(Rope, Llama3RotaryEmbedding):
    """Compute RoPE with Llama 3's frequencies: Megatron's products in the same order."""


@SiluAndMul.register_oot
class AlignedSilu(Always, SiluAndMul):
    """Compute SiLU, rounding once."""

    def forward_cuda(self, x: Tensor) -> Tensor:
        """Return `silu(gate) * up` of `[T, 2F]`."""
        return torch.ops.vllm.aligned_silu(x)


@QuantFP8.register_oot
class AlignedQuantizer(Always, QuantFP8):
    """Quantize groups by TransformerEngine's formula; everything else by vLLM's."""

    def forward_cuda(self, x: Tensor, scale: Tensor | None = None,
                     scale_ub: Tensor | None = None, use_triton: bool = False):  # fmt: skip
        """Return E4M3 and scales, as `QuantFP8.forward_cuda` does."""
        of_groups = self.is_group_quant and self.group_size == BLOCK
        if self.static or not of_groups or self.use_ue8m0:
            return QuantFP8.forward_cuda(self, x, scale, scale_ub, use_triton)
        by_column = self.column_major_scales
        return torch.ops.vllm.aligned_quantize(x, by_column, by_column and self.tma_aligned_scales)
