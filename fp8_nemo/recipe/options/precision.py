"""Declare number formats, the precision of either side, and the glue between the two."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from fp8_nemo.recipe.options.fields import number, one_of, short_name


class Format(NamedTuple):
    """Describe how numbers are held: `Format("fp8", "float8_e4m3fn", 1, block=128, nan=0x7F)`."""

    name: str
    dtype: str
    """Torch's name for one element."""
    bytes: float
    """Of one weight, without its share of a scale."""
    block: int = 0
    """Side of the square of weights that shares a scale; 0: it has none of these."""
    group: int = 0
    """Weights in a row that share a scale; 0: it has none of these."""
    scale_dtype: str = "float32"
    nan: int = 0
    """Byte that reads as NaN, with which a refit poisons the engine's memory."""
    scales_loss: bool = False
    """Whether training in it needs a loss scale: else small gradients become zeros."""

    @property
    def is_quantized(self) -> bool:
        """Return whether values are held with scales."""
        return self.block + self.group > 0

    @property
    def bytes_per_weight(self) -> float:
        """Return the bytes of one weight, with its share of a scale of a block or group."""
        sharing = self.block**2 + self.group
        return self.bytes + (DTYPE_BYTES[self.scale_dtype] / sharing if sharing else 0)


FORMATS = {
    each.name: each
    for each in (
        Format("bf16", "bfloat16", 2),
        Format("fp16", "float16", 2, scales_loss=True),
        Format("fp8", "float8_e4m3fn", 1, block=128, nan=0x7F),
        Format("nvfp4", "uint8", 0.5, group=16, scale_dtype="float8_e4m3fn"),
    )
}
"""What `precision` may name. A new format is a row here, one of `wire.HELD`, a quantizer in
`glue/quantize.py`, a row of PRODUCTS in `local/modules/linears.py` and an option in
`conf/precision/`: `tests/test_fifth_format.py` adds one."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}


@dataclass(unsafe_hash=True)
class Precision:
    """Choose what is held and multiplied in FP8, on either side."""

    name: str = short_name("bf16")
    """Part of the run directory's name."""
    rollout_linear: str = one_of(*FORMATS)
    """Weights and activations of the engine's linears; with `nvfp4` the weights alone."""
    rollout_kv: str = one_of("bf16", "fp16", "fp8")
    """FP8 cache, and FP8 attention with it."""
    kv_scales: str = one_of("layer", "head")
    """Of an FP8 cache: one each for a layer's Q, K and V, or for each of its K/V heads."""
    train_linear: str = one_of("bf16", "fp16", "fp8")
    """Weights and activations of the trainer's linears; FP16 is that of all else, on both sides."""
    loss_scale: float | None = number(None, above=0, most=1e10)
    """Factor on the loss that a run in FP16 begins with, taken out of its gradients again."""
    scales: str = one_of("fp32", "pow2")
    """Block scales: any FP32 number, or powers of two."""
    first_layers_bf16: int = number(0, least=0)
    """First layers whose linears stay in BF16: the engine's, and an FP8 trainer's too."""
    last_layers_bf16: int = number(0, least=0)
    """Last layers whose linears stay in BF16, likewise."""
    align: str = one_of("none", "cheap", "exact")
    """`cheap`: the engine's RoPE, SiLU and FP8 quantizer round as the trainer's; `exact`: its norm
    too, and both attend by one kernel."""

    @property
    def is_aligned(self) -> bool:
        """Return whether operations of the engine are replaced by the trainer's."""
        return self.align != "none"

    @property
    def is_exact(self) -> bool:
        """Return whether the two sides agree bit for bit: one attention, one order of every sum."""
        return self.align == "exact"

    @property
    def rollout(self) -> Format:
        """Return the format of the engine's linear weights."""
        return FORMATS[self.rollout_linear]

    @property
    def cache(self) -> Format:
        """Return the format of the KV cache, and of attention over it."""
        return FORMATS[self.rollout_kv]

    @property
    def has_one_kv_scale(self) -> bool:
        """Return whether the cache is in FP8 with a layer's scales, which XQA takes alone."""
        return self.cache.is_quantized and self.kv_scales == "layer"

    def kv_groups(self, kv_heads: int) -> int:
        """Return the scales that a layer's Q, K or V has in a model of so many K/V heads."""
        return kv_heads if self.kv_scales == "head" else 1

    @property
    def train(self) -> Format:
        """Return the format in which the trainer multiplies its linears."""
        return FORMATS[self.train_linear]

    @property
    def plain(self) -> Format:
        """Return the format of everything that is not quantized: embeddings, norms, activations."""
        return FORMATS["bf16"] if self.train.is_quantized else self.train

    @property
    def keeps_masters(self) -> bool:
        """Return whether the optimizer keeps whole FP32 masters (`backend=nemo`).

        Beside BF16 weights it needs only the 16 bits that these lack.
        """
        return self.train.is_quantized or self.plain.scales_loss

    @property
    def is_bf16(self) -> bool:
        """Return whether all is BF16, the baseline of every gain."""
        return not (self.rollout.is_quantized or self.keeps_masters)

    @property
    def bf16_layers(self) -> int:
        """Return the layers at either end that stay in BF16."""
        return self.first_layers_bf16 + self.last_layers_bf16


