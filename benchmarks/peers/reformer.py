"""Reformer's angular LSH (Kitaev, Kaiser, Levskaya 2020), for queries and keys that are different vectors.

Queries and keys are hashed by the same random rotation and sorted by (bucket, position), each on their own; chunk
i of the queries attends to chunks i and i − 1 of the keys. As in the paper, a pair that meets in several rounds
counts once. Departure: the paper has one vector for both, and so chunks in which buckets match; here chunk i is the
i-th of each.

Shapes: B rows (batch × heads), N queries, M keys, D width, H rounds, L chunks, C and S queries and keys per chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smyrf.backends import attend
from smyrf.call import Call
from smyrf.grouping.groups import Groups
from smyrf.tools.quality.peers import Peer

from .angular import nearest_direction
from .runs import cut, run_of_each

CHUNK_SIZE = 16


def reformer_at(budget: int, n_keys: int, n_queries: int) -> Peer:
    """Rounds of pairs of chunks of 16 keys."""
    if budget >= n_keys:
        return reformer(1, 1, n_keys)
    n_chunks = max(2, -(-n_keys // min(CHUNK_SIZE, budget // 2)))
    return reformer(max(1, round(budget * n_chunks / (2 * n_keys))), n_chunks, n_keys)


def reformer(n_hashes: int, n_chunks: int, n_keys: int) -> Peer:
    """`n_hashes` rounds, each with its own rotation."""

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        x, y = q.detach().flatten(0, 1), k.detach().flatten(0, 1)  # (B, N, D), (B, M, D)
        orders = []
        for _ in range(n_hashes):
            directions = torch.randn(q.shape[-1], -(-n_chunks // 2), generator=generator).to(q)
            orders.append([nearest_direction(z, directions).argsort(dim=-1, stable=True) for z in (x, y)])
        rounds = [_chunks(q_order, k_order, n_chunks) for q_order, k_order in orders]
        places = [(run_of_each(a, n_chunks), run_of_each(b, n_chunks)) for a, b in orders]
        once = [Groups(g.queries, g.keys, multiplicity=_meetings(g, places, n_chunks)) for g in rounds]
        return attend(Call(q, k, v, scale), once)[0]

    per_round = n_keys * min(2, n_chunks) / n_chunks
    return Peer(run, n_hashes * per_round, {"n_hashes": n_hashes, "n_chunks": n_chunks})


def _chunks(q_order: Tensor, k_order: Tensor, n_chunks: int) -> Groups:
    keys = cut(k_order, n_chunks)  # (B, L, S)
    if n_chunks > 1:
        keys = torch.cat([keys, keys.roll(1, dims=1)], dim=-1)  # (B, L, 2S): its own chunk and the one before
    return Groups(queries=cut(q_order, n_chunks), keys=keys)


def _meetings(groups: Groups, places: list[tuple[Tensor, Tensor]], n_chunks: int) -> Tensor:
    """In how many rounds each pair meets, ``(B, L, C, 2S)``; at least 1."""
    rows, _, slots, size = groups.shape
    queries, keys = groups.queries.clamp(min=0).flatten(1), groups.keys.clamp(min=0).flatten(1)
    counts = torch.zeros(groups.shape, dtype=torch.int16)
    for of_query, of_key in places:
        a = of_query.gather(1, queries).view(rows, -1, slots, 1)
        b = of_key.gather(1, keys).view(rows, -1, 1, size)
        counts += (a - b) % n_chunks < 2
    return counts.clamp_(min=1)
