"""Which keys a cluster of queries keeps one by one: those whose folding would cost most.

Shapes: R rows (heads), N queries, M keys, D width, E value width; A any batch, f clusters, n candidates, S near keys.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from smyrf.kernels.workspace import Workspace


def key_spread(q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """How much q·k varies over the queries, from key to key.

    σ² = Σ_d var_q[d] (k_d − k̄_d)², divided by its mean over the valid keys.

    Args:
        q: ``(R, N, D)``; k: ``(R, M, D)``; mask: ``(R, M)`` bool, True = may be attended to, or None.

    Returns:
        relative σ ``(R, M)``, and the variances of the keys' coordinates ``(R, D)``.
    """
    k, share = _finite(k), _shares(k, mask)
    away = (k - (k * share).sum(1, keepdim=True)).square_()  # (R, M, D)
    variance = (away * share).sum(1)  # (R, D)
    of_queries = q.var(1, correction=0)  # (R, D)
    mean = (of_queries * variance).sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)  # (R, 1)
    # Two columns, as in the tree: a product with one may be done by other code where there is one row.
    sigma_sq = torch.bmm(away, of_queries[..., None].expand(-1, -1, 2))[..., 0] / mean  # (R, M)
    return sigma_sq.sqrt_(), variance


def value_weight(v: Tensor, mask: Tensor | None) -> Tensor:
    """½ log ‖v − v̄‖² relative to its mean over the valid keys, bounded below: ``(R, M)``."""
    v, share = _finite(v), _shares(v, mask)
    away = (v - (v * share).sum(1, keepdim=True)).square_().sum(-1, keepdim=True)  # (R, M, 1)
    mean = (away * share).sum(1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)  # (R, 1, 1)
    return (away / mean)[..., 0].add_(1e-4).log_().mul_(0.5)


def _finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def _shares(x: Tensor, mask: Tensor | None) -> Tensor:
    """Weights of a mean over the valid keys, ``(R, 1 or M, 1)``."""
    if mask is None:
        return x.new_full((1, 1, 1), 1 / x.shape[1])
    return (mask / mask.sum(1, keepdim=True).clamp(min=1))[..., None].to(x)


def score(scores: Tensor, spread: Tensor, key_spread: Tensor, weight: Tensor, scratch: Workspace) -> Tensor:
    """How much a key matters to a cluster: T + min(σ²/2, 2σ) + ½ log ‖v − v̄‖², ``(A, f, n)``.

    σ² is the variance of q·k over the cluster's queries, taken as a product of one number per cluster and one per
    key. σ²/2 is what it adds to the mean of exp(q·k); the cap 2σ keeps a key with a huge norm from being chosen
    for that alone. The last term says how far the output would move: by the weight times the value.

    Args:
        scores: T ``(A, f, n)``, of the clusters' centroids.
        spread: ``(A, f, 1)``, σ of the cluster.
        key_spread: ``(A, 1, n)``, σ of the key, relative.
        weight: ``(A, 1, n)``, ½ log ‖v − v̄‖².
    """
    sigma = torch.mul(spread, key_spread, out=scratch.get("sigma", tuple(scores.shape), scores.dtype))
    capped = torch.clamp(sigma, max=4.0, out=scratch.get("capped", tuple(scores.shape), scores.dtype))
    return torch.addcmul(scores, sigma, capped, value=0.5, out=capped).add_(weight)


def prefer_own(scores: Tensor, own: Tensor) -> None:
    """Puts each cluster's own keys, those of its branch of the tree, before all others, in place.

    Without this exact retrieval (one key per query, which no centroid resembles) would fail.

    Args:
        scores: ``(A, f, n)``; -inf, a masked key, stays.
        own: ``(A, 1, n)``, the cluster to which a candidate belongs; none if it is not in [0, f).
    """
    at = own.clamp(0, scores.shape[1] - 1)  # (A, 1, n)
    now = scores.gather(1, at)
    scores.scatter_(1, at, now.masked_fill((at == own) & (now != -torch.inf), torch.inf))


def choose(scores: Tensor, n_near: int) -> Tensor:
    """Positions of the `n_near` largest scores, ascending: ``(A, f, S)`` int64.

    Example:
        >>> import torch
        >>> choose(torch.tensor([[[0.5, 0.1, 0.9, 0.7]]]), 2)
        tensor([[[2, 3]]])
    """
    n = scores.shape[-1]
    if n_near >= n:
        return torch.arange(n, device=scores.device).expand(scores.shape)
    if scores.device.type != "cpu":
        return scores.topk(n_near, dim=-1).indices.sort(dim=-1).values
    best = np.argpartition(scores.numpy(), n - n_near, axis=-1)[..., n - n_near :]  # ten times as fast as topk
    return torch.from_numpy(np.sort(best, axis=-1))
