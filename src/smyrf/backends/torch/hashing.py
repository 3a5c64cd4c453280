"""Sort queries and keys by their hashes, with PyTorch's operators and NumPy's sort.

One custom operator, so that `torch.compile` sees a single node. Without gradients.

Shapes: batch, heads, N queries, M keys, D width, H rounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from smyrf.call import Call
from smyrf.grouping.hashing import HASHES, draw_vectors
from smyrf.grouping.transforms import transform
from smyrf.methods import Smyrf

# Hashes that are computed and sorted at once.
MAX_HASHES = 1 << 20


def sort_by_hash(call: Call, method: Smyrf, n_clusters: int) -> tuple[Tensor, Tensor]:
    """Orders of queries and keys by their hash, per head and round (`smyrf.grouping.stages.SortByHash`)."""
    assert call.seed is not None
    q, k = call.q.detach(), call.k.detach()
    options = (method.n_hashes, n_clusters, method.transform, method.hashing)
    return _sort_by_hash(q, k, call.key_mask, call.seed, call.scale, *options)


@torch.library.custom_op("smyrf::sort_by_hash", mutates_args=())
def _sort_by_hash(
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
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} must have one width")
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k = q.to(wide), k.to(wide)
    q_order, k_order = empty_orders(q, k, n_hashes)
    batch, heads, n_queries, width = q.shape
    repeat = heads // k.shape[1]
    mask = None if key_mask is None else key_mask[:, None]  # (batch, 1, M)
    q_sq = torch.linalg.vector_norm(q, dim=-1).mul_(scale).square_()  # (batch, heads, N)
    k_sq = torch.linalg.vector_norm(k, dim=-1).square_()  # (batch, kv_heads, M)
    if repeat > 1:
        k_sq = k_sq.repeat_interleave(repeat, dim=1)  # (batch, heads, M)
    lifted_q, lifted_k = transform(transform_name, q_sq, k_sq, mask)
    lifted_q = lifted_q.times(scale)
    vectors = draw_vectors(hashing, seed, width + len(lifted_q.extra), n_hashes, n_clusters).to(q)

    step = max(1, MAX_HASHES // (heads * n_hashes * max(n_queries, k.shape[2])))
    for first in range(0, batch, step):
        some = slice(first, first + step)
        q_order[some] = _argsort(HASHES[hashing](q[some], lifted_q.at(some), vectors))
        repeated = k[some, :, None].expand(-1, -1, repeat, -1, -1).flatten(1, 2) if repeat > 1 else k[some]
        hashes = HASHES[hashing](repeated, lifted_k.at(some), vectors)
        if key_mask is not None:
            hashes.masked_fill_(~key_mask[some, None, None], torch.inf)
        k_order[some] = _argsort(hashes)
    return q_order, k_order


@_sort_by_hash.register_fake
def _(q: Tensor, k: Tensor, key_mask: Any, seed: Any, scale: float, n_hashes: int, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_orders(q, k, n_hashes)


def empty_orders(q: Tensor, k: Tensor, n_hashes: int) -> tuple[Tensor, Tensor]:
    """Uninitialised orders of queries ``(batch, heads, H, N)`` and keys ``(batch, heads, H, M)``, int32."""
    shape = (*q.shape[:2], n_hashes)
    return q.new_empty((*shape, q.shape[2]), dtype=torch.int32), q.new_empty((*shape, k.shape[2]), dtype=torch.int32)


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
