"""Which decode steps go to XQA, and what it is given; that it attends right is ring 3's."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from fp8_nemo.nemo.decode.attention import by_xqa, is_decode, prepare  # noqa: E402

FP8 = torch.float8_e4m3fn


def call(**changes):
    """A decode step of three sequences in FP8, as vLLM's FlashAttention backend calls it."""
    T, A, K, D, page = 3, 8, 2, 128, 16
    options = {
        "q": torch.zeros(T, A, D, dtype=FP8), "k": torch.zeros(9, page, K, D, dtype=FP8),
        "v": torch.zeros(9, page, K, D, dtype=FP8), "out": torch.zeros(T, A, D).bfloat16(),
        "cu_seqlens_q": torch.arange(T + 1), "max_seqlen_q": 1, "seqused_k": torch.ones(T),
        "max_seqlen_k": 48, "softmax_scale": 0.1, "causal": True, "alibi_slopes": None,
        "window_size": [-1, -1], "block_table": torch.zeros(T, 3), "softcap": 0.0,
        "scheduler_metadata": None, "fa_version": 3, "dynamic_causal": None, "num_splits": 32,
        "s_aux": None, "mask_mod": None, "aux_tensors": None,
        **{f"{name}_descale": torch.tensor(0.5).expand(T, K) for name in "qkv"},
    }  # fmt: skip
    return options | changes


def test_a_decode_step_over_an_fp8_cache_is_xqas():
    assert is_decode(**call())
    assert is_decode(**call(window_size=None))
    one = {f"{name}_descale": torch.ones(1).expand(3, 1) for name in "qkv"}
    assert is_decode(**call(k=torch.zeros(9, 16, 1, 128, dtype=FP8), **one))


@pytest.mark.parametrize(
    "changes",
    [
        {"max_seqlen_q": 2},
        {"q": torch.zeros(4, 8, 128, dtype=FP8)},
        {"q": torch.zeros(3, 8, 128)},
        {"k": torch.zeros(9, 16, 2, 128)},
        {"k": torch.zeros(9, 24, 2, 128, dtype=FP8)},
        {"k": torch.zeros(9, 16, 2, 96, dtype=FP8)},
        {"q": torch.zeros(3, 18, 128, dtype=FP8)},
        {"block_table": None},
        {"out": None},
        {"out": torch.zeros(3, 8, 128).half()},
        {"window_size": [128, 0]},
        {"softcap": 30.0},
        {"s_aux": torch.ones(8)},
        {"alibi_slopes": torch.ones(8)},
        {"mask_mod": print},
        {"return_softmax_lse": True},
        {"k_descale": None},
        {"v_descale": torch.ones(2).expand(3, 2)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_xqa_cannot_do_stays_flash_attentions(changes):
    given = call(**changes)
    assert not is_decode(**given)
    assert by_xqa(lambda **options: options)(**given) == given


def test_without_a_hopper_gpu_and_in_cascades_flash_attention_is_called_as_before():
    assert by_xqa(lambda **options: "flash")(**call()) == "flash"
    assert by_xqa(lambda *given, **options: given)(1, 2, **call()) == (1, 2)


def test_codes_come_back_as_they_were_and_vs_scale_is_taken_out_of_qks():
    codes = torch.arange(256, dtype=torch.uint8)[:240].view(FP8).view(3, 10, 8)
    codes = torch.where(codes.float().isfinite(), codes.float(), 0.0).to(FP8)
    q_scale, k_scale, v_scale = (torch.tensor([each]) for each in (0.5, 3.0, 0.25))
    lengths = torch.tensor([7, 0, 1], dtype=torch.int32)
    given = codes, q_scale, k_scale, v_scale, lengths
    query, scale, at_least, counters = prepare(*given, 2, 10.0)
    assert torch.equal(query.to(FP8).view(torch.uint8), codes.view(torch.uint8))
    assert scale.tolist() == [60.0] and at_least.tolist() == [7, 1, 1]
    assert counters.tolist() == [0] * 6 and counters.dtype == torch.int32


def test_the_kernel_prepares_what_torch_does_under_the_interpreter():
    pytest.importorskip("triton", reason="Triton comes with a CUDA build of torch")
    script = Path(__file__).with_name("interpreted_decode_kernels.py")
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
