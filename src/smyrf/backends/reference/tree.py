"""The joint tree of queries and keys, written directly from the equations, one row at a time.

Shapes: B rows (batch × heads), N queries, M keys, D width, r directions, L leaves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smyrf.backends.reference.prepare import prepare
from smyrf.call import Call
from smyrf.grouping.stages import Tree

# Vectors from which a covariance and the main direction of a node are estimated, as in every backend.
MAX_SAMPLES, NODE_SAMPLES, POWER_STEPS, SUBSPACE_STEPS = 512, 256, 6, 4


def build_tree(call: Call, n_leaves: int, rank: int) -> Tree:
    """The joint tree (`smyrf.grouping.stages.BuildTree`)."""
    call = prepare(call)
    batch, heads = call.q.shape[:2]
    trees = []
    for row in range(batch * heads):
        q, k = (x.detach().flatten(0, 1)[row].nan_to_num(0.0, 0.0, 0.0) for x in (call.q, call.k))  # (N, D), (M, D)
        mask = k.new_ones(len(k), dtype=torch.bool) if call.key_mask is None else call.key_mask[row // heads]
        trees.append(_tree(q, k, mask, call.key_mask is not None, n_leaves, rank))
    return Tree(*(torch.stack(parts) for parts in zip(*trees, strict=True)))


def _tree(q: Tensor, k: Tensor, mask: Tensor, is_masked: bool, n_leaves: int, rank: int) -> tuple[Tensor, ...]:
    """The tree of one row."""
    w = directions(q, k[mask], rank)
    x, y = q @ w, k @ w  # (N, r), (M, r)
    if is_masked and bool(
        mask.any()
    ):  # a masked key goes where some valid one goes, so that all branches have their share
        valid = mask.nonzero()[:, 0]
        stand_in = valid[torch.arange(len(k), device=k.device) % len(valid)]
        y = torch.where(mask[:, None], y, y[stand_in])
    # Copies, evenly spread, fill up lengths that L does not divide.
    n_queries, n_keys = (n_leaves * -(-len(z) // n_leaves) for z in (x, y))
    q_source, k_source = (torch.arange(n, device=z.device) * len(z) // n for n, z in ((n_queries, x), (n_keys, y)))
    q_copy, k_copy = (torch.cat([s.new_zeros(1, dtype=torch.bool), s[1:] == s[:-1]]) for s in (q_source, k_source))
    q_order, k_order = split(x[q_source], y[k_source], n_leaves)
    real = ~k_copy[k_order]
    leaf = torch.arange(n_keys, device=k.device) // (n_keys // n_leaves)
    return (
        q_source[q_order].view(n_leaves, -1).int(),
        q_copy[q_order].view(n_leaves, -1),
        k_source[k_order][real].int(),
        leaf[real].int(),
    )


def directions(q: Tensor, k: Tensor, rank: int) -> Tensor:
    """W ``(D, r)``: the leading eigenvectors of Σ_k Σ_q with Wᵀ Σ_k⁻¹ W = I, by subspace iteration W ← Σ_k Σ_q W."""
    sigma_q, sigma_k = _covariance(q), _covariance(k)
    # Few different keys do not give full rank.
    sigma_k = sigma_k + sigma_k.trace().mul(1e-5).clamp(min=1e-12) * torch.eye(len(sigma_k)).to(sigma_k)
    rank = min(rank, len(sigma_q))
    first = (-sigma_q.diagonal() * sigma_k.diagonal()).argsort(stable=True)[:rank]
    w = torch.eye(len(sigma_q), dtype=sigma_q.dtype, device=q.device)[:, first]  # (D, r)
    tiny = torch.finfo(w.dtype).tiny
    for _ in range(SUBSPACE_STEPS):
        z = sigma_q @ w
        z = z / z.norm(dim=0).clamp(min=tiny)
        w = sigma_k @ z
        gram = z.T @ w  # WᵀΣ_k⁻¹W
        floor = gram.trace() / rank * 1e-9 + tiny
        root = torch.linalg.cholesky(gram + floor * torch.eye(rank, dtype=w.dtype, device=q.device))
        w = torch.linalg.solve_triangular(root, w.T, upper=False).T
    return w.to(k.dtype)


def _covariance(x: Tensor) -> Tensor:
    """Of a sample of the vectors, in units in which the largest coordinate is one: (D, D)."""
    x = x[:: max(1, len(x) // MAX_SAMPLES)]
    if len(x) == 0:
        return x.new_zeros(x.shape[1], x.shape[1], dtype=torch.float64)
    x = (x / x.abs().max().clamp(min=torch.finfo(x.dtype).tiny)).double()
    x = x - x.mean(0)
    return x.T @ x / len(x)


def split(x: Tensor, y: Tensor, n_leaves: int) -> tuple[Tensor, Tensor]:
    """Orders of queries ``(N,)`` and keys ``(M,)`` in which every leaf is one run; L divides both.

    Products are sums over the last axis: equal vectors must have equal values, which a matrix product does not promise.
    """
    if n_leaves == 1:
        return torch.arange(len(x), device=x.device), torch.arange(len(y), device=y.device)
    a = _main_direction(x)
    orders = []
    for q_half, k_half in zip(_halves((x * a).sum(-1)), _halves((y * a).sum(-1)), strict=True):
        below = split(x[q_half], y[k_half], n_leaves // 2)
        orders.append((q_half[below[0]], k_half[below[1]]))
    return torch.cat([order for order, _ in orders]), torch.cat([order for _, order in orders])


def _halves(values: Tensor) -> list[Tensor]:
    """Positions of the smaller and of the larger half, each ascending."""
    return [half.sort().values for half in values.argsort(stable=True).chunk(2)]


def _main_direction(x: Tensor) -> Tensor:
    """First principal direction of a node's queries, ``(r,)``, by power iteration."""
    x = x[:: max(1, len(x) // NODE_SAMPLES)]
    x = x - x.mean(0)
    gram = x.T @ x
    a = gram[:, gram.diagonal().argmax()]
    for _ in range(POWER_STEPS):
        a = gram @ (a / a.norm().clamp(min=torch.finfo(a.dtype).tiny))
    return a
