"""Our FP8 formula against those of NeMo RL, verl, slime, TransformerEngine, DeepGEMM and vLLM.

TORCHDYNAMO_DISABLE=1 python -m benchmarks.numerics.peer_formulas \
    --out benchmarks/results/peer-formulas-cpu.json \
    [--nemo CLONE] [--verl CLONE] [--slime CLONE] [--te CLONE] [--deepgemm CLONE]

Their own torch code runs, from their own sources, on the same BF16 values, and scales and bytes are
compared with ours bit for bit. TransformerEngine is here by the torch reference of its tests;
`benchmarks.speed.quantize` compares its kernel. vLLM and transformers are the ones installed. What
needs a GPU is `emulated`: the formula of verl's and slime's Triton kernel and of vLLM's kernels for
activations, written out in torch with correctly rounded divisions, which Triton's `/` on a GPU is
not. (Triton's interpreter is no way out: it rounds to E4M3 otherwise than torch.)

`error` is the mean over blocks or groups of the relative L2 error; `values` says what was
quantized: `small` spreads `amax` evenly in its logarithm from 1e-12 on. `edges` says what becomes
of a block of zeros, and of one with a NaN or an Inf. `masters` quantizes FP32 masters without
rounding them to BF16 first. `kv` is one key tensor under the scales that somebody would give it.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks import record
from benchmarks.learning.correction_peers import commit_of, functions_of
from fp8_nemo.glue.quantize import (
    FP8,
    FP8_MAX,
    Fp8Groups,
    Fp8Weight,
    dequantize_blocks,
    dequantize_groups,
    exact_scales,
    quantize_blocks,
    quantize_groups,
    quantize_tensor,
)
from fp8_nemo.recipe.plain import to_json
from fp8_nemo.runs.provenance import environment

Quantized = tuple[Tensor, Tensor]
"""FP8 bytes and `scale_inv`, as `Fp8Weight` and `Fp8Groups` have them."""


class Quantizer(NamedTuple):
    """One of a peer's: `Quantizer("torch fallback", quantize, "weight")`."""

    name: str
    quantize: Callable[[Tensor], Quantized]
    of: str
    """`weight`, in blocks of 128x128, or `activation`, in groups of 1x128."""
    pow2: bool = False
    emulated: bool = False


def weights() -> Iterator[tuple[str, Tensor]]:
    """Yield BF16 weights `[O, I]` by name."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw) * 0.02

    yield "normal", normal(2048, 2048).bfloat16()
    tails = normal(2048, 2048) / normal(3, 2048, 2048).square().sum(0).sqrt()
    yield "heavy tails", (tails * 0.02).bfloat16()
    yield "ragged", normal(1000, 1096).bfloat16()
    spiked = normal(1000, 1096)
    spiked[-1, -1] = 0.5
    yield "ragged, last value large", spiked.bfloat16()
    amax_PQ = 10 ** torch.empty(16, 16).uniform_(-12, -2, generator=draw)
    spread = amax_PQ.repeat_interleave(128, 0).repeat_interleave(128, 1)
    yield "small", (normal(2048, 2048) * 12 * spread).bfloat16()


def activations() -> Iterator[tuple[str, Tensor]]:
    """Yield BF16 activations `[T, I]` by name."""
    draw = torch.Generator().manual_seed(1)
    x_TI = torch.randn(512, 2048, generator=draw)
    yield "normal", x_TI.bfloat16()
    channels_I = torch.where(torch.rand(2048, generator=draw) < 0.01, 50.0, 1.0)
    yield "outlier channels", (x_TI * channels_I).bfloat16()
    amax_TQ = 10 ** torch.empty(512, 16).uniform_(-12, 0, generator=draw)
    yield "small", (x_TI * 0.25 * amax_TQ.repeat_interleave(128, 1)).bfloat16()


def module_of(file: Path) -> ModuleType:
    """Import a source file that needs nothing of its package."""
    spec = importlib.util.spec_from_file_location(f"peer_{file.stem}", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nemo(root: Path) -> Iterator[Quantizer]:
    """Yield NeMo RL's `cast_tensor_to_fp8_blockwise`, with the FP32 copy that its caller makes."""
    file = root / "nemo_rl/models/generation/vllm/quantization/fp8.py"
    for name, pow2 in (("cast_tensor_to_fp8_blockwise", False), ("the same, pow2", True)):
        config = {"global_fp8_config": SimpleNamespace(use_weight_pow2_scale=pow2)}
        taken = functions_of(file, {"cast_tensor_to_fp8_blockwise"}, config)

        def quantize(weight_OI: Tensor, taken: Any = taken) -> Quantized:
            found = taken.cast_tensor_to_fp8_blockwise(weight_OI.float(), [128, 128])
            return found[0], found[1].squeeze(-1)

        yield Quantizer(name, quantize, "weight", pow2)


