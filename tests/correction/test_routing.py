"""Routes are sets: what counts as another one, and what does not count."""

import torch

from fp8_nemo.correction.routing import MISSING, RouteCount, is_rerouted, replay_metrics

OWN = torch.tensor([[0, 1], [0, 1], [2, 3], [1, 0]])
GIVEN = torch.tensor([[1, 0], [0, 2], [2, 1], [MISSING, MISSING]])


def test_the_order_of_experts_says_nothing():
    assert is_rerouted(OWN, GIVEN)[:3].tolist() == [False, True, True]


def test_padding_and_missing_routes_are_not_compared_and_a_count_is_taken_once():
    count = RouteCount("cpu")
    count.add(OWN, GIVEN, torch.tensor([True, True, False, True]))
    count.add(OWN, GIVEN, torch.ones(4).bool())
    assert count.take().tolist() == [1 + 2, 2 + 3]
    assert count.take().tolist() == [0, 0]


def test_a_sequences_last_token_has_no_route_to_miss():
    routes = torch.zeros(2, 4, 3, 2, dtype=torch.int8)
    routes[0, 2:] = MISSING  # token 2 is missing, token 3 the last
    routes[1, 1:] = MISSING  # two tokens: the second is the last
    routed = torch.tensor([[True, True, True, False], [True, False, False, False]])
    found = replay_metrics(torch.tensor([3, 12]), routes, routed)
    assert found == {"replay/rerouted_fraction": 0.25, "replay/missing_fraction": 3 / 12}
