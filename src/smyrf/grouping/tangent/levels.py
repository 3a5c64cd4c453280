"""Tangent attention as lists of groups: one operator from q, k and v to near keys and far keys.

A level clusters the queries, scores the keys that are left by the clusters' centroids, keeps the best and
folds the others. The next level does the same with smaller clusters on the keys that were kept. A query
attends to the near keys of its last cluster and to the far keys of all its clusters, one per level: the
finer the cluster, the nearer the keys that its far keys stand for.

What is chosen has no gradient. The far keys have: backward scores each level's candidates again.

Shapes: B rows (batch × heads), R rows done together, N queries, M keys, D width, E value width; of a level:
        L clusters of C queries, P clusters of the level above, f = L / P, n candidates, S near, F far keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smyrf.backends.forward_mode import refuse_forward_mode
from smyrf.backends.native import extension
from smyrf.backends.native import level as native
from smyrf.backends.torch.workspace import Workspace, workspace
from smyrf.grouping.groups import Extra, Groups
from smyrf.grouping.tangent import far, near
from smyrf.grouping.tangent.candidates import Candidates, blocks
from smyrf.grouping.tangent.tree import take, tree_orders
from smyrf.methods import Tangent
from smyrf.methods.levels import Level

# Queries and keys whose tree is built at once.
MAX_VECTORS = 1 << 15


def tangent_groups(
    q: Tensor, k: Tensor, v: Tensor, method: Tangent, *, scale: float, key_mask: Tensor | None = None
) -> list[Groups]:
    """Who attends to whom, and to which far keys: a single list.

    Args:
        q: ``(batch, heads, N, D)``.
        k: ``(batch, kv_heads, M, D)``; head h uses key head h · kv_heads // heads.
        v: ``(batch, kv_heads, M, E)``.
        key_mask: ``(batch, M)`` bool, True = may be attended to.

    Example:
        >>> import torch
        >>> from smyrf import Tangent
        >>> q, k, v = torch.randn(3, 1, 2, 512, 16).unbind()
        >>> (groups,) = tangent_groups(q, k, v, Tangent(128), scale=0.25)
        >>> groups.shape, groups.extra.bias.shape
        ((2, 32, 16, 76), torch.Size([2, 32, 8]))
    """
    refuse_forward_mode((k, v), f"method={method}", "use backward")
    levels = method.sizes(k.shape[2], q.shape[2])
    sizes = [size for level in levels for size in level]
    *extra, queries, keys, _, _, _ = _tangent(q.detach(), k, v, key_mask, scale, sizes, method.rank)
    return [Groups(queries=queries, keys=keys, extra=Extra(*extra))]


@torch.library.custom_op("smyrf::tangent", mutates_args=())
def _tangent(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, scale: float, sizes: Sequence[int], rank: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Far keys, their values and biases ``(B, L, ΣF, …)``, queries ``(B, L, C)``, near keys ``(B, L, S)``; for
    backward the centroids of all levels ``(B, ΣL, D)``, what each keeps ``(B, ΣL·S)``, as places among its
    candidates, and the tree's order of the keys ``(B, M)``.
    """
    levels = _levels(sizes)
    results = _empty(q, k, v, levels)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    with torch.autocast(q.device.type, enabled=False), workspace(q.device) as scratch:
        for rows in _row_slices(q, k):
            parts = _rows(q, k, v, key_mask, rows)
            _descend(*parts, scale, levels, rank, [x[rows] for x in results], scratch)
    return results


@_tangent.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, key_mask: Any, scale: float, sizes: Sequence[int], rank: int) -> Any:
    return _empty(q, k, v, _levels(sizes))


def _levels(sizes: Sequence[int]) -> list[Level]:
    return [Level(*sizes[i : i + 5]) for i in range(0, len(sizes), 5)]


