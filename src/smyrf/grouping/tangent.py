"""Tangent attention as a list of groups: queries in a tree of clusters, near keys one by one, the others folded.

A level clusters the queries, scores the keys that are left by the clusters' centroids, keeps the best as near keys and
folds the others into far keys. The next level does the same with smaller clusters on the keys that were kept. A query
attends to the near keys of its leaf and to the far keys of all its clusters, one per level: the finer the cluster, the
nearer the keys that its far keys stand for.

The choice has no gradient. The far keys have: their gradients flow to k and v.

Nearest relative: Vyas, Katharopoulos, Fleuret, *Fast Transformers with Clustered Attention*, 2020.

Shapes: as in `smyrf.grouping.stages`; F far keys of a cluster.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from smyrf.call import Call
from smyrf.grouping.groups import FarKeys, Groups
from smyrf.grouping.stages import Backend
from smyrf.methods import Level, Tangent, TangentLayout


def tangent_groups(call: Call, method: Tangent, layout: TangentLayout, backend: Backend) -> list[Groups]:
    """One list: each leaf of the tree with its near keys and the far keys of its clusters.

    Example:
        >>> import torch
        >>> from smyrf import Tangent
        >>> from smyrf.backends import find_backend
        >>> q, k, v = torch.randn(3, 1, 2, 512, 16).unbind()
        >>> call, method = Call(q, k, v, scale=0.25), Tangent(128)
        >>> (groups,) = tangent_groups(call, method, call.plan(method), find_backend("torch"))
        >>> groups.shape, groups.far.of_group.shape
        ((2, 32, 16, 76), torch.Size([32, 8]))
    """
    tree = backend.build_tree(call, layout.levels[-1].n_clusters, method.rank)
    found = backend.select_and_fold(call, tree, layout.levels)
    far = FarKeys(found.far_keys, found.far_values, found.far_bias, far_index(layout.levels, call.q.device))
    return [Groups(queries=tree.queries.masked_fill(tree.is_copy, -1), keys=found.near, far=far)]


def far_index(levels: Sequence[Level], device: torch.device) -> Tensor:
    """The far keys of each leaf: those of its cluster at each level, ``(leaves, ΣF)`` int32.

    Example:
        >>> from smyrf.methods import Level
        >>> coarse, leaf = Level(1, 8, 64, 32, 2), Level(2, 4, 32, 8, 1)
        >>> far_index((coarse, leaf), torch.device("cpu"))
        tensor([[0, 1, 2],
                [0, 1, 3]], dtype=torch.int32)
    """
    n_leaves, first, parts = levels[-1].n_clusters, 0, []
    leaf = torch.arange(n_leaves, dtype=torch.int32, device=device)[:, None]
    for level in levels:
        cluster = leaf // (n_leaves // level.n_clusters)
        parts.append(first + cluster * level.n_far + torch.arange(level.n_far, dtype=torch.int32, device=device))
        first += level.n_clusters * level.n_far
    return torch.cat(parts, dim=1)
