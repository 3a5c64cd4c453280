"""Hash functions: where a transformed vector falls on a line (eq. 14), or in which bucket of a cross-polytope.

The offset b and the bucket width r of E2LSH (eq. 13) cannot change a sort, so they are left out.

Shapes: batch, heads, N vectors, D width, X extra coordinates, H rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smyrf.grouping.transforms import Lifted


def draw_vectors(hashing: str, seed: Tensor, width: int, n_hashes: int, n_clusters: int) -> Tensor:
    """Random vectors of all rounds, ``(H, width)``, or ``(H, R, width)`` for the directions of cross-polytopes.

    All heads and rows of the batch share them, so that a row's clusters do not depend on the batch around it.
    """
    generator = torch.Generator().manual_seed(int(seed))
    if hashing == "cross_polytope":  # as many buckets as clusters
        return torch.randn(n_hashes, -(-n_clusters // 2), width, generator=generator)
    return torch.randn(n_hashes, width, generator=generator)


def projection(x: Tensor, lifted: Lifted, vectors: Tensor) -> Tensor:
    """Eq. 14: h(u) = u·a for u = [factor · x; extra].

    Args:
        x: ``(batch, heads, N, D)``.
        vectors: ``(H, D + X)``, one a per round.

    Returns:
        ``(batch, heads, H, N)``.
    """
    width = x.shape[-1]
    hashes = _multiply(x, vectors[:, :width])
    if isinstance(lifted.factor, Tensor):
        hashes *= lifted.factor[..., None, :]
    elif lifted.factor != 1.0:
        hashes *= lifted.factor
    for column, a in zip(lifted.extra, vectors[:, width:].T, strict=True):
        if isinstance(column, Tensor):  # a constant moves all hashes alike, and so no order
            hashes.addcmul_(a[:, None], column[..., None, :])
    return _finite(hashes)


def cross_polytope(x: Tensor, lifted: Lifted, vectors: Tensor) -> Tensor:
    """Reformer's angular LSH: the nearest of the directions ±r_i of a random rotation.

    Args:
        x: ``(batch, heads, N, D)``.
        vectors: ``(H, R, D + X)``, R directions per round, so 2R buckets.

    Returns:
        ``(batch, heads, H, N)``, the number of the bucket.
    """
    u = lifted.apply(x)  # (batch, heads, N, D + X)
    buckets = []
    for directions in vectors:  # one round at a time: the next line makes (batch, heads, R, N)
        rotated = _multiply(u, directions)
        up, down = rotated.max(-2), rotated.min(-2)
        nearest = torch.where(up.values >= -down.values, up.indices, down.indices + len(directions))
        buckets.append(nearest.masked_fill(~(up.values - down.values).isfinite(), 2 * len(directions)))  # NaN: the last
    return torch.stack(buckets, dim=2).float()


def _multiply(x: Tensor, vectors: Tensor) -> Tensor:
    """Inner products ``(batch, heads, H, N)`` of vectors ``(batch, heads, N, D)`` and ``(H, D)``.

    One head at a time: a row's hashes must not depend on the batch around it, and a product of another shape may round
    differently.
    """
    products = x.new_empty((*x.shape[:2], len(vectors), x.shape[2]))
    for out, one in zip(products.flatten(0, 1), x.flatten(0, 1), strict=True):
        torch.mm(vectors, one.T, out=out)
    return products


def _finite(hashes: Tensor) -> Tensor:
    """NaN and inf as the largest number: sorted after all others, but before masked keys."""
    hashes = hashes.float()
    limit = torch.finfo(hashes.dtype).max
    return hashes.nan_to_num_(nan=limit, posinf=limit, neginf=limit)


HASHES = {"projection": projection, "cross_polytope": cross_polytope}
