"""Attention by the book, for the attack: float64, one N × M matrix, no code of the package.

Shapes: batch, heads, N queries, M keys, D width, E value width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible(n_queries: int, n_keys: int, key_mask: Tensor | None, is_causal: bool) -> Tensor:
    """Which query may see which key, ``(batch or 1, 1, N, M)``."""
    seen = torch.ones(1, 1, n_queries, n_keys, dtype=torch.bool)
    if is_causal:
        seen = torch.arange(n_keys)[None, :].le(torch.arange(n_queries)[:, None])[None, None]
    return seen if key_mask is None else seen & key_mask[:, None, None, :]


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Softmax of the scores over the visible keys times values, in the dtype of q; 0 where nothing is visible."""
    v = v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    v = torch.where(seen.any(-2)[..., None], v, 0.0)  # hidden values may hold anything
    weights = softmax(q, k, seen, scale)
    return weights @ v


def softmax(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Weights of the visible keys ``(batch, heads, N, M)``; 0 where nothing is visible."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    k = torch.where(seen.any(-2)[..., None], k, 0.0)  # (batch or 1, 1, M, 1): hidden keys may hold anything
    scores = (scale * (q @ k.mT)).masked_fill(~seen, -torch.inf)  # (batch, heads, N, M)
    top = scores.amax(-1, keepdim=True).detach()
    weights = torch.exp(scores - torch.where(top.isfinite(), top, 0.0)).masked_fill(~seen, 0.0)
    mass = weights.sum(-1, keepdim=True)
    return weights / torch.where(mass > 0, mass, 1.0)


def bounds(v: Tensor, seen: Tensor, heads: int, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Least and largest visible value of each query and channel, ``(batch, heads, N, E)``; 0 where there is none."""
    v = v.repeat_interleave(heads // v.shape[1], dim=1)
    n_queries, n_keys = seen.shape[2:]
    shown = seen.any(-2)[..., None]  # (batch or 1, 1, M, 1)
    last = torch.arange(n_queries).clamp(max=n_keys - 1) if is_causal else torch.full((n_queries,), n_keys - 1)
    low = torch.where(shown, v, torch.inf).cummin(2).values[:, :, last]
    high = torch.where(shown, v, -torch.inf).cummax(2).values[:, :, last]
    empty = low > high
    return low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)
