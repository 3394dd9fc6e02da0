"""Count the tokens that a trainer's own routers would have sent to other experts.

A route is the set of experts that a token goes through in one layer; their order says nothing. What
the engine did not report is `MISSING` in every place of a route, and the trainer routes by itself.

Shapes: N tokens of one layer, A experts of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

MISSING = -1


def is_missing(routes: Tensor) -> Tensor:
    """Return, without the last axis, which routes were not reported."""
    return routes[..., 0] == MISSING


def is_rerouted(own_NA: Tensor, replayed_NA: Tensor) -> Tensor:
    """Return `[N]`: whether a router chose another set of experts than it is given."""
    return (own_NA.sort(-1).values != replayed_NA.sort(-1).values).any(-1)


class RouteCount:
    """Add up, on the device, over layers and micro-batches: nothing waits for a number."""

    def __init__(self, device: torch.device | str) -> None:
        self.rerouted_2 = torch.zeros(2, dtype=torch.int64, device=device)
        """Routes that were exchanged, and routes that were compared."""

    def add(self, own_NA: Tensor, replayed_NA: Tensor, real_N: Tensor) -> None:
        """Compare a layer's routes.

        Args:
            own_NA: what its router chose.
            replayed_NA: what it was given instead.
            real_N: true at tokens that are no padding.
        """
        compared_N = real_N & ~is_missing(replayed_NA)
        rerouted_N = compared_N & is_rerouted(own_NA, replayed_NA)
        self.rerouted_2 += torch.stack([rerouted_N.sum(), compared_N.sum()])

    def take(self) -> Tensor:
        """Return what was counted since the last call, `[2]`."""
        taken, self.rerouted_2 = self.rerouted_2, torch.zeros_like(self.rerouted_2)
        return taken


def replay_metrics(counted_2: Tensor, routes_BTLA: Tensor, routed_BT: Tensor) -> dict[str, float]:
    """Return the `replay/` keys of docs/metrics.md.

    Args:
        counted_2: what a `RouteCount` took in the logprob pass, of all ranks.
        routes_BTLA: of the rollout.
        routed_BT: real tokens but a sequence's last, which was sampled and sent to no expert.
    """
    rerouted, compared = counted_2.tolist()
    missing_RL = is_missing(routes_BTLA)[routed_BT]
    return {
        "replay/rerouted_fraction": rerouted / max(1, compared),
        "replay/missing_fraction": int(missing_RL.sum()) / max(1, missing_RL.numel()),
    }
