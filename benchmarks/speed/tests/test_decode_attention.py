"""benchmarks.speed.decode_attention judges kernels by a reference, which is checked here."""

import pytest

torch = pytest.importorskip("torch")

from benchmarks.speed import decode_attention as bench  # noqa: E402
from benchmarks.speed.rollout_engine import Point  # noqa: E402


@pytest.mark.parametrize("way", [bench.Way("FA3", "bf16", 16, 32), bench.Way("XQA", "fp8", 32)])
@pytest.mark.parametrize("tokens", [64, 50])
def test_the_reference_is_attention_over_the_pages_of_each_sequence(way, tokens):
    given = bench.inputs(Point(3, tokens), 4, way, "cpu")
    cache = given.caches[0]
    assert cache.shape[2:] == (way.page, 4, bench.HEAD_DIM) and len(given.caches) > 1
    found = bench.reference(given, cache)
    for sequence in range(3):
        rows = [cache[page].float() * given.scale for page in given.table[sequence].tolist()]
        keys, values = torch.cat(rows, 1)[:, :tokens].transpose(1, 2)
        query = given.query[sequence].float().view(4, 8, bench.HEAD_DIM)
        wanted = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
        assert torch.allclose(found[sequence], wanted.flatten(0, 1), rtol=1e-4, atol=1e-6)
        assert bench.distance(found[sequence], 2 * wanted.flatten(0, 1)) == pytest.approx(0.5)


def test_each_way_has_a_name_that_selects_it_and_none_other():
    assert len({way.name for way in bench.WAYS}) == len(bench.WAYS)
    assert bench.selected("") == bench.WAYS
    assert bench.selected("XQA-fp8-16-frozen,FA3-fp8-16-32") == [
        bench.Way("XQA", "fp8", 16, live=False),
        bench.Way("FA3", "fp8", 16, 32),
    ]
    with pytest.raises(ValueError, match="XQA-fp4: no way; there are FA3-bf16-16-32"):
        bench.selected("XQA-fp4")


def test_a_gain_is_over_the_shipped_kernel_of_bf16_at_the_same_point():
    def row(way: str, batch: int, us: float) -> dict:
        return {"way": way, "batch": batch, "tokens": 1024, "kv_heads": 8,
                "us": {"median": us}, "tb_s": 1.0, "error": 0.0}  # fmt: skip

    rows = [row("FA3-bf16-16-32", 8, 30.0), row("XQA-fp8-16", 8, 20.0), row("XQA-fp8-16", 64, 1.0)]
    assert [each["times_bf16"] for each in bench.ratios(rows)] == [1.0, 1.5, None]
