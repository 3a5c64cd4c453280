"""Hash and sort queries and keys in the extension.

Shapes: as in `smyrf.grouping.hashing`.
"""

from __future__ import annotations

from torch import Tensor

from smyrf.backends.native import extension
from smyrf.backends.native.extension import address, rows


def sort_by_hash(
    q: Tensor, k: Tensor, key_mask: Tensor | None, vectors: Tensor, scale: float, q_order: Tensor, k_order: Tensor
) -> None:
    """Write the orders of queries and keys by their hashes: the transform "asymmetric", hashing "projection".

    Args:
        q, k: ``(batch, heads, N, D)`` and ``(batch, kv_heads, M, D)``, as `extension.ready` returns them.
        key_mask: ``(batch, M)`` bool or None; keys with False come last.
        vectors: ``(H, D + 2)``, one hash vector per round.
        scale: of the queries.
        q_order, k_order: ``(batch, heads, H, N)`` and ``(batch, heads, H, M)`` int32, contiguous, are written.
    """
    batch, heads, n_queries, width = q.shape
    _, kv_heads, n_keys, _ = k.shape
    vectors = vectors.to(q.dtype).contiguous()
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
            n_hashes=len(vectors),
            q=rows(q),
            k=rows(k),
            key_mask=address(key_mask),
            vectors=address(vectors),
            scale=scale,
            q_order=address(q_order),
            k_order=address(k_order),
        )
    )
