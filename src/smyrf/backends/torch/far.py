"""Fold the keys that a cluster does not keep into a few far keys.

For a group of keys let λ(q) = log Σ exp(q·k). Its tangent at the cluster's centroid q̄ is λ(q̄) + (q − q̄)·k̃ with
k̃ = Σ P k, P = softmax(q̄·k): one far key with a bias c = λ(q̄) − q̄·k̃ and the value ṽ = Σ P v. λ is convex, so
a far key never has more weight than its group.

Shapes: A any batch, f clusters, n candidates, F far keys, D width, E value width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def runs(n_candidates: int, n_far: int) -> Iterator[tuple[int, slice]]:
    """The candidates of each far key: runs of the tree's order, as equal as they can be.

    Example:
        >>> list(runs(10, 3))
        [(0, slice(0, 3, None)), (1, slice(3, 6, None)), (2, slice(6, 10, None))]
    """
    for i in range(n_far):
        yield i, slice(i * n_candidates // n_far, (i + 1) * n_candidates // n_far)


def fold(scores: Tensor, vectors: Tensor, centroids: Tensor, n_far: int) -> tuple[Tensor, Tensor]:
    """Far keys with their values ``(A, f, F, D + E)``, and their biases ``(A, f, F)``.

    Args:
        scores: T ``(A, f, n)``, -inf for keys that are not folded; overwritten.
        vectors: ``(A, n, D + E)``, each key followed by its value.
        centroids: q̄ ``(A, f, D)``.
    """
    shape = (*scores.shape[:2], n_far)
    found, bias = vectors.new_empty(*shape, vectors.shape[-1]), scores.new_empty(shape)
    for i, run in runs(scores.shape[-1], n_far):
        weights = scores[..., run]  # (A, f, s)
        if weights.shape[-1] == 0:
            top = mass = scores.new_zeros(shape[:2])
        else:
            top = weights.amax(-1)  # (A, f)
            weights.sub_(top.masked_fill(top == -torch.inf, 0.0)[..., None]).exp_()
            mass = weights.sum(-1)
        share = mass.masked_fill(mass == 0.0, 1.0)[..., None]  # an empty group has no weights at all
        torch.div(torch.bmm(weights, vectors[:, run]), share, out=found[:, :, i])
        bias[:, :, i] = top + mass.log()
    return found, bias - _dot(found, centroids)


def fold_backward(
    scores: Tensor,
    vectors: Tensor,
    centroids: Tensor,
    found: Tensor,
    bias: Tensor,
    grad: Tensor,
    dbias: Tensor,
    into: Tensor,
) -> None:
    """Adds the gradients of the candidates' keys and values to `into` ``(A, n, D + E)``.

    Centroids have none: moving one only moves the point at which the tangent is taken.

    Args:
        scores, vectors, centroids: as for `fold`; scores are overwritten.
        found, bias: what `fold` has returned.
        grad, dbias: gradients of these.
    """
    width = centroids.shape[-1]
    lse = bias + _dot(found, centroids)  # λ, (A, f, F)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    grad = grad.clone()
    grad[..., :width] -= dbias[..., None] * centroids[:, :, None]  # the bias is λ − q̄·k̃
    delta = (grad * found).sum(-1) - dbias  # (A, f, F)
    for i, run in runs(scores.shape[-1], lse.shape[-1]):
        weights = scores[..., run].sub_(lse[..., i, None]).clamp_(max=0.0).exp_()  # P (A, f, s); rounding apart P <= 1
        dscores = torch.bmm(grad[:, :, i], vectors[:, run].transpose(1, 2))  # (A, f, s)
        dscores.sub_(delta[..., i, None]).mul_(weights)
        into[:, run] += torch.bmm(weights.transpose(1, 2), grad[:, :, i])
        into[:, run, :width] += torch.bmm(dscores.transpose(1, 2), centroids)


def _dot(found: Tensor, centroids: Tensor) -> Tensor:
    """q̄·k̃, (A, f, F)."""
    return (found[..., : centroids.shape[-1]] * centroids[:, :, None]).sum(-1)
