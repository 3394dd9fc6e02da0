"""The engine's aligned operations: the trainer's bits, and that vLLM takes them."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.numerics import dialects
from fp8_nemo.nemo.aligned import attention, ops, rows
from fp8_nemo.nemo_config.own.alignment import HIDDEN_SIZES, MICRO_BATCH_ROWS
from fp8_nemo.recipe.model_dir import SHIPPED
from tests.nemo.test_glue_with_a_checkout import free_port, imports, libcuda, on_a_cpu  # noqa: F401

HERE = Path(__file__).parent
LLAMA = SHIPPED / "tiny-llama"
HOPPER = ("cuda", 90, 32)
kernels_run = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton comes with a CUDA build of torch"
)


def numbers(*shape: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return (torch.randn(shape, generator=draw) * 3).bfloat16()


def inverse_frequencies(head: int, theta: float) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, head, 2, dtype=torch.float32) / head)


@pytest.mark.parametrize(("head", "heads", "kv_heads"), [(64, 4, 2), (128, 3, 3)])
def test_rope_of_any_positions_gives_the_trainers_bits(
    head: int, heads: int, kv_heads: int
) -> None:
    S, theta = 40, 5e5
    qkv = numbers(2 * S, head * (heads + 2 * kv_heads))
    q, k, _ = qkv.split([head * heads, head * kv_heads, head * kv_heads], dim=-1)
    per_head = [each.unflatten(-1, (-1, head)) for each in (q, k)]
    wanted = [each.flatten(-2) for each in dialects.TRAINER["rope"](*per_head, S, theta)]
    order = torch.randperm(2 * S, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(S).repeat(2)[order]
    table = ops.cos_sin_table(inverse_frequencies(head, theta), 3 * S)
    made = ops.rope(positions, q[order], k[order], table, head)
    assert all(torch.equal(a, b[order]) for a, b in zip(made, wanted, strict=True))
    engine = dialects.ENGINES["eager"]["rope"](*per_head, S, theta)
    assert not torch.equal(made[0], engine[0].flatten(-2)[order])


@pytest.mark.parametrize(
    ("by_column", "padded", "strides"),
    [(False, False, (3, 1)), (True, False, (1, 5)), (True, True, (1, 8))],
)
def test_the_quantizer_gives_the_trainers_bits_in_every_layout(
    by_column: bool, padded: bool, strides: tuple[int, int]
) -> None:
    x = numbers(5, 384)
    wanted = dialects.TRAINER["quantize"](x)
    codes, scales = ops.quantize(x, by_column, padded)
    assert torch.equal(codes.view(torch.uint8), wanted.fp8_TI.view(torch.uint8))
    assert torch.equal(scales, wanted.scale_inv_TQ)
    assert scales.stride() == strides


def test_the_norm_rounds_where_the_trainer_does() -> None:
    assert tuple(ops.NORM_WARPS) == HIDDEN_SIZES
    x, stream, weight = numbers(64, 512), numbers(2, 64, 512)[1], numbers(2, 512)[1]
    for before in (None, stream):
        made, added = ops.norm(x, before, weight, 1e-5)
        first = (None, x) if before is None else (x, before)
        wanted, held = dialects.TRAINER["norm"](*first, weight, 1e-5, False)
        assert torch.equal(made, wanted)
        assert torch.equal(added, held)
    unrounded, _ = dialects.ENGINES["graphs"]["norm"](x, stream, weight, 1e-5, True)
    assert not torch.equal(made, unrounded)


def test_silu_gives_the_trainers_bits() -> None:
    gate_up = numbers(64, 512)
    assert torch.equal(ops.silu(gate_up), dialects.TRAINER["silu"](gate_up))
    assert not torch.equal(ops.silu(gate_up), dialects.ENGINES["eager"]["silu"](gate_up))


@kernels_run
def test_the_kernels_give_torchs_bits() -> None:
    script = HERE / "interpreted_aligned_kernels.py"
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]


@kernels_run
def test_rope_for_hopper_has_the_trainers_two_instructions() -> None:
    assert instructions("_rope", {
        "positions": "*i64", "query": "*bf16", "key": "*bf16", "turned_query": "*bf16",
        "turned_key": "*bf16", "cos_sin": "*fp32",
    }, {"HALF": 64}, "mul.f32", "fma.rn.f32", "add.f32") == [4, 4, 0]  # fmt: skip


@kernels_run
def test_silu_and_the_quantizer_compile_for_hopper_with_exact_divisions() -> None:
    values = {"gate_up": "*bf16", "result": "*bf16"}
    assert instructions("_silu", values, {"COLUMNS": 1024}, "div.full.f32", "fma.rn.f32")[1] == 0
    values = {"x": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32", "largest": "fp32"}
    found = instructions("_quantize", values, {"ROWS": 8}, "div.rn.f32", "div.full", "fma.rn.f32")
    assert found[0] > 0
    assert found[1:] == [0, 0]


@kernels_run
@pytest.mark.parametrize(("hidden", "joins"), [(768, 0), (4096, 5)])
def test_the_norm_for_hopper_fuses_what_the_trainer_fuses(hidden: int, joins: int) -> None:
    """A square each, the mean's, and five for two rounds of Chan's formula.

    What a compiler would fuse beside these is `x - total * share`, the mean taken away.
    """
    names = ("x", "stream", "weight", "added", "normed")
    types = dict.fromkeys(names, "*bf16") | {"eps": "fp32"}
    warps = ops.NORM_WARPS[hidden]
    constants = {"ADDS": 1, "WIDTH": hidden, "WARPS": warps}
    found = instructions("_norm", types, constants, "fma.rn.f32", num_warps=warps,
                         enable_fp_fusion=False)  # fmt: skip
    assert found == [hidden // (32 * warps) + 1 + joins]


def instructions(
    name: str, types: dict[str, str], constants: dict[str, int], *of: str, **options: Any
) -> list[int]:
    """How often instructions stand in a kernel's PTX for Hopper."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fp8_nemo.nemo.aligned import kernels

    kernel = getattr(kernels, name)
    signature = {
        n: "constexpr" if n in constants else types.get(n, "i32") for n in kernel.arg_names
    }
    constexprs = {(kernel.arg_names.index(n),): value for n, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=constexprs)
    ptx = triton.compile(source, target=GPUTarget(*HOPPER), options=options).asm["ptx"]
    return [ptx.count(each) for each in of]


