"""Q, K and V are seen where attention gets them, real tokens only, each sequence once."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fp8_nemo.glue.recalibrate import AmaxObserver, RecalibrateError, real_rows
from fp8_nemo.nemo.kv_scales import attentions, watched

PADDING = 1e6


class Inner(nn.Module):
    """As TransformerEngine's attention: a child whose name holds `core_attention` too."""

    def forward(self, query, key, value, packed_seq_params=None):
        return query


class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.flash_attention = Inner()

    def forward(self, query, key, value, mask=None, packed_seq_params=None):
        return self.flash_attention(1e9 * query, 1e9 * key, 1e9 * value)


class Attention(nn.Module):
    def __init__(self, layer_number):
        super().__init__()
        self.layer_number, self.core_attention = layer_number, Core()

    def forward(self, x, packed):
        factor = float(self.layer_number)
        return self.core_attention(
            factor * x, 2 * factor * x, -3 * factor * x, None, packed_seq_params=packed
        )


class Layer(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.self_attention = Attention(number)


class Model(nn.Module):
    def __init__(self, numbers=(1, 2)):
        super().__init__()
        self.layers = nn.ModuleList([Layer(n) for n in numbers])

    def forward(self, x, packed=None):
        for layer in self.layers:
            layer.self_attention(x, packed)


def packed(lengths, multiple, values):
    """Sequences in a row, each padded to a multiple with what must not be seen."""
    padded = [-(-n // multiple) * multiple for n in lengths]
    rows = []
    for length, whole, value in zip(lengths, padded, values, strict=True):
        rows += [value] * length + [PADDING] * (whole - length)
    starts = torch.tensor([0, *torch.tensor(padded).cumsum(0).tolist()], dtype=torch.int32)
    x = torch.tensor(rows)[:, None, None].expand(-1, 2, 4).contiguous()
    return x, SimpleNamespace(cu_seqlens_q=starts, cu_seqlens_q_padded=starts)


def ranges(observer):
    return observer.read()[0].tolist()


@pytest.mark.parametrize("multiple", [1, 4, 128])
def test_packed_micro_batches_are_seen_once_without_their_padding(multiple):
    observer = AmaxObserver(num_layers=2, history=1)
    model = Model()
    with watched(model, observer, torch.tensor([3, 5, 2, 4])):
        model(*packed([3, 5], multiple, [1.0, 2.0]))
        model(*packed([2, 4], multiple, [5.0, 0.5]))
    assert ranges(observer) == [[5.0, 10.0, 15.0], [10.0, 20.0, 30.0]]


def test_two_micro_batches_of_one_shape_have_their_own_padding():
    observer, model = AmaxObserver(num_layers=2, history=1), Model()
    with watched(model, observer, torch.tensor([1, 4])):
        model(*packed([1], 4, [1.0]))
        model(*packed([4], 4, [2.0]))
    assert ranges(observer)[0] == [2.0, 4.0, 6.0]


def test_unpacked_sequences_are_seen_as_far_as_each_goes():
    observer, model = AmaxObserver(num_layers=2, history=1), Model()
    x_TSHD = torch.full((6, 2, 2, 4), PADDING)
    x_TSHD[:3, 0], x_TSHD[:5, 1] = 1.0, 4.0
    with watched(model, observer, torch.tensor([3, 5])):
        model(x_TSHD)
    assert ranges(observer)[0] == [4.0, 8.0, 12.0]


def test_layers_count_globally_and_children_of_attention_are_not_attention():
    model = Model((5, 6))
    assert [layer for layer, _ in attentions(model)] == [4, 5]
    observer = AmaxObserver(num_layers=8, history=1)
    with watched(model, observer, torch.tensor([2])):
        model(*packed([2], 1, [1.0]))
    assert ranges(observer)[4:6] == [[5.0, 10.0, 15.0], [6.0, 12.0, 18.0]]
    assert not observer.read()[0, :4].any() and not observer.read()[0, 6:].any()


@pytest.mark.parametrize("lengths", [[3], [3, 5, 2]])
def test_a_batch_of_other_sequences_than_the_forwards_took_is_an_error(lengths):
    observer, model = AmaxObserver(num_layers=2, history=1), Model()
    with (
        pytest.raises(RecalibrateError, match=rf"2.* {len(lengths)}"),
        watched(model, observer, torch.tensor(lengths)),
    ):
        model(*packed([3, 5], 1, [1.0, 2.0]))


def test_no_hook_stays_behind_even_if_the_forward_fails():
    observer, model = AmaxObserver(num_layers=2, history=1), Model()
    with pytest.raises(TypeError), watched(model, observer, torch.tensor([1])):
        model(None)
    assert not any(core._forward_pre_hooks for _, core in attentions(model))


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[1], [8, 3, 16, 9], [5, 5, 5]])
def test_rows_of_every_context_parallel_rank_are_those_of_its_chunks(lengths, cp_size):
    multiple = 2 * cp_size
    padded = [-(-n // multiple) * multiple for n in lengths]
    starts = torch.tensor([0, *torch.tensor(padded).cumsum(0).tolist()], dtype=torch.int32)
    for rank in range(cp_size):
        wanted = []
        for length, whole in zip(lengths, padded, strict=True):
            chunks = torch.arange(whole).chunk(2 * cp_size)
            mine = torch.cat([chunks[rank], chunks[2 * cp_size - 1 - rank]])
            wanted += (mine < length).tolist()
        found = real_rows(
            starts, torch.tensor(lengths), sum(padded) // cp_size, cp_rank=rank, cp_size=cp_size
        )
        assert found.tolist() == wanted
    if cp_size == 1:  # padding behind the last sequence belongs to none
        tail = real_rows(starts, torch.tensor(lengths), sum(padded) + 3)
        assert tail[-3:].tolist() == [False] * 3
