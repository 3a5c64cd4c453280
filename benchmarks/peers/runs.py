"""Cut sorted vectors into runs of equal length, up to one.

Shapes: B rows (batch × heads), N vectors, L runs, S = ⌈N / L⌉.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cut(order: Tensor, n_runs: int) -> Tensor:
    """Run l holds places ⌊l·N/L⌋ to ⌊(l+1)·N/L⌋ of `order` ``(B, N)``: ``(B, L, S)``, -1 where a run is shorter."""
    length = order.shape[-1]
    edges = torch.arange(n_runs + 1) * length // n_runs  # (L + 1,)
    places = edges[:-1, None] + torch.arange(-(-length // n_runs))  # (L, S)
    found = order[:, places.clamp(max=length - 1)]  # (B, L, S)
    return found.masked_fill(places >= edges[1:, None], -1)


def run_of_each(order: Tensor, n_runs: int) -> Tensor:
    """The run in which each vector stands, ``(B, N)``."""
    length = order.shape[-1]
    run_of_place = ((torch.arange(length) + 1) * n_runs - 1) // length  # (N,)
    return torch.empty_like(order).scatter_(-1, order, run_of_place.expand_as(order))