@imports
def test_our_plugin_aligns_the_engine_where_asked_and_vllm_gets_the_trainers_bits(
    libcuda: Path,  # noqa: F811
) -> None:
    script = str(HERE / "vllm_builds_aligned.py")
    call = [sys.executable, script, str(LLAMA), str(free_port())]
    environment = on_a_cpu(libcuda)
    run = subprocess.run(call, capture_output=True, text=True, timeout=400, env=environment)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.strip().splitlines()[-1])
    stock = ["RotaryEmbedding", "SiluAndMul", "QuantFP8", "QuantFP8"]
    ours = ["AlignedRope", "AlignedSilu", *["AlignedQuantizer"] * 2]
    assert found["before"] == found["none"] == [*stock, "RMSNorm"]
    assert found["cheap"] == [*ours, "RMSNorm"]
    assert found["exact"] == [*ours, "AlignedNorm"]
    assert found["equal"] == {"rope": True, "silu": True, "codes": True, "scales": True,
                              "strides": [1, 32]}  # fmt: skip
    assert found["norm"] == [True, True, True]
    assert found["strays"] == [["RMSNorm"], []]
    assert found["splits"] == 1


def test_the_trainer_finds_the_engines_kernels_beside_its_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    own = tmp_path / "nemo_rl.models.policy.Worker"
    own.mkdir()
    assert attention.kernels_of(own) is None
    monkeypatch.setattr(sys, "prefix", str(own))
    with pytest.raises(RuntimeError, match=r"no vllm/vllm_flash_attn .* choose precision\.align"):
        attention.engine_attention.__wrapped__()
    engine = tmp_path / "fp8_nemo.nemo.Worker" / "lib" / "python3.12" / "site-packages"
    (engine / "vllm" / "vllm_flash_attn").mkdir(parents=True)
    assert attention.kernels_of(own) == engine / "vllm" / "vllm_flash_attn"


