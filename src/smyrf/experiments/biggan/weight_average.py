"""Exponential moving average of a network's weights."""

from __future__ import annotations

import copy

import torch
from torch import nn


class Average:
    """Exponential moving average of the weights of a network; buffers are copied.

    Args:
        network: network whose weights are averaged, starting from their current values.
        keep: decay, the weight of the old average in an update.

    Example:
        >>> import torch
        >>> network = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.constant_(network.weight, 0.0)
        >>> average = Average(network, keep=0.9)
        >>> _ = torch.nn.init.constant_(network.weight, 1.0)
        >>> average.update(network)
        >>> round(average.network.weight.item(), 6)
        0.1
    """

    def __init__(self, network: nn.Module, keep: float) -> None:
        self.keep = keep
        self.network = copy.deepcopy(network).requires_grad_(False)

    @torch.no_grad()
    def update(self, network: nn.Module, *, copies: bool = False) -> None:
        """Update the average, or copy the network."""
        keep = 0.0 if copies else self.keep
        for weight, other in zip(self.network.parameters(), network.parameters(), strict=True):
            weight.lerp_(other, 1.0 - keep)
        for buffer, one in zip(self.network.buffers(), network.buffers(), strict=True):
            buffer.copy_(one)
