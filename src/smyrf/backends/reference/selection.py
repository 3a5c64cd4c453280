"""Select near keys and fold the others into far keys, written directly from the equations, one row at a time.

For a group of keys let λ(q) = log Σ exp(q·k). Its tangent at the centroid q̄ of a cluster is λ(q̄) + (q − q̄)·k̃ with
k̃ = Σ P k, P = softmax(q̄·k): one far key with the bias c = λ(q̄) − q̄·k̃ and the value ṽ = Σ P v. λ is convex, so a far
key never has more weight than its group.

Shapes: B rows (batch × heads), N queries, M keys, D width, E value width, L clusters of C queries, n candidates, S near
        and F far keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from smyrf.backends.reference.prepare import prepare
from smyrf.call import Call
from smyrf.grouping.stages import Selection, Tree
from smyrf.methods import Level

# Keys from which means and variances are estimated without a mask, as in every backend.
MAX_SAMPLES = 1 << 13


def select_and_fold(call: Call, tree: Tree, levels: tuple[Level, ...]) -> Selection:
    """Near keys and far keys of each leaf (`smyrf.grouping.stages.SelectAndFold`)."""
    call = prepare(call)
    heads = call.q.shape[1]
    rows = []
    for row in range(call.n_rows):
        q, k, v = (x.flatten(0, 1)[row] for x in (call.q, call.k, call.v))
        mask = None if call.key_mask is None else call.key_mask[row // heads]
        rows.append(_row(call.scale * q.detach(), k, v, mask, Tree(*(x[row] for x in tree)), levels))
    return Selection(*(torch.stack(parts) for parts in zip(*rows, strict=True)))


class _KeyStats(NamedTuple):
    """Statistics of the keys of one row: relative σ ``(M,)``, ½ log ‖v − v̄‖² ``(M,)``, variances ``(D,)``."""

    spread: Tensor
    weight: Tensor
    variance: Tensor


def _row(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, tree: Tree, levels: tuple[Level, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One row: scaled q ``(N, D)``, k ``(M, D)``, v ``(M, E)`` → near keys, far keys, their values and biases."""
    leaves = _finite(q)[tree.queries]  # (leaves, C, D)
    stats = _key_stats(leaves, _finite(k.detach()), _finite(v.detach()), mask)
    order, n_leaves = tree.keys.long(), len(leaves)
    visible = torch.ones_like(order, dtype=torch.bool) if mask is None else mask[order]  # (M,), in the tree's order
    candidates = [torch.arange(len(order), device=q.device)]  # of each cluster of the level above: places in the order
    far_keys = []
    for level in levels:
        clusters = leaves.reshape(level.n_clusters, -1, q.shape[-1])  # (L, queries, D)
        per_cluster = n_leaves // level.n_clusters
        has_room = 2 * -(-len(order) // n_leaves) * per_cluster <= level.n_near
        kept = []
        for number, queries in enumerate(clusters):
            centroid = queries.mean(0)  # q̄
            places = candidates[number * len(candidates) // level.n_clusters]  # (n,)
            keys, values = k[order[places]], v[order[places]]  # (n, D), (n, E)
            scores = (keys @ centroid).masked_fill(~visible[places], -torch.inf)  # T = q̄·k
            with torch.no_grad():
                variance = queries.square().mean(0) - centroid.square()  # over the cluster's queries
                spread = _finite((variance.clamp(min=0.0) * stats.variance).sum().sqrt())
                rank = scores + 3.0 * spread * stats.spread[order[places]] + stats.weight[order[places]]
                if has_room:  # the keys of the cluster's own branch come first
                    own = (tree.leaf_of_key[places] // per_cluster == number) & visible[places]
                    rank = rank.masked_fill(own, torch.inf)
                chosen = rank.argsort(descending=True, stable=True)[: level.n_near].sort().values
            kept.append(places[chosen])
            rest = scores.index_fill(0, chosen, -torch.inf)
            far_keys += [_fold(rest[run], keys[run], values[run], centroid) for run in _runs(len(places), level.n_far)]
        candidates = kept
    near = order[torch.stack(candidates)].masked_fill(~visible[torch.stack(candidates)], -1)  # (leaves, S)
    keys, values, bias = (torch.stack(parts) for parts in zip(*far_keys, strict=True))
    return near.int(), keys, values, bias


def _runs(n_candidates: int, n_far: int) -> list[slice]:
    """The candidates of each far key: runs of the tree's order, as equal as they can be."""
    return [slice(i * n_candidates // n_far, (i + 1) * n_candidates // n_far) for i in range(n_far)]


def _fold(scores: Tensor, keys: Tensor, values: Tensor, centroid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One far key: k̃ = P k, ṽ = P v and c = λ − q̄·k̃ with P = softmax T; the bias of an empty group is -inf."""
    if not bool((scores != -torch.inf).any()):
        nothing = keys.new_zeros(())
        return keys.new_zeros(keys.shape[1]), values.new_zeros(values.shape[1]), nothing - torch.inf
    weights = scores.softmax(0)  # P
    key = weights @ keys
    return key, weights @ values, scores.logsumexp(0) - centroid @ key


def _key_stats(leaves: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> _KeyStats:
    """σ² = Σ_d var_q[d] (k_d − k̄_d)² and ‖v − v̄‖², both relative to their means over the valid keys."""
    tiny = torch.finfo(k.dtype).tiny
    query_variance = (leaves.square().mean((0, 1)) - leaves.mean((0, 1)).square()).clamp(min=0.0)  # (D,)
    some = k[:: max(1, len(k) // MAX_SAMPLES)] if mask is None else k[mask]
    mean = some.mean(0) if len(some) else k.new_zeros(k.shape[1])
    variance = (some.square().mean(0) - mean.square()).clamp(min=0.0) if len(some) else k.new_zeros(k.shape[1])
    total = (query_variance * variance).sum().clamp(min=tiny)
    spread = ((k - mean) * (query_variance / total).sqrt()).norm(dim=-1)  # (M,)
    valid = v if mask is None else v[mask]
    value_mean = valid.mean(0) if len(valid) else v.new_zeros(v.shape[1])
    away = (v - value_mean).square().sum(-1)  # (M,)
    typical = (away if mask is None else away[mask]).sum() / max(len(valid), 1)
    weight = 0.5 * (away / typical.clamp(min=tiny) + 1e-4).log()
    return _KeyStats(_finite(spread), _finite(weight), variance)


def _finite(x: Tensor) -> Tensor:
    """x with zeros in place of NaN and inf: such vectors must not decide about the others."""
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)
