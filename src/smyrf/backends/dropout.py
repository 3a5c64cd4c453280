"""Dropout of attention weights by a counter: the mask of a pair is a function, never stored.

Whether a weight is kept is a hash of the seed, the list, the row, the query and the key. So forward, backward and every
backend agree, however the work is cut into chunks.
"""

from __future__ import annotations

from torch import Tensor

MASK_32 = 0xFFFF_FFFF


def keep(seed: Tensor, streams: Tensor, queries: Tensor, keys: Tensor, p: float) -> Tensor:
    """Which weights survive, and by how much they grow: 0, or 1 / (1 − p).

    Args:
        seed: ``()`` int64.
        streams: ``(G,)``, a number for the list and the row that each group belongs to.
        queries: ``(G, C)``, indices of its queries.
        keys: ``(G, S)``, indices of its keys.

    Returns:
        ``(G, C, S)`` float32.

    Example:
        >>> import torch
        >>> index = torch.arange(200)[None]
        >>> kept = keep(torch.tensor(5), torch.tensor([0]), index, index, 0.25)
        >>> kept.unique()
        tensor([0.0000, 1.3333])
        >>> bool((kept.mean() - 1).abs() < 0.02)
        True
    """
    start = int(seed)
    stream = _mix(_mix(streams ^ (start & MASK_32)) ^ (start >> 32 & MASK_32))  # (G,)
    by_query = _mix(queries ^ stream[:, None])  # (G, C)
    by_key = _mix((keys.long() + 0x5BD1E995) ^ stream[:, None])  # (G, S)
    bits = _mix(by_query[:, :, None] ^ by_key[:, None, :])  # (G, C, S)
    grow = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    return (bits >= int(p * 2**32)).float().mul_(grow)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash (two rounds of xor-shift and multiply), in int64 arithmetic."""
    x = (x ^ (x >> 16)) & MASK_32
    x = (x * 0x7FEB352D) & MASK_32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK_32
    return x ^ (x >> 16)