def verl(root: Path) -> Iterator[Quantizer]:
    """Yield verl's two quantizers: Triton, and torch where Triton is missing or turned off."""
    kernels = module_of(root / "verl/utils/kernel/fp8_kernel.py")

    def fallback(weight_OI: Tensor) -> Quantized:
        fp8_OI, scale_inv_PQ1 = kernels._scaled_fp8_blockwise_pytorch(weight_OI, [128, 128])
        return fp8_OI, scale_inv_PQ1.squeeze(-1)

    yield Quantizer("Triton kernel, emulated", triton_blocks, "weight", emulated=True)
    yield Quantizer("torch fallback", fallback, "weight")


def slime(root: Path) -> Iterator[Quantizer]:
    """Yield slime's two quantizers: the refit's kernel, and the converter of checkpoints."""
    given = {"FP8_MAX": FP8_MAX, "FP8_MIN": -FP8_MAX, "F": torch.nn.functional}
    tool = functions_of(root / "tools/convert_hf_to_fp8.py", {"block_fp8", "ceildiv"}, given)
    converter = partial(tool.block_fp8, block_size=[128, 128])
    yield Quantizer("Triton kernel, emulated", triton_blocks, "weight", emulated=True)
    yield Quantizer("converter of checkpoints", converter, "weight")


def triton_blocks(weight_OI: Tensor) -> Quantized:
    """Compute what the kernel of both does: `amax / 448`, its reciprocal, and a product."""
    O, I = weight_OI.shape
    amax = tiles(weight_OI.float(), "weight").abs().amax(1).clamp(min=1e-10)
    scale_inv_PQ = (amax / FP8_MAX).view(-(-O // 128), -(-I // 128))
    scale_PQ = torch.ones_like(scale_inv_PQ) / scale_inv_PQ
    scale_OI = scale_PQ.repeat_interleave(128, 0).repeat_interleave(128, 1)[:O, :I]
    return (weight_OI.float() * scale_OI).clamp(-FP8_MAX, FP8_MAX).to(FP8), scale_inv_PQ


def transformer_engine(root: Path) -> Iterator[Quantizer]:
    """Yield the torch reference that TransformerEngine compares its kernels with."""
    sys.path.insert(0, str(root / "tests/pytorch"))
    from references.blockwise_quantizer_reference import BlockwiseQuantizerReference

    for of, tile in (("weight", (128, 128)), ("activation", (1, 128))):
        for pow2 in (False, True):

            def quantize(x: Tensor, tile: Any = tile, pow2: bool = pow2) -> Quantized:
                found = BlockwiseQuantizerReference().quantize(
                    x, FP8, pow_2_scales=pow2, quant_tile_shape=tile, munge_scale_shapes=False
                )
                return found.data, found.scale

            yield Quantizer("test reference" + ", pow2" * pow2, quantize, of, pow2)


def deepgemm(root: Path) -> Iterator[Quantizer]:
    """Yield DeepGEMM's casts, with which its tests and its users quantize."""
    math = module_of(root / "deep_gemm/utils/math.py")
    for pow2 in (False, True):
        suffix = ", use_ue8m0" * pow2
        block = partial(math.per_block_cast_to_fp8, use_ue8m0=pow2)
        yield Quantizer("per_block_cast_to_fp8" + suffix, block, "weight", pow2)
        token = partial(math.per_token_cast_to_fp8, use_ue8m0=pow2)
        yield Quantizer("per_token_cast_to_fp8" + suffix, token, "activation", pow2)


def vllm() -> Iterator[Quantizer]:
    """Yield vLLM's quantizers: of weights, and of activations natively, in Triton and in CUDA."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import GroupShape, QuantFP8
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    def twice(weight_OI: Tensor) -> Quantized:
        fp8_OI, scale_inv_PQ = quantize_blocks(
            weight_OI, nonfinite=torch.zeros((), dtype=torch.bool)
        )
        requant_weight_ue8m0_inplace(fp8_OI, scale_inv_PQ, [128, 128])
        return fp8_OI, scale_inv_PQ

    yield Quantizer("ours, then requant_weight_ue8m0_inplace", twice, "weight", True)
    for pow2 in (False, True):
        suffix = ", use_ue8m0" * pow2
        block = partial(per_block_cast_to_fp8, use_ue8m0=pow2)
        yield Quantizer("per_block_cast_to_fp8" + suffix, block, "weight", pow2)
        with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
            native = QuantFP8(static=False, group_shape=GroupShape(1, 128), use_ue8m0=pow2)
        yield Quantizer("QuantFP8 native" + suffix, native.forward_native, "activation", pow2)
    for name, divide in (("CUDA kernel, emulated", True), ("Triton kernel, emulated", False)):
        groups = partial(vllm_groups, divide=divide)
        yield Quantizer(name, groups, "activation", emulated=True)


def vllm_groups(x_TI: Tensor, divide: bool) -> Quantized:
    """Compute what vLLM's kernels do: `amax` of at least 1e-10, over 448 or by its reciprocal."""
    groups = x_TI.float().unflatten(-1, (-1, 128))
    amax_TQ = groups.abs().amax(-1).clamp(min=1e-10)
    scale_inv_TQ = amax_TQ / FP8_MAX if divide else amax_TQ * torch.tensor(1.0 / FP8_MAX)
    scaled = groups / scale_inv_TQ[..., None]
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8).flatten(-2), scale_inv_TQ


def transformers_() -> Iterator[Quantizer]:
    """Yield transformers' `Fp8Quantize`, of the version installed."""
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    config = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    operation: Any = Fp8Quantize(SimpleNamespace(quantization_config=config))

    def quantize(weight_OI: Tensor) -> Quantized:
        found = operation.convert({"x.weight": weight_OI})
        return found["x.weight"], found.get("x.weight_scale_inv", torch.empty(0))

    yield Quantizer("Fp8Quantize", quantize, "weight")


def tiles(x: Tensor, of: str) -> Tensor:
    """Return blocks or groups of a padded tensor, `[number, values]`."""
    if of == "activation":
        return pad(x, (0, -x.shape[1] % 128)).unflatten(1, (-1, 128)).flatten(0, 1)
    padded = pad(x, (0, -x.shape[1] % 128, 0, -x.shape[0] % 128))
    blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).transpose(1, 2)
    return blocks.flatten(2).flatten(0, 1)


