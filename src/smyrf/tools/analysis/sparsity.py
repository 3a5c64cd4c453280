"""Sparsity of attention maps: shares of small weights as the paper counts them, and entropy.

For a pretrained BigGAN the paper reports (§3) that 98.11% of the keys get a weight below 0.01, and 86.11% one below
1/M.

Shapes: R rows, M keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smyrf.tools.analysis.maps import MapBlock

# The paper's threshold for a small weight.
SMALL = 0.01


def share_below(block: MapBlock, threshold: float | Tensor = SMALL) -> Tensor:
    """Share of keys with a weight below a threshold, of those that a query may attend to: ``(R,)``.

    Args:
        threshold: one for all rows, or ``(R,)``.

    Example:
        >>> weights = torch.tensor([[0.9, 0.095, 0.005, 0.0]])  # the last key is masked
        >>> share_below(MapBlock(torch.arange(1), weights, torch.tensor([3.0])))
        tensor([0.3333])
    """
    limit = torch.as_tensor(threshold, dtype=block.weights.dtype).view(-1, 1)
    hidden = block.weights.shape[1] - block.n_seen
    return ((block.weights < limit).sum(1) - hidden).clamp(min=0.0) / block.n_seen.clamp(min=1.0)


def share_below_uniform(block: MapBlock) -> Tensor:
    """Share of keys with a weight below 1/M, where M counts those that the query may attend to: ``(R,)``.

    Example:
        >>> share_below_uniform(MapBlock(torch.arange(1), torch.tensor([[0.7, 0.1, 0.2]]), torch.tensor([3.0])))
        tensor([0.6667])
    """
    # The tolerance keeps rounding from deciding in uniform rows.
    return share_below(block, (1.0 - 1e-5) / block.n_seen.clamp(min=1.0))


def entropy(block: MapBlock) -> Tensor:
    """Entropy −Σ w log w of each query in nats, at most log M: ``(R,)``.

    Example:
        >>> entropy(MapBlock(torch.arange(1), torch.full((1, 4), 0.25), torch.tensor([4.0]))).exp()
        tensor([4.])
    """
    return torch.special.entr(block.weights).sum(1)
