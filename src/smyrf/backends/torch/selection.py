"""Select near keys and fold the others into far keys, level by level, with PyTorch's operators.

Forward and backward are custom operators. Backward scores each level's candidates again.

Shapes: B rows (batch × heads), R rows done together, N queries, M keys, D width, E value width, T far keys of a row; of
        a level: L clusters of C queries, A clusters of the level above in all rows, f clusters below each of these,
        n candidates, S near and F far keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smyrf.backends.forward_mode import refuse_forward_mode
from smyrf.backends.operators import refuse_second_gradient
from smyrf.backends.torch import far, near
from smyrf.backends.torch.candidates import Candidates, narrow
from smyrf.backends.torch.rows import finite, row_slices, take, take_mask, take_rows
from smyrf.backends.torch.workspace import Workspace, workspace
from smyrf.call import Call
from smyrf.grouping.stages import Selection, Tree
from smyrf.methods import Level


def select_and_fold(call: Call, tree: Tree, levels: tuple[Level, ...]) -> Selection:
    """Near keys and far keys of each leaf (`smyrf.grouping.stages.SelectAndFold`)."""
    refuse_forward_mode((call.k, call.v), "backend='torch'", "pass backend='reference'")
    return run(_select_and_fold, call, tree, levels)


def run(operator: Any, call: Call, tree: Tree, levels: tuple[Level, ...]) -> Selection:
    """Call an operator with the signature of `_select_and_fold`."""
    sizes = [size for level in levels for size in level]
    keys, values, bias, near_keys, _, _ = operator(
        call.q.detach(), call.k, call.v, call.key_mask, tree.queries, tree.keys, tree.leaf_of_key, call.scale, sizes
    )
    return Selection(near_keys, keys, values, bias)


class KeySide(NamedTuple):
    """The keys of B rows in the order of the tree, with their statistics.

    Args:
        order: ``(B, M)`` int32, the key at each place.
        leaf: ``(B, M)`` int32, its leaf.
        spread: ``(B, M)``, σ of q·k over the queries, relative to the average key.
        weight: ``(B, M)``, ½ log ‖v − v̄‖², relative to the average key.
        variance: ``(B, D)``, of the keys' coordinates.
    """

    order: Tensor
    leaf: Tensor
    spread: Tensor
    weight: Tensor
    variance: Tensor


class LeafStats(NamedTuple):
    """Means of the scaled queries of each leaf ``(B, L, D)``, and of their squares."""

    mean: Tensor
    square: Tensor


@torch.library.custom_op("smyrf::select_and_fold", mutates_args=())
def _select_and_fold(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    queries: Tensor,
    keys: Tensor,
    leaf_of_key: Tensor,
    scale: float,
    sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Far keys ``(B, T, D)``, their values ``(B, T, E)`` and biases ``(B, T)``, near keys ``(B, leaves, S)``; for
    backward the centroids of all levels ``(B, ΣL, D)`` and what each keeps ``(B, ΣL·S)``: places among its candidates.
    """
    levels, heads = read_levels(sizes), q.shape[1]
    results = empty_results(q, k, v, levels)
    with torch.autocast(q.device.type, enabled=False), workspace(q.device) as scratch:
        for rows in row_slices(len(queries), max(q.shape[2], k.shape[2])):
            mask = take_mask(key_mask, rows, heads)
            k_rows, v_rows = _visible(take_rows(k, rows, heads), mask), _visible(take_rows(v, rows, heads), mask)
            tree = queries[rows], keys[rows], leaf_of_key[rows]
            leaves, side = statistics(take_rows(q, rows, heads), k_rows, v_rows, mask, *tree, scale, scratch)
            candidates = Candidates.all_keys(k_rows, v_rows, mask, side.order, scratch)
            _descend(levels, leaves, side, mask, candidates, [x[rows] for x in results], scratch)
    return results


@_select_and_fold.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Any, queries: Any, keys: Any, leaf: Any, scale: float, sizes: Any
) -> Any:
    return empty_results(q, k, v, read_levels(sizes))


