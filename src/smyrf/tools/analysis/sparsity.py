"""How many keys hardly count: shares as the paper counts them, and entropy.

Of a pretrained BigGAN the paper reports (§3) that 98.11% of the keys get a weight below 0.01, and 86.11% one below
1/M.

Shapes: R rows, M keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smyrf.tools.analysis.maps import Block

# A weight below this is small, in the paper's count.
SMALL = 0.01


def share_below(block: Block, threshold: float | Tensor = SMALL) -> Tensor:
    """Share of the keys that a query may attend to whose weight is below a threshold, ``(R,)``.

    Args:
        threshold: one for all rows, or ``(R,)``.

    Example:
        >>> weights = torch.tensor([[0.9, 0.095, 0.005, 0.0]])  # the last key is masked
        >>> share_below(Block(torch.arange(1), weights, torch.tensor([3.0])))
        tensor([0.3333])
    """
    limit = torch.as_tensor(threshold, dtype=block.weights.dtype).view(-1, 1)
    hidden = block.weights.shape[1] - block.n_seen
    return ((block.weights < limit).sum(1) - hidden).clamp(min=0.0) / block.n_seen.clamp(min=1.0)


def share_below_uniform(block: Block) -> Tensor:
    """Share of the keys with less than 1/M, where M are those that the query may attend to: ``(R,)``.

    Example:
        >>> share_below_uniform(Block(torch.arange(1), torch.tensor([[0.7, 0.1, 0.2]]), torch.tensor([3.0])))
        tensor([0.6667])
    """
    # In a row that is uniform, rounding must not decide.
    return share_below(block, (1.0 - 1e-5) / block.n_seen.clamp(min=1.0))


def entropy(block: Block) -> Tensor:
    """−Σ w log w of each query, in nats: ``(R,)``. It is at most log M; its exponential is a number of keys.

    Example:
        >>> entropy(Block(torch.arange(1), torch.full((1, 4), 0.25), torch.tensor([4.0]))).exp()
        tensor([4.])
    """
    return torch.special.entr(block.weights).sum(1)
