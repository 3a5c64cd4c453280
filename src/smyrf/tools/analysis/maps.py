"""The attention map of a head, a block of rows at a time; the whole map is never stored.

Shapes: N queries, M keys, D width, E value width, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from smyrf.call import Call

# Weights of a block of rows: 8 MB in float32. A block has at least one row.
BLOCK_ELEMENTS = 1 << 21


class MapBlock(NamedTuple):
    """Some rows of a map.

    Args:
        rows: ``(R,)``, indices of the queries.
        weights: ``(R, M)``, their softmax over the keys; zeros for a query that may attend to no key.
        n_seen: ``(R,)``, number of keys that each may attend to, in the dtype of the weights.
    """

    rows: Tensor
    weights: Tensor
    n_seen: Tensor


def map_blocks(head: Call, rows: Tensor | None = None) -> Iterator[MapBlock]:
    """Blocks of rows of softmax(scale · q kᵀ), eq. 1 of the paper, each with at most `BLOCK_ELEMENTS` weights.

    Args:
        head: one head of one document, from `Call.head`.
        rows: which queries; all by default.

    Example:
        >>> x = torch.randn(1, 1, 5, 4)
        >>> (block,) = map_blocks(Call(x, x, x, 0.5, is_causal=True))
        >>> block.weights.shape, block.n_seen.tolist()
        (torch.Size([5, 5]), [1.0, 2.0, 3.0, 4.0, 5.0])
        >>> torch.allclose(block.weights.sum(1), torch.ones(5))
        True
    """
    check_head(head)
    q, k, _ = head_vectors(head)
    n_keys = len(k)
    if rows is None:
        rows = torch.arange(len(q))
    visible = torch.ones(n_keys, dtype=torch.bool) if head.key_mask is None else head.key_mask[0].cpu()
    places = torch.arange(n_keys)
    for some in torch.split(rows, max(1, BLOCK_ELEMENTS // n_keys)):
        scores = (head.scale * q[some]) @ k.T  # (R, M)
        seen = visible[None]  # (1, M)
        if head.is_causal:
            seen = seen & (places <= some[:, None])  # (R, M)
        if head.is_causal or head.key_mask is not None:
            scores = scores.masked_fill_(~seen, -torch.inf)
        n_seen = seen.sum(1).to(scores).expand(len(some))  # (R,)
        weights = scores.softmax(1)
        if not bool(n_seen.all()):  # a softmax over no keys is NaN
            weights = weights.masked_fill_(n_seen[:, None] == 0, 0.0)
        yield MapBlock(some, weights, n_seen)


def head_vectors(head: Call) -> tuple[Tensor, Tensor, Tensor]:
    """q ``(N, D)``, k ``(M, D)`` and v ``(M, E)`` of a head on the CPU, in float32 or wider; zeros for masked keys."""
    wide = torch.promote_types(head.q.dtype, torch.float32)
    q, k, v = (x[0, 0].detach().to("cpu", wide) for x in (head.q, head.k, head.v))
    if head.key_mask is None:
        return q, k, v
    hidden = ~head.key_mask[0].cpu()[:, None]  # 0 · NaN is NaN
    return q, k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)


def check_head(head: Call) -> None:
    """Raise unless a call is that of one head of one document, and a method can serve it."""
    if head.q.shape[:2] != (1, 1) or head.k.shape[:2] != (1, 1):
        raise ValueError(f"head has q {tuple(head.q.shape)} and k {tuple(head.k.shape)}: take one with Call.head")
    if head.only_dense:
        raise ValueError(f"head has a mask that only dense attention supports: {head.only_dense}")
