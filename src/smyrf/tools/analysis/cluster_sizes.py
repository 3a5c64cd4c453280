"""How evenly a method distributes queries and keys over its clusters.

Shapes: L clusters, C query slots, S key slots, M keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from smyrf.grouping.groups import Groups


@dataclass(frozen=True)
class Balance:
    """Sizes of the clusters of one head, over all rounds or levels.

    Args:
        n_clusters: L of a round; in causal attention, of the part with the most.
        fewest_queries, most_queries: in a cluster.
        fewest_keys, most_keys: near keys of a cluster.
        reached_keys: share of the keys that some query visits.
        busiest_key: share of the queries that visit the most visited key, in any round.
    """

    n_clusters: int
    fewest_queries: int
    most_queries: int
    fewest_keys: int
    most_keys: int
    reached_keys: float
    busiest_key: float


def balance(lists: Sequence[Groups], n_keys: int, busiest_key: float) -> Balance:
    """Count the slots of lists with one row each, from `smyrf.tools.analysis.visited_keys.method_groups`.

    Example:
        >>> halves = torch.arange(6).view(1, 2, 3)
        >>> same = torch.tensor([[[0, 1, 2], [0, 1, -1]]])
        >>> balance([Groups(halves, same)], n_keys=6, busiest_key=1.0)
        Balance(n_clusters=2, fewest_queries=3, most_queries=3, fewest_keys=2, most_keys=3, reached_keys=0.5, \
busiest_key=1.0)
    """
    queries = [(groups.queries[0] >= 0).sum(1) for groups in lists]  # (L,) each
    keys = [(groups.keys[0] >= 0).sum(1) for groups in lists]
    reached = torch.zeros(n_keys + 1, dtype=torch.bool)
    for groups in lists:
        reached[groups.keys[0].masked_fill(groups.keys[0] < 0, n_keys).long().flatten()] = True
    all_queries, all_keys = torch.cat(queries), torch.cat(keys)
    return Balance(
        n_clusters=max(len(count) for count in queries),
        fewest_queries=int(all_queries.min()),
        most_queries=int(all_queries.max()),
        fewest_keys=int(all_keys.min()),
        most_keys=int(all_keys.max()),
        reached_keys=float(reached[:-1].double().mean()),
        busiest_key=busiest_key,
    )