class Dot(torch.nn.Module):
    """Megatron's attention, as far as it is replaced."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(attention_dropout=0.0, **config)


def test_every_attention_of_a_model_takes_packed_sequences_with_their_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("megatron.core.extensions.transformer_engine")
    module.TEDotProductAttention = Dot  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    model = torch.nn.Sequential(Dot(), torch.nn.Linear(1, 1), Dot())
    attention.attend_as_the_engine(model)
    given: list[Any] = []
    monkeypatch.setattr(
        attention.EngineAttention, "apply", lambda *them: (given.append(them), them[0])[1]
    )
    q, starts = torch.zeros(6, 2, 4), torch.tensor([0, 4, 6])
    packed = SimpleNamespace(cu_seqlens_q_padded=starts, cu_seqlens_q=None, max_seqlen_q=4)
    for each in (model[0], model[2]):
        assert each(q, q, q, None, "causal", packed_seq_params=packed).shape == (6, 8)
    assert [them[3:] for them in given] == [(starts, 4)] * 2
    with pytest.raises(RuntimeError, match="no TEDotProductAttention in the model"):
        attention.attend_as_the_engine(torch.nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match=r"the engine has no softmax_scale=0\.5"):
        attention.attend_as_the_engine(Dot(softmax_scale=0.5))


@imports
def test_the_engines_kernels_load_without_importing_vllm(libcuda: Path, tmp_path: Path) -> None:  # noqa: F811
    there = tmp_path / "engine" / "lib" / "python3.12" / "site-packages"
    there.mkdir(parents=True)
    (there / "vllm").symlink_to(Path(importlib.util.find_spec("vllm").origin).parent)  # type: ignore
    script = f"""
import sys
import torch
from fp8_nemo.nemo.aligned import attention
attention.find_spec, sys.prefix = lambda name: None, {str(tmp_path / "policy")!r}
call = attention.engine_attention()
assert call is attention.engine_attention() and call.__name__ == "flash_attn_varlen_func"
assert torch.ops._vllm_fa3_C.fwd and "vllm" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                         timeout=200, env=on_a_cpu(libcuda))  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]


@imports
@pytest.mark.parametrize("each", [1, 16])  # a plan's, and one that pads each sequence
def test_a_lone_short_answer_gets_enough_rows_for_the_engines_bits(
    libcuda: Path,  # noqa: F811
    each: int,
) -> None:
    from nemo_rl.models.megatron import data

    lengths = torch.tensor([144, 30])
    ids = torch.arange(2 * 200).view(2, 200)
    plain = data._pack_sequences_for_megatron(ids, lengths, each, 128)
    assert plain[0].shape == (1, 256)
    made = rows.filled(data._pack_sequences_for_megatron, 1000, 1000)(ids, lengths, each, 128, None)
    assert made[0].shape == (1, 896)  # in whole 128s, not above what there is room for
    assert torch.equal(made[0][:, :174], plain[0][:, :174])
    assert made[3].tolist() == plain[3].tolist() == [0, 144, 174]
    assert made[4].tolist() == [0, 144, 896]
    assert made[2].max_seqlen_q == 752
    script = f"""
import torch
from nemo_rl.distributed.model_utils import from_parallel_logits_to_logprobs_packed_sequences
from nemo_rl.models.megatron import data
from fp8_nemo.nemo.aligned import rows
torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:{free_port()}",
                                     rank=0, world_size=1)
ids, lengths, table = torch.arange(400).view(2, 200), torch.tensor([144, 30]), torch.randn(400, 400)
found = []
for pack in (data._pack_sequences_for_megatron,
             rows.filled(data._pack_sequences_for_megatron, 1000, 1000)):
    packed, _, _, _, starts = pack(ids, lengths, {each}, 128, None)
    found.append(from_parallel_logits_to_logprobs_packed_sequences(
        table[packed], packed, starts, 200, 0, 400, torch.distributed.group.WORLD, True))
for row, length in enumerate((143, 29)):
    assert torch.equal(found[0][row, :length], found[1][row, :length])
    assert found[1][row, :length].all()
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True,
                         timeout=200, env=on_a_cpu(libcuda))  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]


def test_micro_batches_that_are_full_or_of_pipelines_stay_as_they_are() -> None:
    def pack(*given: Any, **ranks: int) -> Any:
        return given[2:], ranks

    call = rows.filled(pack, 300, 600)
    for lengths, to in (([200, 57], None), ([200, 56], 256), ([20], 512)):
        assert call(None, lengths, 16, 128, to, cp_rank=0) == ((16, 128, to), {"cp_rank": 0})
    assert call(None, [200, 40], 8, 128) == ((8, 128, 256), {})
    with torch.no_grad():
        assert call(None, [200, 57], 16, 128) == ((16, 128, 512), {})


def test_a_process_fills_each_pass_up_to_its_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("nemo_rl.models.megatron")
    pack = SimpleNamespace(_pack_sequences_for_megatron=lambda *given: given[4])
    module.data = pack  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    rows.fill_micro_batches({"train_mb_tokens": 2048, "logprob_mb_tokens": 8192})
    assert pack._pack_sequences_for_megatron(None, [5]) == 2048
    with torch.no_grad():
        assert pack._pack_sequences_for_megatron(None, [5]) == rows.ROWS == MICRO_BATCH_ROWS
