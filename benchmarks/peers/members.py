"""Clusters of any sizes as groups of one size, so that they can be multiplied in batches.

Shapes: B rows (batch × heads), N queries, L clusters, G groups, C query slots per group.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_members(cluster: Tensor, n_clusters: int, slots: int) -> tuple[Tensor, Tensor]:
    """Splits each cluster into as many groups of C slots as its members need.

    Args:
        cluster: ``(B, N)``, the cluster of each query.

    Returns:
        the members of each group ``(B, G, C)``, -1 in empty slots, and the cluster of each group ``(B, G)``.
    """
    rows, length = cluster.shape
    counts = torch.zeros(rows, n_clusters, dtype=torch.int64)  # (B, L)
    counts.scatter_add_(1, cluster, torch.ones_like(cluster))
    groups_until = ((counts + slots - 1) // slots).cumsum(1)  # (B, L): groups of this cluster and those before
    n_groups = int(groups_until[:, -1].max())
    order = cluster.argsort(dim=1, stable=True)  # (B, N)
    owner = cluster.gather(1, order)
    first_member = (counts.cumsum(1) - counts).gather(1, owner)
    first_group = torch.nn.functional.pad(groups_until[:, :-1], (1, 0)).gather(1, owner)
    place = first_group * slots + torch.arange(length) - first_member  # (B, N)
    members = torch.full((rows, n_groups * slots), -1).scatter_(1, place, order)
    of_group = torch.searchsorted(groups_until, torch.arange(n_groups).expand(rows, -1).contiguous(), right=True)
    return members.view(rows, n_groups, slots), of_group.clamp(max=n_clusters - 1)
