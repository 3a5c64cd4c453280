"""The data structure between grouping and attention: lists of query groups with their keys.

Shapes: B rows (batch × heads), N queries, M keys, D width, E value width, L groups, C query slots and S key slots per
        group, T far keys of a row, F far keys per group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class FarKeys(NamedTuple):
    """Far keys, each the summary of many keys: a table of T per row, and which of them each group attends to.

    Groups may share far keys: those of an upper level of Tangent attention belong to all groups below it, and are
    stored once.

    Args:
        keys: ``(B, T, D)``.
        values: ``(B, T, E)``.
        bias: ``(B, T)``, added to their scores; -inf for a far key that stands for nothing.
        of_group: ``(L, F)`` int32, the far keys of each group, the same for all rows.

    Example:
        >>> import torch
        >>> far = FarKeys.per_group(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), torch.zeros(1, 2, 3))
        >>> far.keys.shape, far.of_group.tolist()
        (torch.Size([1, 6, 4]), [[0, 1, 2], [3, 4, 5]])
    """

    keys: Tensor
    values: Tensor
    bias: Tensor
    of_group: Tensor

    @classmethod
    def per_group(cls, keys: Tensor, values: Tensor, bias: Tensor) -> FarKeys:
        """Far keys of which each group has its own: ``(B, L, F, D)``, ``(B, L, F, E)`` and ``(B, L, F)``."""
        _, n_groups, n_far = bias.shape
        index = torch.arange(n_groups * n_far, dtype=torch.int32, device=bias.device).view(n_groups, n_far)
        return cls(keys.flatten(1, 2), values.flatten(1, 2), bias.flatten(1, 2), index)

    def of_groups(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys ``(B, L, F, D)``, values ``(B, L, F, E)`` and biases ``(B, L, F)`` of each group."""
        return self.keys[:, self.of_group], self.values[:, self.of_group], self.bias[:, self.of_group]


