"""What the benchmark of NeMo RL's worker compares."""

import pytest

from benchmarks.speed.train_worker import apart


def test_the_libraries_are_as_far_apart_as_their_logprobs_and_all_gradients_together():
    torch = pytest.importorskip("torch")
    held = [torch.zeros(2, 2), torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    found = [torch.tensor([[0.0, 0.1], [0.0, -0.3]]), torch.tensor([3.0, 0.6]), torch.tensor([4.0])]
    said = apart(held, found)
    assert said["logprob_mean"] == pytest.approx(0.1)
    assert said["logprob_largest"] == pytest.approx(0.3)
    assert said["gradient_share"] == pytest.approx(0.6 / 5.0)
    assert set(apart(held, held).values()) == {0.0}
