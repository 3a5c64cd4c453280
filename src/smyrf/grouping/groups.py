"""The one data structure between clustering and kernels: lists of query groups with their keys.

Shapes: B rows (batch × heads), N queries, M keys, D width, E value width,
        L groups, C query slots per group, S key slots per group, F extra keys per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor


class Extra(NamedTuple):
    """Keys of a group's own, which are not among the M keys.

    Args:
        keys: ``(B, L, F, D)``.
        values: ``(B, L, F, E)``.
        bias: ``(B, L, F)``, added to their scores; -inf for none.

    Example:
        >>> import torch
        >>> Extra(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), torch.zeros(1, 2, 1)).bias.shape
        torch.Size([1, 2, 1])
    """

    keys: Tensor
    values: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Groups:
    """One list of L query groups; the queries of a group attend to its keys, and to nothing else.

    A query stands in at most one slot of a list; a key may stand in any number of groups. An index
    of -1 is an empty slot: as a query it has no output, as a key it has no weight. Several lists
    (the hashing rounds of SMYRF, the levels of the causal recursion) form one softmax: a pair that
    meets in two lists counts twice, which is the merge of eq. 15 of the paper.

    Args:
        queries: ``(B, L, C)`` int32 or int64, indices of queries, or -1.
        keys: ``(B, L, S)`` of the same dtype, indices of keys, or -1.
        causal: within a group, query slot i sees key slots j <= i alone.
        repeats: ``(B, L, C, S)`` integers from 1, or None. The weight of a pair is divided by it,
            so that a pair which meets in several lists counts once in all.
        extra: keys of each group's own, or None. A causal list has none.

    Example:
        >>> import torch
        >>> halves = torch.arange(6).view(1, 2, 3)
        >>> Groups(queries=halves, keys=halves).shape
        (1, 2, 3, 3)
    """

    queries: Tensor
    keys: Tensor
    causal: bool = False
    repeats: Tensor | None = None
    extra: Extra | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(B, L, C, S)``: rows, groups, query slots and key slots."""
        rows, n_groups, slots = self.queries.shape
        return rows, n_groups, slots, self.keys.shape[-1]

    def key_numbers(self, n_keys: int) -> Tensor:
        """A number for each key slot, ``(B, L, S + F)``; extra keys are numbered behind the M keys."""
        if self.extra is None:
            return self.keys
        rows, n_groups, n_extra = self.extra.bias.shape
        numbers = torch.arange(n_groups * n_extra, device=self.keys.device) + n_keys
        return torch.cat([self.keys, numbers.view(1, n_groups, n_extra).expand(rows, -1, -1)], dim=2)

    def long(self) -> Groups:
        """The same list with int64 indices."""
        return replace(self, queries=self.queries.long(), keys=self.keys.long())

    def rows(self, which: slice) -> Groups:
        """The same list for some of the B rows."""
        return Groups(
            queries=self.queries[which],
            keys=self.keys[which],
            causal=self.causal,
            repeats=None if self.repeats is None else self.repeats[which],
            extra=None if self.extra is None else Extra(*(x[which] for x in self.extra)),
        )


def all_pairs(rows: int, n_queries: int, n_keys: int, key_mask: Tensor | None, device: torch.device) -> Groups:
    """A single group in which every query meets every valid key: dense attention as a list.

    Args:
        key_mask: ``(B, M)`` bool, True = may be attended to, or None.

    Example:
        >>> import torch
        >>> mask = torch.tensor([[True, False, True]])
        >>> all_pairs(1, 2, 3, mask, mask.device).keys
        tensor([[[ 0, -1,  2]]])
    """
    queries = torch.arange(n_queries, device=device).expand(rows, 1, n_queries)  # (B, 1, N)
    keys = torch.arange(n_keys, device=device).expand(rows, 1, n_keys)  # (B, 1, M)
    if key_mask is not None:
        keys = keys.masked_fill(~key_mask[:, None], -1)
    return Groups(queries=queries, keys=keys)


def stack(lists: Sequence[Groups]) -> Groups:
    """Lists of one shape, without extra keys, as one list with the rows of all.

    Example:
        >>> import torch
        >>> halves = torch.arange(6).view(1, 2, 3)
        >>> stack([Groups(halves, halves), Groups(halves, halves)]).shape
        (2, 2, 3, 3)
    """
    repeats = [groups.repeats for groups in lists if groups.repeats is not None]
    return Groups(
        queries=torch.cat([groups.queries for groups in lists]),
        keys=torch.cat([groups.keys for groups in lists]),
        causal=lists[0].causal,
        repeats=torch.cat(repeats) if repeats else None,
    )


# How one list is packed: what it has beside queries and keys, as bits of one integer.
_CAUSAL, _REPEATS, _EXTRA = 1, 2, 4


def pack(lists: Sequence[Groups]) -> tuple[list[Tensor], list[int]]:
    """Lists as tensors and integers, which is what a custom operator can take.

    Example:
        >>> import torch
        >>> halves = torch.arange(6).view(1, 2, 3)
        >>> tensors, layout = pack([Groups(halves, halves, causal=True), Groups(halves, halves)])
        >>> len(tensors), layout
        (4, [1, 0])
        >>> [g.causal for g in unpack(tensors, layout)]
        [True, False]
    """
    tensors, layout = [], []
    for groups in lists:
        tensors += [groups.queries, groups.keys]
        bits = _CAUSAL if groups.causal else 0
        if groups.repeats is not None:
            tensors.append(groups.repeats)
            bits |= _REPEATS
        if groups.extra is not None:
            tensors += groups.extra
            bits |= _EXTRA
        layout.append(bits)
    return tensors, layout


def unpack(tensors: Sequence[Tensor], layout: Sequence[int]) -> list[Groups]:
    """The lists that `pack` has packed."""
    rest = iter(tensors)
    return [
        Groups(
            queries=next(rest),
            keys=next(rest),
            causal=bool(bits & _CAUSAL),
            repeats=next(rest) if bits & _REPEATS else None,
            extra=Extra(next(rest), next(rest), next(rest)) if bits & _EXTRA else None,
        )
        for bits in layout
    ]
