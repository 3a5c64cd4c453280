"""k-means routing (Roy et al. 2021): centroids on the sphere choose keys, a query goes to its nearest centroid.

Departures: the paper learns its centroids during training, here a few of Lloyd's iterations on queries and keys
together find them. In the paper a centroid takes its nearest queries too, so that some queries are in several
clusters and some in none; here every query is in one, that of its nearest centroid.

Shapes: B rows (batch × heads), N queries, M keys, D width, L centroids, S keys per centroid.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from smyrf.backends import attend
from smyrf.call import Call
from smyrf.grouping.groups import Groups
from smyrf.tools.quality.peers import Peer

from .members import group_members

N_ITERATIONS = 5
SLOTS = 32
CENTROID_SHARE = 0.25  # of the budget; better on MiniLM than M / budget centroids, the paper's choice


def routing_at(budget: int, n_keys: int, n_queries: int) -> Peer:
    """A share of the budget for the centroids, the rest for the keys that they choose."""
    if budget >= n_keys:
        return routing(1, n_keys, n_keys, n_queries)
    n_centroids = max(2, round(CENTROID_SHARE * budget / _visits_of_centroids(1, n_keys, n_queries)))
    n_chosen = budget - round(_visits_of_centroids(n_centroids, n_keys, n_queries))
    return routing(n_centroids, max(1, n_chosen), n_keys, n_queries)


def routing(n_centroids: int, n_chosen: int, n_keys: int, n_queries: int) -> Peer:
    """Each of `n_centroids` chooses its `n_chosen` nearest keys."""

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float, seed: int) -> Tensor:
        with torch.no_grad():
            x, y = (F.normalize(F.layer_norm(z, z.shape[-1:]), dim=-1).flatten(0, 1) for z in (q, k))
            centroids = _lloyd(torch.cat([x, y], dim=1), n_centroids, seed)  # (B, L, D)
            chosen = (centroids @ y.transpose(1, 2)).topk(min(n_chosen, n_keys), dim=-1).indices  # (B, L, S)
            nearest = (x @ centroids.transpose(1, 2)).argmax(-1)  # (B, N)
            queries, centroid = group_members(nearest, n_centroids, SLOTS)  # (B, G, C), (B, G)
            keys = chosen.gather(1, centroid[..., None].expand(-1, -1, chosen.shape[-1]))  # (B, G, S)
        return attend(Call(q, k, v, scale), [Groups(queries, keys)])[0]

    spent = n_chosen + (_visits_of_centroids(n_centroids, n_keys, n_queries) if n_centroids > 1 else 0)
    return Peer(run, spent, {"n_centroids": n_centroids, "n_chosen": n_chosen, "n_iterations": N_ITERATIONS})


def _visits_of_centroids(n_centroids: int, n_keys: int, n_queries: int) -> float:
    """Scores of all queries and all keys with all centroids, per query; a score without values is half a visit."""
    return n_centroids * (n_queries + n_keys) / (2 * n_queries)


def _lloyd(x: Tensor, n_centroids: int, seed: int) -> Tensor:
    """Spherical k-means of unit vectors ``(B, N, D)``, started from some of them: ``(B, L, D)``."""
    generator = torch.Generator().manual_seed(seed)
    centroids = x[:, torch.randperm(x.shape[1], generator=generator)[:n_centroids]]
    for _ in range(N_ITERATIONS):
        nearest = (x @ centroids.transpose(1, 2)).argmax(-1)  # (B, N)
        index = nearest[..., None].expand_as(x)
        sums = torch.zeros_like(centroids).scatter_add_(1, index, x)
        moved = F.normalize(sums, dim=-1)
        centroids = torch.where(sums.abs().sum(-1, keepdim=True) > 0, moved, centroids)  # an empty cluster stays
    return centroids
