"""Which keys a query visits under a method, far keys excepted, and how much softmax mass they hold.

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
from smyrf.tools.analysis.maps import MapBlock, check_head, head_vectors


def method_groups(head: Call, method: Method, seed: int) -> list[Groups]:
    """Lists of groups of one head, those of ``attention(…, generator=seed)`` in float32.

    Args:
        head: one head of one document, from `Call.head`.
        method: any except `PerHead`.

    Raises:
        ValueError: the call is not that of one head, or the method is one for several heads.
    """
    check_head(head)
    check_method(method)
    if method.kind == PerHead.kind:
        raise ValueError(f"methods: {method.label} is for several heads, and each head is inspected by itself")
    backend = find_backend(None, torch.device("cpu"))
    with torch.no_grad():
        return group(backend.prepare(_on_cpu(head, seed)), method, backend)


def _on_cpu(head: Call, seed: int) -> Call:
    """The call of one head in float32 on the CPU."""
    q, k, v = (x[None, None] for x in head_vectors(head))  # (1, 1, N, D), (1, 1, M, D), (1, 1, M, E)
    mask = None if head.key_mask is None else head.key_mask.cpu()
    return replace(head, q=q, k=k, v=v, key_mask=mask, seed=draw_seed(seed))


class VisitedKeys:
    """Keys that each query of one head visits under a method.

    Args:
        head, method, seed: as for `method_groups`.

    Attributes:
        lists: of groups.
        output: ``(N, E)``, the attention that they give.

    Example:
        >>> from smyrf import Smyrf
        >>> x = torch.randn(1, 1, 64, 8)
        >>> visited = VisitedKeys(Call(x, x, x, 0.3), Smyrf(2, 16), seed=0)
        >>> met = visited.keys(torch.arange(64))
        >>> met.shape, bool((met.sum(1) <= 32).all())  # two rounds of 16 keys, some of them in both
        (torch.Size([64, 64]), True)
    """

    def __init__(self, head: Call, method: Method, seed: int) -> None:
        self.lists = method_groups(head, method, seed)
        backend = find_backend(None, torch.device("cpu"))
        with torch.no_grad():
            output, _ = backend.attend(backend.prepare(_on_cpu(head, seed)), self.lists)
        self.output = output[0, 0]  # (N, E)
        self.n_keys = head.n_keys
        # As int32: hundreds of rounds of long texts are kept.
        self._slots = [slot_of(groups.queries, head.n_queries)[0].int() for groups in self.lists]  # (N,) each

    def keys(self, rows: Tensor) -> Tensor:
        """Whether each of some queries visits each key, ``(R, M)`` bool, far keys excepted."""
        met = torch.zeros(len(rows), self.n_keys + 1, dtype=torch.bool)
        for groups, slots in zip(self.lists, self._slots, strict=True):
            _, n_groups, n_slots, size = groups.shape
            slot = slots[rows].long()  # (R,), L·C for a query in no group
            its = groups.keys[0, (slot // n_slots).clamp(max=n_groups - 1)].long()  # (R, S)
            absent = (its < 0) | (slot == n_groups * n_slots)[:, None]
            if groups.causal:
                absent = absent | (torch.arange(size) > (slot % n_slots)[:, None])
            met.scatter_(1, its.masked_fill(absent, self.n_keys), True)  # absent keys go after the last one
        return met[:, :-1]


def query_clusters(groups: Groups, n_queries: int) -> Tensor:
    """The group of each query in a list, ``(B, N)``; −1 for a query in none.

    Example:
        >>> query_clusters(Groups(torch.tensor([[[3, 0], [2, -1]]]), torch.zeros(1, 2, 1).int()), n_queries=4)
        tensor([[ 0, -1,  1,  0]])
    """
    _, n_groups, n_slots, _ = groups.shape
    slot = slot_of(groups.queries, n_queries)  # (B, N)
    return torch.where(slot == n_groups * n_slots, -1, slot // n_slots)


def captured_mass(block: MapBlock, met: Tensor) -> Tensor:
    """Softmax mass of the keys that each query visits: ``(R,)``.

    Args:
        met: ``(R, M)`` bool, from `VisitedKeys.keys` for the rows of the block.

    Example:
        >>> block = MapBlock(torch.arange(1), torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([3.0]))
        >>> captured_mass(block, torch.tensor([[True, False, True]]))
        tensor([0.7000])
    """
    return (block.weights * met).sum(1)


def best_mass(block: MapBlock, counts: Tensor) -> Tensor:
    """Softmax mass of the heaviest keys of each query, an upper bound for that of any keys of the same number.

    Args:
        counts: numbers of keys, ``(R, n)`` int64.

    Returns:
        ``(R, n)``.

    Example:
        >>> block = MapBlock(torch.arange(1), torch.tensor([[0.2, 0.5, 0.3]]), torch.tensor([3.0]))
        >>> best_mass(block, torch.tensor([[0, 1, 2, 9]]))
        tensor([[0.0000, 0.5000, 0.8000, 1.0000]])
    """
    heaviest = block.weights.sort(dim=1, descending=True).values.cumsum(1)  # (R, M)
    heaviest = torch.cat([torch.zeros_like(heaviest[:, :1]), heaviest], 1)  # (R, 1 + M)
    return heaviest.gather(1, counts.clamp(max=heaviest.shape[1] - 1))
