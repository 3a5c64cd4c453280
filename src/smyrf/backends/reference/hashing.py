"""Sort by hash, written directly from the equations: transform (eq. 4), project (eq. 14), sort.

Shapes: batch, heads, N queries, M keys, D width, X extra coordinates, H rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smyrf.backends.reference.prepare import prepare
from smyrf.call import Call
from smyrf.grouping.hashing import draw_vectors
from smyrf.grouping.transforms import transform
from smyrf.methods import Smyrf


def sort_by_hash(call: Call, method: Smyrf, n_clusters: int) -> tuple[Tensor, Tensor]:
    """Orders of queries and keys by their hash (`smyrf.grouping.stages.SortByHash`)."""
    call = prepare(call)
    assert call.seed is not None
    q, k = call.scale * call.q.detach(), call.k.detach()
    mask = None if call.key_mask is None else call.key_mask[:, None]  # (batch, 1, M)
    f, g = transform(method.transform, q.square().sum(-1), k.square().sum(-1), mask)
    q, k = f.apply(q), g.apply(k)  # (batch, heads, N, D + X), (batch, heads, M, D + X)
    vectors = draw_vectors(method.hashing, call.seed, q.shape[-1], method.n_hashes, n_clusters).to(q)
    hashes = _buckets if method.hashing == "cross_polytope" else _projections
    k_hashes = hashes(k, vectors)  # (batch, heads, H, M)
    if call.key_mask is not None:
        k_hashes = k_hashes.masked_fill(~call.key_mask[:, None, None], torch.inf)
    orders = [x.argsort(dim=-1, stable=True).int() for x in (hashes(q, vectors), k_hashes)]
    return orders[0], orders[1]


def _projections(u: Tensor, vectors: Tensor) -> Tensor:
    """h(u) = u·a for one a per round, (batch, heads, H, N); NaN and inf after all others, but before masked keys."""
    hashes = (u @ vectors.T).transpose(-1, -2)
    limit = torch.finfo(hashes.dtype).max
    return hashes.nan_to_num(nan=limit, posinf=limit, neginf=limit)


def _buckets(u: Tensor, vectors: Tensor) -> Tensor:
    """The nearest of the directions ±r_i of each round, (batch, heads, H, N); NaN and inf after all others."""
    rotated = torch.einsum("bhnx,rdx->bhrnd", u, vectors)  # (batch, heads, H, N, R)
    both = torch.cat([rotated, -rotated], dim=-1)
    return both.argmax(-1).masked_fill(~rotated.isfinite().all(-1), both.shape[-1]).to(u.dtype)
