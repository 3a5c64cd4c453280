"""Causal attention by recursive halving, as lists of groups.

A causal problem is two causal problems of half its length and one plain problem between them, in which
the queries of the second half attend to the keys of the first. Unrolled, that is one list of exact
causal blocks on the diagonal, and one set of lists per level, where all plain problems of a level have
the same size and are clustered together. All lists form one softmax, so nothing else is needed.

Keys and values after position i never reach output i. The *boundaries* of clusters may depend on later
queries of the same block.

Shapes: batch, heads, N queries, M keys, P plain problems of a level, each of ≤ n queries and m keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from smyrf.grouping.group import group
from smyrf.grouping.groups import Extra, Groups
from smyrf.methods import CausalLayout, Method


def causal_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    method: Method,
    *,
    seed: Tensor,
    scale: float,
    key_mask: Tensor | None = None,
) -> list[Groups]:
    """Lists in which query i meets keys j <= i alone, itself included.

    As in ``F.scaled_dot_product_attention``, position 0 of the queries is position 0 of the keys: with
    more queries than keys the last queries see all keys, with fewer the last keys are seen by none.

    Args:
        q: ``(batch, heads, N, D)``.
        k: ``(batch, kv_heads, M, D)``.
        v: ``(batch, kv_heads, M, E)``.
        key_mask: ``(batch, M)`` bool, True = may be attended to.

    Example:
        >>> import torch
        >>> from smyrf import Smyrf
        >>> x = torch.randn(1, 1, 1000, 8)
        >>> lists = causal_groups(x, x, x, Smyrf(2, 32), seed=torch.tensor(0), scale=1.0)
        >>> lists[0].causal, lists[0].shape  # four exact blocks on the diagonal
        (True, (1, 4, 250, 250))
        >>> [g.shape for g in lists[1:]]  # two rounds between neighbours, two between the halves
        [(1, 16, 32, 32), (1, 16, 32, 32), (1, 16, 32, 32), (1, 16, 32, 32)]
    """
    batch, heads, n_queries, _ = q.shape
    layout = method.plan(n_queries, k.shape[2], is_causal=True)
    assert isinstance(layout, CausalLayout)
    diagonal = _ranges(layout.blocks, q.device)  # (P, n)
    keys = diagonal.expand(batch * heads, -1, -1)
    if key_mask is not None:
        visible = key_mask[:, diagonal.clamp(min=0)] & (diagonal >= 0)  # (batch, P, n)
        keys = keys.masked_fill(~visible.repeat_interleave(heads, dim=0), -1)
    lists = [Groups(queries=diagonal.expand(batch * heads, -1, -1), keys=keys, causal=True)]

    for part in layout.parts:
        queries_of, keys_of = _ranges(part.queries, q.device), _ranges(part.keys, q.device)
        lists += _between(q, k, v, queries_of, keys_of, method, seed=seed, scale=scale, key_mask=key_mask)
    return lists


def _ranges(spans: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    """Positions of each span, filled up with -1 to one length."""
    start = torch.tensor([first for first, _ in spans], device=device)[:, None]
    size = torch.tensor([last - first for first, last in spans], device=device)[:, None]
    offset = torch.arange(max(last - first for first, last in spans), device=device)
    return (start + offset).masked_fill(offset >= size, -1)


def _between(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries_of: Tensor,
    keys_of: Tensor,
    method: Method,
    *,
    seed: Tensor,
    scale: float,
    key_mask: Tensor | None,
) -> list[Groups]:
    """Cluster P plain problems, the queries ``(P, n)`` against the keys ``(P, m)``, all at once."""
    batch, heads = q.shape[:2]
    n_problems = len(queries_of)

    def parts(x: Tensor, which: Tensor) -> Tensor:
        """(batch, heads, N, D) → (batch·P, heads, n, D)."""
        return x[:, :, which.clamp(min=0)].transpose(1, 2).flatten(0, 1)

    mask = (keys_of >= 0).expand(batch, -1, -1)  # (batch, P, m)
    if key_mask is not None:
        mask = mask & key_mask[:, keys_of.clamp(min=0)]
    with torch.set_grad_enabled(torch.is_grad_enabled() and method.has_far_keys):  # far keys have gradients
        lists = group(
            parts(q.detach(), queries_of),
            parts(k, keys_of),
            parts(v, keys_of),
            method,
            seed=seed,
            scale=scale,
            key_mask=mask.flatten(0, 1),
        )

    def by_row(x: Tensor) -> Tensor:
        """(batch·P·heads, L, …) → (batch·heads, P, L, …)."""
        return x.view(batch, n_problems, heads, *x.shape[1:]).transpose(1, 2).flatten(0, 1)

    def relabel(local: Tensor, whole: Tensor) -> Tensor:
        """Positions within a problem → positions in the sequence, (batch·heads, P·L, C); empty stays empty."""
        problem = torch.arange(n_problems, device=whole.device)[:, None, None]  # (P, 1, 1)
        places = by_row(local)  # (batch·heads, P, L, C)
        return whole[problem, places.clamp(min=0)].masked_fill(places < 0, -1).flatten(1, 2)

    return [
        replace(
            groups,
            queries=relabel(groups.queries, queries_of),
            keys=relabel(groups.keys, keys_of),
            repeats=None if groups.repeats is None else by_row(groups.repeats).flatten(1, 2),
            extra=None if groups.extra is None else Extra(*(by_row(x).flatten(1, 2) for x in groups.extra)),
        )
        for groups in lists
    ]
