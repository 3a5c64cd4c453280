"""Rows of a call: one head of one batch entry each. They are processed in slices to bound memory.

Shapes: batch, heads, B = batch · heads rows, R of them, N queries, M keys, D width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# Queries or keys of the rows that are worked on together.
MAX_VECTORS = 1 << 15


def row_slices(n_rows: int, length: int) -> Iterator[slice]:
    """Cut B rows so that each slice has at most `MAX_VECTORS` vectors, or is a single row.

    Example:
        >>> list(row_slices(5, MAX_VECTORS // 2))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    step = max(1, MAX_VECTORS // length)
    for first in range(0, n_rows, step):
        yield slice(first, min(first + step, n_rows))


def take_rows(x: Tensor, rows: slice, heads: int) -> Tensor:
    """Some rows of ``(batch, heads or kv_heads, N, D)`` as ``(R, N, D)``, float32 or wider; a view where possible.

    Args:
        heads: query heads; with fewer heads in x, several rows share one.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if x.shape[1] == heads and x.is_contiguous():
        return x.flatten(0, 1)[rows].to(wide)
    number = torch.arange(rows.start, rows.stop, device=x.device)
    return x[number // heads, number % heads // (heads // x.shape[1])].to(wide)


def take_mask(key_mask: Tensor | None, rows: slice, heads: int) -> Tensor | None:
    """The mask of some rows, ``(R, M)``."""
    if key_mask is None:
        return None
    return key_mask[torch.arange(rows.start, rows.stop, device=key_mask.device) // heads]


def take(x: Tensor, order: Tensor, out: Tensor | None = None) -> Tensor:
    """Vectors of each row of ``(R, M, D)`` in the order ``(R, n)``, in a buffer ``(R·n, D)`` if one is given."""
    start = torch.arange(len(x), device=x.device)[:, None] * x.shape[1]
    taken = torch.index_select(x.reshape(-1, x.shape[-1]), 0, (order + start).view(-1), out=out)
    return taken.view(*order.shape, -1)


def finite(x: Tensor) -> Tensor:
    """x with zeros in place of NaN and inf: such vectors must not decide about the others."""
    if x.device.type == "cpu" and bool(x.sum().isfinite()):  # almost always, and far cheaper than a copy
        return x
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
