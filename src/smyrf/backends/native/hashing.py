"""Hash and sort queries and keys in the extension.

Shapes: as in `smyrf.grouping.stages`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smyrf.backends.native import extension
from smyrf.backends.native.extension import address, ready, rows
from smyrf.backends.torch import hashing as torch_hashing
from smyrf.backends.torch.hashing import empty_orders
from smyrf.call import Call
from smyrf.grouping.hashing import draw_vectors
from smyrf.methods import Smyrf


def sort_by_hash(call: Call, method: Smyrf, n_clusters: int) -> tuple[Tensor, Tensor]:
    """Orders of queries and keys by their hash (`smyrf.grouping.stages.SortByHash`).

    The paper's transform and projection run in the extension, ablations on the torch backend.
    """
    if (method.transform, method.hashing) != ("asymmetric", "projection"):
        return torch_hashing.sort_by_hash(call, method, n_clusters)
    assert call.seed is not None
    return _sort_by_hash(call.q.detach(), call.k.detach(), call.key_mask, call.seed, call.scale, method.n_hashes)


@torch.library.custom_op("smyrf::sort_by_hash_native", mutates_args=(), device_types="cpu")
def _sort_by_hash(
    q: Tensor, k: Tensor, key_mask: Tensor | None, seed: Tensor, scale: float, n_hashes: int
) -> tuple[Tensor, Tensor]:
    q, k = ready(q), ready(k)
    (batch, heads, n_queries, width), (_, kv_heads, n_keys, _) = q.shape, k.shape
    q_order, k_order = empty_orders(q, k, n_hashes)
    vectors = draw_vectors("projection", seed, width + 2, n_hashes, 0).to(q.dtype)
    key_mask = None if key_mask is None else key_mask.contiguous()
    extension.native.sort_by_hash(
        extension.native.HashParams(
            execution=extension.execution(q.dtype),
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            n_queries=n_queries,
            n_keys=n_keys,
            width=width,
            n_hashes=n_hashes,
            q=rows(q),
            k=rows(k),
            key_mask=address(key_mask),
            vectors=address(vectors),
            scale=scale,
            q_order=address(q_order),
            k_order=address(k_order),
        )
    )
    return q_order, k_order


@_sort_by_hash.register_fake
def _(q: Tensor, k: Tensor, key_mask: Any, seed: Any, scale: float, n_hashes: int) -> tuple[Tensor, Tensor]:
    return empty_orders(q, k, n_hashes)
