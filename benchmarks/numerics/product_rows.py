"""Find at which numbers of rows a product's rows get other bits than among 8,192.

python -m benchmarks.numerics.product_rows --out FILE.json

A decode step has a row a sequence, a trainer thousands, and a library may choose its kernel by the
number of rows. Rows are normal numbers, weights normal times 0.02. `bf16` is torch's product beside
its own of 8,192 rows. `engine` is DeepGEMM's in FP8 beside its own of 8,192; `trainer` is
TransformerEngine's beside the same reference, which is what `precision.align=exact` needs. Needs a
GPU, vLLM and TransformerEngine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks import record
from benchmarks.numerics.table_forward import Weight
from benchmarks.numerics.te_kernels import te_gemm, te_quantize
from benchmarks.numerics.vllm_kernels import vllm_gemm
from fp8_nemo.glue.quantize import Fp8Groups, quantize_blocks

LINEARS = {
    "llama31-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
    "llama32-1b": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    "small-llama": ((2304, 768), (768, 768), (6144, 768), (768, 3072)),
}
HEADS = {
    "llama31-8b": (128256, 4096), "llama32-3b": (128256, 3072), "llama32-1b": (128256, 2048),
    "qwen25-7b": (152064, 3584), "small-llama": (128, 768),
}  # fmt: skip
"""Rows and columns of the weights, `[O, I]`."""
ROWS = (*range(1, 129), *range(160, 512, 32), *range(512, 16385, 128))
WHOLE = 8192


def unequal(product: Callable[[int], Tensor], whole_TO: Tensor) -> list[int]:
    """Return the numbers of rows whose product is not, bit for bit, the reference's first rows."""
    return [n for n in ROWS if not torch.equal(product(n)[:WHOLE], whole_TO[:n])]


def inputs(columns: int) -> Tensor:
    """Draw `[16384, I]` in BF16."""
    return torch.randn(max(ROWS), columns, device="cuda", dtype=torch.bfloat16)


def measure(rows: int, columns: int) -> dict[str, list[int]]:
    """Compare one weight's products, in BF16 and FP8."""
    torch.manual_seed(0)
    x_TI = inputs(columns)
    bf16_OI = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02
    weight = Weight(bf16_OI, *quantize_blocks(bf16_OI))
    codes = te_quantize(x_TI)

    def first(number: int) -> Fp8Groups:
        return Fp8Groups(*(part[:number].contiguous() for part in codes))

    engine = vllm_gemm(first(WHOLE), weight)
    return {
        "bf16": unequal(lambda n: vllm_gemm(x_TI[:n], weight), vllm_gemm(x_TI[:WHOLE], weight)),
        "engine": unequal(lambda n: vllm_gemm(first(n), weight), engine),
        "trainer": unequal(lambda n: te_gemm(first(n), weight), engine),
    }


def head(rows: int, columns: int) -> list[int]:
    """Compare one head's products in BF16."""
    torch.manual_seed(0)
    x_TI = inputs(columns)
    weight_OI = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) * 0.02
    whole_TO = torch.nn.functional.linear(x_TI[:WHOLE], weight_OI)
    return unequal(lambda n: torch.nn.functional.linear(x_TI[:n], weight_OI), whole_TO)


def main() -> None:
    """Measure every weight, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    record.add_options(parser)
    options = parser.parse_args()
    record.need("vllm", "transformer_engine")
    made: dict[str, dict[str, object]] = {"heads": {}, "linears": {}}
    for name, sizes in LINEARS.items():
        for o, i in sizes:
            made["linears"][f"{name}, {o} x {i}"] = measure(o, i)
            record.keep(options.out, options.commit, rows=ROWS, **made)
    made["heads"] = {name: head(*size) for name, size in HEADS.items()}
    record.keep(options.out, options.commit, rows=ROWS, **made)


if __name__ == "__main__":
    main()
