"""Tangent attention in the extension: all stages, forward and backward, in one operator.

Shapes: B rows (batch × heads), N queries, M keys, D width, E value width, L leaves of C queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smyrf.backends.forward_mode import refuse_forward_mode
from smyrf.backends.native.extension import native, ready, running
from smyrf.backends.operators import refuse_second_gradient
from smyrf.backends.torch.selection import empty_results, read_levels
from smyrf.call import Call
from smyrf.methods import Tangent, TangentLayout

# What forward saves, in the order in which the operator returns it after output and log-sum-exps.
SAVED = ("queries", "order", "far_keys", "far_values", "far_bias", "near", "centroids", "kept")


def attend_tangent(call: Call, method: Tangent, layout: TangentLayout) -> Tensor:
    """Output of a plain call of Tangent attention (`smyrf.grouping.stages.AttendTangent`)."""
    refuse_forward_mode((call.q, call.k, call.v), "backend='native'", "pass backend='reference'")
    sizes = [size for level in layout.levels for size in level]
    options = call.key_mask, call.scale, method.rank, sizes, call.dropout_p, call.dropout_seed
    return _attend_tangent(call.q, call.k, call.v, *options)[0]


@torch.library.custom_op("smyrf::attend_tangent_native", mutates_args=(), device_types="cpu")
def _attend_tangent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    scale: float,
    rank: int,
    sizes: Sequence[int],
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output ``(batch, heads, N, E)``, log-sum-exps ``(batch, heads, N)``, and what backward needs: queries
    ``(B, L, C)`` and keys ``(B, M)`` in the order of the tree, then the results of `select_and_fold`."""
    results = _empty(ready(q), k, v, sizes)
    out, lse, *saved = results
    native.tangent_forward(
        **_arguments(q, k, v, key_mask, scale, rank, sizes, dropout_p, seed, saved), out=out, lse=lse, **running()
    )
    return results if out.dtype == q.dtype else (out.to(q.dtype), *results[1:])


@_attend_tangent.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, key_mask: Any, scale: Any, rank: Any, sizes: Sequence[int], *_: Any) -> Any:
    return _empty(q, k, v, sizes)


def _empty(
    q: Tensor, k: Tensor, v: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Room for the results."""
    levels = read_levels(sizes)
    far_keys, far_values, far_bias, near, centroids, kept = empty_results(q, k, v, levels)
    n_rows, n_leaves = q.shape[0] * q.shape[1], levels[-1].n_clusters
    return (
        q.new_empty((*q.shape[:3], v.shape[-1])),
        q.new_empty(q.shape[:3], dtype=far_keys.dtype),
        q.new_empty((n_rows, n_leaves, -(-q.shape[2] // n_leaves)), dtype=torch.int32),
        q.new_empty((n_rows, k.shape[2]), dtype=torch.int32),
        far_keys,
        far_values,
        far_bias,
        near,
        centroids,
        kept,
    )


def _arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    scale: float,
    rank: int,
    sizes: Sequence[int],
    dropout_p: float,
    seed: Tensor | None,
    saved: Sequence[Tensor],
) -> dict[str, Any]:
    """What both directions take."""
    return {
        "q": ready(q),
        "k": ready(k),
        "v": ready(v),
        "key_mask": None if key_mask is None else key_mask.contiguous(),
        "scale": scale,
        "dropout_p": dropout_p,
        "seed": 0 if seed is None else int(seed),
        "rank": rank,
        "levels": [(level.n_clusters, level.n_near, level.n_far) for level in read_levels(sizes)],
        **dict(zip(SAVED, saved, strict=True)),
    }


@torch.library.custom_op("smyrf::attend_tangent_native_backward", mutates_args=(), device_types="cpu")
def _attend_tangent_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    saved: Sequence[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    scale: float,
    rank: int,
    sizes: Sequence[int],
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    wide = lse.dtype
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (q, k, v))
    native.tangent_backward(
        **_arguments(q, k, v, key_mask, scale, rank, sizes, dropout_p, seed, [x.contiguous() for x in saved]),
        out=out.to(wide).contiguous(),
        lse=lse.contiguous(),
        grad=ready(grad),
        dq=dq,
        dk=dk,
        dv=dv,
        **running(),
    )
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@_attend_tangent_backward.register_fake
def _(grad: Any, out: Any, lse: Any, saved: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, key_mask, ctx.scale, ctx.rank, ctx.sizes, ctx.dropout_p, seed = inputs
    out, lse, *saved = output
    ctx.save_for_backward(out, lse, q, k, v, key_mask, seed, *saved)
    ctx.mark_non_differentiable(lse, *saved)


def _differentiate(ctx: Any, grad: Tensor, *_: Any) -> Any:
    out, lse, q, k, v, key_mask, seed, *saved = ctx.saved_tensors
    sizes = ctx.scale, ctx.rank, ctx.sizes, ctx.dropout_p
    grads = _attend_tangent_backward(grad, out, lse, saved, q, k, v, key_mask, *sizes, seed)
    return (*grads, None, None, None, None, None, None)


_attend_tangent.register_autograd(_differentiate, setup_context=_setup_context)
refuse_second_gradient(_attend_tangent_backward)
