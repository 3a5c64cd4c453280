"""Angular hashes of queries and keys.

Shapes: B rows (batch × heads), N vectors, D width, R directions.
"""

from __future__ import annotations

import torch
from torch import Tensor


def nearest_direction(x: Tensor, directions: Tensor) -> Tensor:
    """The nearest of ±r for the directions r ``(D, R)`` of a random rotation: ``(B, N)`` in [0, 2R)."""
    rotated = x @ directions  # (B, N, R); the length of x does not change the argmax
    return torch.cat([rotated, -rotated], dim=-1).argmax(-1)


def gray_rank(x: Tensor, planes: Tensor) -> Tensor:
    """Signs at random planes ``(D, R)``, read as a Gray code: neighbours differ in one sign. ``(B, N)`` in [0, 2^R)."""
    signs = (x @ planes > 0).long()  # (B, N, R)
    # The binary number of a Gray code: bit i is the parity of the signs up to i.
    parity = signs.cumsum(-1) % 2
    return (parity << torch.arange(planes.shape[1] - 1, -1, -1)).sum(-1)
