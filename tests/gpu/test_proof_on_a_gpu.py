"""On a CUDA device: digests to the bit of a CPU's, one launch, and no change that is missed."""

import random

import pytest
import torch

from fp8_nemo.glue.destination import Destination, Part
from fp8_nemo.glue.digest import digests_of, placed
from fp8_nemo.glue.ledger import Ledger
from fp8_nemo.glue.refit import encode, refit_stream
from fp8_nemo.glue.wire import RefitError, named_shapes, wire_specs
from fp8_nemo.recipe.options.model import Shape
from fp8_nemo.recipe.options.precision import Precision

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32]
SHAPE = Shape(layers=2, hidden=512, ffn=1024, heads=4, kv_heads=2, head_dim=128, vocab=1000)
FP8 = Precision(rollout_linear="fp8", rollout_kv="bf16")
Q, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"


def noise(*shape, dtype=torch.uint8, seed=0):
    draw = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), generator=draw).to(torch.uint8).view(dtype).view(shape)


def test_digests_of_every_layout_are_those_of_a_cpu_and_are_not_waited_for():
    cpu, gpu = [], []

    def put(tensor, of_wire=()):
        """A whole tensor, or a part of it, as it lies on either side."""
        there = tensor.cuda()
        for x, parts in ((tensor, cpu), (there, gpu)):
            parts.append(placed(x[of_wire or ...], x.shape, of_wire))

    for dtype in DTYPES:
        for shape in (
            (1,),
            (5,),
            (4096,),
            (3, 4),
            (130, 66),
            (40, 600),
            (70, 1),
            (0, 8),
            (1000, 512),
        ):
            put(noise(*shape, dtype=dtype))
        for rows, columns in ((slice(0, 96), slice(32, 64)), (slice(33, 96), slice(0, 128))):
            put(noise(96, 128, dtype=dtype), (rows, columns))
        across = noise(36, 44, dtype=dtype)
        cpu.append(placed(across.T, across.T.shape))
        gpu.append(placed(across.cuda().T, across.T.shape))
    shifted = noise(1 + 64 * 32)
    cpu.append(placed(shifted[1:].view(64, 32), (64, 32)))
    gpu.append(placed(shifted.cuda()[1:].view(64, 32), (64, 32)))
    digests = digests_of(gpu)
    assert torch.equal(digests().cpu(), digests_of(cpu)())
    torch.cuda.set_sync_debug_mode("error")
    try:
        sums_N = digests()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(sums_N.cpu(), digests_of(cpu)())


def test_a_stream_carries_on_a_gpu_what_it_carries_on_a_cpu():
    draw = torch.Generator().manual_seed(0)
    named = {n: torch.randn(s, generator=draw).bfloat16() for n, s in named_shapes(SHAPE).items()}
    group = list(named.items())
    cpu = encode(group, FP8, num_layers=2, digests=True)
    gpu = encode([(n, x.cuda()) for n, x in group], FP8, num_layers=2, digests=True)
    assert [name for name, _ in cpu.tensors] == [name for name, _ in gpu.tensors]
    assert torch.equal(cpu.digests_T, gpu.digests_T.cpu())
    streams = [
        dict(refit_stream(((n, x.to(device)) for n, x in group), FP8, None, num_layers=2, number=3))
        for device in ("cpu", "cuda")
    ]
    assert all(torch.equal(x.view(torch.uint8), streams[1][n].view(torch.uint8).cpu())
               for n, x in streams[0].items())  # fmt: skip


