"""Select near keys and fold the others in the extension: all levels in one call, without a matrix of scores.

Shapes: as in `smyrf.backends.torch.selection`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smyrf.backends.forward_mode import refuse_forward_mode
from smyrf.backends.native.extension import narrow, native, ready, running
from smyrf.backends.torch import selection as descent
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
    far_keys, far_values, far_bias, near, centroids, kept = results
    native.select_and_fold(
        q=ready(q),
        k=ready(k),
        v=ready(v),
        key_mask=None if key_mask is None else key_mask.contiguous(),
        queries=_index(queries, "queries"),
        order=_index(keys, "keys"),
        leaf_of_key=_index(leaf_of_key, "leaf_of_key"),
        scale=scale,
        levels=_sizes(levels),
        near=near,
        far_keys=far_keys,
        far_values=far_values,
        far_bias=far_bias,
        centroids=centroids,
        kept=kept,
        **running(),
    )
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
    dk, dv = (torch.zeros(x.shape, dtype=far_keys.dtype) for x in (k, v))
    native.select_and_fold_backward(
        k=ready(k),
        v=ready(v),
        key_mask=None if key_mask is None else key_mask.contiguous(),
        order=_index(order, "keys"),
        levels=_sizes(descent.read_levels(sizes)),
        far_keys=far_keys.contiguous(),
        far_values=far_values.contiguous(),
        far_bias=bias.contiguous(),
        centroids=centroids.contiguous(),
        kept=_index(kept, "kept"),
        d_far_keys=dkeys.contiguous(),
        d_far_values=dvalues.contiguous(),
        d_far_bias=dbias.contiguous(),
        dk=dk,
        dv=dv,
        **running(),
    )
    return dk.to(k.dtype), dv.to(v.dtype)


@_select_and_fold_backward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    k, v = args[9], args[10]
    return k.new_empty(k.shape), v.new_empty(v.shape)


def _index(x: Tensor, name: str) -> Tensor:
    return narrow(x, torch.int32, name).contiguous()


def _sizes(levels: Sequence[Level]) -> list[tuple[int, int, int]]:
    return [(level.n_clusters, level.n_near, level.n_far) for level in levels]


descent.register_gradient(_select_and_fold, _select_and_fold_backward)
