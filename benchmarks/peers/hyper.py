"""Sorted-LSH blocks plus a sampled residual, the idea of HyperAttention (Han et al. 2023).

Queries and keys are sorted by the Gray code of their signs at random planes; equal blocks on the diagonal are
exact. Keys sampled uniformly stand for all that are outside of the block: each of their weights is multiplied by
how many it stands for. One sample serves all queries of a head.

Shapes: B rows (batch × heads), N queries, M keys, D width, L blocks, C and S queries and keys per block, F samples.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from smyrf.backends import attend
from smyrf.call import Call
from smyrf.grouping.groups import FarKeys, Groups
from smyrf.tools.quality.peers import Peer

from .angular import gray_rank
from .runs import cut, run_of_each

N_PLANES = 7  # as in the authors' experiments
SAMPLED_SHARE = 0.75  # of the budget; the best of several on MiniLM


def sorted_blocks_and_samples_at(budget: int, n_keys: int, n_queries: int) -> Peer:
    """A share of the budget for samples, the rest for the block."""
    if budget >= n_keys:
        return sorted_blocks_and_samples(1, 0, n_keys)
    n_blocks = math.ceil(n_keys / max(1, budget * (1 - SAMPLED_SHARE)))
    return sorted_blocks_and_samples(n_blocks, budget - round(n_keys / n_blocks), n_keys)


def sorted_blocks_and_samples(n_blocks: int, n_samples: int, n_keys: int) -> Peer:
    """Blocks of M / `n_blocks` keys, and `n_samples` keys for the rest."""

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        planes = torch.randn(q.shape[-1], N_PLANES, generator=generator).to(q)
        x, y = q.detach().flatten(0, 1), k.detach().flatten(0, 1)  # (B, N, D), (B, M, D)
        q_order, k_order = (gray_rank(z, planes).argsort(dim=-1, stable=True) for z in (x, y))
        blocks = Groups(queries=cut(q_order, n_blocks), keys=cut(k_order, n_blocks))
        if n_samples == 0:
            return attend(Call(q, k, v, scale), [blocks])[0]
        rows = len(y)
        sampled = torch.rand(rows, n_keys, generator=generator).argsort(-1)[:, :n_samples]  # (B, F)
        # A sampled key that is in the block already is not counted again.
        own = run_of_each(k_order, n_blocks).gather(1, sampled)[:, None] == torch.arange(n_blocks)[:, None]  # (B, L, F)
        n_outside = n_keys - (blocks.keys >= 0).sum(-1)  # (B, L)
        stands_for = n_outside / (~own).sum(-1).clamp(min=1)
        bias = stands_for.log()[..., None].expand_as(own).masked_fill(own, -torch.inf)  # (B, L, F)

        def rows_of(z: Tensor) -> Tensor:
            index = sampled[..., None].expand(-1, -1, z.shape[-1])
            return z.flatten(0, 1).gather(1, index)[:, None].expand(-1, n_blocks, -1, -1)  # (B, L, F, D)

        far = FarKeys.per_group(rows_of(k), rows_of(v), bias.to(q))
        return attend(Call(q, k, v, scale), [Groups(blocks.queries, blocks.keys, far=far)])[0]

    settings = {"n_blocks": n_blocks, "n_samples": n_samples, "n_planes": N_PLANES}
    return Peer(run, n_keys / n_blocks + n_samples, settings)
