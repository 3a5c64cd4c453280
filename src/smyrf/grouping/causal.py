"""Causal attention by recursive halving, as lists of groups (`smyrf.methods.causal` has the layout).

One list holds the exact causal blocks on the diagonal; each part of the layout adds the lists of its plain problems,
which are grouped together. All lists form one softmax.

Keys and values after position i never reach output i. The *boundaries* of clusters may depend on later queries of the
same block.

Shapes: batch, heads, N queries, M keys, P plain problems of a part, each of ≤ n queries and m keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from smyrf.call import Call
from smyrf.grouping.by_method import plain_groups
from smyrf.grouping.groups import FarKeys, Groups
from smyrf.grouping.stages import Backend
from smyrf.methods import CausalLayout, CausalPart, Method


def causal_groups(call: Call, method: Method, layout: CausalLayout, backend: Backend) -> list[Groups]:
    """Lists in which query i meets only keys j <= i, itself included.

    As in ``F.scaled_dot_product_attention``, position 0 of the queries is position 0 of the keys: with more queries
    than keys the last queries see all keys, with fewer the last keys are seen by none.

    Example:
        >>> import torch
        >>> from smyrf import Smyrf
        >>> from smyrf.backends import find_backend
        >>> x, method = torch.randn(1, 1, 1000, 8), Smyrf(2, 32)
        >>> call = Call(x, x, x, scale=1.0, is_causal=True, seed=torch.tensor(0))
        >>> lists = causal_groups(call, method, call.plan(method), find_backend("torch"))
        >>> lists[0].causal, lists[0].shape  # four exact blocks on the diagonal
        (True, (1, 4, 250, 250))
        >>> [g.shape for g in lists[1:]]  # two rounds between neighbours, two between the halves
        [(1, 16, 32, 32), (1, 16, 32, 32), (1, 16, 32, 32), (1, 16, 32, 32)]
    """
    diagonal = _positions(layout.blocks, call.q.device)  # (P, n)
    queries = keys = diagonal.expand(call.n_rows, -1, -1)
    if call.key_mask is not None:
        visible = call.key_mask[:, diagonal.clamp(min=0)] & (diagonal >= 0)  # (batch, P, n)
        keys = keys.masked_fill(~visible.repeat_interleave(call.q.shape[1], dim=0), -1)
    lists = [Groups(queries=queries, keys=keys, causal=True)]
    for part in layout.parts:
        lists += _part_groups(call, method, part, backend)
    return lists


def _positions(spans: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Positions of each span ``(P, n)`` int32, filled up with -1 to one length."""
    start = torch.tensor([first for first, _ in spans], dtype=torch.int32, device=device)[:, None]
    size = torch.tensor([last - first for first, last in spans], dtype=torch.int32, device=device)[:, None]
    offset = torch.arange(max(last - first for first, last in spans), dtype=torch.int32, device=device)
    return (start + offset).masked_fill(offset >= size, -1)


def _part_groups(call: Call, method: Method, part: CausalPart, backend: Backend) -> list[Groups]:
    """Group the P plain problems of a part, all at once."""
    batch, heads = call.q.shape[:2]
    n_problems = len(part.queries)
    queries_of, keys_of = (_positions(spans, call.q.device) for spans in (part.queries, part.keys))  # (P, n), (P, m)

    def problems(x: Tensor, which: Tensor) -> Tensor:
        """(batch, heads, N, D) → (batch·P, heads, n, D)."""
        return x[:, :, which.clamp(min=0)].transpose(1, 2).flatten(0, 1)

    mask = (keys_of >= 0).expand(batch, -1, -1)  # (batch, P, m)
    if call.key_mask is not None:
        mask = mask & call.key_mask[:, keys_of.clamp(min=0)]
    with torch.set_grad_enabled(torch.is_grad_enabled() and method.has_far_keys):
        plain = replace(
            call,
            q=problems(call.q.detach(), queries_of),
            k=problems(call.k, keys_of),
            v=problems(call.v, keys_of),
            key_mask=mask.flatten(0, 1),
            is_causal=False,
        )
        lists = plain_groups(plain, method, part.layout, backend)

    def by_row(x: Tensor) -> Tensor:
        """(batch·P·heads, L, …) → (batch·heads, P·L, …)."""
        return x.view(batch, n_problems, heads, *x.shape[1:]).transpose(1, 2).flatten(0, 1).flatten(1, 2)

    def relabel(local: Tensor, whole: Tensor) -> Tensor:
        """Positions within a problem → positions in the sequence, (batch·heads, P·L, C); empty stays empty."""
        places = by_row(local)  # (batch·heads, P·L, C)
        problem = torch.arange(places.shape[1], device=whole.device) // (places.shape[1] // n_problems)  # (P·L,)
        return whole[problem[:, None], places.clamp(min=0)].masked_fill(places < 0, -1)

    def relabel_far(far: FarKeys) -> FarKeys:
        """One table for the far keys of all problems."""
        first = torch.arange(n_problems, dtype=torch.int32, device=far.of_group.device) * far.bias.shape[1]  # (P,)
        index = (far.of_group + first[:, None, None]).flatten(0, 1)  # (P·L, F)
        return FarKeys(by_row(far.keys), by_row(far.values), by_row(far.bias), index)

    return [
        Groups(
            queries=relabel(groups.queries, queries_of),
            keys=relabel(groups.keys, keys_of),
            multiplicity=None if groups.multiplicity is None else by_row(groups.multiplicity),
            far=None if groups.far is None else relabel_far(groups.far),
        )
        for groups in lists
    ]
