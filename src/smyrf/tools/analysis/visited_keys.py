"""Which keys a query meets one by one under a method, and how much softmax mass they hold.

Shapes: N queries, M keys, R rows; of a list: L groups, C query slots, S key slots.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from smyrf.backends import find_backend
from smyrf.backends.reference.attend import slot_of
from smyrf.call import Call
from smyrf.grouping.group import group
from smyrf.grouping.groups import Groups
from smyrf.methods import Method, PerHead, check_method
from smyrf.seeds import draw_seed
from smyrf.tools.analysis.maps import Block, check_head, head_vectors


class Reach:
    """The groups of one head by a method.

    Args:
        head: one head of one document, from `Call.head`.
        method: any but a `PerHead`.
        seed: of hashes; the clusters are those of ``attention(…, generator=seed)`` in float32.

    Attributes:
        lists: of groups, as `smyrf.backends.attend` takes them.
        output: ``(N, E)``, the attention that they give.

    Example:
        >>> from smyrf import Smyrf
        >>> x = torch.randn(1, 1, 64, 8)
        >>> reach = Reach(Call(x, x, x, 0.3), Smyrf(2, 16), seed=0)
        >>> met = reach.keys(torch.arange(64))
        >>> met.shape, bool((met.sum(1) <= 32).all())  # two rounds of 16 keys, some of them in both
        (torch.Size([64, 64]), True)
    """

    def __init__(self, head: Call, method: Method, seed: int) -> None:
        check_head(head)
        check_method(method)
        if isinstance(method, PerHead):
            raise ValueError(f"{method=} is for several heads: take the method of this one")
        q, k, v = (x[None, None] for x in head_vectors(head))  # (1, 1, N, D), (1, 1, M, D), (1, 1, M, E)
        mask = None if head.key_mask is None else head.key_mask.cpu()
        backend = find_backend(None, q.device)
        call = backend.prepare(replace(head, q=q, k=k, v=v, key_mask=mask, seed=draw_seed(seed)))
        with torch.no_grad():
            lists = group(call, method, backend)
            output, _ = backend.attend(call, lists)
        self.lists: list[Groups] = lists
        self.output = output[0, 0]  # (N, E)
        self.n_keys = head.n_keys
        # As small integers: hundreds of rounds of long texts are kept.
        self._slots = [slot_of(groups.queries, head.n_queries)[0].int() for groups in lists]  # (N,) each

    def keys(self, rows: Tensor) -> Tensor:
        """Whether each of some queries meets each key one by one, ``(R, M)`` bool; far keys are not among them."""
        met = torch.zeros(len(rows), self.n_keys + 1, dtype=torch.bool)
        for groups, slots in zip(self.lists, self._slots, strict=True):
            _, n_groups, n_slots, size = groups.shape
            slot = slots[rows].long()  # (R,), L·C for a query that is in no group
            its = groups.keys[0, (slot // n_slots).clamp(max=n_groups - 1)].long()  # (R, S)
            absent = (its < 0) | (slot == n_groups * n_slots)[:, None]
            if groups.causal:
                absent = absent | (torch.arange(size) > (slot % n_slots)[:, None])
            met.scatter_(1, its.masked_fill(absent, self.n_keys), True)  # what is absent, behind the last key
        return met[:, :-1]


def query_clusters(groups: Groups, n_queries: int) -> Tensor:
    """The group of each query of a list, ``(B, N)``; −1 for one that is in none.

    Example:
        >>> query_clusters(Groups(torch.tensor([[[3, 0], [2, -1]]]), torch.zeros(1, 2, 1)), n_queries=4)
        tensor([[ 0, -1,  1,  0]])
    """
    _, n_groups, n_slots, _ = groups.shape
    slot = slot_of(groups.queries.long(), n_queries)  # (B, N)
    return torch.where(slot == n_groups * n_slots, -1, slot // n_slots)


def captured_mass(block: Block, met: Tensor) -> Tensor:
    """Softmax mass of the keys that each query meets, out of 1: ``(R,)``.

    Args:
        met: ``(R, M)`` bool, from `Reach.keys` for the rows of the block.

    Example:
        >>> block = Block(torch.arange(1), torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([3.0]))
        >>> captured_mass(block, torch.tensor([[True, False, True]]))
        tensor([0.7000])
    """
    return (block.weights * met).sum(1)


def best_mass(block: Block, counts: Tensor) -> Tensor:
    """Softmax mass of the heaviest keys of each query, so many of them: ``(R, n)``.

    No method that meets as many keys one by one can capture more.

    Args:
        counts: ``(R, n)`` int64.

    Example:
        >>> block = Block(torch.arange(1), torch.tensor([[0.2, 0.5, 0.3]]), torch.tensor([3.0]))
        >>> best_mass(block, torch.tensor([[0, 1, 2, 9]]))
        tensor([[0.0000, 0.5000, 0.8000, 1.0000]])
    """
    heaviest = block.weights.sort(dim=1, descending=True).values.cumsum(1)  # (R, M)
    heaviest = torch.cat([torch.zeros_like(heaviest[:, :1]), heaviest], 1)  # (R, 1 + M)
    return heaviest.gather(1, counts.clamp(max=heaviest.shape[1] - 1))
