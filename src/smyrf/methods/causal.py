"""Causal attention by recursive halving: which blocks are exact, and which plain problems remain.

A causal problem is two causal problems of half its length and one plain problem between them, in which the queries
of the second half attend to the keys of the first half. Unrolled, that is one exact causal block per `BASE_LENGTH`
positions on the diagonal, and one set of plain problems per level of the recursion. All problems of a level have the
same size up to one row, so they are grouped together.

Letters: N queries, M keys, P problems of a part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from smyrf.methods.base import Layout, Method

# Blocks on the diagonal have at most this many positions.
BASE_LENGTH = 256

Span: TypeAlias = tuple[int, int]  # first position, last position + 1


@dataclass(frozen=True)
class CausalPart:
    """Plain problems of one level of the recursion, grouped together.

    Args:
        queries: span of the queries of each problem.
        keys: span of its keys.
        layout: of one problem, sized by the longest.
    """

    queries: tuple[Span, ...]
    keys: tuple[Span, ...]
    layout: Layout

    @property
    def n_queries(self) -> int:
        """Queries of all problems."""
        return sum(stop - start for start, stop in self.queries)


@dataclass(frozen=True)
class CausalLayout:
    """Sizes and cost of a method for N queries and M keys under a causal mask.

    Args:
        n_queries: N.
        n_keys: M.
        is_exact: the result equals dense attention to rounding.
        key_visits: keys that a query is compared with, averaged over queries.
        blocks: spans of the exact causal blocks on the diagonal.
        parts: plain problems, from the finest level to the coarsest.

    Example:
        >>> from smyrf.methods import Tangent
        >>> layout = Tangent(64).plan(1000, 1000, is_causal=True)
        >>> layout.blocks
        ((0, 250), (250, 500), (500, 750), (750, 1000))
        >>> [(part.queries, part.keys) for part in layout.parts]
        [(((250, 500), (750, 1000)), ((0, 250), (500, 750))), (((500, 1000),), ((0, 500),))]
    """

    n_queries: int
    n_keys: int
    is_exact: bool
    key_visits: int
    blocks: tuple[Span, ...]
    parts: tuple[CausalPart, ...]

    @property
    def memory_share(self) -> float:
        """Key visits as a share of all keys; half of it is what dense causal attention visits."""
        return self.key_visits / self.n_keys


def is_one_block(n_queries: int, n_keys: int) -> bool:
    """Whether the whole problem is one exact block of the diagonal, whatever the method.

    Example:
        >>> is_one_block(256, 256), is_one_block(256, 255), is_one_block(257, 257)
        (True, False, False)
    """
    return n_queries <= min(n_keys, BASE_LENGTH)


def causal_layout(method: Method, n_queries: int, n_keys: int) -> CausalLayout:
    """Recursive halving of N queries and M keys.

    Position 0 of the queries is position 0 of the keys. With more queries than keys the last queries see all keys;
    with fewer, the last keys are seen by none.

    Example:
        >>> from smyrf.methods import Dense
        >>> Dense().plan(4096, 4096, is_causal=True).key_visits
        2049
    """
    length = min(n_queries, n_keys)
    n_blocks = 1
    while n_blocks * BASE_LENGTH < length:
        n_blocks *= 2
    edges = [i * length // n_blocks for i in range(n_blocks + 1)]
    blocks = tuple(pairwise(edges))

    parts = []
    stride = 1
    while stride < n_blocks:
        first, middle, last = edges[0 : -1 : 2 * stride], edges[stride :: 2 * stride], edges[2 * stride :: 2 * stride]
        parts.append(_part(method, tuple(zip(middle, last, strict=True)), tuple(zip(first, middle, strict=True))))
        stride *= 2
    if n_queries > n_keys:
        parts.append(_part(method, ((n_keys, n_queries),), ((0, n_keys),)))

    visits = length * (length / n_blocks + 1) / 2  # on the diagonal
    visits += sum(part.n_queries * part.layout.key_visits for part in parts)
    return CausalLayout(
        n_queries=n_queries,
        n_keys=n_keys,
        is_exact=is_one_block(n_queries, n_keys) or all(part.layout.is_exact for part in parts),
        key_visits=math.ceil(visits / n_queries),
        blocks=blocks,
        parts=tuple(parts),
    )


def _part(method: Method, queries: tuple[Span, ...], keys: tuple[Span, ...]) -> CausalPart:
    n, m = (max(stop - start for start, stop in spans) for spans in (queries, keys))
    layout = method.plan(n, m)
    return CausalPart(queries, keys, layout)  # type: ignore[arg-type]