XQA_HEADS, XQA_GROUP = (64, 128), 8
"""Head dimensions, and most queries of a KV head, with which XQA was tried
(tests/gpu/test_decode_on_a_gpu.py)."""


@dataclass
class Recalibrate:
    """Say where Q/K/V ranges come from and how much room they get."""

    source: str = one_of("logprob", "forward")
    """`logprob`: the logprob forward that the step runs anyway; `forward`: an extra pass."""
    margin: float = number(1.05, least=1)
    """Factor on the largest value seen."""
    first_margin: float = number(2.0, least=1)
    """Margin while the ranges come from prompts alone: before the first rollout."""
    history: int = number(2, least=1)
    """Steps over which the maximum is taken."""


@dataclass
class Glue:
    """Choose which parts of the FP8 path are ours; each switch works alone."""

    name: str = short_name("ours")
    """Part of the run directory's name."""
    quantize: str = one_of("fused", "stock")
    """`fused`: our kernel; `stock`: NeMo RL's receiver quantizes."""
    transfer: str = one_of("fp8", "bf16")
    """What travels to the engine."""
    verify: str = one_of("bytes", "names", "off")
    """`bytes` proves every byte of each refit; `names` that each tensor came and was loaded."""
    recalibrate: Recalibrate = field(default_factory=Recalibrate)
    decode: str = one_of("xqa", "fa3")
    """Kernel of decode steps over an FP8 cache: FlashInfer's XQA by our patch, or vLLM's choice."""

    def decodes_by_xqa(self, precision: Precision) -> bool:
        """Return whether vLLM's workers are to attend by XQA where their GPU has it."""
        return self.decode == "xqa" and precision.has_one_kv_scale

    @property
    def sends_fp8(self) -> bool:
        """Return whether FP8 travels: where NeMo RL quantizes, it is given BF16."""
        return self.transfer == "fp8" and self.quantize == "fused"

    @property
    def has_receiver(self) -> bool:
        """Return whether vLLM's workers need our receiver."""
        return (self.quantize, self.transfer, self.verify) != ("stock", "bf16", "off")

    def observes(self, precision: Precision) -> bool:
        """Return whether the policy's workers watch Q, K and V in the logprob forward."""
        return precision.cache.is_quantized and self.recalibrate.source == "logprob"

    def needs_plugin(self, precision: Precision) -> bool:
        """Return whether workers must be ours: to receive, observe, align, decode, or skip steps.

        Steps whose gradients overflow in FP16.
        """
        ours = precision.is_aligned or precision.plain.scales_loss or self.decodes_by_xqa(precision)
        return self.has_receiver or self.observes(precision) or ours
