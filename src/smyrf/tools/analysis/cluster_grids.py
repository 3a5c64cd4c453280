"""Clusters of queries that form a square grid: pixels or patches of an image.

Shapes: B images, N queries, S × S of them on the grid, after those of leading tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from smyrf.call import Call
from smyrf.methods import Method, PerHead, Smyrf
from smyrf.tools.analysis.visited_keys import method_groups, query_clusters

# Queries per cluster in the finer of the two default maps, as in the paper's figure.
FINE = 32


def default_clusterings(n_queries: int) -> tuple[Method, ...]:
    """The paper's figure of memberships: two clusters, and clusters of 32 queries.

    Example:
        >>> [one.label for one in default_clusterings(64 * 64)]
        ['Smyrf 1×2048', 'Smyrf 1×32']
    """
    return Smyrf(1, -(-n_queries // 2)), Smyrf(1, FINE)


def check_clustering(methods: Sequence[Method]) -> None:
    """Raise unless all methods have clusters."""
    for method in methods:
        if method.is_dense or method.kind == PerHead.kind:
            raise ValueError(f"{method.label} has no clusters")


def cluster_grids(
    call: Call, methods: Sequence[Method], *, head: int = 0, n_leading: int = 0, seed: int = 0
) -> list[Tensor]:
    """The cluster of every query on the grid, for each method: in the first round, or on the last level.

    Args:
        call: of one layer, with all images.
        n_leading: queries before the grid, of class or register tokens; they are clustered too, but not returned.
        seed: of random methods.

    Returns:
        cluster numbers ``(B, S, S)`` for each method, in its sorting order.

    Raises:
        ValueError: a method has no clusters, the queries form no square grid, or the attention is causal or has a mask
            that only dense attention supports.

    Example:
        >>> q, k = torch.randn(2, 1, 17, 4), torch.randn(2, 1, 5, 4)
        >>> (numbers,) = cluster_grids(Call(q, k, k, 1.0), [Smyrf(1, 9)], n_leading=1)
        >>> numbers.shape, numbers.unique()
        (torch.Size([2, 4, 4]), tensor([0, 1]))
    """
    check_clustering(methods)
    if call.is_causal:
        raise ValueError("its attention is causal: each cluster is one of a part of the queries")
    side = math.isqrt(max(call.n_queries - n_leading, 0))
    if side < 2 or side * side != call.n_queries - n_leading:
        raise ValueError(f"{call.n_queries} queries after {n_leading} leading tokens are no square grid")
    found: list[list[Tensor]] = [[] for _ in methods]
    for document in range(len(call.q)):
        one = call.head(document, head)
        for maps, method in zip(found, methods, strict=True):
            lists = method_groups(one, method, seed)
            numbers = query_clusters(lists[-1 if method.has_far_keys else 0], call.n_queries)  # (1, N)
            maps.append(numbers[0, n_leading:].view(side, side))
    return [torch.stack(maps) for maps in found]
