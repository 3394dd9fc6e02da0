"""The local engine's Triton kernels compile for Hopper, as those of the glue (tests/glue)."""

import pytest

pytest.importorskip("triton", reason="Triton comes with a CUDA build of torch")

from fp8_nemo.local.modules import kernels
from tests.glue.test_kernels_compile import assert_it_compiles, launched

CASES = [
    ("_product", "bf16", {"PER_SCALE": 1, "SIDE": kernels.SIDE, "a_column": 1, "b_column": 1}),
    ("_product", "bf16", {"PER_SCALE": 128, "SIDE": kernels.SIDE, "a_column": 1, "b_row": 1}),
    ("_product", "bf16", {"PER_SCALE": 1, "SIDE": kernels.SIDE, "T": 1, "O": 1, "K": 1}),
    ("_product", "fp32", {"PER_SCALE": 128, "SIDE": kernels.SIDE}),
    ("_attend", "bf16", {"D": 64, "TILE": 128, "HELD": 128}),
    ("_attend", "fp8e4nv", {"D": 128, "TILE": 96, "HELD": 128}),
    ("_attend", "fp8e4nv", {"D": 64, "TILE": 128, "HELD": 128, "G": 1, "S": 1, "mask_place": 1}),
]


@pytest.mark.parametrize(("name", "values", "constants"), CASES)
def test_a_kernel_compiles_for_hopper(name, values, constants):
    assert_it_compiles(getattr(kernels, name), values, constants, kernels.WARPS)


def test_every_kernel_that_is_launched_is_compiled_here():
    assert launched(kernels) == {name for name, *_ in CASES}
