"""`attend` in C++: fused, O(N) memory, one pass over the groups.

This file prepares the tensors and wraps the extension in custom operators, so that `torch.compile` sees one node.

Shapes: B rows (batch × heads), N queries, M keys, D width, E value width, L groups, C query slots and S key slots
        per group, T far keys of a row, F far keys per group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from smyrf.backends.forward_mode import refuse_forward_mode
from smyrf.backends.native.extension import narrow, native, ready, running
from smyrf.backends.operators import differentiable, register
from smyrf.call import Call
from smyrf.grouping.groups import FarKeys, Groups, pack, unpack


def attend(call: Call, groups: Sequence[Groups]) -> tuple[Tensor, Tensor]:
    """Attention of each query to the keys of its groups (`smyrf.grouping.stages.Attend`)."""
    refuse_forward_mode((call.q, call.k, call.v), "backend='native'", "pass backend='reference'")
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
    native.attend_forward(
        q=q,
        k=k,
        v=v,
        lists=[_group_list(one, q.dtype) for one in unpack(tensors, layout)],
        scale=scale,
        dropout_p=dropout_p,
        seed=0 if seed is None else int(seed),
        out=out,
        lse=lse,
        **running(),
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
    """Gradients of q, k and v, then of the floating-point `tensors`."""
    inputs = [q, k, v, *differentiable(tensors)]
    q, k, v, grad = (ready(x) for x in (q, k, v, grad))
    out, lse = out.to(q.dtype).contiguous(), lse.contiguous()
    grads = [x.new_zeros(x.shape, dtype=q.dtype) for x in inputs]
    dq, dk, dv, *of_far_keys = grads
    rest = iter(of_far_keys)
    native.attend_backward(
        q=q,
        k=k,
        v=v,
        lists=[_group_list(one, q.dtype, rest) for one in unpack(tensors, layout)],
        scale=scale,
        dropout_p=dropout_p,
        seed=0 if seed is None else int(seed),
        out=out,
        lse=lse,
        grad=grad,
        dq=dq,
        dk=dk,
        dv=dv,
        **running(),
    )
    return [d.to(x.dtype) for d, x in zip(grads, inputs, strict=True)]


register(_attend, _attend_backward)


def _group_list(groups: Groups, dtype: torch.dtype, grads: Iterator[Tensor] | None = None) -> native.GroupList:
    """One list as the kernel takes it.

    Args:
        dtype: of q.
        grads: in backward, the gradients of keys, values and biases of far keys, list by list.
    """
    multiplicity, far = groups.multiplicity, groups.far
    return native.GroupList(
        queries=_index(groups.queries, "queries"),
        keys=_index(groups.keys, "keys"),
        causal=groups.causal,
        multiplicity=None if multiplicity is None else narrow(multiplicity, torch.int16, "multiplicity").contiguous(),
        far=None if far is None else _far_keys(far, dtype, grads),
    )


def _far_keys(far: FarKeys, dtype: torch.dtype, grads: Iterator[Tensor] | None) -> native.FarKeys:
    keys, values, bias = (x.to(dtype).contiguous() for x in far[:3])
    d_keys, d_values, d_bias = (None, None, None) if grads is None else (next(grads), next(grads), next(grads))
    return native.FarKeys(
        keys=keys,
        values=values,
        bias=bias,
        index=narrow(far.of_group, torch.int32, "far keys").contiguous(),
        d_keys=d_keys,
        d_values=d_values,
        d_bias=d_bias,
    )


def _index(x: Tensor, name: str) -> Tensor:
    """int32 indices ``(B, L, …)`` of which each row is contiguous; all rows may be the same one."""
    x = narrow(x, torch.int32, name)
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
