"""The way of weights and optimizer to the host and back."""

import mmap
from types import SimpleNamespace

import pytest
import torch

from fp8_nemo.nemo.host_memory import (
    ALIGNMENT,
    HostState,
    page_locked,
    places,
    prepare_buffers,
)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_tensors_lie_one_after_another_on_aligned_places():
    assert places([]) == ([], 0)
    assert places([1, ALIGNMENT, ALIGNMENT + 1, 0]) == (
        [0, ALIGNMENT, 2 * ALIGNMENT, 4 * ALIGNMENT],
        4 * ALIGNMENT,
    )


def test_what_is_on_the_host_stays_as_it_is():
    step = torch.ones(3)
    states = [{"step": step, "lr": 0.1}]
    HostState().to_host(states)
    assert states == [{"step": step, "lr": 0.1}] and states[0]["step"] is step


def of_adam(*sizes):
    """State of parameters with odd sizes and types, as precision-aware Adam has it."""
    types = {"exp_avg": torch.float32, "exp_avg_sq": torch.bfloat16, "master_param": torch.int16}
    return [
        {name: (torch.randn(size, device="cuda") * 100).to(each) for name, each in types.items()}
        | {"step": n}
        for n, size in enumerate(sizes)
    ]


def bytes_of(states):
    return [
        value.cpu().view(-1).view(torch.uint8).tolist() if torch.is_tensor(value) else value
        for state in states
        for value in state.values()
    ]


@pytest.mark.gpu
@needs_gpu
def test_state_comes_back_from_the_host_byte_for_byte_and_leaves_the_gpu_meanwhile():
    states, host = of_adam(7, 1000, 1, 4097), HostState()
    for _ in range(3):
        for state in states:  # as training changes it
            state["exp_avg"].add_(1)
        before = bytes_of(states)
        host.to_host(states)
        tensors = [value for state in states for value in state.values() if torch.is_tensor(value)]
        assert all(not each.is_cuda and each.is_pinned() for each in tensors)
        assert bytes_of(states) == before
        host.to_host(states)  # NeMo RL calls it twice in a refit
        assert bytes_of(states) == before
        host.to_device(states)
        moved = [value for state in states for value in state.values() if torch.is_tensor(value)]
        assert all(each.is_cuda for each in moved)
        assert bytes_of(states) == before


@pytest.mark.gpu
@needs_gpu
def test_a_state_that_grew_while_some_of_it_was_on_the_host_is_kept_whole():
    states, host = of_adam(64), HostState()
    host.to_host(states)
    states += of_adam(100_000)
    before = bytes_of(states)
    host.to_host(states)
    assert bytes_of(states) == before
    host.to_device(states)
    assert bytes_of(states) == before


def test_a_buffer_gets_one_place_of_its_size_where_the_system_locks_that_much(monkeypatch):
    asked, answers = [], [0, 2]

    class Runtime:
        @staticmethod
        def cudaHostRegister(at, size, flags):
            asked.append((at % mmap.PAGESIZE, size))
            return answers.pop(0)

        cudaHostUnregister = print

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime)
    kept = torch.empty(3)
    weights = torch.zeros(5, dtype=torch.bfloat16)
    buffers = [SimpleNamespace(param_data=None, param_data_cpu=None),
               SimpleNamespace(param_data=weights, param_data_cpu=kept),
               SimpleNamespace(param_data=weights, param_data_cpu=None),
               SimpleNamespace(param_data=weights, param_data_cpu=None)]  # fmt: skip
    prepare_buffers(buffers)
    _, old, new, refused = (each.param_data_cpu for each in buffers)
    assert buffers[0].param_data_cpu is None and old is kept and refused is None
    assert new.shape == weights.shape and new.dtype == weights.dtype
    assert asked == [(0, 10), (0, 10)]


def test_memory_is_unregistered_before_its_address_is_mapped_again(monkeypatch):
    registered = set()

    class Runtime:
        @staticmethod
        def cudaHostRegister(at, size, flags):
            if at in registered:
                return 712  # cudaErrorHostMemoryAlreadyRegistered
            registered.add(at)
            return 0

        cudaHostUnregister = registered.remove

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime)
    addresses = {page_locked(4096).data_ptr() for _ in range(20)}
    assert len(addresses) < 20 and not registered
    view = page_locked(4096)[:10]
    assert registered == {view.data_ptr()}


@pytest.mark.gpu
@needs_gpu
def test_weights_of_neighbouring_buffers_come_back_byte_for_byte_from_page_locked_places():
    made = [torch.randn(size, device="cuda").bfloat16() for size in (3, 5, 100_001)]
    buffers = [SimpleNamespace(param_data=each, param_data_cpu=None) for each in made]
    prepare_buffers(buffers)
    for each in buffers:
        assert each.param_data_cpu.is_pinned()
        each.param_data_cpu.copy_(each.param_data, non_blocking=True)
    torch.cuda.synchronize()
    assert all(torch.equal(each.param_data_cpu, each.param_data.cpu()) for each in buffers)
