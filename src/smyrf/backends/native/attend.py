"""`attend` in C++: fused, O(N) memory, one pass over the groups.

This file prepares the tensors, keeps them alive during the call, and makes custom operators of the extension, so that
`torch.compile` sees one node.

Shapes: B rows (batch × heads), N queries, M keys, D width, E value width, L groups, C query and S
        key slots per group, F extra keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from smyrf.backends.forward_mode import refuse_forward_mode
from smyrf.backends.native import extension
from smyrf.backends.native.extension import native, ready, rows
from smyrf.backends.operators import differentiable, register
from smyrf.call import Call
from smyrf.grouping.groups import FarKeys, Groups, pack, unpack


def attend(call: Call, groups: Sequence[Groups]) -> tuple[Tensor, Tensor]:
    """Attention of each query to the keys of its groups (`smyrf.grouping.stages.Attend`)."""
    refuse_forward_mode((call.q, call.k, call.v), "backend='native'", "pass backend='reference'")
    groups = [one if one.far is None else replace(one, far=FarKeys.per_group(*one.far.of_groups())) for one in groups]
    tensors, layout = pack(groups)
    return _attend(call.q, call.k, call.v, tensors, layout, call.scale, call.dropout_p, call.dropout_seed)


@torch.library.custom_op("smyrf::attend_native", mutates_args=(), device_types="cpu")
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    layout: Sequence[int],
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    dtype = q.dtype
    q, k, v = (ready(x) for x in (q, k, v))
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    lse = q.new_empty(q.shape[:3])
    lists, _alive = _lists(unpack(tensors, layout), q.dtype)
    native.forward(
        q.dtype == torch.float64,
        _sizes(q, k, v),
        rows(q),
        rows(k),
        rows(v),
        lists,
        scale,
        dropout_p,
        0 if seed is None else int(seed),
        out.data_ptr(),
        lse.data_ptr(),
        extension.n_threads(),
        extension.ISA,
    )
    return out if out.dtype == dtype else out.to(dtype), lse


@torch.library.custom_op("smyrf::attend_native_backward", mutates_args=(), device_types="cpu")
def _attend_backward(
    grad: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tensors: Sequence[Tensor],
    layout: Sequence[int],
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
) -> list[Tensor]:
    """Gradients of q, k and v, then of those `tensors` that are not indices."""
    inputs = [q, k, v, *differentiable(tensors)]
    q, k, v, grad = (ready(x) for x in (q, k, v, grad))
    out, lse = out.to(q.dtype).contiguous(), lse.contiguous()
    grads = [x.new_zeros(x.shape, dtype=q.dtype) for x in inputs]
    dq, dk, dv = grads[:3]
    groups = unpack(tensors, layout)
    of_extras = iter(grads[3:])
    dextras = [one.far and (next(of_extras), next(of_extras), next(of_extras)) for one in groups]
    lists, _alive = _lists(groups, q.dtype, dextras)
    native.backward(
        q.dtype == torch.float64,
        _sizes(q, k, v),
        rows(q),
        rows(k),
        rows(v),
        lists,
        scale,
        dropout_p,
        0 if seed is None else int(seed),
        rows(grad),
        out.data_ptr(),
        lse.data_ptr(),
        dq.data_ptr(),
        dk.data_ptr(),
        dv.data_ptr(),
        extension.n_threads(),
        extension.ISA,
    )
    return [d.to(x.dtype) for d, x in zip(grads, inputs, strict=True)]


register(_attend, _attend_backward)


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> list[int]:
    batch, heads, n_queries, width = q.shape
    return [batch, heads, k.shape[1], n_queries, k.shape[2], width, v.shape[3]]


def _lists(
    groups: Sequence[Groups], dtype: torch.dtype, dextras: Sequence[Any] | None = None
) -> tuple[list[list[int]], list[Tensor]]:
    """Lists as numbers, and the tensors that must live as long as these are in use."""
    found, alive = [], []
    for i, one in enumerate(groups):
        _, n_groups, slots, size = one.shape
        queries, keys = (_index(x) for x in (one.queries, one.keys))
        repeats = None if one.multiplicity is None else one.multiplicity.to(torch.int16).contiguous()
        extra = [] if one.far is None else [x.to(dtype).contiguous() for x in one.far[:3]]
        dextra = None if dextras is None else dextras[i]
        alive += [queries, keys, *extra, *([] if repeats is None else [repeats])]
        found.append(
            [
                n_groups,
                slots,
                size,
                one.n_far,
                queries.data_ptr(),
                queries.stride(0),
                keys.data_ptr(),
                keys.stride(0),
                int(one.causal),
                0 if repeats is None else repeats.data_ptr(),
                *([x.data_ptr() for x in extra] or [0, 0, 0]),
                *([0, 0, 0] if dextra is None else [x.data_ptr() for x in dextra]),
            ]
        )
    return found, alive


def _index(x: Tensor) -> Tensor:
    """int32 indices of which each row is contiguous; rows may be the same."""
    if x.dtype != torch.int32:
        x = x.to(torch.int32)
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