def _visible(x: Tensor, mask: Tensor | None) -> Tensor:
    """x ``(R, M, D)`` with zeros where masked: weight zero times NaN is NaN."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0.0)


def read_levels(sizes: Sequence[int]) -> list[Level]:
    """Levels from the list of their sizes."""
    return [Level(*sizes[i : i + 5]) for i in range(0, len(sizes), 5)]


def empty_results(
    q: Tensor, k: Tensor, v: Tensor, levels: Sequence[Level]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Room for the results of `_select_and_fold`."""
    wide, leaf = torch.promote_types(q.dtype, torch.float32), levels[-1]
    n_rows, n_far = q.shape[0] * q.shape[1], sum(level.n_clusters * level.n_far for level in levels)
    n_kept = sum(level.n_clusters * level.n_near for level in levels)
    return (
        q.new_empty((n_rows, n_far, k.shape[-1]), dtype=wide),
        q.new_empty((n_rows, n_far, v.shape[-1]), dtype=wide),
        q.new_empty((n_rows, n_far), dtype=wide),
        q.new_empty((n_rows, leaf.n_clusters, leaf.n_near), dtype=torch.int32),
        q.new_empty((n_rows, sum(level.n_clusters for level in levels), q.shape[-1]), dtype=wide),
        q.new_empty((n_rows, n_kept), dtype=torch.int32),
    )


def statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    queries: Tensor,
    order: Tensor,
    leaf_of_key: Tensor,
    scale: float,
    scratch: Workspace,
) -> tuple[LeafStats, KeySide]:
    """Statistics of leaves and keys of R rows.

    Args:
        q: ``(R, N, D)``; k: ``(R, M, D)`` and v: ``(R, M, E)``, zero where masked.
        mask: ``(R, M)`` bool, True = may be attended to, or None.
        queries: ``(R, L, C)``, of each leaf.
        order, leaf_of_key: ``(R, M)``, the keys in the order of the tree, and their leaves.
    """
    mean, square = _moments(finite(q), queries, scale, scratch)  # (R, L, D) twice
    query_variance = (square.mean(1) - mean.mean(1).square_()).clamp_(min=0.0)  # (R, D)
    spread, variance = near.key_spread(finite(k), query_variance, mask, scratch)  # (R, M), (R, D)
    weight = near.value_weight(finite(v), mask, scratch)  # (R, M)
    at = order.long()
    side = KeySide(order, leaf_of_key, spread.gather(1, at), weight.gather(1, at), variance)
    return LeafStats(mean, square), side


