"""In which cluster each query asks, where queries stand on a square grid: pixels or patches of an image.

Shapes: B images, N queries, S × S of them on the grid, behind those of leading tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from smyrf.backends import find_backend
from smyrf.call import Call
from smyrf.grouping.group import group
from smyrf.methods import Dense, Method, PerHead, Smyrf
from smyrf.seeds import draw_seed
from smyrf.tools.analysis.maps import check_head, head_vectors
from smyrf.tools.analysis.visited_keys import query_clusters

# Queries of a cluster in the finer one of the maps that are shown by default, as in the paper's figure.
FINE = 32


def default_clusterings(n_queries: int) -> tuple[Method, ...]:
    """The paper's figure of memberships: two clusters, and clusters of 32 queries.

    Example:
        >>> [one.label for one in default_clusterings(64 * 64)]
        ['Smyrf 1×2048', 'Smyrf 1×32']
    """
    return Smyrf(1, -(-n_queries // 2)), Smyrf(1, FINE)


def check_clustering(methods: Sequence[Method]) -> None:
    """Raises unless all methods have clusters."""
    for method in methods:
        if isinstance(method, Dense | PerHead):
            raise ValueError(f"{method.label} has no clusters")


def cluster_grids(
    call: Call, methods: Sequence[Method], *, head: int = 0, n_leading: int = 0, seed: int = 0
) -> list[Tensor]:
    """For each method the cluster of every query on the grid.

    Of several hashing rounds the first is shown; of several levels the last, in which queries ask.

    Args:
        call: of one layer, with all images.
        n_leading: queries before the grid, of class or register tokens; they are clustered too, and left out.
        seed: of hashes.

    Returns:
        cluster numbers ``(B, S, S)`` for each method, in the order in which a method sorts them.

    Raises:
        ValueError: a method has no clusters, the queries are no square grid, or the attention is causal or has a mask
            that only dense attention can honour.

    Example:
        >>> q, k = torch.randn(2, 1, 17, 4), torch.randn(2, 1, 5, 4)
        >>> (numbers,) = cluster_grids(Call(q, k, k, 1.0), [Smyrf(1, 9)], n_leading=1)
        >>> numbers.shape, numbers.unique()
        (torch.Size([2, 4, 4]), tensor([0, 1]))
    """
    check_clustering(methods)
    if call.is_causal:
        raise ValueError("its attention is causal: clusters are of parts of the queries, not of all")
    side = math.isqrt(max(call.n_queries - n_leading, 0))
    if side < 2 or side * side != call.n_queries - n_leading:
        raise ValueError(f"{call.n_queries} queries behind {n_leading} leading tokens are no square grid")
    found: list[list[Tensor]] = [[] for _ in methods]
    for document in range(len(call.q)):
        one = call.head(document, head)
        check_head(one)
        q, k, v = (x[None, None] for x in head_vectors(one))  # (1, 1, N, D), (1, 1, M, D), (1, 1, M, E)
        mask = None if one.key_mask is None else one.key_mask.cpu()
        backend = find_backend(None, q.device)
        prepared = backend.prepare(replace(one, q=q, k=k, v=v, key_mask=mask, seed=draw_seed(seed)))
        for maps, method in zip(found, methods, strict=True):
            lists = group(prepared, method, backend)
            numbers = query_clusters(lists[0 if isinstance(method, Smyrf) else -1], call.n_queries)  # (1, N)
            maps.append(numbers[0, n_leading:].view(side, side))
    return [torch.stack(maps) for maps in found]
