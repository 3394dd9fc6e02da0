"""What the benchmark of NeMo RL's worker counts."""

import pytest

from benchmarks.speed.train_worker import busy_seconds


def test_busy_seconds_count_overlaps_once() -> None:
    """Kernels of two streams that run at once keep the GPU busy once; gaps do not count."""
    spans = [(40e6, 50e6), (0.0, 10e6), (5e6, 12e6), (6e6, 7e6)]
    assert busy_seconds(spans) == pytest.approx(12 + 10)


def test_nothing_ran() -> None:
    """A profile without kernels is no time."""
    assert busy_seconds([]) == 0
