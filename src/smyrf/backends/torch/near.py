"""Near keys: the keys that a cluster of queries keeps one by one, those whose folding would cost most.

Shapes: R rows (heads), N queries, M keys, D width, E value width; A any batch, f clusters, n candidates, S near keys.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from smyrf.backends.torch.rows import finite
from smyrf.backends.torch.workspace import Workspace

# Elements of keys or values that are worked on at once.
CHUNK_ELEMENTS = 1 << 18
# Keys from which means and variances are estimated.
MAX_SAMPLES = 1 << 13


def key_spread(k: Tensor, query_variance: Tensor, mask: Tensor | None, scratch: Workspace) -> tuple[Tensor, Tensor]:
    """How much q·k varies over the queries, from key to key.

    σ² = Σ_d var_q[d] (k_d − k̄_d)², divided by its mean over the valid keys.

    Args:
        k: ``(R, M, D)``, finite.
        query_variance: var_q ``(R, D)``.
        mask: ``(R, M)`` bool, True = may be attended to, or None.

    Returns:
        relative σ ``(R, M)``, and the variances of the keys' coordinates ``(R, D)``.
    """
    some = k[:, :: max(1, k.shape[1] // MAX_SAMPLES)].contiguous() if mask is None else k * mask[..., None]
    count = _count(some, mask)  # (R or 1, 1, 1)
    mean = some.sum(1, keepdim=True) / count  # (R, 1, D)
    square = some.square().sum(1, keepdim=True) / count  # (R, 1, D)
    variance = (square - mean.square()).clamp_(min=0.0)[:, 0]  # (R, D)
    total = (query_variance * variance).sum(-1, keepdim=True).clamp_(min=torch.finfo(k.dtype).tiny)  # (R, 1)
    spread = _distances(k, mean, (query_variance / total).sqrt_()[:, None], scratch)
    return finite(spread), variance  # squares of huge numbers overflow: these are ranked only by their scores


def value_weight(v: Tensor, mask: Tensor | None, scratch: Workspace) -> Tensor:
    """½ log ‖v − v̄‖² relative to its mean over the valid keys, bounded below: ``(R, M)``.

    Args:
        v: ``(R, M, E)``, finite.
    """
    count = _count(v, mask)
    mean = (v if mask is None else v * mask[..., None]).sum(1, keepdim=True) / count  # (R, 1, E)
    away = _distances(v, mean, None, scratch).square_()  # (R, M)
    valid = away if mask is None else away * mask
    typical = (valid.sum(1, keepdim=True) / count[..., 0]).clamp_(min=torch.finfo(v.dtype).tiny)  # (R, 1)
    return finite(away.div_(typical).add_(1e-4).log_().mul_(0.5))


def _count(x: Tensor, mask: Tensor | None) -> Tensor:
    """The number of valid keys, ``(R or 1, 1, 1)``."""
    return x.new_full((1, 1, 1), x.shape[1]) if mask is None else mask.sum(1).clamp(min=1).to(x)[:, None, None]


def _distances(x: Tensor, mean: Tensor, factor: Tensor | None, scratch: Workspace) -> Tensor:
    """‖(x − mean) · factor‖ ``(R, M)``, some vectors at a time: a copy of all would cost more than the rest."""
    out = x.new_empty(x.shape[:2])
    step = max(1, CHUNK_ELEMENTS // (len(x) * x.shape[-1]))
    for first in range(0, x.shape[1], step):
        part = x[:, first : first + step]
        away = torch.sub(part, mean, out=scratch.get("away", tuple(part.shape), x.dtype))
        if factor is not None:
            away.mul_(factor)
        out[:, first : first + step] = torch.linalg.vector_norm(away, dim=-1)
    return out


def score(scores: Tensor, spread: Tensor, key_spread: Tensor, weight: Tensor, scratch: Workspace) -> Tensor:
    """How much a key may matter to a cluster: T + 3σ + ½ log ‖v − v̄‖², ``(A, f, n)``.

    σ² is the variance of q·k over the cluster's queries, taken as a product of one number per cluster and one per
    key: T + 3σ bounds the score of almost all of them. The last term is how far the value would move the output.

    Args:
        scores: T ``(A, f, n)``, of the clusters' centroids.
        spread: ``(A, f, 1)``, σ of the cluster.
        key_spread: ``(A, 1, n)``, σ of the key, relative.
        weight: ``(A, 1, n)``, ½ log ‖v − v̄‖².
    """
    out = scratch.get("ranks", tuple(scores.shape), scores.dtype)
    return torch.addcmul(scores, spread, key_spread, value=3.0, out=out).add_(weight)


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
    """Positions of the `n_near` largest scores, ascending: ``(A, f, S)`` int64. Of equal scores the first are chosen.

    Example:
        >>> import torch
        >>> choose(torch.tensor([[[0.5, 0.1, 0.9, 0.7]]]), 2)
        tensor([[[2, 3]]])
    """
    n = scores.shape[-1]
    if n_near >= n:
        return torch.arange(n, device=scores.device).expand(scores.shape)
    if scores.device.type != "cpu":
        return scores.argsort(dim=-1, descending=True, stable=True)[..., :n_near].sort(dim=-1).values
    numbers = scores.numpy()
    if np.isnan(numbers.max(initial=-np.inf)):
        numbers = np.nan_to_num(numbers, nan=np.inf, posinf=np.inf, neginf=-np.inf)
    last = np.partition(numbers, n - n_near, axis=-1)[..., n - n_near, None]  # ten times as fast as topk
    best = numbers >= last
    ties = best.sum(-1) > n_near  # there the first of those that are equal to the last are chosen
    if ties.any():
        equal = numbers[ties] == last[ties]
        n_more = best[ties].sum(-1, keepdims=True) - equal.sum(-1, keepdims=True)
        best[ties] &= ~equal | (equal.cumsum(-1) <= n_near - n_more)
    return torch.from_numpy(np.nonzero(best)[-1].reshape(*scores.shape[:-1], n_near))
