"""Gather the vectors of groups in pieces that stay in the cache.

A *unit* is some rows (heads) of some lists: its results are merged together. A *chunk* is some groups of a unit: its
vectors are gathered and multiplied together.

Shapes: B rows (batch × heads), N queries, M keys, D width, E value width, L groups, C query and S
        key slots per group, F far keys per group; P lists and R rows of a unit; G groups of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from smyrf.backends.dropout import keep
from smyrf.backends.torch.grouped_attention import Block, can_fuse
from smyrf.backends.torch.workspace import Workspace
from smyrf.grouping.groups import Groups, stack

# Elements of queries or keys that are gathered at once: small enough for a CPU's cache, large enough to hide the cost
# of starting an operator.
CHUNK_ELEMENTS = 1 << 19
# Query slots that are merged at once: short rows together, with several of their lists; a long row by itself, list by
# list.
UNIT_SLOTS = 1 << 16
LONG_ROW_SLOTS = 1 << 13


class Rows:
    """The vectors of ``(batch, heads, N, D)`` as rows of one matrix, without a copy where strides allow.

    Example:
        >>> import torch
        >>> x = torch.arange(24.0).view(1, 3, 2, 4).transpose(1, 2)  # (batch, heads, N, D), not contiguous
        >>> rows = Rows(x)
        >>> rows.matrix[rows.start[1] + 2 * rows.step].equal(x[0, 1, 2])
        True
    """

    def __init__(self, x: Tensor) -> None:
        width = x.shape[-1]
        if x.stride(-1) != 1 or any(stride % width for stride in x.stride()[:3]):
            x = x.contiguous()
        batch, heads, self.length, _ = x.shape
        self.contiguous = x.is_contiguous()
        by_batch, by_head, self.step = (stride // width for stride in x.stride()[:3])
        n_rows = 1 + (batch - 1) * by_batch + (heads - 1) * by_head + (self.length - 1) * self.step
        self.matrix = x.as_strided((n_rows, width), (width, 1))
        starts = torch.arange(batch, device=x.device)[:, None] * by_batch
        self.start = (starts + torch.arange(heads, device=x.device) * by_head).flatten()  # (B,)


class Unit(NamedTuple):
    """Some rows of some lists of one shape."""

    rows: slice
    lists: slice


def units(lists: Sequence[Groups]) -> Iterator[Unit]:
    """All rows of all lists. The lists of a row follow each other, while its vectors are in the cache."""
    n_rows = lists[0].shape[0]
    step = max(1, UNIT_SLOTS // (4 * max(groups.queries[0].numel() for groups in lists)))
    for first in range(0, n_rows, step):
        rows = slice(first, min(first + step, n_rows))
        start = 0
        while start < len(lists):
            slots = lists[start].queries[0].numel()
            most = UNIT_SLOTS // ((rows.stop - rows.start) * slots) if slots <= LONG_ROW_SLOTS else 1
            stop = start + 1
            while stop < min(start + most, len(lists)) and _alike(lists[start], lists[stop]):
                stop += 1
            yield Unit(rows, slice(start, stop))
            start = stop


def _alike(a: Groups, b: Groups) -> bool:
    plain = a.far is None and b.far is None and (a.multiplicity is None) == (b.multiplicity is None)
    return plain and a.causal == b.causal and a.shape == b.shape


class Walk:
    """The groups of one unit, to be done in chunks.

    Attributes:
        n_slots: P · R · L · C, query slots of the unit.
        slots: C, query slots of a group.
        size: S, key slots of a group, without far keys.
        slot: ``(P, R·N)``, where each query stands among the slots in each list; `n_slots` if nowhere.
        fused: whether flash operators do the work.
    """

    def __init__(
        self,
        vectors: tuple[Rows, Rows, Rows],
        lists: Sequence[Groups],
        unit: Unit,
        *,
        scale: float,
        dropout_p: float,
        seed: Tensor | None,
        scratch: Workspace,
    ) -> None:
        self._vectors, self._scratch = vectors, scratch
        self._scale, self._dropout_p, self._seed = scale, dropout_p, seed
        q, k, v = vectors
        parts = [groups.rows(unit.rows) for groups in lists[unit.lists]]
        groups = parts[0] if len(parts) == 1 else stack(parts)
        n_rows, n_groups, self.slots, self.size = groups.shape  # P·R, L, C, S
        self.n_slots = n_rows * n_groups * self.slots
        self._groups = groups
        self._some_empty = int(groups.queries.min()) < 0
        some_empty_keys = int(groups.keys.min()) < 0

        device = groups.keys.device
        head = torch.arange(unit.rows.start, unit.rows.stop, device=device).repeat(len(parts))  # (P·R,)
        kv_head = head // (len(q.start) // len(k.start))  # (P·R,)
        queries = groups.queries.clamp(min=0) if self._some_empty else groups.queries
        keys = groups.keys.clamp(min=0) if some_empty_keys else groups.keys
        # The row of each slot in contiguous tensors, as outputs and gradients are, and in the inputs.
        self._query_rows = self._rows("query rows", queries, head * q.length)  # (P·R·L·C,)
        self._key_rows = self._rows("key rows", keys, kv_head * k.length)  # (P·R·L·S,)
        self._at = [
            self._query_rows if q.contiguous else self._rows("at q", queries.long() * q.step, q.start[head]),
            self._key_rows if k.contiguous else self._rows("at k", keys.long() * k.step, k.start[kv_head]),
            self._key_rows if v.contiguous else self._rows("at v", keys.long() * v.step, v.start[kv_head]),
        ]
        self.slot = self._find_slots(len(parts))

        wide = torch.promote_types(q.matrix.dtype, torch.float32)
        self._bias = _bias(groups, some_empty_keys, wide)  # (P·R·L, 1 or C, S + F) or None
        self._n_far, self._far = groups.n_far, groups.far
        if groups.far is not None:  # rows of the table of all rows' far keys
            first = torch.arange(n_rows, device=device)[:, None, None] * groups.far.bias.shape[1]
            self._far_rows = (groups.far.of_group + first).flatten(0, 1)  # (R·L, F)
        self._numbers = self._streams = None
        if dropout_p > 0.0:
            self._numbers = groups.key_numbers(k.length).flatten(0, 1)  # (P·R·L, S + F)
            of_list = torch.arange(unit.lists.start, unit.lists.stop, device=device) * len(q.start)
            streams = head + of_list.repeat_interleave(n_rows // len(parts))  # (P·R,)
            self._streams = streams.repeat_interleave(n_groups)  # (P·R·L,)
        self.fused = can_fuse(
            q.matrix,
            v.matrix,
            self.size,
            biased=self._bias is not None,
            dropout=dropout_p > 0.0,
            n_far=self._n_far,
        )
        self._dtype = q.matrix.dtype if self.fused and q.matrix.device.type == "cuda" else wide

    def chunks(self) -> Iterator[slice]:
        """The P · R · L groups, some at a time."""
        n_groups = self.n_slots // self.slots
        width = self._vectors[0].matrix.shape[-1]
        step = max(1, CHUNK_ELEMENTS // (max(self.slots, self.size + self._n_far) * width))
        for first in range(0, n_groups, step):
            yield slice(first, min(first + step, n_groups))

    def block(self, part: slice) -> Block:
        """The vectors of the groups in `part`, in buffers that the next block overwrites."""
        queries, keys = _times(part, self.slots), _times(part, self.size)
        n_groups = part.stop - part.start
        q, k, v = (
            self.gather(name, rows.matrix, at[where]).view(n_groups, -1, rows.matrix.shape[-1])
            for name, rows, at, where in zip("qkv", self._vectors, self._at, (queries, keys, keys), strict=True)
        )  # (G, C, D), (G, S, D), (G, S, E)
        if self._far is not None:
            rows = self._far_rows[part]  # (G, F)
            k = self._append("k and far", k, self._far.keys.flatten(0, 1)[rows])  # (G, S + F, D)
            v = self._append("v and far", v, self._far.values.flatten(0, 1)[rows])  # (G, S + F, E)
        kept = None
        if self._numbers is not None:
            assert self._seed is not None and self._streams is not None
            index = self._groups.queries.flatten(0, 1)[part]
            kept = keep(self._seed, self._streams[part], index, self._numbers[part], self._dropout_p)
        return Block(
            q=q,
            k=k,
            v=v,
            bias=None if self._bias is None else self._bias[part],
            kept=kept,
            causal=self._groups.causal,
            n_far=self._n_far,
            scale=self._scale,
            fused=self.fused,
        )

    def query_rows(self, part: slice) -> Tensor:
        """Rows of a chunk's queries in a contiguous ``(B·N, …)``, ``(G·C,)``; any row for an empty slot."""
        return self._query_rows[_times(part, self.slots)]

    def key_rows(self, part: slice) -> Tensor:
        """Rows of a chunk's keys in a contiguous ``(batch·kv_heads·M, …)``, ``(G·S,)``."""
        return self._key_rows[_times(part, self.size)]

    def far_rows(self, part: slice) -> Tensor:
        """Rows of a chunk's far keys in the unit's table ``(R·T, …)``, ``(G·F,)``."""
        return self._far_rows[part].view(-1)

    def empty(self, part: slice) -> Tensor | None:
        """Which query slots of a chunk hold no query, ``(G·C,)`` bool, or None if all do."""
        return self._groups.queries.reshape(-1)[_times(part, self.slots)] < 0 if self._some_empty else None

    def gather(self, name: str, matrix: Tensor, rows: Tensor) -> Tensor:
        """matrix[rows] in the working dtype, in a buffer of the given name."""
        shape = (len(rows), matrix.shape[-1])
        taken = torch.index_select(matrix, 0, rows, out=self._scratch.get(name, shape, matrix.dtype))
        return taken if matrix.dtype == self._dtype else self._scratch.get(name, shape, self._dtype).copy_(taken)

    def _append(self, name: str, x: Tensor, far: Tensor) -> Tensor:
        """Both along the axis of keys, in a buffer."""
        shape = (len(x), x.shape[1] + far.shape[1], x.shape[2])
        return torch.cat([x, far.to(x)], dim=1, out=self._scratch.get(name, shape, x.dtype))

    def _rows(self, name: str, index: Tensor, start: Tensor) -> Tensor:
        """index ``(P·R, L, C)`` + start ``(P·R,)``, flat, in a buffer."""
        rows = self._scratch.get(name, tuple(index.shape), torch.int64)
        return torch.add(index, start[:, None, None], out=rows).view(-1)

    def _find_slots(self, n_lists: int) -> Tensor:
        queries, length = self._groups.queries, self._vectors[0].length
        n_places = len(queries) * length  # P·R·N
        place = self._rows("place", queries, torch.arange(len(queries), device=queries.device) * length)
        if self._some_empty:  # these write to a place after all queries
            place.masked_fill_(queries.reshape(-1) < 0, n_places)
        number = torch.arange(self.n_slots, out=self._scratch.get("number", (self.n_slots,), torch.int64))
        slot = self._scratch.get("slot", (n_places + 1,), torch.int64).fill_(self.n_slots)
        return slot.scatter_(0, place, number)[:-1].view(n_lists, -1)


def _times(part: slice, size: int) -> slice:
    return slice(part.start * size, part.stop * size)


def _bias(groups: Groups, some_empty: bool, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores, ``(B·L, 1 or C, S + F)``, or None if nothing is."""
    if not some_empty and groups.multiplicity is None and groups.far is None:
        return None
    rows, n_groups, _, size = groups.shape
    bias = torch.zeros(rows, n_groups, 1, size, dtype=dtype, device=groups.keys.device)  # (B, L, 1, S)
    if some_empty:
        bias.masked_fill_(groups.keys[:, :, None] < 0, -torch.inf)
    if groups.multiplicity is not None:
        bias = bias - groups.multiplicity.to(dtype).log_()  # (B, L, C, S)
    if groups.far is not None:
        far = groups.far.bias.to(bias)[:, groups.far.of_group]  # (B, L, F)
        bias = torch.cat([bias, far[:, :, None].expand(-1, -1, bias.shape[2], -1)], dim=-1)  # (B, L, 1 or C, S + F)
    return bias.flatten(0, 1)
