"""Who attends to whom, by any method: the one place that knows which method is made where."""

from __future__ import annotations

from torch import Tensor

from smyrf.grouping.clusters import cluster
from smyrf.grouping.groups import Groups, all_pairs
from smyrf.grouping.tangent.levels import tangent_groups
from smyrf.methods import Method, Smyrf, Tangent


def group(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    method: Method,
    *,
    seed: Tensor,
    scale: float,
    key_mask: Tensor | None = None,
) -> list[Groups]:
    """Lists of groups for attention without a causal mask.

    Args:
        q: ``(batch, heads, N, D)``.
        k: ``(batch, kv_heads, M, D)``; head h uses key head h · kv_heads // heads.
        v: ``(batch, kv_heads, M, E)``.
        seed: from `smyrf.seeds.draw_seed`.
        scale: of the scores.
        key_mask: ``(batch, M)`` bool, True = may be attended to.

    Example:
        >>> import torch
        >>> from smyrf import Dense
        >>> x = torch.randn(1, 2, 5, 4)
        >>> [g.shape for g in group(x, x, x, Dense(), seed=torch.tensor(0), scale=0.5)]
        [(2, 1, 5, 5)]
    """
    if method.is_exact(q.shape[2], k.shape[2]):
        batch, heads, n_queries, _ = q.shape
        mask = None if key_mask is None else key_mask.repeat_interleave(heads, dim=0)
        return [all_pairs(batch * heads, n_queries, k.shape[2], mask, q.device)]
    if isinstance(method, Tangent):
        return tangent_groups(q, k, v, method, scale=scale, key_mask=key_mask)
    assert isinstance(method, Smyrf)
    return cluster(q, k, method, seed=seed, scale=scale, key_mask=key_mask)
