"""Random balanced clusters: what the hashes of SMYRF are worth is the distance to this.

Shapes: B rows (batch × heads), N queries, M keys, L clusters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smyrf.backends import attend
from smyrf.call import Call
from smyrf.grouping.groups import Groups
from smyrf.tools.quality.peers import Peer

from .runs import cut

CLUSTER_SIZE = 32


def random_clusters_at(budget: int, n_keys: int, n_queries: int) -> Peer:
    """Rounds of clusters of 32 keys; a single cluster of all if the budget is all."""
    if budget >= n_keys:
        return random_clusters(1, 1, n_keys)
    n_clusters = -(-n_keys // min(CLUSTER_SIZE, budget))
    return random_clusters(max(1, round(budget * n_clusters / n_keys)), n_clusters, n_keys)


def random_clusters(n_hashes: int, n_clusters: int, n_keys: int) -> Peer:
    """Every round partitions queries and keys at random, and attends inside; rounds merge by softmax mass."""

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        rows = q.shape[0] * q.shape[1]

        def shuffled(length: int) -> Tensor:
            return cut(torch.rand(rows, length, generator=generator).argsort(-1), n_clusters)  # (B, L, S)

        rounds = [Groups(queries=shuffled(q.shape[2]), keys=shuffled(k.shape[2])) for _ in range(n_hashes)]
        return attend(Call(q, k, v, scale), rounds)[0]

    return Peer(run, n_hashes * n_keys / n_clusters, {"n_hashes": n_hashes, "n_clusters": n_clusters})
