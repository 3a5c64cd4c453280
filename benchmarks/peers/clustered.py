"""Improved clustered attention (Vyas, Katharopoulos, Fleuret 2020).

Queries are clustered by k-means in Hamming space on the signs at random planes. The mean query of a cluster
attends to all keys, A^c; its top keys are attended to again by each query itself, sharing the mass m̂ that the centroid
gives them; all other keys keep the centroid's weights.

Shapes: B rows (batch × heads), N queries, M keys, D width, L clusters, S top keys, G groups of C query slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smyrf.backends import attend
from smyrf.call import Call
from smyrf.grouping.groups import Groups
from smyrf.tools.quality.peers import Peer

from .members import group_members

N_BITS = 63
N_ITERATIONS = 10
SLOTS = 16
CENTROID_SHARE = 0.375  # of the budget; the best of several on MiniLM


def improved_clustered_at(budget: int, n_keys: int, n_queries: int) -> Peer:
    """A share of the budget for the centroids' pass over all keys, the rest for top keys."""
    n_clusters = min(n_queries, max(1, round(CENTROID_SHARE * budget * n_queries / n_keys)))
    n_top = max(1, budget - round(n_clusters * n_keys / n_queries))
    return improved_clustered(n_clusters, n_top, n_keys, n_queries)


def improved_clustered(n_clusters: int, n_top: int, n_keys: int, n_queries: int) -> Peer:
    """`n_clusters` centroids see all keys; a query sees the `n_top` best keys of its centroid."""

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float, seed: int) -> Tensor:
        x, y, w = (z.flatten(0, 1) for z in (q, k, v))  # (B, N, D), (B, M, D), (B, M, E)
        cluster = _cluster_signs(x.detach(), n_clusters, seed)  # (B, N)
        centroids = _means(x, cluster, n_clusters)  # (B, L, D)
        weights = (scale * centroids @ y.transpose(1, 2)).softmax(-1)  # (B, L, M): A^c
        top = weights.detach().topk(min(n_top, n_keys), dim=-1).indices  # (B, L, S)
        mass = weights.gather(-1, top).sum(-1, keepdim=True)  # (B, L, 1): m̂
        rest = weights.scatter(-1, top, 0.0) @ w  # (B, L, E)

        queries, of_group = group_members(cluster, n_clusters, SLOTS)  # (B, G, C), (B, G)
        keys = top.gather(1, of_group[..., None].expand(-1, -1, top.shape[-1]))  # (B, G, S)
        exact = attend(Call(q, k, v, scale), [Groups(queries, keys)])[0].flatten(0, 1)  # (B, N, E)

        index = cluster[..., None]  # (B, N, 1)
        out = mass.gather(1, index) * exact + rest.gather(1, index.expand_as(exact))  # (B, N, E)
        return out.view(*q.shape[:-1], v.shape[-1])

    settings = {"n_clusters": n_clusters, "n_top": n_top, "n_bits": N_BITS, "n_iterations": N_ITERATIONS}
    return Peer(run, n_top + n_clusters * n_keys / n_queries, settings)


def _cluster_signs(x: Tensor, n_clusters: int, seed: int) -> Tensor:
    """Lloyd's iterations in Hamming space: the nearest centroid in signs, then the majority of signs. ``(B, N)``."""
    generator = torch.Generator().manual_seed(seed)
    planes = torch.randn(x.shape[-1], N_BITS, generator=generator).to(x)
    signs = torch.where(x @ planes > 0, 1.0, -1.0).to(x)  # (B, N, bits)
    centroids = signs[:, torch.randperm(x.shape[1], generator=generator)[:n_clusters]]  # (B, L, bits)
    for _ in range(N_ITERATIONS):
        nearest = (signs @ centroids.transpose(1, 2)).argmax(-1)  # (B, N)
        sums = torch.zeros_like(centroids).scatter_add_(1, nearest[..., None].expand_as(signs), signs)
        centroids = torch.where(sums == 0, centroids, sums.sign())  # a tie, or an empty cluster, stays
    return (signs @ centroids.transpose(1, 2)).argmax(-1)


def _means(x: Tensor, cluster: Tensor, n_clusters: int) -> Tensor:
    """The mean of each cluster's vectors, ``(B, L, D)``; zero where it is empty."""
    rows, _, width = x.shape
    sums = x.new_zeros(rows, n_clusters, width).scatter_add(1, cluster[..., None].expand_as(x), x)
    counts = x.new_zeros(rows, n_clusters).scatter_add(1, cluster, torch.ones_like(x[..., 0]))
    return sums / counts.clamp(min=1)[..., None]
