"""Hashing and sorting in the extension.

Shapes: as in `smyrf.grouping.hashing`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smyrf.backends.native import extension
from smyrf.backends.native.extension import rows


def sort_by_hash(
    q: Tensor, k: Tensor, key_mask: Tensor | None, vectors: Tensor, scale: float, q_order: Tensor, k_order: Tensor
) -> None:
    """Write the orders of queries and keys by their hashes: the transform "asymmetric", hashing "projection"."""
    vectors = vectors.to(q.dtype)
    key_mask = None if key_mask is None else key_mask.contiguous()
    extension.native.sort_by_hash(
        q.dtype == torch.float64,
        [*q.shape[:2], *k.shape[1:2], q.shape[2], *k.shape[2:], len(vectors)],
        rows(q),
        rows(k),
        0 if key_mask is None else key_mask.data_ptr(),
        vectors.data_ptr(),
        scale,
        q_order.data_ptr(),
        k_order.data_ptr(),
        extension.n_threads(),
        extension.ISA,
    )