def _empty(
    q: Tensor, k: Tensor, v: Tensor, levels: list[Level]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Room for the results of `_tangent`."""
    wide, leaf = torch.promote_types(q.dtype, torch.float32), levels[-1]
    rows, n_far = q.shape[0] * q.shape[1], sum(level.n_far for level in levels)
    n_nodes = sum(level.n_clusters for level in levels)
    n_kept = sum(level.n_clusters * level.n_near for level in levels)

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        return q.new_empty((rows, *shape), dtype=dtype)

    return (
        empty(leaf.n_clusters, n_far, k.shape[-1], dtype=wide),
        empty(leaf.n_clusters, n_far, v.shape[-1], dtype=wide),
        empty(leaf.n_clusters, n_far, dtype=wide),
        empty(leaf.n_clusters, leaf.cluster_size, dtype=torch.int64),
        empty(leaf.n_clusters, leaf.n_near, dtype=torch.int64),
        empty(n_nodes, q.shape[-1], dtype=wide),
        empty(n_kept, dtype=torch.int64),
        empty(k.shape[2], dtype=torch.int64),
    )


def _row_slices(q: Tensor, k: Tensor) -> Iterator[slice]:
    """The rows that are done together."""
    n_rows, step = q.shape[0] * q.shape[1], max(1, MAX_VECTORS // max(q.shape[2], k.shape[2]))
    for first in range(0, n_rows, step):
        yield slice(first, min(first + step, n_rows))


def _rows(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, rows: slice
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Some rows of ``(batch, heads, N, D)`` as ``(R, N, D)``, float32 or wider, and their mask ``(R, M)``."""
    wide = torch.promote_types(q.dtype, torch.float32)
    of_q, of_k = rows, _kv_rows(rows, q.shape[1], k) if q.shape[1] != k.shape[1] else rows
    mask = None if key_mask is None else key_mask[torch.arange(rows.start, rows.stop, device=q.device) // q.shape[1]]
    return q.flatten(0, 1)[of_q].to(wide), k.flatten(0, 1)[of_k].to(wide), v.flatten(0, 1)[of_k].to(wide), mask


def _kv_rows(rows: slice, heads: int, k: Tensor) -> Tensor:
    """The row of ``(batch · kv_heads, …)`` that each of some rows of ``(batch · heads, …)`` uses."""
    return torch.arange(rows.start, rows.stop, device=k.device) // (heads // k.shape[1])


def _descend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    levels: list[Level],
    rank: int,
    results: list[Tensor],
    scratch: Workspace,
) -> None:
    """`_tangent` for R rows, (R, N, D) and so on, written into `results`."""
    *far_keys, queries, near_keys, all_centroids, all_kept, k_order = results
    n_rows, n_keys, leaf = len(q), k.shape[1], levels[-1]
    # What is not finite must not decide about the rest; in the output it is what the kernel makes of it.
    finite_q, finite_k, finite_v = near.finite(q), near.finite(k), near.finite(v)
    q_order, copies, order, branch = tree_orders(finite_q, finite_k, mask, leaf.n_clusters, rank)
    queries.copy_(q_order.masked_fill(copies, -1).view_as(queries))
    k_order.copy_(order)

    mean, square = _moments(finite_q, q_order, leaf, scale, scratch)  # (R, L, D) twice
    query_variance = (square.mean(1) - mean.mean(1).square_()).clamp_(min=0.0)  # (R, D)
    spread_of_key, key_variance = near.key_spread(finite_k, query_variance, mask, scratch)  # (R, M), (R, D)
    weight_of_key = near.value_weight(finite_v, mask, scratch)  # (R, M)
    known = spread_of_key.gather(1, order), weight_of_key.gather(1, order), branch  # each (R, M)
    keys = Candidates.all_keys(k, v, mask, order, scratch)
    for level, *of_level in _walk(levels, all_centroids, all_kept, *far_keys):
        n_leaves = leaf.n_clusters // level.n_clusters  # of a cluster
        by_parent = (len(keys.candidates), n_rows * level.n_clusters // len(keys.candidates))  # A, f
        centroids = _average(mean, level)  # (R, L, D)
        variance = _average(square, level).sub_(centroids.square()).clamp_(min=0.0)
        spread = near.finite((variance * key_variance[:, None]).sum(-1).sqrt_()).view(*by_parent, 1)
        centroids = centroids.view(*by_parent, -1)
        kept = order.new_empty(*by_parent, level.n_near)
        vectors = centroids.new_empty(*by_parent, level.n_far, keys.vectors.shape[-1])  # of far keys
        bias = centroids.new_empty(*by_parent, level.n_far)
        # A branch of the tree holds the keys of so many leaves: is there room for them?
        has_room = 2 * -(-n_keys // leaf.n_clusters) * n_leaves <= level.n_near
        fused = q.device.type == "cpu" and not extension.MISSING
        run = native.keep_and_fold if fused else partial(keep_and_fold, scratch=scratch)
        run(keys, level, centroids, spread, known, n_leaves if has_room else 0, kept, vectors, bias)
        for x, whole in zip((centroids, kept), of_level[:2], strict=True):
            whole.copy_(x.view_as(whole))
        width = q.shape[-1]
        # Far keys are the same for all leaves of a cluster.
        for x, whole in zip((vectors[..., :width], vectors[..., width:], bias), of_level[2:], strict=True):
            whole.copy_(x.view(n_rows, level.n_clusters, 1, *x.shape[2:]).expand_as(whole))
        keys.keep(kept)
    chosen = keys.candidates.view(n_rows, -1)  # (R, L·S)
    found = order.gather(1, chosen - torch.arange(n_rows, device=q.device)[:, None] * n_keys)
    if keys.hidden is not None:
        found.masked_fill_(keys.hidden.view(-1)[chosen], -1)
    near_keys.copy_(found.view_as(near_keys))


def keep_and_fold(
    keys: Candidates,
    level: Level,
    centroids: Tensor,
    spread: Tensor,
    known: tuple[Tensor, Tensor, Tensor],
    leaves_of_own: int,
    kept: Tensor,
    vectors: Tensor,
    bias: Tensor,
    *,
    scratch: Workspace,
) -> None:
    """What the clusters of a level keep of their candidates, and what becomes of the others.

    Args:
        centroids: ``(A, f, D)``.
        spread: ``(A, f, 1)``, σ of each cluster.
        known: of each key its relative σ, its weight and its leaf, ``(R, M)`` each, in the tree's order.
        leaves_of_own: leaves of a cluster, if its own keys come first, else 0.
        kept: ``(A, f, S)``, is written: the places of near keys among the candidates, ascending.
        vectors, bias: ``(A, f, F, D + E)`` and ``(A, f, F)``, are written: far keys with their values.
    """
    by_parent = (centroids.shape[0], centroids.shape[1])
    for at, part in blocks(by_parent, keys):
        here, q_here = keys.gather(at, scratch), centroids[at, part]  # (a, n, D + E), (a, f, D)
        scores = keys.score(q_here, here, at, scratch)  # (a, f, n)
        of_key, weight, branches = (keys.of(x, at)[:, None] for x in known)  # (a, 1, n) each
        ranks = near.score(scores, spread[at, part], of_key, weight, scratch)
        keys.hide(ranks, at)
        if leaves_of_own:
            clusters = torch.arange(at.start, at.stop, device=kept.device) * by_parent[1] % level.n_clusters
            near.prefer_own(ranks, branches // leaves_of_own - (clusters + part.start)[:, None, None])
        kept[at, part] = chosen = near.choose(ranks, level.n_near)  # (a, f, S)
        scores.scatter_(2, chosen, -torch.inf)
        vectors[at, part], bias[at, part] = far.fold(scores, here, q_here, level.n_far)


def _moments(q: Tensor, order: Tensor, leaf: Level, scale: float, scratch: Workspace) -> tuple[Tensor, Tensor]:
    """Means of the queries of each leaf and of their squares, times scale and its square: (R, L, D) twice."""
    n_rows, _, width = q.shape
    order = order.view(n_rows, leaf.n_clusters, leaf.cluster_size)
    mean, square = (q.new_empty(n_rows, leaf.n_clusters, width) for _ in range(2))
    step = max(1, near.CHUNK_ELEMENTS // (n_rows * leaf.cluster_size * width))
    for first in range(0, leaf.n_clusters, step):
        part = order[:, first : first + step]  # (R, l, C)
        taken = take(q, part.flatten(1), scratch.get("ordered", (part.numel(), width), q.dtype)).view(
            *part.shape, width
        )
        mean[:, first : first + step] = taken.mean(2)
        square[:, first : first + step] = taken.square_().mean(2)
    return mean.mul_(scale), square.mul_(scale**2)


def _walk(levels: list[Level], centroids: Tensor, kept: Tensor, *extra: Tensor) -> Iterator[tuple[Any, ...]]:
    """Each level and its part of the results: centroids (R, L, D), kept (R, L, S), far keys (R, L, leaves, F, …)."""
    node = place = first = 0
    for level in levels:
        n_clusters, n_kept = level.n_clusters, level.n_clusters * level.n_near
        yield (
            level,
            centroids[:, node : node + n_clusters],
            kept[:, place : place + n_kept].view(len(kept), n_clusters, level.n_near),
            *(_by_cluster(x, n_clusters)[:, :, :, first : first + level.n_far] for x in extra),
        )
        node, place, first = node + n_clusters, place + n_kept, first + level.n_far


def _average(x: Tensor, level: Level) -> Tensor:
    """Means over the leaves of each cluster: (R, leaves, D) → (R, L, D)."""
    return _by_cluster(x, level.n_clusters).mean(2)


def _by_cluster(x: Tensor, n_clusters: int) -> Tensor:
    """(R, leaves, …) → (R, L, leaves / L, …)."""
    return x.view(len(x), n_clusters, -1, *x.shape[2:])


@torch.library.custom_op("smyrf::tangent_backward", mutates_args=())
def _tangent_backward(
    dkeys: Tensor,
    dvalues: Tensor,
    dbias: Tensor,
    far_keys: Tensor,
    far_values: Tensor,
    far_bias: Tensor,
    centroids: Tensor,
    kept: Tensor,
    order: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    sizes: Sequence[int],
    heads: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of k and v from those of the far keys, their values and biases."""
    levels = _levels(sizes)
    k_whole, v_whole = k.contiguous(), v.contiguous()
    dk, dv = (torch.zeros(x.shape, dtype=far_keys.dtype, device=x.device) for x in (k, v))
    q = centroids.view(len(k), heads, *centroids.shape[1:])  # for its shape alone
    with torch.autocast(k.device.type, enabled=False), workspace(k.device) as scratch:
        for rows in _row_slices(q, k):
            _, k_rows, v_rows, mask = _rows(q, k_whole, v_whole, key_mask, rows)
            keys = Candidates.all_keys(k_rows, v_rows, mask, order[rows], scratch)
            parts = [x[rows] for x in (centroids, kept, far_keys, far_values, far_bias, dkeys, dvalues, dbias)]
            total = _gradients(keys, levels, parts, scratch)  # (R·M, D + E)
            to = (order[rows] + _kv_rows(rows, heads, k)[:, None] * k.shape[2]).view(-1)
            for whole, own in ((dk, total[:, : k.shape[-1]]), (dv, total[:, k.shape[-1] :])):
                whole.view(-1, whole.shape[-1]).index_add_(0, to, own)
    return dk.to(k.dtype), dv.to(v.dtype)


def _gradients(keys: Candidates, levels: list[Level], of_rows: list[Tensor], scratch: Workspace) -> Tensor:
    """Gradients of R rows' keys and values, in the tree's order, ``(R·M, D + E)``."""
    total, n_rows = torch.zeros_like(keys.vectors), len(keys.candidates)
    for level, centroids, kept, *extra in _walk(levels, *of_rows):
        by_parent = (len(keys.candidates), n_rows * level.n_clusters // len(keys.candidates))  # A, f
        far_keys, far_values, bias = (x[:, :, 0] for x in extra[:3])  # the same for all leaves of a cluster
        dkeys, dvalues, dbias = (x.sum(2) for x in extra[3:])
        found, grad = torch.cat([far_keys, far_values], dim=-1), torch.cat([dkeys, dvalues], dim=-1)
        centroids, kept, found, bias, grad, dbias = (
            x.reshape(*by_parent, *x.shape[2:]) for x in (centroids, kept, found, bias, grad, dbias)
        )
        for at, part in blocks(by_parent, keys):
            here, q_here = keys.gather(at, scratch), centroids[at, part]
            scores = keys.score(q_here, here, at, scratch).scatter_(2, kept[at, part], -torch.inf)
            into = scratch.get("into", tuple(here.shape), here.dtype).zero_()
            far.fold_backward(
                scores, here, q_here, found[at, part], bias[at, part], grad[at, part], dbias[at, part], into
            )
            total.index_add_(0, keys.candidates[at].reshape(-1), into.flatten(0, 1))
        keys.keep(kept)
    return total


@_tangent_backward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    k, v = args[9], args[10]
    return k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, key_mask, _, ctx.sizes, _ = inputs
    ctx.heads = q.shape[1]
    *far_keys, queries, near_keys, centroids, kept, order = output
    ctx.save_for_backward(*far_keys, centroids, kept, order, k, v, key_mask)
    ctx.mark_non_differentiable(queries, near_keys, centroids, kept, order)


def _differentiate(ctx: Any, dkeys: Tensor, dvalues: Tensor, dbias: Tensor, *_: Any) -> Any:
    dk, dv = _tangent_backward(dkeys, dvalues, dbias, *ctx.saved_tensors, ctx.sizes, ctx.heads)
    return None, dk, dv, None, None, None, None


_tangent.register_autograd(_differentiate, setup_context=_setup_context)