@dataclass(frozen=True)
class Groups:
    """One list of L query groups; the queries of a group attend to its keys, and to nothing else.

    A query stands in at most one slot of a list; a key may stand in any number of groups. An index of -1 is an empty
    slot: as a query it has no output, as a key it has no weight. Several lists (the hashing rounds of SMYRF, the levels
    of the causal recursion) form one softmax: a pair that meets in two lists counts twice, which is the merge of
    eq. 15 of the paper.

    Args:
        queries: ``(B, L, C)`` int32, indices of queries, or -1.
        keys: ``(B, L, S)`` int32, indices of keys, or -1.
        causal: within a group, query slot i sees only key slots j <= i.
        multiplicity: ``(B, L, C, S)`` integers from 1, or None. The weight of a pair is divided by it, so that a pair
            that meets in several lists counts once in total.
        far: far keys of the groups, or None. A causal list has none.

    Example:
        >>> import torch
        >>> halves = torch.arange(6, dtype=torch.int32).view(1, 2, 3)
        >>> Groups(queries=halves, keys=halves).shape
        (1, 2, 3, 3)
    """

    queries: Tensor
    keys: Tensor
    causal: bool = False
    multiplicity: Tensor | None = None
    far: FarKeys | None = None

    def __post_init__(self) -> None:
        far = self.far
        for x in (self.queries, self.keys, self.multiplicity, None if far is None else far.of_group):
            if x is not None and x.dtype.is_floating_point:
                raise TypeError(f"groups: indices must be integer tensors, not {x.dtype}")
        for x in () if far is None else far[:3]:
            if not x.dtype.is_floating_point:
                raise TypeError(f"groups: far keys, values and biases must be floating-point tensors, not {x.dtype}")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``(B, L, C, S)``: rows, groups, query slots and key slots."""
        rows, n_groups, slots = self.queries.shape
        return rows, n_groups, slots, self.keys.shape[-1]

    @property
    def n_far(self) -> int:
        """F."""
        return 0 if self.far is None else self.far.of_group.shape[1]

    def key_numbers(self, n_keys: int) -> Tensor:
        """A number for each key slot, ``(B, L, S + F)``; far keys are numbered after the M keys, group by group."""
        if self.far is None:
            return self.keys
        rows, n_groups = self.keys.shape[:2]
        numbers = torch.arange(n_groups * self.n_far, dtype=self.keys.dtype, device=self.keys.device) + n_keys
        return torch.cat([self.keys, numbers.view(1, n_groups, self.n_far).expand(rows, -1, -1)], dim=2)

    def rows(self, which: slice) -> Groups:
        """The same list for some of the B rows."""
        far = self.far
        return Groups(
            queries=self.queries[which],
            keys=self.keys[which],
            causal=self.causal,
            multiplicity=None if self.multiplicity is None else self.multiplicity[which],
            far=None if far is None else FarKeys(far.keys[which], far.values[which], far.bias[which], far.of_group),
        )


def all_pairs(rows: int, n_queries: int, n_keys: int, key_mask: Tensor | None, device: torch.device) -> Groups:
    """A single group in which every query meets every valid key: dense attention as a list.

    Args:
        key_mask: ``(B, M)`` bool, True = may be attended to, or None.

    Example:
        >>> import torch
        >>> mask = torch.tensor([[True, False, True]])
        >>> all_pairs(1, 2, 3, mask, mask.device).keys
        tensor([[[ 0, -1,  2]]], dtype=torch.int32)
    """
    queries = torch.arange(n_queries, dtype=torch.int32, device=device).expand(rows, 1, n_queries)  # (B, 1, N)
    keys = torch.arange(n_keys, dtype=torch.int32, device=device).expand(rows, 1, n_keys)  # (B, 1, M)
    if key_mask is not None:
        keys = keys.masked_fill(~key_mask[:, None], -1)
    return Groups(queries=queries, keys=keys)


def stack(lists: Sequence[Groups]) -> Groups:
    """Lists of one shape, without far keys, as one list with the rows of all.

    Example:
        >>> import torch
        >>> halves = torch.arange(6, dtype=torch.int32).view(1, 2, 3)
        >>> stack([Groups(halves, halves), Groups(halves, halves)]).shape
        (2, 2, 3, 3)
    """
    multiplicity = [groups.multiplicity for groups in lists if groups.multiplicity is not None]
    return Groups(
        queries=torch.cat([groups.queries for groups in lists]),
        keys=torch.cat([groups.keys for groups in lists]),
        causal=lists[0].causal,
        multiplicity=torch.cat(multiplicity) if multiplicity else None,
    )


# What a packed list has besides queries and keys, as bits of one integer.
_CAUSAL, _MULTIPLICITY, _FAR = 1, 2, 4


def pack(lists: Sequence[Groups]) -> tuple[list[Tensor], list[int]]:
    """Lists as tensors and integers, which is what a custom operator takes.

    Example:
        >>> import torch
        >>> halves = torch.arange(6, dtype=torch.int32).view(1, 2, 3)
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
        if groups.multiplicity is not None:
            tensors.append(groups.multiplicity)
            bits |= _MULTIPLICITY
        if groups.far is not None:
            tensors += groups.far
            bits |= _FAR
        layout.append(bits)
    return tensors, layout


def unpack(tensors: Sequence[Tensor], layout: Sequence[int]) -> list[Groups]:
    """The lists that `pack` has packed.

    Raises:
        ValueError: there are more or fewer tensors than the layout says.
    """
    n_tensors = sum(2 + bool(bits & _MULTIPLICITY) + 4 * bool(bits & _FAR) for bits in layout)
    if n_tensors != len(tensors):
        raise ValueError(f"layout={list(layout)} needs {n_tensors} tensors, not {len(tensors)}")
    rest = iter(tensors)
    return [
        Groups(
            queries=next(rest),
            keys=next(rest),
            causal=bool(bits & _CAUSAL),
            multiplicity=next(rest) if bits & _MULTIPLICITY else None,
            far=FarKeys(next(rest), next(rest), next(rest), next(rest)) if bits & _FAR else None,
        )
        for bits in layout
    ]
