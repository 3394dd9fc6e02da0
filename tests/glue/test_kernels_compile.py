"""Every Triton kernel compiles for Hopper, and digests as torch does; neither takes a GPU.

Triton makes a constant of every number that is 1, and trusts aligned addresses; so do some cases.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton comes with a CUDA build of torch")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fp8_nemo.glue import kernels  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
ADDRESSES = {
    "values": ["weight", "x", "q", "k", "v", "result", "query", "key", "value"],
    "fp8e4nv": ["fp8", "a", "b"],
    "fp32": ["scale_inv", "a_scale", "b_scale", "exponent", "v_scale", "output"],
    "i64": ["table", "sums"],
    "i32": ["amax"],
    "i1": ["nonfinite", "keep", "mask"],
}
NUMBERS = {"largest": "fp32", "tiny": "fp32", "block": "i64"}
CASES = [
    ("_quantize_one", "bf16", {"POW2": False, "EVEN": True}),
    ("_quantize_one", "bf16", {"POW2": True, "EVEN": False}),
    ("_quantize_listed", "bf16", {"POW2": False, "EVEN": True}),
    ("_quantize_listed", "bf16", {"POW2": True, "EVEN": False}),
    ("_quantize_listed", "bf16", {"POW2": False, "EVEN": True, "N": 1}),
    ("_quantize_groups", "bf16", {"ROWS": kernels.GROUPS_AT_ONCE, "POW2": False}),
    ("_quantize_groups", "fp32", {"ROWS": kernels.GROUPS_AT_ONCE, "POW2": True}),
    ("_digest", "bf16", {"EVEN": True}),
    ("_digest", "bf16", {"EVEN": True, "N": 1}),
    ("_digest", "bf16", {"EVEN": False}),
    ("_amax_rows", "bf16", {"ROWS": kernels.ROWS_AT_ONCE}),
]


def type_of(name: str, values: str) -> str:
    """Triton's type of an argument by its name, values being BF16, FP32 or FP8."""
    for kind, names in ADDRESSES.items():
        if name in names:
            return "*" + (values if kind == "values" else kind)
    return NUMBERS.get(name, "i32")


def assert_it_compiles(kernel, values, constants, warps):
    """Of any module of kernels: those of the local engine are compiled in tests/local."""
    named = list(enumerate(kernel.arg_names))
    signature = {n: "constexpr" if n in constants else type_of(n, values) for _, n in named}
    constexprs = {(number,): constants[n] for number, n in named if n in constants}
    aligned = {(number,): [["tt.divisibility", 16]] for number, n in named if "*" in signature[n]}
    source = ASTSource(kernel, signature, constexprs=constexprs, attrs=aligned)
    found = triton.compile(source, target=HOPPER, options={"num_warps": warps})
    assert ".target sm_90" in found.asm["ptx"] and found.asm["cubin"]


def launched(module):
    return set(re.findall(r"(\w+)\[\(", Path(module.__file__).read_text()))


@pytest.mark.parametrize(("name", "values", "constants"), CASES)
def test_a_kernel_compiles_for_hopper(name, values, constants):
    assert_it_compiles(getattr(kernels, name), values, constants, kernels.WARPS)


def test_every_kernel_that_is_launched_is_compiled_here():
    assert launched(kernels) == {name for name, *_ in CASES}


def test_digests_by_the_kernels_are_those_of_torch_to_the_bit():
    script = Path(__file__).with_name("interpreted_kernels.py")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
