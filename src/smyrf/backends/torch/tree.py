"""One binary tree over queries and keys: clusters of queries that weigh the keys alike.

Both are seen in the few directions that matter to their inner products. A node splits its queries at the median along
their main direction, and its keys along the same one: branch i of the queries and branch i of the keys belong
together. All nodes of a depth have the same size, so that a depth is one batch. Without gradients.

Shapes: B rows (batch × heads), R rows done together, N queries, M keys, D width, r directions, L leaves.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from smyrf.backends.torch.rows import finite, row_slices, take, take_mask, take_rows
from smyrf.call import Call
from smyrf.grouping.stages import Tree

# Vectors from which a covariance is estimated, and the main direction of a node.
MAX_SAMPLES = 512
NODE_SAMPLES = 256
POWER_STEPS = 6
SUBSPACE_STEPS = 4
GRAM_PARTS = 8


def build_tree(call: Call, n_leaves: int, rank: int) -> Tree:
    """The joint tree of queries and keys (`smyrf.grouping.stages.BuildTree`)."""
    return Tree(*_build_tree(call.q.detach(), call.k.detach(), call.key_mask, n_leaves, rank))


@torch.library.custom_op("smyrf::build_tree", mutates_args=())
def _build_tree(
    q: Tensor, k: Tensor, key_mask: Tensor | None, n_leaves: int, rank: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads = q.shape[1]
    results = empty_tree(q, k, n_leaves)
    with torch.autocast(q.device.type, enabled=False):
        for rows in row_slices(q.shape[0] * heads, max(q.shape[2], k.shape[2])):
            mask = take_mask(key_mask, rows, heads)
            x, y = take_rows(q, rows, heads), take_rows(k, rows, heads)
            if mask is not None:
                y = y.masked_fill(~mask[..., None], 0.0)
            found = tree_orders(finite(x), finite(y), mask, n_leaves, rank)
            for whole, part in zip(results, found, strict=True):
                whole[rows] = part.view_as(whole[rows])
    return results


@_build_tree.register_fake
def _(q: Tensor, k: Tensor, key_mask: Any, n_leaves: int, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_tree(q, k, n_leaves)


def empty_tree(q: Tensor, k: Tensor, n_leaves: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Room for the results of `_build_tree`."""
    n_rows, n_keys = q.shape[0] * q.shape[1], k.shape[2]
    leaves = (n_rows, n_leaves, -(-q.shape[2] // n_leaves))
    return (
        q.new_empty(leaves, dtype=torch.int32),
        q.new_empty(leaves, dtype=torch.bool),
        q.new_empty((n_rows, n_keys), dtype=torch.int32),
        q.new_empty((n_rows, n_keys), dtype=torch.int32),
    )


def tree_orders(
    q: Tensor, k: Tensor, mask: Tensor | None, n_leaves: int, rank: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys in the order of the tree, leaf by leaf.

    Copies, evenly spread, fill up a length that the number of leaves does not divide. A copied query has a place but no
    output; a copied key is dropped.

    Args:
        q: ``(R, N, D)``, finite.
        k: ``(R, M, D)``, finite.
        mask: ``(R, M)`` bool, True = may be attended to, or None.
        n_leaves: a power of two.

    Returns:
        the order of the queries ``(R, L·⌈N / L⌉)``, which of these are copies, the order of the keys ``(R, M)``, and
        the leaf of each key in that order ``(R, M)``.

    Example:
        >>> import torch
        >>> x = torch.randn(1, 10, 3)
        >>> queries, copies, keys, leaves = tree_orders(x, x, None, 4, 2)
        >>> queries.shape, int(copies.sum()), sorted(keys[0].tolist()) == list(range(10))
        (torch.Size([1, 12]), 2, True)
    """
    w = basis(q, k, mask, rank)
    x, y = q @ w, k @ w  # (R, N, r), (R, M, r)
    if mask is not None:  # a masked key goes where some valid one goes, so that all branches have their share
        valid = torch.argsort((~mask).byte(), dim=1, stable=True)  # (R, M), valid ones first
        count = mask.sum(1, keepdim=True).clamp(min=1)  # (R, 1)
        stand_in = valid.gather(1, torch.arange(k.shape[1], device=k.device) % count)
        y = torch.where(mask[..., None], y, take(y, stand_in))
    q_from, q_copies = _spread_out(q.shape[1], n_leaves * -(-q.shape[1] // n_leaves), q.device)
    n_keys = n_leaves * -(-k.shape[1] // n_leaves)
    k_from, k_copies = _spread_out(k.shape[1], n_keys, k.device)
    q_order, k_order = joint_tree(x[:, q_from].contiguous(), y[:, k_from].contiguous(), n_leaves)
    branch = torch.arange(n_keys, device=k.device) // (n_keys // n_leaves)
    real = ~k_copies[k_order]  # (R, n_keys)
    shape = (len(k), k.shape[1])
    return (
        q_from[q_order],
        q_copies[q_order],
        k_from[k_order[real]].view(shape),
        branch.expand_as(k_order)[real].view(shape),
    )


def _spread_out(length: int, n_places: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which of `length` vectors stands at each of more places, and which of these are copies."""
    source = torch.arange(n_places, device=device) * length // n_places
    return source, source == torch.nn.functional.pad(source[:-1], (1, 0), value=-1)


def basis(q: Tensor, k: Tensor, mask: Tensor | None, rank: int) -> Tensor:
    """Directions W ``(R, D, r)`` in which q and k differ most as far as q·k is concerned.

    With Σ_q and Σ_k the covariances, W spans the leading eigenvectors of Σ_k Σ_q, scaled so that Wᵀ Σ_k⁻¹ W = I.
    Distances in qW and kW are then those that change inner products. A few steps of subspace iteration, W ← Σ_k Σ_q W,
    start from the coordinates with the largest variances.

    Args:
        q: ``(R, N, D)``, finite.
        k: ``(R, M, D)``, finite.
        mask: ``(R, M)`` bool, True = may be attended to, or None.
    """
    sigma_q, sigma_k = _covariance(q, None).double(), _covariance(k, mask).double()
    # Few different keys do not give full rank: the floor is well above float32's rounding.
    diagonal = sigma_k.diagonal(dim1=1, dim2=2)
    diagonal += diagonal.sum(-1, keepdim=True).mul(1e-5).clamp(min=1e-12)
    rank = min(rank, q.shape[-1])
    variances = (sigma_q.diagonal(dim1=1, dim2=2) * sigma_k.diagonal(dim1=1, dim2=2)).neg_()  # (R, D)
    first = variances.argsort(dim=1, stable=True)[:, :rank]  # (R, r)
    w = torch.zeros_like(sigma_q[..., :rank]).scatter_(1, first[:, None], 1.0)  # (R, D, r)
    tiny = torch.finfo(w.dtype).tiny
    for _ in range(SUBSPACE_STEPS):
        z = sigma_q @ w
        z = z / z.norm(dim=1, keepdim=True).clamp(min=tiny)
        w = sigma_k @ z
        gram = z.transpose(1, 2) @ w  # (R, r, r)
        diagonal = gram.diagonal(dim1=1, dim2=2)
        diagonal += diagonal.mean(-1, keepdim=True) * 1e-9 + tiny
        w = torch.linalg.solve_triangular(torch.linalg.cholesky(gram), w.transpose(1, 2), upper=False).transpose(1, 2)
    return w.to(k.dtype)


def _covariance(x: Tensor, mask: Tensor | None) -> Tensor:
    """Of a sample of the valid vectors, in units in which the largest coordinate is one: (R, D, D)."""
    if mask is None:
        x = x[:, :: max(1, x.shape[1] // MAX_SAMPLES)]
        x = x / x.abs().amax((1, 2), keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
        x = x - x.mean(1, keepdim=True)
        return _gram(x) / x.shape[1]
    step = (mask.sum(-1, keepdim=True) // MAX_SAMPLES).clamp(min=1)  # (R, 1)
    weight = (mask & ((mask.cumsum(-1) - 1) % step == 0)).to(x)[..., None]  # (R, M, 1)
    x = x * weight
    x = x / x.abs().amax((1, 2), keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    count = weight.sum(1, keepdim=True).clamp(min=1.0)  # (R, 1, 1)
    mean = x.sum(1, keepdim=True) / count  # (R, 1, D)
    return _gram((x - mean) * weight) / count


def _gram(x: Tensor) -> Tensor:
    """xᵀx ``(R, D, D)``, in parts: how a single long product is summed depends on the number of threads."""
    x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % GRAM_PARTS))
    parts = x.reshape(len(x) * GRAM_PARTS, -1, x.shape[-1])
    gram = torch.bmm(parts.transpose(1, 2), parts).view(len(x), GRAM_PARTS, *[x.shape[-1]] * 2).sum(1)
    return (gram + gram.transpose(1, 2)) / 2  # products of odd widths are symmetric only to rounding


def joint_tree(x: Tensor, y: Tensor, n_leaves: int) -> tuple[Tensor, Tensor]:
    """Orders of queries and keys in which every leaf, and every node above it, is one run.

    Args:
        x: ``(R, N, r)``, queries; y: ``(R, M, r)``, keys; n_leaves: a power of two that divides N and M.

    Returns:
        ``(R, N)`` and ``(R, M)`` int64.

    Example:
        >>> import torch
        >>> x = torch.tensor([[[5.0], [1.0], [4.0], [2.0]]])
        >>> queries, keys = joint_tree(x, -x, 2)
        >>> sorted(queries[0, :2].tolist()), sorted(keys[0, :2].tolist())  # opposite signs, opposite halves
        ([1, 3], [0, 2])
    """
    rows, _, rank = x.shape
    orders = [torch.arange(z.shape[1], device=z.device).expand(rows, -1) for z in (x, y)]
    n_nodes = 1
    while n_nodes < n_leaves:
        direction = _main_direction(x.view(rows * n_nodes, -1, rank))  # (R·n, r)
        moved = []
        for i, z in enumerate((x, y)):
            size = z.shape[1] // n_nodes
            halves = _split(_along(z.view(rows * n_nodes, size, rank), direction))  # (R·n, size)
            at = halves + torch.arange(rows * n_nodes, device=z.device)[:, None] * size  # rows of (R·N, r)
            moved.append(z.reshape(-1, rank).index_select(0, at.view(-1)).view_as(z))
            orders[i] = orders[i].reshape(-1)[at.view(-1)].view(rows, -1)
        x, y = moved
        n_nodes *= 2
    return orders[0], orders[1]


def _main_direction(x: Tensor) -> Tensor:
    """First principal direction of each node's vectors ``(n, size, r)``, ``(n, r)``, by power iteration."""
    x = x[:, :: max(1, x.shape[1] // NODE_SAMPLES)]
    x = x - x.mean(1, keepdim=True)
    gram = x.transpose(1, 2) @ x  # (n, r, r)
    largest = gram.diagonal(dim1=1, dim2=2).argmax(-1)  # (n,)
    a = gram.gather(2, largest[:, None, None].expand(-1, gram.shape[1], 1))  # (n, r, 1)
    for _ in range(POWER_STEPS):
        a = a / a.norm(dim=1, keepdim=True).clamp(min=torch.finfo(a.dtype).tiny)
        a = (gram * a.transpose(1, 2)).sum(2, keepdim=True)
    return a[..., 0]


def _along(x: Tensor, direction: Tensor) -> Tensor:
    """x·a for all vectors of all nodes, ``(n, size)``."""
    # Two columns, of which one is dropped: a product with a single one is done by other code where there is
    # a single node, which rounds differently, and a row would depend on the batch around it.
    return torch.bmm(x, direction[..., None].expand(-1, -1, 2))[..., 0]


def _split(values: Tensor) -> Tensor:
    """Positions of the smaller half, then of the larger half, each ascending, along the last axis of ``(n, size)``."""
    half = values.shape[-1] // 2
    if values.device.type != "cpu":
        return values.argsort(dim=-1, stable=True).view(-1, 2, half).sort(dim=-1).values.view_as(values)
    numbers = values.numpy()
    median = np.partition(numbers, half - 1, axis=-1)[:, half - 1, None]  # (n, 1)
    if np.isnan(median).any():  # huge coordinates overflow
        numbers = np.nan_to_num(numbers, nan=np.inf)
        median = np.partition(numbers, half - 1, axis=-1)[:, half - 1, None]
    smaller = numbers <= median
    ties = np.flatnonzero(smaller.sum(-1) > half)  # there the first of those at the median go to the smaller half
    if len(ties):
        equal = numbers[ties] == median[ties]
        n_less = smaller[ties].sum(-1, keepdims=True) - equal.sum(-1, keepdims=True)
        smaller[ties] &= ~equal | (equal.cumsum(-1) <= half - n_less)
    halves = [np.nonzero(which)[1].reshape(len(values), half) for which in (smaller, ~smaller)]
    return torch.from_numpy(np.concatenate(halves, axis=1))
