"""`Dense`: exact attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from smyrf.methods.base import Layout, Method, dense_layout


@dataclass(frozen=True)
class Dense(Method):
    """Exact attention, by ``F.scaled_dot_product_attention``.

    Example:
        >>> Dense().key_visits(512), Dense().memory_share(512), Dense().is_exact(512, 512)
        (512, 1.0, True)
    """

    kind: ClassVar[str] = "dense"
    typed: ClassVar[str] = "dense"
    is_dense: ClassVar[bool] = True

    def _plan(self, n_queries: int, n_keys: int) -> Layout:
        return dense_layout(n_queries, n_keys)
