"""Select near keys and fold the others in the extension: the descent of the torch backend with a fused level.

Shapes: as in `smyrf.backends.torch.selection`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smyrf.backends.forward_mode import refuse_forward_mode
from smyrf.backends.native.level import fold_level, fold_level_backward
from smyrf.backends.torch import selection as descent
from smyrf.backends.torch.candidates import narrow
from smyrf.call import Call
from smyrf.grouping.stages import Selection, Tree
from smyrf.methods import Level


def select_and_fold(call: Call, tree: Tree, levels: tuple[Level, ...]) -> Selection:
    """Near keys and far keys of each leaf (`smyrf.grouping.stages.SelectAndFold`)."""
    refuse_forward_mode((call.k, call.v), "backend='native'", "pass backend='reference'")
    return descent.run(_select_and_fold, call, tree, levels)


@torch.library.custom_op("smyrf::select_and_fold_native", mutates_args=(), device_types="cpu")
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
    levels = descent.read_levels(sizes)
    results = descent.empty_results(q, k, v, levels)
    leaves, side = descent.all_statistics(q, k, v, key_mask, queries, keys, leaf_of_key, scale)

    def fold(places: Tensor | None, level: Level, centroids: Tensor, spread: Tensor, own: int, *out: Tensor) -> None:
        fold_level(k, v, key_mask, *side[:4], places, centroids, spread, level, own, *out)

    descent.descend(levels, leaves, side, descent.every_row(key_mask, q), results, fold)
    return results


@_select_and_fold.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Any:
    return descent.empty_results(q, k, v, descent.read_levels(args[-1]))


@torch.library.custom_op("smyrf::select_and_fold_native_backward", mutates_args=(), device_types="cpu")
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
    levels, places = descent.read_levels(sizes), None
    dk, dv = (torch.zeros(x.shape, dtype=far_keys.dtype) for x in (k, v))
    parts = (x.contiguous() for x in (dkeys, dvalues, dbias))
    for level, q, its_kept, *far in descent.by_level(levels, centroids, kept, far_keys, far_values, bias, *parts):
        n_above = len(order) if places is None else len(places)  # A
        clusters = (n_above, len(order) * level.n_clusters // n_above)  # A, f
        q = q.reshape(*clusters, -1)
        fold_level_backward(k, v, key_mask, order, places, q, level, its_kept, tuple(far[:3]), tuple(far[3:]), dk, dv)
        places = narrow(places, its_kept.reshape(*clusters, -1))
    return dk.to(k.dtype), dv.to(v.dtype)


@_select_and_fold_backward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    k, v = args[9], args[10]
    return k.new_empty(k.shape), v.new_empty(v.shape)


descent.register_gradient(_select_and_fold, _select_and_fold_backward)
