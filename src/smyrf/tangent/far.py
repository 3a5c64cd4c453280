"""The far field: the keys that a cluster does not keep, folded into a few far keys.

For a group of keys let λ(q) = log Σ exp(q·k). Its tangent at the cluster's centroid q̄ is λ(q̄) + (q − q̄)·k̃ with
k̃ = Σ P k, P = softmax(q̄·k): one far key with a bias c = λ(q̄) − q̄·k̃ and the value ṽ = Σ P v. λ is convex, so
a far key never has more weight than its group.

Shapes: A any batch, f clusters, n candidates, F far keys, D width, E value width.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from smyrf.groups import Extra


def runs(n_candidates: int, n_far: int) -> Iterator[tuple[int, slice]]:
    """The candidates of each far key: runs of the tree's order, as equal as they can be.

    Example:
        >>> list(runs(10, 3))
        [(0, slice(0, 3, None)), (1, slice(3, 6, None)), (2, slice(6, 10, None))]
    """
    for i in range(n_far):
        yield i, slice(i * n_candidates // n_far, (i + 1) * n_candidates // n_far)


def fold(scores: Tensor, keys: Tensor, values: Tensor, centroids: Tensor, n_far: int) -> Extra:
    """Far keys ``(A, f, F, D)``, their values ``(A, f, F, E)`` and biases ``(A, f, F)``.

    Args:
        scores: T ``(A, f, n)``, -inf for keys that are not folded; overwritten.
        keys: ``(A, n, D)``.
        values: ``(A, n, E)``.
        centroids: q̄ ``(A, f, D)``.
    """
    shape = (*scores.shape[:2], n_far)
    far = Extra(
        keys.new_empty(*shape, keys.shape[-1]), values.new_empty(*shape, values.shape[-1]), scores.new_empty(shape)
    )
    for i, run in runs(scores.shape[-1], n_far):
        weights = scores[..., run]  # (A, f, s)
        if weights.shape[-1] == 0:
            top = mass = scores.new_zeros(shape[:2])
        else:
            top = weights.amax(-1)  # (A, f)
            weights.sub_(top.masked_fill(top == -torch.inf, 0.0)[..., None]).exp_()
            mass = weights.sum(-1)
        share = mass.masked_fill(mass == 0.0, 1.0)[..., None]  # an empty group has no weights at all
        far.keys[:, :, i] = (weights @ keys[:, run]).div_(share)
        far.values[:, :, i] = (weights @ values[:, run]).div_(share)
        far.bias[:, :, i] = top + mass.log()
    far.bias.sub_((far.keys * centroids[:, :, None]).sum(-1))
    return far


def fold_backward(
    scores: Tensor,
    keys: Tensor,
    values: Tensor,
    centroids: Tensor,
    far: Extra,
    grad: Extra,
    dkeys: Tensor,
    dvalues: Tensor,
) -> None:
    """Adds the gradients of the candidates' keys ``(A, n, D)`` and values ``(A, n, E)`` to the last two arguments.

    Centroids have none: with them the tangent would only be taken at another point.

    Args:
        scores: as for `fold`; overwritten.
        far: what `fold` has returned.
        grad: gradients of it.
    """
    lse = far.bias + (far.keys * centroids[:, :, None]).sum(-1)  # λ, (A, f, F)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    grad_keys = grad.keys - grad.bias[..., None] * centroids[:, :, None]  # the bias is λ − q̄·k̃
    delta = (grad_keys * far.keys).sum(-1) + (grad.values * far.values).sum(-1) - grad.bias  # (A, f, F)
    for i, run in runs(scores.shape[-1], lse.shape[-1]):
        weights = scores[..., run].sub_(lse[..., i, None]).exp_()  # P (A, f, s)
        dscores = grad_keys[:, :, i] @ keys[:, run].transpose(1, 2)  # (A, f, s)
        dscores += grad.values[:, :, i] @ values[:, run].transpose(1, 2)
        dscores.sub_(delta[..., i, None]).mul_(weights)
        transposed = weights.transpose(1, 2)  # (A, s, f)
        dkeys[:, run] += transposed @ grad_keys[:, :, i] + dscores.transpose(1, 2) @ centroids
        dvalues[:, run] += transposed @ grad.values[:, :, i]
