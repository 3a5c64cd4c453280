"""`attend` in C++: fused, O(N) memory, one pass over the groups.

This file prepares the tensors, keeps them alive during the call, and wraps the extension in custom operators, so that
`torch.compile` sees one node.

Shapes: B rows (batch × heads), N queries, M keys, D width, E value width, L groups, C query slots and S key slots
        per group, T far keys of a row, F far keys per group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from smyrf.backends.forward_mode import refuse_forward_mode
from smyrf.backends.native import extension
from smyrf.backends.native.extension import address, narrow, native, ready, rows
from smyrf.backends.operators import differentiable, register
from smyrf.call import Call
from smyrf.grouping.groups import Groups, pack, unpack


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
    params, _alive = _params(q, k, v, unpack(tensors, layout), scale, dropout_p, seed)
    native.attend_forward(params, native.AttendOutput(out=address(out), lse=address(lse)))
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
    params, _alive = _params(q, k, v, unpack(tensors, layout), scale, dropout_p, seed, of_far_keys)
    native.attend_backward(
        params,
        native.AttendGradients(
            grad=rows(grad),
            out=address(out),
            lse=address(lse),
            dq=address(dq),
            dk=address(dk),
            dv=address(dv),
        ),
    )
    return [d.to(x.dtype) for d, x in zip(grads, inputs, strict=True)]


register(_attend, _attend_backward)


def _params(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: Sequence[Groups],
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    grads: Sequence[Tensor] | None = None,
) -> tuple[native.AttendParams, list[Tensor]]:
    """The parameters of a call, and tensors that must live as long as they are in use.

    Args:
        grads: in backward, the gradients of keys, values and biases of all far keys, list by list.
    """
    batch, heads, n_queries, width = q.shape
    _, kv_heads, n_keys, value_width = v.shape
    alive: list[Tensor] = []
    rest = None if grads is None else iter(grads)
    lists = []
    for one in groups:
        _, n_groups, n_query_slots, n_key_slots = one.shape
        queries, keys = _index(one.queries, "queries"), _index(one.keys, "keys")
        multiplicity = one.multiplicity
        if multiplicity is not None:
            multiplicity = narrow(multiplicity, torch.int16, "multiplicity").contiguous()
            alive.append(multiplicity)
        alive += [queries, keys]
        far = None
        if one.far is not None:
            table = [x.to(q.dtype).contiguous() for x in one.far[:3]]
            index = narrow(one.far.of_group, torch.int32, "far keys").contiguous()  # (L, F)
            alive += [*table, index]
            d_keys, d_values, d_bias = (0, 0, 0) if rest is None else (address(next(rest)) for _ in table)
            far = native.FarKeys(
                n_rows=one.far.bias.shape[1],
                n_per_group=one.n_far,
                keys=address(table[0]),
                values=address(table[1]),
                bias=address(table[2]),
                index=address(index),
                d_keys=d_keys,
                d_values=d_values,
                d_bias=d_bias,
            )
        lists.append(
            native.GroupList(
                n_groups=n_groups,
                n_query_slots=n_query_slots,
                n_key_slots=n_key_slots,
                queries=address(queries),
                queries_row_stride=queries.stride(0),
                keys=address(keys),
                keys_row_stride=keys.stride(0),
                causal=one.causal,
                multiplicity=address(multiplicity),
                far=far,
            )
        )
    params = native.AttendParams(
        execution=extension.execution(q.dtype),
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        n_queries=n_queries,
        n_keys=n_keys,
        width=width,
        value_width=value_width,
        q=rows(q),
        k=rows(k),
        v=rows(v),
        lists=lists,
        scale=scale,
        dropout_p=dropout_p,
        seed=0 if seed is None else int(seed),
    )
    return params, alive


def _index(x: Tensor, name: str) -> Tensor:
    """int32 indices ``(B, L, …)`` of which each row is contiguous; all rows may be the same one."""
    x = narrow(x, torch.int32, name)
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