@pytest.mark.parametrize("fault", [None, "stale", "bit", "half", "other half", "manifest"])
def test_a_refit_of_a_rank_of_two_on_a_gpu_is_proven_or_named(fault):
    """Columns of `down_proj` and rows of the rest are here, as of a tensor-parallel rank."""
    named = {n: torch.randn(s, device="cuda").bfloat16() for n, s in named_shapes(SHAPE).items()}
    specs = wire_specs(named_shapes(SHAPE), FP8, 2)
    parts = {}
    for name, spec in specs.items():
        side = spec.shape[-1] if "down_proj" in name else spec.shape[0]
        half = slice(side // 2, side)
        cut = (half,) if len(spec.shape) == 1 else (half, slice(0, spec.shape[1]))
        cut = (slice(0, spec.shape[0]), half) if "down_proj" in name else cut
        shape = [each.stop - each.start for each in cut]
        parts[name] = Part(torch.zeros(shape, device="cuda").to(getattr(torch, spec.dtype)), cut)
    ledger = Ledger(specs, Destination(parts, specs), number=1)
    for name, tensor in refit_stream(
        named.items(), FP8, None, num_layers=2, number=1 + (fault == "manifest")
    ):
        if not ledger.receive(name, tensor):
            continue
        ledger.arrived([(name, tensor)])
        part, of_wire = parts[name]
        if name != Q or fault in (None, "manifest"):
            part.copy_(tensor[of_wire])
        elif fault == "bit":
            part.copy_(tensor[of_wire])
            part.view(torch.uint8)[3, 7] ^= 1
        elif fault == "half":
            part[: len(part) // 2].copy_(tensor[of_wire][: len(part) // 2])
        elif fault == "other half":
            part.copy_(tensor[: len(part)])
        tensor.view(torch.uint8).zero_()  # the wire uses its buffer again
    if fault is None:
        assert ledger.close().equal_digests == len(specs)
        return
    with pytest.raises(RefitError) as error:
        ledger.close()
    [problem] = error.value.problems
    assert problem.startswith(
        "fp8_nemo.manifest" if fault == "manifest" else f"{Q}: the engine's bytes"
    )


@pytest.mark.parametrize("how", ["byte", "swap", "words", "shift"])
def test_of_25_000_random_changes_of_8b_sized_tensors_none_is_missed(how):
    """The lm_head of 8B in FP8: 525 million bytes. Each change is digested where it happened.

    A digest is a sum over words, so that of the rows that changed, before and after, tells whether
    the whole's would differ; every thousandth change is held against a digest of the whole.
    """
    draw, rows, columns = random.Random(how), 128256, 4096
    whole = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device="cuda")
    whole[: rows // 8] = 0
    raw, shape, missed = whole.view(-1), (rows, columns), []
    everything = digests_of([placed(whole, shape)])
    before_all = everything().item()
    tries = 25_000
    for start in range(0, tries, 250):
        before, after, expected = [], [], []
        for n in range(start, start + 250):
            at = draw.randrange(rows - 4)
            here = whole[at : at + 4]
            new = here.clone()
            flat = new.view(-1)
            one, two = draw.randrange(4 * columns - 8), draw.randrange(4 * columns - 8)
            if how == "byte":
                flat[one] ^= draw.randrange(1, 256)
            elif how == "swap":
                flat[[one, two]] = flat[[two, one]]
            elif how == "words":
                a, b = flat[one : one + 4].clone(), flat[two : two + 4].clone()
                flat[one : one + 4], flat[two : two + 4] = b, a
            else:
                low, high = sorted((one, two))
                flat[low:high] = flat[low:high].roll(draw.choice((1, 2, 4, 16, 128)))
            place = (slice(at, at + 4), slice(0, columns))
            before.append(placed(here, shape, place))
            after.append(placed(new, shape, place))
            expected.append((new != here).any())
            if n % 1000 == 0:
                kept = here.clone()
                here.copy_(new)
                assert (everything().item() != before_all) == bool(expected[-1])
                here.copy_(kept)
        differs = digests_of(before)() != digests_of(after)()
        missed.append((differs != torch.stack(expected)).sum())
    assert torch.stack(missed).sum().item() == 0
    assert everything().item() == before_all and raw.numel() == rows * columns


def test_digests_of_a_gigabyte_take_no_longer_than_reading_it_twice():
    tensor = torch.randint(0, 256, (2**30,), dtype=torch.uint8, device="cuda").view(2**15, 2**15)
    digests = digests_of([placed(tensor, tensor.shape)])

    def milliseconds(work):
        work()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        times = []
        for _ in range(10):
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        return min(times)

    spent, summed = milliseconds(digests), milliseconds(lambda: tensor.view(torch.int32).sum())
    print(
        f"digest {spent:.3f} ms, {2**30 / spent / 1e9:.2f} TB/s; sum of its words {summed:.3f} ms"
    )
    assert spent < 2 * summed
