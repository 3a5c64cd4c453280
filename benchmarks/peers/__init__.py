"""Other methods at a budget of key visits per query, for ``smyrf bench quality --peers benchmarks/peers``.

Written from the papers' descriptions, for inputs that were trained with dense attention: q and k are two
different sets, nothing is learned, nothing is causal. Each file says where it departs from its paper.

A key visit is one score and one row of values. Passes over centroids are counted; hashing, sorting and
Lloyd's iterations are not, as they are not counted for SMYRF.
"""

from __future__ import annotations

from smyrf.tools.quality.peers import Peer

from .clustered import improved_clustered_at
from .hyper import sorted_blocks_and_samples_at
from .oracle import oracle_top_k
from .random_clusters import random_clusters_at
from .reformer import reformer_at
from .routing import routing_at


def peers(budget: int, n_keys: int, n_queries: int | None = None) -> dict[str, Peer]:
    """Every peer with settings that spend about `budget` key visits per query."""
    n_queries = n_keys if n_queries is None else n_queries
    return {
        "oracle top-k": oracle_top_k(n_top=budget),
        "improved clustered": improved_clustered_at(budget, n_keys, n_queries),
        "Reformer": reformer_at(budget, n_keys, n_queries),
        "HyperAttention": sorted_blocks_and_samples_at(budget, n_keys, n_queries),
        "routing": routing_at(budget, n_keys, n_queries),
        "random clusters": random_clusters_at(budget, n_keys, n_queries),
    }
