"""Balanced clusters from sorted hashes (§3.4 of the paper, "Adaptive Clustering").

Queries and keys are sorted independently by their hashes; cluster i is the i-th run of the queries and the i-th run of
the keys. Where L divides both counts this is the paper's clustering. Otherwise, and where keys are masked, runs keep
one length and neighbouring runs overlap: no cluster is larger than another, none is padded, and each valid key is in at
least one. A query in two runs belongs to the first.

Shapes: B rows (batch × heads), N queries, M keys, H rounds, L clusters, C and S queries and keys
        per cluster.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from smyrf.call import Call
from smyrf.grouping.groups import Groups
from smyrf.grouping.stages import Backend
from smyrf.methods import Smyrf, SmyrfLayout


def smyrf_groups(call: Call, method: Smyrf, layout: SmyrfLayout, backend: Backend) -> list[Groups]:
    """Who attends to whom: one list of clusters per hashing round.

    Returns:
        H lists with B = batch · heads rows.

    Example:
        >>> import torch
        >>> from smyrf import Smyrf
        >>> from smyrf.backends import find_backend
        >>> q, k = torch.randn(2, 3, 24, 5), torch.randn(2, 3, 31, 5)
        >>> call, method = Call(q, k, k, scale=1.0, seed=torch.tensor(0)), Smyrf(4, 8)
        >>> rounds = smyrf_groups(call, method, call.plan(method), find_backend("torch"))
        >>> len(rounds), rounds[0].shape
        (4, (6, 3, 8, 11))
    """
    heads, n_clusters = call.q.shape[1], layout.n_clusters
    q_order, k_order = backend.sort_by_hash(call, method, n_clusters)
    q_order, k_order = q_order.flatten(0, 1), k_order.flatten(0, 1)  # (B, H, N), (B, H, M)
    valid = None if call.key_mask is None else call.key_mask.sum(-1).repeat_interleave(heads)  # (B,)
    queries = _runs(q_order, n_clusters, owned=True)  # (B, H, L, C)
    keys = _runs(k_order, n_clusters, valid)  # (B, H, L, S)
    rounds = [Groups(queries=a, keys=b) for a, b in zip(queries.unbind(1), keys.unbind(1), strict=True)]
    if method.deduplicate:
        starts = _starts(call.n_keys, n_clusters, valid, call.k.device)  # (1 or B, L)
        return [replace(groups, multiplicity=_count_meetings(groups, rounds, k_order, starts)) for groups in rounds]
    return rounds


def _runs(order: Tensor, n_clusters: int, valid: Tensor | None = None, owned: bool = False) -> Tensor:
    """Cut sorted vectors into runs of one length, evenly spread over the valid ones.

    Args:
        order: ``(B, H, N)``, the sorted indices, valid ones first.
        valid: ``(B,)``, how many are valid, or None if all are.
        owned: each index stands only in the first of its runs.

    Returns:
        ``(B, H, L, ⌈N / L⌉)``, -1 where there are not enough.
    """
    rows, n_hashes, length = order.shape
    size = -(-length // n_clusters)
    if valid is None and size * n_clusters == length:  # the runs lie side by side
        return order.view(rows, n_hashes, n_clusters, size)

    start = _starts(length, n_clusters, valid, order.device)  # (1 or B, L)
    offset = torch.arange(size, device=order.device)
    places = start[..., None] + offset  # (1 or B, L, S)
    empty = torch.zeros_like(places, dtype=torch.bool)
    if valid is not None:
        empty = (offset >= valid[:, None, None]).expand_as(places)
    if owned:
        taken = torch.nn.functional.pad(start[:, :-1] + size, (1, 0))  # (1 or B, L): the end of the run before
        empty = empty | (places < taken[..., None])
    shape = (rows, n_hashes, n_clusters, size)
    runs = order.gather(-1, places.clamp(max=length - 1)[:, None].expand(shape).flatten(2)).view(shape)
    return runs.masked_fill(empty[:, None], -1)


def _starts(length: int, n_clusters: int, valid: Tensor | None, device: torch.device) -> Tensor:
    """The place where each run starts, ``(1 or B, L)``."""
    size = -(-length // n_clusters)
    count = torch.tensor([[length]], device=device) if valid is None else valid[:, None]  # (1 or B, 1)
    step = torch.arange(n_clusters, device=device)  # (L,)
    return step * (count - count.clamp(max=size)) // max(n_clusters - 1, 1)


def _count_meetings(groups: Groups, rounds: list[Groups], k_order: Tensor, k_start: Tensor) -> Tensor:
    """In how many rounds each pair of `groups` meets, ``(B, L, C, S)``; at least 1."""
    rows, n_clusters, slots, size = groups.shape
    n_places = n_clusters * slots
    queries, keys = (x.clamp(min=0).flatten(1).long() for x in (groups.queries, groups.keys))
    starts = k_start[..., None].expand(rows, -1, slots).flatten(1)  # (B, L·C)
    positions = torch.arange(k_order.shape[-1], device=keys.device).expand(rows, -1)  # (B, M)
    counts = torch.zeros(groups.shape, dtype=torch.int16, device=keys.device)
    for h, other in enumerate(rounds):
        # Where each key stands in this round, and where the run of each query's cluster starts. Empty
        # query slots write to a place after all queries, which nothing reads.
        place = torch.empty_like(positions).scatter_(-1, k_order[:, h].long(), positions)  # (B, M)
        owner = torch.where(other.queries < 0, n_places, other.queries).flatten(1).long()
        start = starts.new_zeros(rows, n_places + 1).scatter_(-1, owner, starts)  # (B, ≥ N)
        distance = place.gather(-1, keys).int().view(rows, n_clusters, 1, size) - start.gather(-1, queries).int().view(
            rows, n_clusters, slots, 1
        )  # (B, L, C, S)
        counts += (distance >= 0) & (distance < size)
    return counts.clamp_(min=1)
