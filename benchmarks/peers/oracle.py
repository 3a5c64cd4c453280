"""Oracle top-k: the u largest scores of each query, found by looking at all.

No method that chooses u keys per query and drops the others does much better; finding them costs dense attention.

Shapes: batch, heads, N queries, M keys, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from smyrf.tools.quality.peers import Peer

# Scores that are in memory at once; they are computed again for the gradient.
MAX_SCORES = 1 << 26


def oracle_top_k(n_top: int) -> Peer:
    """Softmax over only the `n_top` largest scores."""

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float, seed: int) -> Tensor:
        step = max(1, MAX_SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
        parts = [checkpoint(_top, some, k, v, scale, n_top, use_reentrant=False) for some in q.split(step, dim=2)]
        return torch.cat(parts, dim=2)

    return Peer(run, n_top, {"n_top": n_top})


def _top(q: Tensor, k: Tensor, v: Tensor, scale: float, n_top: int) -> Tensor:
    scores = scale * q @ k.transpose(-1, -2)  # (batch, heads, N, M)
    with torch.no_grad():
        best = scores.topk(min(n_top, k.shape[2]), dim=-1).indices  # (batch, heads, N, u)
        dropped = torch.ones_like(scores, dtype=torch.bool).scatter_(-1, best, False)
    return scores.masked_fill(dropped, -torch.inf).softmax(-1) @ v
