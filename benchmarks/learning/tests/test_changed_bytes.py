"""The bench of changed bytes: a share for each refit after the first."""

from pathlib import Path

from benchmarks.learning import changed_bytes


def test_each_refit_after_the_first_has_a_share(tmp_path: Path) -> None:
    bf16, nvfp4 = (
        changed_bytes.row_of(precision, 1e-4, 1, tmp_path, steps=4)
        for precision in ("bf16", "nvfp4-w4a16")
    )
    assert len(bf16["shares"]) == len(nvfp4["shares"]) == 3
    assert 0 < nvfp4["median"] < bf16["median"] < 1
