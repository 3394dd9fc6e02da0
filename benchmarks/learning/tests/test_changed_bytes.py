"""The bench of changed bytes: a share for each update."""

from pathlib import Path

from benchmarks.learning import changed_bytes


def test_each_update_has_the_share_that_its_refit_changed(tmp_path: Path) -> None:
    bf16, nvfp4 = (
        changed_bytes.row_of(precision, 1e-4, 1, tmp_path, steps=4)
        for precision in ("bf16", "nvfp4-w4a16")
    )
    assert len(bf16["shares"]) == len(nvfp4["shares"]) == 4
    assert 0 < nvfp4["median"] < bf16["median"] < 1
