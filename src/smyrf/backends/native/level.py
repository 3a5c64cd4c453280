"""A level of Tangent attention in the extension, forward and backward: fused, without a matrix of scores.

Shapes: B rows (batch × heads), M keys, D width, E value width; of a level: L clusters per row, A clusters of the level
        above in all rows (A = B at the first level), f = B · L / A, n candidates, S near and F far keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smyrf.backends.native.extension import narrow, native, ready, running
from smyrf.methods import Level


def fold_level(
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    order: Tensor,
    leaf_of_key: Tensor,
    key_spread: Tensor,
    value_weight: Tensor,
    candidates: Tensor | None,
    centroids: Tensor,
    spread: Tensor,
    level: Level,
    leaves_per_cluster: int,
    kept_out: Tensor,
    far_keys_out: Tensor,
    far_values_out: Tensor,
    bias_out: Tensor,
) -> None:
    """Select each cluster's near keys and fold its other candidates into far keys.

    Keys and values are read in place. A place is a position in the order of the tree; each row has its own. Masked keys
    have no effect, whatever they hold: they are kept only if there are too few others, and never folded.

    The outputs are float32 for half precision, else of k's dtype, and int32. They may be slices of larger tensors along
    their second axis, such as one level of a table of all far keys; the rest of each row is contiguous.

    Args:
        k: ``(batch, kv_heads, M, D)``, any strides.
        v: ``(batch, kv_heads, M, E)``, any strides.
        key_mask: ``(batch, M)`` bool, True = may be attended to, or None.
        order: ``(B, M)`` int32, the key at each place.
        leaf_of_key: ``(B, M)`` int32, the leaf of the key at each place.
        key_spread: ``(B, M)``, relative σ of the key at each place.
        value_weight: ``(B, M)``, ½ log ‖v − v̄‖² of the key at each place.
        candidates: ``(A, n)`` int32, the places that each cluster of the level above has kept; None for all keys, at
            the first level (A = B, n = M).
        centroids: ``(A, f, D)``.
        spread: ``(A, f)``, or ``(A, f, 1)``: σ of each cluster.
        level: its sizes.
        leaves_per_cluster: leaves of a cluster whose own keys come before all others; 0 if they do not.
        kept_out: ``(B, L, S)`` or ``(A, f, S)`` int32: numbers of the near keys among the candidates, ascending.
        far_keys_out: ``(B, L · F, D)`` or ``(A, f, F, D)``.
        far_values_out: ``(B, L · F, E)`` or ``(A, f, F, E)``.
        bias_out: ``(B, L · F)`` or ``(A, f, F)``; -inf for a far key that nothing was folded into.
    """
    k, v = ready(k), ready(v)
    n_rows, (n_parents, fan_out, width) = len(order), centroids.shape
    n_clusters = n_parents * fan_out
    if n_clusters == 0:
        return
    n_far = n_clusters * level.n_far
    key_spread, value_weight, centroids, spread = (
        x.to(k.dtype).contiguous() for x in (key_spread, value_weight, centroids, spread)
    )
    native.fold_level(
        k=k,
        v=v,
        key_mask=None if key_mask is None else key_mask.contiguous(),
        order=narrow(order, torch.int32, "order").contiguous(),
        leaf_of_key=narrow(leaf_of_key, torch.int32, "leaf_of_key").contiguous(),
        key_spread=key_spread,
        value_weight=value_weight,
        candidates=None if candidates is None else narrow(candidates, torch.int32, "candidates").contiguous(),
        centroids=centroids,
        spread=spread.view(n_parents, fan_out),
        n_near=level.n_near,
        n_far=level.n_far,
        leaves_per_cluster=leaves_per_cluster,
        kept=_out(kept_out, n_rows, n_clusters * level.n_near, torch.int32, "kept_out"),
        far_keys=_out(far_keys_out, n_rows, n_far * width, k.dtype, "far_keys_out"),
        far_values=_out(far_values_out, n_rows, n_far * v.shape[-1], k.dtype, "far_values_out"),
        far_bias=_out(bias_out, n_rows, n_far, k.dtype, "bias_out"),
        **running(),
    )


def fold_level_backward(
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    order: Tensor,
    candidates: Tensor | None,
    centroids: Tensor,
    level: Level,
    kept: Tensor,
    far: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Add the gradients of the keys and values that a level has folded to dk and dv.

    Args:
        k, v, key_mask, order, candidates, centroids, level: as for `fold_level`.
        kept: what it has written.
        far: far keys, their values and biases, as it has written them.
        grads: gradients of these, of the same shapes.
        dk: ``(batch, kv_heads, M, D)``, contiguous, in the dtype of the far keys; dv: ``(batch, kv_heads, M, E)``.
    """
    k, v = ready(k), ready(v)
    n_rows = len(order)
    native.fold_level_backward(
        k=k,
        v=v,
        key_mask=None if key_mask is None else key_mask.contiguous(),
        order=narrow(order, torch.int32, "order").contiguous(),
        candidates=None if candidates is None else narrow(candidates, torch.int32, "candidates").contiguous(),
        centroids=centroids.contiguous(),
        n_near=level.n_near,
        n_far=level.n_far,
        kept=kept.reshape(n_rows, -1),
        far_keys=far[0].reshape(n_rows, -1),
        far_values=far[1].reshape(n_rows, -1),
        far_bias=far[2].reshape(n_rows, -1),
        d_far_keys=grads[0].reshape(n_rows, -1),
        d_far_values=grads[1].reshape(n_rows, -1),
        d_far_bias=grads[2].reshape(n_rows, -1),
        dk=dk,
        dv=dv,
        **running(),
    )


def _out(x: Tensor, n_rows: int, n: int, dtype: torch.dtype, name: str) -> Tensor:
    """A view ``(B, …)`` of an output with n elements; raises if it has others, or if its rows are not contiguous."""
    if x.dtype != dtype or x.numel() != n:
        raise ValueError(f"{name} has {x.numel()} elements of {x.dtype}, but needs {n} of {dtype}")
    return x.view(n_rows, n // n_rows)