def error(found: Quantized, x: Tensor, of: str) -> float:
    """Return the mean over blocks or groups of the relative L2 error."""
    value = dequantize_blocks(Fp8Weight(*found)) if of == "weight" else None
    value = dequantize_groups(Fp8Groups(*found)) if value is None else value
    off, size = tiles(value.double() - x.double(), of), tiles(x.double(), of).norm(dim=1)
    return (off.norm(dim=1) / size)[size > 0].mean().item()


def ours_of(x: Tensor, quantizer: Quantizer) -> Quantized:
    """Quantize a tensor by our rule of the same kind; a value that is not finite passes."""
    if quantizer.of == "activation":
        return quantize_groups(x, pow2=quantizer.pow2)
    return quantize_blocks(x, pow2=quantizer.pow2, nonfinite=torch.zeros((), dtype=torch.bool))


def compared(quantizer: Quantizer, values: str, x: Tensor) -> dict[str, Any]:
    """Compare one quantizer with ours on one tensor, bit for bit."""
    row: dict[str, Any] = {"quantizer": quantizer.name, "of": quantizer.of, "values": values}
    ours, found = ours_of(x, quantizer), quantizer.quantize(x)
    if found[0].dtype != FP8:
        return row | {"left unquantized": True}
    ours_scale_inv, scale_inv = ours[1], found[1].float()
    assert scale_inv.shape == ours_scale_inv.shape, quantizer
    apart = found[0].view(torch.uint8) != ours[0].view(torch.uint8)
    return row | {
        "scales differ": (scale_inv != ours_scale_inv).double().mean().item(),
        "by at most": ((scale_inv - ours_scale_inv).abs() / ours_scale_inv).max().item(),
        "bytes differ": apart.double().mean().item(),
        "error": error(found, x, quantizer.of),
        "our error": error(ours, x, quantizer.of),
    }


def edges(quantizer: Quantizer) -> dict[str, Any]:
    """Return what becomes of 128 or 16,384 ones if all are 0, or the first is NaN or Inf."""
    row: dict[str, Any] = {"quantizer": quantizer.name, "of": quantizer.of}
    for name, odd in (("zeros", 0.0), ("NaN", float("nan")), ("Inf", float("inf"))):
        if odd and quantizer.emulated:
            continue  # what a GPU's maximum and clamp make of NaN, torch's do not show
        x = torch.ones(256, 256).bfloat16()
        x[:128, :128] = x[:128, :128] if odd else 0
        x[0, 0] = odd
        fp8, scale_inv = quantizer.quantize(x)
        first = fp8.float()[: 128 if quantizer.of == "weight" else 1, :128].flatten()
        row[f"{name}: scale_inv"] = f"{scale_inv.flatten()[0].float().item():.3g}"
        row[f"{name}: bytes that are NaN"] = int(first.isnan().sum())
        row[f"{name}: the others"] = f"{first[1] * scale_inv.flatten()[0].float():.3g}"
    return row