def _descend(
    levels: Sequence[Level],
    leaves: LeafStats,
    side: KeySide,
    mask: Tensor | None,
    candidates: Candidates,
    results: Sequence[Tensor],
    scratch: Workspace,
) -> None:
    """Go through the levels of some rows and write the results of `_select_and_fold`."""
    *far_results, near_keys, all_centroids, all_kept = results
    (n_rows, n_keys), n_leaves = side.order.shape, levels[-1].n_clusters
    for level, centroids_out, kept_out, *far_out in _by_level(levels, all_centroids, all_kept, *far_results):
        n_above = candidates.shape[0]  # A
        clusters = (n_above, n_rows * level.n_clusters // n_above)  # A, f
        centroids = _average(leaves.mean, level)  # (R, L, D)
        variance = _average(leaves.square, level).sub_(centroids.square()).clamp_(min=0.0)
        spread = finite((variance * side.variance[:, None]).sum(-1).sqrt_())  # (R, L)
        centroids_out.copy_(centroids)
        per_cluster = n_leaves // level.n_clusters
        has_room = 2 * -(-n_keys // n_leaves) * per_cluster <= level.n_near  # for the keys of a cluster's own leaves
        own = per_cluster if has_room else 0
        q_here, spread = centroids.view(*clusters, -1), spread.view(clusters)
        _fold_level(candidates, side, scratch, level, q_here, spread, own, (kept_out, *far_out))
        candidates.places = narrow(candidates.places, kept_out.reshape(*clusters, -1))
    assert candidates.places is not None
    at = candidates.places.view(n_rows, -1).long()  # (R, leaves · S)
    found = side.order.gather(1, at)
    if mask is not None:
        found = found.masked_fill(~mask.gather(1, found.long()), -1)
    near_keys.copy_(found.view_as(near_keys))


def _fold_level(
    candidates: Candidates,
    side: KeySide,
    scratch: Workspace,
    level: Level,
    centroids: Tensor,
    spread: Tensor,
    leaves_per_cluster: int,
    outputs: tuple[Tensor, ...],
) -> None:
    """One level for all clusters of R rows.

    Args:
        centroids: ``(A, f, D)``; spread: ``(A, f)``, σ of each cluster.
        leaves_per_cluster: if a cluster's own keys come first, else 0.
        outputs: the near keys' places among the candidates, ascending, ``(R, L, S)`` int32; far keys ``(R, L, F, D)``,
            their values ``(R, L, F, E)`` and biases ``(R, L, F)``.
    """
    n_above, fan, width = centroids.shape
    parts = [x.new_empty((n_above, fan, *x.shape[2:])) for x in outputs]  # (A, f, …)
    for at, part in candidates.blocks(fan):
        here, q_here = candidates.gather(at, scratch), centroids[at, part]  # (a, n, D + E), (a, f, D)
        scores = candidates.score(q_here, here, at, scratch)  # (a, f, n)
        key_spread, weight, leaf = (
            candidates.of(x, at)[:, None] for x in (side.spread, side.weight, side.leaf)
        )  # (a, 1, n) each
        ranks = near.score(scores, spread[at, part, None], key_spread, weight, scratch)
        candidates.hide(ranks, at)
        if leaves_per_cluster:
            clusters = torch.arange(at.start, at.stop, device=centroids.device) * fan % level.n_clusters
            near.prefer_own(ranks, leaf // leaves_per_cluster - (clusters + part.start)[:, None, None])
        chosen = near.choose(ranks, level.n_near)  # (a, f, S)
        scores.scatter_(2, chosen, -torch.inf)
        found, far_bias = far.fold(scores, here, q_here, level.n_far)
        for whole, x in zip(parts, (chosen, found[..., :width], found[..., width:], far_bias), strict=True):
            whole[at, part] = x.to(whole.dtype)
    for whole, x in zip(outputs, parts, strict=True):
        whole.copy_(x.view_as(whole))


def _moments(q: Tensor, queries: Tensor, scale: float, scratch: Workspace) -> tuple[Tensor, Tensor]:
    """Means of the queries of each leaf and of their squares, times scale and its square: (R, L, D) twice."""
    n_rows, _, width = q.shape
    _, n_leaves, leaf_size = queries.shape
    mean, square = (q.new_empty(n_rows, n_leaves, width) for _ in range(2))
    step = max(1, near.CHUNK_ELEMENTS // (n_rows * leaf_size * width))
    for first in range(0, n_leaves, step):
        part = queries[:, first : first + step]  # (R, l, C)
        taken = take(q, part.flatten(1), scratch.get("ordered", (part.numel(), width), q.dtype))
        taken = taken.view(*part.shape, width)
        mean[:, first : first + step] = taken.mean(2)
        square[:, first : first + step] = taken.square_().mean(2)
    return mean.mul_(scale), square.mul_(scale**2)


def _by_level(
    levels: Sequence[Level], centroids: Tensor, kept: Tensor, *far_parts: Tensor
) -> Iterator[tuple[Any, ...]]:
    """Each level with its part of results or gradients: centroids (R, L, D), kept (R, L, S), far keys (R, L, F, …)."""
    node = place = first = 0
    for level in levels:
        n_clusters, n_kept, n_far = level.n_clusters, level.n_clusters * level.n_near, level.n_clusters * level.n_far
        yield (
            level,
            centroids[:, node : node + n_clusters],
            kept[:, place : place + n_kept].view(len(kept), n_clusters, level.n_near),
            *(_by_cluster(x[:, first : first + n_far], n_clusters) for x in far_parts),
        )
        node, place, first = node + n_clusters, place + n_kept, first + n_far


def _average(x: Tensor, level: Level) -> Tensor:
    """Means over the leaves of each cluster: (R, leaves, D) → (R, L, D)."""
    return _by_cluster(x, level.n_clusters).mean(2)


def _by_cluster(x: Tensor, n_clusters: int) -> Tensor:
    """(R, n, …) → (R, L, n / L, …)."""
    return x.view(len(x), n_clusters, -1, *x.shape[2:])


@torch.library.custom_op("smyrf::select_and_fold_backward", mutates_args=())
def _select_and_fold_backward(
    dkeys: Tensor,
    dvalues: Tensor,
    dbias: Tensor,
    far_keys: Tensor,
    far_values: Tensor,
    bias: Tensor,
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
    levels, n_keys, width = read_levels(sizes), k.shape[2], k.shape[-1]
    dk, dv = (torch.zeros(x.shape, dtype=far_keys.dtype, device=x.device) for x in (k, v))
    per_key_head = heads // k.shape[1]
    with torch.autocast(k.device.type, enabled=False), workspace(k.device) as scratch:
        for rows in row_slices(len(order), n_keys):
            mask = take_mask(key_mask, rows, heads)
            k_rows, v_rows = _visible(take_rows(k, rows, heads), mask), _visible(take_rows(v, rows, heads), mask)
            candidates = Candidates.all_keys(k_rows, v_rows, mask, order[rows], scratch)
            parts = [x[rows] for x in (centroids, kept, far_keys, far_values, bias, dkeys, dvalues, dbias)]
            total = _gradients(candidates, levels, parts, scratch)  # (R·M, D + E)
            key_heads = torch.arange(rows.start, rows.stop, device=k.device) // per_key_head  # (R,)
            to = (order[rows] + key_heads[:, None] * n_keys).view(-1)
            dk.view(-1, width).index_add_(0, to, total[:, :width])
            dv.view(-1, v.shape[-1]).index_add_(0, to, total[:, width:])
    return dk.to(k.dtype), dv.to(v.dtype)


def _gradients(candidates: Candidates, levels: list[Level], parts: list[Tensor], scratch: Workspace) -> Tensor:
    """Gradients of R rows' keys and values, in the order of the tree, ``(R·M, D + E)``."""
    total = torch.zeros_like(candidates.vectors)
    for level, centroids, kept, far_keys, far_values, bias, dkeys, dvalues, dbias in _by_level(levels, *parts):
        n_above = candidates.shape[0]
        clusters = (n_above, candidates.n_rows * level.n_clusters // n_above)  # A, f
        found, grad = torch.cat([far_keys, far_values], dim=-1), torch.cat([dkeys, dvalues], dim=-1)
        centroids, kept, found, bias, grad, dbias = (
            x.reshape(*clusters, *x.shape[2:]) for x in (centroids, kept, found, bias, grad, dbias)
        )
        for at, part in candidates.blocks(clusters[1]):
            here, q_here = candidates.gather(at, scratch), centroids[at, part]
            scores = candidates.score(q_here, here, at, scratch).scatter_(2, kept[at, part].long(), -torch.inf)
            into = scratch.get("into", tuple(here.shape), here.dtype).zero_()
            far.fold_backward(
                scores, here, q_here, found[at, part], bias[at, part], grad[at, part], dbias[at, part], into
            )
            total.index_add_(0, candidates.vector_rows(at).view(-1), into.flatten(0, 1))
        candidates.places = narrow(candidates.places, kept)
    return total


@_select_and_fold_backward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    k, v = args[9], args[10]
    return k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, key_mask, _, order, _, _, ctx.sizes = inputs
    ctx.heads = q.shape[1]
    *far_keys, near_keys, centroids, kept = output
    ctx.save_for_backward(*far_keys, centroids, kept, order, k, v, key_mask)
    ctx.mark_non_differentiable(near_keys, centroids, kept)


def register_gradient(operator: Any, backward: Any) -> None:
    """Give an operator with the signature of `_select_and_fold` its gradient, one with that of its `_backward`."""

    def differentiate(ctx: Any, dkeys: Tensor, dvalues: Tensor, dbias: Tensor, *_: Any) -> Any:
        dk, dv = backward(dkeys, dvalues, dbias, *ctx.saved_tensors, ctx.sizes, ctx.heads)
        return None, dk, dv, None, None, None, None, None, None

    operator.register_autograd(differentiate, setup_context=_setup_context)
    refuse_second_gradient(backward)


register_gradient(_select_and_fold, _select_and_fold_backward)
