"""Hash and sort queries and keys in the extension.

Shapes: as in `smyrf.grouping.stages`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smyrf.backends.native.extension import native, ready, running
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
    q_order, k_order = empty_orders(q, k, n_hashes)
    vectors = draw_vectors("projection", seed, q.shape[-1] + 2, n_hashes, 0).to(q.dtype)
    native.sort_by_hash(
        q=q,
        k=k,
        key_mask=None if key_mask is None else key_mask.contiguous(),
        vectors=vectors,
        scale=scale,
        q_order=q_order,
        k_order=k_order,
        **running(),
    )
    return q_order, k_order


@_sort_by_hash.register_fake
def _(q: Tensor, k: Tensor, key_mask: Any, seed: Any, scale: float, n_hashes: int) -> tuple[Tensor, Tensor]:
    return empty_orders(q, k, n_hashes)
