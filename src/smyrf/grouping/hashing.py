"""Hash queries and keys, and sort them by their hashes (eq. 14 of the paper).

The offset b and the bucket width r of E2LSH cannot change a sort, so they are left out. Everything
here runs without gradients, as one custom operator, so that `torch.compile` sees a single node.

Shapes: batch, heads, N queries, M keys, D width, X extra coordinates, H rounds.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from smyrf.backends.native import extension
from smyrf.backends.native import hashing as native_hashing
from smyrf.backends.native.extension import ready
from smyrf.grouping.transforms import Lifted, transform

# Hashes that are computed and sorted at once.
MAX_HASHES = 1 << 20


@torch.library.custom_op("smyrf::sort_by_hash", mutates_args=())
def sort_by_hash(
    q: Tensor,
    k: Tensor,
    key_mask: Tensor | None,
    seed: Tensor,
    scale: float,
    n_hashes: int,
    n_clusters: int,
    transform_name: str,
    hashing: str,
) -> tuple[Tensor, Tensor]:
    """Orders of queries and keys by their hash, per head and round; masked keys come last.

    Args:
        q: ``(batch, heads, N, D)``.
        k: ``(batch, kv_heads, M, D)``; `heads` is a multiple of `kv_heads`.
        key_mask: ``(batch, M)`` bool, True = may be attended to, or None.
        seed: ``()`` int64 on the CPU. All heads and rows of the batch share the vectors drawn from
            it, so that a row's clusters do not depend on the batch around it.

    Returns:
        ``(batch, heads, H, N)`` and ``(batch, heads, H, M)`` int32: the argsort of the hashes.
    """
    q, k = ready(q), ready(k)
    orders = _empty(q, k, n_hashes)
    if q.device.type == "cpu" and not extension.MISSING and (transform_name, hashing) == ("asymmetric", "projection"):
        native_hashing.sort_by_hash(
            q, k, key_mask, _draw(hashing, seed, q.shape[-1] + 2, n_hashes, n_clusters), scale, *orders
        )
        return orders
    q_order, k_order = orders
    batch, heads, n_queries, width = q.shape
    kv_heads, n_keys = k.shape[1:3]
    repeat = heads // kv_heads
    mask = None if key_mask is None else key_mask[:, None]  # (batch, 1, M)
    q_sq = torch.linalg.vector_norm(q, dim=-1).mul_(scale).square_()  # (batch, heads, N)
    k_sq = torch.linalg.vector_norm(k, dim=-1).square_()  # (batch, kv_heads, M)
    if repeat > 1:
        k_sq = k_sq.repeat_interleave(repeat, dim=1)  # (batch, heads, M)
    lifted_q, lifted_k = transform(transform_name, q_sq, k_sq, mask)
    lifted_q = lifted_q.times(scale)
    vectors = _draw(hashing, seed, width + len(lifted_q.extra), n_hashes, n_clusters).to(q)

    step = max(1, MAX_HASHES // (heads * n_hashes * max(n_queries, n_keys)))
    for first in range(0, batch, step):
        some = slice(first, first + step)
        q_order[some] = _argsort(HASHES[hashing](q[some], lifted_q.at(some), vectors))
        repeated = k[some, :, None].expand(-1, -1, repeat, -1, -1).flatten(1, 2) if repeat > 1 else k[some]
        hashes = HASHES[hashing](repeated, lifted_k.at(some), vectors)
        if key_mask is not None:
            hashes.masked_fill_(~key_mask[some, None, None], torch.inf)
        k_order[some] = _argsort(hashes)
    return q_order, k_order


@sort_by_hash.register_fake
def _(
    q: Tensor,
    k: Tensor,
    key_mask: Tensor | None,
    seed: Tensor,
    scale: float,
    n_hashes: int,
    n_clusters: int,
    transform_name: str,
    hashing: str,
) -> tuple[Tensor, Tensor]:
    return _empty(q, k, n_hashes)


def _empty(q: Tensor, k: Tensor, n_hashes: int) -> tuple[Tensor, Tensor]:
    shape = (*q.shape[:2], n_hashes)
    return q.new_empty((*shape, q.shape[2]), dtype=torch.int32), q.new_empty((*shape, k.shape[2]), dtype=torch.int32)


def projection(x: Tensor, lifted: Lifted, vectors: Tensor) -> Tensor:
    """Eq. 8 without its offset: h(u) = u·a for u = [factor · x; extra].

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
        buckets.append(torch.where(up.values >= -down.values, up.indices, down.indices + len(directions)))
    return torch.stack(buckets, dim=2).float()


def _multiply(x: Tensor, vectors: Tensor) -> Tensor:
    """Inner products ``(batch, heads, H, N)`` of vectors ``(batch, heads, N, D)`` and ``(H, D)``.

    One head at a time: a row's hashes must not depend on the batch around it, and a product of another
    shape may round differently.
    """
    products = x.new_empty((*x.shape[:2], len(vectors), x.shape[2]))
    for out, one in zip(products.flatten(0, 1), x.flatten(0, 1), strict=True):
        torch.mm(vectors, one.T, out=out)
    return products


def _finite(hashes: Tensor) -> Tensor:
    """NaN and inf as the largest number: sorted behind all others, but before masked keys."""
    hashes = hashes.float()
    limit = torch.finfo(hashes.dtype).max
    return hashes.nan_to_num_(nan=limit, posinf=limit, neginf=limit)


HASHES = {"projection": projection, "cross_polytope": cross_polytope}


def _draw(hashing: str, seed: Tensor, width: int, n_hashes: int, n_clusters: int) -> Tensor:
    generator = torch.Generator().manual_seed(int(seed))
    if hashing == "cross_polytope":  # as many buckets as clusters
        return torch.randn(n_hashes, -(-n_clusters // 2), width, generator=generator)
    return torch.randn(n_hashes, width, generator=generator)


def _argsort(hashes: Tensor) -> Tensor:
    """Argsort of float32 along the last axis; equal hashes keep their order."""
    if hashes.device.type != "cpu":
        return hashes.argsort(dim=-1, stable=True)
    # The upper half of an int64 is the hash, as an integer of the same order, the lower half the position:
    # all different, so that NumPy's vectorised sort is stable. It is four times faster than torch.argsort.
    bits = hashes.numpy().view(np.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFF_FFFF)).astype(np.int64)
    order <<= 32
    order |= np.arange(order.shape[-1])
    order.sort(axis=-1)
    order &= 0xFFFF_FFFF
    return torch.from_numpy(order)