def masters() -> list[dict[str, Any]]:
    """Compare FP32 masters quantized as they are with their BF16 rounding."""
    master = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(2)) * 0.02
    ours = quantize_blocks(master)
    amax_PQ = tiles(master, "weight").abs().amax(1).view(16, 16)
    scale_PQ, scale_inv_PQ = exact_scales(amax_PQ, torch.float32, False)
    scale_OI = scale_PQ.repeat_interleave(128, 0).repeat_interleave(128, 1)
    fp8 = (master * scale_OI).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    apart = fp8.view(torch.uint8) != ours.fp8_OI.view(torch.uint8)
    return [
        {
            "scales differ": (scale_inv_PQ != ours.scale_inv_PQ).double().mean().item(),
            "bytes differ": apart.double().mean().item(),
            "error": error((fp8, scale_inv_PQ), master, "weight"),
            "our error": error(ours, master, "weight"),
        }
    ]


def kv() -> list[dict[str, Any]]:
    """Quantize keys of three sizes with the scales of each project."""
    draw, rows = torch.Generator().manual_seed(3), []
    keys = torch.randn(4096, 8, 128, generator=draw)
    for size in (0.01, 1.0, 200.0):
        key = (keys * size).bfloat16().float()
        amax = key.abs().max()
        scales = {
            "ours, margin 1.05 (NeMo RL's too)": 1.05 * amax / FP8_MAX,
            "ours, first_margin 2": 2.0 * amax / FP8_MAX,
            "vLLM calculate_kv_scales, amax / 200": amax / 200,
            "1.0, where a scale is missing": torch.tensor(1.0),
        }
        for name, scale_inv in scales.items():
            value = quantize_tensor(key, scale_inv).float() * scale_inv
            rows.append(
                {
                    "scale": name,
                    "keys' standard deviation": size,
                    "error": ((value - key).norm() / key.norm()).item(),
                    "saturated": (key.abs() > FP8_MAX * scale_inv).double().mean().item(),
                }
            )
    return rows


def measured(quantizers: Iterator[Quantizer]) -> dict[str, list[dict[str, Any]]]:
    """Return all rows of one peer."""
    known = list(quantizers)
    tensors = {"weight": list(weights()), "activation": list(activations())}
    rows = [compared(each, *named) for each in known for named in tensors[each.of]]
    return {"rows": rows, "edges": [edges(each) for each in known]}


def ours() -> Iterator[Quantizer]:
    """Yield our own contract, for the edges; a refit refuses weights that are not finite."""
    slot = torch.zeros((), dtype=torch.bool)
    yield Quantizer("quantize_blocks", partial(quantize_blocks, nonfinite=slot), "weight")
    yield Quantizer("quantize_groups", quantize_groups, "activation")


def main() -> None:
    """Compare the peers' formulas with ours, print the rows, and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    sources = {
        "nemo": nemo, "verl": verl, "slime": slime, "te": transformer_engine, "deepgemm": deepgemm
    }  # fmt: skip
    for peer in sources:
        parser.add_argument(f"--{peer}", type=Path)
        parser.add_argument(f"--{peer}-commit")
    options = vars(parser.parse_args())
    here, peers, ends = environment(), {}, []
    given = {peer: of for peer, of in sources.items() if options[peer]}
    found = {peer: (of(options[peer]), options[f"{peer}_commit"]) for peer, of in given.items()}
    for name, of in (("vllm", vllm), ("transformers", transformers_)):
        if importlib.util.find_spec(name):
            found[name] = (of(), here["versions"].get(name))
    for peer, (quantizers, commit) in found.items():
        rows = measured(quantizers)
        commit = commit or commit_of(options[peer])
        peers[peer] = {"commit": commit, "rows": rows["rows"]}
        ends += [{"peer": peer} | row for row in rows["edges"]]
        for row in rows["rows"]:
            print(peer, row, flush=True)
    ends += [{"peer": "ours"} | edges(each) for each in ours()]
    content = {"command": record.command(), "environment": here, "peers": peers}
    content |= {"edges": ends, "masters": masters(), "kv": kv()}
    options["out"].write_text(to_json(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
